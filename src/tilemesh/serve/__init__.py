"""Serving: an engine that generates text for many requests at once. Names here load when first used.

`Engine("runs/…")` answers prompts (`generate`, `stream`, `abort`); `Sampling` says how; `generate` writes one text.
`Replicas` are several engines used as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilemesh.core.packages import names_on_use

if TYPE_CHECKING:
    from tilemesh.serve.answers import Answer, Completion
    from tilemesh.serve.config import EngineConfig
    from tilemesh.serve.engine import Engine
    from tilemesh.serve.replicas import Replicas
    from tilemesh.serve.request import Sampling
    from tilemesh.serve.scheduler import QueueFullError
    from tilemesh.serve.write import generate

_WHERE = {
    "Answer": "answers",
    "Completion": "answers",
    "Engine": "engine",
    "EngineConfig": "config",
    "QueueFullError": "scheduler",
    "Replicas": "replicas",
    "Sampling": "request",
    "generate": "write",
}

__getattr__ = names_on_use(__name__, _WHERE)
__all__ = ["Answer", "Completion", "Engine", "EngineConfig", "QueueFullError", "Replicas", "Sampling", "generate"]
