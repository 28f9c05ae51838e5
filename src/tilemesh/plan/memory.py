"""Bytes a rank needs, by what they are for: states (with ZeRO), activations tensor by tensor, and the rest.

Activations are those that a layer keeps for its backward pass. For a GPT with dropout, 16-bit values and materialised
attention they add up to s b h (10 + 24/t + 5 a s/(h t)) a layer, the formula of Korthikanti et al. 2022, and to its
sequence-parallel (34/t + 5 a s/(h t)) and selective (34/t) forms; other models keep other tensors, listed here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from tilemesh.core.hardware import DTYPE_BYTES, Device
from tilemesh.model.config import ModelConfig
from tilemesh.plan import constants
from tilemesh.plan.layout import PlanFields
from tilemesh.plan.passes import Code, logits_element_bytes
from tilemesh.plan.shards import Shards, kv_width_per_rank, vocabulary_per_rank

# Bytes a parameter by precision: weights, gradients, optimiser (Adam's two moments, and a master copy).
STATE_BYTES = {
    "fp32": (4, 4, 8),
    "bf16": (4, 4, 8),
    "fp16": (4, 4, 8),
    "bf16-master": (2, 2, 12),
    "fp64": (8, 8, 16),
}
AUTOCAST = ("bf16", "fp16")


class Kept(NamedTuple):
    """One tensor that a layer keeps: elements of the whole layer, what splits them, whether selective drops it."""

    name: str
    elements: int
    element_bytes: int
    split: str  # "tp", "kv", "sequence" or "whole"
    scores: bool = False


@dataclass(frozen=True)
class RankMemory:
    """Peak of one rank, in bytes."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """Kept by the layers in flight."""
    logits_bytes: int
    """Logits and what the loss keeps, on the last stage."""
    working_bytes: int
    """The layer being recomputed, weights gathered by ZeRO-3, 16-bit copies of autocast."""
    reserved_bytes: int
    """The device's context and the libraries' buffers."""
    later_bytes: int = 0
    """Of the gradients, what is not there yet at the fullest moment, the loss: taken off the sum."""

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.working_bytes
            + self.reserved_bytes
            - self.later_bytes
        )

    def seen_bytes(self, kind: str) -> int:
        """What a run can measure of it: on a GPU what torch allocates, which the context and the libraries are not; on
        a CPU all that the process grows by."""
        return self.total_bytes - (self.reserved_bytes if kind == "gpu" else 0)

    @property
    def dominant(self) -> str:
        """The name of the largest term, without its unit."""
        added = (field.name for field in fields(self) if field.name != "later_bytes")
        return max(added, key=lambda name: getattr(self, name)).removesuffix("_bytes")


# ---- states ----------------------------------------------------------------------------------------------------


def state_bytes(parameters: int, precision: str, zero: int = 0, dp: int = 1) -> tuple[int, int, int]:
    """Weights, gradients and optimiser of one rank that holds so many parameters; ZeRO shards over dp.

    With 2 + 2 + 12 bytes and M parameters: 16M, 4M + 12M/N, 2M + 14M/N, 16M/N (Rajbhandari et al. 2020).
    """
    weights, gradients, optimizer = STATE_BYTES[precision]
    shard = -(-parameters // dp)
    return (
        weights * (shard if zero >= 3 else parameters),
        gradients * (shard if zero >= 2 else parameters),
        optimizer * (shard if zero >= 1 else parameters),
    )


# ---- activations -----------------------------------------------------------------------------------------------


Keeps = Literal["fused", "compiled", "plain"]
"""By what a layer's tensors are kept: hand-fused code, torch.compile, or torch's operators one by one on a CPU."""


def kept_tensors(
    model: ModelConfig, microbatch: int, context: int, attention: str, precision: str, by: Keeps = "fused"
) -> list[Kept]:
    """What one layer keeps of one microbatch when nothing is recomputed."""
    plain = by == "plain"
    size = DTYPE_BYTES["bf16" if precision in ("bf16", "fp16", "bf16-master") else precision]
    # Autocast leaves the stream between the layers in fp32; only what enters a matmul is cast.
    stream = 4 if precision in AUTOCAST else size
    tokens = microbatch * context
    whole, kv, hidden = tokens * model.width, tokens * model.kv_width, tokens * model.mlp_width
    square = microbatch * model.heads * context * context
    # Hand-fused code keeps what enters a region cut along the sequence and gathers it again; our layers keep it joined.
    entering = "whole" if plain else "sequence"
    kept = [
        Kept("input of the first norm", whole, stream, "sequence"),
        Kept("input of q, k, v", whole, size, entering),
        Kept("queries", whole, size, "tp"),
        Kept("keys", kv, size, "kv"),
        Kept("values", kv, size, "kv"),
    ]
    if attention == "materialized":
        kept.append(Kept("softmax of the scores", square, size, "tp", scores=True))
        if model.dropout:
            kept.append(Kept("mask of the scores' dropout", square, 1, "tp", scores=True))
            kept.append(Kept("scores after dropout", square, size, "tp", scores=True))
    else:
        kept.append(Kept("log-sum-exp of the scores", microbatch * model.heads * context, 4, "tp", scores=True))
    kept.append(Kept("input of the output projection", whole, size, "tp"))
    if model.dropout:
        kept.append(Kept("mask of attention's dropout", whole, 1, "sequence"))
    kept.append(Kept("input of the second norm", whole, stream, "sequence"))
    kept.append(Kept("input of the MLP", whole, size, entering))
    if model.activation != "relu":  # relu's backward needs only its result, which the last projection keeps
        kept.append(Kept("input of the activation", model.mlp_inputs * hidden, size, "tp"))
    kept.append(Kept("input of the MLP's last projection", hidden, size, "tp"))
    if model.dropout:
        kept.append(Kept("mask of the MLP's dropout", whole, 1, "sequence"))
    if by == "compiled":
        return kept + _kept_by_the_compiler(model, tokens, whole, hidden, size)
    return kept + _kept_by_torch(model, whole, kv, hidden, size, stream) if plain else kept


def _kept_by_the_compiler(model: ModelConfig, tokens: int, whole: int, hidden: int, size: int) -> list[Kept]:
    """What torch.compile keeps beyond that: its partition of the graph, read off (a test does so again).

    It makes nothing anew that a product of the backward pass reads, so of an activation both ends stay. A LayerNorm
    keeps its input normalised, in place of it.
    """
    kept = [Kept("scale of each token in the norms", 2 * tokens, 4, "sequence")]
    if model.activation == "relu":
        kept.append(Kept("where the activation's input was above 0", hidden, 1, "tp"))
    if model.positions == "rotary":
        # Attention's result is laid out as the queries are, which turning has put head by head.
        kept.append(Kept("result of attention, before its heads are joined", whole, size, "tp"))
    return kept


def _kept_by_torch(model: ModelConfig, whole: int, kv: int, hidden: int, size: int, stream: int) -> list[Kept]:
    """What torch's own operators keep beyond that on a CPU, each operation for itself."""
    kept = [Kept("result of attention, before its heads are joined", whole, size, "tp")]
    if kv < whole:  # torch repeats keys and values for grouped queries, and keeps them so
        kept.append(Kept("keys and values, repeated", 2 * (whole - kv), size, "tp"))
    if model.norm == "rmsnorm":  # a product of its own; the input of its gain's gradient
        kept.append(Kept("norms before their gains", 2 * whole, stream, "sequence"))
    if model.activation == "swiglu":
        kept.append(Kept("gate after its activation", hidden, size, "tp"))
    return kept


def is_paper_model(model: ModelConfig, precision: str) -> bool:
    """Whether the formula in this file's heading is what the tensors add up to."""
    plain = model.mlp_width == 4 * model.width and model.kv_heads == model.heads and model.activation == "gelu"
    return plain and model.dropout > 0 and precision == "bf16-master"


def kept_bytes(tensor: Kept, model: ModelConfig, tp: int, sequence_parallel: bool) -> int:
    """What one rank keeps of a tensor."""
    nbytes = tensor.elements * tensor.element_bytes
    if tensor.split == "sequence":
        return nbytes // tp if sequence_parallel else nbytes
    if tensor.split == "whole":
        return nbytes
    if tensor.split == "kv":  # heads fewer than ranks are repeated
        return nbytes * kv_width_per_rank(model, tp) // model.kv_width
    return nbytes // tp


def layer_input_bytes(model: ModelConfig, plan: PlanFields, context: int) -> int:
    """What full recomputation keeps of a layer: its input."""
    tensors = kept_tensors(model, plan.microbatch, context, plan.attention, plan.precision)
    return kept_bytes(tensors[0], model, plan.tp, plan.sequence_parallel)


def layer_activation_bytes(model: ModelConfig, plan: PlanFields, context: int, by: Keeps = "fused") -> int:
    """What one layer keeps of one microbatch on one rank."""
    if plan.recompute == "full":
        return layer_input_bytes(model, plan, context)
    return sum(
        kept_bytes(tensor, model, plan.tp, plan.sequence_parallel)
        for tensor in kept_tensors(model, plan.microbatch, context, plan.attention, plan.precision, by)
        if not (tensor.scores and plan.recompute == "selective")
    )


def recomputed_layer_bytes(model: ModelConfig, plan: PlanFields, context: int, by: Keeps = "fused") -> int:
    """What comes back for one layer while its backward pass runs."""
    if plan.recompute == "none":
        return 0
    return sum(
        kept_bytes(tensor, model, plan.tp, plan.sequence_parallel)
        for tensor in kept_tensors(model, plan.microbatch, context, plan.attention, plan.precision, by)
        if tensor.scores or plan.recompute == "full"
    )


# ---- the rest --------------------------------------------------------------------------------------------------


def logits_bytes(model: ModelConfig, plan: PlanFields, context: int, code: Code) -> int:
    """Logits on the last stage and what the loss makes of them."""
    size = DTYPE_BYTES[plan.compute_dtype]
    each = logits_element_bytes(model, plan.tp, size, code)
    tokens = plan.microbatch * context
    total = each * tokens * vocabulary_per_rank(model, plan.tp)
    if code == "compiled":
        # The final norm's input and the logits' input, and what the logits' two products backward write.
        stream = 4 if plan.precision in AUTOCAST else size
        total += tokens * model.width * (stream + 2 * size) + vocabulary_per_rank(model, plan.tp) * model.width * size
    return total


def later_bytes(plan: PlanFields, gradients: int, activations: int, logits: int) -> int:
    """Gradients that are not there when the loss is: alone and with one microbatch, a step begins without any.

    They come as activations go, so what the end of the backward pass holds is a bound.
    """
    if plan.dp * plan.tp * plan.pp > 1 or plan.accumulation > 1:
        return 0
    return min(gradients, activations + logits)


def working_bytes(plan: PlanFields, shards: Shards, parameters: int, recomputed_bytes: int, looked_up: int = 0) -> int:
    """What lives for moments: the recomputed layer, gathered weights, cast copies.

    `looked_up`: parameters of tables from which rows are only taken, so that nobody casts them.
    """
    total = recomputed_bytes
    if plan.precision in AUTOCAST:
        total += 2 * (parameters - looked_up)  # kept from forward to backward beside the fp32 weights
    weights, gradients, _ = STATE_BYTES[plan.precision]
    if plan.zero == 3:
        # The layer at work and the one fetched ahead, and the gradients of the one at work before they are scattered.
        total += (2 * weights + gradients) * shards.layer
    elif plan.zero == 2:
        total += gradients * shards.layer
    return total


def backward_bytes(model: ModelConfig, plan: PlanFields, context: int) -> int:
    """Gradients alive at once where torch goes back through an MLP, operation by operation: of the product, of each of
    its factors, and of what goes into the activation."""
    hidden = plan.microbatch * context * model.mlp_width // plan.tp
    return 2 * model.mlp_inputs * hidden * DTYPE_BYTES[plan.compute_dtype]


def reserved_bytes(device: Device, ranks: int) -> int:
    among = constants.RESERVED_BYTES["ranks"] if device.kind == "cpu" and ranks > 1 else 0
    return constants.RESERVED_BYTES[device.kind] + among


def kv_cache_bytes(model: ModelConfig, context: int, element_bytes: int = 2) -> int:
    """Keys and values of one whole sequence, all layers: what serving keeps of it."""
    return 2 * model.layers * model.kv_width * context * element_bytes
