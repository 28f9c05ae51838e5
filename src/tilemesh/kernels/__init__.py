"""COMPUTE: one folder an operator. Names load when first used, so that importing this package costs nothing."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "fused_matmul": "tilemesh.kernels.matmul.op",
    "FusedLinear": "tilemesh.kernels.modules",
    "Config": "tilemesh.kernels.matmul.config",
}

__all__ = ["Config", "FusedLinear", "fused_matmul"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        # Kept, so that the next look-up is a plain attribute: a small matmul takes no longer than this function.
        globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return globals()[name]
    raise AttributeError(f"module 'tilemesh.kernels' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
