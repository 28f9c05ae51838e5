"""The map of the whole: what is too big, which cut helps, and what that costs, in figures of one model.

Every figure is computed here from the model's sizes, so that the map says what the chapters derive.
"""

from __future__ import annotations

from typing import NamedTuple

from tilemesh.core.scene import Scene, files_of
from tilemesh.model.config import preset
from tilemesh.model.work.weights import count_parameters

MODEL, RANKS, TOKENS, MICROBATCHES = "llama-3-8b", 8, 8192, 32
_COLUMNS = ((12, "what is too big"), (190, "cut"), (400, "a rank then has"), (640, "and it costs"), (950, "chapter"))
_LINE = 44


class MapRow(NamedTuple):
    group: str
    big: str
    cut: str
    keeps: str
    costs: str
    where: str


def map_rows() -> list[MapRow]:
    """The map's lines. 16-bit weights and gradients, Adam's states in 32 bits: 16 bytes per weight."""
    config, n = preset(MODEL), RANKS
    weights, layers, width = count_parameters(config).total, config.layers, config.width
    state, gradients = 16 * weights, 2 * weights
    ring = 2 * (n - 1) / n
    activation = 2 * TOKENS * width  # one tensor of a microbatch, 16 bits
    kv = 2 * 2 * layers * config.kv_heads * (width // config.heads)  # per token: keys and values
    bubble = (n - 1) / (MICROBATCHES + n - 1)
    return [
        MapRow("train", "the batch", "data parallelism", f"all {_gb(state)} of weights and states",
               f"one all-reduce of gradients: {_gb(ring * gradients)} per step", "5"),
        MapRow("train", "weights and states", "ZeRO 1, 2, 3", f"{_gb(state)} → {_gb(state / n)}",
               f"weights gathered twice: {_gb(1.5 * ring * gradients)} per step", "5"),
        MapRow("train", "a layer's matrices", "tensor parallelism", f"1/{n} of every matrix: {_gb(state / n)}",
               f"4 all-reduces per layer: {_gb(4 * layers * ring * activation)} per microbatch", "6"),
        MapRow("train", "all layers", "pipeline", f"{layers // n} of {layers} layers",
               f"little traffic ({_gb(activation)} per cut), a bubble of {bubble:.0%}", "7"),
        MapRow("train", "the sequence", "context parallelism", f"{TOKENS // n:,} of {TOKENS:,} tokens",
               f"keys and values go round: {_gb(kv * TOKENS * (n - 1) / n)} per pass", "docs/parallel"),
        MapRow("train", "activations", "computed again", "one tensor per layer, not dozens",
               "one more forward pass: 4/3 of the FLOPs", "docs/plan"),
        MapRow("serve", "keys and values", "pages; fewer KV heads", f"{_gb(kv * 32768)} per request of 32k",
               "a table per request; gathers in attention", "9"),
        MapRow("serve", "weights per token read", "a larger batch; fewer bits",
               f"{_gb(2 * weights)} → {_gb(weights / 2)} in 4 bits", "latency; some accuracy", "8, 17"),
        MapRow("serve", "launches", "recorded steps", "one launch for hundreds", "fixed sizes: buckets", "10"),
        MapRow("serve", "steps per answer", "guessing ahead", "several tokens a pass", "a draft; wasted guesses", "11"),
        MapRow("learn", "an update", "clip and KL", "ratios within 1 ± 0.2", "more rounds of answers", "12"),
        MapRow("learn", "four models", "share, drop, place", f"{_gb(2 * state + 4 * weights)}, spread over all",
               "new weights sent; answers of older weights", "13, 14"),
        MapRow("kernel", "traffic to memory", "tiles and fusion", "each byte read once per tile",
               "registers and shared memory", "15, ladder"),
        MapRow("choose", "the ways to cut", "rules, DP, ILP", "one annotation, or none", "trust in a time model", "16"),
    ]  # fmt: skip


def overview() -> str:
    """One page, landscape."""
    rows = map_rows()
    scene = Scene(1060, 118 + _LINE * len(rows), "What is too big, which cut helps, what it costs")
    scene.note(12, 42, f"Figures: {MODEL}, {RANKS} GPUs, {TOKENS:,} tokens in a microbatch, 16 bits, Adam.")
    for x, words in _COLUMNS:
        scene.text(x, 72, words, bold=True)
    colours = {name: number for number, name in enumerate(dict.fromkeys(row.group for row in rows))}
    for number, row in enumerate(rows):
        y = 84 + _LINE * number
        scene.box(8, y, 1044, _LINE - 6, colour=colours[row.group], pale=True)
        scene.box(_COLUMNS[1][0] - 8, y + 5, 190, _LINE - 16, row.cut, colour=colours[row.group])
        for (x, _), words in zip((_COLUMNS[0], *_COLUMNS[2:]), (row.big, *row[3:]), strict=True):
            scene.text(x + 4, y + 24, words)
    y = 84 + _LINE * len(rows) + 16
    for number, name in enumerate(colours):
        scene.box(12 + 130 * number, y - 10, 14, 12, colour=number)
        scene.text(32 + 130 * number, y, name)
    return scene.svg().replace("<style>", "<style>@page{size:landscape}", 1)


def figures() -> dict[str, str]:
    """By file name."""
    return files_of(overview)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"
