"""Operators by name: where each one's reference, public function, cost and, if it has them, tuner and benchmark are.

Commands and tests find operators here. Everything is named as `package.module:name` and imported when it is asked for,
so this file needs neither torch nor Triton. A new operator adds one entry to `_OPERATORS`; a package of its own calls
`register`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from tilemesh.core.errors import UsageError, unknown


@dataclass(frozen=True)
class OperatorEntry:
    """One operator. `public` is what `tilemesh.kernels.<name of the function>` gives."""

    name: str
    public: str
    reference: str
    cost: str
    tuner: str | None = None  # a tuning.operator.Tunable
    bench: str | None = None  # rows beside peers, on a GPU
    example: str | None = None  # arguments for tests: (rows, columns, dtype, device)

    def load(self, part: str) -> Any:
        """The object that a part (`public`, `reference`, `cost`, …) names."""
        path = getattr(self, part)
        if path is None:
            having = [entry.name for entry in _operators.values() if getattr(entry, part) is not None]
            raise UsageError(f"operator '{self.name}' has no {part}; these have: {', '.join(having) or 'none'}")
        module, _, name = path.partition(":")
        return getattr(importlib.import_module(module), name)


def _folder(name: str, **parts: str) -> OperatorEntry:
    """An operator of three files: its function is decorated in reference.py and named like the folder."""
    home = f"tilemesh.kernels.{name}"
    return OperatorEntry(name, f"{home}.reference:{name}", f"{home}.reference:{name}", f"{home}.cost:cost", **parts)


_MATMUL = "tilemesh.kernels.matmul"
_NORM = "tilemesh.kernels.norm"
_OPERATORS = (
    OperatorEntry(
        "matmul",
        public=f"{_MATMUL}.op:fused_matmul",
        reference=f"{_MATMUL}.reference:fused_matmul",
        cost=f"{_MATMUL}.cost:cost",
        tuner=f"{_MATMUL}.tuning:TUNING",
        bench=f"{_MATMUL}.bench:bench_matmul",
    ),
    _folder("scale_shift", example="tilemesh.kernels.scale_shift.reference:example"),
    _folder("cross_entropy", example="tilemesh.kernels.cross_entropy.reference:example"),
    _folder("linear_cross_entropy", example="tilemesh.kernels.linear_cross_entropy.reference:example"),
    _folder("softmax", example="tilemesh.kernels.softmax.reference:example"),
    *(
        OperatorEntry(
            name,
            public=f"{_NORM}.reference:{name}",
            reference=f"{_NORM}.reference:{name}",
            cost=f"{_NORM}.cost:{added}cost",
            example=f"{_NORM}.reference:{added}example",
        )
        for name, added in (("rms_norm", ""), ("layer_norm", ""), ("add_rms_norm", "add_"), ("add_layer_norm", "add_"))
    ),
)
_operators = {entry.name: entry for entry in _OPERATORS}


def names() -> list[str]:
    return list(_operators)


def find(name: str) -> OperatorEntry:
    if name not in _operators:
        raise unknown("operator", name, names())
    return _operators[name]


def register(entry: OperatorEntry) -> None:
    """Add an operator from outside of this package."""
    if entry.name in _operators:
        raise UsageError(f"operator '{entry.name}' is there already: choose another name")
    _operators[entry.name] = entry


def public_functions() -> dict[str, str]:
    """Where `tilemesh.kernels.<function>` is, by the function's name."""
    return {entry.public.partition(":")[2]: entry.public for entry in _operators.values()}
