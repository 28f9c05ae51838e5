"""Calls through the node's shared memory, from an array to its result: which program, over which views, in which order.

Whether an array lies in the arena is known to its own rank alone, and all ranks must run the same program. So where it
matters (`direct`), each rank writes the places of its arrays beside its flag, they meet once, and all read the same
answers; for the direct schedules that meeting is their own first one. As long as no rank has asked for arena memory,
which all know because `empty` is a collective call, nobody asks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilemesh.comm.runtime.arena import Arena, ArenaTurn, met
from tilemesh.comm.runtime.arithmetic import ufunc_of
from tilemesh.comm.runtime.call_parts import Call
from tilemesh.comm.runtime.choose import Choice
from tilemesh.comm.runtime.flags import NO_CALL, SOURCE, TARGET, WORDS, CallDigest
from tilemesh.comm.runtime.lower import Program, ProgramKey
from tilemesh.comm.runtime.memory import same_start
from tilemesh.comm.runtime.native import native_steps
from tilemesh.comm.runtime.observe import Stopwatch
from tilemesh.comm.runtime.shared import ArenaProgram, ByLast, Reducer
from tilemesh.comm.runtime.stage import STACK_BYTES
from tilemesh.comm.runtime.transport import Array, Token, Transport
from tilemesh.comm.schedules.book import is_direct
from tilemesh.comm.schedules.collectives import REDUCING
from tilemesh.core.errors import RunError, UsageError

_SEGMENT_BY_SEGMENT = ("all_reduce", "reduce", "broadcast")  # input and result are cut alike
_OVERLAPS = 3  # for a place: the input overlaps the result, so that a neighbour would read what is being overwritten
KEPT = 256  # bound programs: views only, so this bounds what is kept

Fixed = list[Callable[[], object]]  # what is left to do once all know where the arrays lie
Places = tuple[tuple[int, int], ...]  # (input, data) of each rank in the arena; 0: not there


@dataclass(frozen=True)
class SharedCall:
    """A call but for its arrays. `lo`: where in DATA its result begins. `direct`: what to use instead if every rank's
    arrays lie in the arena; `natively`: the library's own collective, where that is the choice if they do not."""

    key: ProgramKey
    lo: int
    direct: str | None = None
    natively: Callable[[Array, Array], Iterator[Token]] | None = None
    digest: CallDigest = NO_CALL


class Sharing:
    """The shared-memory calls of one communicator."""

    def __init__(self, arena: Arena, program: Callable[[ProgramKey], Program], transport: Transport) -> None:
        self.arena = arena
        self.program = program
        self.transport = transport
        self.kept: OrderedDict[tuple[ProgramKey, int, Places], ArenaProgram | ByLast] = OrderedDict()
        self.stopwatch: Stopwatch | None = None  # of the call whose parts are timed: see `Group.breakdown`

    def call(self, call: Call, choice: Choice) -> SharedCall:
        """What all calls like this one have in common."""

        def natively(inputs: Array, result: Array) -> Iterator[Token]:
            return native_steps(self.transport, call, inputs, result, self.stopwatch)

        name = choice.algorithm
        begins_at = call.begins_at(self.transport.rank)
        return SharedCall(call.key(name), begins_at, choice.direct, natively if name == "native" else None, call.digest)

    def steps(self, call: SharedCall, inputs: Array, data: Array) -> Iterator[Token]:
        """The call's steps; its turn is taken now."""
        return self._steps(self.arena.turn(), call, inputs, data)

    def repeated(self, call: SharedCall) -> RepeatedShared:
        """The same, blocking, for calls like this one; only when nothing is under way."""
        return RepeatedShared(self, call)

    def _steps(self, turn: int, call: SharedCall, inputs: Array, data: Array) -> Iterator[Token]:
        arena = self.arena

        def steps() -> Iterator[Token]:
            # Where the arrays of a single rank lie does not matter.
            if arena.ranks > 1 and (is_direct(call.key.algorithm) or (call.direct is not None and arena.live)):
                return self._agreed(call, inputs, data)
            return self._otherwise(call, inputs, data)

        return self._in_turn(turn, call.digest, steps)

    def _in_turn(self, turn: int, digest: CallDigest, steps: Callable[[], Iterator[Token]]) -> Iterator[Token]:
        """The steps of one call, made when those before it are through. `asked`: its mark is in this rank's flag."""
        arena = self.arena
        if arena.done != turn - 1:
            yield ArenaTurn(arena, turn)
        arena.flags.digest = digest
        try:
            yield from steps()
        except (UsageError, RunError):  # on every rank alike: this call is over, and those after it have their turn
            arena.done = turn
            raise
        arena.done = turn

    def compare(self, digest: CallDigest) -> Iterator[Token]:
        """Steps of a meeting in which the ranks find out whether they make the same call; its turn is taken now."""
        return self._in_turn(self.arena.turn(), digest, lambda: met(self.arena))

    def _otherwise(self, call: SharedCall, inputs: Array, data: Array) -> Iterator[Token]:
        if call.natively is not None:
            return call.natively(inputs, data)
        return self._staged(call.key, inputs, data, call.lo)

    def _staged(self, key: ProgramKey, inputs: Array, data: Array, lo: int) -> Iterator[Token]:
        bound = self.bound(key, lo)
        in_place = key.collective in _SEGMENT_BY_SEGMENT and same_start(inputs, data)
        if bound.meets > 1 and not in_place and np.may_share_memory(inputs, data):
            inputs = inputs.copy()  # the result grows while later segments are still to be put on the stage
        yield from bound.steps(inputs, data, self.stopwatch)

    def _agreed(self, call: SharedCall, inputs: Array, data: Array) -> Iterator[Token]:
        """Tell the others where this rank's arrays lie, and go the way that is open to all."""
        arena, flags, key = self.arena, self.arena.flags, call.key
        source, target = self._place(inputs, 1), self._place(data, 2)
        if np.may_share_memory(inputs, data) and not self._harmless(key, source, target):
            source = _OVERLAPS
        flags.put(SOURCE, source)
        flags.put(TARGET, target)
        yield from met(arena)
        places = tuple((flags.get(rank, SOURCE), flags.get(rank, TARGET)) for rank in range(arena.ranks))
        name = self._way(key, places, key.algorithm if is_direct(key.algorithm) else call.direct)
        if name is not None:
            key = key._replace(algorithm=name)
            bound = self.bound(key, call.lo, places)
            assert isinstance(bound, ArenaProgram)
            yield from bound.steps(inputs, data, self.stopwatch, is_met=arena.ranks > 1)
            return
        yield from self._refused(call, places, inputs, data)

    def _refused(self, call: SharedCall, places: Places, inputs: Array, data: Array) -> Iterator[Token]:
        """Not every rank's arrays lie there."""
        yield from met(self.arena)  # the places must not change while somebody still looks at them
        if is_direct(call.key.algorithm):
            raise UsageError(_why(call.key, places))
        yield from self._otherwise(call, inputs, data)

    def _harmless(self, key: ProgramKey, source: int, target: int) -> bool:
        """Whether the input lies in the result where it will be, so that overwriting it changes nothing too early."""
        if key.collective == "all_gather":
            target += sum(key.sizes[: self.arena.rank]) * key.like.carrier.itemsize
        return key.collective in ("all_reduce", "all_gather") and source == target

    def _way(self, key: ProgramKey, places: Places, wanted: str | None) -> str | None:
        """The direct algorithm that is open, or None."""
        contributes = [key.collective != "broadcast" or rank == key.root for rank in range(len(places))]
        inputs = all(source for (source, _), does in zip(places, contributes, strict=True) if does)
        if not inputs or any(source == _OVERLAPS for source, _ in places):
            return None
        if wanted == "direct_slices":
            return wanted if all(target for _, target in places) else None
        if key.collective == "all_reduce" and wanted == "direct+":
            wanted = "direct"
            if all(target for _, target in places):
                return "direct_slices"
        if key.collective == "all_reduce" and any(source == target for source, target in places):
            return None  # neighbours would read an input that its owner already overwrites
        return wanted and "direct"

    def bound(self, key: ProgramKey, lo: int, places: Places = ()) -> ArenaProgram | ByLast:
        where = (key, lo, places)
        bound = self.kept.get(where)
        if bound is None:
            bound = self.kept[where] = self._bind(key, lo, places)
            if len(self.kept) > KEPT:
                self.kept.popitem(last=False)
        return bound

    def _bind(self, key: ProgramKey, lo: int, places: Places) -> ArenaProgram | ByLast:
        if key.algorithm == "flat_one" and is_by_last(key, self.arena.ranks):
            length = sum(key.sizes)
            mine = key.sizes[self.arena.rank] if key.collective == "reduce_scatter" else length
            function = ufunc_of(key.op, key.like.dtype)
            return ByLast(self.arena, key.like.carrier, function, length, slice(lo, lo + mine), mine)
        program = self.program(key)
        lengths = (program.lengths[0], self._result_length(key, program))
        return ArenaProgram(program, self.arena, key.like.carrier, _reducer(key), lengths, lo, places)

    def _result_length(self, key: ProgramKey, program: Program) -> int:
        if key.collective in ("reduce_scatter", "scatter"):
            return key.sizes[self.arena.rank]
        return program.lengths[1]

    def _place(self, array: Array, of_nothing: int) -> int:
        """Where the array lies in the arena; 0: elsewhere. An empty array is nowhere, and in nobody's way."""
        return self.arena.offset_of(array.__array_interface__["data"][0], array.nbytes) if array.size else of_nothing

    def empty(
        self, shape: tuple[int, ...], carrier: np.dtype[Any], digest: CallDigest
    ) -> tuple[Iterator[Token], list[Array]]:
        """The steps of an allocation, and the list into which they put the array."""
        turn, arrays = self.arena.turn(), []
        nbytes = math.prod(shape) * carrier.itemsize

        def steps() -> Iterator[Token]:
            block = yield from self.arena.allocate(nbytes)
            arrays.append(block.view(carrier).reshape(shape))

        return self._in_turn(turn, digest, steps), arrays


class RepeatedShared:
    """Calls like one that was made before, blocking, on flat arrays; only when nothing is under way."""

    def __init__(self, sharing: Sharing, call: SharedCall) -> None:
        self.sharing, self.call = sharing, call
        self.wanted = call.key.algorithm if is_direct(call.key.algorithm) else call.direct
        has_stage = call.natively is None and not is_direct(call.key.algorithm)
        self.staged = sharing.bound(call.key, call.lo) if has_stage else None
        flags = self.flags = sharing.arena.flags
        self.announced = [flags.words[word : flags.ranks * WORDS : WORDS] for word in (SOURCE, TARGET)]
        self.ways: dict[tuple[bytes, bytes], ArenaProgram | Fixed | None] = {}

    def run(self, inputs: Array, data: Array) -> None:
        arena, staged = self.sharing.arena, self.staged
        if self.wanted is None or not arena.live:
            if staged is not None and (staged.meets == 1 or not np.may_share_memory(inputs, data)):
                staged.run(inputs, data)
                return
        elif not np.may_share_memory(inputs, data):
            way = self.agreed(self.sharing._place(inputs, 1), self.sharing._place(data, 2))
            if isinstance(way, list):
                for step in way:
                    step()
            else:
                self.otherwise(way, inputs, data)
            return
        for token in self.sharing.steps(self.call, inputs, data):
            token.wait()

    def places(self, inputs: Array, data: Array) -> tuple[int, int] | None:
        """What `agreed` is to tell of the arrays of a call: where they lie in the arena. None: they overlap."""
        if self.wanted is None or np.may_share_memory(inputs, data):
            return None
        return self.sharing._place(inputs, 1), self.sharing._place(data, 2)

    def agreed(self, source: int, target: int) -> ArenaProgram | Fixed | None:
        """Tell the others where this rank's arrays lie; what is to be done if the direct way is open to all."""
        flags, (sources, targets) = self.flags, self.announced
        words, mine = flags.words, flags.mine
        words[mine + SOURCE] = source
        words[mine + TARGET] = target
        flags.meet()
        places = sources.tobytes(), targets.tobytes()
        try:
            return self.ways[places]
        except KeyError:
            way = self._way(places)
            if len(self.ways) > KEPT:
                self.ways.clear()
            self.ways[places] = way
            return way

    def _way(self, words: tuple[bytes, bytes]) -> ArenaProgram | Fixed | None:
        key = self.call.key
        sources, targets = (memoryview(side).cast("Q").tolist() for side in words)
        places = tuple(zip(sources, targets, strict=True))
        name = self.sharing._way(key, places, self.wanted)
        if name is None:
            return None
        bound = self.sharing.bound(key._replace(algorithm=name), self.call.lo, places)
        assert isinstance(bound, ArenaProgram)
        return bound if bound.uses_stage or not targets[self.flags.rank] else bound.fixed()

    def otherwise(self, way: ArenaProgram | None, inputs: Array, data: Array) -> None:
        """What was agreed on goes over the stage, or writes elsewhere; or (None) the direct way is not open to all."""
        if way is not None:
            way.run(inputs, data, is_met=True)
        elif self.staged is not None:  # the same as `Sharing._refused`
            self.flags.meet()
            self.staged.run(inputs, data)
        else:
            sources, targets = (words.tolist() for words in self.announced)
            places = tuple(zip(sources, targets, strict=True))
            for token in self.sharing._refused(self.call, places, inputs, data):
                token.wait()


def is_by_last(key: ProgramKey, ranks: int) -> bool:
    """Whether whoever comes last may add up for all: small, with numpy's own function. The same on every rank."""
    nbytes = sum(key.sizes) * key.like.carrier.itemsize
    is_even = key.collective == "all_reduce" or len(set(key.sizes)) == 1
    return ranks > 1 and is_even and 0 < nbytes <= STACK_BYTES and ufunc_of(key.op, key.like.dtype) is not None


def _reducer(key: ProgramKey) -> Reducer | None:
    return Reducer(key.op, key.like.dtype, key.like.carrier) if key.collective in REDUCING else None


def _why(key: ProgramKey, places: Places) -> str:
    head = f"algorithm '{key.algorithm}' cannot serve this {key.collective}:"
    missing = [rank for rank, (source, _) in enumerate(places) if not source]
    what = "input" if missing else "out"
    who = missing or [rank for rank, (_, target) in enumerate(places) if not target]
    if who:
        return f"{head} the {what} of {_ranks(who)} does not lie in memory that comm.empty() made"
    who = [rank for rank, (source, target) in enumerate(places) if source in (target, _OVERLAPS)]
    slices = "algorithm='direct_slices', " if key.collective == "all_reduce" else ""
    return (
        f"{head} the out of {_ranks(who)} overlaps the input, which the other ranks read while it would be written; "
        f"give another out, or use {slices}'auto' or 'flat'"
    )


def _ranks(who: list[int]) -> str:
    return f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}"
