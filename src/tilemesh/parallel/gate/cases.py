"""What the gate compares: small models that have everything, the layouts of n ranks, and the bounds. Plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.plan import ParallelPlan, Precision
from tilemesh.core.shard import share
from tilemesh.model.config import ModelConfig

STEPS = 3
ROWS = 18  # a step's batch: no replica count divides it, so replicas hold unequal numbers of rows
TOKENS = 10  # not divisible by 4 or 8: sequence shards are uneven
MAX_NORM = 0.5  # below the gradients' norms, so that clipping is part of what is compared
RATE = 0.2
BOUND = 1e-10  # relative, on whole-model norms, in float64
ORDER_FACTOR = 2.0  # in other precisions: so many times what another order of summation alone does
OPERATIONS = 30
"""That round in a layer: ten forwards (norms, products, softmax, activation, residuals), twice as many backwards."""
PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "bf16")

_SMALL: dict[str, Any] = {"layers": 2, "width": 32, "heads": 8, "mlp_width": 48, "context": 12, "dropout": 0.1}
_ROTARY: dict[str, Any] = {"norm": "rmsnorm", "positions": "rotary", "tied": False}

# Between them: both norms, both places, both positions, all MLPs, with and without biases, tied and not, one, some and
# all kv heads (fewer than ranks and not), a vocabulary that divides and ones that do not.
MODELS: Mapping[str, ModelConfig] = {
    "gpt": ModelConfig(**_SMALL, vocabulary=61),
    "llama": ModelConfig(**_SMALL, **_ROTARY, vocabulary=64, kv_heads=2, activation="swiglu", biases=False),
    "post": ModelConfig(**_SMALL, vocabulary=37, kv_heads=4, norm_place="post", activation="relu"),
    "query": ModelConfig(**_SMALL, **_ROTARY, vocabulary=50, kv_heads=1, norm_place="post"),
}


@dataclass(frozen=True)
class GateLayout:
    dp: int = 1
    tp: int = 1
    sequence: bool = False
    accumulation: int = 1
    zero: int = 0
    zero_group: int = 0

    @property
    def ranks(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        more = " sequence" * self.sequence + f" ×{self.accumulation}" * (self.accumulation > 1)
        if self.zero:
            more += f" ZeRO-{self.zero}" + f" by {self.zero_group}" * (self.zero_group > 0)
        return f"dp={self.dp} tp={self.tp}{more}"

    def plan(self, precision: Precision) -> ParallelPlan:
        return ParallelPlan(
            dp=self.dp,
            tp=self.tp,
            sequence_parallel=self.sequence,
            accumulation=self.accumulation,
            zero=self.zero,
            zero_group=self.zero_group,
            precision=precision,
        )


@dataclass(frozen=True)
class Case:
    model: str
    layout: GateLayout
    precision: Precision = "fp64"


def microbatches(layout: GateLayout, dp_index: int) -> list[tuple[int, int]]:
    """(first row, rows) of each microbatch of a replica: contiguous, of sizes that differ by at most one."""
    first, count = share(ROWS, layout.dp, dp_index)
    turns = (share(count, layout.accumulation, turn) for turn in range(layout.accumulation))
    return [(first + row, rows) for row, rows in turns]


def layouts(ranks: int) -> list[GateLayout]:
    """Every dp × tp of so many ranks, with and without sequence parallelism, in one microbatch and in two."""
    found = []
    for tp in (n for n in range(1, ranks + 1) if ranks % n == 0):
        for sequence in (False, True) if tp > 1 else (False,):
            found += [GateLayout(ranks // tp, tp, sequence, accumulation) for accumulation in (1, 2)]
    return found


def cases(ranks: int, models: Sequence[str] = (), precision: str = "fp64") -> list[Case]:
    """All layouts of 1, 2, 4, … up to `ranks` ranks, for each model that they can hold."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    for name in models:
        if name not in MODELS:
            raise unknown("model of the gate", name, MODELS)
    if ranks < 1 or ranks & (ranks - 1) or ranks > 8:
        raise UsageError(f"{ranks} ranks: the gate's models have 8 heads; give 1, 2, 4 or 8")
    chosen = next(name for name in PRECISIONS if name == precision)
    counts = [n for n in (8, 4, 2, 1) if n <= ranks]
    return [Case(name, layout, chosen) for n in counts for layout in layouts(n) for name in models or MODELS]
