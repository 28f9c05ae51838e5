"""Learning from feedback: rollouts, rewards, advantages, losses. Names here load when first used.

`fit(load("runs/…", sets=["align.task=sort"]), "runs/…")` improves a model by what its answers are worth. `formulas/`
has the arithmetic as pure functions over arrays, and algorithms as rows of choices among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilemesh.core.packages import names_on_use

if TYPE_CHECKING:
    from tilemesh.align.config import AlignConfig, FeedbackConfig, load
    from tilemesh.align.job import fit

_WHERE = {"AlignConfig": "config", "FeedbackConfig": "config", "fit": "job", "load": "config"}

__getattr__ = names_on_use(__name__, _WHERE)
__all__ = ["AlignConfig", "FeedbackConfig", "fit", "load"]
