"""Predict and choose: arithmetic, memory and time of a layout, and the search over layouts. Never torch."""

from __future__ import annotations

from tilemesh.core.packages import names_on_use

_WHERE = {
    "search": "choose",
    "SearchResult": "choose",
    "Pins": "space",
    "Estimator": "step",
    "Prediction": "prediction",
    "predict": "step",
}

__getattr__ = names_on_use(__name__, _WHERE)
__all__ = ["Estimator", "Pins", "Prediction", "SearchResult", "predict", "search"]


def __dir__() -> list[str]:
    return sorted(__all__)
