"""Training: the loop, its data, its checkpoints and its faults. Names here load when first used.

`fit(config)` trains; `preview(config)` says what it would do; `load_config(...)` makes a config from a preset, a file
and settings; `fit(config, on_event=Shown())` prints what happens meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilemesh.core.packages import names_on_use

if TYPE_CHECKING:
    from tilemesh.train.config import TrainConfig
    from tilemesh.train.job import fit
    from tilemesh.train.load import load as load_config
    from tilemesh.train.placed import PlacedCheckpoints
    from tilemesh.train.preview import Preview, preview
    from tilemesh.train.progress import Shown
    from tilemesh.train.result import RanksFailedError, Result, WeightsLostError

_WHERE = {
    "PlacedCheckpoints": "placed",
    "Preview": "preview", "RanksFailedError": "result", "Result": "result", "Shown": "progress",
    "TrainConfig": "config", "WeightsLostError": "result", "fit": "job", "load_config": "load:load",
    "preview": "preview",
}  # fmt: skip

__getattr__ = names_on_use(__name__, _WHERE)
__all__ = [
    "PlacedCheckpoints",
    "Preview",
    "RanksFailedError",
    "Result",
    "Shown",
    "TrainConfig",
    "WeightsLostError",
    "fit",
    "load_config",
    "preview",
]
