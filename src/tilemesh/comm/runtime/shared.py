"""Carrying out a shared-memory program: one rank's part over the arena, as few numpy calls as there can be.

`ArenaProgram` is a program whose places on the stage (and, for the direct ones, in the neighbours' arrays) have become
views (`stage.py`), once for each half of the stage; the caller's own arrays come with each call. `ByLast` is the one
program that is not made of a schedule. Below them is how several arrays become one: all rows of a stage, or in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from tilemesh.comm.runtime.arena import Arena, Published, met
from tilemesh.comm.runtime.arithmetic import combiner, ufunc_of
from tilemesh.comm.runtime.flags import DISAGREED
from tilemesh.comm.runtime.lower import Meet, Program
from tilemesh.comm.runtime.observe import Stopwatch
from tilemesh.comm.runtime.stage import ADD_TO_OWN, GET, MEET, PUT, REDUCE, REDUCE_ON_STAGE, StageBinding
from tilemesh.comm.runtime.transport import Array, Token
from tilemesh.comm.schedules.schedule import DATA, TEMP

PIECE_BYTES = 64 << 10  # of a reduction's target that stays in a core's cache while all contributions pass
MOST_ROWS = 4  # up to as many arrays are combined one by one
HALVED_BYTES = 2 << 10  # up to this the number of calls is what adding up costs

_PARTS = ("wait", "copy", "copy", "copy", "reduce", "reduce", "reduce")  # of a stopwatch, by instruction


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
        self.arena = arena
        self.carrier = carrier
        self.reducer = reducer
        self.lengths = lengths
        self.bases = bases
        self.uses_stage = TEMP in program.shared
        self.meets = sum(isinstance(instruction, Meet) for instruction in program.instructions)
        function = None if reducer is None else reducer.function
        stacks = None if function is None else partial(stack_adder, function, carrier=carrier)
        binding = StageBinding(program, arena, carrier, lengths, lo, bases, stacks)
        self.code = [binding.instructions(half) for half in range(2)]

    def steps(
        self, inputs: Array, data: Array, stopwatch: Stopwatch | None = None, *, is_met: bool = False
    ) -> Iterator[Token]:
        """Carry the program out. `is_met`: the ranks have just met, so its first meeting is behind it."""
        half = self.arena.half() if self.uses_stage else 0
        for code, into, origin in self.code[half]:
            if stopwatch is not None:
                stopwatch.begin(_PARTS[code])
            if code == MEET:
                if not is_met:
                    yield from met(self.arena)
                is_met = False
            else:
                self._do(code, into, origin, inputs, data)
        if stopwatch is not None:
            stopwatch.begin(None)

    def run(self, inputs: Array, data: Array, *, is_met: bool = False) -> None:
        """The same, blocking."""
        meet, do = self.arena.flags.meet, self._do
        for code, into, origin in self.code[self.arena.half() if self.uses_stage else 0]:
            if code == MEET:
                if not is_met:
                    meet()
                is_met = False
            else:
                do(code, into, origin, inputs, data)

    def _do(self, code: int, into: Any, origin: Any, inputs: Array, data: Array) -> None:
        if code == PUT:
            into[:] = inputs if origin is None else inputs[origin]
        elif code == GET:
            target = data if into is None else data[into]
            (target if origin.ndim == 1 else target.reshape(origin.shape))[:] = origin
        elif code == REDUCE:
            self.reducer(data if into is None else data[into], origin)  # type: ignore[misc]
        elif code == REDUCE_ON_STAGE:
            self.reducer(into, origin)  # type: ignore[misc]
        elif code == ADD_TO_OWN:
            part, others = origin
            self.reducer(into, [inputs if part is None else inputs[part], *others])  # type: ignore[misc]
        else:
            target, source = data if into is None else data[into], inputs if origin is None else inputs[origin]
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
        assert code[0][0] == MEET
        calls: list[Callable[[], object]] = []
        for what, into, origin in code[1:]:
            if what == MEET:
                calls.append(self.arena.flags.meet)
                continue
            target = data if into is None else data[into]
            if what == REDUCE:
                assert self.reducer is not None
                calls.append(partial(self.reducer, target, origin))
            else:
                assert what == GET
                calls.append(partial(np.copyto, target, origin))
        return calls


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
        self, inputs: Array, data: Array, stopwatch: Stopwatch | None = None, *, is_met: bool = False
    ) -> Iterator[Token]:
        flags, half = self.arena.flags, self.arena.half()
        begin = _ignored if stopwatch is None else stopwatch.begin
        begin("copy")
        self.mine[half][:] = inputs
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

    def run(self, inputs: Array, data: Array, *, is_met: bool = False) -> None:
        for token in self.steps(inputs, data):
            token.wait()


def _ignored(part: str | None) -> None:
    return None


# Several arrays into one ----------------------------------------------------------------------------------------------


def stack_adder(function: Any, rows: Array, carrier: np.dtype[Any]) -> Callable[[Array], object]:
    """Combines all rows into an array, in the same order and so to the same bits wherever it is used.

    Small rows without a gap between them: half of them onto the other half, and so on, which takes the fewest calls.
    Few rows: one call each, which numpy gets through sooner than one reduction; it also adds rows of one element so.
    """
    count, combine = len(rows), _into(function)
    if count & (count - 1) == 0 and rows.flags.c_contiguous and rows.nbytes <= count * HALVED_BYTES:
        return _halving(combine, rows)
    if count > MOST_ROWS:
        return partial(_reduce_rows, function.reduce, rows, carrier)
    first, second, *rest = _each(rows)
    if not rest:
        return partial(combine, first, second)
    *middle, last = rest
    scratch, spare = np.empty_like(first), np.empty_like(first)

    def add_up(out: Array) -> None:
        # Never onto an operand: with a single element numpy takes that for a reduction, which costs another call.
        combine(first, second, scratch)
        sums, free = scratch, spare
        for row in middle:
            combine(sums, row, free)
            sums, free = free, sums
        combine(sums, last, out)

    return add_up


def _halving(combine: Callable[[Array, Array, Array], object], rows: Array) -> Callable[[Array], object]:
    steps = []
    while len(rows) > 2:
        half = len(rows) // 2
        sums = np.empty_like(rows[:half])
        steps.append((rows[:half], rows[half:], sums))
        rows = sums
    upper, lower = _each(rows)

    def add_up(out: Array) -> None:
        for some, others, sums in steps:
            combine(some, others, sums)
        combine(upper, lower, out)

    return add_up


def _into(function: Any) -> Callable[[Array, Array, Array], object]:
    """The function with its result by position, which costs a tenth less than by name. numpy keeps that from two."""
    if function in (np.minimum, np.maximum):
        return lambda left, right, out: function(left, right, out=out)
    combine: Callable[[Array, Array, Array], object] = function
    return combine


def _each(rows: Array) -> list[Array]:
    """Every row as a view: where rows are single numbers, `rows[0]` would be what was there when it was asked."""
    return [rows[place, ...] for place in range(len(rows))]


def _reduce_rows(reduce: Any, rows: Array, carrier: np.dtype[Any], out: Array) -> None:
    reduce(rows, 0, carrier, out)


class Reducer:
    """Combines several arrays into one, in order, in pieces that stay in the cache."""

    def __init__(self, op: str, dtype: str, carrier: np.dtype[Any]) -> None:
        self.function = ufunc_of(op, dtype)
        self.into = _into(self.function)
        self.combine = combiner(op, dtype)
        self.carrier = carrier
        self.piece = PIECE_BYTES // carrier.itemsize

    def __call__(self, target: Array, sources: Any) -> None:
        """`sources`: arrays, or what `stack_adder` made of them."""
        if not isinstance(sources, list):
            sources(target)
            return
        if target.size <= self.piece:
            self._chain(target, sources)
            return
        for at in range(0, target.size, self.piece):
            end = at + self.piece
            self._chain(target[at:end], [source[at:end] for source in sources])

    def _chain(self, target: Array, sources: list[Array]) -> None:
        into = self.into
        if self.function is None or len(sources) == 1:
            target[:] = sources[0]
            for source in sources[1:]:
                self.combine(target, source)
            return
        into(sources[0], sources[1], target)
        for source in sources[2:]:
            into(target, source, target)
