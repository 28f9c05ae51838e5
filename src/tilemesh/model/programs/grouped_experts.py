"""Experts by grouped products: one product for the rows of all of them, for each of their matrices.

The one idea: experts keep parameters of their own names, which lie side by side in one storage (`parallel/apply.py`, or
`lay_together` for a model that serves), so the matrices of all of them are one tensor without a copy. How many rows
each takes is read on the device; nobody waits for it. Where matrices do not lie side by side they are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilemesh.core.cost import Cost
from tilemesh.kernels.gated.reference import swiglu
from tilemesh.kernels.grouped_linear.reference import grouped_linear
from tilemesh.kernels.launch.gpu import launches_early
from tilemesh.kernels.lowbit_linear.cost import CODE_BITS
from tilemesh.kernels.lowbit_linear.grouped import grouped_lowbit_linear
from tilemesh.model.experts import Experts
from tilemesh.model.kinds import FewBits
from tilemesh.model.linear import ACTIVATIONS, ALONE, DENSE, Linear
from tilemesh.model.programs.definition import gate_passes
from tilemesh.model.programs.program import CUT_OTHERWISE, LayerProgram, ProgramSeat, pass_cost
from tilemesh.model.transformer import Mlp


@dataclass(frozen=True)
class GroupedExperts(LayerProgram):
    def why_not(self, seat: ProgramSeat) -> str:
        block = seat.here.mlp
        if not isinstance(block, Experts):
            return "the layer has no experts"
        if seat.device.type != "cuda":
            return "on a CPU the experts' products one by one are as fast"
        if seat.use.invariant:
            return CUT_OTHERWISE
        if seat.use.puts_off:
            return "weights' gradients are put off, and one operator has no halves"
        if not seat.use.casts and seat.itemsize != 2:
            return "grouped products are of 16 bits"
        if not launches_early(seat.device):
            return "the GPU does not copy tiles by itself"
        return why_apart(block)

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        block, size = seat.here.mlp, seat.itemsize
        assert isinstance(block, Experts)
        first, picked = _mlps(block)[0], rows * block.config.experts_per_token
        used, total = min(len(block.experts), picked), Cost()
        for layer in (first.fc_gate, first.fc_in, first.fc_out):
            if layer is not None:
                outputs, inputs = layer.out_features, layer.in_features
                matrices = used * layer.kind.nbytes(outputs, inputs, size)
                read, written = matrices + size * picked * inputs, size * picked * outputs
                total += Cost(2 * picked * outputs * inputs, read, written, launches=1, dtype="bf16")
        return (
            total + gate_passes(first, picked, size, together=True) + pass_cost(picked * first.fc_in.in_features, size)
        )

    def bind(self, seat: ProgramSeat) -> Callable[..., Any]:
        block = seat.here.mlp
        assert isinstance(block, Experts)
        if not seat.use.trains:
            lay_together(block)
        block.compute_by(partial(compute_grouped, block))
        return block


def why_apart(block: Experts) -> str:
    """Why the experts of a layer cannot be computed together; "" where they can."""
    layers = [layer for mlp in _mlps(block) for layer in (mlp.fc_gate, mlp.fc_in, mlp.fc_out) if layer is not None]
    kinds = {layer.kind.stacked() for layer in layers}
    if len(kinds) > 1 or not all(kind == DENSE or (isinstance(kind, FewBits) and _has_kernel(kind)) for kind in kinds):
        return "matrices are neither all dense nor all of the same few bits"
    if any(layer.place != ALONE for layer in layers):
        return "projections are exchanged or put off each for itself"
    if any(layer.in_features % 8 or layer.out_features % 8 for layer in layers):
        return "rows of matrices do not begin at multiples of 16 bytes"
    return "experts have biases" if any(layer.bias is not None for layer in layers) else ""


def lay_together(block: Experts) -> None:
    """Each kind of matrix of all experts in one storage, where they do not lie so already."""
    mlps = _mlps(block)
    for layers in zip(*((mlp.fc_in, mlp.fc_out, mlp.fc_gate) for mlp in mlps), strict=True):
        members = [layer for layer in layers if layer is not None]
        for name in members[0]._parameters if members else ():
            pieces = [piece for layer in members if (piece := layer._parameters[name]) is not None]
            if pieces and not _side_by_side(pieces):
                for piece, place in zip(pieces, torch.stack([one.detach() for one in pieces]), strict=True):
                    piece.data = place
    if next(block.parameters()).is_cuda:
        torch.cuda.empty_cache()  # where they lay before is of use to nobody: other matrices are larger


def compute_grouped(block: Experts, rows_ND: Tensor, counts: Tensor, implementation: str = "auto") -> Tensor:
    """As `Experts.compute`: what the experts make of rows that are ordered by expert, so many for each."""
    mlps, ends = _mlps(block), counts.cumsum(0).int()
    product = partial(_product, ends=ends, implementation=implementation)
    h_NF: Tensor = product(rows_ND, [mlp.fc_in for mlp in mlps])
    first = mlps[0]
    if first.fc_gate is None:
        h_NF = ACTIVATIONS[first.fc_in.activation](h_NF)
    else:
        gate_NF = product(rows_ND, [mlp.fc_gate for mlp in mlps if mlp.fc_gate is not None])
        is_silu = first.fc_gate.activation == "silu"
        h_NF = ACTIVATIONS[first.fc_in.activation](h_NF)
        h_NF = swiglu(gate_NF, h_NF) if is_silu else ACTIVATIONS[first.fc_gate.activation](gate_NF) * h_NF
    return product(h_NF, [mlp.fc_out for mlp in mlps])


def _product(x: Tensor, layers: Sequence[Linear], *, ends: Tensor, implementation: str) -> Tensor:
    """Rows of each layer times its matrix."""
    kind = layers[0].kind
    if isinstance(kind, FewBits):
        codes, scales, zeros = (
            None if pieces[0] is None else stacked(pieces)
            for pieces in zip(*(kind.stored(layer) for layer in layers), strict=True)
        )
        few = partial(grouped_lowbit_linear, code=kind.scheme.format, implementation=implementation)
        y: Tensor = few(x, codes, scales, zeros, ends)
    else:
        y = grouped_linear(x, stacked([layer.weight for layer in layers]), ends, implementation=implementation)
    return y


def _has_kernel(kind: FewBits) -> bool:
    scheme = kind.scheme
    return kind.inputs is None and scheme.format in CODE_BITS and not (scheme.group and scheme.group % 32)


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Matrices of one shape as one tensor: the very same memory where they lie side by side. Each gets its gradient."""
    function: Any = _Stacked
    weight: Tensor = function.apply(*matrices)
    return weight


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *matrices: Tensor) -> Tensor:
        if not _side_by_side(matrices):
            return torch.stack(matrices)
        first = matrices[0].detach()
        return first.as_strided((len(matrices), *first.shape), (first.numel(), *first.stride()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[0].unbind(0)


def _side_by_side(matrices: Sequence[Tensor]) -> bool:
    """Whether they follow one another in one storage, and not in others that happen to follow."""
    first, size = matrices[0], matrices[0].nbytes
    begin = first.data_ptr()
    if any(matrix.data_ptr() != begin + size * place for place, matrix in enumerate(matrices)):
        return False
    room = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size()
    return room >= size * len(matrices)


def _mlps(block: Experts) -> list[Mlp]:
    return [mlp for mlp in block.experts if isinstance(mlp, Mlp)]


GROUPED_EXPERTS = GroupedExperts("experts by grouped products", "mlp")
