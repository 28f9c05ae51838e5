"""Training: the loop, its data, its checkpoints and its faults. Names here load when first used.

`fit(config)` trains; `preview(config)` says what it would do; `load_config(...)` makes a config from a preset, a file
and settings; `fit(config, on_event=Shown())` prints what happens meanwhile.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tilemesh.core.packages import offer_functions

if TYPE_CHECKING:
    from tilemesh.train.config import TrainConfig
    from tilemesh.train.job import fit
    from tilemesh.train.load import load as load_config
    from tilemesh.train.preview import Preview, preview
    from tilemesh.train.progress import Shown
    from tilemesh.train.result import RanksFailedError, Result, WeightsLostError

_WHERE = {
    "RanksFailedError": ("tilemesh.train.result", "RanksFailedError"),
    "WeightsLostError": ("tilemesh.train.result", "WeightsLostError"),
    "Result": ("tilemesh.train.result", "Result"),
    "Shown": ("tilemesh.train.progress", "Shown"),
    "TrainConfig": ("tilemesh.train.config", "TrainConfig"),
    "fit": ("tilemesh.train.job", "fit"),
    "Preview": ("tilemesh.train.preview", "Preview"),
    "preview": ("tilemesh.train.preview", "preview"),
    "load_config": ("tilemesh.train.load", "load"),
}

__all__ = [
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
offer_functions(__name__, frozenset({"preview"}))


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        module, attribute = _WHERE[name]
        # Stored, so that the next use finds it without coming here.
        value = getattr(importlib.import_module(module), attribute)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tilemesh.train' has no attribute '{name}'")
