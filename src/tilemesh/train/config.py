"""Everything a training run is, as one frozen value: what the run folder keeps and a resumed run starts from.

The one idea: nothing decides a run's numbers but this value and the data. `settled` fills in what follows from
something else (how the batch is cut for a mesh, the context), so that what is written down is what is done. No torch
here: the command line reads this file on the way to `--help`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tilemesh.core import config
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.data.config import DataConfig
from tilemesh.model.config import PRESETS as MODELS
from tilemesh.model.config import ModelConfig
from tilemesh.model.families import read_config
from tilemesh.runs import folder as folders
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.names import CONFIG

DEFAULT_PRESET = "default"


NO_GRAPH = (
    "train.graph=true is for one GPU alone, with a fused optimiser and any precision but fp16: set train.graph=false, "
    "or leave it out"
)


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights move. The rate warms up in a line, then follows half a cosine down to `lr_end`."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    lr_end: float = 0.1
    """The last rate, as a fraction of `lr`."""
    warmup: int = 10
    """Steps until the full rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    momentum: float = 0.9
    """Of sgd."""
    weight_decay: float = 0.1
    """On matrices alone: biases and norms have none."""
    clip: float = 1.0
    """Largest norm of the whole model's gradient; 0 leaves it as it is."""
    fused: bool | None = None
    """One kernel for all weights, where torch has one; none decides by device."""


@dataclass(frozen=True)
class LoopConfig:
    """How long, how much at a time, and how strictly."""

    steps: int = 100
    batch: int = 0
    """Sequences in a step over all ranks; 0: what the plan says."""
    context: int = 0
    """Tokens in a sequence; 0: the model's."""
    seed: int = 0
    deterministic: bool = False
    """On a GPU only operations that give the same bits each time (a CPU always does)."""
    compile: bool = False
    """Through torch.compile."""
    graph: bool | None = None
    """On one GPU alone, a step as one CUDA graph, which Python launches at once; none: wherever that can be done and
    leaves memory for held-out text."""
    kernels: Literal["auto", "tilemesh", "torch"] = "auto"
    """Who computes a projection with its activation; auto: tilemesh's kernel on a GPU, torch on a CPU (which has no
    kernel of ours) and under torch.compile (which fuses torch's own)."""
    recompute_every: int | Literal["sqrt"] | None = None
    """Keep activations only before every K-th layer and compute the rest again; sqrt: K = sqrt(layers)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: float = 60.0
    """How long a rank may wait for another before the watchdog ends the job."""
    trace_steps: int = 20
    """Steps that are recorded span by span, the first ones of each attempt; 0 records none."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 50
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 3
    """How many of the newest stay."""
    background: bool = True
    """Write from a snapshot while training goes on."""


@dataclass(frozen=True)
class EvaluateConfig:
    every: int = 50
    """Steps between looks at held-out text; 0: only at the end."""
    sequences: int = 32
    """Held-out sequences looked at each time, the same ones."""


@dataclass(frozen=True)
class SampleConfig:
    """The text a finished run shows."""

    prompt: str = "def "
    tokens: int = 160
    temperature: float = 0.7


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    plan: ParallelPlan = field(default_factory=lambda: ParallelPlan(precision="fp32"))
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    @property
    def context(self) -> int:
        """Tokens in a sequence."""
        return self.train.context or self.model.context

    @property
    def batch(self) -> int:
        """Sequences in a step."""
        return self.train.batch or self.plan.batch

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    def kernels_on(self, device: str) -> str:
        """Whose projections on this kind of device: tilemesh's or torch's."""
        if self.train.kernels == "auto":
            return "tilemesh" if device == "cuda" and not self.train.compile else "torch"
        return self.train.kernels

    @property
    def may_replay(self) -> bool:
        """Whether steps may become a CUDA graph, given one GPU alone."""
        able = self.plan.world == 1 and self.plan.precision != "fp16" and self.optimizer.fused is not False
        return able and self.train.device != "cpu" and self.train.graph is not False

    @property
    def segment(self) -> int:
        """Layers that are recomputed together; 0: none are."""
        every = self.train.recompute_every
        if every == "sqrt":
            return max(1, round(math.sqrt(self.model.layers)))
        return every or (1 if self.plan.recompute == "full" else 0)

    def to_toml(self) -> str:
        return config.dump_toml(self)


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


# ---- building --------------------------------------------------------------------------------------------------


def load(
    name: str | None = None,
    *,
    sets: Sequence[str] = (),
    mesh: str | None = None,
    plan: str | Path | None = None,
    ranks: int | None = None,
    gpus: int = 0,
    init: str | Path | None = None,
) -> TrainConfig:
    """The run that a preset's name or a TOML file describes, with settings over it and its batch cut for the mesh.

    `mesh`: "dp=2,tp=2". `plan`: a file of `tilemesh plan --save`; it also says the batch, and `sets` go over it.
    `ranks`: how many there are, where neither says so. `gpus`: how many this machine has; without a word on the mesh
    there is one rank a GPU.
    `init`: a Hugging Face folder to begin from; where nothing else says what the model is, it is that one's.
    """
    is_default = name is None
    name = name or DEFAULT_PRESET
    if name.endswith(".toml"):
        made = config.load(TrainConfig, file=name, sets=sets)
        if made.train.batch and not _says(name, sets, "plan", "microbatch"):
            # Nobody asked for small pieces: a replica takes its rows at once. `settled` cuts this to what they are.
            made = replace(made, plan=dataclasses.replace(made.plan, microbatch=made.train.batch, accumulation=1))
    else:
        if name in MODELS and name not in PRESETS:
            raise UsageError(
                f"training has no preset for the model '{name}', which only the planner knows: known are "
                f"{', '.join(PRESETS)}; for another model write a TOML file with a [model] section"
            )
        made = config.load(TrainConfig, preset=name, presets=PRESETS, sets=sets)
    pairs = config.split_sets(sets)
    told = {key for key, _ in pairs}
    check_init(init)
    if init is not None and is_default and not any(key.startswith("model.") for key in told):
        made = _of_folder(made, Path(init), told)
    if plan is not None:
        if mesh is not None:
            raise UsageError("--mesh and --plan both say how ranks are laid out: give one of them")
        over = [f"{key.removeprefix('plan.')}={text}" for key, text in pairs if key.startswith("plan.")]
        laid = config.load(ParallelPlan, file=plan, sets=over)
        batch = made.train.batch if "train.batch" in told else laid.batch
        made = replace(made, plan=laid, train=dataclasses.replace(made.train, batch=batch))
    elif mesh is not None:
        made = replace(made, plan=_meshed(made.plan, mesh))
    elif ranks is not None or (gpus and not any(key.startswith("plan.") for key in told)):
        made = replace(made, plan=_default_mesh(made.plan, ranks or gpus, gpus, told))
    if ranks is not None and ranks != made.plan.world:
        raise UsageError(f"--ranks {ranks} and a mesh of {made.plan.world} ({made.plan.describe()}): make them agree")
    return settled(made)


def settled(made: TrainConfig) -> TrainConfig:
    """The same run with nothing left open: batch, context and the plan's microbatches agree, or it is refused."""
    plan, batch = made.plan, made.batch
    if batch % plan.dp:
        raise UsageError(
            f"train.batch {batch} does not divide among dp={plan.dp} replicas: set a multiple of {plan.dp}"
        )
    rows = batch // plan.dp
    if plan.microbatch * plan.accumulation != rows:
        # As large as the plan allows and the rows divide into: a mesh of other size then changes the cut alone.
        micro = max(size for size in range(1, min(plan.microbatch, rows) + 1) if rows % size == 0)
        plan = dataclasses.replace(plan, microbatch=micro, accumulation=rows // micro)
    loop = dataclasses.replace(made.train, batch=batch, context=made.context)
    result = replace(made, plan=plan, train=loop)
    _check(result)
    return result


def replace(made: TrainConfig, **sections: Any) -> TrainConfig:
    """A copy with some sections changed."""
    return dataclasses.replace(made, **sections)


def unlike(there: ModelConfig, here: ModelConfig) -> list[str]:
    """What keeps the weights of one model from being the other's, in words: all but dropout and context."""
    ours = config.to_dict(here)
    return [
        f"{name} is {value} there and {ours[name]} here"
        for name, value in config.to_dict(there).items()
        if value != ours[name] and name not in ("dropout", "context")
    ]


def check_resumed(before: TrainConfig, made: TrainConfig) -> None:
    """Refuse to go on with a run as what its checkpoints are not: another model, or an optimiser's other memory."""
    different = [f"model.{words}" for words in unlike(before.model, made.model)]
    if before.optimizer.name != made.optimizer.name:
        different.append(f"optimizer.name is {before.optimizer.name} there and {made.optimizer.name} here")
    if different:
        told = "; ".join(different)
        raise UsageError(f"a run goes on with its own weights: {told}; leave that out, or begin a new run")


def of_run(folder: str | Path) -> TrainConfig:
    """What the run in a folder is, as it was written down."""
    return from_toml(*folders.read_config(folder, TRAIN))


def from_toml(text: str, source: str = CONFIG) -> TrainConfig:
    return config.from_dict(TrainConfig, config.parse_toml(text, source), source)


def _says(file: str, sets: Sequence[str], section: str, key: str) -> bool:
    """Whether a TOML file or a setting over it names this key."""
    told = config.parse_toml(Path(file).read_text(encoding="utf-8"), file).get(section, {})
    return key in told or any(name == f"{section}.{key}" for name, _ in config.split_sets(sets))


def _of_folder(made: TrainConfig, folder: Path, told: set[str]) -> TrainConfig:
    """The run with the model of a Hugging Face folder, and its tokenizer where it has one and none was named."""
    made = replace(made, model=read_config(folder))
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file() and "data.tokenizer" not in told:
        made = replace(made, data=dataclasses.replace(made.data, tokenizer=tokenizer))
    return made


def _meshed(plan: ParallelPlan, mesh: str) -> ParallelPlan:
    """The plan with axes from "dp=2,tp=2"; what is not named is 1."""
    axes: dict[str, Any] = {"dp": 1, "tp": 1, "pp": 1}
    for key, text in config.split_sets([mesh]):
        if key not in axes or not text.isdigit() or int(text) < 1:
            raise UsageError(f"--mesh {mesh}: expected axes and sizes, such as dp=2,tp=2 (known are dp, tp, pp)")
        axes[key] = int(text)
    sequence = plan.sequence_parallel and axes["tp"] > 1
    return dataclasses.replace(plan, **axes, sequence_parallel=sequence)


def _default_mesh(plan: ParallelPlan, ranks: int, gpus: int, told: set[str]) -> ParallelPlan:
    """So many ranks without a word on their mesh: one a GPU as replicas, else the plan's tp where it divides them."""
    tp = 1 if gpus and "plan.tp" not in told else math.gcd(plan.tp, ranks)
    changes: dict[str, Any] = {
        "tp": tp,
        "dp": ranks // tp,
        "pp": 1,
        "sequence_parallel": plan.sequence_parallel and tp > 1,
    }
    if gpus and "plan.precision" not in told:
        changes["precision"] = "bf16" if plan.precision == "fp32" else plan.precision
    return dataclasses.replace(plan, **changes)


def _check(made: TrainConfig) -> None:
    loop = made.train
    if made.plan.zero:
        raise UsageError(
            f"plan.zero is {made.plan.zero}: optimiser states are whole in each replica; set plan.zero=0, or make the "
            "plan with `tilemesh plan … --fix zero=0`"
        )
    if made.plan.pp > 1:
        raise UsageError(f"plan.pp is {made.plan.pp}: training has no pipeline; set plan.pp=1, or plan with --fix pp=1")
    if loop.graph and not made.may_replay:
        raise UsageError(NO_GRAPH)
    if made.plan.recompute == "selective":
        raise UsageError(
            "plan.recompute is selective: attention here keeps no scores; use none, full or train.recompute_every"
        )
    positive = {"train.steps": loop.steps, "checkpoint.keep": made.checkpoint.keep, "train.batch": loop.batch}
    for name, value in positive.items():
        if value < 1:
            raise UsageError(f"{name} is {value}: expected at least 1")
    counts = {
        "checkpoint.every": made.checkpoint.every, "evaluate.every": made.evaluate.every,
        "optimizer.warmup": made.optimizer.warmup, "train.trace_steps": made.train.trace_steps,
        "evaluate.sequences": made.evaluate.sequences, "sample.tokens": made.sample.tokens,
        "optimizer.clip": made.optimizer.clip, "optimizer.lr": made.optimizer.lr,
    }  # fmt: skip
    for name, number in counts.items():
        if not number >= 0:
            raise UsageError(f"{name} is {number}: expected 0 or more")
    if not 0 <= made.data.held_out < 1:
        raise UsageError(f"data.held_out is {made.data.held_out}: expected a fraction, at least 0 and below 1")
    if not 1 <= made.context <= made.model.context:
        raise UsageError(f"train.context is {made.context}: expected between 1 and model.context, {made.model.context}")
    if isinstance(loop.recompute_every, int) and loop.recompute_every < 0:
        raise UsageError(f"train.recompute_every is {loop.recompute_every}: expected sqrt or 0 and more layers")


def check_init(init: str | Path | None) -> None:
    """Refuse a folder to begin from that holds no Hugging Face model."""
    if init is not None and not (Path(init) / "config.json").is_file():
        raise UsageError(f"--init {init}: no config.json there; expected a folder as `save_pretrained` writes it")
