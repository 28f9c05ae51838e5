"""What `tilemesh bench kernel` is to measure: operators, shapes and settings, read and refused without torch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels import registry
from tilemesh.kernels.matmul.problem import LAYOUTS

ALL = "all"
_LARGEST, _COMMON, _MULTIPLES = 16_384, 64, (64, 64, 8, 1)
_WIDEST, _MOST_ROWS, _MOST_ELEMENTS = 131_072, 1_000_000, 2**27


@dataclass(frozen=True)
class KernelCase:
    """One problem of one operator, in the words of the command line."""

    operator: str
    shape: str
    settings: Mapping[str, str]

    @property
    def words(self) -> str:
        return " ".join([self.operator, self.shape, *self.settings.values()])


def cases_of(
    operators: Sequence[str], shapes: Sequence[str] = (), settings: Mapping[str, str] | None = None, dtypes: str = ""
) -> list[KernelCase]:
    """Every problem asked for. shapes: each operator's suite where none is given. dtypes: names with commas between.

    `all` stands for every operator, each forward and, where it has one, with its backward pass. Where several are
    asked for, a setting is for those that have it.
    """
    names = registry.names() if ALL in operators else list(operators)
    wanted, cases = dict(settings or {}), []
    known = {name: registry.find(name).load("form") for name in names}
    for setting in wanted if len(names) > 1 else ():
        if not any(setting in form.settings for form in known.values()):
            raise unknown(
                "setting of these operators", setting, {name: 0 for f in known.values() for name in f.settings}
            )
    for name, form in known.items():
        own = {key: value for key, value in wanted.items() if len(names) == 1 or key in form.settings}
        each = [{**own, "dtype": dtype.strip()} for dtype in dtypes.split(",")] if dtypes else [own]
        if ALL in operators and "passes" in form.settings and "passes" not in own:
            each = [{**values, "passes": passes} for values in each for passes in form.settings["passes"].known]
        for values in each:
            for shape in shapes or form.suite:
                form.problem(shape, values)
                cases.append(KernelCase(name, shape, values))
    return cases


def drawn_cases(operators: Sequence[str], count: int, skip: int = 0) -> list[KernelCase]:
    """So many random problems of each operator, after the first ones of a sequence that is always the same."""
    cases: list[KernelCase] = []
    for name in operators:
        form = registry.find(name).load("form")
        if name == "matmul":
            cases += drawn_matmuls(skip + count)[skip:]
        elif form.sizes == "ROWSxCOLUMNS":
            cases += drawn_rows(name, form.settings["passes"].known, skip + count)[skip:]
        else:
            raise UsageError(f"--drawn draws problems of matmul and of operators over rows, not of {name}")
    return cases


def drawn_rows(operator: str, passes: Sequence[str], count: int, seed: int = 0) -> list[KernelCase]:
    """Rows of any width: both sizes even in their logarithm, whatever divides them, up to half a gigabyte."""
    chance = random.Random(f"{operator} {seed}")
    cases = []
    for _ in range(count):
        columns = round(_WIDEST ** chance.random())
        rows = round(min(_MOST_ROWS, _MOST_ELEMENTS // columns) ** chance.random())
        settings = {"dtype": chance.choice(("bfloat16", "float16", "float32")), "passes": chance.choice(passes)}
        cases.append(KernelCase(operator, f"{rows}x{columns}", settings))
    return cases


def drawn_matmuls(count: int, seed: int = 0) -> list[KernelCase]:
    """Products that nobody tuned, the same for the same seed: float16 or bfloat16, C of D's shape, and relu.

    Sizes are even in their logarithm, seven in ten from 64 up; half of the shapes are multiples of 64, a quarter of 8.
    The model that `auto` asks was learnt from other seeds than 0.
    """
    chance = random.Random(seed)

    def side(multiple: int) -> int:
        least = 1 if chance.random() < 0.3 else _COMMON
        size = round(least * (_LARGEST / least) ** chance.random())
        return max(1, size) if multiple == 1 or size < multiple else round(size / multiple) * multiple

    cases = []
    for _ in range(count):
        multiple = chance.choice(_MULTIPLES)
        shape = "x".join(str(side(multiple)) for _ in range(3))
        layout, dtype = chance.choice(LAYOUTS), chance.choice(("float16", "bfloat16"))
        cases.append(KernelCase("matmul", shape, {"dtype": dtype, "layout": layout}))
    return cases
