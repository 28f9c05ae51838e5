"""Pictures of digits, 8 × 8, to try small classifiers on without a download.

scikit-learn ships 1,797 handwritten ones (Alpaydin and Kaynak 1998); where it is not installed, as many are drawn: each
digit is a few strokes that are turned, slanted, stretched and moved at random, with noise over them. Which of the two
it is says `source`, and a result names it.
"""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIXELS = 8
_COUNT = 1797
_CIRCLE = [(0.5 + 0.28 * np.sin(t), 0.5 - 0.42 * np.cos(t)) for t in np.linspace(0, 2 * np.pi, 13)]
_STROKES: tuple[list[list[tuple[float, float]]], ...] = (
    [_CIRCLE],
    [[(0.35, 0.28), (0.55, 0.08), (0.55, 0.92)]],
    [[(0.25, 0.25), (0.4, 0.08), (0.65, 0.1), (0.72, 0.3), (0.25, 0.92), (0.78, 0.92)]],
    [[(0.25, 0.12), (0.7, 0.12), (0.45, 0.45), (0.72, 0.62), (0.68, 0.85), (0.45, 0.93), (0.22, 0.85)]],
    [[(0.65, 0.92), (0.65, 0.08), (0.2, 0.65), (0.82, 0.65)]],
    [[(0.75, 0.1), (0.3, 0.1), (0.28, 0.45), (0.6, 0.42), (0.75, 0.65), (0.6, 0.9), (0.25, 0.88)]],
    [[(0.68, 0.1), (0.35, 0.4), (0.28, 0.7), (0.45, 0.92), (0.68, 0.85), (0.7, 0.62), (0.5, 0.5), (0.3, 0.65)]],
    [[(0.22, 0.1), (0.78, 0.1), (0.42, 0.92)], [(0.35, 0.5), (0.7, 0.5)]],
    [[(0.5 + 0.2 * x, 0.28 + 0.2 * y) for x, y in ((0, -1), (1, 0), (0, 1), (-1, 0), (0, -1))],
     [(0.5 + 0.25 * x, 0.7 + 0.22 * y) for x, y in ((0, -1), (1, 0), (0, 1), (-1, 0), (0, -1))]],
    [[(0.7, 0.35), (0.5, 0.5), (0.3, 0.35), (0.35, 0.12), (0.6, 0.08), (0.7, 0.3), (0.6, 0.92)]],
)  # fmt: skip


@dataclass(frozen=True)
class Digits:
    """Pictures with values from 0 to 1, of shape (samples, 8, 8), and their labels; every fifth is held out."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    source: str

    @property
    def is_held_out(self) -> NDArray[np.bool_]:
        return np.asarray(np.arange(len(self.labels)) % 5 == 0)


def load_digits() -> Digits:
    """scikit-learn's handwritten digits, or drawn ones."""
    try:
        bunch: Any = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError:
        return drawn_digits(_COUNT, seed=0)
    order = np.random.default_rng(0).permutation(len(bunch.target))  # as stored, writers follow one another
    images = (bunch.images[order] / 16).astype(np.float32)
    return Digits(images, bunch.target[order].astype(np.int64), "handwritten, from scikit-learn")


def drawn_digits(count: int, seed: int) -> Digits:
    """As many of each digit."""
    draw = np.random.default_rng(seed)
    labels = draw.permutation(np.arange(count) % 10)
    images = np.stack([_picture(_STROKES[label], draw) for label in labels])
    return Digits(images, labels.astype(np.int64), "drawn: scikit-learn, which has handwritten ones, is not installed")


def _picture(strokes: list[list[tuple[float, float]]], draw: np.random.Generator) -> NDArray[np.float32]:
    """How near each pixel is to a stroke."""
    angle, slant = draw.normal(0, 0.12), draw.normal(0, 0.15)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    change = turn @ np.array([[1, slant], [0, 1]]) @ np.diag(draw.uniform(0.8, 1.1, 2))
    shift, width = draw.normal(0, 0.04, 2), draw.uniform(0.07, 0.11)
    pixels = (np.stack(np.meshgrid(np.arange(PIXELS), np.arange(PIXELS)), axis=-1) + 0.5) / PIXELS
    nearest = np.full((PIXELS, PIXELS), np.inf)
    for stroke in strokes:
        points = (np.array(stroke) - 0.5 + draw.normal(0, 0.02, (len(stroke), 2))) @ change.T + 0.5 + shift
        for begin, end in itertools.pairwise(points):
            along = np.clip((pixels - begin) @ (end - begin) / max(float((end - begin) @ (end - begin)), 1e-9), 0, 1)
            nearest = np.minimum(nearest, np.linalg.norm(pixels - begin - along[..., None] * (end - begin), axis=-1))
    ink = np.exp(-((nearest / width) ** 2)) + draw.normal(0, 0.05, nearest.shape)
    return np.clip(ink, 0, 1).astype(np.float32)
