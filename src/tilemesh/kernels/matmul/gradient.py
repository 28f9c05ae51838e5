"""The backward pass: dA, dB and dC of D = act(A @ B + C), with the activation's gradient fused into one pass.

What is kept from the forward pass: D for relu (its sign decides), the value before the activation for the others
(recomputing it would be another matmul). The pass also leaves the partial sums of a bias's gradient, summed afterwards
in a fixed order: nothing is atomic, so results repeat bit by bit.

With `create_graph=True` everything is plain torch, so that it can be differentiated again.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilemesh.kernels.activations import reference as activations
from tilemesh.kernels.launch.gpu import current_stream, device_index
from tilemesh.kernels.launch.tensors import dtype_name
from tilemesh.kernels.matmul.plan import gradient_plan, gradient_sums_shape
from tilemesh.kernels.matmul.problem import Matrix
from tilemesh.kernels.matmul.run import matrix_of

if TYPE_CHECKING:
    from tilemesh.kernels.launch.program import Program

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
    places = matrix_of(grad), matrix_of(saved), matrix_of(out)
    sums = None
    if c_kind in ("row", "column"):
        sums = torch.empty(gradient_sums_shape(places[2], c_kind), dtype=torch.float32, device=grad.device)
    tensors = {"grad": grad, "saved": saved, "out": out, **({"sums": sums} if sums is not None else {})}
    if how == "interpret":
        from tilemesh.kernels.launch import interpret

        interpret.run(gradient_plan(*places, c_kind, activation), tensors, written=("out",))
    else:
        index = device_index(grad.device)
        program = _program(places, c_kind, activation, dtype_name(grad.dtype), index)
        with torch.cuda.device(index):
            program(current_stream(index), *(tensor.data_ptr() for tensor in tensors.values()))
    return out, None if sums is None else sums.sum(0).to(grad.dtype)


@functools.lru_cache(maxsize=1024)
def _program(places: tuple[Matrix, Matrix, Matrix], c_kind: str, activation: str, dtype: str, index: int) -> Program:
    from tilemesh.kernels.launch.program import Operand, Program

    plan = gradient_plan(*places, c_kind, activation)
    operands = {n: Operand(dtype, place.aligned) for n, place in zip(("grad", "saved", "out"), places, strict=True)}
    operands["sums"] = Operand("float32")
    names = ["grad", "saved", "out", *(["sums"] if plan.steps[0].arguments["sums"] is not None else [])]
    with torch.cuda.device(index):
        return Program(plan, operands, names)


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
