"""One chunk of a pipeline's model: its passes by autograd, microbatch by microbatch.

Between a forward and its backward pass a chunk keeps the input and the edge of the graph it made, not its output: that
is the next chunk's, and freed once it has been sent. A chunk with the head computes the loss and counts it.

B: rows; T: tokens on this rank; D: width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import Payload
from tilemesh.model.deferral import Deferral, WeightProduct, multiply
from tilemesh.model.documents import document_places, unmarked
from tilemesh.model.dropout import DropoutPlace
from tilemesh.model.experts import Choices
from tilemesh.parallel.laid import CompiledRegions, HeadLesson, Laid, StepPiece, Teaching
from tilemesh.parallel.offload import ChunkEntry, HostActivations
from tilemesh.parallel.slices import SliceCache, outside_of_graphs


@dataclass
class StepData:
    """What the chunks of a rank are told of a step before it begins."""

    pieces: Sequence[StepPiece] = ()
    dropout_seed: int | Tensor | None = None
    scale: float = 1.0
    """A factor on the loss."""
    slices: int = 1
    """Into which every sequence is cut ..."""
    lengths: Callable[[int], Sequence[int]] = lambda tokens: (tokens,)
    """... and how long each of them is in a sequence of so many tokens."""
    count: Callable[[Tensor, Tensor], None] = lambda total, count: None
    """Told the summed loss of a microbatch and how many targets counted."""
    teaching: Teaching | None = None
    """Of a student, on ranks with the head."""

    def piece(self, place: Place) -> tuple[Tensor, Tensor, DropoutPlace]:
        """Tokens and targets of one slice of a microbatch, and where they stand in the step's batch."""
        microbatch, number = place
        tokens_BT, targets_BT, row = self.pieces[microbatch]
        lengths = self.lengths(tokens_BT.shape[1])
        begin = sum(lengths[:number])
        here = slice(begin, begin + lengths[number])
        return tokens_BT[:, here], targets_BT[:, here], DropoutPlace(row=row, token=begin)

    def lesson(self, place: Place) -> HeadLesson | None:
        """Of one slice of a microbatch: the teacher is given all tokens up to its end."""
        if self.teaching is None:
            return None
        tokens_BT = self.pieces[place[0]].tokens
        lengths = self.lengths(tokens_BT.shape[1])
        return self.teaching(tokens_BT[:, : sum(lengths[: place[1] + 1])], lengths[place[1]])


Place = tuple[int, int]
"""A microbatch and a slice of it."""


class _Graph(NamedTuple):
    """What a forward pass leaves for its backward pass."""

    x: Tensor | None
    root: Any = None
    """Where backward begins: the edge of a graph, or the loss; None while it has to be computed again."""
    dtype: torch.dtype | None = None
    """Of what the forward pass made."""
    cache: SliceCache | None = None
    """Of a slice: the keys and values that it shares with others."""
    taken: list[Tensor] | None = None
    """Gets the gradient of the input, where that is no leaf of the graph."""
    router_loss: Tensor | None = None
    """Of a chunk without the head, where routers have losses: another root."""
    choices: Choices | None = None
    """Of experts, where the pass has to be computed again."""


def _run_backward(roots: tuple[Any, ...], gradients: tuple[Tensor, ...]) -> None:
    """`torch.autograd.backward` without its look at shapes (the engine has its own), for which it loads sympy: 62 MiB
    of every rank, and a second of its first step."""
    run: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None:
        torch.autograd.backward(roots, gradients)
    else:
        run(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


@dataclass
class ModelChunk:
    """Passes of one chunk. `data` is shared by all chunks of the rank."""

    laid: Laid
    data: StepData
    deferral: Deferral | None = None
    """Of the chunk's projections, where backward comes in two halves."""
    number: int = 0
    activations: HostActivations | None = None
    """Where what is kept for the backward pass may go to the host's memory."""
    regions: CompiledRegions | None = None
    """What passes call instead of the model's own layers and head."""
    _graphs: dict[Place, _Graph] = field(default_factory=dict)
    _products: dict[Place, list[WeightProduct]] = field(default_factory=dict)

    def compile(self) -> None:
        """Let passes call compiled layers and a compiled head."""
        if self.deferral is not None:
            self.deferral.stay_out_of_graphs(self.laid.module)
        self.regions = self.laid.compiled_regions()

    def forward(self, microbatch: int, piece: int, x: Tensor | None, *, keeps: bool) -> Tensor | None:
        return self._run((microbatch, piece), None if x is None else x.detach(), keeps=keeps, is_first=True)

    def recompute(self, microbatch: int, piece: int) -> None:
        place = (microbatch, piece)
        before = self._graphs.pop(place)
        self._run(place, before.x, keeps=True, is_first=False, choices=before.choices)

    def _run(
        self, place: Place, x: Tensor | None, *, keeps: bool, is_first: bool, choices: Choices | None = None
    ) -> Tensor | None:
        tokens_BT, targets_BT, where = self.data.piece(place)
        if not keeps:
            choices = {}
        options: dict[str, Any] = {"x_BTD": x, "regions": self.regions, "choices": choices}
        if self.data.dropout_seed is not None:
            options |= {"dropout_seed": self.data.dropout_seed, "place": where}
        cache = None
        if self.data.slices > 1:
            assert isinstance(where.token, int)
            cache = options["cache"] = self._slice(place, tokens_BT, where.token)
            tokens_BT = unmarked(tokens_BT)  # the cache knows where documents begin
        taken: list[Tensor] | None = None
        if x is not None and keeps and self.activations is not None:
            taken = []
            anchor = torch.empty(0, requires_grad=True, device=x.device)
            options["x_BTD"], x = ChunkEntry.apply(anchor, x, taken), None  # type: ignore[no-untyped-call]
        elif x is not None:
            x.requires_grad_(keeps)
        with torch.set_grad_enabled(keeps), self._keeping(place, keeps):
            if self.laid.has_head:
                total, count = self.laid.loss(tokens_BT, targets_BT, lesson=self.data.lesson(place), **options)
                if is_first:
                    self.data.count(total, count)
                self._graphs[place] = _Graph(x, total if keeps else None, total.dtype, cache, taken, None, choices)
                return None
            y_BTD, _, loss = self.laid.activations(tokens_BT, targets_BT=targets_BT, **options)
            if is_first and loss is not None:
                self.data.count(loss, torch.zeros_like(loss))
        edge = torch.autograd.graph.get_gradient_edge(y_BTD) if keeps else None
        self._graphs[place] = _Graph(x, edge, y_BTD.dtype, cache, taken, loss if keeps else None, choices)
        return y_BTD.detach().to(self.laid.stream_dtype)

    def _keeping(self, place: Place, keeps: bool) -> Any:
        return (
            nullcontext() if self.activations is None or not keeps else self.activations.keeping((self.number, *place))
        )

    def _slice(self, place: Place, tokens_BT: Tensor, begin: int) -> SliceCache:
        """What this slice attends through: its own keys and values, and those of the slices before it."""
        microbatch, number = place
        earlier = [self._graphs[microbatch, before].cache for before in range(number)]
        known = [cache for cache in earlier if cache is not None]
        end, documents = begin + tokens_BT.shape[1], None
        if self.laid.use.marked:
            documents = document_places(self.data.pieces[microbatch].tokens[:, :end])
        kind = SliceCache if self.regions is None else outside_of_graphs()
        return kind(known, begin, tokens_BT, end, documents, self.laid.seams.context)

    def backward(self, microbatch: int, piece: int, gradient: Tensor | None, *, splits: bool) -> Tensor | None:
        x, root, dtype, cache, taken, router_loss, _ = self._graphs.pop((microbatch, piece))
        if self.activations is not None:
            self.activations.ready((self.number, microbatch, piece))
        if gradient is None:
            assert isinstance(root, Tensor)
            gradient = torch.full_like(root, self.data.scale)
        if splits and self.deferral is None:
            raise UsageError("a backward pass in two halves of layers that were not made for it: lay the model anew")
        if self.deferral is not None:
            self.deferral.is_waiting = splits
        roots, gradients = ([], []) if cache is None else cache.roots()
        if router_loss is not None:
            roots, gradients = [*roots, router_loss], [*gradients, torch.full_like(router_loss, self.data.scale)]
        _run_backward((root, *roots), (gradient.to(dtype), *gradients))
        if splits and self.deferral is not None:
            self._products[microbatch, piece] = self.deferral.take()
        if taken is not None:
            return taken.pop()
        if x is None:
            return None
        of_input, x.grad = x.grad, None
        return of_input

    def weights(self, microbatch: int, piece: int) -> None:
        multiply(self._products.pop((microbatch, piece)))

    def put_off(self) -> Iterator[Tensor]:
        """Operands of the products that W will do."""
        for products in self._products.values():
            for product in products:
                yield from (product.x, product.gradient)

    def landing(self, microbatch: int, piece: int, of: Payload) -> Tensor:
        return self.laid.empty_stream(self.data.piece((microbatch, piece))[0])
