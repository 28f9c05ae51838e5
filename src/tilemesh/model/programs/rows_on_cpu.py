"""A layer that serves on a CPU in float32 or bfloat16, by a few functions in C in place of torch's operators.

The one idea: a decode step of a small model has so little to compute that laying weights out, and passing over
activations once per operator, takes longer than its products. Here a layer is seven calls: norm, product, heads turned
and stored, attention, product, norm, gated product, product. Products are as the matrices' kinds have them. Where
weights are bfloat16, so are keys and values; what is computed between is float32.

R: tokens; D: width; F: MLP width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from tilemesh.core.cost import Cost
from tilemesh.kernels.decode_layers.cpu import LayerAdapters, LayerPages, LayerWeights, RowAdapters, decode_layers
from tilemesh.kernels.decode_layers.cpu import library as step_library
from tilemesh.kernels.few_linear.cost import MOST_ROWS
from tilemesh.kernels.few_linear.cpu import gate_rows, library, norm_rows
from tilemesh.model.kinds import Adapted
from tilemesh.model.linear import DENSE, Linear
from tilemesh.model.norm import ResidualNorm
from tilemesh.model.packed import FEW_ROWS, multiplies_bfloat16, multiplies_few
from tilemesh.model.programs.definition import attention_passes, gate_passes, norm_passes
from tilemesh.model.programs.few_tokens import why_not_in_a_row
from tilemesh.model.programs.products import attend_side_by_side
from tilemesh.model.programs.program import CUT_OTHERWISE, LayerProgram, ProgramSeat, products_cost
from tilemesh.model.transformer import Layer, Pass, ResidualStream, Transformer


def why_not_in_c(seat: ProgramSeat) -> str:
    """Why the functions do not compute this model here."""
    if seat.device.type != "cpu" or seat.use.launches_early:
        return "it is for a CPU"
    if seat.use.trains or seat.dtype not in (torch.float32, torch.bfloat16):
        return "its functions are for serving in float32 and bfloat16"
    if seat.use.invariant:
        return CUT_OTHERWISE
    return "" if library(seat.dtype) is not None else "there is no C compiler here"


def _products(seat: ProgramSeat) -> tuple[Linear, ...]:
    return seat.heads.layer, seat.here.attention.fc_o, seat.gated.layer, seat.mlp.fc_out


@dataclass(frozen=True)
class RowsOnCpu(LayerProgram):
    def why_not(self, seat: ProgramSeat) -> str:
        return why_not_in_c(seat) or why_not_in_a_row(seat, any_matrix=True)

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        gate = Cost() if rows <= MOST_ROWS else gate_passes(seat.mlp, rows, seat.itemsize, together=True)
        passes = attention_passes(seat, rows, side_by_side=True) + gate + norm_passes(seat, rows)
        return products_cost(_products(seat), rows, seat.itemsize) + passes

    def bind(self, seat: ProgramSeat) -> LayerInC:
        return LayerInC(seat.here, seat.heads.layer, seat.gated.layer, seat.mlp.fc_out)


@dataclass(frozen=True)
class LayerInC:
    """Call it as a layer."""

    layer: Layer
    heads: Linear
    gated: Linear
    last: Linear

    @property
    def adapters(self) -> LayerAdapters:
        """Of adapters side by side, those that change something."""
        layers = (self.heads, self.layer.attention.fc_o, self.gated, self.last)
        return LayerAdapters(*[
            (layer.lora_a, layer.lora_b) if isinstance(layer.kind, Adapted) and not layer.kind.silent else None
            for layer in layers
        ])  # fmt: skip

    @property
    def rows_have(self) -> RowAdapters | None:
        """The adapters of the rows of this pass."""
        kind = self.heads.kind
        rows = kind.rows if isinstance(kind, Adapted) else None
        return None if rows is None or rows.now is None else RowAdapters(rows.now.slots_T, rows.slots, rows.rank)

    @property
    def weights(self) -> LayerWeights:
        layer, heads, out, gated, last = self.layer, self.heads, self.layer.attention.fc_o, self.gated, self.last
        assert layer.attention_norm.weight is not None
        assert layer.mlp_norm.weight is not None
        return LayerWeights(
            layer.attention_norm.weight, heads.weight, heads.bias, out.weight, out.bias, layer.mlp_norm.weight,
            gated.weight, gated.bias, last.weight, last.bias,
        )  # fmt: skip

    def __call__(self, stream: ResidualStream, now: Pass) -> ResidualStream:
        layer, attention, dtype = self.layer, self.layer.attention, stream.x.dtype
        y_RD, x_RD = _normalized(layer.attention_norm, stream.x, stream.branch)
        y_1RD = attend_side_by_side(attention, _product(self.heads, y_RD, dtype)[None], now, dtype)
        y_RD, x_RD = _normalized(layer.mlp_norm, x_RD, _product(attention.fc_o, y_1RD[0], dtype))
        branch_RD = _product(self.last, gate_rows(_product(self.gated, y_RD, dtype)), dtype)
        return ResidualStream(x_RD.view_as(stream.x).to(dtype), branch_RD.view_as(stream.x).to(dtype))


def _product(layer: Linear, x_RD: Tensor, dtype: torch.dtype) -> Tensor:
    """Of activations of the model's dtype, or of float32 where that is no slower."""
    few = len(x_RD) <= MOST_ROWS or not multiplies_bfloat16()
    y_RD: Tensor = layer(x_RD if few and layer.kind.widens else x_RD.to(dtype))
    return y_RD


def _normalized(norm: ResidualNorm, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
    assert norm.weight is not None
    branch_RD = None if branch is None else branch.flatten(0, -2).float()
    return norm_rows(x.flatten(0, -2).float(), branch_RD, norm.weight, norm.epsilon)


@dataclass(frozen=True)
class DecodeOnCpu(RowsOnCpu):
    """All layers by one call where every token is of a sequence that decodes; layer by layer in other passes."""

    def why_not(self, seat: ProgramSeat) -> str:
        if reason := super().why_not(seat):
            return reason
        if seat.model.config.score_sink:
            return "heads have sinks"
        norms = (seat.here.attention_norm, seat.here.mlp_norm, seat.model.final_norm)
        if len({norm.epsilon for norm in norms if norm is not None}) > 1:
            return "norms differ"
        if step_library(seat.dtype) is None:  # compiled here, and not before the first token but one
            return "there is no C compiler here"
        if not multiplies_few(seat.dtype):
            return "products here are of weights that were laid out once"
        kinds = [layer.kind.stacked() for layer in _products(seat)]
        if len({isinstance(kind, Adapted) for kind in kinds}) > 1:
            return "some of its matrices have adapters"
        bases = [kind.base if isinstance(kind, Adapted) else kind for kind in kinds]
        return "" if all(base in (DENSE, FEW_ROWS) for base in bases) else "a matrix is not dense"

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        return replace(super().cost(seat, rows), launches=1)

    def bind_all(self, seats: Sequence[ProgramSeat]) -> Callable[[Tensor, Pass], Tensor]:
        return partial(_through, seats[0].model, tuple(self.bind(seat) for seat in seats))


def _through(model: Transformer, layers: tuple[LayerInC, ...], x_1RD: Tensor, now: Pass) -> Tensor:
    decoded = _decoded(model, layers, x_1RD, now)
    if decoded is not None:
        head = model.token_embedding if model.output is None else model.output
        return decoded if head is not None and head.kind.widens else decoded.to(x_1RD.dtype)
    stream = ResidualStream(x_1RD)
    for layer in layers:
        stream = layer(stream, now)
    return model.normalize(stream)


def _decoded(model: Transformer, layers: tuple[LayerInC, ...], x_1RD: Tensor, now: Pass) -> Tensor | None:
    rows_have = layers[0].rows_have
    adapted = [] if rows_have is None else [each.adapters for each in layers]
    norm, cache, config = model.final_norm, cast(Any, now.cache), model.config
    assert norm is not None
    assert norm.weight is not None
    pages: list[LayerPages] = []
    for each in layers:
        attention, angles = each.layer.attention, each.layer.attention.rotary(now)
        held = cache.decoding(attention.layer, x_1RD.dtype, config.kv_heads, config.head_width, attention.window)
        if held is None:
            return None
        cosines, sines = (None, None) if angles is None else (table[0, :, 0] for table in angles)
        pages.append(
            LayerPages(held.keys, held.values, cosines, sines, held.tables_RM, held.places_R, attention.window)
        )
    weights = [each.weights for each in layers]
    return decode_layers(
        x_1RD[0].float().contiguous(), weights, pages, norm.weight, held.positions_R, held.longest, norm.epsilon,
        config.score_cap, adapted, rows_have,
    )[None]  # fmt: skip


IN_C = RowsOnCpu("functions in C, on a CPU", "layer")
STEP = DecodeOnCpu("a decode step in C, on a CPU", "layers", ("1", "2-64"))
