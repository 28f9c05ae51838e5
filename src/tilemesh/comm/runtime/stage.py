"""A shared-memory program over real memory: its places on the stage, and in neighbours' arrays, become views.

`instructions_of` makes what `shared.py` carries out: a flat list of (what, one, two), of which the caller's own arrays
are no part. What a schedule spells out rank by rank is put together again where that saves calls: slots in a row are
copied at once, the same slot of all ranks is one strided array, and a chain of reductions into one place is carried out
piece by piece, so that the place stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tilemesh.comm.runtime.arena import Arena
from tilemesh.comm.runtime.lower import Local, Meet, MemorySpan, Program
from tilemesh.comm.runtime.transport import Array
from tilemesh.comm.schedules.schedule import DATA, INPUT, TEMP

MEET, PUT, GET, OWN, REDUCE, REDUCE_ON_STAGE, ADD_TO_OWN = range(7)
STACK_BYTES = 32 << 10  # up to this, one strided call for all ranks is cheaper than one call per rank

Part = slice | None  # of the caller's array; None: all of it
ArenaInstruction = tuple[int, Any, Any]


class StageBinding:
    """How one program lies in an arena. `bases`: where each rank's (input, data) is, for what reads them there.

    `lengths`: elements of the caller's input and result; `lo`: where in DATA the result begins. `stacks`: makes one
    reduction of the rows of an array, a row a rank; None where numpy has no function for it.
    """

    def __init__(
        self,
        program: Program,
        arena: Arena,
        carrier: np.dtype[Any],
        lengths: tuple[int, int],
        lo: int,
        bases: Sequence[tuple[int, int]],
        stacks: Callable[[Array], Any] | None,
    ) -> None:
        self.program = program
        self.arena = arena
        self.carrier = carrier
        self.lengths = lengths
        self.lo = lo
        self.bases = bases
        self.stacks = stacks
        self.staged_bytes = program.lengths[TEMP] * carrier.itemsize

    def instructions(self, half: int) -> list[ArenaInstruction]:
        """The program over one half of the stage."""
        return [entry for run in runs_of(self.program) for entry in self._bind(run, half)]

    def _bind(self, run: list[Local] | None, half: int) -> Iterator[ArenaInstruction]:
        if run is None:
            yield MEET, None, None
            return
        first = run[0]
        target = MemorySpan(first.target.space, first.target.lo, run[-1].target.hi)
        if any(local.reduce for local in run) and first.source.space == INPUT and not self.bases:
            length = first.source.hi - first.source.lo  # slots of a stage are as long as the longest chunk
            others = [self._there(local.source, local.peer, half)[:length] for local in run[1:]]
            yield ADD_TO_OWN, self._there(first.target, -1, half), (self._part(first.source), others)
        elif any(local.reduce for local in run):
            assert not first.reduce, "what is reduced onto was put there in the same run"
            sources = [self._there(local.source, local.peer, half) for local in run]
            stacked = self._stacked(run, half) if len({local.target for local in run}) == 1 else None
            where: Any = sources
            if stacked is not None and self.stacks is not None:
                where = self.stacks(stacked)
            if target.space == TEMP:
                yield REDUCE_ON_STAGE, self._there(first.target, -1, half), where
            else:
                yield REDUCE, self._part(first.target), where
        elif target.space == TEMP:
            source = MemorySpan(INPUT, first.source.lo, run[-1].source.hi)
            yield PUT, self._there(target, -1, half), self._part(source)
        elif first.source.space == INPUT and first.peer == -1 and not self.bases:
            source = MemorySpan(INPUT, first.source.lo, run[-1].source.hi)
            yield OWN, self._part(target), self._part(source)
        else:
            stacked = self._stacked(run, half)
            if stacked is not None:
                ordered = sorted(run, key=lambda local: local.target.lo)
                yield GET, self._part(MemorySpan(DATA, ordered[0].target.lo, ordered[-1].target.hi)), stacked
                return
            for local in run:
                yield GET, self._part(local.target), self._there(local.source, local.peer, half)

    def _part(self, span: MemorySpan) -> Part:
        base, length = (0, self.lengths[0]) if span.space == INPUT else (self.lo, self.lengths[1])
        is_whole = span.lo == base and span.hi == base + length
        return None if is_whole else slice(span.lo - base, span.hi - base)

    def _there(self, span: MemorySpan, peer: int, half: int) -> Array:
        """A view of the arena: on a stage, or in somebody's array."""
        rank = self.arena.rank if peer == -1 else peer
        size = self.carrier.itemsize
        if span.space == TEMP:
            stage = self.arena.staged_by(rank, half, self.staged_bytes)
            return stage[span.lo * size : span.hi * size].view(self.carrier)
        base = self.bases[rank][span.space]
        return self.arena.memory[base + span.lo * size : base + span.hi * size].view(self.carrier)

    def _stacked(self, run: list[Local], half: int) -> Array | None:
        """The same slot of every rank's stage as one array, a row a rank, where that is what the run reads."""
        ranks = [self.arena.rank if local.peer == -1 else local.peer for local in run]
        source = run[0].source
        if source.space != TEMP or sorted(ranks) != list(range(self.arena.ranks)):
            return None
        if any(local.source != source for local in run):
            return None
        size = self.carrier.itemsize
        nbytes = (source.hi - source.lo) * size
        if not 0 < nbytes <= STACK_BYTES:
            return None
        if run[0].reduce or run[-1].reduce:
            if ranks != sorted(ranks) or self.stacks is None:
                return None
        else:
            by_rank = sorted(zip(ranks, run, strict=True), key=lambda pair: pair[0])
            starts = [local.target.lo for _, local in by_rank]
            length = source.hi - source.lo
            if starts != [starts[0] + length * place for place in range(len(starts))]:
                return None
        stacked: Array = self.arena.rows(half, source.lo * size, nbytes, self.staged_bytes).view(self.carrier)
        return stacked


# Instructions in runs, each of which a few numpy calls carry out at once ----------------------------------------------


def runs_of(program: Program) -> list[list[Local] | None]:
    """The program's instructions in runs that can be carried out at once; None is a meeting."""
    runs: list[list[Local] | None] = []
    for instruction in program.instructions:
        if isinstance(instruction, Meet):
            runs.append(None)
        elif not isinstance(instruction, Local):
            raise TypeError(f"a message in a program for shared memory: {instruction}")
        else:
            run = _begun(runs, instruction)
            if run is not None:
                run.append(instruction)
            else:
                runs.append([instruction])
    return runs


def _begun(runs: list[list[Local] | None], local: Local) -> list[Local] | None:
    """The run that this one goes on with: the last, or where it adds to something, what put that there.

    It goes ahead of the runs in between only where neither touches what the other reads or writes.
    """
    for run in reversed(runs):
        if run is None or (run is not runs[-1] and not local.reduce):
            break
        if _goes_on(run, local):
            return run
        if not all(_are_apart(local, earlier) and _are_apart(earlier, local) for earlier in run):
            break
    return None


def _are_apart(first: Local, second: Local) -> bool:
    """Whether the second reads and writes nothing that the first writes; a neighbour's memory is not this rank's."""
    reads = second.peer == -1 and first.target.overlaps(second.source)
    return not reads and not first.target.overlaps(second.target)


def _goes_on(run: list[Local], local: Local) -> bool:
    last = run[-1]
    if local.reduce:
        return local.target.space == last.target.space and local.target.lo == last.target.lo
    if last.reduce or local.target.space != last.target.space or local.source.space != last.source.space:
        return False
    if local.source.space == INPUT and local.peer == -1 == last.peer:  # slots in a row
        return local.target.lo == last.target.hi and local.source.lo == last.source.hi
    if local.target.space == TEMP:
        return False
    return local.peer != last.peer and local.source.space == TEMP and local.source == last.source
