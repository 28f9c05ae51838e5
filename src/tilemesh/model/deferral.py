"""Weight gradients that are put off: a backward pass in two halves.

The one idea: a projection's backward is two products, the gradient of its input, which the layer before waits for, and
the gradient of its weight, which nobody waits for until the optimizer steps. A `Deferral` that is told to wait keeps
the second product's operands instead of multiplying them, and does so later. The projections of a model's layers ask
theirs, if they were given one (`defer`). What is no product (norms, biases, tables) is computed in the first half, as
ever; so is the output projection, whose operand, the gradient of the logits, is too large to keep.

N: rows x tokens; I: inputs; O: outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.model.linear import Linear


class WeightProduct(NamedTuple):
    """What a weight's gradient will be multiplied from."""

    weight: Tensor
    x: Tensor
    gradient: Tensor
    """Of the projection's output."""


class Deferral:
    """The put-off products of one chunk of a model. Without `is_waiting`, backward does both halves at once."""

    def __init__(self) -> None:
        self.is_waiting = False
        self.products: list[WeightProduct] = []

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `torch.nn.functional.linear`, under autocast as well.

        What is put off is added to a parameter's gradient: a weight that is frozen or computed from others puts off
        nothing.
        """
        if not weight.requires_grad or not weight.is_leaf:
            return functional.linear(x, weight, bias)
        function: Any = _Projection
        y: Tensor = function.apply(x.to(product_dtype(x)), weight, bias, self)
        return y

    def stay_out_of_graphs(self, model: nn.Module) -> None:
        """Under torch.compile: what lies between the projections is compiled, these are called as they are."""
        _multiply_by(model, partial(_linear_outside_of_graphs(), self))

    def take(self) -> list[WeightProduct]:
        """The products put off since the last call."""
        taken, self.products = self.products, []
        return taken


@cache
def _linear_outside_of_graphs() -> Callable[..., Tensor]:
    """One function for all deferrals: code that calls it is the same for all chunks."""
    apart: Any = torch.compiler.disable
    function: Callable[..., Tensor] = apart(Deferral.linear)
    return function


def defer(model: nn.Module) -> Deferral:
    """Give all projections of a model's layers that can put off their weight's gradient one deferral."""
    deferral = Deferral()
    _multiply_by(model, deferral.linear)
    return deferral


def _multiply_by(model: nn.Module, product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
    for name, module in model.named_modules():
        if name.startswith("layers.") and isinstance(module, Linear):
            module.stand(replace(module.place, product=product))


@torch.no_grad()
def multiply(products: list[WeightProduct]) -> None:
    """The second half: add each product to its weight's gradient. The list is emptied on the way."""
    products.reverse()
    while products:
        weight, x, gradient = products.pop()
        x_NI, g_NO = x.flatten(0, -2), gradient.flatten(0, -2)
        if weight.grad is None:
            weight.grad = torch.mm(g_NO.t(), x_NI).to(weight.dtype)
        elif weight.grad.dtype == x_NI.dtype:
            weight.grad.addmm_(g_NO.t(), x_NI)
        else:
            weight.grad.add_(torch.mm(g_NO.t(), x_NI))


def product_dtype(x: Tensor) -> torch.dtype:
    """What x is cast to where a matrix product takes it in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral) -> Tensor:
        ctx.save_for_backward(x)
        # The parameters themselves, whose `.grad` is meant: what hooks on saved tensors give back is another object.
        # And not a cast copy: one cast more in backward, and no copy per microbatch.
        ctx.weight, ctx.deferral = weight, deferral
        ctx.bias_dtype = None if bias is None else bias.dtype
        return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, g_NO = ctx.weight, gradient.flatten(0, -2)
        x_gradient = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        bias_gradient = None if ctx.bias_dtype is None else g_NO.sum(0).to(ctx.bias_dtype)
        weight_gradient = None
        if ctx.deferral.is_waiting:
            ctx.deferral.products.append(WeightProduct(weight, x, gradient))
        else:
            weight_gradient = (g_NO.t() @ x.flatten(0, -2)).to(weight.dtype)
        return x_gradient, weight_gradient, bias_gradient, None
