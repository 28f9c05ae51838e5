"""The backward pass: dA, dB and dC of D = act(A @ B + C), with the activation's gradient fused into one pass.

What is kept from the forward pass: D for relu (its sign decides), the value before the activation for the others
(recomputing it would be another matmul). The pass also leaves the partial sums of a bias's gradient, summed afterwards
in a fixed order: nothing is atomic, so results repeat bit by bit.

With `create_graph=True` everything is plain torch, so that it can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tilemesh.kernels.activations import reference as activations
from tilemesh.kernels.launch import call
from tilemesh.kernels.launch.steps import LaunchPlan
from tilemesh.kernels.matmul.plan import gradient_plan, gradient_sums_shape
from tilemesh.kernels.matmul.run import matrix_at

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def keeps_sum(activation: str) -> bool:
    """Whether the gradient needs the value before the activation; relu reads D's sign, none needs nothing."""
    return activation not in ("none", "relu")


def activation_gradient(
    grad: Tensor, saved: Tensor, activation: str, c_kind: str, how: str
) -> tuple[Tensor, Tensor | None]:
    """(grad * act'(saved), C's gradient where it is a row or a column). `how`: triton, interpret or torch; 2-d."""
    if activation == "none" and c_kind not in ("row", "column"):
        return grad, None
    if how == "torch":
        out = activations.gradient(grad, saved, activation)
        if c_kind == "row":
            return out, out.sum(0)
        return out, out.sum(1) if c_kind == "column" else None
    out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    tensors, sums = {"grad": grad, "saved": saved, "out": out}, None
    if c_kind in ("row", "column"):
        shape = gradient_sums_shape(out.shape[0], out.shape[1], c_kind)
        tensors["sums"] = sums = torch.empty(shape, dtype=torch.float32, device=grad.device)
    launch = call.interpreted if how == "interpret" else call.compiled
    launch(_plan, tensors, written=("out",), c_kind=c_kind, activation=activation)
    return out, None if sums is None else sums.sum(0).to(grad.dtype)


def _plan(places: Mapping[str, call.Place], *, c_kind: str, activation: str) -> LaunchPlan:
    grad, saved, out = (matrix_at(places[name]) for name in ("grad", "saved", "out"))
    return gradient_plan(grad, saved, out, c_kind, activation)


def differentiable(
    grad: Tensor, a: Tensor, b: Tensor, c: Tensor | None, saved: Tensor | None, activation: str
) -> Gradients:
    """The same gradients in plain torch, as functions of a, b, c and grad that can be differentiated again."""
    if activation == "none":
        dz = grad
    elif activation == "relu" and saved is not None:
        dz = activations.gradient(grad, saved.detach().reshape(grad.shape), activation)
    else:
        total = a @ b if c is None else a @ b + c
        dz = activations.gradient(grad, total, activation)
    da = dz @ b.mT
    db = (a.mT @ dz).sum_to_size(b.shape) if a.dim() == 2 else (a.flatten(0, -2).mT @ dz.flatten(0, -2))
    return da, db, None if c is None else dz.sum_to_size(c.shape)
