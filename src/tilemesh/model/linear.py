"""A linear layer: a *kind* of matrix, its *place* on a mesh, and an *epilogue* of bias and activation.

The one idea: what a matrix is stored as and how it multiplies is a value, its kind, and what a mesh adds is another,
its place; any kind stands in any place. So a model is made, cut, gathered and made anew from the kinds of its layers,
whoever asked for them: adapters, few bits, rounding and masks need no layer class and no code in `parallel/`.

N: outputs; K: inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.core.errors import UsageError
from tilemesh.kernels.lowbit.codes import Agree
from tilemesh.kernels.matmul.choose import even
from tilemesh.kernels.matmul.config import Config
from tilemesh.kernels.matmul.op import fused_matmul
from tilemesh.model.one_row import is_one_row, times_row
from tilemesh.model.row_blocks import in_row_blocks

CLIPPED_AT, CLIPPED_SLOPE = 7.0, 1.702  # of swiglu-clipped


def _silu_clipped(x: Tensor) -> Tensor:
    return x * torch.sigmoid(CLIPPED_SLOPE * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "silu_clipped": lambda x: _silu_clipped(x.clamp(max=CLIPPED_AT)),
    "one_more": lambda x: x.clamp(-CLIPPED_AT, CLIPPED_AT) + 1,
}
WEIGHT, BIAS = "weight", "bias"


class MatrixPiece(NamedTuple):
    """One tensor that a matrix (N, K) is stored as."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """None: the model's, whatever it is converted to."""
    trained: bool = True
    cut: tuple[str, ...] = ("column", "row")
    """Along its first dim where the matrix is cut by outputs ("column"), its second where by inputs ("row"). One that
    is not cut with its matrix is the same on all ranks, and each of them has a part of its gradient."""


@dataclass(frozen=True)
class LayerPlace:
    """What a mesh adds to a linear layer, whatever its kind."""

    leave: Callable[[Tensor], Tensor] | None = None
    """Where inputs are cut: what makes one of the ranks' partial products. The bias is added after it, once."""
    agree: Agree | None = None
    """The largest over the ranks that hold parts of this matrix, where scales are found of what they share."""
    sharers: int = 1
    """Where inputs are cut and partial products are made one later on: so many ranks add a part of the bias each."""
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = functional.linear
    """x, a weight and a bias multiplied; another one puts the weight's gradient off (`model.deferral`)."""

    @property
    def cuts_inputs(self) -> bool:
        return self.leave is not None or self.sharers > 1


ALONE = LayerPlace()


class WeightHolder(Protocol):
    """What a dense product reads: a `Linear`, or a table of embeddings."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def place(self) -> LayerPlace: ...


@dataclass(frozen=True)
class MatrixKind:
    """How a matrix is stored and multiplied. Its tensors are the layer's parameters, by the names of its pieces."""

    def pieces(self, outputs: int, inputs: int) -> tuple[MatrixPiece, ...]:
        raise NotImplementedError

    def affine(self, layer: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
        """x times the matrix, and the bias."""
        raise NotImplementedError

    def dense(self, layer: Linear) -> Tensor:
        """The matrix itself (N, K), for whoever exports, merges or measures it."""
        raise NotImplementedError

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """The whole layer where it stands alone: a kind may compute the epilogue with the product."""
        return ACTIVATIONS[layer.activation](self.affine(layer, x, layer.bias))

    def why_not(self, by: str, width: int) -> str:
        """Why the matrix cannot be cut `by` "column" or "row" so that a rank has so many outputs or inputs; "" where it
        can."""
        return ""

    def agrees(self, by: str) -> bool:
        """Whether ranks that hold parts of the matrix must find scales together."""
        return False

    def stacked(self) -> MatrixKind | None:
        """The kind of several such matrices under one another, computed forward alone; None: they stay apart."""
        return None

    def over(self, widths: Sequence[int]) -> MatrixKind:
        """A stacked kind of matrices with so many outputs each."""
        return self

    @property
    def widens(self) -> bool:
        """Whether a few rows of activations may be float32 where the model is of another dtype."""
        return False

    @property
    def knows_rows(self) -> bool:
        """Whether it must see all tokens of a pass, in their order, and takes them in blocks by itself."""
        return False

    def nbytes(self, outputs: int, inputs: int, itemsize: int) -> int:
        """Of the matrix as it is stored; `itemsize`: of the model's dtype."""
        pieces = self.pieces(outputs, inputs)
        return sum(prod(piece.shape) * (piece.dtype.itemsize if piece.dtype else itemsize) for piece in pieces)


@dataclass(frozen=True)
class DenseMatrix(MatrixKind):
    """A weight (N, K) of the model's dtype. `one_row`: the product of a single token on a GPU is `row_linear`'s, in a
    model that only computes forward."""

    one_row: bool = False

    def pieces(self, outputs: int, inputs: int) -> tuple[MatrixPiece, ...]:
        return (MatrixPiece(WEIGHT, (outputs, inputs)),)

    def affine(self, layer: WeightHolder, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.one_row and is_one_row(x):
            return times_row(x, layer.weight, bias)
        return layer.place.product(x, layer.weight, bias)

    def dense(self, layer: Linear) -> Tensor:
        return layer.weight

    def stacked(self) -> MatrixKind | None:
        # A kind that is derived from this one to multiply otherwise is not stacked as if it were dense.
        return DENSE if type(self).affine is DenseMatrix.affine else None


@dataclass(frozen=True)
class Fused(DenseMatrix):
    """The same with its activation inside of one kernel of ours. `implementation`: as `fused_matmul` takes it."""

    implementation: str = "auto"

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        return fused_matmul(
            x, layer.weight.t(), layer.bias, activation=layer.activation, implementation=self.implementation
        )


@dataclass(frozen=True)
class OneTile(DenseMatrix):
    """The same on a GPU by our kernel, in tiles that add up each row by itself and in one order: a row's bits do not
    follow from how many others there are. The activation comes after it, as a pass of its own."""

    implementation: str = "auto"

    def affine(self, layer: WeightHolder, x: Tensor, bias: Tensor | None) -> Tensor:
        return one_tile_product(x, layer.weight, bias, self.implementation)

    def stacked(self) -> MatrixKind:
        return OneTile()  # a column's sums are its own


def one_tile_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, implementation: str = "auto") -> Tensor:
    """As `functional.linear`: see `OneTile`. Of float64, which the kernel does not take, torch's."""
    if x.dtype == torch.float64:
        return functional.linear(x, weight, bias)
    config = Config("pointer", block_k=64 if x.element_size() == 2 else 32, warps=8)
    if x.is_cuda:
        config = even(x.shape[:-1].numel(), *weight.shape, x.dtype, x.device)
    return fused_matmul(x, weight.t(), bias, activation="none", implementation=implementation, config=config)


DENSE = DenseMatrix()


class Linear(nn.Linear):
    """act(x W.T + bias), in which W is of some kind. Its parameters are the kind's pieces, and the bias."""

    # Pieces of kinds, for type checkers: a layer has those of its own.
    codes: Tensor
    scales: Tensor
    input_scale: Tensor
    left: Tensor
    right: Tensor
    lora_a: Tensor
    lora_b: Tensor

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        *,
        activation: str = "none",
        kind: MatrixKind = DENSE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # nn.Linear's would draw weights, and random ops on the meta device import for two seconds.
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.activation = inputs, outputs, activation
        self.kind, self.place = kind, ALONE
        self.in_blocks = False
        for piece in kind.pieces(outputs, inputs):
            empty = torch.empty(piece.shape, dtype=piece.dtype or dtype, device=device)
            parameter = nn.Parameter(empty, requires_grad=piece.trained and empty.is_floating_point())
            self.register_parameter(piece.name, parameter)
        values = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None
        self.register_parameter(BIAS, values)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name nn.Linear uses)
        leave, sharers = self.place.leave, self.place.sharers
        if leave is None and sharers == 1:
            apply = partial(self.kind.apply, self)
            return apply(input) if self.kind.knows_rows else self.by_rows(apply, input)
        if leave is not None and input.shape[-1] != self.in_features:
            raise UsageError(
                f"a row-split layer got {input.shape[-1]} inputs: this rank's part takes {self.in_features}; it "
                "follows layers whose output is split ('column'), not whole"
            )
        affine = partial(self.kind.affine, self, bias=None)
        y = affine(input) if self.kind.knows_rows else self.by_rows(affine, input)
        y = y if leave is None else leave(y)
        return ACTIVATIONS[self.activation](y if self.bias is None else y + (self.bias / sharers).to(y.dtype))

    def affine(self, x: Tensor) -> Tensor:
        """x W.T + bias of a layer whose inputs are whole, without the activation."""
        affine = partial(self.kind.affine, self, bias=self.bias)
        return affine(x) if self.kind.knows_rows else self.by_rows(affine, x)

    def by_rows(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Of all tokens at once, or in blocks of them."""
        return in_row_blocks(compute, x) if self.in_blocks else compute(x)

    def become(self, kind: MatrixKind) -> None:
        """Take another kind of the same pieces."""
        self.kind = kind

    def multiply_in_blocks(self, in_blocks: bool) -> None:
        """Whether tokens are multiplied in blocks of one shape (`model.row_blocks`)."""
        self.in_blocks = in_blocks

    def stand(self, place: LayerPlace, inputs: int | None = None, outputs: int | None = None) -> None:
        """Take a place on a mesh; `inputs`, `outputs`: of this rank's part of the matrix, where it has a part."""
        self.place = place
        self.in_features, self.out_features = inputs or self.in_features, outputs or self.out_features

    def piece(self, name: str) -> MatrixPiece:
        """Of the whole matrix or of this rank's part, as the layer is now."""
        pieces = {piece.name: piece for piece in self.kind.pieces(self.out_features, self.in_features)}
        return pieces[name]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        """A piece with a dtype of its own keeps it where a model is converted: each weight is multiplied by a scale."""
        pieces = self.kind.pieces(self.out_features, self.in_features)
        own = {piece.name: self.get_parameter(piece.name).data for piece in pieces if piece.dtype is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in own.items():
            now = self.get_parameter(name)
            if now.dtype != value.dtype:
                now.data = value.to(now.device)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.kind}"


class LearnedVector(nn.Module):
    """Learned numbers, one for each head or expert."""

    def __init__(self, count: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, device="meta", dtype=dtype))


class CodedLinear(Linear):
    """One whose kind has no weight among its pieces: the matrix is computed when it is asked for."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.kind.dense(self)


def make_linear(inputs: int, outputs: int, bias: bool = True, **options: Any) -> Linear:
    """A layer of the kind among the options, as `Linear` takes them."""
    pieces = options.get("kind", DENSE).pieces(outputs, inputs)
    cls = Linear if any(piece.name == WEIGHT for piece in pieces) else CodedLinear
    return cls(inputs, outputs, bias, **options)


def as_kind(layer: nn.Linear, kind: MatrixKind, **values: Tensor | None) -> Linear:
    """A layer of another kind in the place of one. `values`: of the kind's pieces; those that are not given are taken
    over from the layer where it has them, and are without memory otherwise."""
    pieces = kind.pieces(layer.out_features, layer.in_features)
    held = {name: value for name, value in layer._parameters.items() if value is not None}
    dtype = held[WEIGHT].dtype if WEIGHT in held else None
    options = {"activation": getattr(layer, "activation", "none"), "kind": kind, "device": "meta", "dtype": dtype}
    made = make_linear(layer.in_features, layer.out_features, False, **options)
    made.register_parameter(BIAS, held.get(BIAS))
    made.train(layer.training)
    for piece in pieces:
        value = values.get(piece.name)
        if value is not None:
            value = value if piece.dtype is None else value.to(piece.dtype)
            trained = piece.trained and value.is_floating_point()
            made.register_parameter(piece.name, nn.Parameter(value, requires_grad=trained))
        elif piece.name in held:
            made.register_parameter(piece.name, held[piece.name])
    if isinstance(layer, Linear):
        made.stand(layer.place)
    return made
