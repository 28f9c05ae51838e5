"""Everything a training run is, as one frozen value: what the run folder keeps and a resumed run starts from.

The one idea: nothing decides a run's numbers but this value and the data. `load.py` makes one of a preset, a file and
settings; `check.py` says what it may be. No torch here: the command line reads this file on the way to `--help`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from tilemesh.compress.config import CompressConfig, DistillConfig
from tilemesh.core import config
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.ranges import SAMPLED_TOKENS, SEED, TEMPERATURE, TOP_K, TOP_P, Range
from tilemesh.data.config import DataConfig
from tilemesh.model.adapter import LoraConfig
from tilemesh.model.config import PRESETS as MODELS
from tilemesh.model.config import ModelConfig
from tilemesh.model.kernels import COMPILED, OURS, PLAIN, STANDARD, TORCH, ModelKernels
from tilemesh.runs import folder as folders
from tilemesh.runs.kind import MODULE, TRAINED
from tilemesh.runs.names import CONFIG

DEFAULT_PRESET = "default"

Count = Annotated[int, Range(1)]
CountOrNone = Annotated[int, Range(0)]
Fraction = Annotated[float, Range(0, 1, below=True)]
BATCH = Range(1, 2**31 - 1)
"""Sequences in a step: the length of an array; the plan's counts have the same limit."""
BYTES = 256
"""Tokens of text that is read as bytes."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate, which warms up linearly and then follows a schedule."""

    name: Literal["adamw", "sgd", "lion", "muon"] = "adamw"
    """Which optimizer: AdamW (decoupled weight decay), SGD with momentum, Lion (the sign of a mean of gradients; a
    learning rate 3 to 10 times lower than AdamW's is usual), or Muon (orthogonal updates for the matrices of layers,
    AdamW for everything else)."""
    lr: Annotated[float, Range(0)] = 1e-3
    """The learning rate after the warm-up, the largest of the run."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate goes on after the warm-up: half a cosine or a line down to `lr_end`, constant, or constant
    until the last part of the run and then a line down to `lr_end` (wsd: warm-up, stable, decay)."""
    decay: Annotated[float, Range(0, 1)] = 0.2
    """For wsd: the part of all steps in which the learning rate falls."""
    lr_end: Annotated[float, Range(0)] = 0.1
    """The learning rate of the last step, as a fraction of `lr`; not for the constant schedule."""
    warmup: CountOrNone = 10
    """Steps of linear warm-up until the learning rate is `lr`."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """For adamw: how much of the running mean of gradients, and of their squares, is kept per step. For lion: of the
    mean whose sign is the update, and of the mean that is kept; (0.9, 0.99) is usual."""
    epsilon: Annotated[float, Range(0)] = 1e-8
    """For adamw: added to the denominator, the root of the mean square."""
    momentum: Fraction = 0.9
    """For sgd and muon: how much of the previous update is kept; 0.95 is usual for muon, 0 is plain SGD, without
    state."""
    weight_decay: Annotated[float, Range(0)] = 0.1
    """Weight decay of matrices and embedding tables; biases and norms have none."""
    decay_groups: tuple[str, ...] = ()
    """Weight decay of parameters by name, each PATTERN=NUMBER, such as ["token_embedding.*=0", "*.fc_o.weight=0.2"];
    the first pattern that matches a name counts, and weight_decay where none does."""
    clip: Annotated[float, Range(0)] = 1.0
    """Largest norm of the whole model's gradient, which is scaled down to it; 0: gradients are not clipped."""
    balance_rate: Annotated[float, Range(0)] = 1e-3
    """How far a step moves the bias of a router (model.router_bias), whose weight decay, learning rate and schedule are
    none of the others'."""
    fused: bool | None = None
    """Whether one kernel updates all weights, where torch has one; none: decided by the device."""


@dataclass(frozen=True)
class LoopConfig:
    """The training loop: how many steps, how large a batch, on which device."""

    steps: Count = 100
    """Optimizer steps of the run."""
    batch: Annotated[int, BATCH] = 0
    """Sequences per step over all ranks; 0: plan.dp x plan.microbatch x plan.accumulation."""
    context: Annotated[int, Range(1, 1_000_000_000)] = 0
    """Tokens per sequence, at most model.context; 0: model.context."""
    seed: Annotated[int, SEED] = 0
    """Decides the first weights, the order of the data and dropout."""
    deterministic: bool = False
    """On a GPU, only operations that give the same bits each time; on a CPU all of them do."""
    compile: bool | Literal["layers"] = False
    """Whether torch.compile compiles the model; `layers`: one layer, whose code all layers share (with dropout each has
    its own), so that the first step comes sooner. In pipelines, under ZeRO-3 and with activations or weights on the
    host both are `layers`."""
    graph: bool | None = None
    """On a single GPU, whether a step is captured as one CUDA graph and replayed; none: wherever that is possible and
    leaves memory for evaluation."""
    kernels: Literal["auto", "tilemesh", "torch"] = "auto"
    """Whose kernels compute projections with their activations or MLPs without a gate whole, attention, the embedding,
    norms with the addition before them, the loss from the last activations, and on a GPU AdamW's update; auto: on a GPU
    tilemesh's for AdamW and, under torch.compile, for embedding, loss, norms, MLPs without a gate and the attention of
    models without rotary positions, without it for projections; torch for everything else."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: on the GPUs where there are any, else on the CPU."""
    method: Literal["synchronous", "server", "local"] = "synchronous"
    """How replicas keep together: one exchange of gradients per step (synchronous), parameter servers beside them
    (server), or weights that are averaged every few steps (local); the section `method` has the settings."""
    timeout_s: Annotated[float, Range(0, 1e9, above=True)] = 60.0
    """Seconds that a rank may wait for another before the watchdog ends the job. Each rank that waits says so, and for
    whom, after 6 seconds already."""
    max_time_s: Annotated[float, Range(0, 1e9)] = 0.0
    """Seconds after which a run stops with a checkpoint to go on from, counted from each start; 0: no limit.
    `--max-time 2h` sets it."""
    force_balance: bool = False
    """Whether tokens go to experts in turn, whatever routers say: to measure speed without the imbalance of a router
    that is not trained yet. The rows of such a run say so; its loss means little, and is another on ranks that cut
    a sequence or share out tokens otherwise: which token is whose turn is counted by rank."""
    trace_steps: CountOrNone = 20
    """Steps that are traced, the first ones of each start; 0: none."""


@dataclass(frozen=True)
class MethodConfig:
    """How replicas keep together, beyond one exchange of whole gradients per step."""

    servers: Count = 1
    """For train.method=server: ranks that hold parts of the weights, in addition to plan.dp workers."""
    consistency: Literal["bsp", "ssp", "asp"] = "bsp"
    """For train.method=server: whether workers wait for all others in every step (bsp: the numbers of data
    parallelism), for those more than `staleness` steps behind (ssp), or for nobody (asp)."""
    staleness: CountOrNone = 3
    """For ssp: how many steps a worker may be ahead of the slowest."""
    batch: Count = 1
    """For ssp and asp: gradients that a server collects for one update."""
    compress: Literal["none", "top-k", "random-k", "one-bit", "int8", "powersgd"] = "none"
    """For train.method=synchronous: what of the gradients is sent, with error feedback."""
    keep: Annotated[float, Range(0, 1, above=True)] = 0.1
    """For top-k and random-k: the part of the values that is sent."""
    rank: Count = 4
    """For powersgd: the rank of the factors of a matrix."""
    period: Count = 10
    """For train.method=local: steps between two averages of the weights."""
    start: CountOrNone = 0
    """So many steps exchange whole gradients first: for train.method=local (post-local SGD) and for method.compress."""
    outer_lr: Annotated[float, Range(0, above=True)] = 1.0
    """For train.method=local: how far the common weights move towards the average; 0.7 is usual with momentum."""
    outer_momentum: Fraction = 0.0
    """For train.method=local: Nesterov momentum of that movement; 0.9 is DiLoCo's."""
    anneal: CountOrNone = 100
    """For plan.schedule=pipemare: updates until the learning rate is no longer divided by a stage's delay."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the weights and the optimizer's state are saved, and how many checkpoints are kept."""

    every: CountOrNone = 50
    """Steps between checkpoints; 0: only at the end."""
    keep: Count = 3
    """How many of the newest checkpoints are kept."""
    keep_best: bool = False
    """Whether the checkpoint with the lowest held-out loss is kept as well: one is then written after every evaluation
    that is the best so far. `--step best` of generate and export reads it."""
    background: bool = True
    """Whether a checkpoint is written in the background from a copy in memory, while training goes on."""
    fallback_dir: Path | None = None
    """Folder for the last checkpoint, or for the whole run, where it cannot be written into the run's own: a run's
    folder is made there."""
    retry_s: Annotated[float, Range(0, 1e9)] = 60.0
    """Seconds for which a last checkpoint that cannot be written is tried again, so that somebody can make room."""


@dataclass(frozen=True)
class EvaluateConfig:
    """When the loss on held-out text is measured."""

    every: CountOrNone = 50
    """Steps between two evaluations on held-out text; 0: only at the end."""
    sequences: Annotated[int, Range(0, 2**31 - 1)] = 32
    """Held-out sequences that are evaluated each time, always the same ones; 0: none."""
    patience: CountOrNone = 0
    """Early stopping: the run ends after so many evaluations in a row without a lower held-out loss, and stays ended
    when it is resumed, unless with a larger number; 0: never."""
    min_improvement: Annotated[float, Range(0)] = 0.0
    """For patience: by how much a held-out loss, in nats per token, has to be lower than the best one to count."""


@dataclass(frozen=True)
class SampleConfig:
    """The text that the trained model writes at the end of a run."""

    prompt: str = ""
    """What the text begins with; empty: `def ` where data.source is `stdlib`, else the first 8 tokens of that text."""
    tokens: Annotated[int, SAMPLED_TOKENS] = 160
    """How many tokens are generated; 0: no text."""
    temperature: Annotated[float, TEMPERATURE] = 0.7
    """Of the sampling: 0 always takes the most likely token, 1 samples from the model's own probabilities."""
    top_k: Annotated[int, TOP_K] = 0
    """Only so many of the most likely tokens are sampled from; 0: all."""
    top_p: Annotated[float, TOP_P] = 1.0
    """Only the most likely tokens that together have this probability are sampled from; 1: all."""


@dataclass(frozen=True)
class LogConfig:
    """Where metrics are written besides the run's own metrics.jsonl, for tools that you already use."""

    tensorboard: bool = False
    """Whether metrics are also written as TensorBoard events into the run's folder (pip install 'tilemesh[log]')."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Whether metrics are also written for Weights & Biases: offline into the run's folder, for `wandb sync` to upload
    later, or online (pip install 'tilemesh[log]')."""
    wandb_project: str = "tilemesh"
    """The Weights & Biases project of the run."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    compress: CompressConfig = field(default_factory=CompressConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    plan: ParallelPlan = field(default_factory=lambda: ParallelPlan(precision="fp32"))
    method: MethodConfig = field(default_factory=MethodConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def context(self) -> int:
        """Tokens in a sequence."""
        return self.train.context or self.model.context

    @property
    def batch(self) -> int:
        """Sequences in a step."""
        return self.train.batch or self.plan.batch

    @property
    def ranks(self) -> int:
        """All that are started: those of the plan, and servers."""
        return self.plan.world + self.servers

    @property
    def servers(self) -> int:
        """Ranks that hold parts of the weights, beside those of the plan."""
        return self.method.servers if self.train.method == "server" else 0

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    def kernels_on(self, device: str) -> ModelKernels:
        """Whose operations the model is made of on this kind of device."""
        if self.train.kernels == "tilemesh":
            return OURS
        if self.train.kernels == "torch" or device != "cuda":
            return PLAIN
        # What profiles of a whole training step on an H200 say (docs/kernels/LOG.md).
        if not self.train.compile:
            return STANDARD
        # Attention of ours saves the copy that joins the gradients of one product for query, key and value.
        joins = self.plan.tp == 1 and self.model.positions != "rotary"
        return dataclasses.replace(COMPILED, attention="auto" if joins else TORCH)

    def optimizer_kernels_on(self, device: str) -> str:
        """Who steps the parameters on this kind of device: "torch", or the implementation of tilemesh's AdamW."""
        return TORCH if self.train.kernels == "torch" or device != "cuda" else "auto"

    def with_base(self, init: str | Path | None) -> TrainConfig:
        """With the folder to begin from as what adapters are added to, where there are adapters."""
        if init is None or not self.lora.rank:
            return self
        return self.changed(lora={"base": Path(init).resolve()})

    def changed(self, **sections: Mapping[str, Any]) -> TrainConfig:
        """With other values in some sections, as `config.changed(plan={"dp": 2})`."""
        values = {name: dataclasses.replace(getattr(self, name), **changes) for name, changes in sections.items()}
        return dataclasses.replace(self, **values)

    def to_toml(self) -> str:
        return config.dump_toml(self)

    trains_module: ClassVar[bool] = False
    """Whether what is trained is a module of the user's, on what its own function gives."""


@dataclass(frozen=True)
class ModuleConfig:
    """What is trained where that is a module of yours, and where its tensors lie."""

    program: str = ""
    """FILE.py:FUNCTION. The function returns a module whose result is the loss, or has it as `.loss`; what it is called
    with, a list or a dict of tensors, or a function that makes these from a step's number; and perhaps a list of such
    to evaluate on."""
    pins: tuple[str, ...] = ()
    """Where tensors lie, such as ["x=dp:S0", "*.up.weight=tp:S0"]; the rest follows."""
    choose: str | None = None
    """Who places what is not pinned: ilp, dp, mcmc, greedy, learned or random; none: it follows from the pins."""


@dataclass(frozen=True)
class ModuleRun(TrainConfig):
    """A run that trains any module of torch, placed on the plan's dp, tp and pp. Sections of text and of Transformers
    say nothing in it: they are neither written down nor taken."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(1, 1, 1, 256, 1))
    train: LoopConfig = field(default_factory=lambda: LoopConfig(batch=1, context=1))
    module: ModuleConfig = field(default_factory=ModuleConfig)

    trains_module: ClassVar[bool] = True
    USED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "module": (),
        "train": ("steps", "seed", "deterministic", "device", "timeout_s", "max_time_s", "trace_steps"),
        "optimizer": (),
        "plan": ("dp", "tp", "pp", "accumulation", "schedule", "interleave"),
        "checkpoint": (),
        "evaluate": ("every", "patience", "min_improvement"),
        "log": (),
    }
    """Sections that count, and their keys, where not all of them do."""

    @property
    def unused(self) -> list[str]:
        """Keys that were set and say nothing here."""
        usual, keys = config.to_dict(ModuleRun()), []
        for section, values in config.to_dict(self).items():
            counted = self.USED.get(section, ("",))
            keys += [
                f"{section}.{key}"
                for key, value in values.items()
                if counted and key not in counted and value != usual[section][key]
            ]
        return keys

    def to_toml(self) -> str:
        sections: list[str] = []
        for part in config.dump_toml(self).split("\n\n"):
            head, *lines = part.splitlines()
            counted = self.USED.get(head.strip("[]"))
            if counted is not None:
                kept = [line for line in lines if not counted or line.partition(" =")[0] in counted]
                sections.append("\n".join([head, *kept]))
        return "\n\n".join(sections) + "\n"


# ---- presets ---------------------------------------------------------------------------------------------------

# Plain dicts, so that what a model's preset leaves open still follows what is set over it.
# Four ranks on two cores in a bit more than a minute: small enough to learn something in that time.
_SMALL: Mapping[str, Any] = {
    "model": {**MODELS["tiny"]},
    "train": {"steps": 120, "batch": 16},
    "optimizer": {"lr": 4e-3, "warmup": 10},
    "plan": {"dp": 2, "tp": 2, "microbatch": 8, "precision": "fp32"},
    "evaluate": {"every": 40, "sequences": 16},
    "checkpoint": {"every": 40},
    "data": {"held_out": 0.02},
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Every model that the planner knows; those below have settings of their own.
    **{
        name: {
            "model": {**model},
            "train": {"steps": 1000, "batch": 64, "compile": not model.get("experts")},
            "optimizer": {"lr": 3e-4, "warmup": 100},
            "plan": {"precision": "bf16"},
        }
        for name, model in MODELS.items()
    },
    DEFAULT_PRESET: _SMALL,
    "tiny": _SMALL,  # by its model's name, as the planner knows it
    "gpt2-124m": {
        "model": {**MODELS["gpt2-124m"], "dropout": 0.0},
        "train": {"steps": 1000, "batch": 32, "compile": True},
        "optimizer": {"lr": 6e-4, "warmup": 100},
        "plan": {"microbatch": 32, "precision": "bf16"},
    },
    "tinyllama-1.1b": {
        "model": {**MODELS["tinyllama-1.1b"]},
        "train": {"steps": 1000, "batch": 8, "compile": True},
        "optimizer": {"lr": 4e-4, "warmup": 100},
        "plan": {"microbatch": 8, "precision": "bf16"},
    },
}


# ---- as text ---------------------------------------------------------------------------------------------------


def of_run(folder: str | Path) -> TrainConfig:
    """What the run in a folder is, as it was written down."""
    return from_toml(*folders.read_config(folder, *TRAINED, MODULE))


def from_toml(text: str, source: str = CONFIG) -> TrainConfig:
    values = config.parse_toml(text, source)
    return config.from_dict(ModuleRun if "module" in values else TrainConfig, values, source)
