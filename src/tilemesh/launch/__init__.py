"""Starting ranks, watching them, ending them; and calling functions on them. Names here load when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilemesh.launch.calls import RankError, Ranks, call
    from tilemesh.launch.serve import this_rank

__all__ = ["RankError", "Ranks", "call", "this_rank"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = "serve" if name == "this_rank" else "calls"
        return getattr(importlib.import_module(f"tilemesh.launch.{module}"), name)
    raise AttributeError(f"module 'tilemesh.launch' has no attribute '{name}'")
