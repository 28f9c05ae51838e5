"""Attention drawn with its numbers: scores, the causal mask, weights, and the weighted sum of values."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilemesh.guide.svg import Canvas

Array = np.ndarray[Any, Any]
TOKENS, WIDTH = 5, 4
CELL = 40


def figures() -> dict[str, str]:
    """By file name, for `docs/guide/figures/`."""
    return {"attention.svg": attention()}


def computed() -> dict[str, Array]:
    """One head on five tokens: q·kᵀ/√d, the same with later tokens at -∞, softmax of each row, weights·v."""
    random = np.random.default_rng(11)
    q, k, v = (random.normal(size=(TOKENS, WIDTH)) for _ in range(3))
    scores = q @ k.T / np.sqrt(WIDTH)
    masked = np.where(np.tri(TOKENS, dtype=bool), scores, -np.inf)
    weights = np.exp(masked - masked.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return {"scores": scores, "masked": masked, "weights": weights, "output": weights @ v}


def attention() -> str:
    """Four matrices beside each other; a row is a token that asks."""
    values = computed()
    words = {
        "scores": "scores q·kᵀ/√d",
        "masked": "later tokens at -∞",
        "weights": "softmax of each row",
        "output": "weights · v",
    }
    canvas = Canvas(920, 320, f"Causal attention of one head on {TOKENS} tokens, with its numbers")
    x = 76
    for name, matrix in values.items():
        canvas.text(x, 58, words[name], bold=True)
        for row in range(TOKENS):
            if name == "scores":
                canvas.text(x - 10, 94 + row * CELL, f"token {row}", align="end", quiet=True, size=11)
            for column in range(matrix.shape[1]):
                value = matrix[row, column]
                is_strong = np.isfinite(value) and abs(value) >= (0.3 if name == "weights" else 0.8)
                colour = 6 if not np.isfinite(value) else 2 if name == "output" else 1 if value < 0 else 0
                shown = f"{value:.2f}" if np.isfinite(value) else "-∞"
                canvas.box(
                    x + column * CELL,
                    70 + row * CELL,
                    CELL - 3,
                    CELL - 3,
                    shown,
                    colour=colour,
                    pale=not is_strong,
                    size=11,
                )
        x += matrix.shape[1] * CELL + 22
    note = "A row of weights adds up to 1; a token reads only itself and those before it: token 0 copies its own value."
    canvas.text(76, 296, note, quiet=True, size=11)
    return canvas.svg()
