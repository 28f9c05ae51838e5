"""Operators by name: where each one's function, reference, cost, form of problems, benchmark and tuner are.

Commands and tests find operators here. Everything is named as `package.module:name` and imported when it is asked for,
so this file needs neither torch nor Triton. A new operator adds one entry to `_OPERATORS`; one of another package joins
by an entry point of the group `tilemesh.operators` that names its `OperatorEntry`, or by `register`.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, replace
from typing import Any

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.packages import entry_points_of

GROUP = "tilemesh.operators"
"""Of entry points in other packages."""


@dataclass(frozen=True)
class OperatorEntry:
    """One operator. `public` is what `tilemesh.kernels.<name of the function>` gives."""

    name: str
    public: str
    reference: str
    cost: str
    form: str | None = None  # a problems.ProblemForm: how its problems are written
    bench: str | None = None  # an operator_bench.OperatorBench; None where tilemesh.bench.kernel has it
    tuner: str | None = None  # a tuning.operator.Tunable; None where there is nothing to choose

    def load(self, part: str) -> Any:
        """The object that a part (`public`, `reference`, `cost`, …) names."""
        path = getattr(self, part)
        if path is None:
            having = ", ".join(entry.name for entry in _operators.values() if getattr(entry, part) is not None)
            lacks = "nothing to tune" if part == "tuner" else f"no {part}"
            raise UsageError(f"operator '{self.name}' has {lacks}; these have: {having or 'none'}")
        module, _, name = path.partition(":")
        return getattr(importlib.import_module(module), name)


def folder(name: str, home: str = "", file: str = "reference") -> OperatorEntry:
    """An operator of three files in the package `home`: `file` has its function and BENCH, cost.py has FORM.

    Where several operators share a package, theirs are NAME_BENCH and NAME_FORM.
    """
    shared = f"{name.upper()}_" if home and home.rpartition(".")[2] != name else ""
    home = home or f"tilemesh.kernels.{name}"
    reference, cost = f"{home}.{file}", f"{home}.cost"
    function = f"{reference}:{name}"
    parts = {"form": f"{cost}:{shared}FORM", "bench": f"{reference}:{shared}BENCH"}
    return OperatorEntry(name, function, function, f"{cost}:cost", **parts)


_MATMUL = "tilemesh.kernels.matmul"
_NORM = "tilemesh.kernels.norm"
_GATED = "tilemesh.kernels.gated"
_FEW = "tilemesh.kernels.few_linear"
_LOWBIT = "tilemesh.kernels.lowbit_linear"
_ROUTING = "tilemesh.kernels.routing"
_OPERATORS = (
    OperatorEntry(
        "matmul",
        public=f"{_MATMUL}.op:fused_matmul",
        reference=f"{_MATMUL}.reference:fused_matmul",
        cost=f"{_MATMUL}.cost:cost",
        form=f"{_MATMUL}.cost:FORM",
        tuner=f"{_MATMUL}.tuning:TUNING",
    ),
    folder("scale_shift"),
    folder("softmax"),
    folder("rms_norm", _NORM),
    folder("layer_norm", _NORM),
    folder("add_rms_norm", _NORM),
    folder("add_layer_norm", _NORM),
    folder("cross_entropy"),
    folder("linear_cross_entropy"),
    folder("embedding"),
    folder("mlp"),
    replace(folder("attention"), bench=None),
    replace(folder("self_attention", "tilemesh.kernels.attention", "joined"), bench=None),
    folder("paged_attention"),
    folder("rotary"),
    folder("row_linear"),
    folder("norm_row_linear", "tilemesh.kernels.row_linear"),
    folder("few_linear", _FEW),
    folder("grouped_linear"),
    replace(folder("route_tokens", _ROUTING), cost=f"{_ROUTING}.cost:route_cost"),
    folder("permute_rows", _ROUTING),
    replace(folder("unpermute_rows", _ROUTING), cost=f"{_ROUTING}.cost:unpermute_cost"),
    folder("parts_rms_norm", _FEW),
    folder("lowbit_linear"),
    folder("norm_lowbit_linear", _LOWBIT),
    replace(
        folder("grouped_lowbit_linear", _LOWBIT, "grouped"),
        cost=f"{_LOWBIT}.cost:grouped_cost",
        bench=f"{_LOWBIT}.grouped:BENCH",
    ),
    folder("likeliest"),
    folder("scaled_matmul"),
    folder("swiglu", _GATED),
    folder("geglu", _GATED),
    replace(folder("adamw"), bench=None),
)
_operators = {entry.name: entry for entry in _OPERATORS}


def names() -> list[str]:
    _join_packages()
    return list(_operators)


def find(name: str) -> OperatorEntry:
    if name not in _operators and name not in names():
        raise unknown("operator", name, names())
    return _operators[name]


def find_function(function: str) -> OperatorEntry | None:
    """The operator whose public function has this name, as a row's `name` says it."""
    if function not in public_functions():
        _join_packages()
    return next((entry for entry in _operators.values() if entry.public.partition(":")[2] == function), None)


@functools.cache
def _join_packages() -> None:
    """Register what installed packages offer; looked for once, when a name is not one of ours or all are listed."""
    for entry in entry_points_of(GROUP, OperatorEntry):
        register(entry)


def register(entry: OperatorEntry) -> None:
    """Add an operator from outside of this package."""
    if entry.name in _operators:
        raise UsageError(f"operator '{entry.name}' is there already: choose another name")
    _operators[entry.name] = entry


def public_functions() -> dict[str, str]:
    """Where `tilemesh.kernels.<function>` is, by the function's name."""
    return {entry.public.partition(":")[2]: entry.public for entry in _operators.values()}
