"""Bugs for the gate to find, one at least for each kind of layer: the mistakes that layouts are made with.

A gate that has never been red proves nothing. Each plant is put into a laid model from outside, as a patch of its
objects, so that nothing in the code that trains knows of them; `tilemesh verify --plant NAME` shows what the gate says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.core.plan import ParallelPlan
from tilemesh.core.tensor_placement import Crossing, R
from tilemesh.model.config import ModelConfig
from tilemesh.model.dropout import ORIGIN
from tilemesh.model.experts import Experts, Router
from tilemesh.parallel.buckets import Bucketed
from tilemesh.parallel.context import ContextCache
from tilemesh.parallel.gate.cases import Case
from tilemesh.parallel.gate.plant_experts import EXPERTS, divide_router_losses
from tilemesh.parallel.gate.plant_numerics import NUMERIC, Plant
from tilemesh.parallel.laid import Laid, StepPiece
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.parallel.ring import AttendedRuns
from tilemesh.parallel.shard import Held
from tilemesh.parallel.tensor import EntryHook, Passage, Seams, vocabulary_loss
from tilemesh.parallel.zero import Zero, ZeroBucket

_FORWARD, _BACKWARD = "forward differs first at", "backward differs first at"
PLANTS = {plant.name: plant for plant in (*NUMERIC, *EXPERTS)}


def planted(
    name: str, kind: str, names: str, suits: Callable[[ParallelPlan, ModelConfig], bool]
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Adds a bug of layouts: the function under it puts it into a laid model. `suits`: the layouts and models that can
    have it, of pipelines, of ZeRO, or of whole replicas, as its kind is."""

    def applies(case: Case) -> bool:
        plan = case.layout
        kinds = (kind == "pipeline", kind == "zero", kind == "context")
        is_kind = (plan.pp > 1, plan.zero > 0, plan.cp > 1) == kinds
        return is_kind and suits(plan, case.config)

    def add(put: Callable[[Any], None]) -> Callable[[Any], None]:
        PLANTS[name] = Plant(name, kind, names, applies, put)
        return put

    return add


def _any_tp(plan: ParallelPlan, config: ModelConfig) -> bool:
    return plan.tp > 1


def _any_dp(plan: ParallelPlan, config: ModelConfig) -> bool:
    return plan.dp > 1


def _has_tied_stages(plan: ParallelPlan, config: ModelConfig) -> bool:
    return config.tied and plan.schedule == "1f1b"


class _Deaf(Seams):
    """Seams that never sum: each rank takes its own partial result for the whole."""

    def reduced(self, x: Tensor, op: str) -> Tensor:
        return x if op == "sum" else super().reduced(x, op)


def _deaf(laid: Laid) -> Seams:
    return _Deaf(**{field.name: getattr(laid.seams, field.name) for field in dataclasses.fields(laid.seams)})


def _module(laid: Laid, name: str) -> Any:
    return laid.module.get_submodule(name)


@planted("attention-no-sum", "attention", "layers.0.attention", _any_tp)
def _attention_without_sum(laid: Laid) -> None:
    layer = _module(laid, "layers.0.attention.fc_o")
    right = layer.place.leave.crossing
    taken_for_whole = Passage(laid.seams, "leave", instead=Crossing("tp", (R, R), right.after))
    layer.stand(dataclasses.replace(layer.place, leave=taken_for_whole))


@planted("mlp-bias-everywhere", "mlp", "layers.1.mlp", lambda plan, config: plan.tp > 1 and config.has_biases("mlp"))
def _bias_on_every_rank(laid: Laid) -> None:
    layer = _module(laid, "layers.1.mlp.fc_out")
    layer.forward = lambda x: layer.place.leave(layer.kind.affine(layer, x, layer.bias))


def _shifted(name: str) -> Callable[[Laid], None]:
    @torch.no_grad()
    def put(laid: Laid) -> None:
        layer = _module(laid, name)
        for piece, value in layer.named_parameters():
            if piece != "bias":
                value.copy_(value.roll(1, 0))

    return put


planted("mlp-wrong-slice", "mlp", "layers.0.mlp", _any_tp)(_shifted("layers.0.mlp.fc_in"))
planted("embedding-wrong-slice", "embedding", "token_embedding", _any_tp)(_shifted("token_embedding"))


@planted("region-no-sum", "column", "layers.1.", _any_tp)
def _region_without_sum(laid: Laid) -> None:
    """Gradients that come back are parts of a sum, and are taken for all of it."""
    mlp: nn.Module = _module(laid, "layers.1.mlp")
    [hook] = mlp._forward_pre_hooks.values()
    assert isinstance(hook, EntryHook)
    mlp._forward_pre_hooks.clear()
    crossing = Crossing("tp", hook.enter.crossing.before, (R, R))
    mlp.register_forward_pre_hook(EntryHook(Passage(laid.seams, "enter", instead=crossing)))


@planted("loss-no-sum", "loss", "the loss differs", _any_tp)
def _loss_without_sum(laid: Laid) -> None:
    def loss(tokens_BT: Tensor, targets_BT: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        logits_BTV = laid.head(laid.stream(tokens_BT, **options)).logits_BTV
        return vocabulary_loss(logits_BTV, targets_BT, _deaf(laid), laid.model.config.vocabulary)

    laid.loss = loss  # type: ignore[method-assign]


def _copies_not_summed(of_all: bool) -> Callable[[Laid], None]:
    def put(laid: Laid) -> None:
        assert isinstance(laid.gradients, Bucketed)
        for bucket in laid.gradients.buckets:
            if (bucket.copies_summed == (("tp", laid.mesh.tp.size),)) == of_all:
                bucket.copies_summed = ()

    return put


planted("norm-no-sum", "norm", "norm", lambda plan, config: plan.sequence_parallel)(_copies_not_summed(of_all=True))
planted(
    "attention-kv-copies", "attention", "layers.1.attention.fc_v.",
    lambda plan, config: 1 < config.kv_heads < plan.tp,
)(_copies_not_summed(of_all=False))  # fmt: skip


@planted("dropout-by-rank", "dropout", "the input of layers.0.", _any_tp)
def _mask_by_rank(laid: Laid) -> None:
    right = laid.loss

    def loss(tokens_BT: Tensor, targets_BT: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        options["dropout_seed"] += laid.mesh.comm.rank
        return right(tokens_BT, targets_BT, **options)

    laid.loss = loss  # type: ignore[method-assign]


@planted("dropout-local-row", "dropout", "the input of layers.0.", _any_dp)
def _mask_by_local_row(laid: Laid) -> None:
    right = laid.loss
    laid.loss = lambda *batch, **options: right(*batch, **(options | {"place": ORIGIN}))  # type: ignore[method-assign]


@planted("bucket-left-out", "gradients", _BACKWARD, _any_dp)
def _bucket_left_out(laid: Laid) -> None:
    gradients = laid.gradients
    assert isinstance(gradients, Bucketed)
    exchange, second = gradients.exchange, gradients.buckets[1]
    gradients.exchange = lambda bucket: None if bucket is second else exchange(bucket)  # type: ignore[method-assign]


@planted("mean-of-means", "gradients", "loss", _any_dp)
def _mean_of_means(laid: Laid) -> None:
    right = laid.gradients.backward

    def backward(loss_sum: Tensor, count: Tensor, **options: Any) -> None:
        right(loss_sum / count, 1, **options)

    laid.gradients.backward = backward  # type: ignore[assignment, method-assign]


@planted("last-microbatch", "gradients", _BACKWARD, lambda plan, config: plan.accumulation > 1)
def _last_microbatch_only(laid: Laid) -> None:
    gradients = laid.gradients
    assert isinstance(gradients, Bucketed)
    right = gradients.backward

    def backward(loss_sum: Tensor, count: Tensor, **options: Any) -> None:
        gradients._open()
        right(loss_sum, count, **options)

    gradients.backward = backward  # type: ignore[assignment, method-assign]


@planted("stage-tied-not-summed", "pipeline", "parameter token_embedding.weight", _has_tied_stages)
def _tied_not_summed(laid: Pipeline) -> None:
    for bucket in laid.buckets.buckets:
        bucket.holders = bucket.holders[:1]


@planted("stage-tied-counted-twice", "pipeline", "their norm differs", _has_tied_stages)
def _tied_counted_twice(laid: Pipeline) -> None:
    for bucket in laid.buckets.buckets:
        bucket.copies //= max(1, len(bucket.holders))


@planted("stage-microbatches-swapped", "pipeline", _FORWARD, lambda plan, config: plan.schedule == "zb-h1")
def _microbatches_swapped(laid: Pipeline) -> None:
    right, has_head = laid.passes, laid.has_head

    def passes(pieces: Sequence[StepPiece], **options: Any) -> None:
        first, second, *others = pieces
        right([second, first, *others] if has_head else pieces, **options)

    laid.passes = passes  # type: ignore[method-assign]


@planted("stage-scaled-by-microbatches", "pipeline", _BACKWARD, lambda plan, config: plan.schedule == "zb-v")
def _scaled_by_microbatches(laid: Pipeline) -> None:
    right, count = laid.buckets.begin, laid.step.program.microbatches

    def begin(scale: float) -> None:
        right(scale)
        laid.data.scale = scale * count

    laid.buckets.begin = begin  # type: ignore[method-assign]
    laid.data.count = lambda total, counted: laid.buckets.count(total, counted, 1.0)


@planted("stage-not-reduced", "pipeline", _BACKWARD, _any_dp)
def _chunk_not_reduced(laid: Pipeline) -> None:
    buckets = laid.buckets
    exchange = buckets.exchange
    buckets.exchange = lambda bucket: None if bucket.chunk == 1 else exchange(bucket)  # type: ignore[method-assign]


@planted("stage-steps-early", "pipeline", _FORWARD, lambda plan, config: plan.schedule == "1f1b" and plan.pp == 2)
def _stepped_too_early(laid: Pipeline) -> None:
    """The second stage takes its step after the first microbatch: later ones meet the weights of the next step."""
    right = laid.passers[1].forward if 1 in laid.passers else None

    def forward(microbatch: int, piece: int, x: Tensor | None, *, keeps: bool) -> Tensor | None:
        assert right is not None
        if microbatch:
            for parameter in laid.parts[1].module.parameters():
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=1e-3)
        return right(microbatch, piece, x, keeps=keeps)

    if right is not None:
        laid.passers[1].forward = forward  # type: ignore[method-assign]


@planted("zero-norm-twice", "zero", "their norm differs", lambda plan, config: True)
def _rows_counted_twice(laid: Laid) -> None:
    assert isinstance(laid.gradients, Zero)
    kept = laid.gradients.kept
    laid.gradients.kept = lambda bucket: (kept(bucket)[0], kept(bucket)[1] / 2)  # type: ignore[method-assign,assignment,return-value]


@planted("zero-groups-not-summed", "zero", _BACKWARD, lambda plan, config: plan.zero_group > 0)
def _groups_not_summed(laid: Laid) -> None:
    assert isinstance(laid.gradients, Zero)
    laid.gradients.across = ()


@planted("zero-rows-not-gathered", "zero", "in later steps", lambda plan, config: plan.zero < 3)
def _rows_not_gathered(laid: Laid) -> None:
    laid.gradients.updated = lambda: None  # type: ignore[method-assign]


@planted("zero-other-partition", "zero", "in later steps", lambda plan, config: plan.zero < 3 and plan.dp > 1)
def _rows_of_another(laid: Laid) -> None:
    """Of one parameter a rank steps the rows that its neighbour has, by its own gradient and states."""
    gradients = laid.gradients
    assert isinstance(gradients, Zero)
    for bucket in gradients.buckets:
        for place, shards in enumerate(zip(*bucket.rows.everyone, strict=True)):
            if len(shards) > 1 and len({mine.shape for mine in shards}) == 1:
                own = shards[bucket.rows.index]
                _, begin, size = bucket.rows.places[place][(bucket.rows.index + 1) % len(shards)]
                rows = bucket.parameters[place].detach().view(-1)[begin : begin + size].view(own.shape)
                gradients.stepped = {**gradients.stepped, own.name: Held(nn.Parameter(rows), own)}
                return


@planted("zero-microbatch-left-out", "zero", _BACKWARD, lambda plan, config: plan.zero > 1 and plan.accumulation > 1)
def _microbatch_left_out(laid: Laid) -> None:
    assert isinstance(laid.gradients, Zero)
    arrive = laid.gradients._arrive

    def forgets(bucket: ZeroBucket) -> None:
        if bucket.landing is not None:
            bucket.handle.wait()
            bucket.landing.zero_()
        arrive(bucket)

    laid.gradients._arrive = forgets  # type: ignore[method-assign]


@planted("zero-early-free", "zero", "an early FREE", lambda plan, config: plan.zero == 3)
def _freed_early(laid: Pipeline) -> None:
    """The FREE of the last layer comes before the pass that it was to come after."""
    actions = laid.runner.actions
    last = laid.step.program.chunks - 1
    place = next(n for n, (action, _) in enumerate(actions) if action.kind == "FREE" and action.chunk == last)
    used = max(n for n, (action, _) in enumerate(actions[:place]) if action.kind in ("F", "B") and action.chunk == last)
    actions.insert(used, actions.pop(place))


def _by_ring(plan: ParallelPlan, config: ModelConfig) -> bool:
    return plan.cp > 1 and plan.cp_exchange == "ring"


def _with_cache(change: Callable[[Any], None]) -> Callable[[Laid], None]:
    """`change`: of what a pass knows of a rank's tokens, after it was made."""

    def put(laid: Laid) -> None:
        axis, right = laid.seams.context, laid.model.prepare

        def prepare(tokens_BT: Tensor, *, cache: Any, **options: Any) -> Any:
            assert axis is not None
            change(cache)
            return right(tokens_BT, cache=cache, **options)

        laid.model.prepare = prepare  # type: ignore[assignment, method-assign]

    return put


def _counted_from_the_rank(cache: ContextCache) -> None:
    cache.positions_BT = torch.arange(cache.positions_BT.shape[1]).expand_as(cache.positions_BT)


def _counted_from_the_sequence(cache: ContextCache) -> None:
    places = torch.arange(cache.capacity).expand(len(cache.positions_BT), -1)
    cache.positions_BT = cache.axis.own(places)


PLANTS["context-positions-per-rank"] = Plant(
    "context-positions-per-rank", "context", _FORWARD,
    lambda case: _by_ring(case.layout, case.config) and case.layout.pp * case.layout.zero <= 1,
    _with_cache(_counted_from_the_rank),
)  # fmt: skip
PLANTS["context-packed-positions"] = Plant(
    "context-packed-positions", "context", _FORWARD,
    lambda case: _by_ring(case.layout, case.config) and case.packed and case.layout.pp == 1,
    _with_cache(_counted_from_the_sequence),
)  # fmt: skip


@planted("context-dropout-local-token", "context", "the input of layers.0.", _by_ring)
def _mask_by_local_token(laid: Laid) -> None:
    """The second run of a rank's tokens has the masks of those that follow its first."""
    axis = laid.seams.context
    assert axis is not None
    axis.placed = lambda place, tokens, device: place  # type: ignore[method-assign]


@planted("context-gradients-stay", "context", _BACKWARD, _by_ring)
def _gradients_stay(laid: Laid) -> None:
    """What a rank adds to the gradients of another's keys and values never gets there."""
    axis = laid.seams.context
    assert axis is not None
    right = axis.go_round

    def go_round(q: Tensor, k: Tensor, v: Tensor, runs: AttendedRuns, *options: Any) -> Tensor:
        y_BTHE = right(q, k.detach(), v.detach(), runs, *options)
        here = dataclasses.replace(axis, comm=laid.mesh.axis("none").comm)
        alone = dataclasses.replace(runs, queries=(runs.queries[axis.comm.rank],), keys=(runs.keys[axis.comm.rank],))
        own = type(axis).go_round(here, q.detach(), k, v, alone, *options)
        return y_BTHE + own - own.detach()

    axis.go_round = go_round  # type: ignore[assignment, method-assign]


def _loss_times(factor: Callable[[int], float]) -> Callable[[Laid], None]:
    def put(laid: Laid) -> None:
        right, times = laid.gradients.backward, factor(laid.mesh.cp.size)

        def backward(loss_sum: Tensor, count: Tensor, **options: Any) -> None:
            right(loss_sum * times + (loss_sum - loss_sum * times).detach(), count, **options)

        laid.gradients.backward = backward  # type: ignore[assignment, method-assign]

    return put


planted("context-loss-divided", "context", _BACKWARD, _by_ring)(_loss_times(lambda ranks: 1 / ranks))
planted("context-loss-scaled", "context", _BACKWARD, _by_ring)(_loss_times(float))


@planted("context-mean-of-ranks", "context", "loss", _by_ring)
def _mean_of_ranks(laid: Laid) -> None:
    _mean_of_means(laid)


def _is_balanced(plan: ParallelPlan, config: ModelConfig) -> bool:
    return plan.cp > 1 and config.balance_loss > 0


def _routers(laid: Laid) -> list[Router]:
    return [module for module in laid.module.modules() if isinstance(module, Router)]


@planted("context-second-loss-divided", "context", "the loss differs", _is_balanced)
def _second_loss_divided(laid: Laid) -> None:
    divide_router_losses(laid, "cp")


@planted("context-balance-per-rank", "context", "the loss differs", _is_balanced)
def _balanced_by_rank(laid: Laid) -> None:
    """Each rank balances its own tokens: the loss of a sequence changes with cp."""
    for router in _routers(laid):
        router.over_sequences = None


@planted(
    "context-capacity-per-rank",
    "context",
    "forward differs first at layer",
    lambda plan, config: config.expert_capacity > 0,
)
def _taken_by_rank(laid: Laid) -> None:
    """Experts count each rank's own tokens: what they take of a sequence changes with cp."""
    for module in laid.module.modules():
        if isinstance(module, Experts):
            module.ordered_counts = None
