"""Starting ranks, watching them, ending them; and calling functions on them. Names here load when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilemesh.core.packages import names_on_use

if TYPE_CHECKING:
    from tilemesh.launch.calls import RankError, Ranks, call
    from tilemesh.launch.serve import this_rank

_WHERE = {"RankError": "calls", "Ranks": "calls", "call": "calls", "this_rank": "serve"}
__getattr__ = names_on_use(__name__, _WHERE)
__all__ = ["RankError", "Ranks", "call", "this_rank"]
