"""Predict and choose: arithmetic, memory and time of a layout, and the search over layouts. Never torch."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "search": "choose",
    "SearchResult": "choose",
    "Pins": "space",
    "Estimator": "step",
    "Prediction": "prediction",
    "predict": "step",
}

__all__ = ["Estimator", "Pins", "Prediction", "SearchResult", "predict", "search"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"tilemesh.plan.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'tilemesh.plan' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
