"""Proof that a schedule does what its collective promises, by running it on symbols instead of numbers.

A slot holds a label and the set of ranks whose contributions went into it. The proof fails, and says where, when
- a contribution is missing, counted twice, or in the wrong place at the end;
- ranks that must agree have added in different orders (up to a + b = b + a): floating-point sums would differ in bits;
- a send has no receive in its round, or a receive no send, or their lengths differ (with every message received in
  its own round, nobody waits for a later round of another: no circle of waiting);
- a slot is overwritten while a message leaves it or another arrives in it;
- a neighbour's slot is read in the epoch in which it is written, or may be overwritten while somebody still reads it.

Scratch that neighbours read lies on the node's stage, whose two halves calls use in turn. So such a schedule is run
three times in a row: what is still being read when a call ends must have been read when its half comes round again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import get_args

from tilemesh.comm.schedules.collectives import BLOCKED, ends, require_collective, starts
from tilemesh.comm.schedules.schedule import DATA, INPUT, NOBODY, SPACES, TEMP, Kind, Round, RoundStep, Schedule, Sparse
from tilemesh.core.errors import UsageError

_KINDS = get_args(Kind)


class BrokenScheduleError(UsageError):
    """A schedule that does not do what its collective promises."""


def check(schedule: Schedule) -> int:
    """Prove a schedule and return its number of rounds; or raise, naming the first thing that is wrong."""
    _require_sense(schedule)
    proof = _Proof(schedule)
    rounds = 0
    for _ in range(3 if TEMP in schedule.shared else 1):
        proof.begin()
        rounds = 0
        for number, steps in enumerate(schedule.rounds()):
            proof.number = number
            proof.round(steps)
            rounds += 1
        proof.end()
    return rounds


SlotContents = tuple[int, frozenset[int]]
"""Of a slot: the chunk that it holds, and the ranks whose contributions are in it."""


def contents(schedule: Schedule) -> Iterator[list[list[SlotContents | None]]]:
    """After each round, what the slots of every rank's result hold; None where nothing has arrived yet."""
    _require_sense(schedule)
    proof = _Proof(schedule)
    proof.begin()
    for number, steps in enumerate(schedule.rounds()):
        proof.number = number
        proof.round(steps)
        yield [[proof.contents(value) for value in slots[DATA]] for slots in proof.slots]


def _require_sense(schedule: Schedule) -> None:
    """What a proof takes for granted."""
    require_collective(schedule.collective)
    s, name = schedule, f"{schedule.algorithm} {schedule.collective}"
    if s.ranks < 1 or not 0 <= s.root < s.ranks:
        raise BrokenScheduleError(f"{name} of {s.ranks} ranks with root {s.root}: expected 1 or more, and one of them")
    if s.chunks < 1 or s.temp < 0:
        raise BrokenScheduleError(f"{name} of {s.chunks} chunks and {s.temp} temp slots: expected 1 or more, 0 or more")
    if s.collective in BLOCKED and s.chunks % s.ranks:
        raise BrokenScheduleError(f"{name} of {s.chunks} chunks for {s.ranks} ranks: expected as many for each rank")


class _Proof:
    """The symbolic state of all ranks.

    A slot's content is one integer: contributors as bits, above them the label, above that the number of the tree of
    additions that made it. Trees are numbered as they appear; a leaf's number is its rank's.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.number = 0
        n, chunks = schedule.ranks, schedule.chunks
        self.ranks = n
        self.everyone = (1 << n) - 1
        self.labels = (1 << chunks.bit_length()) - 1
        self.above = n + chunks.bit_length()
        self.trees: dict[tuple[int, int], int] = {}
        self.is_exchange = schedule.collective == "all_to_all"
        # A barrier carries no data: hearing of somebody twice is as good as once.
        self.is_idempotent = schedule.collective == "barrier"
        self.slots: list[tuple[list[int | None], ...]] = []
        self.half = 1
        # Happens-before through syncs alone: clock[q][p] is the first epoch of p that q has not yet met.
        self.clock = [[0] * n for _ in range(n)] if schedule.shared else []
        self.epoch = [0] * n
        self.began = 0
        self.written: dict[tuple[int, int, int], int] = {}
        self.reads: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)

    def begin(self) -> None:
        """One more call: new inputs, empty slots, the other half of the stage; epochs go on."""
        s = self.schedule
        self.slots.clear()
        for rank in range(self.ranks):
            initial = starts(s.collective, rank, s.root, self.ranks, s.chunks)
            leaves = [who << self.above | label << self.ranks | 1 << who for label, who in initial]
            self.slots.append((list(leaves), [None] * s.chunks, [None] * s.temp))
        self.half = 1 - self.half
        self.began = self.epoch[0]
        self.written = {place: epoch for place, epoch in self.written.items() if place[1] == TEMP}
        self.reads = defaultdict(list, {place: who for place, who in self.reads.items() if place[1] == TEMP})

    def contents(self, value: int | None) -> SlotContents | None:
        if value is None:
            return None
        who = frozenset(rank for rank in range(self.ranks) if value >> rank & 1)
        return value >> self.ranks & self.labels, who

    def fail(self, rank: int, words: str) -> BrokenScheduleError:
        s = self.schedule
        return BrokenScheduleError(
            f"{s.algorithm} {s.collective} of {s.ranks} ranks, round {self.number}, rank {rank}: {words}"
        )

    # One round ----------------------------------------------------------------------------------------------------

    def round(self, steps: Round) -> None:
        if any(len(step.peer) != self.ranks for step in steps):
            raise self.fail(0, f"a step's vector is not of {self.ranks} ranks")
        for step in steps:
            if step.kind not in _KINDS:
                raise self.fail(0, f"a step of an unknown kind, '{step.kind}'")
            if step.kind == "sync":
                self.meet(step)
        for step in steps:
            if step.kind in ("copy", "read"):
                for rank, peer, at, count, source_at in _parts(step):
                    self.move(step, rank, peer, at, count, source_at)
        self.messages([step for step in steps if step.kind in ("send", "recv")])

    def meet(self, step: RoundStep) -> None:
        if not self.schedule.shared:
            raise self.fail(0, "a sync in a schedule that is not marked as sharing memory")
        # A node's flags know one meeting, that of everybody: ranks that met in groups would wait for the others.
        if len(set(step.peer)) != 1 or step.peer[0] == NOBODY:
            raise self.fail(0, "a sync of some of the ranks: only all of them together can meet")
        for rank in range(self.ranks):
            self.epoch[rank] += 1
            self.clock[rank][rank] = self.epoch[rank]
        met = [max(clock[other] for clock in self.clock) for other in range(self.ranks)]
        self.clock = [list(met) for _ in range(self.ranks)]

    def move(self, step: RoundStep, rank: int, peer: int, at: int, count: int, source_at: int) -> None:
        owner = rank if step.kind == "copy" else peer
        if step.kind == "read" and not self.schedule.shared:
            raise self.fail(rank, "a read in a schedule that is not marked as sharing memory")
        if step.kind == "read" and not 0 <= peer < self.ranks:
            raise self.fail(rank, f"reads from rank {peer}")
        if step.kind == "read" and peer != rank and step.source not in self.schedule.shared:
            raise self.fail(rank, f"reads {SPACES[step.source]} of rank {peer}, which others cannot reach")
        for i in range(count):
            value = self.get(owner, step.source, source_at + i, reader=rank)
            if step.kind == "read":
                self.note_read(rank, owner, step.source, source_at + i)
            self.put(rank, step.space, at + i, value, step.reduce)

    def messages(self, steps: list[RoundStep]) -> None:
        wire: dict[tuple[int, int], list[tuple[bool, list[int]]]] = defaultdict(list)
        sent: dict[int, int] = defaultdict(int)
        for step in steps:
            if step.kind == "send":
                for rank, peer, at, count, _ in _parts(step):
                    if peer == rank or not 0 <= peer < self.ranks:
                        raise self.fail(rank, f"sends to rank {peer}")
                    values = [self.get(rank, step.space, slot, rank) for slot in range(at, at + count)]
                    wire[rank, peer].append((step.space == TEMP, values))
                    sent[rank] |= self.mask(step.space, at, count)
        arriving: list[tuple[RoundStep, int, int, list[int]]] = []
        overwritten: dict[int, int] = defaultdict(int)
        combined: dict[int, int] = defaultdict(int)
        for step in steps:
            if step.kind == "recv":
                for rank, peer, at, count, _ in _parts(step):
                    if not wire.get((peer, rank)):
                        raise self.fail(rank, f"waits for rank {peer}, which sends it nothing in this round")
                    is_temp, values = wire[peer, rank].pop(0)
                    if is_temp != (step.space == TEMP) or len(values) != count:
                        raise self.fail(
                            rank, f"expects {count} slots from rank {peer}, which sends {len(values)} of another size"
                        )
                    mask = self.mask(step.space, at, count)
                    touched = overwritten[rank] | (0 if step.reduce else combined[rank] | sent[rank])
                    if touched & mask:
                        raise self.fail(
                            rank, f"what arrives from rank {peer} overwrites slots in use in the same round"
                        )
                    (combined if step.reduce else overwritten)[rank] |= mask
                    arriving.append((step, rank, at, values))
        for (rank, peer), left in wire.items():
            if left:
                raise self.fail(
                    rank, f"sends to rank {peer}, which does not receive it in this round: it waits for ever"
                )
        for step, rank, at, values in arriving:
            for i, value in enumerate(values):
                self.put(rank, step.space, at + i, value, step.reduce)

    # Slots --------------------------------------------------------------------------------------------------------

    def mask(self, space: int, at: int, count: int) -> int:
        before = (0, self.schedule.chunks, 2 * self.schedule.chunks)[space]
        return ((1 << count) - 1) << (before + at)

    def get(self, owner: int, space: int, slot: int, reader: int) -> int:
        row = self.slots[owner][space]
        if not 0 <= slot < len(row):
            raise self.fail(reader, f"{SPACES[space]} slot {slot} of rank {owner} is outside its {len(row)}")
        value = row[slot]
        if value is None:
            raise self.fail(reader, f"{SPACES[space]} slot {slot} of rank {owner} is used before anything is in it")
        return value

    def put(self, rank: int, space: int, slot: int, value: int, reduce: bool) -> None:
        row = self.slots[rank][space]
        if space == INPUT:
            raise self.fail(rank, "writes to the caller's input")
        if not 0 <= slot < len(row):
            raise self.fail(rank, f"{SPACES[space]} slot {slot} is outside its {len(row)}")
        if reduce:
            value = self.combine(rank, space, slot, value)
        label = self.label(value)
        if space == DATA:
            at_home = label == slot
            if self.is_exchange:
                sender, piece = divmod(slot, self.schedule.segments)
                at_home = (label, value & self.everyone) == (rank * self.schedule.segments + piece, 1 << sender)
            if not at_home:
                raise self.fail(rank, f"chunk {label} is put into data slot {slot}, which has another chunk's size")
        if self.clock:
            self.note_write(rank, space, slot)
        row[slot] = value

    def combine(self, rank: int, space: int, slot: int, value: int) -> int:
        node = self.get(rank, space, slot, rank)
        label = self.label(value)
        if self.label(node) != label:
            raise self.fail(rank, f"chunk {label} is added to chunk {self.label(node)}")
        twice = node & value & self.everyone
        if twice and not self.is_idempotent:
            raise self.fail(rank, f"the contribution of rank {twice.bit_length() - 1} is counted twice in slot {slot}")
        one, other = node >> self.above, value >> self.above
        pair = (one, other) if one < other else (other, one)
        tree = self.trees.setdefault(pair, self.ranks + len(self.trees))
        return tree << self.above | label << self.ranks | (node | value) & self.everyone

    def label(self, value: int) -> int:
        return value >> self.ranks & self.labels

    # Epochs -------------------------------------------------------------------------------------------------------

    def note_read(self, rank: int, owner: int, space: int, slot: int) -> None:
        if owner == rank:
            return
        # An input counts as written when the call begins: until a sync its owner may not have arrived with it.
        place = self.place(owner, space, slot)
        if self.clock[rank][owner] <= self.written.get(place, self.began):
            raise self.fail(
                rank, f"reads {SPACES[space]} slot {slot} of rank {owner} in the epoch in which it is written"
            )
        self.reads[place].append((rank, self.epoch[rank]))

    def place(self, rank: int, space: int, slot: int) -> tuple[int, int, int]:
        on_stage = space == TEMP and TEMP in self.schedule.shared
        return rank, space, slot + self.half * self.schedule.temp * on_stage

    def note_write(self, rank: int, space: int, slot: int) -> None:
        place = self.place(rank, space, slot)
        self.require_unread(place, "is overwritten while rank {} may still read it")
        self.reads.pop(place, None)
        self.written[place] = self.epoch[rank]

    def require_unread(self, place: tuple[int, int, int], words: str) -> None:
        rank, space, slot = place
        for reader, epoch in self.reads.get(place, ()):
            if self.clock[rank][reader] <= epoch:
                raise self.fail(rank, f"{SPACES[space]} slot {slot} " + words.format(reader))

    # The end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        s = self.schedule
        bits: dict[frozenset[int], int] = {}
        for rank in range(self.ranks):
            row = self.slots[rank][DATA]
            for slot, (label, whose) in ends(s.collective, rank, s.root, self.ranks, s.chunks).items():
                if whose not in bits:
                    bits[whose] = sum(1 << who for who in whose)
                wanted = label << self.ranks | bits[whose]
                value = row[slot]
                if value is None or value & ((1 << self.above) - 1) != wanted:
                    raise self.fail(rank, f"ends with {self.words(row[slot])} in slot {slot}, not {self.words(wanted)}")
            if s.collective == "all_reduce" and row != self.slots[0][DATA]:
                raise self.fail(rank, "adds in another order than rank 0: their sums could differ in the last bit")
        for place in self.reads:
            if place[1] != TEMP:  # the stage is ours until its half comes round again
                self.require_unread(place, "goes back to the caller while rank {} may still read it")

    def words(self, value: int | None) -> str:
        if value is None:
            return "nothing"
        who = [str(rank) for rank in range(self.ranks) if value >> rank & 1]
        return f"chunk {self.label(value)} of ranks {','.join(who)}"


def _parts(step: RoundStep) -> list[tuple[int, int, int, int, int]]:
    """(rank, peer, at, count, source_at) of all who take part."""
    if isinstance(step.peer, Sparse):
        ranks = sorted(rank for rank, peer in step.peer.values.items() if peer != NOBODY)
        return [(r, step.peer[r], step.at[r], step.count[r], step.source_at[r]) for r in ranks if step.count[r] > 0]
    everyone = zip(range(len(step.peer)), step.peer, step.at, step.count, step.source_at, strict=True)
    return [part for part in everyone if part[1] != NOBODY and part[3] > 0]
