"""Settings of a training configuration that do not go together: one table, read by training and the documents.

A row is mostly two parts of a run that are both on, why they cannot be, and which of them to switch off. It looks at
the configuration alone, so it is refused before anything is touched. What needs the machine or a file (memory, a GPU, a
teacher's folder) and what a model's shapes allow is in `check.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tilemesh.compress.config import training_recipe
from tilemesh.core.conflicts import OR, PLAN_CONFLICTS, Conflict, row
from tilemesh.model.adapter import adapted_modules
from tilemesh.model.work.slices import slice_lengths
from tilemesh.model.work.weights import SLICED, embedding_weights, head_weights, layer_weights
from tilemesh.train.config import TrainConfig

Row = Conflict[TrainConfig]


# ---- what a run may have -----------------------------------------------------------------------------------------


class Switch(NamedTuple):
    """Something that a run may have."""

    setting: str
    is_on: Callable[[TrainConfig], bool]
    off: str
    """What switches it off, as `--set` takes it."""


_TP = Switch("plan.tp", lambda config: config.plan.tp > 1, "plan.tp=1")
_PP = Switch("plan.pp", lambda config: config.plan.pp > 1, "plan.pp=1")
_CP = Switch("plan.cp", lambda config: config.plan.cp > 1, "plan.cp=1")
_DP = Switch("plan.dp", lambda config: config.plan.dp > 1, "plan.dp=1")
_ONE_REPLICA = Switch("plan.dp", lambda config: config.plan.dp == 1, "plan.dp=2")
_VERSIONS = Switch("plan.schedule", lambda config: config.plan.is_asynchronous, "plan.schedule=1f1b")
_ZERO = Switch("plan.zero", lambda config: config.plan.zero > 0, "plan.zero=0")
_OFFLOAD = Switch("plan.offload", lambda config: bool(config.plan.offloads), "plan.offload=")
_MOVED_STATES = Switch("plan.offload", lambda config: "optimizer" in config.plan.offloads, "plan.offload=")
_FP16 = Switch("plan.precision", lambda config: config.plan.precision == "fp16", "plan.precision=fp32")
_FP8 = Switch("plan.precision", lambda config: config.plan.precision == "fp8", "plan.precision=bf16-master")
_COMPILE = Switch("train.compile", lambda config: bool(config.train.compile), "train.compile=false")
_GRAPH = Switch("train.graph", lambda config: bool(config.train.graph), "train.graph=false")
_ON_CPU = Switch("train.device", lambda config: config.train.device == "cpu", "train.device=cuda")
_ON_GPU = Switch("train.device", lambda config: config.train.device == "cuda", "train.device=cpu")
_METHOD = Switch("train.method", lambda config: config.train.method != "synchronous", "train.method=synchronous")
_SERVER = Switch("train.method", lambda config: config.train.method == "server", "train.method=synchronous")
_LOCAL = Switch("train.method", lambda config: config.train.method == "local", "train.method=synchronous")
_COMPRESSED = Switch("method.compress", lambda config: config.method.compress != "none", "method.compress=none")
_UNFUSED = Switch("optimizer.name", lambda config: config.optimizer.name in ("lion", "muon"), "optimizer.name=adamw")
_NOT_FUSED = Switch("optimizer.fused", lambda config: config.optimizer.fused is False, "optimizer.fused=true")
_CLIP = Switch("optimizer.clip", lambda config: config.optimizer.clip > 0, "optimizer.clip=0")
_EXPERTS = Switch("model.experts", lambda config: config.model.experts > 0, "model.experts=0")
_BALANCED = Switch("model.router_bias", lambda config: config.model.router_bias is True, "model.router_bias=false")
_EXPERTS_APART = Switch(
    "model.experts",
    lambda config: config.model.experts > 0 and (config.model.has_biases("mlp") or config.lora.rank > 0),
    "model.experts=0",
)
_EP = Switch("plan.ep", lambda config: config.plan.ep > 1, "plan.ep=1")
_TIED = Switch("model.tied", lambda config: config.model.tied, "model.tied=false")
_LORA = Switch("lora.rank", lambda config: config.lora.rank > 0, "lora.rank=0")
_RECIPE = Switch("compress.recipe", lambda config: bool(config.compress.recipe), "compress.recipe=")
_TEACHER = Switch("distill.teacher", lambda config: config.distill.teacher is not None, "distill.teacher=none")
_PACKED = Switch("data.packing", lambda config: config.data.packing != "stream", "data.packing=stream")
_CHAT = Switch("data.chat", lambda config: config.data.chat, "data.chat=false")
_PATIENCE = Switch("evaluate.patience", lambda config: config.evaluate.patience > 0, "evaluate.patience=0")
_KEEP_BEST = Switch("checkpoint.keep_best", lambda config: config.checkpoint.keep_best, "checkpoint.keep_best=false")
_NEVER_EVALUATED = Switch("evaluate.every", lambda config: not config.evaluate.every, "evaluate.every=50")
_NO_SEQUENCES = Switch("evaluate.sequences", lambda config: not config.evaluate.sequences, "evaluate.sequences=32")
_NONE_HELD_OUT = Switch("data.held_out", lambda config: not config.data.held_out, "data.held_out=0.02")


def _pair(one: Switch, other: Switch, why: str, *ends: Switch) -> Row:
    """Two parts that cannot both be on. `ends`: which of them to switch off; the other, where none is named."""
    instead = OR.join(part.off for part in ends or (other,))
    return row(f"{one.setting} {other.setting}", lambda config: one.is_on(config) and other.is_on(config), why, instead)


def _prunes_anywhere(config: TrainConfig) -> bool:
    recipe = training_recipe(config.compress.recipe)
    return recipe is not None and recipe.prune.structure == "unstructured"


def _heads_apart(config: TrainConfig) -> int:
    """Over how many ranks keys and values can be cut so that no two share any; latents are shared by all."""
    return 1 if config.model.latent_width else config.model.kv_heads


def _tensors(config: TrainConfig) -> int:
    """How many weights and biases are trained."""
    if config.lora.rank:
        return 2 * len(adapted_modules(config.model, config.lora))
    model = config.model
    once = [*embedding_weights(model), *head_weights(model)]
    layers = [weight for layer in range(model.layers) for weight in layer_weights(model.of_layer(layer))]
    return sum(1 + weight.bias for weight in [*once, *layers])


def _between_averages(key: str, steps: Callable[[TrainConfig], int]) -> Row:
    """Something that local updates do every so many steps, and not where replicas have common weights."""
    return row(
        f"{key} method.period",
        lambda config: _LOCAL.is_on(config) and steps(config) % config.method.period > 0,
        "replicas of train.method local have common weights at multiples of the period",
        lambda config: f"{key}={-(-steps(config) // config.method.period) * config.method.period}",
    )


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is not above `most`, in about sqrt(number) steps."""
    if most >= number:
        return number
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return max(size for half in small for size in (half, number // half) if size <= most)


def _dividing(key: str) -> Row:
    """A part of the cut that does not divide a replica's sequences."""

    def rows(config: TrainConfig) -> int:
        return config.batch // config.plan.dp

    def size(config: TrainConfig) -> int:
        value: int = getattr(config.plan, key)
        return value

    return row(
        f"plan.{key} train.batch plan.dp",
        lambda config: rows(config) % size(config) > 0,
        lambda config: f"it must divide the {rows(config)} sequences that a replica has in a step",
        lambda config: f"plan.{key}={largest_divisor(rows(config), size(config))}",
    )


def _slices(config: TrainConfig) -> Sequence[int]:
    """Tokens of each slice of a sequence; of one that is not cut, more than any number of ranks."""
    plan = config.plan
    if plan.slices == 1 or plan.slices > config.context or plan.pp == 1:
        return (config.context + plan.cp,)
    return slice_lengths(config.model, plan.pp, plan.slices, config.context)


# ---- the rows --------------------------------------------------------------------------------------------------

_MERGED = "adapters are merged into weights in the end, and these would be trained beside rounded or masked ones"

_ALONE = "a graph is for one GPU alone"
_TARGETS = "how many targets count differs by step, and a graph's steps are alike"
_LOADS = "how many tokens an expert takes differs by step"
_REPLAY = (
    (_DP, _ALONE), (_TP, _ALONE), (_PP, _ALONE), (_CP, _ALONE), (_ON_CPU, _ALONE),
    (_FP16, "a scaled loss decides after each step whether it counts"),
    (_NOT_FUSED, "a graph needs a fused optimiser, which reads the learning rate on the device"),
    (_UNFUSED, "a graph needs a fused optimiser, which torch has for adamw and sgd"),
    (_PACKED, _TARGETS), (_CHAT, _TARGETS),
    (_OFFLOAD, "what goes and comes has no fixed place"), (_EXPERTS_APART, _LOADS),
    (_RECIPE, "rounding and masks change with the step"),
    (_TEACHER, "a teacher's pass is not captured"),
)  # fmt: skip
"""What keeps steps from becoming a CUDA graph, and why."""

OF_PLAN: tuple[Row, ...] = tuple(conflict.under("plan") for conflict in PLAN_CONFLICTS)
"""Of the plan alone, whatever the model."""
OF_CONFIG: tuple[Row, ...] = (
    row(
        "train.context model.context",
        lambda config: not 1 <= config.context <= config.model.context,
        "a sequence has between 1 and model.context tokens",
        lambda config: f"train.context={config.model.context}",
    ),
    row(
        "plan.slices train.context",
        lambda config: config.plan.slices > config.context,
        "a slice has at least one token",
        lambda config: f"plan.slices={config.context}",
    ),
    row(
        "plan.cp train.context",
        lambda config: config.plan.cp > config.context,
        "each of the ranks that share a sequence has at least one token of it",
        lambda config: f"plan.cp={config.context}",
    ),
    row(
        "plan.slices plan.cp train.context",
        lambda config: config.plan.cp > min(_slices(config)),
        lambda config: (
            f"a slice is as short as {min(_slices(config))} token{'s' * (min(_slices(config)) > 1)}, and each of the "
            "ranks that share it has at least one"
        ),
        "plan.cp=1",
    ),
    # Held-out text.
    *(
        _pair(waits, missing, "there is no held-out loss to go by")
        for waits in (_PATIENCE, _KEEP_BEST)
        for missing in (_NEVER_EVALUATED, _NO_SEQUENCES, _NONE_HELD_OUT)
    ),
    *(
        row(
            f"model.{name} plan.slices",
            lambda config, name=name: getattr(config.model, name) > 0 and config.plan.slices > 1,  # type: ignore[misc]
            why,
            f"model.{name}=0 or plan.slices=1",
        )
        for name, why in SLICED.items()
    ),
    # Compiled code.
    *(
        row(
            f"train.compile plan.recompute {axis.setting}",
            lambda config, axis=axis: (  # type: ignore[misc]
                _COMPILE.is_on(config) and config.plan.recompute == "operators" and axis.is_on(config)
            ),
            "rings and experts cut a layer's graph, and a compiler chooses what it keeps within one graph",
            "train.compile=false or plan.recompute=full",
        )
        for axis in (_CP, _EXPERTS)
    ),
    # Pipelines that update weights while microbatches are under way.
    _pair(_VERSIONS, _CLIP, "no rank knows the norm of the whole gradient at an update"),
    _pair(_VERSIONS, _TIED, "gradients of a tied table come to its two stages at different times"),
    _pair(_VERSIONS, _FP16, "nobody waits to see whether a gradient overflows"),
    _pair(_VERSIONS, _COMPRESSED, "its gradients are exchanged update by update"),
    _pair(_VERSIONS, _METHOD, "its stages are updated at different moments, so replicas have no weights in common"),
    # How replicas keep together.
    _pair(_METHOD, _COMPRESSED, "what is compressed is a sum over all replicas, and a step of a method makes none"),
    _pair(_BALANCED, _COMPRESSED, "gradients of a bias are 2^-60 of a pick, which a scale for many gradients makes 0"),
    _pair(_SERVER, _ON_GPU, "weights are sent from the host's memory"),
    _pair(_SERVER, _ZERO, "servers keep the optimizer's states, and replicas have none to share"),
    _pair(_SERVER, _MOVED_STATES, "servers keep the optimizer's states, and no worker has any to move"),
    _pair(_LOCAL, _ZERO, "replicas step by themselves, and ZeRO has each step a part for all of them"),
    *(
        _pair(_EP, way, "each replica steps the experts that it holds, and no other has all of a model's weights")
        for way in (_METHOD, _COMPRESSED)
    ),
    *(_pair(way, _ONE_REPLICA, "there is one replica and nothing to exchange") for way in (_LOCAL, _COMPRESSED)),
    row(
        "method.servers",
        lambda config: config.servers > _tensors(config),
        lambda config: f"{_tensors(config)} weights and biases are trained, which stay whole",
        lambda config: f"method.servers={_tensors(config)}",
    ),
    _between_averages("checkpoint.every", lambda config: config.checkpoint.every),
    _between_averages("evaluate.every", lambda config: config.evaluate.every),
    _between_averages("method.start", lambda config: config.method.start),
    # Adapters and recipes.
    row(
        "lora.rank lora.base",
        lambda config: _LORA.is_on(config) and config.lora.base is None,
        "there are no weights to add adapters to, such as --init FOLDER names",
        f"lora.base=FOLDER{OR}{_LORA.off}",
    ),
    _pair(_RECIPE, _LORA, _MERGED),
    _pair(_RECIPE, _FP8, "what a recipe rounds or masks would be rounded once more, to the 8 bits that are multiplied"),
    _pair(_EXPERTS, _FP8, "experts are multiplied together, which is predicted in 8 bits and not run"),
    row(
        "plan.precision plan.tp model.kv_heads",
        lambda config: _FP8.is_on(config) and config.plan.tp > _heads_apart(config),
        "ranks that share keys and values, or the latent that these are made of, would each round their own part of a "
        "gradient to 8 bits, and one process rounds the sum",
        lambda config: f"plan.tp={math.gcd(config.plan.tp, _heads_apart(config))}{OR}{_FP8.off}",
    ),
    row(
        "compress.recipe plan.tp",
        lambda config: _TP.is_on(config) and _prunes_anywhere(config),
        "the smallest weights of a whole matrix go, and tp cuts it",
        "compress.recipe=2:4 or plan.tp=1",
    ),
    # Steps as one CUDA graph.
    *(_pair(_GRAPH, other, why, _GRAPH, other) for other, why in _REPLAY),
)  # fmt: skip
"""Of all settings, where the model takes the plan."""
UNEVEN_NUMBER, UNEVEN_SIZE = _dividing("accumulation"), _dividing("microbatch")
OTHER_BATCH: Row = row(
    "plan.microbatch plan.accumulation plan.dp train.batch",
    lambda config: config.plan.batch != config.batch,
    lambda config: f"the plan cuts {config.plan.batch} sequences",
    lambda config: f"train.batch={config.plan.batch}",
)
"""Of these three, asked for where the cut of the batch is said; where it is not, it follows from the batch."""
CONFLICTS: tuple[Row, ...] = (*OF_PLAN, *OF_CONFIG, UNEVEN_NUMBER, UNEVEN_SIZE, OTHER_BATCH)


def may_replay(config: TrainConfig) -> bool:
    """Whether steps may become a CUDA graph, given one GPU alone."""
    return config.train.graph is not False and not any(part.is_on(config) for part, _ in _REPLAY)
