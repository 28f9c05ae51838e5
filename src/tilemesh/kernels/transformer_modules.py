"""Modules over the operators of a Transformer's other parts: norms, losses, softmax, MLPs, rotary positions.

Where torch has such a module, parameters and state dict are the same as its; `modules.py` has those over products, the
embedding and attention.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.activations.names import ACTIVATIONS
from tilemesh.kernels.cross_entropy.reference import cross_entropy
from tilemesh.kernels.gated.reference import geglu, swiglu
from tilemesh.kernels.launch.implementation import check_implementation
from tilemesh.kernels.linear_cross_entropy.reference import linear_cross_entropy
from tilemesh.kernels.mlp.reference import mlp
from tilemesh.kernels.norm.reference import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tilemesh.kernels.rotary.reference import rotary
from tilemesh.kernels.rotary.table import cosines_and_sines
from tilemesh.kernels.softmax.reference import softmax

_GATES = {"swiglu": swiglu, "geglu": geglu}
_NOT_OPTIONS = ("implementation", "differentiated")  # the module's own; filled in at each call


class FusedSoftmax(nn.Module):
    """softmax(scale * x) over the last dimension; causal: over (…, queries, keys)."""

    def __init__(self, *, scale: float = 1.0, causal: bool = False, implementation: str = "auto") -> None:
        super().__init__()
        check_implementation(implementation)
        self.scale, self.causal, self.implementation = scale, causal, implementation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = softmax(x, scale=self.scale, causal=self.causal, implementation=self.implementation)
        return y

    def extra_repr(self) -> str:
        return f"scale={self.scale}, causal={self.causal}"


class FusedRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last dimension; with a residual, of x + residual, and that sum in the same pass."""

    def __init__(
        self,
        width: int,
        eps: float = 1e-6,
        *,
        elementwise_affine: bool = True,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width, eps, elementwise_affine, device=device, dtype=dtype)
        check_implementation(implementation)
        self.implementation = implementation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """The norm; with a residual, the norm of the sum and the sum."""
        given: dict[str, Any] = {"eps": self.eps, "implementation": self.implementation}
        if residual is None:
            return rms_norm(x, self.weight, **given)
        return add_rms_norm(x, residual, self.weight, **given)


class FusedLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension; with a residual, of x + residual, and that sum in the same pass."""

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        *,
        elementwise_affine: bool = True,
        bias: bool = True,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width, eps, elementwise_affine, bias, device=device, dtype=dtype)
        check_implementation(implementation)
        self.implementation = implementation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """The norm; with a residual, the norm of the sum and the sum."""
        given: dict[str, Any] = {"eps": self.eps, "implementation": self.implementation}
        if residual is None:
            return layer_norm(x, self.weight, self.bias, **given)
        return add_layer_norm(x, residual, self.weight, self.bias, **given)


class FusedCrossEntropyLoss(nn.Module):
    """`cross_entropy` of logits and targets, with its options as they are there."""

    def __init__(self, *, implementation: str = "auto", **options: Any) -> None:
        super().__init__()
        check_implementation(implementation)
        _check_options(options, cross_entropy)
        self.options, self.implementation = options, implementation

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = cross_entropy(logits, target, **self.options, implementation=self.implementation)
        return loss

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


class FusedLinearCrossEntropyLoss(nn.Linear):
    """The output projection and its loss, without the logits of all tokens: x (…, D) and targets (…) to one number.

    `weight` is as `nn.Linear`'s, so that it can be an embedding's table too; options as `linear_cross_entropy`'s.
    """

    def __init__(
        self,
        width: int,
        classes: int,
        *,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(width, classes, bias=False, device=device, dtype=dtype)
        check_implementation(implementation)
        _check_options(options, linear_cross_entropy)
        self.options, self.implementation = options, implementation

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        loss: Tensor = linear_cross_entropy(x, self.weight, target, **self.options, implementation=self.implementation)
        return loss


class FusedMlp(nn.Module):
    """fc_out(act(fc_in(x))) as one operator: the activation and its derivative are inside of products (`mlp`)."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "gelu_tanh",
        bias: bool = True,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_implementation(implementation)
        if activation not in ACTIVATIONS:
            raise unknown("activation", str(activation), ACTIVATIONS)
        self.activation, self.implementation = activation, implementation
        self.fc_in = nn.Linear(width, hidden, bias, device=device, dtype=dtype)
        self.fc_out = nn.Linear(hidden, width, bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.fc_in.weight, self.fc_in.bias, self.fc_out.weight, self.fc_out.bias)
        y: Tensor = mlp(x, *weights, activation=self.activation, implementation=self.implementation)
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


class GatedMlp(nn.Module):
    """fc_out(act(fc_gate(x)) * fc_in(x)): the gate and the product in one pass (`swiglu` or `geglu`)."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_implementation(implementation)
        if activation not in _GATES:
            raise unknown("activation", str(activation), _GATES)
        self.activation, self.implementation = activation, implementation
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.fc_gate, self.fc_in = (nn.Linear(width, hidden, **made) for _ in range(2))
        self.fc_out = nn.Linear(hidden, width, **made)

    def forward(self, x: Tensor) -> Tensor:
        gated = _GATES[self.activation](self.fc_gate(x), self.fc_in(x), implementation=self.implementation)
        y: Tensor = self.fc_out(gated)
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


class Rotary(nn.Module):
    """Rotary position embedding of queries or keys (B, H, T, E), the first of which stands at `start`."""

    frequencies: Tensor

    def __init__(
        self, width: int, *, base: float = 10_000.0, implementation: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_implementation(implementation)
        if width < 2 or width % 2:
            raise UsageError(f"heads of width {width}: expected an even number, since pairs are turned")
        self.width, self.base, self.implementation = width, base, implementation
        steps = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
        self.register_buffer("frequencies", base**-steps, persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        places = torch.arange(start, start + x.shape[-2], dtype=torch.float32, device=x.device)
        y: Tensor = rotary(
            x, *cosines_and_sines(torch.outer(places, self.frequencies)), implementation=self.implementation
        )
        return y

    def extra_repr(self) -> str:
        return f"width={self.width}, base={self.base:g}"


def _check_options(options: dict[str, Any], function: Any) -> None:
    """Refused when the module is made, not when it is first called."""
    parameters = inspect.signature(function).parameters.values()
    known = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in _NOT_OPTIONS
    ]
    for name in options:
        if name not in known:
            raise unknown(f"option of {function.__name__}", name, known)
