"""Programs as data: an IR, its derivatives, rewrites and memory plans, and the way from and to PyTorch.

`ir`, `build`, `derive`, `rewrite` and `memory` are plain Python; torch loads with `trace`, `program` or `Backend`.
"""

from __future__ import annotations

from tilemesh.core.packages import names_on_use
from tilemesh.graph.ir import Graph, Node, make

_LAZY = {
    "Backend": "backend",
    "export": "tracing",
    "program": "emit",
    "run_numpy": "evaluate",
    "run_torch": "by_torch",
    "simplify": "rules",
    "trace": "tracing",
}

__getattr__ = names_on_use(__name__, _LAZY)
__all__ = ["Graph", "Node", "make", *_LAZY]
