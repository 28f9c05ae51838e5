"""Weight gradients that are put off: a backward pass in two halves.

The one idea: a projection's backward is two products, the gradient of its input, which the layer before waits for, and
the gradient of its weight, which nobody waits for until the optimizer steps. A `Deferral` that is told to wait keeps
the second product's operands instead of multiplying them, and does so later. The projections of a model ask theirs, if
they were given one (`defer`); what is no product (norms, tables) is computed in the first half, as ever.

N: rows x tokens; I: inputs; O: outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class WeightProduct(NamedTuple):
    """What a weight's gradient will be multiplied from."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    gradient: Tensor
    """Of the projection's output."""


class Deferral:
    """The put-off products of one chunk of a model. Without `is_waiting`, backward does both halves at once."""

    def __init__(self) -> None:
        self.is_waiting = False
        self.products: list[WeightProduct] = []

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `torch.nn.functional.linear`, under autocast as well."""
        function: Any = _Projection
        y: Tensor = function.apply(x.to(product_dtype(x)), weight, bias, self)
        return y

    def take(self) -> list[WeightProduct]:
        """The products put off since the last call."""
        taken, self.products = self.products, []
        return taken


def defer(model: nn.Module) -> Deferral:
    """Give all projections of a model that can put off their weight's gradient one deferral.

    Not the output projection: the gradient of the logits takes too much memory to be kept for later.
    """
    made = Deferral()
    for name, module in model.named_modules():
        if hasattr(module, "deferral") and name != "output":
            module.deferral = made
    return made


@torch.no_grad()
def multiply(products: list[WeightProduct]) -> None:
    """The second half: add each product to its weight's gradient. The list is emptied on the way."""
    products.reverse()
    while products:
        weight, bias, x, gradient = products.pop()
        x_NI, g_NO = x.flatten(0, -2), gradient.flatten(0, -2)
        if weight.grad is None:
            weight.grad = torch.mm(g_NO.t(), x_NI).to(weight.dtype)
        elif weight.grad.dtype == x_NI.dtype:
            weight.grad.addmm_(g_NO.t(), x_NI)
        else:
            weight.grad.add_(torch.mm(g_NO.t(), x_NI))
        if bias is not None:
            total_O = g_NO.sum(0)
            if bias.grad is None:
                bias.grad = total_O.to(bias.dtype)
            else:
                bias.grad.add_(total_O)


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
        ctx.weight, ctx.bias, ctx.deferral = weight, bias, deferral
        return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        x_gradient = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        if ctx.deferral.is_waiting:
            ctx.deferral.products.append(WeightProduct(weight, bias, x, gradient))
            return x_gradient, None, None, None
        g_NO = gradient.flatten(0, -2)
        weight_gradient = (g_NO.t() @ x.flatten(0, -2)).to(weight.dtype)
        return x_gradient, weight_gradient, None if bias is None else g_NO.sum(0).to(bias.dtype), None
