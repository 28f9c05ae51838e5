"""What a rank does at one point of a training step, and the list of such actions for every rank.

The one idea: whoever designs a schedule writes only computing actions (F, B, I, W, FB) and a placement of chunks on
ranks. Passes (`passes.py`) add everything that moves data; checking, timing, drawing and running read the lists and
know nothing of how they were made.

A model is cut into chunks of consecutive layers. Chunk c reads the output of chunk c-1. Each chunk runs F, and B or
I and W, once for every microbatch and every slice of its tokens.

Where ranks share out experts, rows travel within a pass (DISPATCH and COMBINE). A list does not name these exchanges:
they follow from the pass (`StepProgram.within`), and have a lane of their own beside computing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from tilemesh.core.step.placement import ChunkPlacement

Kind = Literal[
    "F",  # forward pass
    "B",  # whole backward pass: I and W in one
    "I",  # gradient of the input, from the gradient of the output
    "W",  # gradient of the weights, with what I left for it
    "FB",  # F of one chunk and B of `pair` as one action that may overlap them
    "SEND",  # the chunk's output to the next chunk, or the gradient of its input to the chunk before
    "RECV",  # the chunk's input, or the gradient of its output; the buffer is taken here, F, B or I waits for it
    "GATHER",  # makes weights whole that are cut over ranks (ZeRO-3)
    "FREE",  # gives gathered weights back
    "REDUCE",  # sums the gradients of a chunk over the ranks that have parts of it; scatters them under ZeRO
    "UPDATE",  # optimizer step of a chunk: makes `version` of its weights
    "RECOMPUTE",  # forward pass again, for activations that F did not keep
    "OUT",  # moves activations, weights or optimizer states to the host's memory ...
    "IN",  # ... and back
    "DISPATCH",  # within a pass: a layer's rows to the ranks that have their experts ...
    "COMBINE",  # ... and the results back; of gradients COMBINE comes first
]
Payload = Literal["", "activation", "gradient", "weights", "states"]
"""What actions that move data move. An activation that is sent is a chunk's output, one that is moved out is all that
the chunk keeps for backward."""

COMPUTE: tuple[Kind, ...] = ("F", "B", "I", "W", "FB", "RECOMPUTE")
PASSES: tuple[Kind, ...] = ("F", "B", "I", "W", "FB")
WITHIN: tuple[Kind, ...] = ("DISPATCH", "COMBINE")
"""What happens within passes."""
WORDS: dict[tuple[Kind, Payload], str] = {
    ("F", ""): "F", ("B", ""): "B", ("I", ""): "I", ("W", ""): "W", ("RECOMPUTE", ""): "RECOMPUTE",
    ("SEND", "activation"): "SEND_F", ("RECV", "activation"): "RECV_F",
    ("SEND", "gradient"): "SEND_B", ("RECV", "gradient"): "RECV_B",
    ("GATHER", "weights"): "UNSHARD", ("FREE", "weights"): "RESHARD", ("REDUCE", "gradient"): "REDUCE_GRAD",
    ("UPDATE", "weights"): "UPDATE",
    ("OUT", "activation"): "OUT", ("IN", "activation"): "IN",
    ("OUT", "weights"): "OUT_WEIGHTS", ("IN", "weights"): "IN_WEIGHTS",
    ("OUT", "states"): "OUT_STATES", ("IN", "states"): "IN_STATES",
    ("DISPATCH", "activation"): "DISPATCH_F", ("DISPATCH", "gradient"): "DISPATCH_B",
    ("COMBINE", "activation"): "COMBINE_F", ("COMBINE", "gradient"): "COMBINE_B",
}  # fmt: skip
"""How an action is written: torch's words, where it has one."""
EVERY = -1
"""The microbatch of an action that is about no single one."""


class Action(NamedTuple):
    """One entry of a rank's list."""

    kind: Kind
    chunk: int
    microbatch: int = EVERY
    slice: int = 0
    version: int = 0
    """Of the weights: that a pass reads, a GATHER makes whole, an UPDATE makes. The step begins with version 0."""
    of: Payload = ""
    pair: Action | None = None
    """The backward pass of an FB."""
    layer: int = EVERY
    """Of DISPATCH and COMBINE: whose rows travel."""

    def __str__(self) -> str:
        """As in torch's lists: `3SEND_F1` is chunk 3 sending its output for microbatch 1 (`text.py` reads them)."""
        if self.kind == "FB":
            return f"({';'.join(str(part) for part in parts(self))})OVERLAP_F_B"
        microbatch = "" if self.microbatch == EVERY else str(self.microbatch)
        piece = f".{self.slice}" if self.slice else ""
        version = f"@{self.version}" if self.version else ""
        layer = "" if self.layer == EVERY else f"/{self.layer}"
        return f"{self.chunk}{WORDS[self.kind, self.of]}{microbatch}{piece}{version}{layer}"


class PassDone(NamedTuple):
    """Something that has happened once a pass is done: F, I (B makes it too) or W (B too)."""

    kind: Literal["F", "I", "W"]
    chunk: int
    microbatch: int
    slice: int


def parts(action: Action) -> tuple[Action, ...]:
    """The passes an action consists of: two of FB, one of the others, none of an action that is not a pass."""
    if action.kind == "FB":
        assert action.pair is not None
        return action._replace(kind="F", pair=None), action.pair
    return (action,) if action.kind in PASSES else ()


def makes(part: Action) -> tuple[PassDone, ...]:
    """What has happened after F, B, I or W."""
    where = (part.chunk, part.microbatch, part.slice)
    if part.kind == "F":
        return (PassDone("F", *where),)
    if part.kind == "B":
        return (PassDone("I", *where), PassDone("W", *where))
    return (PassDone("I" if part.kind == "I" else "W", *where),)


class RoutedLayers(NamedTuple):
    """Of a chunk, the layers whose experts other ranks have too."""

    stretches: tuple[tuple[int, ...], ...] = ()
    """In groups that a backward pass takes together."""
    again: bool = False
    """Whether it computes each group again first, so that rows travel once more before their gradients do."""

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for stretch in self.stretches for layer in stretch)

    @property
    def backward(self) -> tuple[tuple[bool, int], ...]:
        """In the order of a backward pass: whether rows travel, or their gradients, and of which layer."""
        order: list[tuple[bool, int]] = []
        for stretch in reversed(self.stretches):
            order += [(True, layer) for layer in stretch if self.again]
            order += [(False, layer) for layer in reversed(stretch)]
        return tuple(order)


@dataclass(frozen=True)
class StepProgram:
    """The actions of every rank, in order."""

    name: str
    placement: ChunkPlacement
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    slices: int = 1
    """Pieces of a sequence that pass through the chunks one after the other (TeraPipe)."""
    versions: int = 1
    """Versions of a chunk's weights that a rank holds at once: an UPDATE overwrites the oldest."""
    keeps_versions: bool = True
    """Whether a backward pass reads the version that its forward pass read, as autograd would have it."""
    routed: tuple[RoutedLayers, ...] = ()
    """By chunk, where ranks share out experts."""

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def chunks(self) -> int:
        return self.placement.chunks

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """Kinds of actions that occur."""
        return frozenset(action.kind for actions in self.actions for action in actions)

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int, int]]:
        """Chunk, microbatch and slice of the forward passes that keep their input alone."""
        return frozenset(
            (action.chunk, action.microbatch, action.slice)
            for actions in self.actions
            for action in actions
            if action.kind == "RECOMPUTE"
        )

    def needs(self, part: Action) -> tuple[PassDone, ...]:
        """What has to have happened before F, B, I or W; an event of another rank reaches this one as a message.

        Slices of a sequence go forward in order, since a later one attends to the keys of those before it, and
        backward in the opposite order, since those keys' gradients come from the later ones.
        """
        kind, chunk, microbatch, piece = part.kind, part.chunk, part.microbatch, part.slice
        if kind == "W":
            return (PassDone("I", chunk, microbatch, piece),)
        needs = []
        if kind == "F":
            if chunk:
                needs.append(PassDone("F", chunk - 1, microbatch, piece))
            if piece:
                needs.append(PassDone("F", chunk, microbatch, piece - 1))
            return tuple(needs)
        needs.append(PassDone("F", chunk, microbatch, piece))
        if chunk < self.chunks - 1:
            needs.append(PassDone("I", chunk + 1, microbatch, piece))
        if piece < self.slices - 1:
            needs.append(PassDone("I", chunk, microbatch, piece + 1))
        return tuple(needs)

    def within(self, action: Action) -> tuple[Action, ...]:
        """What a pass exchanges with the ranks that have experts of its layers, in its order."""
        if action.kind == "FB":
            return tuple(inner for part in parts(action) for inner in self.within(part))
        if not self.routed or action.kind not in ("F", "RECOMPUTE", "B", "I"):
            return ()
        mine = self.routed[action.chunk]
        is_forward = action.kind in ("F", "RECOMPUTE")
        steps = tuple((True, layer) for layer in mine.layers) if is_forward else mine.backward
        there, back = action._replace(kind="DISPATCH", version=0), action._replace(kind="COMBINE", version=0)
        return tuple(
            inner._replace(of="activation" if rows else "gradient", layer=layer)
            for rows, layer in steps
            for inner in ((there, back) if rows else (back, there))
        )

    def messages(self, part: Action) -> tuple[tuple[Action, Action, int], ...]:
        """What a pass sends to another rank: the SEND, the RECV that takes it, and the receiver."""
        forward = part.kind == "F"
        chunk = part.chunk + (1 if forward else -1)
        if part.kind == "W" or not 0 <= chunk < self.chunks:
            return ()
        receiver = self.placement.rank(chunk, part.microbatch)
        if receiver == self.placement.rank(part.chunk, part.microbatch):
            return ()
        send = part._replace(kind="SEND", version=0, of="activation" if forward else "gradient")
        return ((send, send._replace(kind="RECV", chunk=chunk), receiver),)
