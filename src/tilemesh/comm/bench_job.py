"""What the ranks of `tilemesh bench collective` are told to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """What the ranks are to do. `algorithms`: names, or all."""

    command: str
    collectives: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    algorithms: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ("ordinary", "empty")
    fit: bool = False
    overlap: bool = True
    repeats: int = 15
    seconds: float = 0.5
