"""What grouped products cannot do without: every row and every matrix that has rows read once, the results written."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import PASSES, Setting, sized_form

HALVES = ("bfloat16", "float16")
LOADS = ("even", "skewed")


def loads_of(rows: int, groups: int, load: str) -> list[int]:
    """Rows of each group: alike, or falling by half from one to the next until the last ones have none."""
    if load == "even":
        return [(group + 1) * rows // groups - group * rows // groups for group in range(groups)]
    counts, left = [], rows
    for _ in range(groups - 1):
        counts.append(-(-left // 2))
        left -= counts[-1]
    return [*counts, left]


def cost(
    rows: int,
    outputs: int,
    inputs: int,
    groups: int,
    dtype: str = "bfloat16",
    *,
    used: int = 0,
    passes: str = "forward",
) -> Cost:
    """Of so many rows in all; `used`: groups that have any, where that is not each. Backward is two such products."""
    short, size = short_dtype(dtype)
    row, each = size * rows, size * outputs * inputs
    weights = (used or groups) * each
    forward = Cost(2 * rows * outputs * inputs, row * inputs + weights, row * outputs, launches=1, dtype=short)
    if passes == "forward":
        return forward
    of_rows = Cost(forward.flops, row * outputs + weights, row * inputs, launches=1, dtype=short)
    of_weights = Cost(forward.flops, row * (outputs + inputs), groups * each, launches=1, dtype=short)
    return forward + of_rows + of_weights


def _of_load(rows: int, outputs: int, inputs: int, groups: int, dtype: str, *, load: str, passes: str) -> Cost:
    used = sum(count > 0 for count in loads_of(rows, groups, load))
    return cost(rows, outputs, inputs, groups, dtype, used=used, passes=passes)


FORM = sized_form(
    "ROWSxOUTPUTSxINPUTSxGROUPS",
    ("16384x14336x4096x8", "65536x768x2048x128", "65536x1024x2048x64", "32768x2048x768x16"),
    _of_load,
    dtype=Setting(HALVES, "bfloat16"),
    load=Setting(LOADS, "even"),
    passes=PASSES,
)
"""Mixtral-like, 128 experts of 2048 x 768, 64 of 2048 x 1024, 16 of 768 x 2048."""
