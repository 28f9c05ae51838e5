"""tilemesh: plan, run, measure and explain Transformer training and serving, from one GPU tile to a mesh of ranks.

Subpackages load when first used, so that `import tilemesh` costs nothing and needs neither torch nor MPI.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__version__ = "0.2.0"

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


SHOWN = (
    ("tilemesh.plan.choose", "SearchResult"),
    ("tilemesh.train.result", "Result"),
    ("tilemesh.measure.row", "Row"),
    ("tilemesh.parallel.placed", "PlacedModule"),
)
"""What shows itself as HTML in a notebook, by the names of modules and types: none of them is loaded for it."""


def load_ipython_extension(shell: Any) -> None:
    """Jupyter shows these values as pages; done by itself where tilemesh is imported in a notebook."""

    def show(value: Any) -> str:
        return str(importlib.import_module("tilemesh.report.notebook").show(value))

    for module, name in SHOWN:
        shell.display_formatter.formatters["text/html"].for_type_by_name(module, name, show)


if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) is not None:
    load_ipython_extension(shell)
