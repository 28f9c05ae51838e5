"""Every matrix, table and norm of a Transformer, as a list: its shape, and how tensor parallelism splits it.

The one idea: a model's parameters are written down once, here. Their count, what one rank of tp holds of them, how a
model is cut (`parallel/apply.py`), which ranks can share it and which products a layer makes (`work.py`) all follow
from this list. No torch.

D width, Q width of all queries, K width of all keys, F hidden width of the MLP, V vocabulary, S context.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from tilemesh.core.plan import ContextExchange, Fp8Scales, ParallelPlan
from tilemesh.core.sequence import ranks_sharing_heads
from tilemesh.core.step.book import is_listed
from tilemesh.model.config import ModelConfig

WeightSplit = Literal["column", "row", "vocabulary", "whole"]
_VECTOR = "vector"
_ONE_DIM = ("norm", _VECTOR)
"""Words of what is no matrix."""


class Weight(NamedTuple):
    """One module that has parameters: a weight of `outputs` x `inputs` and, where it has one, a bias of `outputs`."""

    name: str
    """Of the module, as the model has it; in a layer without the layer's own name: "attention.fc_q"."""
    words: str
    """What the product with it is called."""
    outputs: int
    inputs: int
    split: WeightSplit
    """By its output, by its input (a bias is then added once, after the partial outputs were summed), by the rows of a
    table, unevenly where they do not divide, or not at all."""
    bias: bool
    units: int = 0
    """The output of a column split comes in so many pieces that stay whole: heads. 0: any piece will do."""
    repeats: bool = False
    """Fewer units than ranks are held by several of them."""
    expert: int = 0
    """Of several that share the tokens, which one it is of."""

    @property
    def is_routed(self) -> bool:
        """Whether it is one of several of which a token passes some."""
        return self.name.startswith("mlp.experts.")

    @property
    def block(self) -> str:
        """The region of a layer it lies in: "attention", "mlp"; "" outside of both."""
        return self.name.partition(".")[0] if "." in self.name else ""

    @property
    def parameters(self) -> int:
        return self.outputs * (self.inputs + self.bias)

    def shape(self, tp: int) -> tuple[int, int]:
        """Outputs and inputs on one of tp ranks; of an uneven split, those of the first."""
        if self.split == "column" and self.units:
            return max(1, self.units // tp) * (self.outputs // self.units), self.inputs
        if self.split == "column":
            return self.outputs // tp, self.inputs
        if self.split == "row":
            return self.outputs, self.inputs // tp
        return (-(-self.outputs // tp), self.inputs) if self.split == "vocabulary" else (self.outputs, self.inputs)

    # Of several replicas that share rows (ZeRO), each of these is what the first of them keeps.

    def held(self, tp: int, replicas: int = 1) -> int:
        """Parameters on one of tp ranks."""
        outputs, inputs = self.shape(tp)
        return -(-outputs // replicas) * (inputs + self.bias)

    def replicated(self, replicas: int = 1) -> int:
        """Parameters that every rank of tp has, whole."""
        rows = -(-self.outputs // replicas)
        if self.split == "whole":
            return rows * (self.inputs + self.bias)
        return rows * self.bias if self.split == "row" else 0

    def repeated(self, tp: int, replicas: int = 1) -> int:
        """Of one rank's parameters, those that some other ranks of tp hold too, each using them for other queries."""
        return self.held(tp, replicas) if self.repeats and self.units < tp else 0


@functools.lru_cache(maxsize=64)  # a search asks for those of hundreds of experts again and again
def layer_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """Of one layer, in the order in which they are used; of one with experts, where others have none (`of_layer`)."""
    D, Q = model.width, model.query_width
    qkv, output = model.has_biases("qkv"), model.has_biases("output")
    is_sandwich = model.norm_place == "sandwich"
    return (
        _norm(model, "attention_norm"),
        *(_latent("query_latent", "query latent", model.query_latent_width, D) if model.query_latent_width else ()),
        Weight("attention.fc_q", "q", Q, model.query_latent_width or D, "column", qkv, units=model.heads),
        *_keys_and_values(model),
        Weight("attention.fc_o", "output projection", D, model.heads * model.value_head_width, "row", output),
        *_head_norms(model),
        *((Weight("attention.sinks", _VECTOR, model.heads, 1, "column", False, units=model.heads),) * model.score_sink),
        *((_norm(model, "attention_out_norm"),) if is_sandwich else ()),
        _norm(model, "mlp_norm"),
        *_mlp(model),
        *((_norm(model, "mlp_out_norm"),) if is_sandwich else ()),
    )


def _latent(name: str, words: str, width: int, inputs: int, beside: int = 0) -> tuple[Weight, ...]:
    """One that is normalized, and what is made beside it; every rank of tp has it whole, as one head of several."""
    made = Weight(f"attention.fc_{name}", words, width + beside, inputs, "column", False, units=1, repeats=True)
    return made, Weight(f"attention.{name}_norm", "norm", width, 1, "whole", False)


def _keys_and_values(model: ModelConfig) -> tuple[Weight, ...]:
    """Of the stream, or of a latent, which queries of several ranks share."""
    inputs, keys, latent = model.width, model.kv_width, model.latent_width
    before: tuple[Weight, ...] = ()
    if latent:
        before = _latent("latent", "latent", latent, inputs, model.rotary_width)
        inputs, keys = latent, model.kv_heads * model.plain_width
    bias, heads = model.has_biases("qkv"), model.kv_heads
    return (
        *before,
        Weight("attention.fc_k", "k", keys, inputs, "column", bias, units=heads, repeats=True),
        Weight(
            "attention.fc_v", "v", heads * model.value_head_width, inputs, "column", bias, units=heads, repeats=True
        ),
    )


def _mlp(model: ModelConfig) -> tuple[Weight, ...]:
    """One MLP, or a router and as many as there are experts."""
    if not model.experts:
        return _one_mlp(model, "mlp.")
    experts = [weight for index in range(model.experts) for weight in _one_mlp(model, f"mlp.experts.{index}.", index)]
    shared = _one_mlp(model, "mlp.shared.", width=model.shared_width) if model.shared_width else ()
    gate = (Weight("mlp.shared_gate", "gate of the shared expert", 1, model.width, "whole", False),)
    router = Weight("mlp.router", "router", model.experts, model.width, "whole", model.router_bias is True)
    shift = (Weight("mlp.router.shift", _VECTOR, model.experts, 1, "whole", False),) * (model.router_bias == "scores")
    return router, *shift, *experts, *shared, *(gate if model.shared_gate else ())


def _one_mlp(model: ModelConfig, prefix: str, expert: int = 0, width: int = 0) -> tuple[Weight, ...]:
    D, F, biases = model.width, width or model.mlp_width, model.has_biases("mlp")
    gate = (Weight(f"{prefix}fc_gate", "MLP gate", F, D, "column", biases, expert=expert),)
    return (
        Weight(f"{prefix}fc_in", "MLP in", F, D, "column", biases, expert=expert),
        *(gate if model.mlp_inputs == 2 else ()),
        Weight(f"{prefix}fc_out", "MLP out", D, F, "row", biases, expert=expert),
    )


@functools.lru_cache(maxsize=64)
def layer_matrices(model: ModelConfig) -> tuple[Weight, ...]:
    """Of these, what ranks of tp share: all but norms and routers."""
    return tuple(weight for weight in layer_weights(model) if weight.split != "whole" and weight.words not in _ONE_DIM)


def active_matrices(model: ModelConfig) -> tuple[Weight, ...]:
    """Of these, what a token passes: as many experts as pick it, whichever they are."""
    return tuple(weight for weight in layer_matrices(model) if weight.expert < max(1, model.experts_per_token))


LEAST_FP8_WIDTH: Mapping[Fp8Scales, int] = {"tensor": 600, "row": 900, "block": 900}


def is_wide_for_fp8(outputs: int, inputs: int, scales: Fp8Scales = "tensor") -> bool:
    """Whether products in 8 bits save more than the casts of what they take and give cost: the first grows with
    outputs x inputs, the second with their sum. MEASURED on an H200 with 16,384 tokens (docs/kernels/LOG.md)."""
    return outputs * inputs >= LEAST_FP8_WIDTH[scales] * (outputs + inputs)


FP8_BLOCK = 128  # columns of a token, and rows and columns of weights, that share a scale


def _uneven_blocks(model: ModelConfig, tp: int) -> str:
    """A matrix that tp cuts within a block."""
    for weight in layer_matrices(model):
        whole = (weight.outputs, weight.inputs)
        sides = [side for side, all_of in zip(weight.shape(tp), whole, strict=True) if side != all_of]
        if is_wide_for_fp8(*whole, "block") and any(side % FP8_BLOCK for side in sides):
            return weight.words
    return ""


def touched_experts(model: ModelConfig, tokens: int) -> float:
    """Experts that some of so many tokens pass, where each picks any of them alike: their expected number."""
    return model.experts * (1 - (1 - model.experts_per_token / model.experts) ** tokens) if model.experts else 0.0


def _head_norms(model: ModelConfig) -> tuple[Weight, ...]:
    """Of queries and keys: over each head, or over all heads together."""
    if model.qk_norm == "none":
        return ()
    if model.qk_norm == "full":  # cut as what they follow is
        return (
            Weight("attention.q_norm", "norm", model.query_width, 1, "column", False, units=model.heads),
            Weight("attention.k_norm", "norm", model.kv_width, 1, "column", False, units=model.kv_heads, repeats=True),
        )
    names = ("attention.q_norm", "attention.k_norm")
    return tuple(Weight(name, "norm", model.head_width, 1, "whole", False) for name in names)


def embedding_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """Of what comes before the first layer."""
    tokens = Weight("token_embedding", "token embedding", model.vocabulary, model.width, "vocabulary", False)
    if model.positions != "learned":
        return (tokens,)
    return tokens, Weight("position_embedding", "position embedding", model.context, model.width, "whole", False)


def head_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """Of what comes after the last layer. A tied output projection is the token embedding: one tensor, named there."""
    # Post-norm ends every layer with a norm, so nothing is left to do after the last.
    norm = (_norm(model, "final_norm"),) if model.norm_place != "post" else ()
    return norm if model.tied else (*norm, output_weight(model))


def output_weight(model: ModelConfig) -> Weight:
    """What the logits are made with: a matrix of its own, or the token embedding again."""
    return Weight("output", "logits", model.vocabulary, model.width, "vocabulary", False)


def _norm(model: ModelConfig, name: str) -> Weight:
    return Weight(name, "norm", model.width, 1, "whole", model.norm == "layernorm")


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of all parameters by their full names, in the order of computation."""
    layers = (
        (f"layers.{index}.", weight) for index in range(model.layers) for weight in layer_weights(model.of_layer(index))
    )
    before, after = ((("", weight) for weight in ends(model)) for ends in (embedding_weights, head_weights))
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, weight in (*before, *layers, *after):
        name, is_norm = f"{prefix}{weight.name}", weight.words == "norm"
        shape = (weight.outputs,) if weight.words in _ONE_DIM else (weight.outputs, weight.inputs)
        shapes[f"{name}.{'offset' if is_norm and model.norm_offset else 'weight'}"] = shape
        if weight.bias:
            shapes[f"{name}.bias"] = (weight.outputs,)
    return shapes


# ---- counted ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """How many parameters each part has; `total` counts a tied output projection once."""

    token_embedding: int
    position_embedding: int
    attention: int
    """In one layer."""
    mlp: int
    """In one layer."""
    norms: int
    """In one layer."""
    layers: int
    final_norm: int
    output: int
    """The output projection; 0 where it is tied to the embedding."""
    apart: int = 0
    """What layers without experts have more (or less) than this, together."""

    @property
    def layer(self) -> int:
        return self.attention + self.mlp + self.norms

    @property
    def total(self) -> int:
        outside = self.token_embedding + self.position_embedding + self.final_norm + self.output
        return self.layers * self.layer + self.apart + outside


def count_parameters(model: ModelConfig) -> Parameters:
    """Exact counts by part, of the model as Hugging Face's GPT-2 and Llama have it."""
    outside = {weight.name: weight.parameters for weight in (*embedding_weights(model), *head_weights(model))}
    blocks = {"attention": 0, "mlp": 0, "": 0}
    for weight in layer_weights(model):
        blocks[weight.block] += weight.parameters
    return Parameters(
        token_embedding=outside["token_embedding"],
        position_embedding=outside.get("position_embedding", 0),
        attention=blocks["attention"],
        mlp=blocks["mlp"],
        norms=blocks[""],
        layers=model.layers,
        final_norm=outside.get("final_norm", 0),
        output=outside.get("output", 0),
        apart=model.dense_of((model.layers,))[0]
        * (sum(weight.parameters for weight in layer_weights(model.kinds[-1])) - sum(blocks.values())),
    )


class RankParameters(NamedTuple):
    """Parameters that a rank holds: those of all replicas alike, and its experts, where replicas share these out."""

    common: int
    experts: int = 0

    @property
    def total(self) -> int:
        return self.common + self.experts

    def stored(self, plan: ParallelPlan) -> int:
        """What ZeRO leaves a rank of them."""
        return -(-self.common // plan.zero_ranks) + -(-self.experts // plan.expert_zero_ranks)


class Shards(NamedTuple):
    """Parameters on one of tp ranks, by part of the model."""

    layer: int
    embeddings: int
    """Token and position tables."""
    head: int
    """Final norm and output projection; the projection of a tied model is in `embeddings`."""
    tied_head: int
    """What a last stage apart from the first holds of a tied output projection."""
    experts: int
    """Of `layer`, those of experts, some of which each of several replicas holds."""
    dense_layer: int
    """Of a layer without experts, where others have some."""

    def held(self, layers: int, first: bool, last: bool, dense: int = 0) -> RankParameters:
        """The same as `stage`, experts apart."""
        experts = (layers - dense) * self.experts
        return RankParameters(self.stage(layers, first, last, dense) - experts, experts)

    def stage(self, layers: int, first: bool, last: bool, dense: int = 0) -> int:
        """Parameters of a stage with so many layers, of which so many are dense: the first has the embeddings, the last
        the output; a tied one is on both where these are two."""
        tied = self.tied_head if last and not first else 0
        routed = (layers - dense) * self.layer
        return routed + dense * self.dense_layer + first * self.embeddings + last * self.head + tied


def shard_parameters(model: ModelConfig, tp: int, ep: int = 1, expert_tp: int = 0) -> Shards:
    """What one rank of tp holds of each part, where `ep` of them share out experts."""
    layer, before, after = layer_weights(model), embedding_weights(model), head_weights(model)
    mine = sum(weight.held(expert_tp or tp) for weight in layer if weight.is_routed) // ep
    return Shards(
        layer=sum(weight.held(tp) for weight in layer if not weight.is_routed) + mine,
        embeddings=sum(weight.held(tp) for weight in before),
        head=sum(weight.held(tp) for weight in after),
        tied_head=output_weight(model).held(tp) if model.tied else 0,
        experts=mine if ep > 1 else 0,
        dense_layer=sum(weight.held(tp) for weight in layer_weights(model.kinds[-1])) if model.dense_layers else 0,
    )


# ---- what cannot be --------------------------------------------------------------------------------------------

SLICED = {
    "balance_loss": "how even a sequence is, is a product of two means over all its tokens, and slices of it pass one "
    "by one",
    "expert_capacity": "what an expert has taken of a sequence is counted in one pass, and slices of it pass one by "
    "one",
}
"""Settings of a model that do not go with slices of sequences, and why."""


def why_not_ep(model: ModelConfig, ep: int) -> str | None:
    """Why a model's experts cannot be shared out among so many ranks."""
    if not model.experts:
        return f"ep is {ep} and the model has no experts: set ep 1, or model.experts"
    if model.experts % ep == 0:
        return None
    fits = [count for count in range(2, model.experts + 1) if model.experts % count == 0]
    return f"ep is {ep} and {model.experts} experts do not divide by it: {', '.join(map(str, fits))} would do"


def why_not_tp(model: ModelConfig, tp: int) -> str | None:
    """Why tp ranks cannot share this model's layers; None when they can."""
    if model.heads % tp:
        return f"tp is {tp}: {model.heads} heads are not divisible by it"
    for width in (model.mlp_width, model.shared_width, model.dense_width):
        if width % tp:
            return f"tp is {tp}: the MLP's width {width} is not divisible by it"
    if model.kv_heads % tp and tp % model.kv_heads:
        return f"tp is {tp}: {model.kv_heads} kv_heads can neither be split nor repeated evenly over it"
    if model.vocabulary < tp:
        return f"tp is {tp}: a vocabulary of {model.vocabulary} gives some ranks no row of the table"
    return None


def why_not(model: ModelConfig, plan: ParallelPlan, ranks: int | None = None) -> str | None:
    """Why this layout cannot exist for this model, on so many ranks where that is said; None when it can.

    Neither memory nor what some code can run is looked at.
    """
    if ranks is not None and plan.world != ranks:
        return f"{plan.mesh_words} is {plan.world} ranks, the cluster has {ranks}"
    if plan.pp == 1 and plan.interleave > 1:
        return f"schedule is {plan.schedule_name} and pp is 1: one stage has nothing to interleave; use 1f1b"
    reason = plan.pipeline.why_not(plan.pp, plan.accumulation) if plan.pp > 1 else None
    if reason and is_listed(plan.schedule):  # its chunks are those of the stages that it was made for
        return f"schedule {reason}"
    if plan.chunks > model.layers:
        if plan.pp > 1 and is_listed(plan.schedule):
            return f"schedule is a list of {plan.chunks} chunks and needs as many layers, the model has {model.layers}"
        most = model.layers // (plan.chunks // plan.pp)
        at_most = f": pp {most} at most" if most else ""
        return f"{plan.chunks_words} needs as many layers, the model has {model.layers}{at_most}"
    if reason:
        return f"schedule {reason}"
    if plan.chunk_layers and sum(plan.chunk_layers) != model.layers:
        return f"chunk_layers add up to {sum(plan.chunk_layers)} layers, the model has {model.layers}"
    if plan.ep > 1 and (uneven := why_not_ep(model, plan.ep)):
        return uneven
    if plan.expert_tp and plan.tp % plan.expert_tp:
        return f"expert_tp is {plan.expert_tp}: tp {plan.tp} ranks do not make up groups of so many"
    if plan.ranks_per_expert < plan.tp and not plan.sequence_parallel:
        return f"expert_tp is {plan.expert_tp} and tp {plan.tp}: each rank routes its own tokens; set sequence_parallel"
    if plan.replicas * plan.tp // plan.ranks_per_expert % plan.ep:
        among = (
            f"dp {plan.dp}"
            + f" x cp {plan.cp}" * (plan.cp > 1)
            + f" x tp {plan.tp}" * (plan.ranks_per_expert < plan.tp)
        )
        near = " or ".join(_nearest_ep(model, plan))
        return f"ep is {plan.ep}: {among} do not make up groups of so many that share out experts; set the mesh {near}"
    reason = why_not_tp(model, plan.tp)
    if reason:
        return f"{reason}; {_nearest_tp(model, plan.tp)}"
    if plan.precision == "fp8" and plan.fp8_scales == "block" and (uneven := _uneven_blocks(model, plan.tp)):
        return f"tp is {plan.tp}: blocks of {FP8_BLOCK} of the {uneven} would lie on two ranks; use fp8_scales=row"
    if plan.cp > 1 and plan.cp_exchange == "heads" and model.kv_heads % (plan.tp * plan.cp):
        return (
            f"cp_exchange is heads and cp is {plan.cp}: a rank gets whole KV heads, and {model.kv_heads} kv_heads are "
            f"not divisible by tp {plan.tp} x cp {plan.cp}; set cp_exchange=ring, gather or heads-ring"
        )
    return None


def why_not_groups(model: ModelConfig, plan: ParallelPlan, groups: Mapping[str, int]) -> str | None:
    """Why ranks of tp cannot each have whole groups of the inputs that share a scale. `groups`: of so many inputs, by
    the names of the matrices that have some."""
    for layer, weight in ((i, weight) for i in range(model.layers) for weight in layer_weights(model.of_layer(i))):
        name, inputs = f"layers.{layer}.{weight.name}", weight.inputs // plan.tp
        is_cut = weight.split == "row" and not (plan.routes_apart and weight.is_routed)
        if is_cut and inputs % groups.get(name, 1):
            return (
                f"tp is {plan.tp}: {name}: groups of {groups[name]} do not divide the {inputs} inputs of a rank; use "
                f"groups of {inputs} or a divisor of it, or a scale per channel (int8), or set a smaller tp"
            )
    return None


def cp_exchanges(model: ModelConfig, tp: int, cp: int) -> list[ContextExchange]:
    """How ranks that share sequences can exchange, each way once: where all or none of them share out heads, heads and
    a ring together are one of these."""
    if cp == 1:
        return ["ring"]
    near = ranks_sharing_heads("heads-ring", cp, max(1, model.kv_heads // tp))
    possible = {"ring": True, "gather": True, "heads": near == cp, "heads-ring": 1 < near < cp}
    return [how for how in get_args(ContextExchange) if possible[how]]


def _nearest_ep(model: ModelConfig, plan: ParallelPlan) -> Iterator[str]:
    """The nearest meshes that share out experts: as many ranks and another ep, then more replicas and the same."""
    ranks = plan.replicas * plan.tp // plan.ranks_per_expert
    step = plan.ep // math.gcd(plan.ep, ranks // plan.dp)
    fits = [ep for ep in range(2, ranks + 1) if ranks % ep == 0 and model.experts % ep == 0]
    meshes = [(plan.dp, ep) for ep in sorted(fits, key=lambda ep: abs(ep - plan.ep))[:1]]
    for dp, ep in (*meshes, (-(-plan.dp // step) * step, plan.ep)):
        yield ",".join(f"{name}={size}" for name, size in {**plan.axes, "dp": dp, "ep": ep}.items() if size > 1)


def _nearest_tp(model: ModelConfig, tp: int) -> str:
    """What works instead of a tp that does not."""
    less = next(near for near in range(min(tp, model.heads), 0, -1) if why_not_tp(model, near) is None)
    more = next((near for near in range(tp + 1, model.heads + 1) if why_not_tp(model, near) is None), None)
    return f"the nearest that can are {less} and {more}" if more else f"the nearest that can is {less}"
