"""Which chapters there are, in reading order: the code is in `guide/<folder>/`, the page in `docs/guide/<folder>/`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilemesh.core.errors import unknown

if TYPE_CHECKING:
    from tilemesh.guide.exercise import Exercise


@dataclass(frozen=True)
class GuidePart:
    """A chapter: what a reader types for it, its folder, and what it is about."""

    key: str
    folder: str
    title: str
    about: str

    @property
    def script(self) -> Path:
        return Path(__file__).parent / self.folder / "chapter.py"

    @property
    def page(self) -> str:
        return f"docs/guide/{self.folder}/README.md"

    @property
    def words(self) -> str:
        return f"Chapter {self.key}: {self.title[0].lower()}{self.title[1:]}" if self.key.isdecimal() else self.title

    def exercises(self) -> tuple[Exercise, ...]:
        """The chapter's exercises; importing them does not run the chapter."""
        if not (self.script.parent / "exercises.py").exists():
            return ()
        module = importlib.import_module(f"tilemesh.guide.{self.folder}.exercises")
        exercises: tuple[Exercise, ...] = module.EXERCISES
        return exercises

    def figures(self) -> dict[str, str]:
        """The chapter's drawings by file name: the same text each time."""
        if not (self.script.parent / "figures.py").exists():
            return {}
        module = importlib.import_module(f"tilemesh.guide.{self.folder}.figures")
        drawn: dict[str, str] = module.figures()
        return drawn


_ALL = (
    GuidePart("1", "ranks", "Hello, ranks", "processes, rank, world, groups"),
    GuidePart("2", "messages", "Messages", "send and receive, deadlock, waiting, the wrong device"),
    GuidePart("3", "collectives", "Collectives", "eight of them, ring and tree, α and β of this machine"),
    GuidePart("4", "machine", "The machine", "memory hierarchy, links, roofline, Amdahl's law, profilers"),
    GuidePart("5", "data_parallel", "Data parallelism", "gradients, accumulation, batch arithmetic, ZeRO 1 to 3"),
    GuidePart("6", "tensor_parallel", "Tensor parallelism", "columns and rows, backward, sequence parallelism"),
    GuidePart("7", "pipelines", "Pipelines", "throughput and latency, bubbles, schedules, choosing a layout"),
    GuidePart("8", "requests", "A request's life", "prefill and decode, batching, chunks, Little's law, a scheduler"),
    GuidePart("9", "kv_cache", "The KV cache", "its size, pages, sharing, copy on write, preemption, windows"),
    GuidePart(
        "10", "host", "The CPU in front of the GPU", "launches, recordings and what breaks them, launching ahead"
    ),
    GuidePart(
        "11", "guessing", "Guessing ahead", "speculative decoding: why it is exact, what it gains, when it loses"
    ),
    GuidePart(
        "12",
        "policy",
        "What PPO really is",
        "policy gradient, baseline, GAE, ratio and clip, KL: what fails without each",
    ),
    GuidePart("13", "four_models", "Four models", "actor, critic, reward, reference: memory, work, the length trap"),
    GuidePart("14", "places", "Where they live", "colocated, split, one step off: timelines, staleness, new weights"),
    GuidePart(
        "15", "dataflow", "Programs as data", "graphs, derivatives, fusion, rewrites with proofs, search, a slow CNN"
    ),
    GuidePart(
        "16", "cutting", "Who cuts what", "products cut in four ways, annotations, choosers raced, Alpa's two levels"
    ),
    GuidePart("17", "smaller", "Making it smaller", "fewer bits, fewer weights, a student: what each costs, measured"),
    GuidePart("ladder", "ladder", "The GPU matmul ladder", "one kernel per idea, with counted reads"),
    GuidePart("locality", "locality", "Locality on the CPU", "loop order, tiling, strides, false sharing"),
)

PARTS = tuple(part for part in _ALL if part.script.exists())


def part_of(key: str) -> GuidePart:
    """The chapter of a number or a name."""
    for part in PARTS:
        if key in (part.key, part.folder):
            return part
    raise unknown("chapter", key, [part.key for part in PARTS])


def next_part(part: GuidePart) -> GuidePart | None:
    """What to read after it; None after the last."""
    place = PARTS.index(part) + 1
    return PARTS[place] if place < len(PARTS) else None
