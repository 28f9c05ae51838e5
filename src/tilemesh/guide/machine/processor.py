"""A processor small enough to follow: fetch, decode, load, execute, store, one cycle each.

Sequential: an instruction begins when the one before has stored, five cycles each. Pipelined: a new one may begin every
cycle; an instruction that needs a result waits in front of its load until that result is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CYCLE = ("fetch", "decode", "load", "execute", "store")


@dataclass(frozen=True)
class Instruction:
    """Writes one register from others."""

    writes: str
    reads: tuple[str, ...] = ()


def sequential(program: Sequence[Instruction]) -> list[int]:
    """The cycle in which each instruction is fetched."""
    return [len(CYCLE) * place for place in range(len(program))]


def pipelined(program: Sequence[Instruction]) -> list[int]:
    """The same with one fetch per cycle and waiting for results (the whole front of the pipeline waits)."""
    fetched: list[int] = []
    stored: dict[str, int] = {}  # first cycle in which a register can be loaded
    for instruction in program:
        at = fetched[-1] + 1 if fetched else 0
        ready = max((stored.get(name, 0) for name in instruction.reads), default=0)
        at = max(at, ready - CYCLE.index("load"))
        fetched.append(at)
        stored[instruction.writes] = at + len(CYCLE)
    return fetched


def cycles(fetched: Sequence[int]) -> int:
    """Cycles until the last instruction has stored."""
    return fetched[-1] + len(CYCLE)


def independent(count: int) -> list[Instruction]:
    return [Instruction(f"r{place}") for place in range(count)]


def chained(count: int) -> list[Instruction]:
    """Each needs the one before."""
    return [Instruction(f"r{place}", (f"r{place - 1}",) if place else ()) for place in range(count)]


def amdahl(serial: float, processors: float) -> float:
    """The speedup of a program of which a part can use one processor only."""
    return 1 / (serial + (1 - serial) / processors)
