"""A model laid on a mesh of ranks. Names load when first used, so that importing this package costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilemesh.core.packages import names_on_use

if TYPE_CHECKING:
    from tilemesh.core.shard import Shard
    from tilemesh.parallel.apply import lay
    from tilemesh.parallel.laid import Laid
    from tilemesh.parallel.mesh import Axis, Mesh
    from tilemesh.parallel.placed import PlacedModule, place
    from tilemesh.parallel.shard import ColumnSplit, Region, RowSplit, VocabularySplit, split_data
    from tilemesh.parallel.staged import StagedModule, stage

_WHERE = {
    "Axis": "mesh",
    "ColumnSplit": "shard",
    "Laid": "laid",
    "Mesh": "mesh",
    "PlacedModule": "placed",
    "Region": "shard",
    "RowSplit": "shard",
    "Shard": "tilemesh.core.shard",
    "StagedModule": "staged",
    "VocabularySplit": "shard",
    "lay": "apply",
    "place": "placed",
    "split_data": "shard",
    "stage": "staged",
}

__getattr__ = names_on_use(__name__, _WHERE)
__all__ = [
    "Axis",
    "ColumnSplit",
    "Laid",
    "Mesh",
    "PlacedModule",
    "Region",
    "RowSplit",
    "Shard",
    "StagedModule",
    "VocabularySplit",
    "lay",
    "place",
    "split_data",
    "stage",
]
