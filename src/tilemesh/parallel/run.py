"""The runtime of a training step: one rank's list of actions, done in its order.

The one idea: the list (`core/step/`) says what and in which order, and was proved before; here each kind of action
becomes one call of something that was handed in. What a pass computes is a `ChunkPasses`' business, what is gathered,
summed, updated or moved a `Service`'s; so stages that only sleep run by the same code as a Transformer's.

Messages do not hold up computing: a SEND is begun and left alone, a RECV takes its buffer and is begun, and the pass
that reads it waits. Where MPI moves a message only when it is asked to and a rank has cores to spare, a thread asks;
what is too large for that is waited for at once.
Each message has a tag of its own, so a list in another order than the neighbour's is seen by the wait that never ends,
and not by wrong numbers. While a rank waits, the watchdog of its communicator tells every other rank which action it is
at and for whom it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import Action, Kind, Payload, StepProgram, parts

_UNDER_WAY = 4  # sends whose buffers are held before somebody looks whether they have been taken
# Beyond this a thread that asks MPI now and then is slower than a rank that waits: with messages of 8 MiB between 4
# ranks on 16 cores a step took 598 ms moved by the thread and 445 waited for, with 1 MiB 356 and 354.
_MOST_LEFT = 1 << 20


class ChunkPasses(Protocol):
    """What a rank can do with one chunk. A place is a microbatch and a slice of it."""

    def forward(self, microbatch: int, piece: int, x: Tensor | None, *, keeps: bool) -> Tensor | None:
        """F: from the output of the chunk before (the first has none) to what the next one is given (the last: none).

        Without `keeps` only the input is kept, until RECOMPUTE.
        """

    def recompute(self, microbatch: int, piece: int) -> None:
        """RECOMPUTE: the forward pass again, with everything kept."""

    def backward(self, microbatch: int, piece: int, gradient: Tensor | None, *, splits: bool) -> Tensor | None:
        """B, or with `splits` I: from the gradient of the output to that of the input (of the first: none)."""

    def weights(self, microbatch: int, piece: int) -> None:
        """W: the gradients that I put off."""

    def landing(self, microbatch: int, piece: int, of: Payload) -> Tensor:
        """A buffer for what another rank sends: the chunk's input, or the gradient of its output."""


Service = Callable[[Action], None]
"""Does an action that is no pass and no message: gathers, frees, sums, updates or moves."""
Services = Mapping[tuple[Kind, Payload], Service]
"""By the kind of the action and what it is of: a step needs those that its list names."""


class _Arrival(NamedTuple):
    """A message that was asked for."""

    handle: Any
    buffer: Tensor


_Key = tuple[Payload, int, int, int]
"""What travels: of which kind, and the chunk, microbatch and slice that it is for."""


class StepRunner:
    """One rank's steps by one list.

    `comm`: the ranks of the pipeline, by their places in the program. `chunks`: those that this rank holds. `note`: is
    told each action before it is done. `around`: does it, where somebody wants to see when it begins and ends. `ready`:
    called with a chunk before each pass that reads its weights, which may have to be waited for.
    """

    def __init__(
        self,
        program: StepProgram,
        comm: Communicator,
        chunks: Mapping[int, ChunkPasses],
        services: Services = MappingProxyType({}),
        note: Callable[[str], None] = lambda text: None,
        around: Callable[[Action, Callable[[], None]], None] | None = None,
        ready: Callable[[int], None] = lambda chunk: None,
    ) -> None:
        if comm.size != program.ranks:
            raise UsageError(f"{program.name} is for {program.ranks} ranks and there are {comm.size}: make them agree")
        lacking = set(program.placement.held[comm.rank]) - set(chunks)
        if lacking:
            raise UsageError(f"{program.name}: rank {comm.rank} was not given chunk {min(lacking)}, which it holds")
        self.program, self.comm, self.chunks, self.services = program, comm, chunks, services
        self.note, self.around, self.ready = note, around, ready
        own = program.actions[comm.rank]
        self.waits_for_large = comm.is_moved_apart
        # nccl, which knows no tags, wants the messages of two ranks in one order on both; and a send may only be waited
        # for in the order that was proved.
        ordered = own if comm.transport.device is not None or self.waits_for_large else sends_first(own)
        self.actions = [(action, str(action)) for action in ordered]
        self.has_messages = any(action.kind in ("SEND", "RECV") for action in own)
        self.arrivals: dict[_Key, _Arrival] = {}
        self.here: dict[_Key, Tensor] = {}
        """What a pass of this rank gave to another one of it, or to a SEND: under the key of who is to have it."""
        self.sending: list[tuple[Any, Tensor]] = []

    def __call__(self) -> None:
        """One step."""
        with self.comm.moving() if self.has_messages else nullcontext():
            for action, text in self.actions:
                self.note(text)
                if self.around is None:
                    self._do(action)
                else:
                    self.around(action, lambda action=action: self._do(action))  # type: ignore[misc]
            self.note("waiting for what was sent")
            self.flush()

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""
        for handle, _ in self.sending:
            handle.wait()
        self.sending.clear()

    def _do(self, action: Action) -> None:
        match action.kind:
            case "F" | "B" | "I" | "W" | "FB":
                if len(self.sending) > _UNDER_WAY:
                    self._let_go()
                for part in parts(action):
                    self._pass(part)
            case "RECOMPUTE":
                self.ready(action.chunk)
                self.chunks[action.chunk].recompute(action.microbatch, action.slice)
            case "SEND":
                self._send(action)
            case "RECV":
                self._receive(action)
            case _:
                service = self.services.get((action.kind, action.of))
                if service is None:
                    raise UsageError(f"{action}: this step has nothing that does {action.kind} of {action.of}")
                service(action)

    def _pass(self, part: Action) -> None:
        chunk, place = self.chunks[part.chunk], (part.microbatch, part.slice)
        if part.kind == "W":
            chunk.weights(*place)
            return
        forward = part.kind == "F"
        top = self.program.chunks - 1
        of: Payload = "activation" if forward else "gradient"
        has_neighbour = part.chunk > 0 if forward else part.chunk < top
        arrived = self._take((of, part.chunk, *place)) if has_neighbour else None
        self.ready(part.chunk)
        if forward:
            keeps = (part.chunk, *place) not in self.program.recomputed
            result = chunk.forward(*place, arrived, keeps=keeps)
        else:
            result = chunk.backward(*place, arrived, splits=part.kind == "I")
        after = part.chunk + (1 if forward else -1)
        if 0 <= after <= top:
            assert result is not None
            self.here[of, after, *place] = result

    def _take(self, key: _Key) -> Tensor:
        """What a pass is given: from a pass of this rank, or from a message, which is waited for."""
        if key in self.here:
            return self.here.pop(key)
        arrival = self.arrivals.pop(key)
        arrival.handle.wait()
        return arrival.buffer

    def _send(self, action: Action) -> None:
        after = action.chunk + (1 if action.of == "activation" else -1)
        tensor = self.here.pop((action.of, after, action.microbatch, action.slice)).contiguous()
        receiver = self.program.placement.rank(after, action.microbatch)
        handle = self.comm.isend(tensor, receiver, self._tag(action, after), sized=False)
        self.sending.append((handle, tensor))
        if self.waits_for_large and tensor.nbytes > _MOST_LEFT:
            self.flush()

    def _receive(self, action: Action) -> None:
        before = action.chunk + (-1 if action.of == "activation" else 1)
        buffer = self.chunks[action.chunk].landing(action.microbatch, action.slice, action.of)
        source = self.program.placement.rank(before, action.microbatch)
        handle = self.comm.irecv(buffer, source, self._tag(action, action.chunk), sized=False)
        self.arrivals[action.of, action.chunk, action.microbatch, action.slice] = _Arrival(handle, buffer)

    def _tag(self, action: Action, chunk: int) -> int:
        """One for each message of a step. Where a library has fewer tags, messages of one tag still come in order."""
        place = (chunk * self.program.microbatches + action.microbatch) * self.program.slices + action.slice
        return (2 * place + (action.of == "gradient")) % self.comm.transport.tags

    def _let_go(self) -> None:
        """Of the buffers of what has been taken. Where messages move by themselves looking at them is dear, and the
        oldest are waited for; that holds up nobody, since the list was proved with sends that block."""
        if self.comm.transport.caps.moves_alone:
            while len(self.sending) > _UNDER_WAY:
                self.sending.pop(0)[0].wait()
        else:
            self.sending = [sent for sent in self.sending if not sent[0].test()]


def sends_first(actions: Sequence[Action]) -> list[Action]:
    """Of messages that follow one another, those that leave before those that come: another rank waits for them."""
    ordered: list[Action] = []
    waiting: list[Action] = []
    for action in actions:
        if action.kind == "RECV":
            waiting.append(action)
            continue
        if action.kind != "SEND":
            ordered += waiting
            waiting = []
        ordered.append(action)
    return ordered + waiting
