"""One chunk of a pipeline's model: its passes by autograd, microbatch by microbatch.

Between a forward and its backward pass a chunk keeps the input and the edge of the graph it made, not its output: that
is the next chunk's, and freed once it has been sent. A chunk with the head computes the loss and counts it.

B: rows; T: tokens on this rank; D: width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import Payload
from tilemesh.model.deferral import Deferral, WeightProduct, multiply
from tilemesh.model.dropout import DropoutPlace
from tilemesh.parallel.laid import Laid, StepPiece


@dataclass
class StepData:
    """What the chunks of a rank are told of a step before it begins."""

    pieces: Sequence[StepPiece] = ()
    dropout_seed: int | Tensor | None = None
    scale: float = 1.0
    """A factor on the loss."""
    count: Callable[[Tensor, Tensor], None] = lambda total, count: None
    """Told the summed loss of a microbatch and how many targets counted."""


class _Graph(NamedTuple):
    """What a forward pass leaves for its backward pass."""

    x: Tensor | None
    root: Any = None
    """Where backward begins: the edge of a graph, or the loss; None while it has to be computed again."""
    dtype: torch.dtype | None = None
    """Of what the forward pass made."""


@dataclass
class ModelChunk:
    """Passes of one chunk. `data` is shared by all chunks of the rank."""

    laid: Laid
    data: StepData
    deferral: Deferral | None = None
    """Of the chunk's projections, where backward comes in two halves."""
    _graphs: dict[int, _Graph] = field(default_factory=dict)
    _products: dict[int, list[WeightProduct]] = field(default_factory=dict)

    def forward(self, microbatch: int, piece: int, x: Tensor | None, *, keeps: bool) -> Tensor | None:
        return self._run(microbatch, None if x is None else x.detach(), keeps=keeps, is_first=True)

    def recompute(self, microbatch: int, piece: int) -> None:
        self._run(microbatch, self._graphs.pop(microbatch).x, keeps=True, is_first=False)

    def _run(self, microbatch: int, x: Tensor | None, *, keeps: bool, is_first: bool) -> Tensor | None:
        tokens_BT, targets_BT, row = self.data.pieces[microbatch]
        options: dict[str, Any] = {"x_BTD": x}
        if self.data.dropout_seed is not None:
            options |= {"dropout_seed": self.data.dropout_seed, "place": DropoutPlace(row=row)}
        if x is not None:
            x.requires_grad_(keeps)
        with torch.set_grad_enabled(keeps):
            if self.laid.has_head:
                total, count = self.laid.loss(tokens_BT, targets_BT, **options)
                if is_first:
                    self.data.count(total, count)
                self._graphs[microbatch] = _Graph(x, total if keeps else None, total.dtype)
                return None
            made = self.laid.activations(tokens_BT, **options)
        edge = torch.autograd.graph.get_gradient_edge(made) if keeps else None
        self._graphs[microbatch] = _Graph(x, edge, made.dtype)
        return made.detach().to(self.laid.stream_dtype)

    def backward(self, microbatch: int, piece: int, gradient: Tensor | None, *, splits: bool) -> Tensor | None:
        x, root, dtype = self._graphs.pop(microbatch)
        if gradient is None:
            assert isinstance(root, Tensor)
            gradient = torch.full_like(root, self.data.scale)
        if splits and self.deferral is None:
            raise UsageError("a backward pass in two halves of layers that were not made for it: lay the model anew")
        if self.deferral is not None:
            self.deferral.is_waiting = splits
        torch.autograd.backward((root,), (gradient.to(dtype),))
        if splits and self.deferral is not None:
            self._products[microbatch] = self.deferral.take()
        if x is None:
            return None
        found, x.grad = x.grad, None
        return found

    def weights(self, microbatch: int, piece: int) -> None:
        multiply(self._products.pop(microbatch))

    def put_off(self) -> Iterator[Tensor]:
        """Operands of the products that W will do."""
        for products in self._products.values():
            for product in products:
                yield from (product.x, product.gradient)

    def landing(self, microbatch: int, piece: int, of: Payload) -> Tensor:
        return self.laid.empty_stream(self.data.pieces[microbatch].tokens)
