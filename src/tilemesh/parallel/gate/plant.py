"""Bugs for the gate to find, one at least for each kind of layer: the mistakes that layouts are made with.

A gate that has never been red proves nothing. Each plant is put into a laid model from outside, as a patch of its
objects, so that nothing in the code that trains knows of them; `tilemesh verify --plant NAME` shows what the gate says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.model.config import ModelConfig
from tilemesh.model.dropout import ORIGIN
from tilemesh.parallel.buckets import Bucketed
from tilemesh.parallel.gate.cases import GateLayout
from tilemesh.parallel.laid import Laid, StepPiece
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.parallel.tensor import Seams, vocabulary_loss


@dataclass(frozen=True)
class Plant:
    """A bug. `names`: what the gate must say of it; `suits`: the layouts and models in which it is one; `piped`: a bug
    of pipelines, and otherwise of models on one stage."""

    name: str
    kind: str
    names: str
    put: Callable[[Laid], None]
    suits: Callable[[GateLayout, ModelConfig], bool]
    piped: bool = False

    def applies(self, layout: GateLayout, config: ModelConfig) -> bool:
        return (layout.pp > 1) == self.piped and self.suits(layout, config)


class _Deaf(Seams):
    """Seams that never sum: each rank takes its own partial result for the whole."""

    def sum(self, x: Tensor, op: str = "sum") -> Tensor:
        return x if op == "sum" else super().sum(x, op)

    def scatter_sum_tokens(self, x: Tensor) -> Tensor:
        return x.tensor_split(self.comm.size, 1)[self.comm.rank].contiguous()


def _deaf(laid: Laid) -> Seams:
    return _Deaf(**{field.name: getattr(laid.seams, field.name) for field in dataclasses.fields(laid.seams)})


def _module(laid: Laid, name: str) -> Any:
    return laid.module.get_submodule(name)


def _attention_without_sum(laid: Laid) -> None:
    _module(laid, "layers.0.attention.fc_o").seams = _deaf(laid)


def _bias_on_every_rank(laid: Laid) -> None:
    layer = _module(laid, "layers.1.mlp.fc_out")
    layer.forward = lambda x: layer.seams.leave(functional.linear(x, layer.weight, layer.bias))


def _shifted(name: str) -> Callable[[Laid], None]:
    @torch.no_grad()
    def put(laid: Laid) -> None:
        weight = _module(laid, name).weight
        weight.copy_(weight.roll(1, 0))

    return put


def _region_without_sum(laid: Laid) -> None:
    mlp: nn.Module = _module(laid, "layers.1.mlp")
    mlp._forward_pre_hooks.clear()
    if not laid.seams.sequence:
        return  # entering passes activations on as they are: what is lost is the sum of gradients

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        deaf = _deaf(laid)
        return (deaf.enter(args[0]), *args[1:])

    mlp.register_forward_pre_hook(hook)


def _loss_without_sum(laid: Laid) -> None:
    def loss(tokens_BT: Tensor, targets_BT: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        model = laid._transformer()
        stream = laid._stream(model, tokens_BT, None, options["dropout_seed"], options["place"])
        logits_BTV = model.project(laid._to_project(model, stream))
        return vocabulary_loss(logits_BTV, targets_BT, _deaf(laid), model.config.vocabulary)

    laid.loss = loss  # type: ignore[method-assign]


def _copies_not_summed(whole: bool) -> Callable[[Laid], None]:
    def put(laid: Laid) -> None:
        assert isinstance(laid.gradients, Bucketed)
        for bucket in laid.gradients.buckets:
            if (bucket.copies_summed == (("tp", laid.mesh.tp.size),)) == whole:
                bucket.copies_summed = ()

    return put


def _mask_by_rank(laid: Laid) -> None:
    right = laid.loss

    def loss(tokens_BT: Tensor, targets_BT: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        options["dropout_seed"] += laid.mesh.comm.rank
        return right(tokens_BT, targets_BT, **options)

    laid.loss = loss  # type: ignore[method-assign]


def _mask_by_local_row(laid: Laid) -> None:
    right = laid.loss
    laid.loss = lambda *batch, **options: right(*batch, **(options | {"place": ORIGIN}))  # type: ignore[method-assign]


def _bucket_left_out(laid: Laid) -> None:
    gradients = laid.gradients
    assert isinstance(gradients, Bucketed)
    exchange, second = gradients.exchange, gradients.buckets[1]
    gradients.exchange = lambda bucket: None if bucket is second else exchange(bucket)  # type: ignore[method-assign]


def _mean_of_means(laid: Laid) -> None:
    right = laid.gradients.backward

    def backward(loss_sum: Tensor, count: Tensor, **options: Any) -> None:
        right(loss_sum / count, 1, **options)

    laid.gradients.backward = backward  # type: ignore[assignment, method-assign]


def _last_microbatch_only(laid: Laid) -> None:
    gradients = laid.gradients
    assert isinstance(gradients, Bucketed)
    right = gradients.backward

    def backward(loss_sum: Tensor, count: Tensor, **options: Any) -> None:
        gradients._open()
        right(loss_sum, count, **options)

    gradients.backward = backward  # type: ignore[assignment, method-assign]


def _tied_not_summed(laid: Laid) -> None:
    assert isinstance(laid, Pipeline)
    for bucket in laid.buckets.buckets:
        bucket.holders = bucket.holders[:1]


def _tied_counted_twice(laid: Laid) -> None:
    assert isinstance(laid, Pipeline)
    for bucket in laid.buckets.buckets:
        bucket.copies //= max(1, len(bucket.holders))


def _microbatches_swapped(laid: Laid) -> None:
    assert isinstance(laid, Pipeline)
    right, has_head = laid.passes, laid.has_head

    def passes(pieces: Sequence[StepPiece], **options: Any) -> None:
        first, second, *others = pieces
        right([second, first, *others] if has_head else pieces, **options)

    laid.passes = passes  # type: ignore[method-assign]


def _scaled_by_microbatches(laid: Laid) -> None:
    assert isinstance(laid, Pipeline)
    right, count = laid.buckets.begin, laid.step.program.microbatches

    def begin(scale: float) -> None:
        right(scale)
        laid.data.scale = scale * count

    laid.buckets.begin = begin  # type: ignore[method-assign]
    laid.data.count = lambda total, counted: laid.buckets.count(total, counted, 1.0)


def _chunk_not_reduced(laid: Laid) -> None:
    assert isinstance(laid, Pipeline)
    buckets = laid.buckets
    exchange = buckets.exchange
    buckets.exchange = lambda bucket: None if bucket.chunk == 1 else exchange(bucket)  # type: ignore[method-assign]


def _any_tp(layout: GateLayout, config: ModelConfig) -> bool:
    return layout.tp > 1


def _any_dp(layout: GateLayout, config: ModelConfig) -> bool:
    return layout.dp > 1


_ALL = (
    Plant("attention-no-sum", "attention", "layers.0.attention", _attention_without_sum, _any_tp),
    Plant(
        "attention-kv-copies", "attention", "layers.1.attention.fc_v.", _copies_not_summed(whole=False),
        lambda layout, config: 1 < config.kv_heads < layout.tp,
    ),
    Plant(
        "mlp-bias-everywhere", "mlp", "layers.1.mlp", _bias_on_every_rank,
        lambda layout, config: layout.tp > 1 and config.has_biases("mlp"),
    ),
    Plant("mlp-wrong-slice", "mlp", "layers.0.mlp", _shifted("layers.0.mlp.fc_in"), _any_tp),
    Plant("region-no-sum", "column", "layers.1.", _region_without_sum, _any_tp),
    Plant("embedding-wrong-slice", "embedding", "token_embedding", _shifted("token_embedding"), _any_tp),
    Plant("loss-no-sum", "loss", "the loss differs", _loss_without_sum, _any_tp),
    Plant("norm-no-sum", "norm", "norm", _copies_not_summed(whole=True), lambda layout, config: layout.sequence),
    Plant("dropout-by-rank", "dropout", "the input of layers.0.", _mask_by_rank, _any_tp),
    Plant("dropout-local-row", "dropout", "the input of layers.0.", _mask_by_local_row, _any_dp),
    Plant("bucket-left-out", "gradients", "backward differs first at", _bucket_left_out, _any_dp),
    Plant("mean-of-means", "gradients", "loss", _mean_of_means, _any_dp),
    Plant(
        "last-microbatch", "gradients", "backward differs first at", _last_microbatch_only,
        lambda layout, config: layout.accumulation > 1,
    ),
    Plant(
        "stage-tied-not-summed", "pipeline", "parameter token_embedding.weight", _tied_not_summed,
        lambda layout, config: config.tied and layout.schedule == "1f1b", piped=True,
    ),
    Plant(
        "stage-tied-counted-twice", "pipeline", "comes with clipping", _tied_counted_twice,
        lambda layout, config: config.tied and layout.schedule == "1f1b", piped=True,
    ),
    Plant(
        "stage-microbatches-swapped", "pipeline", "forward differs first at", _microbatches_swapped,
        lambda layout, config: layout.schedule == "zb-h1", piped=True,
    ),
    Plant(
        "stage-scaled-by-microbatches", "pipeline", "backward differs first at", _scaled_by_microbatches,
        lambda layout, config: layout.schedule == "zb-v", piped=True,
    ),
    Plant(
        "stage-not-reduced", "pipeline", "backward differs first at", _chunk_not_reduced,
        lambda layout, config: layout.dp > 1, piped=True,
    ),
)  # fmt: skip
PLANTS = {plant.name: plant for plant in _ALL}
