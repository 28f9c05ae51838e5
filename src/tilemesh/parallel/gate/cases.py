"""What the gate compares: small models that have everything, the layouts of n ranks, and the bounds. Plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.plan import ParallelPlan, Precision
from tilemesh.core.shard import share
from tilemesh.core.step.book import find, synchronous
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.weights import parameter_shapes, why_not, why_not_groups

STEPS = 3
ROWS = 18  # a step's batch: no replica count divides it, so replicas hold unequal numbers of rows
TOKENS = 10  # not divisible by 4 or 8: sequence shards are uneven
MAX_NORM = 0.5  # below the gradients' norms, so that clipping is part of what is compared
RATE = 0.2
MOMENTUM = 0.9
SETTINGS: dict[str, Any] = {
    "betas": (0.9, 0.95), "epsilon": 1e-6, "weight_decay": 0.1, "momentum": 0.9, "balance_rate": 0.05,
}  # fmt: skip
"""Of an optimizer that the gate is given: the names are those of `train`'s configuration."""
OPTIMIZERS = {"adamw": 0.01, "sgd": 0.1, "lion": 0.005, "muon": 0.02}
"""Those it is given, with the rate they step by."""
LOSS_SCALE = 2.0**10
"""A power of two: in float64 nothing is rounded by it, so that it must leave no trace."""
NORM_BOUND = 1e-6  # a reported norm beside that of the same gradients in float64, in other precisions
BOUND = 1e-10  # relative, on whole-model norms, in float64
ORDER_FACTOR = 2.0  # in other precisions: so many times what another order of summation alone does
OPERATIONS = 30
"""That round in a layer: ten forwards (norms, products, softmax, activation, residuals), twice as many backwards."""
PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "bf16")

_SMALL: dict[str, Any] = {"layers": 2, "width": 32, "heads": 8, "mlp_width": 48, "context": 12, "dropout": 0.1}
_ROTARY: dict[str, Any] = {"norm": "rmsnorm", "positions": "rotary", "tied": False}

# Between them: both norms, all places that tp can split, both positions, all MLPs, with and without biases, tied and
# not, one, some and all kv heads (fewer than ranks and not), a vocabulary that divides and ones that do not; norms of
# queries and keys, windows, soft caps, sinks, parts of heads that are rotated, attention and MLP added at once,
# experts, as many of them as ranks can share out.
MODELS: Mapping[str, ModelConfig] = {
    "gpt": ModelConfig(**_SMALL, vocabulary=61),
    "llama": ModelConfig(**_SMALL, **_ROTARY, vocabulary=64, kv_heads=2, activation="swiglu", biases=False),
    "post": ModelConfig(**_SMALL, vocabulary=37, kv_heads=4, norm_place="post", activation="relu", score_cap=2.0),
    "query": ModelConfig(
        **_SMALL, **_ROTARY, vocabulary=50, kv_heads=1, norm_place="post", score_cap=1.5, logit_cap=2.0,
        score_sink=True,
    ),
    "gemma": ModelConfig(
        **_SMALL, **_ROTARY, vocabulary=64, kv_heads=2, activation="geglu", biases="qkv", head_width=6, qk_norm="head",
        norm_place="sandwich", norm_offset=True, scaled_embedding=True, window=4, full_layers=(1,), score_width=5,
        rotary_local_base=100.0, score_sink=True,
    ),
    "neox": ModelConfig(
        **_SMALL, vocabulary=53, positions="rotary", rotary_fraction=0.5, parallel_residual=True, biases="mlp",
        activation="gelu-erf", score_sink=True,
    ),
    "experts": ModelConfig(
        **_SMALL, **_ROTARY, vocabulary=64, activation="swiglu", biases=False, experts=5, experts_per_token=2,
        balance_loss=0.3, router_z_loss=0.1, shared_width=24, shared_gate=True, dense_layers=(1,), dense_width=40,
        head_width=6, rotary_fraction=2 / 3, latent_width=7, value_width=5, score_gain=1.3,
        query_latent_width=9, router_bias="scores",
    ),
    "spread": ModelConfig(
        **_SMALL, **_ROTARY, vocabulary=64, kv_heads=2, activation="swiglu-clipped", biases=True, experts=8,
        experts_per_token=2, balance_loss=0.2, router_renormalized=False, qk_norm="full", router_scores="sigmoid",
        router_bias=True, router_groups=4, router_groups_per_token=2, router_scale=1.5,
    ),
    "dropped": ModelConfig(
        **_SMALL, **_ROTARY, vocabulary=64, activation="swiglu", biases=False, experts=8, experts_per_token=2,
        shared_width=24, balance_loss=0.2, expert_capacity=1.1,
    ),
}  # fmt: skip
OF_EXPERTS = ("spread", "dropped")
"""Models for layouts that share out experts; the second for those alone."""


_PLAIN: dict[str, Any] = {"layers": 2, "width": 16, "heads": 4, "mlp_width": 24, "context": 12, "vocabulary": 31}
_LLAMA: dict[str, Any] = {**_PLAIN, **_ROTARY, "kv_heads": 2, "activation": "swiglu", "biases": False}
_WAVES: dict[str, Any] = {"rotary_base": 100.0, "rotary_factor": 8.0, "rotary_trained": 64}

# What one process is compared with the papers in: every family, and every value of every setting. The rotary waves are
# shorter, in between and longer than the context that llama3 scales by.
PAPERS: Mapping[str, ModelConfig] = {
    "gpt2": ModelConfig(**_PLAIN, family="gpt2"),
    "llama": ModelConfig(**_LLAMA, family="llama"),
    "llama3": ModelConfig(**{**_LLAMA, "heads": 2, "biases": "attention", "rotary_scaling": "llama3"}, **_WAVES),
    "yarn": ModelConfig(**{**_LLAMA, "head_width": 12, "rotary_scaling": "yarn"}, **{**_WAVES, "rotary_gain": 0.8}),
    "mistral": ModelConfig(**_LLAMA, window=3, head_width=8, family="mistral"),
    "qwen2": ModelConfig(**{**_LLAMA, "biases": "qkv", "tied": True}, rotary_scaling="linear", rotary_factor=4.0),
    "qwen3": ModelConfig(**_LLAMA, qk_norm="head", head_width=6, family="qwen3"),
    "gemma3_text": ModelConfig(
        **{**_LLAMA, "activation": "geglu", "tied": True}, qk_norm="head", norm_place="sandwich", norm_offset=True,
        scaled_embedding=True, window=4, full_layers=(1,), score_width=5, rotary_local_base=50.0,
        rotary_scaling="linear", rotary_factor=8.0, family="gemma3_text",
    ),
    "gemma2": ModelConfig(
        **{**_LLAMA, "activation": "geglu", "tied": True}, norm_place="sandwich", norm_offset=True, score_cap=1.5,
        logit_cap=2.0, scaled_embedding=True, window=4, full_layers=(1,), score_width=5, family="gemma2",
    ),
    "phi3": ModelConfig(**{**_LLAMA, "heads": 2}, rotary_fraction=0.5, window=5, family="phi3"),
    "gpt_neox": ModelConfig(
        **_PLAIN, positions="rotary", rotary_fraction=0.5, parallel_residual=True, tied=False, activation="gelu-erf",
        family="gpt_neox",
    ),
    "olmo2": ModelConfig(**_LLAMA, norm_place="branch", qk_norm="full", norm_epsilon=1e-3, family="olmo2"),
    "mixtral": ModelConfig(**_LLAMA, experts=4, window=3, balance_loss=0.5, router_z_loss=0.2, family="mixtral"),
    "qwen3_moe": ModelConfig(
        **_LLAMA, experts=6, experts_per_token=3, router_renormalized=False, qk_norm="head", family="qwen3_moe"
    ),
    "qwen2_moe": ModelConfig(
        **{**_LLAMA, "biases": "qkv"}, experts=4, shared_width=20, shared_gate=True, dense_layers=(0,), dense_width=12,
        family="qwen2_moe",
    ),
    "deepseek_v2": ModelConfig(
        **{**_LLAMA, "kv_heads": 4}, head_width=6, rotary_fraction=2 / 3, latent_width=5, value_width=3, experts=4,
        shared_width=24, router_renormalized=False, dense_layers=(0,), dense_width=12, score_gain=1.2,
        rotary_scaling="yarn", **_WAVES, family="deepseek_v2",
    ),
    "deepseek_v3": ModelConfig(
        **{**_LLAMA, "kv_heads": 4}, head_width=6, rotary_fraction=2 / 3, latent_width=5, query_latent_width=7,
        value_width=3, experts=6, shared_width=24, router_scores="sigmoid", router_bias=True, router_groups=3,
        router_groups_per_token=2, router_scale=1.5, balance_loss=0.4, family="deepseek_v3",
    ),
    "dropped": ModelConfig(**_LLAMA, experts=4, shared_width=12, expert_capacity=0.9),
    "gpt_oss": ModelConfig(
        **{**_LLAMA, "activation": "swiglu-clipped", "biases": True}, experts=4, score_sink=True, router_bias="scores",
        window=3, full_layers=(1,), rotary_scaling="yarn", rotary_rounded=False, balance_loss=0.2, **_WAVES,
        family="gpt_oss",
    ),
    "olmoe": ModelConfig(**_LLAMA, experts=3, experts_per_token=1, qk_norm="full", family="olmoe"),
    "neox": ModelConfig(**_PLAIN, positions="rotary", biases="mlp", activation="relu", family="gpt_neox"),
    "post": ModelConfig(**{**_PLAIN, "kv_heads": 1}, norm_place="post", scaled_embedding=True, qk_norm="full"),
}  # fmt: skip


def rate_of(optimizer: str) -> float:
    """What the gate has an optimizer step by."""
    return OPTIMIZERS.get(optimizer, RATE)


def gate_plan(
    dp: int = 1,
    tp: int = 1,
    sequence: bool = False,
    accumulation: int = 1,
    pp: int = 1,
    schedule: str = "1f1b",
    precision: Precision = "fp64",
    **settings: Any,
) -> ParallelPlan:
    """A layout to compare: with as few chunks as the schedule allows, and three slices where it cuts sequences."""
    pipeline = find(schedule)
    return ParallelPlan(
        dp=dp,
        tp=tp,
        pp=pp,
        sequence_parallel=sequence,
        accumulation=accumulation,
        schedule=schedule,
        interleave=min(pipeline.interleaves, default=1),
        slices=3 if pipeline.cuts_sequences else 1,
        precision=precision,
        **settings,
    )


@dataclass(frozen=True)
class Case:
    model: str
    layout: ParallelPlan
    weights: str = ""
    """How the layers' matrices are compressed: by a scheme's name (int4-g4); "rounded" before it: in every pass, while
    they are trained in full."""
    optimizer: str = ""
    """Of those that the gate was given; "": its own."""
    scale: float = 1.0
    """Of the loss, taken out of the gradients again."""
    packed: bool = False
    """Several documents in each sequence, none of which sees another."""
    by_papers: bool = False
    """Compared with `papers.py` instead of one process of the same model; dropout has masks of its own and is left
    out."""

    @property
    def precision(self) -> Precision:
        return self.layout.precision

    def __str__(self) -> str:
        scaled = f"loss × {self.scale:g}" if self.scale != 1 else ""
        narrow = self.precision if self.precision not in PRECISIONS else ""
        papers = "by the papers" if self.by_papers else ""
        packed = "packed" if self.packed else ""
        words = (_words(self.layout), packed, self.weights, narrow, self.optimizer, scaled, papers)
        return " ".join(filter(None, words))

    @property
    def config(self) -> ModelConfig:
        """The model; for a pipeline with one layer more than it has chunks, so that its stages are uneven, and with
        five where layers are gathered, moved or computed again in stretches."""
        if self.by_papers:
            return PAPERS[self.model]
        config, plan = MODELS[self.model], self.layout
        if plan.slices > 1:
            config = config.replace(balance_loss=0.0)
        if plan.pp > 1:
            return config.replace(layers=plan.chunks + 1)
        return config.replace(layers=5) if plan.has_chunks or plan.recompute_every != 1 else config

    @property
    def why_not(self) -> str | None:
        """Why the layout cannot exist for the model, or for codes of such groups."""
        config, group = self.config, re.search(r"-g(\d+)", self.weights)
        groups = {name.removesuffix(".weight"): int(group[1]) for name in parameter_shapes(config)} if group else {}
        return why_not(config, self.layout) or why_not_groups(config, self.layout, groups)


def _words(plan: ParallelPlan) -> str:
    words = f"dp={plan.dp} tp={plan.tp}" + (f" pp={plan.pp} {plan.schedule}" if plan.pp > 1 else "")
    words += f" ep={plan.ep}" * (plan.ep > 1) + f" etp={plan.expert_tp}" * plan.routes_apart
    words += f" cp={plan.cp} by {plan.cp_exchange}" * (plan.cp > 1)
    words += " sequence" * plan.sequence_parallel + f" ×{plan.accumulation}" * (plan.accumulation > 1)
    if plan.zero:
        words += f" ZeRO-{plan.zero}" + f" by {plan.zero_group}" * (plan.zero_group > 0)
        words += f" {plan.prefetch} ahead" * (plan.zero == 3 and plan.prefetch != 1)
    if plan.recompute != "none":
        words += " again" + " but operators" * (plan.recompute == "operators")
        words += f" every {plan.recompute_every}" * (plan.recompute_every != 1)
    if plan.offload:
        words += " offload " + "+".join(what[0] for what in plan.offloads)
    return words


def microbatches(layout: ParallelPlan, dp_index: int) -> list[tuple[int, int]]:
    """(first row, rows) of each microbatch of a replica: contiguous, of sizes that differ by at most one."""
    first, count = share(ROWS, layout.dp, dp_index)
    turns = (share(count, layout.accumulation, turn) for turn in range(layout.accumulation))
    return [(first + row, rows) for row, rows in turns]


def layouts(ranks: int) -> list[ParallelPlan]:
    """Every dp × tp of so many ranks, with and without sequence parallelism, in one microbatch and in two."""
    every = []
    for tp in (n for n in range(1, ranks + 1) if ranks % n == 0):
        for sequence in (False, True) if tp > 1 else (False,):
            every += [gate_plan(ranks // tp, tp, sequence, accumulation) for accumulation in (1, 2)]
    return every


def pipelines(ranks: int) -> list[ParallelPlan]:
    """Every schedule on two stages, with what is left of so many ranks shared in turn between dp and tp, and some on
    more. Each of dp, tp, sequence parallelism meets every family of schedules as the number of ranks grows."""
    every = []
    for place, schedule in enumerate(map(find, synchronous())):
        if ranks < 2:
            continue
        rest = ranks // 2
        tp = 1 if rest == 1 else (rest, 1, 2)[place % 3]
        sequence = tp > 1 and place % 2 == 0 and not schedule.cuts_sequences
        every.append(gate_plan(rest // tp, tp, sequence, schedule.microbatches_from(2, 4), 2, schedule.name))
    if ranks >= 4:
        deep = ("1f1b", "zb-h2", "interleaved", "zb-v", "dualpipe")
        every += [gate_plan(ranks // 4, 1, False, 8, 4, schedule) for schedule in deep]
    return every


def shared_sequences(ranks: int) -> list[Case]:
    """Sequences that so many ranks share, and packed documents with and without: each way of exchange with windows,
    few KV heads, learned positions, odd lengths, tp, sequence parallelism and slices. Pairs have the rest."""
    if ranks == 1:
        return [Case("gemma", gate_plan(), packed=True)]
    if ranks == 2:
        every = [Case(model, gate_plan(cp=2, accumulation=2), packed=model in ("gemma", "gpt")) for model in MODELS]
        every += [Case(model, gate_plan(cp=2, cp_exchange="heads"), packed=model != "post") for model in _BY_HEADS]
        gathered: dict[str, Any] = {"cp": 2, "cp_exchange": "gather"}
        every += [Case(model, gate_plan(**gathered), packed=model == "gemma") for model in ("gpt", "gemma", "llama")]
        return [*every, Case("llama", gate_plan(1, 2, True), packed=True)]
    most: dict[str, Any] = {"cp": ranks // 2}
    return [
        Case("gemma", gate_plan(cp=ranks), packed=True),
        Case("post", gate_plan(cp=4, dp=ranks // 4, cp_exchange="heads", zero=1)),
        Case("query", gate_plan(1, 2, True, 2, **most)),
        Case("llama", gate_plan(2, 1, False, 2, **most), packed=True),
        Case("gpt", gate_plan(1, ranks // 4, False, 2, 2, "terapipe", cp=2), packed=True),
        Case("neox", gate_plan(1, ranks // 4, False, 2, 2, "terapipe", cp=2, cp_exchange="heads"), packed=True),
        Case("gemma", gate_plan(cp=4, dp=ranks // 4, cp_exchange="gather", recompute="full"), packed=True),
        Case("gpt", gate_plan(1, ranks // 4, False, 2, 2, "terapipe", cp=2, cp_exchange="gather"), packed=True),
        *(Case(model, gate_plan(cp=4, dp=ranks // 4, cp_exchange="heads-ring"), packed=True) for model in _BY_BOTH),
        # Of a slice's few tokens some ranks have none.
        *[Case("llama", gate_plan(1, 1, False, 2, 2, "terapipe", cp=4, cp_exchange="heads-ring"))] * (ranks == 8),
    ]


_BY_HEADS = ("gpt", "gemma", "post")
_BY_BOTH = ("gemma", "llama")


def compressed(ranks: int) -> list[tuple[ParallelPlan, str]]:
    """Layouts for matrices of other kinds: replicas, cut matrices, stages, gathered weights, recomputation."""
    if ranks == 1:
        return [(gate_plan(recompute="full"), "int3-g4-affine"), (gate_plan(), "masked")]
    if ranks == 2:
        return [
            (gate_plan(2), "rounded int4-g4"),
            (gate_plan(1, 2, recompute="full"), "rounded int8"),
            (gate_plan(1, 2, True, 2), "rounded int4-tensor"),
            (gate_plan(1, 2), "int4-g4"),
            (gate_plan(1, 2), "by fp8 tensor"),
            (gate_plan(1, 2, True, 2), "by fp8 row"),
            (gate_plan(2, zero=3, recompute="full"), "by fp8 row"),
            (gate_plan(accumulation=4, pp=2, schedule="zb-h1"), "by fp8 block"),
            (gate_plan(2, zero=1), "rounded int2-g8-affine"),
            (gate_plan(2, zero=3), "rounded int4-g4"),
            (gate_plan(2, offload="weights", zero=2, prefetch=0), "masked"),
            (gate_plan(2, offload="activations"), "adapters int4-g4"),
            (gate_plan(accumulation=4, pp=2, schedule="1f1b"), "rounded int8"),
            (gate_plan(accumulation=4, pp=2, schedule="zb-h1"), "masked"),
            (gate_plan(2, zero=1), "adapters"),
            (gate_plan(2, zero=3), "adapters int4-g4"),
            (gate_plan(1, 2), "adapters"),
            (gate_plan(1, 2, True, 2), "adapters int4-g4"),
            (gate_plan(accumulation=4, pp=2, schedule="1f1b"), "adapters int8"),
            (gate_plan(accumulation=4, pp=2, schedule="zb-v"), "adapters"),
        ]
    return [
        (gate_plan(ranks // 2, 2, recompute="full"), "int8"),
        (gate_plan(1, ranks), "rounded int3"),
        (gate_plan(ranks // 4, 2, False, 4, 2, "1f1b"), "adapters"),
    ]


def spread_experts(ranks: int) -> list[tuple[ParallelPlan, str]]:
    """Layouts of experts that replicas share out: with copies of them and without, and with all else that there is."""
    if ranks == 2:
        return [
            (gate_plan(2, ep=2), ""),
            (gate_plan(2, accumulation=2, ep=2, recompute="operators"), ""),
            (gate_plan(2, ep=2, zero=1, recompute="full"), ""),
            (gate_plan(2, accumulation=2, ep=2, zero=3), ""),
            (gate_plan(2, ep=2, offload="activations+weights"), ""),
            (gate_plan(2, ep=2), "adapters int4-g4"),
            (gate_plan(cp=2, accumulation=2, ep=2, recompute="full"), ""),
            (gate_plan(cp=2, ep=2, zero=1, cp_exchange="heads"), ""),
            (gate_plan(1, 2, True, ep=2, expert_tp=1), ""),
            (gate_plan(1, 2, True, accumulation=2, expert_tp=1, recompute="full"), ""),
        ]
    if ranks == 4:
        return [
            (gate_plan(4, ep=2), ""),
            (gate_plan(4, accumulation=2, ep=4), ""),
            (gate_plan(2, 2, True, ep=2), ""),
            (gate_plan(4, accumulation=2, ep=2, zero=2), ""),
            (gate_plan(4, ep=2, zero=2, zero_group=2), ""),
            (gate_plan(4, ep=2, zero=3), "adapters"),
            (gate_plan(2, ep=2, zero=2, cp=2), ""),
            (gate_plan(2, accumulation=2, ep=4, zero=3, cp=2), ""),
            (gate_plan(cp=4, ep=4), ""),
            (gate_plan(cp=4, ep=2, zero=2), ""),
            (gate_plan(1, 2, True, ep=2, cp=2), ""),
            (gate_plan(1, accumulation=4, pp=2, ep=2, cp=2), ""),
            (gate_plan(2, accumulation=4, pp=2, ep=2, schedule="zb-h1"), ""),
            (gate_plan(2, accumulation=4, pp=2, ep=2, schedule="dualpipe", zero=1), ""),
            (gate_plan(2, 2, True, 2, ep=4, expert_tp=1, zero=1), ""),
            (gate_plan(2, 2, True, ep=2, expert_tp=1, zero=3, recompute="operators"), ""),
            (gate_plan(1, 2, True, cp=2, ep=4, expert_tp=1, recompute="full"), ""),
            (gate_plan(1, 2, True, accumulation=4, pp=2, ep=2, expert_tp=1, schedule="zb-h1"), ""),
            (gate_plan(1, 4, True, ep=2, expert_tp=1), "adapters int4-g4"),
        ]
    if ranks == 8:
        return [
            (gate_plan(8, ep=4, zero=3), ""),
            (gate_plan(4, 2, True, 2, ep=2, zero=1, recompute="full"), ""),
            (gate_plan(2, 2, accumulation=4, pp=2, ep=2), ""),
            (gate_plan(2, 2, True, ep=2, zero=1, cp=2), ""),
            (gate_plan(4, ep=4, zero=2, zero_group=2, cp=2), ""),
            (gate_plan(2, 2, ep=4, cp=2, recompute="operators"), ""),
            (gate_plan(2, 2, True, ep=8, expert_tp=1, zero=2, cp=2), ""),
            (gate_plan(2, 4, True, ep=4, expert_tp=1, zero=1, offload="optimizer"), ""),
        ]
    return []


def cases(ranks: int, models: Sequence[str] = (), precision: str = "fp64") -> list[Case]:
    """All layouts of 1, 2, 4, … up to `ranks` ranks for each model, and each pipeline for one of them."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    for name in models:
        if name not in MODELS:
            raise unknown("model of the gate", name, MODELS)
    if ranks < 1 or ranks & (ranks - 1) or ranks > 8:
        raise UsageError(f"{ranks} ranks: the gate's models have 8 heads; give 1, 2, 4 or 8")
    counts = [n for n in (8, 4, 2, 1) if n <= ranks]
    chosen = list(models or MODELS)
    names = [name for name in chosen if name != OF_EXPERTS[1]]
    every = [Case(name, layout) for n in counts for layout in layouts(n) for name in names]
    # A pipeline has the same parts in it whatever the model: each schedule meets them all as ranks and models go round.
    piped = [layout for n in counts for layout in pipelines(n)]
    for name in OF_EXPERTS:
        if name in chosen:
            pairs = [pair for n in counts for pair in spread_experts(n)[:: 1 + (name != "spread")]]
            every += [case for case in (Case(name, *pair) for pair in pairs) if case.why_not is None]
    every += [Case(names[place % len(names)], layout) for place, layout in enumerate(piped if names else ())]
    every += [case for n in counts for case in shared_sequences(n) if case.model in names]
    if precision != "fp64":
        return in_precision(every, precision)
    # Not in others: a sum's rounding now and then makes a weight another code.
    small = enumerate(pair for n in counts for pair in compressed(n))
    return every + [Case(name, *pair) for at, pair in small for name in _next_that_takes(*pair, names, at)[:1]]


def _next_that_takes(layout: ParallelPlan, below: str, names: Sequence[str], at: int) -> list[str]:
    """The models in turn from this place on, without those whose matrices cannot be cut so.

    In 8 bits ranks of tp would each cast their own part of the gradient of keys, values or latents that several hold
    (`train/conflicts.py` refuses it); blocks of 4 along latents and shared experts do not divide by more than 2, and
    the latents' own odd widths by no group or fours.
    """

    def takes(config: ModelConfig) -> bool:
        if config.latent_width and ("-g" in below or below == "masked"):
            return False
        shares = bool(config.latent_width) or config.kv_heads < layout.tp
        return not (layout.tp > 1 and shares and "fp8" in below) and not (layout.tp > 2 and config.latent_width)

    return [
        name for name in (*names[at % max(1, len(names)) :], *names[: at % max(1, len(names))]) if takes(MODELS[name])
    ]


def in_precision(cases: Sequence[Case], precision: str) -> list[Case]:
    chosen: Any = precision  # a plan refuses what is none
    return [replace(case, layout=replace(case.layout, precision=chosen)) for case in cases]


_MATRICES_CUT = (
    ("gpt", gate_plan(1, 2)),
    ("llama", gate_plan(1, 2, True, 2)),
    ("llama", gate_plan(2, accumulation=2, zero=1)),
    ("gpt", gate_plan(2, accumulation=2, zero=2)),
    ("gemma", gate_plan(2, zero=3)),
    ("query", gate_plan(1, 4)),  # KV heads that several ranks hold
    ("query", gate_plan(2, 2, zero=1)),
    ("llama", gate_plan(2, 2, True, 2, zero=3)),
    ("gpt", gate_plan(4, zero=2, zero_group=2)),
    ("neox", gate_plan(1, 2, pp=2, accumulation=4)),
    ("spread", gate_plan(2, ep=2, zero=2)),
    ("spread", gate_plan(2, 2, ep=2, zero=1)),
    ("spread", gate_plan(2, ep=2, zero=2, cp=2)),
    ("spread", gate_plan(2, 2, True, ep=2, expert_tp=1, zero=1)),
)


def numerics(ranks: int, models: Sequence[str] = ()) -> list[Case]:
    """What is no matter of layout: each optimizer, a scaled loss, 16-bit weights beside float32 ones, and the papers.

    Lion steps by signs and is compared where no gradient is 0 but for rounding; Muon wherever matrices are cut.
    """
    if ranks == 1:
        plans = [gate_plan(accumulation=2)]
        steps = dict.fromkeys(OPTIMIZERS, plans[0])
    else:
        split, piped = gate_plan(2, accumulation=2), gate_plan(pp=2, accumulation=4, schedule="zb-h1")
        zero, cut = gate_plan(2, accumulation=2, zero=2), gate_plan(1, 2, True, 2)
        steps = {"adamw": zero, "sgd": cut, "lion": piped, "muon": split}
        plans = [split, piped, zero, cut]
    every = [Case("llama", plan, optimizer=name) for name, plan in steps.items()]
    every += [Case(name, plan, optimizer="muon") for name, plan in _MATRICES_CUT if plan.world <= ranks]
    every += [Case("gpt", plan, scale=LOSS_SCALE) for plan in plans]
    every += in_precision([Case("llama", plan, optimizer="sgd") for plan in plans], "bf16-master")
    chosen = [case for case in every if case.model in (models or MODELS)]
    return chosen if models else chosen + [Case(name, gate_plan(), by_papers=True) for name in PAPERS]
