"""Projections that are compressed: weights of few bits, weights that are rounded as if they were (for training), masks,
and products of two thin matrices.

The one idea: a compressed projection takes the place of an `nn.Linear` under its name, and everything around the
product stays what it was: on a mesh, partial products are summed before the bias is added once, then the activation.
What is compressed, and how well, is decided in `compress/`; here is only what a model computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.core.errors import UsageError
from tilemesh.kernels.gated.reference import swiglu
from tilemesh.kernels.lowbit import cpu
from tilemesh.kernels.lowbit.codes import Agree, Quantized, decode, encode, find_scales, pack, quantize, rounded, unpack
from tilemesh.kernels.lowbit.formats import Scheme, parse_scheme
from tilemesh.kernels.lowbit_linear.reference import lowbit_linear, norm_lowbit_linear, takes_one_token
from tilemesh.kernels.scaled_matmul.reference import scaled_matmul
from tilemesh.model.norm import ResidualNorm
from tilemesh.model.projection import PlainLinear
from tilemesh.model.stacked import is_one_row
from tilemesh.model.transformer import Attention, Transformer

CODES, SCALES, ZEROS, INPUT_SCALE = "codes", "scales", "zeros", "input_scale"


class CompressedLinear(PlainLinear):
    """What all compressed projections share: the bias and the activation after the product, and sums over ranks."""

    reduce: Callable[[Tensor], Tensor] | None = None
    """On a mesh, where the input is cut: what makes one of the ranks' partial products."""
    agree: Agree | None = None
    """On a mesh: the largest over the ranks that hold parts of this matrix."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features, like.bias is not None, device="meta")
        self.bias = like.bias
        self.activation = getattr(like, "activation", "none")

    def product(self, x: Tensor) -> Tensor:
        """Without the bias."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name nn.Linear uses)
        y = self.product(input)
        if self.reduce is not None:
            y = self.reduce(y)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return self.activated(y)

    def cut_with(self, parameter: str, by: str) -> str:
        """How a parameter is cut where the matrix is cut by its outputs ("column") or inputs ("row")."""
        return by


class LowBitLinear(CompressedLinear):
    """Weights as codes under scales. `inputs`: the scheme of the activations, int8 or fp8, where these are quantised:
    per token, or under one scale that was found beforehand (`input_scale`)."""

    codes: nn.Parameter
    scales: nn.Parameter
    zeros: nn.Parameter | None
    input_scale: nn.Parameter | None
    serves: bool = False
    """Whether it only computes forward: its codes are then never what the kernel before has just made."""

    def __init__(
        self, like: nn.Linear, scheme: Scheme, made: Quantized | None = None, inputs: Scheme | None = None,
        input_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`made`: None for one without memory, to be filled later."""
        super().__init__(like)
        del self.weight
        self.scheme, self.inputs, self.is_packed = scheme, inputs, True
        shape = (like.out_features, like.in_features)
        scales = scheme.scales(*shape)
        if made is None:
            empty: dict[str, Any] = {"device": "meta"}
            codes = torch.empty(shape, dtype=_code_dtype(scheme), **empty)
            zeros = None if scheme.symmetric else torch.empty(scales, dtype=torch.int8, **empty)
            made = Quantized(codes, torch.empty(scales, **empty), zeros)
            packed = torch.empty(
                (shape[0], scheme.row_bytes(shape[1]) if scheme.bits < 8 else shape[1]),
                dtype=torch.uint8 if scheme.bits < 8 else codes.dtype, **empty,
            )  # fmt: skip
        else:
            packed = pack(made.codes, scheme.number)
        self.codes = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(made.scales.float().contiguous(), requires_grad=False)
        buffers = {ZEROS: made.zeros, INPUT_SCALE: input_scale}
        for name, value in buffers.items():
            self.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))

    @property
    def weight(self) -> Tensor:
        """The matrix that the codes mean, computed when asked for."""
        return self.decoded(self.scales.dtype)

    @weight.deleter
    def weight(self) -> None:
        """nn.Linear registers one, which is taken away in the beginning."""
        del self._parameters["weight"]

    def decoded(self, dtype: torch.dtype) -> Tensor:
        return decode(self.whole_codes(), self.scheme, self.scales, self.zeros, dtype)

    def whole_codes(self) -> Tensor:
        """(N, K), one code per element."""
        return unpack(self.codes, self.scheme.number, self.in_features) if self.is_packed else self.codes

    def product(self, x: Tensor) -> Tensor:
        if x.is_cuda and self._has_codes_of_both() and not (torch.is_grad_enabled() and x.requires_grad):
            return self.product_of_codes(x)
        if self.is_packed and cpu.serves(x, self.scheme, self.in_features, self.scales.shape[1]):
            x_scales = None
            if self.inputs is not None and self.inputs.format == "int8" and self.scheme.format != "fixed16":
                x_scales = self._input_scales(x.reshape(-1, x.shape[-1]))
            elif self.inputs is not None:
                x = self._quantized(x)
            return cpu.product(x, self.codes, self.scheme, self.scales, self.zeros, None, x_scales)
        if self.inputs is not None:
            x = self._quantized(x)
        if x.is_cuda and self.is_packed and self.scheme.format in ("int8", "int4"):
            made: Tensor = lowbit_linear(
                x, self.codes, self.scales, self.zeros, code=self.scheme.format, settled=self.serves
            )
            return made
        return functional.linear(x, self.decoded(x.dtype))

    def _has_codes_of_both(self) -> bool:
        """Whether activations and weights are codes that tensor cores multiply: of 8 bits, scaled per token and row."""
        if self.inputs is None or self.agree is not None or not self.is_packed:
            return False
        is_plain = self.scheme.symmetric and self.scheme.granularity != "group"
        return is_plain and self.scheme.format == self.inputs.format and self.scheme.format in ("int8", "fp8")

    def product_of_codes(self, x: Tensor) -> Tensor:
        """Codes times codes; the scales multiply the sums."""
        assert self.inputs is not None
        rows = x.detach().reshape(-1, x.shape[-1])
        if self.input_scale is not None:
            scales = self.input_scale.float().reshape(1, 1)
        else:
            scales, _ = find_scales(rows, self.inputs)
        dtype = x.dtype if x.dtype in (torch.bfloat16, torch.float16) else torch.float32
        name = str(dtype).removeprefix("torch.")
        made: Tensor = scaled_matmul(
            encode(rows, self.inputs, scales), self.codes, scales, self.scales, code=self.scheme.format, dtype=name
        )
        return made.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _quantized(self, x: Tensor) -> Tensor:
        """Activations as they come back from their codes; their gradient passes as if nothing had been rounded."""
        assert self.inputs is not None
        rows = x.detach().reshape(-1, x.shape[-1])
        scales = self._input_scales(rows)
        back = decode(encode(rows, self.inputs, scales), self.inputs, scales, None, x.dtype).view(x.shape)
        return x + (back - x).detach() if x.requires_grad else back

    def _input_scales(self, rows: Tensor) -> Tensor:
        """Of activations (M, K): (M, 1)."""
        assert self.inputs is not None
        if self.input_scale is not None:
            return self.input_scale.float().expand(len(rows), 1)
        return find_scales(rows, self.inputs, agree=self.agree)[0]

    def cut_with(self, parameter: str, by: str) -> str:
        if parameter == INPUT_SCALE or (parameter in (SCALES, ZEROS) and self.scheme.granularity == "tensor"):
            return "whole"
        if parameter in (SCALES, ZEROS) and by == "row" and self.scheme.granularity == "channel":
            return "whole"
        return by

    def open(self) -> None:
        """One element per code, so that the matrix can be cut anywhere."""
        if self.is_packed and self.scheme.bits < 8:
            self.codes = nn.Parameter(self.whole_codes(), requires_grad=False)
        self.is_packed = self.scheme.bits >= 8

    def close(self) -> None:
        """The way back, of a part as well."""
        if not self.is_packed:
            self.codes = nn.Parameter(pack(self.codes.detach(), self.scheme.number), requires_grad=False)
            self.is_packed = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowBitLinear:
        """Scales stay float32 where a model is converted: they are few, and every weight is multiplied by one."""
        kept = {name: getattr(self, name) for name in (SCALES, INPUT_SCALE)}
        kept = {name: value.data for name, value in kept.items() if value is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in kept.items():
            now = getattr(self, name)
            if now.dtype != value.dtype:
                now.data = value.to(now.device)
        return self

    @property
    def nbytes(self) -> int:
        return self.scheme.nbytes(self.out_features, self.in_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} to {self.out_features}, {self.scheme.name}"


def _code_dtype(scheme: Scheme) -> torch.dtype:
    kind = scheme.number.kind
    if kind == "fixed":
        return torch.int16
    return torch.int8 if kind == "int" else torch.uint8


class RoundedLinear(CompressedLinear):
    """Quantisation-aware training: a floating-point weight that every pass sees rounded, and whose gradient is that of
    the rounded one (straight through). `inputs`: the scheme that activations are rounded by, per token."""

    def __init__(self, like: nn.Linear, scheme: Scheme, inputs: Scheme | None = None) -> None:
        super().__init__(like)
        self.weight, self.scheme, self.inputs = like.weight, scheme, inputs

    def product(self, x: Tensor) -> Tensor:
        if self.inputs is not None:
            rows = x.detach().reshape(-1, x.shape[-1])
            x = x + (rounded(rows, self.inputs, agree=self.agree).view(x.shape) - x).detach()
        weight = self.weight
        back = rounded(weight.detach(), self.scheme, agree=self.agree)
        return functional.linear(x, weight + (back - weight).detach())


class MaskedLinear(CompressedLinear):
    """Gradual pruning: the smallest weights are taken for 0 in every pass, and their gradient is that of the others, so
    that one that grows comes back. `sparsity` rises as training goes on; `block` (2, 4): two of every four."""

    def __init__(self, like: nn.Linear, block: tuple[int, int] | None = None) -> None:
        super().__init__(like)
        self.weight, self.block, self.sparsity = like.weight, block, 0.0

    def product(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.sparsity <= 0:
            return functional.linear(x, weight)
        kept = magnitude_mask(weight.detach().abs(), self.sparsity, self.block)
        return functional.linear(x, weight - (weight * ~kept).detach())


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


class FactoredLinear(CompressedLinear):
    """W as left (N, r) times right (r, K): r (N + K) numbers in place of N K."""

    left: nn.Parameter
    right: nn.Parameter

    def __init__(self, like: nn.Linear, left: Tensor, right: Tensor) -> None:
        super().__init__(like)
        del self.weight
        is_trained = like.weight.requires_grad
        self.left, self.right = (nn.Parameter(factor, requires_grad=is_trained) for factor in (left, right))

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    @property
    def weight(self) -> Tensor:
        """The whole matrix, computed when asked for."""
        return self.left @ self.right

    @weight.deleter
    def weight(self) -> None:
        del self._parameters["weight"]

    def product(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.right), self.left)

    def cut_with(self, parameter: str, by: str) -> str:
        whole = "left" if by == "row" else "right"
        return "whole" if parameter == whole else by


@dataclass(frozen=True)
class StackedCodes:
    """Several low-bit projections of the same activations by one product, in a model that only computes forward."""

    whole: LowBitLinear
    widths: list[int]

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole.product(x)

    def gated(self, x: Tensor) -> Tensor:
        """silu of the first of two projections times the second."""
        made: Tensor
        if is_one_row(x) and self._takes_one_token(x):
            told = {"code": self.whole.scheme.format, "gate": "silu", "settled": self.whole.serves}
            made = lowbit_linear(x, *self._codes(), **told)
        else:
            made = swiglu(*self.whole.product(x).chunk(2, -1))
        return made

    def takes_norm(self, norm: ResidualNorm) -> bool:
        """Whether the product of a single token can have this norm inside."""
        return norm.kind == "rmsnorm" and norm.weight is not None and self._takes_one_token(norm.weight)

    def normed(self, x: Tensor, branch: Tensor, norm: ResidualNorm, gate: str = "none") -> tuple[Tensor, Tensor]:
        """Of a single token: the product of the norm of x + branch, and x + branch."""
        assert norm.weight is not None
        made, total = norm_lowbit_linear(
            x.view(1, -1), branch.view(1, -1), norm.weight, *self._codes(), code=self.whole.scheme.format,
            eps=norm.epsilon, gate=gate, settled=self.whole.serves,
        )  # fmt: skip
        return made.view(*x.shape[:-1], -1), total.view(x.shape)

    def _codes(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.whole.codes, self.whole.scales, self.whole.zeros

    def _takes_one_token(self, like: Tensor) -> bool:
        """Whether there is a kernel for one token, of which `like` is a row; on a GPU."""
        whole = self.whole
        return whole.inputs is None and takes_one_token(like, whole.codes, whole.scales, whole.scheme.format)


def _stack(parts: list[nn.Module]) -> StackedCodes | None:
    """One product of projections whose codes have the same form; each one's codes become a part of its memory."""
    modules = [part for part in parts if isinstance(part, LowBitLinear)]
    if (
        len(modules) < len(parts)
        or len({(module.scheme, module.inputs, module.codes.device) for module in modules}) > 1
    ):
        return None
    first = modules[0]
    is_apart = first.scheme.granularity == "tensor" or any(module.input_scale is not None for module in modules)
    if is_apart or any(
        module.bias is not None or module.reduce is not None or not module.is_packed for module in modules
    ):
        return None
    if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
        return None
    widths = [module.out_features for module in modules]
    with torch.device("meta"):
        like = PlainLinear(first.in_features, sum(widths), bias=False)
    whole = LowBitLinear(like, first.scheme, None, first.inputs)
    whole.serves = True
    for name in (CODES, SCALES, ZEROS):
        if getattr(first, name) is None:
            continue
        joined = torch.cat([getattr(module, name).detach() for module in modules])
        setattr(whole, name, nn.Parameter(joined, requires_grad=False))
        for module, part in zip(modules, torch.split(joined, widths), strict=True):
            getattr(module, name).data = part
    return StackedCodes(whole, widths)


def stack_low_bits(model: Transformer) -> None:
    """Query, key and value by one product and gate and first projection by another, where all are codes."""
    for layer in model.layers.children():
        attention, mlp = layer.get_submodule("attention"), layer.get_submodule("mlp")
        if attention.stacked is None:
            attention.stacked = _stack([attention.get_submodule(f"fc_{letter}") for letter in "qkv"])
        if mlp.stacked is None and mlp.fc_gate is not None:
            mlp.stacked = _stack([mlp.get_submodule("fc_gate"), mlp.get_submodule("fc_in")])


# ---- in a model ------------------------------------------------------------------------------------------------


def projections(model: Transformer) -> Iterator[tuple[str, nn.Linear]]:
    """The matrices that can be compressed, by name: those of the layers, and an output projection of its own."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (name.startswith("layers.") or name == "output"):
            yield name, module


def put(model: Transformer, name: str, module: nn.Module) -> None:
    """Take the place of a projection."""
    parent, _, last = name.rpartition(".")
    holder = model.get_submodule(parent) if parent else model
    setattr(holder, last, module)
    if isinstance(holder, Attention):
        holder.joined = False  # one product of three weights would pass it by


def compressed(model: nn.Module) -> list[str]:
    """Names of the projections that hold no plain weight any more."""
    return [name for name, module in model.named_modules() if isinstance(module, (LowBitLinear, FactoredLinear))]


def require_plain(model: nn.Module, what: str) -> None:
    """Refuse a model that was compressed before."""
    done = compressed(model)
    if done:
        raise UsageError(
            f"{what} of a model that was compressed already ({done[0]} and {len(done) - 1} more): begin with the run "
            "or folder that it was made from"
        )


def model_bytes(model: nn.Module) -> int:
    """Of all parameters as they are stored; a shared one counts once."""
    lowbit = [module for module in model.modules() if isinstance(module, LowBitLinear)]
    inside = {id(p) for module in lowbit for p in (module.codes, module.scales, module.zeros) if p is not None}
    rest = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in inside)
    return rest + sum(module.nbytes for module in lowbit)


def compress_all(model: Transformer, words: str) -> None:
    """Round every projection of the layers to nearest, in place, by a scheme's name; with "rounded" before it, in every
    pass. What the gate lays over meshes."""
    scheme = parse_scheme(words.removeprefix("rounded "))
    for name, module in list(projections(model)):
        if name == "output":
            continue
        if words.startswith("rounded "):
            put(model, name, RoundedLinear(module, scheme))
        else:
            put(model, name, LowBitLinear(module, scheme, quantize(module.weight, scheme)))
