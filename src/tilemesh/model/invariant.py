"""A model whose bits of a token depend on the tokens before it alone: the same when it serves and when it trains.

The one idea: every part of the definition that could see how many tokens there are computes them in one shape instead:
projections and norms in blocks or tiles of one size, attention over keys in the same blocks in the order of positions.
So a served request's log probabilities are, bit for bit, those of a pass that is differentiated:

    programs = prepare(model, Use(trains=True, invariant=True), device)
    logits_BTV = programs(tokens_BT)

The gradients are the ordinary ones. It is not for autocast or torch.compile, which round and add in other places.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tilemesh.core.errors import UsageError
from tilemesh.model.attend_alone import ALONE_BY_TOKEN
from tilemesh.model.eight_bits import EightBits
from tilemesh.model.embedding import Embedding
from tilemesh.model.experts import Router, TokenGate
from tilemesh.model.linear import DENSE, Linear, OneTile, one_tile_product
from tilemesh.model.norm import ResidualNorm
from tilemesh.model.packed import Packed
from tilemesh.model.programs.group import GATED
from tilemesh.model.programs.program import Use
from tilemesh.model.rotary import RotaryTable
from tilemesh.model.row_blocks import BLOCKS
from tilemesh.model.transformer import Attention, Mlp, Transformer


def make_invariant(model: Transformer, device: torch.device, use: Use) -> None:
    """Let the parts of a model compute so, on this device; it stays so. `prepare` calls it."""
    in_8_bits = any(isinstance(getattr(module, "kind", None), EightBits) for module in model.modules())
    if use.casts or use.compiled or in_8_bits:
        what = "autocast" if use.casts else "torch.compile" if use.compiled else "products in 8 bits"
        raise UsageError(
            f"an invariant pass under {what}: that would round and add in other places than an engine does; train in "
            "the precision that is served (fp32, or bf16-master for bf16), not compiled"
        )
    on_gpu = device.type == "cuda"
    for module in model.modules():
        if isinstance(module, Mlp):
            if on_gpu and module.fc_gate is not None and module.fc_gate.activation in GATED:
                module.gate_by(GATED[module.fc_gate.activation])  # as a group of projections does
        elif isinstance(module, Linear | Embedding):
            is_dense = module.kind.stacked() == DENSE or isinstance(module.kind, OneTile | Packed)
            if is_dense:
                module.become(OneTile() if on_gpu else DENSE)
            module.multiply_in_blocks(not (is_dense and on_gpu))
        elif isinstance(module, ResidualNorm):
            module.compute_by("auto" if on_gpu else BLOCKS)
        elif isinstance(module, Attention):
            module.compute_by(ALONE_BY_TOKEN)
        elif isinstance(module, Router | TokenGate):
            module.compute_by(one_tile_product if on_gpu else functional.linear, in_blocks=not on_gpu)
    if device.type != "meta":
        model.rotary_table = RotaryTable.of(model.config, torch.empty(0, dtype=_dtype(model), device=device))


def _dtype(model: Transformer) -> torch.dtype:
    return next(model.parameters()).dtype
