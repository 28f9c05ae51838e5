"""Running a shared-memory program: one rank's part over the arena, as few numpy calls as there can be.

`ArenaProgram` is a program whose places on the stage (and, for the direct ones, in the neighbours' arrays) have become
views, once for each half of the stage; the caller's own arrays come with each call. What a schedule spells out rank by
rank is put together again where that saves calls: slots in a row are copied at once, the same slot of all ranks is one
strided array, and a chain of reductions into one place is carried out piece by piece, so that the place stays in the
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from tilemesh.comm.runtime.arena import Arena, Published, met
from tilemesh.comm.runtime.arithmetic import STACK_BYTES, Reducer, stack_adder
from tilemesh.comm.runtime.flags import DISAGREED
from tilemesh.comm.runtime.lower import Local, Meet, MemorySpan, Program
from tilemesh.comm.runtime.observe import Stopwatch
from tilemesh.comm.runtime.transport import Array, Token
from tilemesh.comm.schedules.schedule import DATA, INPUT, TEMP

_MEET, _PUT, _GET, _OWN, _REDUCE, _REDUCE_ON_STAGE, _ADD_TO_OWN = range(7)
_PARTS = ("wait", "copy", "copy", "copy", "reduce", "reduce", "reduce")  # of a stopwatch, by instruction

Part = slice | None  # of the caller's array; None: all of it


class ArenaProgram:
    """A program over an arena. `bases`: where each rank's (input, data) lies in the arena, for what reads them there.

    `lo`: where in DATA the caller's result begins (reduce_scatter and scatter: one block of it).
    """

    def __init__(
        self,
        program: Program,
        arena: Arena,
        carrier: np.dtype[Any],
        reducer: Reducer | None,
        lengths: tuple[int, int],
        lo: int = 0,
        bases: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.program = program
        self.arena = arena
        self.carrier = carrier
        self.reducer = reducer
        self.lengths = lengths
        self.lo = lo
        self.bases = bases
        self.uses_stage = TEMP in program.shared
        self.staged_bytes = program.lengths[TEMP] * carrier.itemsize
        self.meets = sum(isinstance(instruction, Meet) for instruction in program.instructions)
        runs = runs_of(program)
        self.code = [[entry for run in runs for entry in self._bind(run, half)] for half in range(2)]

    def steps(
        self, given: Array, data: Array, stopwatch: Stopwatch | None = None, *, is_met: bool = False
    ) -> Iterator[Token]:
        """Carry the program out. `is_met`: the ranks have just met, so its first meeting is behind it."""
        half = self.arena.half() if self.uses_stage else 0
        for code, one, two in self.code[half]:
            if stopwatch is not None:
                stopwatch.begin(_PARTS[code])
            if code == _MEET:
                if not is_met:
                    yield from met(self.arena)
                is_met = False
            else:
                self._do(code, one, two, given, data)
        if stopwatch is not None:
            stopwatch.begin(None)

    def run(self, given: Array, data: Array, *, is_met: bool = False) -> None:
        """The same, blocking."""
        meet, do = self.arena.flags.meet, self._do
        for code, one, two in self.code[self.arena.half() if self.uses_stage else 0]:
            if code == _MEET:
                if not is_met:
                    meet()
                is_met = False
            else:
                do(code, one, two, given, data)

    def _do(self, code: int, one: Any, two: Any, given: Array, data: Array) -> None:
        if code == _PUT:
            one[:] = given if two is None else given[two]
        elif code == _GET:
            target = data if one is None else data[one]
            (target if two.ndim == 1 else target.reshape(two.shape))[:] = two
        elif code == _REDUCE:
            self.reducer(data if one is None else data[one], two)  # type: ignore[misc]
        elif code == _REDUCE_ON_STAGE:
            self.reducer(one, two)  # type: ignore[misc]
        elif code == _ADD_TO_OWN:
            part, others = two
            self.reducer(one, [given if part is None else given[part], *others])  # type: ignore[misc]
        else:
            target, source = data if one is None else data[one], given if two is None else given[two]
            if target.__array_interface__["data"] != source.__array_interface__["data"]:
                target[:] = source

    def fixed(self) -> list[Callable[[], object]]:
        """What is left of a direct program after its first meeting, as calls over views of the arena alone.

        They keep nobody's array alive: whoever makes them again has just been told that the arrays still lie there.
        """
        assert not self.uses_stage
        base, size = self.bases[self.arena.rank][DATA], self.carrier.itemsize
        data = self.arena.memory[base : base + self.lengths[1] * size].view(self.carrier)
        code = self.code[0]
        assert code[0][0] == _MEET
        calls: list[Callable[[], object]] = []
        for what, one, two in code[1:]:
            if what == _MEET:
                calls.append(self.arena.flags.meet)
                continue
            target = data if one is None else data[one]
            if what == _REDUCE:
                assert self.reducer is not None
                calls.append(partial(self.reducer, target, two))
            else:
                assert what == _GET
                calls.append(partial(np.copyto, target, two))
        return calls

    # Binding ------------------------------------------------------------------------------------------------------

    def _bind(self, run: list[Local] | None, half: int) -> Iterator[tuple[int, Any, Any]]:
        if run is None:
            yield _MEET, None, None
            return
        first = run[0]
        target = MemorySpan(first.target.space, first.target.lo, run[-1].target.hi)
        if any(local.reduce for local in run) and first.source.space == INPUT and not self.bases:
            length = first.source.hi - first.source.lo  # slots of a stage are as long as the longest chunk
            others = [self._there(local.source, local.peer, half)[:length] for local in run[1:]]
            yield _ADD_TO_OWN, self._there(first.target, -1, half), (self._part(first.source), others)
        elif any(local.reduce for local in run):
            assert not first.reduce, "what is reduced onto was put there in the same run"
            sources = [self._there(local.source, local.peer, half) for local in run]
            stacked = self._stacked(run, half) if len({local.target for local in run}) == 1 else None
            assert self.reducer is not None
            where: Any = sources
            if stacked is not None:
                where = stack_adder(self.reducer.function, stacked, self.carrier)
            if target.space == TEMP:
                yield _REDUCE_ON_STAGE, self._there(first.target, -1, half), where
            else:
                yield _REDUCE, self._part(first.target), where
        elif target.space == TEMP:
            source = MemorySpan(INPUT, first.source.lo, run[-1].source.hi)
            yield _PUT, self._there(target, -1, half), self._part(source)
        elif first.source.space == INPUT and first.peer == -1 and not self.bases:
            source = MemorySpan(INPUT, first.source.lo, run[-1].source.hi)
            yield _OWN, self._part(target), self._part(source)
        else:
            stacked = self._stacked(run, half)
            if stacked is not None:
                ordered = sorted(run, key=lambda local: local.target.lo)
                yield _GET, self._part(MemorySpan(DATA, ordered[0].target.lo, ordered[-1].target.hi)), stacked
                return
            for local in run:
                yield _GET, self._part(local.target), self._there(local.source, local.peer, half)

    def _part(self, span: MemorySpan) -> Part:
        base, length = (0, self.lengths[0]) if span.space == INPUT else (self.lo, self.lengths[1])
        whole = span.lo == base and span.hi == base + length
        return None if whole else slice(span.lo - base, span.hi - base)

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
            if ranks != sorted(ranks) or self.reducer is None or self.reducer.function is None:
                return None
        else:
            by_rank = sorted(zip(ranks, run, strict=True), key=lambda one: one[0])
            starts = [local.target.lo for _, local in by_rank]
            length = source.hi - source.lo
            if starts != [starts[0] + length * place for place in range(len(starts))]:
                return None
        stacked: Array = self.arena.rows(half, source.lo * size, nbytes, self.staged_bytes).view(self.carrier)
        return stacked


class ByLast:
    """`flat_one` for small payloads: whoever comes last adds up for all, and the two meetings are one.

    Between its two meetings only one rank acts, and only on the stage; so any rank that knows all inputs to be there
    may do it instead, into its own slot, and say so. Two that come together both do it: any result serves, as they are
    equal.
    """

    meets = 1

    def __init__(
        self, arena: Arena, carrier: np.dtype[Any], function: Any, elements: int, part: slice, result: int
    ) -> None:
        """`elements`: of the input; `part` of the sum is this rank's, `result` elements long."""
        self.arena = arena
        nbytes = elements * carrier.itemsize
        both = 2 * nbytes  # the input, and behind it the sum
        self.mine = [arena.staged_by(arena.rank, half, both)[:nbytes].view(carrier) for half in range(2)]
        self.rows = [arena.rows(half, 0, nbytes, both).view(carrier) for half in range(2)]
        self.sums = [arena.rows(half, nbytes, nbytes, both).view(carrier) for half in range(2)]
        self.parts = [[sums[rank][part] for rank in range(arena.ranks)] for sums in self.sums]
        self.own = [sums[arena.rank] for sums in self.sums]
        self.add_up = [stack_adder(function, self.rows[half], carrier) for half in range(2)]
        self.result = result

    def steps(
        self, given: Array, data: Array, stopwatch: Stopwatch | None = None, *, is_met: bool = False
    ) -> Iterator[Token]:
        flags, half = self.arena.flags, self.arena.half()
        begin = _ignored if stopwatch is None else stopwatch.begin
        begin("copy")
        self.mine[half][:] = given
        begin("wait")
        if flags.is_last():
            if flags.differs():
                yield from flags.disagreement()
            begin("reduce")
            self.add(half)
        else:
            yield Published(self.arena)
        begin("copy")
        last = flags.published()
        if last == DISAGREED:
            yield from flags.disagreement()
        data[:] = self.parts[half][last]
        begin(None)

    def add(self, half: int) -> None:
        self.add_up[half](self.own[half])
        self.arena.flags.publish()

    def run(self, given: Array, data: Array, *, is_met: bool = False) -> None:
        for token in self.steps(given, data):
            token.wait()


def _ignored(part: str | None) -> None:
    return None


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
        if not all(_are_apart(local, one) and _are_apart(one, local) for one in run):
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
