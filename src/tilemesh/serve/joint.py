"""Ranks of several replicas that hold the experts of one model together: a pass of one replica is a pass of all.

The one idea: replicas keep schedulers, pages and sockets of their own, and only passes meet. Whoever asks for one first
leads it: it takes what others have asked for by then, tells ranks of the rest to stand by (they compute their experts
for others' tokens), and hands out the logits. It waits for replicas that were in the last pass for half as long as that
took, so that replicas at work go in step and an idle one costs nobody more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilemesh.core.plan import ParallelPlan
from tilemesh.serve.batch import TokenSpan
from tilemesh.serve.ranks import RankProcesses, RanksLostError, embedding_order, order_ranks
from tilemesh.serve.scheduler import StepPlan
from tilemesh.serve.wire import pack_step, receive, send, unpack_tensor

Message = tuple[Mapping[str, Any], bytes]
_OTHERS = "a rank that computes this model is gone, and others were started in its place"
STAND_BY: tuple[Message, ...] = (({"order": "stand by"}, b""),)


@dataclass(eq=False)
class _Turn:
    """What one replica asks its ranks for in a pass, and what came of it."""

    messages: Sequence[Message]
    all_answer: bool
    """Its ranks, or the first of them alone."""
    answer: tuple[dict[str, Any], bytearray] | None = None
    error: BaseException | None = None


class JointRanks:
    """`replicas` groups of `ranks` processes, of which `ep` neighbours along replicas share out the experts."""

    def __init__(self, replicas: int, ranks: int, ep: int) -> None:
        self.ranks = ranks
        self.plan = ParallelPlan(dp=replicas, tp=ranks, ep=ep)
        self.meeting = threading.Barrier(replicas)
        """Where replicas wait for one another between two steps, to change what all compute with."""
        self._condition = threading.Condition()
        self._group: RankProcesses | None = None
        self._generation = 0
        self._members: set[JointMember] = set()
        self._turns: dict[int, _Turn] = {}
        self._leads = False
        self._last: set[int] = set()
        self._patience_s = 0.0

    def join(self, replica: int, environ: Mapping[str, str], arguments: tuple[Any, ...]) -> JointMember:
        """A replica's ranks. The first call starts those of all, as does the first after they were lost."""
        with self._leading():
            if self._group is None:
                self._group, self._generation = RankProcesses(self.plan.world, environ, arguments), self._generation + 1
                late, self._turns = self._turns, {}
                for turn in late.values():  # they meant the ranks before, and what lay in their pages
                    turn.error = RanksLostError(_OTHERS)
            member = JointMember(self, replica, self._generation)
            self._members.add(member)
            return member

    def leave(self, member: JointMember) -> None:
        """The last one to leave ends the ranks; where they are lost, the first one."""
        with self._leading():
            self._members.discard(member)
            group = self._group
            if group is None or member.generation != self._generation:
                return
            if group.ended is not None or not any(other.generation == self._generation for other in self._members):
                self._group = None
                group.close()

    def ready(self, member: JointMember) -> None:
        with self._leading():
            self._ranks_of(member).ready()

    def order(
        self, member: JointMember, header: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], everywhere: bool
    ) -> None:
        """What is no pass. `everywhere`: of the ranks of all replicas."""
        with self._leading(), self._ranks_of(member).connected() as connections:
            order_ranks(connections if everywhere else connections[self._places(member.replica)], header, tensors)

    def take(self, member: JointMember, turn: _Turn) -> tuple[dict[str, Any], bytearray]:
        """Have a pass made, together with what others ask for."""
        with self._condition:
            self._ranks_of(member)
            self._turns[member.replica] = turn
            self._condition.notify_all()
            while turn.answer is None and turn.error is None and self._leads:
                self._condition.wait()
            leads = turn.answer is None and turn.error is None
            if leads:
                self._leads = True
                end = time.monotonic() + self._patience_s
                while not self._last <= self._turns.keys() and (left := end - time.monotonic()) > 0:
                    self._condition.wait(left)
                turns, self._turns = self._turns, {}
        if leads:
            began_s = time.monotonic()
            try:
                self._pass(member, turns)
            except BaseException as error:
                for other in turns.values():
                    other.error = error
            with self._condition:
                self._leads, self._last = False, set(turns)
                self._patience_s = (time.monotonic() - began_s) / 2
                self._condition.notify_all()
        if turn.answer is None:
            assert turn.error is not None
            raise turn.error
        return turn.answer

    def _pass(self, member: JointMember, turns: Mapping[int, _Turn]) -> None:
        with self._ranks_of(member).connected() as connections:
            for place, connection in enumerate(connections):
                turn = turns.get(place // self.ranks)
                for header, body in STAND_BY if turn is None else turn.messages:
                    send(connection, header, body)
            for replica, turn in turns.items():
                own = connections[self._places(replica)]
                turn.answer, *_ = [receive(connection) for connection in (own if turn.all_answer else own[:1])]

    def _places(self, replica: int) -> slice:
        return slice(replica * self.ranks, (replica + 1) * self.ranks)

    def _ranks_of(self, member: JointMember) -> RankProcesses:
        if self._group is None or member.generation != self._generation:
            raise RanksLostError(_OTHERS)
        return self._group

    @contextlib.contextmanager
    def _leading(self) -> Iterator[None]:
        """While no pass is made: connections are one thread's at a time."""
        with self._condition:
            while self._leads:
                self._condition.wait()
            self._leads = True
        try:
            yield
        finally:
            with self._condition:
                self._leads = False
                self._condition.notify_all()


@dataclass(eq=False)
class JointMember:
    """The ranks of one replica, as a `RankRunner` knows them."""

    joint: JointRanks
    replica: int
    generation: int
    """Which ranks it means: of lost ones, others were started in their place."""

    def step(self, plan: StepPlan, spans: Sequence[TokenSpan]) -> Tensor:
        return unpack_tensor(*self.joint.take(self, _Turn([pack_step(plan, spans)], all_answer=False)))

    def embed(self, tokens: Sequence[int], pooling: str, adapter: int) -> list[float]:
        messages = [(embedding_order(tokens, pooling, adapter), b""), ({"name": None}, b"")]
        vector: list[float] = self.joint.take(self, _Turn(messages, all_answer=True))[0]["vector"]
        return vector

    def order(
        self, header: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]] = (), everywhere: bool = False
    ) -> None:
        self.joint.order(self, header, tensors, everywhere)

    def ready(self) -> None:
        self.joint.ready(self)

    def close(self) -> None:
        self.joint.leave(self)
