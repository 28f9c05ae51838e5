"""Starting ranks, watching them, ending them; and calling functions on them. Names here load when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilemesh.launch.calls import RankError, Ranks, call

__all__ = ["RankError", "Ranks", "call"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("tilemesh.launch.calls"), name)
    raise AttributeError(f"module 'tilemesh.launch' has no attribute '{name}'")
