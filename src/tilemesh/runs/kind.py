"""What kind of run a folder is of: a plain value, written into run.json when the folder is made.

There is no list of kinds to add to: a new kind is a `Kind` beside the code that writes such runs. `TRAIN` is here
because the planner grades training runs and must not import training, `ALIGN`, `SERVE` and `COMPRESS` because their
pages are in `report/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilemesh.core.errors import RunError, UsageError

_NAME = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True)
class Kind:
    """A kind of run. `summary`: the keys that its summary.json must have, for whoever reads it later."""

    name: str
    summary: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"a kind of run is named {self.name!r}: expected lower-case letters, such as 'train'")

    def check_summary(self, summary: Mapping[str, Any], source: str) -> None:
        """Refuse a summary that lacks a key of this kind."""
        for key in self.summary:
            if key not in summary:
                raise RunError(
                    f"'{source}' has no '{key}': the summary of a {self.name} run needs {', '.join(self.summary)}"
                )


TRAIN = Kind("train", summary=("model", "plan", "cluster"))
SERVE = Kind("serve", summary=("model", "points"))
COMPRESS = Kind("compress", summary=("model", "points"))
ALIGN = Kind("align", summary=TRAIN.summary)
"""A training run that learns from feedback: it has all that one of kind `train` has."""
MODULE = Kind("module", summary=("module", "plan", "cluster"))
"""A training run of a module that is no Transformer of ours, placed on a mesh."""
TRAINED = (TRAIN, ALIGN)
"""Kinds whose folders have a training configuration and checkpoints."""
