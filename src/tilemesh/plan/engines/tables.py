"""The engines: one table each, from their documentation and their packages at the version named.

`tests/pure/test_engines.py` holds every name below against the engine's own list of options.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from tilemesh.core.plan import MASTERED, ParallelPlan
from tilemesh.core.step.program import chunk_layers
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.work.task import AUTOCAST
from tilemesh.plan.engines.engine import EngineJob, EngineNote, EngineOption, EngineRefusal, OtherEngine

_TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
Row, Cannot, Note = EngineOption, EngineRefusal, EngineNote

_UNEXPRESSED = {
    "norm_place": "pre", "parallel_residual": False, "window": 0, "score_width": 0, "norm_offset": False,
    "scaled_embedding": False, "rotary_local_base": 0.0, "score_cap": 0.0, "logit_cap": 0.0,
    "score_sink": False,
}  # fmt: skip
"""Fields of a model that the tables below have no option for, and the values without which it is another model."""


def _sharded(plan: ParallelPlan) -> int:
    """Replicas that share what `fully_shard` cuts, without the ranks of cp that do too: of ZeRO-2 and ZeRO-3 alike."""
    return (plan.zero_group or plan.dp) if plan.zero > 1 else 1


def _is_even(job: EngineJob) -> bool:
    return len(set(chunk_layers(job.plan, job.model.layers))) == 1


_MATERIALIZED = Cannot("attention", lambda job: job.plan.attention == "materialized", "its attention is fused")
_PREFETCH = Note(lambda job: job.plan.zero == 3, "how many layers ahead weights are gathered is its own choice")
_EXPERTS = Cannot("ep", lambda job: job.plan.ep > 1, "which options share experts out is not known here")
_NO_CONTEXT = Cannot("cp", lambda job: job.plan.cp > 1, "a configuration of it does not share out sequences")
_BY_RING = Cannot(
    "cp_exchange",
    lambda job: job.plan.cp > 1 and job.plan.cp_exchange != "ring",
    "which option exchanges heads is not known here",
)
_NO_PIPELINE = Cannot("pp", lambda job: job.plan.pp > 1, "a configuration of it has no pipeline stages")
_NO_MODEL_SCRIPT = Note(
    lambda job: True, "model, data, learning rate and steps are your script's; it must take the flags below"
)

# ---- torchtitan --------------------------------------------------------------------------------------------------

_TITAN_SCHEDULES: Mapping[str, str] = {
    "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe", "zb-v": "ZBVZeroBubble",
    "breadth-first": "LoopedBFS", "dualpipe-v": "DualPipeV",
}  # fmt: skip
_ROTARY_SCALING = ("rotary_scaling", "rotary_factor", "rotary_low", "rotary_high", "rotary_trained")


def _titan_llama(name: str) -> ModelConfig:
    return preset(name).replace(rotary_scaling="llama3", rotary_factor=8.0)


def _titan_qwen(layers: int, width: int, heads: int, mlp_width: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        layers=layers, width=width, heads=heads, kv_heads=8, head_width=128, mlp_width=mlp_width, tied=tied,
        vocabulary=151936, context=4096, norm="rmsnorm", norm_epsilon=1e-6, positions="rotary", rotary_base=1e6,
        activation="swiglu", biases=False, qk_norm="head",
    )  # fmt: skip


_TITAN_MODELS: Mapping[tuple[str, str], ModelConfig] = {
    # module, configuration: what it is
    ("llama3", "llama3_8b"): _titan_llama("llama-3-8b"),
    ("llama3", "llama3_70b"): _titan_llama("llama-3-70b"),
    ("llama3", "llama3_405b"): _titan_llama("llama-3-405b"),
    ("qwen3", "qwen3_0_6b"): _titan_qwen(28, 1024, 16, 3072, tied=True),
    ("qwen3", "qwen3_1_7b"): _titan_qwen(28, 2048, 16, 6144, tied=True),
    ("qwen3", "qwen3_14b"): _titan_qwen(40, 5120, 40, 17408, tied=False),
    ("qwen3", "qwen3_32b"): _titan_qwen(64, 5120, 64, 25600, tied=False),
}


def _like(model: ModelConfig, theirs: ModelConfig, *names: str) -> ModelConfig:
    """A model with its longest sequence, family and these fields as theirs."""
    return model.replace(**{name: getattr(theirs, name) for name in ("context", "family", *names)})


def _titan_model(model: ModelConfig) -> tuple[str, str] | None:
    """What computes this model, but for how rotary frequencies are stretched."""
    return next((name for name, it in _TITAN_MODELS.items() if _like(model, it, *_ROTARY_SCALING) == it), None)


def _is_scaled_otherwise(model: ModelConfig) -> bool:
    known = _titan_model(model)
    return known is not None and _like(model, _TITAN_MODELS[known]) != _TITAN_MODELS[known]


def _titan_command(job: EngineJob) -> str:
    known = _titan_model(job.model)
    module, name = known or (
        "${MODULE:?a module with your model}", "${CONFIG:?its configuration}",
    )  # fmt: skip
    return f"{{launcher}} -m torchtitan.train --module {module} --config {name}"


def _titan_parts(job: EngineJob) -> list[str] | None:
    """The modules of each chunk of a pipeline, a word for each."""
    if job.plan.pp == 1:
        return None
    counts = chunk_layers(job.plan, job.model.layers)
    starts = [sum(counts[:place]) for place in range(len(counts))]
    parts = [[f"layers.{start + n}" for n in range(count)] for start, count in zip(starts, counts, strict=True)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return [",".join(part) for part in parts]


def _titan_repeats(job: EngineJob) -> bool:
    return job.plan.pp == 1 and job.plan.dp > 1 and job.plan.accumulation > 1


_TITAN_REPEATED = "without stages it sums over replicas in every microbatch, not once per step"

TORCHTITAN = OtherEngine(
    name="torchtitan",
    version="0.3.0",
    form="flags",
    command=_titan_command,
    options=(
        Row("parallelism.data-parallel-replicate-degree", lambda job: job.plan.dp // _sharded(job.plan)),
        Row("parallelism.data-parallel-shard-degree", lambda job: _sharded(job.plan)),
        Row("parallelism.fsdp-reshard-after-forward", lambda job: "always" if job.plan.zero == 3 else "never"),
        Row("parallelism.tensor-parallel-degree", lambda job: job.plan.tp),
        Row("parallelism.enable-sequence-parallel", lambda job: job.plan.sequence_parallel or None),
        Row("parallelism.no-enable-sequence-parallel", lambda job: (not job.plan.sequence_parallel) or None),
        Row("parallelism.context-parallel-degree", lambda job: job.plan.cp if job.plan.cp > 1 else None),
        Row("parallelism.pipeline-parallel-degree", lambda job: job.plan.pp),
        Row("parallelism.pipeline-parallel-schedule", lambda job: _of_pipeline(job, _TITAN_SCHEDULES.get)),
        Row("parallelism.pipeline-parallel-microbatch-size", lambda job: _of_pipeline(job, job.plan.microbatch)),
        Row("parallelism.module-fqns-per-model-part", _titan_parts),
        Row("training.disable-cuda-graphs", lambda job: _of_pipeline(job, True)),
        Row(
            "training.local-batch-size",
            lambda job: job.plan.microbatch * (job.plan.accumulation if job.plan.pp > 1 else 1),
        ),
        Row("training.global-batch-size", lambda job: job.plan.batch),
        Row("training.seq-len", lambda job: job.context),
        Row("training.dtype", lambda job: "float32"),
        Row("training.mixed-precision-param", lambda job: "float32" if job.plan.precision == "fp32" else "bfloat16"),
        Row("training.enable-cpu-offload", lambda job: True if job.plan.offload else None),
        Row("compile.enable", lambda job: job.compiled or None),
    ),
    last=lambda job: (
        "activation-checkpoint:"
        + {"none": "none", "selective": "none", "operators": "selective", "full": "full"}[job.plan.recompute]
    ),
    refusals=(
        Cannot(
            "precision", lambda job: job.plan.precision not in ("fp32", "bf16"), "it keeps float32 weights and casts"
        ),
        Cannot("zero", lambda job: job.plan.zero == 1, "fully_shard cuts weights and gradients too: ZeRO-2 or ZeRO-3"),
        Cannot("zero", lambda job: _titan_repeats(job) and not job.plan.zero, _TITAN_REPEATED),
        Cannot(
            "zero_group", lambda job: _titan_repeats(job) and 0 < job.plan.zero_group < job.plan.dp, _TITAN_REPEATED
        ),
        Cannot(
            "schedule", lambda job: job.plan.pp > 1 and job.plan.schedule not in _TITAN_SCHEDULES, "torch has it not"
        ),
        Cannot(
            "offload",
            lambda job: bool(job.plan.offload) and {*job.plan.offloads} != {"optimizer", "weights"},
            "it moves weights and optimizer states to the host together, or nothing",
        ),
        Cannot("recompute_every", lambda job: job.plan.recompute_every != 1, "it recomputes layer by layer"),
        Cannot("recompute_stages", lambda job: bool(job.plan.recompute_stages), "all its stages recompute alike"),
        _MATERIALIZED,
        _EXPERTS,
        _BY_RING,
    ),
    notes=(
        Note(
            lambda job: _titan_model(job.model) is None,
            "no configuration of torchtitan is this model: register it, then set MODULE and CONFIG",
        ),
        Note(
            lambda job: _is_scaled_otherwise(job.model),
            "the configuration stretches rotary frequencies otherwise than this model (its llama3 as Llama 3.1, its "
            "qwen3 not at all): register the model's own for its weights",
        ),
        Note(lambda job: _titan_model(job.model) is not None, "learning rate, steps and data are the configuration's"),
        Note(
            lambda job: _titan_repeats(job) and job.plan.zero == 2,
            "it gathers weights again in every microbatch, which is priced once per step",
        ),
        Note(
            lambda job: job.plan.recompute == "operators", "selective checkpointing keeps other operators than planned"
        ),
        _PREFETCH,
    ),
    defaults={"precision": "bf16"},
    code="compiled",
)

# ---- Megatron-LM -------------------------------------------------------------------------------------------------

_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def _of_pipeline(job: EngineJob, value: object) -> object:
    """A value where there are stages; a function is one of the schedule's name."""
    if job.plan.pp == 1:
        return None
    return value(job.plan.schedule) if callable(value) else value


def _megatron_layout(job: EngineJob) -> str | None:
    """Layers of each chunk, where they are not even: E is the embedding, t a layer, L the loss; | ends a stage."""
    if job.plan.pp == 1 or _is_even(job):
        return None
    counts = [f"t*{count}" for count in chunk_layers(job.plan, job.model.layers)]
    return "E" + "|".join(counts) + "L"


def _megatron_recompute(job: EngineJob) -> str | None:
    return None if job.plan.repeated == "none" else "full" if job.plan.recompute == "full" else "selective"


def _of_experts(value: Callable[[EngineJob], Any]) -> Callable[[EngineJob], Any]:
    """Of a model that has some; 0, False and None leave the option out."""
    return lambda job: (value(job) or None) if job.model.experts else None


def _of_latent(value: Callable[[EngineJob], Any]) -> Callable[[EngineJob], Any]:
    return lambda job: (value(job) or None) if job.model.latent_width else None


def _expert_layers(job: EngineJob) -> str | None:
    """A Python expression of a list: 1 for each layer with experts, 0 for others."""
    kinds = [int(layer not in job.model.dense_layers) for layer in range(job.model.layers)]
    runs = [f"[{kind}]*{len(list(group))}" for kind, group in itertools.groupby(kinds)]
    return f"({'+'.join(runs)})" if job.model.dense_layers else None


_MEGATRON_LATENT = (
    Row("multi-latent-attention", _of_latent(lambda job: True)),
    Row("q-lora-rank", _of_latent(lambda job: job.model.query_latent_width)),
    Row("kv-lora-rank", _of_latent(lambda job: job.model.latent_width)),
    Row("qk-head-dim", _of_latent(lambda job: job.model.plain_width)),
    Row("qk-pos-emb-head-dim", _of_latent(lambda job: job.model.rotary_width)),
    Row("v-head-dim", _of_latent(lambda job: job.model.value_head_width)),
)
_MEGATRON_EXPERTS = (
    Row("expert-model-parallel-size", _of_experts(lambda job: job.plan.ep)),
    Row("expert-tensor-parallel-size", _of_experts(lambda job: job.plan.expert_tp or job.plan.tp)),
    Row("num-experts", _of_experts(lambda job: job.model.experts)),
    Row("moe-layer-freq", _of_experts(_expert_layers)),
    Row("moe-ffn-hidden-size", _of_experts(lambda job: job.model.mlp_width)),
    Row("moe-shared-expert-intermediate-size", _of_experts(lambda job: job.model.shared_width)),
    Row("moe-router-topk", _of_experts(lambda job: job.model.experts_per_token)),
    Row("moe-router-score-function", _of_experts(lambda job: job.model.router_scores)),
    Row(
        "moe-router-pre-softmax",
        _of_experts(lambda job: job.model.router_scores == "softmax" and not job.model.router_renormalized),
    ),
    Row("moe-router-num-groups", _of_experts(lambda job: job.model.router_groups > 1 and job.model.router_groups)),
    Row(
        "moe-router-group-topk",
        _of_experts(lambda job: job.model.router_groups > 1 and job.model.router_groups_per_token),
    ),
    Row(
        "moe-router-topk-scaling-factor",
        _of_experts(lambda job: job.model.router_scale != 1 and job.model.router_scale),
    ),
    Row("moe-router-enable-expert-bias", _of_experts(lambda job: job.model.router_bias is True)),
    Row("moe-router-dtype", _of_experts(lambda job: "fp32")),
    Row(
        "moe-router-load-balancing-type",
        _of_experts(lambda job: "seq_aux_loss" if job.model.balance_loss else "none"),
    ),
    Row("moe-aux-loss-coeff", _of_experts(lambda job: job.model.balance_loss)),
    Row("moe-z-loss-coeff", _of_experts(lambda job: job.model.router_z_loss)),
    Row("moe-token-dispatcher-type", _of_experts(lambda job: "alltoall")),
    Row("moe-grouped-gemm", _of_experts(lambda job: True)),
    Row("moe-permute-fusion", _of_experts(lambda job: True)),
)
_NOT_OF_MEGATRONS_EXPERTS = (
    Cannot(
        "sequence_parallel",
        lambda job: bool(job.model.experts) and job.plan.tp > 1 and not job.plan.sequence_parallel,
        "with experts and tp it wants tokens shared out between layers",
    ),
    Cannot("model", lambda job: job.model.shared_gate, "its shared expert has no gate"),
    Cannot("model", lambda job: job.model.router_bias == "scores", "its router's products have no bias"),
    Cannot(
        "model",
        lambda job: bool(job.model.expert_capacity),
        "it drops a microbatch's least likely tokens, not the last",
    ),
    Cannot(
        "model",
        lambda job: (
            job.model.router_scores == "sigmoid"
            and not job.model.router_renormalized
            and job.model.experts_per_token > 1
        ),
        "it divides sigmoids of several experts by their sum",
    ),
    Cannot(
        "model",
        lambda job: bool(job.model.experts) and job.model.router_renormalized and job.model.experts_per_token == 1,
        "it weighs a token's only expert by its score, not by 1",
    ),
    Cannot(
        "model",
        lambda job: job.model.router_bias is True and job.model.router_scores != "sigmoid",
        "its bias of experts goes with sigmoid scores alone",
    ),
    Cannot(
        "model",
        lambda job: (
            job.model.router_scores == "softmax" and job.model.router_renormalized and job.model.router_scale != 1
        ),
        "it scales no softmax over the picked experts",
    ),
    Cannot(
        "model",
        lambda job: (
            job.model.router_groups > 1
            and (job.model.router_scores, job.model.experts_per_token)
            != ("sigmoid", 2 * job.model.router_groups_per_token)
        ),
        "it ranks groups by the sum of as many experts as a token picks in each",
    ),
)


MEGATRON = OtherEngine(
    name="megatron",
    version="0.16.1",
    form="flags",
    command=lambda job: "{launcher} ${MEGATRON:?the folder of Megatron-LM}/pretrain_gpt.py",
    options=(
        Row("num-layers", lambda job: job.model.layers),
        Row("hidden-size", lambda job: job.model.width),
        Row("ffn-hidden-size", lambda job: job.model.dense_width or job.model.mlp_width),
        Row("num-attention-heads", lambda job: job.model.heads),
        Row("kv-channels", lambda job: job.model.head_width),
        Row("group-query-attention", lambda job: True if job.model.kv_heads < job.model.heads else None),
        Row("num-query-groups", lambda job: job.model.kv_heads if job.model.kv_heads < job.model.heads else None),
        Row("max-position-embeddings", lambda job: max(job.model.context, job.context)),
        Row("seq-length", lambda job: job.context),
        Row("position-embedding-type", lambda job: "rope" if job.model.positions == "rotary" else "learned_absolute"),
        Row("rotary-base", lambda job: int(job.model.rotary_base) if job.model.positions == "rotary" else None),
        Row(
            "rotary-percent",  # with latents it would be of the part that is turned
            lambda job: None if job.model.latent_width or job.model.rotary_fraction == 1 else job.model.rotary_fraction,
        ),
        Row("use-rope-scaling", lambda job: True if job.model.rotary_scaling == "llama3" else None),
        Row("rope-scaling-factor", lambda job: job.model.rotary_factor if job.model.rotary_factor > 1 else None),
        Row("normalization", lambda job: "RMSNorm" if job.model.norm == "rmsnorm" else "LayerNorm"),
        Row("norm-epsilon", lambda job: job.model.norm_epsilon),
        Row("qk-layernorm", lambda job: True if job.model.qk_norm == "head" or job.model.latent_width else None),
        *_MEGATRON_LATENT,
        *_MEGATRON_EXPERTS,
        Row("swiglu", lambda job: True if job.model.activation == "swiglu" else None),
        Row("disable-bias-linear", lambda job: None if job.model.biases is True else True),
        Row("add-qkv-bias", lambda job: True if job.model.biases == "qkv" else None),
        Row("untie-embeddings-and-output-weights", lambda job: None if job.model.tied else True),
        Row("attention-dropout", lambda job: job.model.dropout),
        Row("hidden-dropout", lambda job: job.model.dropout),
        Row("tensor-model-parallel-size", lambda job: job.plan.tp),
        Row("sequence-parallel", lambda job: job.plan.sequence_parallel or None),
        Row("context-parallel-size", lambda job: job.plan.cp if job.plan.cp > 1 else None),
        Row("pipeline-model-parallel-size", lambda job: job.plan.pp),
        Row("pipeline-model-parallel-layout", _megatron_layout),
        Row(
            "num-virtual-stages-per-pipeline-rank",
            lambda job: job.plan.interleave if job.plan.interleave > 1 and _is_even(job) else None,
        ),
        Row("micro-batch-size", lambda job: job.plan.microbatch),
        Row("global-batch-size", lambda job: job.plan.batch),
        Row("use-distributed-optimizer", lambda job: True if job.plan.zero else None),
        Row("use-megatron-fsdp", lambda job: True if job.plan.zero > 1 else None),
        Row("data-parallel-sharding-strategy", lambda job: _SHARDING.get(job.plan.zero)),
        Row("no-gradient-accumulation-fusion", lambda job: True if job.plan.zero > 1 else None),
        Row("ckpt-format", lambda job: "fsdp_dtensor" if job.plan.zero > 1 else None),
        Row(
            "num-distributed-optimizer-instances",
            lambda job: job.plan.dp // job.plan.zero_group if job.plan.zero and job.plan.zero_group else None,
        ),
        Row("overlap-grad-reduce", lambda job: True if job.plan.replicas > 1 else None),
        Row("overlap-param-gather", lambda job: True if job.plan.zero else None),
        Row("recompute-granularity", _megatron_recompute),
        Row("recompute-method", lambda job: "uniform" if job.plan.recompute == "full" else None),
        Row(
            "recompute-num-layers",
            lambda job: (
                job.plan.stretch(max(chunk_layers(job.plan, job.model.layers)))
                if job.plan.recompute == "full"
                else None
            ),
        ),
        Row("optimizer-cpu-offload", lambda job: True if job.plan.offload else None),
        Row("bf16", lambda job: True if job.plan.precision == "bf16-master" else None),
        Row("grad-reduce-in-bf16", lambda job: True if job.plan.precision == "bf16-master" else None),
        Row("attention-backend", lambda job: "unfused" if job.plan.attention == "materialized" else "flash"),
        Row("cross-entropy-loss-fusion", lambda job: True),
    ),
    last=lambda job: (
        "${DATA:---mock-data --tokenizer-type NullTokenizer --vocab-size "
        f"{job.model.vocabulary - 1}}} ${{TRAIN:---train-iters 50 --lr 1e-4 --log-interval 1 --log-throughput}}"
    ),
    refusals=(
        Cannot(
            "precision",
            lambda job: job.plan.precision not in ("fp32", "bf16-master"),
            "its 16-bit weights have a float32 copy: bf16-master",
        ),
        Cannot(
            "schedule", lambda job: job.plan.pp > 1 and job.plan.schedule not in ("1f1b", "interleaved"), "it has 1F1B"
        ),
        Cannot("recompute", lambda job: job.plan.recompute == "operators", "it recomputes attention, or whole layers"),
        Cannot("recompute_stages", lambda job: bool(job.plan.recompute_stages), "all its stages recompute alike"),
        *_NOT_OF_MEGATRONS_EXPERTS,
        _BY_RING,
        Cannot("offload", lambda job: not {*job.plan.offloads} <= {"optimizer"}, "it moves optimizer states alone"),
        Cannot(
            "zero", lambda job: job.plan.zero > 1 and job.plan.pp > 1, "with stages it shares optimizer states alone"
        ),
    ),
    notes=(
        Note(
            lambda job: (
                any(getattr(job.model, name) != usual for name, usual in _UNEXPRESSED.items())
                or job.model.activation not in ("swiglu", "gelu")
                or job.model.qk_norm == "full"
                or job.model.rotary_scaling in ("linear", "yarn")
            ),
            "part of this model has no option here (norms, windows, activation): check it by hand",
        ),
        Note(
            lambda job: job.model.router_bias is True,
            "how fast its expert bias moves is --moe-router-bias-update-rate, here optimizer.balance_rate (both 0.001)",
        ),
        Note(
            lambda job: job.plan.precision == "bf16-master",
            "gradients in bf16, as planned: remove --grad-reduce-in-bf16 for float32 ones, 2 bytes per parameter more",
        ),
        Note(lambda job: True, "without DATA and TRAIN set, 50 steps over made-up data"),
        Note(lambda job: True, "it pads the vocabulary to a multiple of 128 x tp"),
        _PREFETCH,
    ),
    environment=lambda job: {} if job.plan.zero > 1 else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
)

# ---- DeepSpeed ---------------------------------------------------------------------------------------------------


def _deepspeed_offload(job: EngineJob, name: str) -> dict[str, object] | None:
    return {"device": "cpu", "pin_memory": True} if name in job.plan.offloads else None


DEEPSPEED = OtherEngine(
    name="deepspeed",
    version="0.19.8",
    form="json",
    command=lambda job: '{launcher} "${SCRIPT:?your training script}" --deepspeed --deepspeed_config {file}',
    options=(
        # Held against all ranks, which is more than there are replicas: with tp it follows from the other two.
        Row("train_batch_size", lambda job: job.plan.batch if job.plan.tp == 1 else None),
        Row("train_micro_batch_size_per_gpu", lambda job: job.plan.microbatch),
        Row("gradient_accumulation_steps", lambda job: job.plan.accumulation),
        Row("zero_optimization.stage", lambda job: job.plan.zero),
        Row("zero_optimization.overlap_comm", lambda job: True if job.plan.zero else None),
        Row("zero_optimization.offload_optimizer", lambda job: _deepspeed_offload(job, "optimizer")),
        Row("zero_optimization.offload_param", lambda job: _deepspeed_offload(job, "weights")),
        Row("tensor_parallel.autotp_size", lambda job: job.plan.tp if job.plan.tp > 1 else None),
        Row("bf16.enabled", lambda job: True if job.plan.precision == "bf16-master" else None),
        Row("torch_autocast.enabled", lambda job: True if job.plan.precision in AUTOCAST else None),
        Row("torch_autocast.dtype", lambda job: _TORCH[job.plan.precision] if job.plan.precision in AUTOCAST else None),
        Row("steps_per_print", lambda job: 10),
        Row("wall_clock_breakdown", lambda job: False),
    ),
    refusals=(
        _NO_PIPELINE,
        Cannot(
            "precision", lambda job: job.plan.precision in ("fp64", "fp8"), "it has no float64, and no scales of 8 bits"
        ),
        Cannot("zero_group", lambda job: bool(job.plan.zero_group), "its ZeRO shares among all replicas"),
        Cannot("sequence_parallel", lambda job: job.plan.sequence_parallel, "its AutoTP does not split norms"),
        Cannot(
            "offload",
            lambda job: (
                "activations" in job.plan.offloads
                or ("weights" in job.plan.offloads and job.plan.zero < 3)
                or (bool(job.plan.offload) and not job.plan.zero)
            ),
            "it moves optimizer states from ZeRO-1 on and weights with ZeRO-3",
        ),
        Cannot(
            "recompute", lambda job: job.plan.recompute == "operators", "a model recomputes whole layers or nothing"
        ),
        Cannot("recompute_every", lambda job: job.plan.recompute_every != 1, "a model recomputes layer by layer"),
        _MATERIALIZED,
        _EXPERTS,
        _NO_CONTEXT,
    ),
    notes=(
        Note(
            lambda job: job.plan.recompute == "full", "call model.gradient_checkpointing_enable(): it has no key here"
        ),
        Note(lambda job: True, "without gradient_clipping it clips gradients to a norm of 1"),
        Note(
            lambda job: job.plan.tp > 1,
            "neighbours of a tensor-parallel group read the same sequences: share data out by rank // autotp_size, "
            "not by rank; what it calls samples per second counts each of them",
        ),
        Note(
            lambda job: True,
            "model, data, optimizer and steps are your script's; it must parse --deepspeed and --deepspeed_config",
        ),
        _PREFETCH,
    ),
    defaults={"sequence_parallel": False},
    code="eager",
)

# ---- accelerate --------------------------------------------------------------------------------------------------


def _with_fsdp(job: EngineJob, value: object) -> object:
    return value if job.plan.zero > 1 else None


def _on_cpus(job: EngineJob) -> bool:
    """Its launcher starts several GPUs; ranks of a CPU are torchrun's, each of which starts it for one."""
    return job.cluster.device.kind == "cpu" and job.plan.dp > 1


def _accelerate_type(job: EngineJob) -> str:
    several = "MULTI_CPU" if _on_cpus(job) else "MULTI_GPU" if job.plan.dp > 1 else "NO"
    return "FSDP" if job.plan.zero > 1 else several


def _accelerate_command(job: EngineJob) -> str:
    where = "--machine_rank $NODE " if len(job.cluster.nodes) > 1 else ""
    where = "" if _on_cpus(job) else f"{where}--main_process_ip $HEAD --main_process_port $PORT "
    return (
        f"{'{launcher} --no-python ' if _on_cpus(job) else ''}accelerate launch --config_file {{file}} {where}"
        '"${SCRIPT:?your training script}" '
        f"--per_device_train_batch_size {job.plan.microbatch} --gradient_accumulation_steps {job.plan.accumulation}"
    )


ACCELERATE = OtherEngine(
    name="accelerate",
    version="1.15.0",
    form="yaml",
    command=_accelerate_command,
    options=(
        Row("compute_environment", lambda job: "LOCAL_MACHINE"),
        Row("distributed_type", _accelerate_type),
        Row("use_cpu", lambda job: True if job.cluster.device.kind == "cpu" else None),
        Row("num_machines", lambda job: 1 if _on_cpus(job) else len(job.cluster.nodes)),
        Row("num_processes", lambda job: 1 if _on_cpus(job) else job.plan.world),
        Row("mixed_precision", lambda job: "no" if job.plan.precision == "fp32" else job.plan.precision),
        Row("dynamo_config.dynamo_backend", lambda job: "INDUCTOR" if job.compiled else None),
        Row("fsdp_config.fsdp_version", lambda job: _with_fsdp(job, 2)),
        Row("fsdp_config.fsdp_reshard_after_forward", lambda job: _with_fsdp(job, job.plan.zero == 3)),
        Row("fsdp_config.fsdp_auto_wrap_policy", lambda job: _with_fsdp(job, "TRANSFORMER_BASED_WRAP")),
        Row("fsdp_config.fsdp_state_dict_type", lambda job: _with_fsdp(job, "SHARDED_STATE_DICT")),
        Row("fsdp_config.fsdp_activation_checkpointing", lambda job: _with_fsdp(job, job.plan.recompute == "full")),
        Row("fsdp_config.fsdp_offload_params", lambda job: _with_fsdp(job, bool(job.plan.offload))),
        Row(
            "parallelism_config.parallelism_config_dp_replicate_size",
            lambda job: _with_fsdp(job, job.plan.dp // _sharded(job.plan)),
        ),
        Row("parallelism_config.parallelism_config_dp_shard_size", lambda job: _with_fsdp(job, _sharded(job.plan))),
        Row("parallelism_config.parallelism_config_tp_size", lambda job: _with_fsdp(job, job.plan.tp)),
    ),
    refusals=(
        _NO_PIPELINE,
        Cannot(
            "precision",
            lambda job: job.plan.precision in (*MASTERED, "fp64"),
            "it keeps float32 weights and casts",
        ),
        Cannot("zero", lambda job: job.plan.zero == 1, "fully_shard cuts weights and gradients too: ZeRO-2 or ZeRO-3"),
        Cannot("zero", lambda job: job.cluster.device.kind == "cpu" and job.plan.zero > 1, "its FSDP is for GPUs"),
        Cannot("tp", lambda job: job.plan.tp > 1 and job.plan.zero < 2, "its tensor parallelism goes with FSDP alone"),
        Cannot(
            "sequence_parallel", lambda job: job.plan.sequence_parallel, "the plans of transformers' models have none"
        ),
        Cannot("recompute", lambda job: job.plan.recompute == "operators", "it recomputes whole layers or nothing"),
        Cannot(
            "recompute", lambda job: job.plan.recompute == "full" and job.plan.zero < 2, "its recomputation is FSDP's"
        ),
        Cannot("recompute_every", lambda job: job.plan.recompute_every != 1, "it recomputes layer by layer"),
        Cannot(
            "offload",
            lambda job: bool(job.plan.offload) and {*job.plan.offloads} != {"optimizer", "weights"},
            "it moves weights and optimizer states to the host together, or nothing",
        ),
        _MATERIALIZED,
        _EXPERTS,
        _NO_CONTEXT,
    ),
    notes=(
        _NO_MODEL_SCRIPT,
        Note(lambda job: job.plan.tp > 1, 'load the model with tp_plan="auto": its tensor parallelism is the model\'s'),
        Note(
            lambda job: job.plan.zero > 1 and job.plan.accumulation > 1,
            'give the Trainer accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": true}} (or a '
            "GradientAccumulationPlugin with it): else gradients stay whole on every rank until the last microbatch",
        ),
        _PREFETCH,
    ),
    defaults={"precision": "bf16", "sequence_parallel": False},
    code="eager",
)

# ---- vLLM --------------------------------------------------------------------------------------------------------

VLLM = OtherEngine(
    name="vllm",
    version="0.33.0",
    form="flags",
    command=lambda job: f"vllm serve {job.folder}",
    options=(
        Row("tensor-parallel-size", lambda job: job.plan.tp),
        Row("data-parallel-size", lambda job: job.plan.dp if job.plan.dp > 1 else None),
        Row("data-parallel-size-local", lambda job: _vllm_local(job)),
        Row("data-parallel-address", lambda job: "$HEAD" if _vllm_local(job) else None),
        Row("dtype", lambda job: _TORCH[job.plan.precision]),
        Row("max-model-len", lambda job: job.context),
        Row("max-num-seqs", lambda job: job.running),
        Row("max-num-batched-tokens", lambda job: job.step_tokens),
        Row("block-size", lambda job: 16),
        Row("enable-chunked-prefill", lambda job: True),
    ),
    refusals=(
        Cannot("tp", lambda job: job.plan.tp > job.cluster.node.count, "over several nodes it needs a Ray cluster"),
    ),
    notes=(
        Note(
            lambda job: True, "--gpu-memory-utilization is left as it is: its free memory is what the plan's pages are"
        ),
    ),
    last=lambda job: _vllm_others(job),
)


def _vllm_local(job: EngineJob) -> int | None:
    """Replicas on each node, where there are several."""
    return job.cluster.node.count // job.plan.tp if len(job.cluster.nodes) > 1 else None


def _vllm_others(job: EngineJob) -> str:
    """Of nodes but the first: their first rank, which without --headless would have every node balance its own load."""
    local = _vllm_local(job)
    if local is None:
        return ""
    return f'$([ "$NODE" = 0 ] || echo --headless --data-parallel-start-rank $((NODE * {local})))'


ENGINES: Mapping[str, OtherEngine] = {
    engine.name: engine for engine in (TORCHTITAN, MEGATRON, DEEPSPEED, ACCELERATE, VLLM)
}
TRAINING: Mapping[str, OtherEngine] = {name: engine for name, engine in ENGINES.items() if engine is not VLLM}
