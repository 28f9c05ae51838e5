"""Through memory that all ranks share: nobody sends, everybody reads what it needs from its neighbours' slots.

By what lies in shared memory, and who adds:

- `flat` puts the input on the stage (TEMP), meets, and reads. Because the stage's halves are used in turn, one meeting
  a call is enough. A large payload goes over in segments, two slots taking turns: one meeting per segment.
- `flat_slices` (all_reduce): each rank reduces one slice of a segment and reads the others' slices from the stage. A
  pipeline: while segment k is put on the stage, k-1 is reduced and the result of k-2 is read.
- `flat_one` (all_reduce, reduce_scatter): one rank adds up for all, for payloads so small that calls are what costs.
- `direct` reads the neighbours' inputs where they are, which must be arrays of `Communicator.empty`: a meeting before
  (the inputs are there) and one after (nobody reads them any more). `direct_slices` (all_reduce) reads the results so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tilemesh.comm.schedules.schedule import (
    DATA,
    INPUT,
    NOBODY,
    TEMP,
    Round,
    RoundStep,
    Schedule,
    Shift,
    Vector,
    copy,
    read,
    same,
    sync,
    vector,
)

ON_STAGE = frozenset({TEMP})


# On the stage ---------------------------------------------------------------------------------------------------------


def all_reduce(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    """Everybody adds in the same order, 0 to n-1, so that all get the same bits."""

    def put(k: int) -> list[RoundStep]:
        return [_stage(ranks, same(ranks, k), same(ranks, k % 2))]

    def get(k: int) -> list[RoundStep]:
        slot, at = same(ranks, k % 2), same(ranks, k)
        return [read(same(ranks, p), TEMP, slot, at, same(ranks, 1), reduce=p > 0) for p in range(ranks)]

    return _staged("all_reduce", ranks, root, segments, segments, 1, put, get)


def reduce(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    def put(k: int) -> list[RoundStep]:
        return [_stage(ranks, same(ranks, k), same(ranks, k % 2))]

    def get(k: int) -> list[RoundStep]:
        slot, at, one = same(ranks, k % 2), same(ranks, k), same(ranks, 1)
        return [read(_only(ranks, root, p), TEMP, slot, at, one, reduce=p > 0) for p in range(ranks)]

    return _staged("reduce", ranks, root, segments, segments, 1, put, get)


def all_reduce_by_one(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    """One rank adds up for all, who then read its result: two meetings, but n times less adding than `flat`.

    Only that rank does anything between the meetings, on the stage alone. So it need not be rank 0: where the payload
    is small, the runtime lets whoever comes last do it, and the two meetings become one.
    """
    return _by_one("all_reduce", ranks, root, segments, segments, lambda k: same(ranks, k), 1)


def reduce_scatter_by_one(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    """The same, where each rank reads its own block of the result."""
    return _by_one("reduce_scatter", ranks, root, segments, ranks * segments, None, ranks)


def reduce_scatter(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    def get(k: int) -> list[RoundStep]:
        mine = Shift(ranks, 0, 1, k % 2 * ranks)
        at = Shift(ranks, 0, segments, k)
        return [read(same(ranks, p), TEMP, mine, at, same(ranks, 1), reduce=p > 0) for p in range(ranks)]

    return _staged("reduce_scatter", ranks, root, segments, ranks * segments, ranks, _put_all(ranks, segments), get)


def all_gather(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    def put(k: int) -> list[RoundStep]:
        return [_stage(ranks, same(ranks, k), same(ranks, k % 2))]

    def get(k: int) -> list[RoundStep]:
        slot, one = same(ranks, k % 2), same(ranks, 1)
        return [read(Shift(ranks, p), TEMP, slot, Shift(ranks, p, segments, k), one) for p in range(ranks)]

    return _staged("all_gather", ranks, root, segments, ranks * segments, 1, put, get)


def gather(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    def put(k: int) -> list[RoundStep]:
        return [_stage(ranks, same(ranks, k), same(ranks, k % 2))]

    def get(k: int) -> list[RoundStep]:
        slot, one = same(ranks, k % 2), same(ranks, 1)
        return [read(_only(ranks, root, p), TEMP, slot, same(ranks, p * segments + k), one) for p in range(ranks)]

    return _staged("gather", ranks, root, segments, ranks * segments, 1, put, get)


def all_to_all(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    def get(k: int) -> list[RoundStep]:
        mine, one = Shift(ranks, 0, 1, k % 2 * ranks), same(ranks, 1)
        return [read(Shift(ranks, p), TEMP, mine, Shift(ranks, p, segments, k), one) for p in range(ranks)]

    return _staged("all_to_all", ranks, root, segments, ranks * segments, ranks, _put_all(ranks, segments), get)


def broadcast(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    def put(k: int) -> list[RoundStep]:
        return [_stage(ranks, same(ranks, k), same(ranks, k % 2), _only(ranks, root, root))]

    def get(k: int) -> list[RoundStep]:
        return [read(same(ranks, root), TEMP, same(ranks, k % 2), same(ranks, k), same(ranks, 1))]

    return _staged("broadcast", ranks, root, segments, segments, 1, put, get)


def scatter(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    def put(k: int) -> list[RoundStep]:
        who, parity = _only(ranks, root, root), k % 2 * ranks
        return [_stage(ranks, same(ranks, b * segments + k), same(ranks, parity + b), who) for b in range(ranks)]

    def get(k: int) -> list[RoundStep]:
        mine = Shift(ranks, 0, 1, k % 2 * ranks)
        return [read(same(ranks, root), TEMP, mine, Shift(ranks, 0, segments, k), same(ranks, 1))]

    return _staged("scatter", ranks, root, segments, ranks * segments, ranks, put, get)


def all_reduce_slices(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    """Chunk k·n + j is slice j of segment k. Slots: two sets of n for inputs, and two for reduced slices.

    In several segments, where bytes are what costs, a rank's own slice is not put on the stage: nobody else reads it.
    """
    if ranks == 1:
        return _alone("all_reduce", "flat_slices", root, segments)
    one, all_of_it, me = same(ranks, 1), same(ranks, ranks), Shift(ranks)

    def put(k: int) -> list[RoundStep]:
        first, slot = k * ranks, k % 2 * ranks
        if segments == 1:
            return [copy(me, INPUT, same(ranks, first), TEMP, same(ranks, slot), all_of_it)]
        others = [(Shift(ranks, j, 1, first), Shift(ranks, j, 1, slot)) for j in range(1, ranks)]
        return [copy(me, INPUT, at, TEMP, place, one) for at, place in others]

    def add(k: int) -> list[RoundStep]:
        source, target = Shift(ranks, 0, 1, k % 2 * ranks), same(ranks, 2 * ranks + k % 2)
        if segments == 1:
            return [read(same(ranks, p), TEMP, source, target, one, reduce=p > 0, space=TEMP) for p in range(ranks)]
        own = copy(me, INPUT, Shift(ranks, 0, 1, k * ranks), TEMP, target, one)
        others = [Shift(ranks, p) for p in range(1, ranks)]
        return [own, *(read(p, TEMP, source, target, one, reduce=True, space=TEMP) for p in others)]

    def rounds() -> Iterator[Round]:
        for k in range(segments + 2):
            steps: list[RoundStep] = put(k) if k < segments else []
            if 1 <= k <= segments:
                steps += add(k - 1)
            if k >= 2:
                steps += _read_results(ranks, (k - 2) * ranks, 2 * ranks + k % 2)
            yield (sync(same(ranks, 0)), *steps) if k else tuple(steps)

    return Schedule("all_reduce", "flat_slices", ranks, root, ranks * segments, rounds, 2 * ranks + 2, ON_STAGE)


# Where the inputs are -------------------------------------------------------------------------------------------------


def direct_all_reduce(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    """Slices of the neighbours' inputs are reduced onto the stage, and read from there into a result of any memory."""
    if ranks == 1:
        return _alone("all_reduce", "direct", root, segments)
    one = same(ranks, 1)

    def rounds() -> Iterator[Round]:
        for k in range(segments + 1):
            steps: list[RoundStep] = []
            if k < segments:
                at, slot = Shift(ranks, 0, 1, k * ranks), same(ranks, k % 2)
                steps += [read(same(ranks, p), INPUT, at, slot, one, reduce=p > 0, space=TEMP) for p in range(ranks)]
            if k:
                steps += _read_results(ranks, (k - 1) * ranks, (k - 1) % 2)
            yield (sync(same(ranks, 0)), *steps)

    shared = frozenset({INPUT, TEMP})
    return Schedule("all_reduce", "direct", ranks, root, ranks * segments, rounds, 2, shared)


def direct_all_reduce_slices(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    """Input and result may be the same memory: a rank writes only what it alone reads, then what nobody reads.

    In segments, so that what others have reduced is still in a cache when it is read.
    """
    if ranks == 1:
        return _alone("all_reduce", "direct_slices", root, segments)
    one = same(ranks, 1)

    def rounds() -> Iterator[Round]:
        for k in range(segments + 2):
            steps: list[RoundStep] = []
            if 1 <= k <= segments:
                places = [Shift(ranks, j, 1, (k - 1) * ranks) for j in range(1, ranks)]
                steps += [read(Shift(ranks, j + 1), DATA, at, at, one) for j, at in enumerate(places)]
            if k < segments:
                mine = Shift(ranks, 0, 1, k * ranks)
                # One's own first: in place, adding to it is what overwrites it.
                steps += [read(Shift(ranks, p), INPUT, mine, mine, one, reduce=p > 0) for p in range(ranks)]
            yield (sync(same(ranks, 0)), *steps)

    shared = frozenset({INPUT, DATA})
    return Schedule("all_reduce", "direct_slices", ranks, root, ranks * segments, rounds, 0, shared)


def direct_reduce_scatter(ranks: int, root: int = 0) -> Schedule:
    mine, one = Shift(ranks), same(ranks, 1)
    steps = [read(same(ranks, p), INPUT, mine, mine, one, reduce=p > 0) for p in range(ranks)]
    return _direct("reduce_scatter", ranks, root, ranks, steps)


def direct_all_gather(ranks: int, root: int = 0) -> Schedule:
    zero, one = same(ranks, 0), same(ranks, 1)
    steps = [read(Shift(ranks, k), INPUT, zero, Shift(ranks, k), one) for k in range(ranks)]
    return _direct("all_gather", ranks, root, ranks, steps)


def direct_all_to_all(ranks: int, root: int = 0) -> Schedule:
    mine, one = Shift(ranks), same(ranks, 1)
    steps = [read(Shift(ranks, k), INPUT, mine, Shift(ranks, k), one) for k in range(ranks)]
    return _direct("all_to_all", ranks, root, ranks, steps)


def direct_broadcast(ranks: int, root: int = 0) -> Schedule:
    zero, one = same(ranks, 0), same(ranks, 1)
    return _direct("broadcast", ranks, root, 1, [read(same(ranks, root), INPUT, zero, zero, one)])


# Helpers --------------------------------------------------------------------------------------------------------------


def _staged(
    collective: str,
    ranks: int,
    root: int,
    segments: int,
    chunks: int,
    slots: int,
    put: Callable[[int], list[RoundStep]],
    get: Callable[[int], list[RoundStep]],
) -> Schedule:
    """Segment k is put on the stage in round k and read in round k + 1. `slots`: of one segment."""
    if ranks == 1:
        return _alone(collective, "flat", root, segments)

    def rounds() -> Iterator[Round]:
        for k in range(segments + 1):
            steps = get(k - 1) if k else []
            if k < segments:
                steps = [*steps, *put(k)]
            yield (sync(same(ranks, 0)), *steps) if k else tuple(steps)

    return Schedule(collective, "flat", ranks, root, chunks, rounds, slots * min(2, segments), ON_STAGE)


def _by_one(
    collective: str,
    ranks: int,
    root: int,
    segments: int,
    chunks: int,
    length: Callable[[int], Vector] | None,
    slots: int,
) -> Schedule:
    """`slots`: of one segment. Those of the result lie behind those of the inputs."""
    if ranks == 1:
        return _alone(collective, "flat_one", root, segments)
    count, first = same(ranks, slots), slots * min(2, segments)

    def put(k: int) -> list[RoundStep]:
        if length is not None or segments == 1:
            source = same(ranks, k) if length is not None else same(ranks, 0)
            return [copy(Shift(ranks), INPUT, source, TEMP, same(ranks, k % 2 * slots), count)]
        return _put_all(ranks, segments)(k)

    def add(k: int) -> list[RoundStep]:
        slot = same(ranks, k % 2 * slots)
        return [
            read(_only(ranks, 0, p), TEMP, slot, same(ranks, first), count, reduce=p > 0, space=TEMP)
            for p in range(ranks)
        ]

    def get(k: int) -> list[RoundStep]:
        if length is not None:
            return [read(same(ranks, 0), TEMP, same(ranks, first), length(k), same(ranks, 1))]
        mine = Shift(ranks, 0, 1, first)
        return [read(same(ranks, 0), TEMP, mine, Shift(ranks, 0, segments, k), same(ranks, 1))]

    def rounds() -> Iterator[Round]:
        yield tuple(put(0))
        for k in range(segments):
            yield (sync(same(ranks, 0)), *add(k), *(put(k + 1) if k + 1 < segments else []))
            yield (sync(same(ranks, 0)), *get(k))

    return Schedule(collective, "flat_one", ranks, root, chunks, rounds, first + slots, ON_STAGE)


def _direct(collective: str, ranks: int, root: int, chunks: int, steps: list[RoundStep]) -> Schedule:
    if ranks == 1:
        return _alone(collective, "direct", root, 1)

    def rounds() -> Iterator[Round]:
        yield (sync(same(ranks, 0)), *steps)
        yield (sync(same(ranks, 0)),)

    return Schedule(collective, "direct", ranks, root, chunks, rounds, 0, frozenset({INPUT}))


def _alone(collective: str, algorithm: str, root: int, segments: int) -> Schedule:
    zero = same(1, 0)

    def rounds() -> Iterator[Round]:
        yield (copy(zero, INPUT, zero, DATA, zero, same(1, segments)),)

    return Schedule(collective, algorithm, 1, root, segments, rounds)


def _put_all(ranks: int, segments: int) -> Callable[[int], list[RoundStep]]:
    """Segment k of every block goes on the stage, for whoever wants it."""

    def put(k: int) -> list[RoundStep]:
        if segments == 1:
            zero = same(ranks, 0)
            return [copy(Shift(ranks), INPUT, zero, TEMP, zero, same(ranks, ranks))]
        parity = k % 2 * ranks
        return [_stage(ranks, same(ranks, b * segments + k), same(ranks, parity + b)) for b in range(ranks)]

    return put


def _read_results(ranks: int, first: int, slot: int) -> list[RoundStep]:
    """Everybody's reduced slice, each at its place in the segment that begins with chunk `first`."""
    one, place = same(ranks, 1), same(ranks, slot)
    return [read(Shift(ranks, k), TEMP, place, Shift(ranks, k, 1, first), one) for k in range(ranks)]


def _stage(ranks: int, at: Vector, slot: Vector, who: Vector | None = None) -> RoundStep:
    return copy(Shift(ranks) if who is None else who, INPUT, at, TEMP, slot, same(ranks, 1))


def _only(ranks: int, reader: int, whom: int) -> tuple[int, ...]:
    return vector(ranks, lambda r: whom if r == reader else NOBODY)
