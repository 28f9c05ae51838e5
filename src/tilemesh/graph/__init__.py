"""Programs as data: an IR, its derivatives, rewrites and memory plans, and the way from and to PyTorch.

`ir`, `build`, `derive`, `rewrite` and `memory` are plain Python; torch loads with `trace`, `program` or `Backend`.
"""

from __future__ import annotations

import importlib
from typing import Any

from tilemesh.graph.ir import Graph, Node, make

_LAZY = {
    "Backend": "backend",
    "PlannedProgram": "planned",
    "export": "tracing",
    "program": "emit",
    "run_numpy": "evaluate",
    "run_torch": "by_torch",
    "simplify": "rules",
    "trace": "tracing",
}

__all__ = ["Graph", "Node", "make", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"tilemesh.graph.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'tilemesh.graph' has no attribute '{name}'")
