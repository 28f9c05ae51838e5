"""act(x W_in^T + b_in) W_out^T + b_out in plain torch: the MLP of a Transformer without a gate, as one operator.

As one operator, because its gradient has a product whose result is only ever multiplied by the activation's derivative:
that derivative belongs into the product (kernel.py), and two operators could not meet there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.activations.names import ACTIVATIONS
from tilemesh.kernels.activations.reference import activate
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.mlp.cost import FORM
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem


def check(x: Tensor, w_in: Tensor, b_in: Tensor | None, w_out: Tensor, b_out: Tensor | None, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    shapes = f"x {tuple(x.shape)}, w_in {tuple(w_in.shape)}, w_out {tuple(w_out.shape)}"
    if x.dim() < 1 or w_in.dim() != 2 or w_out.dim() != 2:
        raise UsageError(f"{shapes}: expected x (…, D), w_in (F, D), w_out (E, F)")
    if x.shape[-1] != w_in.shape[1] or w_in.shape[0] != w_out.shape[1]:
        raise UsageError(f"shapes do not multiply: {shapes}; expected x (…, D), w_in (F, D), w_out (E, F)")
    for name, bias, weight in (("b_in", b_in, w_in), ("b_out", b_out, w_out)):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise UsageError(f"{name} has shape {tuple(bias.shape)}: expected {tuple(weight.shape[:1])}, or None")


def _hidden(x: Tensor, w_in: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], w_in.shape[0]))


@operator(kernel="tilemesh.kernels.mlp.kernel", check=check, kept=(_hidden, _hidden), casts=True)
def mlp(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    *,
    activation: str = "gelu_tanh",
) -> Tensor:
    """act(x W_in^T + b_in) W_out^T + b_out: x (…, D), w_in (F, D), w_out (E, F), biases or None; any strides.

    The activation is applied inside the first product, and its derivative inside the product that is the gradient of
    the second (on Hopper, for 16-bit dtypes and aligned rows; elsewhere in a pass after it). What lies between the
    products is kept for the backward pass twice, before the activation and after it.
    """
    return functional.linear(activate(functional.linear(x, w_in, b_in), activation), w_out, b_out)


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """Random ones of a problem, for benchmarks and tests."""
    rows, width, hidden = problem.sizes
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    shapes = (((rows, width), 1.0), ((hidden, width), width**-0.5), ((hidden,), 1.0), ((width, hidden), hidden**-0.5))
    made = [torch.randn(shape, generator=generator, device=device) * by for shape, by in (*shapes, ((width,), 1.0))]
    return tuple(tensor.to(dtype) for tensor in made)


BENCH = FunctionBench(mlp, FORM, arguments)
