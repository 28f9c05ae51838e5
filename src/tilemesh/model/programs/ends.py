"""What comes before the first layer and after the last, for training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from tilemesh.core.cost import Cost
from tilemesh.kernels.embedding.reference import embedding
from tilemesh.kernels.linear_cross_entropy.reference import linear_cross_entropy
from tilemesh.model.config import VOCABULARY_MULTIPLE
from tilemesh.model.kernels import TORCH
from tilemesh.model.linear import DENSE
from tilemesh.model.loss import IGNORED
from tilemesh.model.programs.program import CUT_OTHERWISE, LayerProgram, ProgramSeat, pass_cost
from tilemesh.model.soft_cap import soft_capped
from tilemesh.model.transformer import Pass, Transformer


@dataclass(frozen=True)
class RowsAndPositions(LayerProgram):
    """Rows of the table by token with those of the positions added, and its gradient, by tilemesh's operator."""

    def why_not(self, seat: ProgramSeat) -> str:
        model = seat.model
        if not model.part.embedding:
            return "this part of the model takes activations"
        if model.kernels.embedding == TORCH:
            return "the embedding's kernels are torch's (train.kernels)"
        if model.config.scaled_embedding:
            return "positions are added after the rows are scaled"
        assert model.token_embedding is not None
        return "" if len(model.token_embedding.weight) == model.config.vocabulary else "ranks share the table"

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        return pass_cost(rows * seat.model.config.width, seat.itemsize)

    def bind(self, seat: ProgramSeat) -> Callable[..., Any]:
        return partial(_embed, seat.model)


def _embed(model: Transformer, tokens_BT: Tensor, now: Pass) -> Tensor:
    if now.cache is not None or now.documents is not None:
        return model.embed(tokens_BT, now)
    assert model.token_embedding is not None
    positions = None if model.position_embedding is None else model.position_embedding.weight
    options = {"start": now.place.token, "implementation": model.kernels.embedding}
    y_BTD: Tensor = model.embedding_dropout(
        embedding(tokens_BT, model.token_embedding.weight, positions, **options), now
    )
    return y_BTD


def _why_not_dense(seat: ProgramSeat) -> str:
    """Why the output projection is more than a product with its weight."""
    model = seat.model
    if seat.use.invariant:
        return CUT_OTHERWISE
    if model.output is not None and model.output.kind.stacked() != DENSE:
        return f"the output projection's matrix is of kind {type(model.output.kind).__name__}"
    return "" if len(model.output_weight) == model.config.vocabulary else "ranks share the table"


@dataclass(frozen=True)
class AlignedVocabulary(LayerProgram):
    """The output projection as if the vocabulary were whole 128-byte lines of 16-bit numbers; the rest is cut off.
    Other products of 16 bits run at a sixth of the speed on a GPU."""

    def why_not(self, seat: ProgramSeat) -> str:
        if not seat.model.part.head:
            return "this part of the model gives activations"
        if not seat.use.aligns_vocabulary:
            return "it is for 16-bit products of a whole table on a GPU"
        if reason := _why_not_dense(seat):
            return reason
        whole = seat.model.config.vocabulary % VOCABULARY_MULTIPLE == 0
        return f"the vocabulary is a multiple of {VOCABULARY_MULTIPLE}" if whole else ""

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        weight = seat.model.output_weight
        return pass_cost(weight.numel(), seat.itemsize) + pass_cost(rows * len(weight), seat.itemsize, read=0)

    def bind(self, seat: ProgramSeat) -> Callable[..., Any]:
        return partial(_project, seat.model)


def _project(model: Transformer, x_BTD: Tensor) -> Tensor:
    weight_VD = model.output_weight
    more = -len(weight_VD) % VOCABULARY_MULTIPLE
    logits_BTV = functional.linear(x_BTD, functional.pad(weight_VD, (0, 0, 0, more)))[..., : len(weight_VD)]
    return soft_capped(logits_BTV, model.config.logit_cap)


@dataclass(frozen=True)
class LossWithoutLogits(LayerProgram):
    """The output projection and the loss as one operator, without ever holding the logits of all tokens."""

    def why_not(self, seat: ProgramSeat) -> str:
        if not seat.model.part.head:
            return "this part of the model gives activations"
        if seat.model.kernels.loss == TORCH:
            return "the loss's kernels are torch's (train.kernels)"
        if seat.model.config.logit_cap:
            return "logits are soft-capped before the loss"
        return _why_not_dense(seat)

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        return pass_cost(seat.model.output_weight.numel(), seat.itemsize, written=0)

    def bind(self, seat: ProgramSeat) -> Callable[..., Any]:
        return partial(_loss_sum, seat.model)


def _loss_sum(model: Transformer, x_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """As `loss_sum(model.project(x_BTD), targets_BT)`. Call it under autocast as the layers are: it casts as a product
    does."""
    targets_BT = targets_BT.long()
    total: Tensor = linear_cross_entropy(
        x_BTD, model.output_weight, targets_BT, ignore_index=IGNORED, reduction="sum", implementation=model.kernels.loss
    )
    return total, (targets_BT != IGNORED).sum()


EMBEDDING = RowsAndPositions("rows and positions by one operator", "embedding")
PROJECTION = AlignedVocabulary("vocabulary rounded up", "projection")
LOSS = LossWithoutLogits("loss without logits", "loss")
