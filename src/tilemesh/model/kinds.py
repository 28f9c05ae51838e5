"""Kinds of matrices beside a plain weight: few bits, rounded or masked while training, two thin factors, adapters.

What is compressed, and how well, is decided in `compress/`; here is only what a model computes with.

N: outputs; K: inputs; G: scales of a row; r: a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.core.errors import UsageError
from tilemesh.kernels.lowbit import cpu
from tilemesh.kernels.lowbit.codes import Quantized, decode, encode, find_scales, pack, rounded, unpack
from tilemesh.kernels.lowbit.formats import Scheme
from tilemesh.kernels.lowbit_linear.reference import lowbit_linear
from tilemesh.kernels.scaled_matmul.reference import scaled_matmul
from tilemesh.model.adapter import A, B
from tilemesh.model.linear import (
    ACTIVATIONS,
    DENSE,
    WEIGHT,
    DenseMatrix,
    Linear,
    MatrixKind,
    MatrixPiece,
    WeightHolder,
    as_kind,
)

CODES, SCALES, ZEROS, INPUT_SCALE = "codes", "scales", "zeros", "input_scale"
LEFT, RIGHT = "left", "right"


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


@dataclass(frozen=True)
class FewBits(MatrixKind):
    """Codes under scales. `inputs`: the scheme of the activations, int8 or fp8, where these are quantised: per token,
    or under one scale that was found beforehand (`static`). `packed`: codes share bytes; one element per code is what
    can be cut anywhere. `settled`: codes are never what the kernel before has just made, as in a model that serves."""

    scheme: Scheme
    inputs: Scheme | None = None
    static: bool = False
    packed: bool = True
    settled: bool = False

    def pieces(self, outputs: int, inputs: int) -> tuple[MatrixPiece, ...]:
        scheme, scales = self.scheme, self.scheme.scales(outputs, inputs)
        shares_bytes = self.packed and scheme.bits < 8
        codes = (outputs, scheme.row_bytes(inputs) if shares_bytes else inputs)
        by_scale = {"tensor": (), "channel": ("column",), "group": ("column", "row")}[scheme.granularity]
        kept: dict[str, tuple[torch.dtype, tuple[int, ...], tuple[str, ...]]] = {
            CODES: (torch.uint8 if shares_bytes else _code_dtype(scheme), codes, ("column", "row")),
            SCALES: (torch.float32, scales, by_scale),
        }
        if not scheme.symmetric:
            kept[ZEROS] = (torch.int8, scales, by_scale)
        if self.static:
            kept[INPUT_SCALE] = (torch.float32, (1, 1), ())
        return tuple(
            MatrixPiece(name, shape, dtype, trained=False, cut=cut) for name, (dtype, shape, cut) in kept.items()
        )

    def affine(self, layer: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
        return _with_bias(self.product(layer, x), bias)

    def dense(self, layer: Linear) -> Tensor:
        return self.decoded(layer, torch.float32)

    def decoded(self, layer: Linear, dtype: torch.dtype) -> Tensor:
        """The matrix that the codes mean."""
        return decode(self.codes(layer), self.scheme, layer.scales, _zeros(layer), dtype)

    def codes(self, layer: Linear) -> Tensor:
        """(N, K), one code per element."""
        return unpack(layer.codes, self.scheme.number, layer.in_features) if self.packed else layer.codes

    def product(self, layer: Linear, x: Tensor) -> Tensor:
        if x.is_cuda and self.has_codes_of_both(layer) and not (torch.is_grad_enabled() and x.requires_grad):
            return self.product_of_codes(layer, x)
        scheme = self.scheme
        if self.packed and cpu.serves(x, scheme, layer.in_features, layer.scales.shape[1]):
            x_scales = None
            if self.inputs is not None and self.inputs.format == "int8" and scheme.format != "fixed16":
                x_scales = self._input_scales(layer, x.reshape(-1, x.shape[-1]))
            elif self.inputs is not None:
                x = self.quantized(layer, x)
            return cpu.product(x, layer.codes, scheme, layer.scales, _zeros(layer), None, x_scales)
        if self.inputs is not None:
            x = self.quantized(layer, x)
        if x.is_cuda and self.packed and scheme.format in ("int8", "int4"):
            y: Tensor = lowbit_linear(
                x, layer.codes, layer.scales, _zeros(layer), code=scheme.format, settled=self.settled
            )
            return y
        return functional.linear(x, self.decoded(layer, x.dtype))

    def has_codes_of_both(self, layer: Linear) -> bool:
        """Whether activations and weights are codes that tensor cores multiply: of 8 bits, scaled per token and row."""
        if self.inputs is None or layer.place.agree is not None or not self.packed:
            return False
        is_plain = self.scheme.symmetric and self.scheme.granularity != "group"
        return is_plain and self.scheme.format == self.inputs.format and self.scheme.format in ("int8", "fp8")

    def product_of_codes(self, layer: Linear, x: Tensor) -> Tensor:
        """Codes times codes; the scales multiply the sums."""
        assert self.inputs is not None
        rows = x.detach().reshape(-1, x.shape[-1])
        scales = layer.input_scale.float().reshape(1, 1) if self.static else find_scales(rows, self.inputs)[0]
        dtype = x.dtype if x.dtype in (torch.bfloat16, torch.float16) else torch.float32
        name = str(dtype).removeprefix("torch.")
        y: Tensor = scaled_matmul(
            encode(rows, self.inputs, scales), layer.codes, scales, layer.scales, code=self.scheme.format, dtype=name
        )
        return y.to(x.dtype).view(*x.shape[:-1], layer.out_features)

    def quantized(self, layer: Linear, x: Tensor) -> Tensor:
        """Activations as they come back from their codes; their gradient passes as if nothing had been rounded."""
        assert self.inputs is not None
        rows = x.detach().reshape(-1, x.shape[-1])
        scales = self._input_scales(layer, rows)
        back = decode(encode(rows, self.inputs, scales), self.inputs, scales, None, x.dtype).view(x.shape)
        return x + (back - x).detach() if x.requires_grad else back

    def _input_scales(self, layer: Linear, rows: Tensor) -> Tensor:
        """Of activations (M, K): (M, 1)."""
        assert self.inputs is not None
        if self.static:
            return layer.input_scale.float().expand(len(rows), 1)
        return find_scales(rows, self.inputs, agree=layer.place.agree)[0]

    def stored(self, layer: Linear) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, scales and zero points, as kernels take them."""
        return layer.codes, layer.scales, _zeros(layer)

    @property
    def widens(self) -> bool:
        return True

    def stacked(self) -> MatrixKind | None:
        is_apart = self.scheme.granularity == "tensor" or self.static or not self.packed
        return None if is_apart else dataclasses.replace(self, settled=True)

    def why_not(self, by: str, width: int) -> str:
        return _why_no_groups(self.scheme, by, width)

    def agrees(self, by: str) -> bool:
        return by == "row"  # who has all of a row finds the scale of its activations alone

    def nbytes(self, outputs: int, inputs: int, itemsize: int) -> int:
        return self.scheme.nbytes(outputs, inputs)


def _zeros(layer: Linear) -> Tensor | None:
    return layer._parameters.get(ZEROS)


def _code_dtype(scheme: Scheme) -> torch.dtype:
    kind = scheme.number.kind
    if kind == "fixed":
        return torch.int16
    return torch.int8 if kind == "int" else torch.uint8


def _why_no_groups(scheme: Scheme, by: str, inputs: int) -> str:
    if by != "row" or scheme.granularity != "group" or inputs % scheme.group == 0:
        return ""
    return (
        f"groups of {scheme.group} do not divide the {inputs} inputs of a rank; quantise in smaller groups or per "
        "channel, or set a smaller tp"
    )


@dataclass(frozen=True)
class Rounded(DenseMatrix):
    """Quantisation-aware training: a weight that every pass sees rounded, and whose gradient is that of the rounded one
    (straight through). `inputs`: the scheme that activations are rounded by, per token."""

    scheme: Scheme = field(default_factory=Scheme)
    inputs: Scheme | None = None

    def affine(self, layer: WeightHolder, x: Tensor, bias: Tensor | None) -> Tensor:
        agree, weight = layer.place.agree, layer.weight
        if self.inputs is not None:
            rows = x.detach().reshape(-1, x.shape[-1])
            x = x + (rounded(rows, self.inputs, agree=agree).view(x.shape) - x).detach()
        back = rounded(weight.detach(), self.scheme, agree=agree)
        return _with_bias(functional.linear(x, weight + (back - weight).detach()), bias)

    def why_not(self, by: str, width: int) -> str:
        return _why_no_groups(self.scheme, by, width)

    def agrees(self, by: str) -> bool:
        return by == "row" or self.scheme.granularity == "tensor"  # a matrix under one scale has parts everywhere


@dataclass(frozen=True)
class Masked(DenseMatrix):
    """Gradual pruning: the smallest weights are taken for 0 in every pass, and their gradient is that of the others, so
    that one that grows comes back. `sparsity` rises as training goes on; `block` (2, 4): two of every four."""

    block: tuple[int, int] | None = None
    sparsity: float = 0.0

    def affine(self, layer: WeightHolder, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = layer.weight
        if self.sparsity > 0:
            kept = magnitude_mask(weight.detach().abs(), self.sparsity, self.block)
            weight = weight - (weight * ~kept).detach()
        return _with_bias(functional.linear(x, weight), bias)

    def why_not(self, by: str, width: int) -> str:
        if self.block is not None:
            return ""
        return "unstructured pruning ranks the weights of a whole matrix, and tp cuts it; prune 2:4, or set tp=1"


def magnitude_mask(score: Tensor, sparsity: float, block: tuple[int, int] | None = None) -> Tensor:
    """What is kept of a matrix (True): the largest scores of all, or with `block` (n, m) the n largest of every m
    inputs."""
    if block is not None:
        keep, of = block
        if score.shape[1] % of:
            raise UsageError(f"{keep}:{of} sparsity of {score.shape[1]} inputs: expected a multiple of {of}")
        parts = score.reshape(score.shape[0], -1, of)
        order = parts.argsort(dim=-1, descending=True, stable=True)
        kept = torch.zeros_like(parts, dtype=torch.bool)
        return kept.scatter_(-1, order[..., :keep], True).reshape(score.shape)
    gone = round(sparsity * score.numel())
    if gone <= 0:
        return torch.ones_like(score, dtype=torch.bool)
    kept = torch.ones(score.numel(), dtype=torch.bool, device=score.device)
    kept[score.flatten().argsort(stable=True)[:gone]] = False
    return kept.view(score.shape)


@dataclass(frozen=True)
class Factored(MatrixKind):
    """W as left (N, r) times right (r, K): r (N + K) numbers in place of N K."""

    rank: int

    def pieces(self, outputs: int, inputs: int) -> tuple[MatrixPiece, ...]:
        left = MatrixPiece(LEFT, (outputs, self.rank), cut=("column",))
        return left, MatrixPiece(RIGHT, (self.rank, inputs), cut=("row",))

    def affine(self, layer: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
        return _with_bias(functional.linear(functional.linear(x, layer.right), layer.left), bias)

    def dense(self, layer: Linear) -> Tensor:
        return layer.left @ layer.right


class TokenSlots(NamedTuple):
    """Tokens of a pass by the slots of their adapters."""

    used: Tensor | slice
    """U: the slots that some token has."""
    tokens_UM: Tensor
    """The tokens of each, padded to as many as the most have with any token."""
    places: Tensor
    """Which of these are no padding, counted through; and the token of each."""
    tokens: Tensor
    kept_TR: Tensor
    """1 where a token's adapter has this column of A and B, else 0."""
    slots_T: Tensor
    """Each token's slot, -1 where it has no adapter."""


class AdapterRows:
    """Which of the adapters side by side each token of the pass under way has: what all adapted layers look at.

    `slots` adapters of rank `rank` at most. A request names its adapter by a number above 0, which says its slot.
    """

    def __init__(self, slots: int, rank: int) -> None:
        self.slots, self.rank = slots, rank
        self.now: TokenSlots | None = None
        """None: no token has an adapter."""

    def choose(self, numbers: Sequence[int], like: Tensor) -> None:
        """Before each pass: the numbers of its tokens' adapters, 0 for none; `like`: of the device and dtype."""
        self.now = None
        tokens_of: dict[int, list[int]] = {}
        for token, number in enumerate(numbers):
            if number:
                tokens_of.setdefault((number - 1) % self.slots, []).append(token)
        if not tokens_of:
            return
        slots, most = sorted(tokens_of), max(map(len, tokens_of.values()))
        padded = [[*tokens_of[slot], *[0] * (most - len(tokens_of[slot]))] for slot in slots]
        places = [most * row + at for row, slot in enumerate(slots) for at in range(len(tokens_of[slot]))]
        tokens = [token for slot in slots for token in tokens_of[slot]]
        kept_TS = torch.zeros(len(numbers), self.slots)
        kept_TS[tokens, [slot for slot in slots for _ in tokens_of[slot]]] = 1
        used, tokens_UM, place_N, token_N = (
            torch.tensor(index, device=like.device) for index in (slots, padded, places, tokens)
        )
        kept_TR = kept_TS.to(like).repeat_interleave(self.rank, 1)
        own_T = torch.tensor([(number - 1) % self.slots if number else -1 for number in numbers])
        taken = slice(None) if len(slots) == self.slots else used
        self.now = TokenSlots(taken, tokens_UM, place_N, token_N, kept_TR, own_T)


@dataclass(frozen=True)
class Adapted(MatrixKind):
    """A low-rank adapter over a matrix of any kind, which no gradient is computed for: W + scale B A, in which A is
    (r, K) and B (N, r). Over codes of few bits this is QLoRA.

    `rows`: in a model that serves, several adapters side by side (r of all together, each scaled already), of which
    every token has one or none: its columns of x A are kept, the others are 0. `parts`: of such matrices under one
    another, how many outputs each has; x A then has r columns for each.
    """

    base: MatrixKind
    rank: int
    scale: float
    rows: AdapterRows | None = None
    parts: tuple[int, ...] = ()
    silent: bool = False
    """Whether no adapter that is held changes this matrix."""

    def pieces(self, outputs: int, inputs: int) -> tuple[MatrixPiece, ...]:
        frozen = (piece._replace(trained=False) for piece in self.base.pieces(outputs, inputs))
        trained = self.rows is None
        low = MatrixPiece(A, (self.rank * max(1, len(self.parts)), inputs), trained=trained, cut=("row",))
        return *frozen, low, MatrixPiece(B, (outputs, self.rank), trained=trained, cut=("column",))

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        return layer.by_rows(ACTIVATIONS[layer.activation], self.affine(layer, x, layer.bias))

    def affine(self, layer: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.rows is None and self.silent:
            return self.base.affine(layer, x, bias)
        if self.rows is None:
            low = functional.linear(x, layer.lora_a)
            return self.base.affine(layer, x, bias) + functional.linear(low, layer.lora_b) * self.scale
        y = layer.by_rows(partial(self.base.affine, layer, bias=bias), x)
        now = self.rows.now
        if now is None or self.silent:
            return y
        if layer.in_blocks:
            return y + self._by_columns(layer, x, now.kept_TR)
        y.view(-1, y.shape[-1]).index_add_(0, now.tokens, self._by_slots(layer, x.reshape(-1, x.shape[-1]), now))
        return y

    def _by_slots(self, layer: Linear, x_TK: Tensor, now: TokenSlots) -> Tensor:
        """What the adapters add for the tokens that have one: each slot's tokens by its own A and B, all at once."""
        assert self.rows is not None
        slots, rank = self.rows.slots, self.rows.rank
        low = layer.lora_a.view(-1, slots, rank, x_TK.shape[1])[:, now.used]
        low_UMR = torch.bmm(x_TK[now.tokens_UM], low.permute(1, 3, 0, 2).flatten(2))
        added = [
            torch.bmm(own_UMr, high.view(-1, slots, rank)[:, now.used].permute(1, 2, 0))
            for own_UMr, high in zip(torch.split(low_UMR, rank, dim=-1), self._highs(layer), strict=True)
        ]
        return torch.cat(added, dim=-1).flatten(0, 1)[now.places]

    def _by_columns(self, layer: Linear, x: Tensor, kept_TR: Tensor) -> Tensor:
        """The same by products of all adapters with all tokens, each of which keeps its own columns: no shape follows
        from the batch."""
        low = layer.by_rows(partial(functional.linear, weight=layer.lora_a), x)
        lows = torch.split(low, self.rank, dim=-1)
        added = [
            layer.by_rows(partial(functional.linear, weight=high), own * kept_TR)
            for own, high in zip(lows, self._highs(layer), strict=True)
        ]
        return torch.cat(added, dim=-1)

    def _highs(self, layer: Linear) -> tuple[Tensor, ...]:
        return torch.split(layer.lora_b, list(self.parts) or [len(layer.lora_b)])

    def stacked(self) -> MatrixKind | None:
        base = self.base.stacked()
        return None if self.rows is None or base is None else dataclasses.replace(self, base=base)

    def over(self, widths: Sequence[int]) -> MatrixKind:
        return dataclasses.replace(self, parts=tuple(widths))

    @property
    def knows_rows(self) -> bool:
        return self.rows is not None

    def dense(self, layer: Linear) -> Tensor:
        return self.base.dense(layer) + self.scale * (layer.lora_b @ layer.lora_a)

    def why_not(self, by: str, width: int) -> str:
        return self.base.why_not(by, width)

    def agrees(self, by: str) -> bool:
        return self.base.agrees(by)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Compute with the weights below adapters that are trained."""
    adapted = [(layer, layer.kind) for _, layer in projections(model) if isinstance(layer.kind, Adapted)]
    for layer, kind in adapted:
        layer.become(dataclasses.replace(kind, silent=True))
    try:
        yield
    finally:
        for layer, kind in adapted:
            layer.become(kind)


def note_silent(layers: Iterable[object]) -> None:
    """Of layers that hold adapters, see which of them those change: after A and B were written."""
    for layer in layers:
        if isinstance(layer, Linear) and isinstance(layer.kind, Adapted) and layer.kind.rows is not None:
            layer.become(dataclasses.replace(layer.kind, silent=not bool(layer.lora_b.any())))


# ---- layers of these kinds -------------------------------------------------------------------------------------


def few_bits(
    layer: nn.Linear,
    scheme: Scheme,
    quantized: Quantized,
    inputs: Scheme | None = None,
    input_scale: Tensor | None = None,
) -> Linear:
    """A layer whose matrix is these codes, in the place of one."""
    scale = None if input_scale is None else input_scale.reshape(1, 1)
    values = {SCALES: quantized.scales.contiguous(), ZEROS: quantized.zeros, INPUT_SCALE: scale}
    kind = FewBits(scheme, inputs, static=scale is not None)
    return as_kind(layer, kind, codes=pack(quantized.codes, scheme.number), **values)


def open_codes(layer: Linear) -> None:
    """One element per code, so that the matrix can be cut anywhere."""
    kind = few_bits_of(layer)
    if kind is None or not kind.packed or kind.scheme.bits >= 8:
        return
    opened = dataclasses.replace(kind, packed=False)
    if layer.codes.is_meta:
        piece = opened.pieces(layer.out_features, layer.in_features)[0]
        codes = torch.empty(piece.shape, dtype=piece.dtype, device="meta")
    else:
        codes = kind.codes(layer)
    layer.register_parameter(CODES, nn.Parameter(codes, requires_grad=False))
    layer.become(dataclasses.replace(layer.kind, base=opened) if isinstance(layer.kind, Adapted) else opened)


def unpacked(layer: nn.Module, codes: Tensor, inputs: int) -> Tensor:
    """Codes of a layer of few bits as one element each, (N, K)."""
    assert isinstance(layer, Linear)
    kind = few_bits_of(layer)
    assert kind is not None
    return unpack(codes, kind.scheme.number, inputs)


def few_bits_of(layer: Linear) -> FewBits | None:
    """The kind of a layer's codes, adapters over them or not; None: it has none."""
    kind = layer.kind.base if isinstance(layer.kind, Adapted) else layer.kind
    return kind if isinstance(kind, FewBits) else None


# ---- in a model ------------------------------------------------------------------------------------------------


def projections(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """The matrices that can be of another kind, by name: those of the layers, and an output projection of its own."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and (name.startswith("layers.") or name == "output"):
            yield name, module


def matrix_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of these."""
    return {name: (layer.out_features, layer.in_features) for name, layer in projections(model)}


def kinds_of(model: nn.Module) -> dict[str, MatrixKind]:
    """The kinds of a model's matrices that are not dense, by their names."""
    return {name: layer.kind for name, layer in projections(model) if layer.kind.stacked() != DENSE}


def group_sizes(kinds: Mapping[str, MatrixKind]) -> dict[str, int]:
    """How many inputs share a scale, of matrices whose codes lie in groups."""
    codes = {name: kind.base if isinstance(kind, Adapted) else kind for name, kind in kinds.items()}
    return {name: kind.scheme.group for name, kind in codes.items() if isinstance(kind, FewBits) and kind.scheme.group}


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Take the place of a projection."""
    parent, _, last = name.rpartition(".")
    holder = model.get_submodule(parent) if parent else model
    setattr(holder, last, module)


def put_kinds(model: nn.Module, kinds: Mapping[str, MatrixKind]) -> None:
    """Let a model's matrices be of these kinds, those of them that it has; new pieces are without memory."""
    for name, layer in list(projections(model)):
        if name in kinds:
            put(model, name, as_kind(layer, kinds[name]))


def compressed(model: nn.Module) -> list[str]:
    """Names of the projections that hold no plain weight any more."""
    return [name for name, layer in projections(model) if WEIGHT not in layer._parameters]


def require_plain(model: nn.Module, what: str) -> None:
    """Refuse a model that was compressed before, or that has adapters, which would be lost."""
    adapted = [name for name, layer in projections(model) if isinstance(layer.kind, Adapted)]
    if adapted:
        raise UsageError(
            f"{what} of a model with adapters ({adapted[0]} and {len(adapted) - 1} more): merge them into its weights "
            "first, as `tilemesh export` does"
        )
    done = compressed(model)
    if done:
        raise UsageError(
            f"{what} of a model that was compressed already ({done[0]} and {len(done) - 1} more): begin with the run "
            "or folder that it was made from"
        )


def model_bytes(model: nn.Module) -> int:
    """Of all parameters as they are stored; a shared one counts once."""
    coded = [layer for _, layer in projections(model) if isinstance(layer.kind, FewBits)]
    inside = {id(parameter) for layer in coded for name, parameter in layer.named_parameters() if name != "bias"}
    rest = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in inside)
    return rest + sum(layer.kind.nbytes(layer.out_features, layer.in_features, 0) for layer in coded)
