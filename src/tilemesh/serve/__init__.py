"""Serving: an engine that generates text for many requests at once. Names here load when first used.

`Engine("runs/…")` answers prompts (`generate`, `stream`, `abort`); `Sampling` says how; `generate` writes one text.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilemesh.serve.answers import Answer, Completion
    from tilemesh.serve.config import EngineConfig
    from tilemesh.serve.engine import Engine
    from tilemesh.serve.request import Sampling
    from tilemesh.serve.scheduler import QueueFullError
    from tilemesh.serve.write import generate

_WHERE = {
    "Answer": "tilemesh.serve.answers",
    "Completion": "tilemesh.serve.answers",
    "Engine": "tilemesh.serve.engine",
    "EngineConfig": "tilemesh.serve.config",
    "QueueFullError": "tilemesh.serve.scheduler",
    "Sampling": "tilemesh.serve.request",
    "generate": "tilemesh.serve.write",
}

__all__ = ["Answer", "Completion", "Engine", "EngineConfig", "QueueFullError", "Sampling", "generate"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        # Stored, so that the next use finds it without coming here.
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tilemesh.serve' has no attribute '{name}'")
