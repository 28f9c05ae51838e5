"""tilemesh: plan, run, measure and explain Transformer training, from one GPU tile to a mesh of ranks.

Subpackages load when first used, so that `import tilemesh` costs nothing and needs neither torch nor MPI.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_SUBPACKAGES = (
    "align",
    "comm",
    "compress",
    "core",
    "graph",
    "kernels",
    "launch",
    "measure",
    "model",
    "parallel",
    "plan",
    "serve",
    "train",
)

__all__ = ["Mesh", "__version__", *_SUBPACKAGES]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"tilemesh.{name}")
    if name == "Mesh":
        return importlib.import_module("tilemesh.parallel.mesh").Mesh
    raise AttributeError(f"module 'tilemesh' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
