"""What the gate compares: small models that have everything, the layouts of n ranks, and the bounds. Plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.plan import ParallelPlan, Precision, Recompute
from tilemesh.core.shard import share
from tilemesh.core.step.book import find, synchronous
from tilemesh.model.config import ModelConfig

STEPS = 3
ROWS = 18  # a step's batch: no replica count divides it, so replicas hold unequal numbers of rows
TOKENS = 10  # not divisible by 4 or 8: sequence shards are uneven
MAX_NORM = 0.5  # below the gradients' norms, so that clipping is part of what is compared
RATE = 0.2
MOMENTUM = 0.9
SETTINGS: dict[str, Any] = {"betas": (0.9, 0.95), "epsilon": 1e-6, "weight_decay": 0.1, "momentum": 0.9}
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
# queries and keys, windows, parts of heads that are rotated, and attention and MLP added at once.
MODELS: Mapping[str, ModelConfig] = {
    "gpt": ModelConfig(**_SMALL, vocabulary=61),
    "llama": ModelConfig(**_SMALL, **_ROTARY, vocabulary=64, kv_heads=2, activation="swiglu", biases=False),
    "post": ModelConfig(**_SMALL, vocabulary=37, kv_heads=4, norm_place="post", activation="relu"),
    "query": ModelConfig(**_SMALL, **_ROTARY, vocabulary=50, kv_heads=1, norm_place="post"),
    "gemma": ModelConfig(
        **_SMALL, **_ROTARY, vocabulary=64, kv_heads=2, activation="geglu", biases="qkv", head_width=6, qk_norm="head",
        norm_place="sandwich", norm_offset=True, scaled_embedding=True, window=4, full_layers=(1,), score_width=5,
        rotary_local_base=100.0,
    ),
    "neox": ModelConfig(
        **_SMALL, vocabulary=53, positions="rotary", rotary_fraction=0.5, parallel_residual=True, biases="mlp",
        activation="gelu-erf",
    ),
}  # fmt: skip


_PLAIN: dict[str, Any] = {"layers": 2, "width": 16, "heads": 4, "mlp_width": 24, "context": 12, "vocabulary": 31}
_LLAMA: dict[str, Any] = {**_PLAIN, **_ROTARY, "kv_heads": 2, "activation": "swiglu", "biases": False}
_WAVES: dict[str, Any] = {"rotary_base": 100.0, "rotary_factor": 8.0, "rotary_trained": 64}

# What one process is compared with the papers in: every family, and every value of every setting. The rotary waves are
# shorter, in between and longer than the context that llama3 scales by.
PAPERS: Mapping[str, ModelConfig] = {
    "gpt2": ModelConfig(**_PLAIN, family="gpt2"),
    "llama": ModelConfig(**_LLAMA, family="llama"),
    "llama3": ModelConfig(**{**_LLAMA, "heads": 2, "biases": "attention", "rotary_scaling": "llama3"}, **_WAVES),
    "mistral": ModelConfig(**_LLAMA, window=3, head_width=8, family="mistral"),
    "qwen2": ModelConfig(**{**_LLAMA, "biases": "qkv", "tied": True}, rotary_scaling="linear", rotary_factor=4.0),
    "qwen3": ModelConfig(**_LLAMA, qk_norm="head", head_width=6, family="qwen3"),
    "gemma3_text": ModelConfig(
        **{**_LLAMA, "activation": "geglu", "tied": True}, qk_norm="head", norm_place="sandwich", norm_offset=True,
        scaled_embedding=True, window=4, full_layers=(1,), score_width=5, rotary_local_base=50.0,
        rotary_scaling="linear", rotary_factor=8.0, family="gemma3_text",
    ),
    "phi3": ModelConfig(**{**_LLAMA, "heads": 2}, rotary_fraction=0.5, window=5, family="phi3"),
    "gpt_neox": ModelConfig(
        **_PLAIN, positions="rotary", rotary_fraction=0.5, parallel_residual=True, tied=False, activation="gelu-erf",
        family="gpt_neox",
    ),
    "olmo2": ModelConfig(**_LLAMA, norm_place="branch", qk_norm="full", norm_epsilon=1e-3, family="olmo2"),
    "neox": ModelConfig(**_PLAIN, positions="rotary", biases="mlp", activation="relu", family="gpt_neox"),
    "post": ModelConfig(**{**_PLAIN, "kv_heads": 1}, norm_place="post", scaled_embedding=True, qk_norm="full"),
}  # fmt: skip


def rate_of(optimizer: str) -> float:
    """What the gate has an optimizer step by."""
    return OPTIMIZERS.get(optimizer, RATE)


@dataclass(frozen=True)
class GateLayout:
    dp: int = 1
    tp: int = 1
    sequence: bool = False
    accumulation: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    zero_group: int = 0
    prefetch: int = 1
    recompute: Recompute = "none"
    recompute_every: int | Literal["sqrt"] = 1
    offload: str = ""

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def axes(self) -> tuple[int, int, int]:
        return self.dp, self.tp, self.pp

    def __str__(self) -> str:
        more = " sequence" * self.sequence + f" ×{self.accumulation}" * (self.accumulation > 1)
        if self.zero:
            more += f" ZeRO-{self.zero}" + f" by {self.zero_group}" * (self.zero_group > 0)
            more += f" {self.prefetch} ahead" * (self.zero == 3 and self.prefetch != 1)
        if self.recompute != "none":
            kept = " but operators" * (self.recompute == "operators")
            more += " again" + kept + f" every {self.recompute_every}" * (self.recompute_every != 1)
        if self.offload:
            more += " offload " + "+".join(what[0] for what in self.offload.split("+"))
        stages = f" pp={self.pp} {self.schedule}" if self.pp > 1 else ""
        return f"dp={self.dp} tp={self.tp}{stages}{more}"

    def plan(self, precision: Precision) -> ParallelPlan:
        return ParallelPlan(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            schedule=self.schedule,
            interleave=min(find(self.schedule).interleaves, default=1),
            slices=3 if find(self.schedule).cuts_sequences else 1,
            sequence_parallel=self.sequence,
            accumulation=self.accumulation,
            zero=self.zero,
            zero_group=self.zero_group,
            prefetch=self.prefetch,
            recompute=self.recompute,
            recompute_every=self.recompute_every,
            offload=self.offload,
            precision=precision,
        )


@dataclass(frozen=True)
class Case:
    model: str
    layout: GateLayout
    precision: Precision = "fp64"
    weights: str = ""
    """How the layers' matrices are compressed: by a scheme's name (int4-g4); "rounded" before it: in every pass, while
    they are trained in full."""
    optimizer: str = ""
    """Of those that the gate was given; "": its own."""
    scale: float = 1.0
    """Of the loss, taken out of the gradients again."""
    by_papers: bool = False
    """Compared with `papers.py` instead of one process of the same model; dropout has masks of its own and is left
    out."""

    def __str__(self) -> str:
        scaled = f"loss × {self.scale:g}" if self.scale != 1 else ""
        narrow = self.precision if self.precision not in PRECISIONS else ""
        papers = "by the papers" if self.by_papers else ""
        return " ".join(filter(None, (str(self.layout), self.weights, narrow, self.optimizer, scaled, papers)))

    @property
    def config(self) -> ModelConfig:
        """The model; for a pipeline with one layer more than it has chunks, so that its stages are uneven, and with
        five where layers are gathered, moved or computed again in stretches."""
        if self.by_papers:
            return PAPERS[self.model]
        config, plan = MODELS[self.model], self.layout.plan(self.precision)
        if plan.pp > 1:
            return config.replace(layers=plan.chunks + 1)
        return config.replace(layers=5) if plan.has_chunks or plan.recompute_every != 1 else config


def microbatches(layout: GateLayout, dp_index: int) -> list[tuple[int, int]]:
    """(first row, rows) of each microbatch of a replica: contiguous, of sizes that differ by at most one."""
    first, count = share(ROWS, layout.dp, dp_index)
    turns = (share(count, layout.accumulation, turn) for turn in range(layout.accumulation))
    return [(first + row, rows) for row, rows in turns]


def layouts(ranks: int) -> list[GateLayout]:
    """Every dp × tp of so many ranks, with and without sequence parallelism, in one microbatch and in two."""
    every = []
    for tp in (n for n in range(1, ranks + 1) if ranks % n == 0):
        for sequence in (False, True) if tp > 1 else (False,):
            every += [GateLayout(ranks // tp, tp, sequence, accumulation) for accumulation in (1, 2)]
    return every


def pipelines(ranks: int) -> list[GateLayout]:
    """Every schedule on two stages, with what is left of so many ranks shared in turn between dp and tp, and some on
    more. Each of dp, tp, sequence parallelism meets every family of schedules as the number of ranks grows."""
    every = []
    for place, schedule in enumerate(map(find, synchronous())):
        if ranks < 2:
            continue
        rest = ranks // 2
        tp = 1 if rest == 1 else (rest, 1, 2)[place % 3]
        sequence = tp > 1 and place % 2 == 0 and not schedule.cuts_sequences
        every.append(GateLayout(rest // tp, tp, sequence, schedule.microbatches_from(2, 4), 2, schedule.name))
    if ranks >= 4:
        deep = ("1f1b", "zb-h2", "interleaved", "zb-v", "dualpipe")
        every += [GateLayout(ranks // 4, 1, False, 8, 4, schedule) for schedule in deep]
    return every


def compressed(ranks: int) -> list[tuple[GateLayout, str]]:
    """Layouts for matrices of other kinds: replicas, cut matrices, stages, gathered weights, recomputation."""
    if ranks == 1:
        return [(GateLayout(recompute="full"), "int3-g4-affine"), (GateLayout(), "masked")]
    if ranks == 2:
        return [
            (GateLayout(2), "rounded int4-g4"),
            (GateLayout(1, 2, recompute="full"), "rounded int8"),
            (GateLayout(1, 2, True, 2), "rounded int4-tensor"),
            (GateLayout(1, 2), "int4-g4"),
            (GateLayout(2, zero=1), "rounded int2-g8-affine"),
            (GateLayout(2, zero=3), "rounded int4-g4"),
            (GateLayout(2, offload="weights", zero=2, prefetch=0), "masked"),
            (GateLayout(2, offload="activations"), "adapters int4-g4"),
            (GateLayout(accumulation=4, pp=2, schedule="1f1b"), "rounded int8"),
            (GateLayout(accumulation=4, pp=2, schedule="zb-h1"), "masked"),
            (GateLayout(2, zero=1), "adapters"),
            (GateLayout(2, zero=3), "adapters"),
            (GateLayout(1, 2), "adapters"),
            (GateLayout(1, 2, True, 2), "adapters int4-g4"),
            (GateLayout(accumulation=4, pp=2, schedule="1f1b"), "adapters int8"),
            (GateLayout(accumulation=4, pp=2, schedule="zb-v"), "adapters"),
        ]
    return [
        (GateLayout(ranks // 2, 2, recompute="full"), "int8"),
        (GateLayout(1, ranks), "rounded int3"),
        (GateLayout(ranks // 4, 2, False, 4, 2, "1f1b"), "adapters"),
    ]


def cases(ranks: int, models: Sequence[str] = (), precision: str = "fp64") -> list[Case]:
    """All layouts of 1, 2, 4, … up to `ranks` ranks for each model, and each pipeline for one of them."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    for name in models:
        if name not in MODELS:
            raise unknown("model of the gate", name, MODELS)
    if ranks < 1 or ranks & (ranks - 1) or ranks > 8:
        raise UsageError(f"{ranks} ranks: the gate's models have 8 heads; give 1, 2, 4 or 8")
    chosen = next(name for name in PRECISIONS if name == precision)
    counts = [n for n in (8, 4, 2, 1) if n <= ranks]
    names = list(models or MODELS)
    every = [Case(name, layout, chosen) for n in counts for layout in layouts(n) for name in names]
    # A pipeline has the same parts in it whatever the model: each schedule meets them all as ranks and models go round.
    piped = [layout for n in counts for layout in pipelines(n)]
    every += [Case(names[place % len(names)], layout, chosen) for place, layout in enumerate(piped)]
    if precision == "fp64":  # in others a sum's rounding now and then makes a weight another code
        small = [pair for n in counts for pair in compressed(n)]
        every += [Case(names[place % len(names)], *pair[:1], chosen, pair[1]) for place, pair in enumerate(small)]
    return every


_MATRICES_CUT = (
    ("gpt", GateLayout(1, 2)),
    ("llama", GateLayout(1, 2, True, 2)),
    ("llama", GateLayout(2, accumulation=2, zero=1)),
    ("gpt", GateLayout(2, accumulation=2, zero=2)),
    ("gemma", GateLayout(2, zero=3)),
    ("query", GateLayout(1, 4)),  # KV heads that several ranks hold
    ("query", GateLayout(2, 2, zero=1)),
    ("llama", GateLayout(2, 2, True, 2, zero=3)),
    ("gpt", GateLayout(4, zero=2, zero_group=2)),
    ("neox", GateLayout(1, 2, pp=2, accumulation=4)),
)


def numerics(ranks: int, models: Sequence[str] = ()) -> list[Case]:
    """What is no matter of layout: each optimizer, a scaled loss, 16-bit weights beside float32 ones, and the papers.

    Lion steps by signs and is compared where no gradient is 0 but for rounding; Muon wherever matrices are cut.
    """
    if ranks == 1:
        steps = dict.fromkeys(OPTIMIZERS, GateLayout(accumulation=2))
        scaled, narrow = [GateLayout(accumulation=2)], [GateLayout(accumulation=2)]
    else:
        split, piped = GateLayout(2, accumulation=2), GateLayout(pp=2, accumulation=4, schedule="zb-h1")
        zero, cut = GateLayout(2, accumulation=2, zero=2), GateLayout(1, 2, True, 2)
        steps = {"adamw": zero, "sgd": cut, "lion": piped, "muon": split}
        scaled, narrow = [split, piped, zero, cut], [split, piped, zero, cut]
    every = [Case("llama", layout, optimizer=name) for name, layout in steps.items()]
    every += [Case(name, layout, optimizer="muon") for name, layout in _MATRICES_CUT if layout.ranks <= ranks]
    every += [Case("gpt", layout, scale=LOSS_SCALE) for layout in scaled]
    every += [Case("llama", layout, "bf16-master", optimizer="sgd") for layout in narrow]
    chosen = [case for case in every if case.model in (models or MODELS)]
    return chosen if models else chosen + [Case(name, GateLayout(), by_papers=True) for name in PAPERS]
