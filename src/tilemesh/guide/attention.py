"""Drawings with their numbers: attention (scores, causal mask, weights, weighted sum), and a fused softmax."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilemesh.core.scene import Scene, files_of

Array = np.ndarray[Any, Any]
TOKENS, WIDTH = 5, 4
CELL = 40


def figures() -> dict[str, str]:
    """By file name, for `docs/guide/figures/`."""
    return files_of(attention, softmax)


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
    scene = Scene(920, 320, f"Causal attention of one head on {TOKENS} tokens, with its numbers")
    x = 76
    for name, matrix in values.items():
        scene.text(x, 58, words[name], bold=True)
        if name == "scores":
            for row in range(TOKENS):
                scene.text(x - 10, 94 + row * CELL, f"token {row}", align="end", quiet=True, size=11)
        cells = [[_cell(value, name) for value in row] for row in matrix]
        scene.cells(x, 70, (CELL, CELL), cells, gap=3, size=11)
        x += matrix.shape[1] * CELL + 22
    note = "A row of weights adds up to 1; a token reads only itself and those before it: token 0 copies its own value."
    scene.note(76, 296, note)
    return scene.svg()


def _cell(value: float, name: str) -> tuple[str, int, bool]:
    """A number of the matrix of this name: blue where it is positive, pale where it is small."""
    if not np.isfinite(value):
        return "-∞", 6, True
    is_weak = abs(value) < (0.3 if name == "weights" else 0.8)
    return f"{value:.2f}", 2 if name == "output" else 1 if value < 0 else 0, is_weak


def softmax() -> str:
    """What one program of a fused softmax kernel does with its row: everything between one load and one store."""
    rows, columns, lanes = 4, 6, 8  # lanes: the next power of two, as Triton's blocks demand
    x = np.random.default_rng(5).normal(size=(rows, columns)).round(1)
    own = 1  # the row that is followed
    loaded = np.full(lanes, -np.inf)
    loaded[:columns] = x[own]
    shifted = loaded - loaded.max()
    exponentials = np.exp(shifted)
    shares = exponentials / exponentials.sum()
    scene = Scene(920, 282, "A fused softmax: one program per row, one load and one store of it")
    scene.text(96, 58, "x in memory", bold=True)
    for row in range(rows):
        scene.text(86, 94 + row * CELL, f"program {row}", align="end", quiet=True, size=11)
    cells = [[(f"{value:.1f}", 0, row != own) for value in x[row]] for row in range(rows)]
    scene.cells(96, 70, (CELL, CELL), cells, gap=3, size=11)
    left = 540
    scene.text(left, 58, f"program {own}, in registers", bold=True)
    steps = {
        "load, masked lanes at -∞": loaded,
        f"less the largest, {loaded.max():.1f}": shifted,
        "exp": exponentials,
        f"divided by the sum, {exponentials.sum():.2f}": shares,
    }
    for place, (name, values) in enumerate(steps.items()):
        scene.text(left - 10, 94 + place * CELL, name, align="end", size=11)
        colour = 2 if place == len(steps) - 1 else 0
        shown = [f"{value:.2f}" if np.isfinite(value) else "-∞" for value in values]
        cells = [[(words, 6 if lane >= columns else colour, False) for lane, words in enumerate(shown)]]
        scene.cells(left, 70 + place * CELL, (CELL, CELL), cells, gap=3, size=11)
    note = (
        f"{columns} numbers are stored, with the same mask: {lanes - columns} of {lanes} lanes hold nothing. "
        "Unfused, each of these lines is a kernel that reads and writes the matrix."
    )
    scene.note(96, 70 + rows * CELL + 30, note)
    return scene.svg()
