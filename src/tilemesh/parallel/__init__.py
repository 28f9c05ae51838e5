"""A model laid on a mesh of ranks. Names load when first used, so that importing this package costs nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilemesh.core.shard import Shard
    from tilemesh.parallel.apply import lay
    from tilemesh.parallel.laid import Laid
    from tilemesh.parallel.mesh import Axis, Mesh
    from tilemesh.parallel.shard import ColumnSplit, Region, RowSplit, VocabularySplit, split_data

_WHERE = {
    "Axis": "tilemesh.parallel.mesh",
    "ColumnSplit": "tilemesh.parallel.shard",
    "Laid": "tilemesh.parallel.laid",
    "Mesh": "tilemesh.parallel.mesh",
    "Region": "tilemesh.parallel.shard",
    "RowSplit": "tilemesh.parallel.shard",
    "Shard": "tilemesh.core.shard",
    "VocabularySplit": "tilemesh.parallel.shard",
    "lay": "tilemesh.parallel.apply",
    "split_data": "tilemesh.parallel.shard",
}

__all__ = ["Axis", "ColumnSplit", "Laid", "Mesh", "Region", "RowSplit", "Shard", "VocabularySplit", "lay", "split_data"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        # Stored, so that the next use finds it without coming here.
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tilemesh.parallel' has no attribute '{name}'")
