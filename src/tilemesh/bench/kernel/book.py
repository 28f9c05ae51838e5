"""Which benchmark an operator has: one of this folder where it has peers of its own, else the value in its package."""

from __future__ import annotations

import importlib
from typing import Any

from tilemesh.kernels.operator_bench import OperatorBench
from tilemesh.kernels.registry import OperatorEntry

_OWN = ("matmul", "attention", "self_attention", "adamw")


def bench_of(entry: OperatorEntry) -> OperatorBench[Any]:
    if entry.bench is None and entry.name in _OWN:
        bench: OperatorBench[Any] = importlib.import_module(f"tilemesh.bench.kernel.{entry.name}").BENCH
    else:
        bench = entry.load("bench")
    return bench
