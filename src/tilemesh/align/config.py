"""What a run that learns from feedback is: a training configuration, and beside it what is asked, paid and lowered.

The one idea: a run of kind `align` is a training run with one more file, `align.toml`. Whatever reads, serves, exports
or resumes a training run does so here too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tilemesh.align.formulas.algorithms import ALGORITHMS, PREFERENCES, Algorithm, PreferenceAlgorithm
from tilemesh.align.tasks import TASKS
from tilemesh.core import config as core_config
from tilemesh.core.conflicts import OR, Conflict, refuse, row
from tilemesh.core.errors import Argument, UsageError, unknown
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.plan_file import ALIGN as ALIGN_PLAN
from tilemesh.core.plan_file import read_plan
from tilemesh.core.ranges import TEMPERATURE, Range
from tilemesh.data.config import DataConfig
from tilemesh.model.config import check_planned
from tilemesh.model.families.book import CONFIG as MODEL_FILE
from tilemesh.model.families.book import read_config
from tilemesh.runs import folder as folders
from tilemesh.runs.files import Unread, read_text
from tilemesh.runs.kind import ALIGN
from tilemesh.runs.names import FEEDBACK
from tilemesh.train.config import EvaluateConfig, LoopConfig, OptimizerConfig, SampleConfig, TrainConfig
from tilemesh.train.config import of_run as training_of_run
from tilemesh.train.load import settled

Count = Annotated[int, Range(1, 2**31 - 1)]
Positive = Annotated[float, Range(0)]
_SECTION = "align."
_MICROBATCH_TOKENS = 1 << 15
"""Of one pass at most, where nobody says how many rows it has."""
_ANSWER_TOKENS = 64
"""Of an answer at most, where nobody says how many."""
_SMALL = 4_000_000
"""Multiplications of a step's largest product, below which oneDNN on arm64 takes longer to begin than BLAS to end."""


@dataclass(frozen=True)
class FeedbackConfig:
    """What is asked, what is paid, and what is lowered. Keys that are none take the value of the algorithm's row."""

    algorithm: str = "grpo"
    """How rewards, or pairs of answers, become a loss: reinforce, reinforce++, rloo, ppo, grpo, dr-grpo, dapo, gspo,
    cispo; dpo, ipo, kto, orpo, simpo of pairs; or reward, which trains a reward model on them."""
    task: str = ""
    """Prompts and their scores: sort, add, sums, bandit, vowels, length or hackable; or FILE.py:FUNCTION, a function of
    prompt, answer and case that gives a number, for the prompts of `prompts_file`."""
    prompts_file: Path | None = None
    """A JSONL file with a prompt (or messages) in each line, and whatever else the function wants to know."""
    environment: str = ""
    """FILE.py:FUNCTION of prompt, turns (all texts after it) and case: what a user says to an answer; nothing ends the
    conversation. The score then sees the last answer, and all of them as `turns` of its case."""
    turns: Count = 1
    """Answers of a conversation at most."""
    preferences: Path | None = None
    """For algorithms of pairs: a JSONL file with prompt (or messages), chosen and rejected in each line."""
    rewards: tuple[str, ...] = ()
    """What is paid beside the task's score, each NAME=WEIGHT: FILE.py:FUNCTION, or the folder of a reward model's run;
    task=WEIGHT weighs the task's own."""
    prompts: Count = 16
    """Prompts per batch of rollouts; of an algorithm of pairs, pairs per step."""
    answers: Count = 8
    """Answers to each prompt."""
    max_tokens: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Most tokens of an answer; 0: what the task says; of your own function, 64 or half of the context."""
    temperature: Annotated[float, TEMPERATURE] = 1.0
    """At which answers are drawn, and log-probabilities taken."""
    minibatches: Count = 1
    """Steps into which a batch of rollouts is cut."""
    epochs: Annotated[int, Range(0, 2**31 - 1)] = 0
    """How often a batch of rollouts is gone through; 0: as the algorithm's row says."""
    held_out: Annotated[int, Range(0, 2**31 - 1)] = 32
    """Prompts, or pairs, that a run is evaluated by: the last of a file, whose prompts are trained on nowhere in it
    unless it has no others; a built-in task's are drawn apart, and of few prompts they are the same."""
    pass_k: Count = 4
    """Answers to each held-out prompt: pass@k is the share of prompts with at least one that is paid in full."""
    deadline_s: Annotated[float, Range(0, 1e9, above=True)] = 5.0
    """Seconds that a user's function may take for one answer."""
    old: Literal["trainer", "engine"] = "trainer"
    """Whose log-probabilities an update is compared with: those that training computes for the answers, or those with
    which the engine drew them, which is exact only where both compute the same bits."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """For what the engine drew with other numbers than training has: importance weights, cut at `correction_most`, or
    tokens above it left out."""
    correction_most: Annotated[float, Range(0, above=True)] = 2.0
    """The largest importance weight."""
    invariant: bool = False
    """Whether the engine and training compute a token's log-probability by the same bits, whatever is beside it: the
    first ratio is then exactly 1 (at temperature 1, without filters, in fp32 or bf16-master, tp at most 2, no
    adapters)."""
    dtype: Literal["", "fp32", "bf16", "fp16", "fp64"] = ""
    """Of the engine's weights: fp32, bf16, fp16 or fp64; empty: bf16 on a GPU where training computes in it, else that
    of the training weights, whose memory is then shared."""
    placement: Literal["colocated", "split", "one-step-off", "asynchronous"] = "colocated"
    """Whether all ranks draw answers and train in turn (colocated), or `rollout_ranks` more draw them: while the others
    wait (split), one batch ahead of the update (one-step-off), or batch after batch by the newest weights, which change
    while answers are under way (asynchronous)."""
    rollout_ranks: Count = 1
    """Ranks that only draw answers, in addition to those of the plan."""
    rollout_tp: Count | None = None
    """Ranks of an engine beside training, a divisor of tp; none: all of tp. With fewer there are more engines, and an
    update brings each of their ranks what others have of its part."""
    ahead: Annotated[int, Range(0, 64)] | None = None
    """Batches that may be begun before the update which they would follow: no token is older when it is trained on.
    None: 1 where one-step-off, 2 where asynchronous, else 0. With 1 and colocated, a run does one after the other what
    one-step-off does at once."""
    repeats: Path | None = None
    """A run that was asynchronous: its answers are drawn again by the same weights, one after the other (colocated, a
    replica for each rank that drew) or meanwhile (asynchronous)."""
    running: Count = 256
    """Answers that the engine computes at a time."""
    sleep: bool | None = None
    """Whether the engine gives the memory of its pages back while training computes, and with them its captured steps;
    none: on a GPU."""
    reference: Path | None = None
    """A Hugging Face folder whose model is not to be left too far; none: the weights that the run began with."""
    baseline: (
        Literal["zero", "batch", "batch-std", "group", "group-std", "leave-one-out", "critic", "returns"] | None
    ) = None
    """What a reward is compared with; returns: with nothing, and a token counts for what it and those after it are
    paid."""
    epsilon: Positive | None = None
    """Added to a group's standard deviation before a reward is divided by it."""
    weighting: Literal["token", "sequence", "constant", "sum"] | None = None
    """What a token counts for."""
    ratio: Literal["token", "sequence", "sequence-token", "product"] | None = None
    """New over old probability of what."""
    surrogate: Literal["plain", "clip", "weight"] | None = None
    """Which term of that ratio and the advantage is lowered."""
    clip_low: Positive | None = None
    """How far below 1 a ratio counts."""
    clip_high: Positive | None = None
    """How far above 1 a ratio counts."""
    dual_clip: Positive | None = None
    """For a negative advantage, the largest ratio that counts; 0: any."""
    kl: Literal["off", "loss", "reward"] | None = None
    """Where the distance to the reference counts."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """How that distance is estimated."""
    kl_coefficient: Positive | None = None
    """What it counts for."""
    whiten: bool | None = None
    """Whether advantages are whitened over the batch."""
    discount: Annotated[float, Range(0, 1)] | None = None
    """Of later rewards, for a critic."""
    decay: Annotated[float, Range(0, 1)] | None = None
    """GAE's lambda."""
    critic: Literal["shared", "own"] = "shared"
    """A value head on the model's last activations, or a model of the same shape with weights of its own."""
    value_coefficient: Positive | None = None
    """What the critic's loss counts for."""
    value_clip: Positive | None = None
    """How far a value may move in one batch before its loss stops falling; 0: any."""
    entropy_coefficient: Positive | None = None
    """What the entropy of predictions is worth."""
    filter_groups: bool | None = None
    """Whether groups whose answers were all paid alike count for nothing, also in means."""
    beta: Positive | None = None
    """For pairs: how strongly they pull, against the reference."""
    margin: Annotated[float, Range(-1e9, 1e9)] | None = None
    """For pairs and reward models: by how much the chosen answer is to be ahead."""
    centre: Positive = 0.0
    """For reward models: a pull of scores towards 0."""

    @property
    def is_of_pairs(self) -> bool:
        return self.algorithm in PREFERENCES

    @functools.cached_property
    def row(self) -> Algorithm:
        """The algorithm's row, with what was set over it."""
        over: Algorithm = self._over(ALGORITHMS[self.algorithm])
        return over

    @functools.cached_property
    def pair_row(self) -> PreferenceAlgorithm:
        over: PreferenceAlgorithm = self._over(PREFERENCES[self.algorithm])
        return over

    def _over(self, row: Any) -> Any:
        names = {field.name for field in dataclasses.fields(row)} & {field.name for field in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in names - {"name"}}
        if not values.get("epochs"):
            values.pop("epochs", None)
        return dataclasses.replace(row, **{name: value for name, value in values.items() if value is not None})

    @property
    def has_value_head(self) -> bool:
        return self.algorithm == "reward" if self.is_of_pairs else self.row.has_critic

    @property
    def has_reference(self) -> bool:
        return self.pair_row.has_reference if self.is_of_pairs else self.row.has_reference

    @property
    def longest(self) -> int:
        """Tokens of an answer at most."""
        return self.max_tokens or (TASKS[self.task].max_tokens if self.task in TASKS else _ANSWER_TOKENS)

    @property
    def words(self) -> str:
        """What is learnt from, for people."""
        paper = (self.pair_row if self.is_of_pairs else self.row).paper
        if self.is_of_pairs:
            return f"{self.algorithm} ({paper}): {self.prompts} pairs of {self.preferences} per step"
        each = f"{self.prompts} prompts x {self.answers} answers of up to {self.longest} tokens"
        used = f", used for {self.steps_per_batch} steps" if self.steps_per_batch > 1 else ""
        return f"{self.algorithm} ({paper}): {self.task}, {each} at temperature {self.temperature:g}{used}"

    @property
    def rows(self) -> int:
        """Sequences per step."""
        return 2 * self.prompts if self.is_of_pairs else self.prompts * self.answers // self.minibatches

    @property
    def ranks_beside(self) -> int:
        """That only draw answers."""
        return 0 if self.placement == "colocated" or self.is_of_pairs else self.rollout_ranks

    @property
    def batches_ahead(self) -> int:
        usual = 2 if self.streams else int(self.placement == "one-step-off")
        return usual if self.ahead is None else self.ahead

    @property
    def streams(self) -> bool:
        """Whether engines draw batch after batch, as weights come."""
        return not self.is_of_pairs and (self.placement == "asynchronous" or self.repeats is not None)

    @property
    def steps_per_batch(self) -> int:
        """Steps that a batch of rollouts is good for."""
        return 1 if self.is_of_pairs else self.minibatches * self.row.epochs


@dataclass(frozen=True)
class FeedbackFile:
    """align.toml."""

    align: FeedbackConfig = field(default_factory=FeedbackConfig)


@dataclass(frozen=True)
class AlignConfig:
    """One run."""

    training: TrainConfig
    align: FeedbackConfig

    @property
    def plan(self) -> ParallelPlan:
        return self.training.plan

    @property
    def train(self) -> LoopConfig:
        return self.training.train

    @property
    def is_small(self) -> bool:
        """Whether products of an engine's steps on a CPU are left to BLAS."""
        model, many = self.training.model, self.align.prompts * self.align.answers
        return many * model.width * max(model.vocabulary, model.mlp_width) < _SMALL

    @property
    def file(self) -> str:
        """align.toml's text."""
        return core_config.dump_toml(FeedbackFile(self.align))


def load(
    start: str | Path, *, sets: Sequence[str] = (), mesh: str | None = None, plan: str | Path | None = None
) -> AlignConfig:
    """The run that begins with the model of a run's or a Hugging Face folder, with settings over the defaults. `sets`:
    `align.` ones and those of training; `mesh`: "dp=2,tp=2"; `plan`: a file of `tilemesh plan align --out`, which also
    says what a step does."""
    if mesh is not None and plan is not None:
        raise UsageError(Argument("mesh"), " and ", Argument("plan"), " both say how ranks are laid out: give one")
    planned = None if plan is None else read_plan(plan, ALIGN_PLAN)
    base = {} if planned is None else planned.sections[ALIGN_PLAN]
    feedback = _feedback(core_config.from_dict(FeedbackFile, {"align": base}, str(plan)).align, sets)
    layout = [] if mesh is None else [f"plan.{key}={text}" for key, text in core_config.split_sets([mesh])]
    begin = _begin(Path(start), feedback)
    if planned is not None:
        check_planned(planned, begin.model)
        begin = dataclasses.replace(begin, plan=planned.layout)
        layout = [f"lora.{key}={value}" for key, value in planned.sections["lora"].items()]
    over = [*layout, *_of_training(sets)]
    training = core_config.load(TrainConfig, preset="run", presets={"run": begin}, sets=over)
    if (Path(start) / MODEL_FILE).is_file():
        training = training.with_base(start)
    elif training.lora.rank and training.lora.base is None:
        raise UsageError(
            f"lora.rank is {training.lora.rank} and {start} is a run: adapters lie beside weights of a Hugging Face "
            f"folder; write them with `tilemesh export {start} FOLDER`, and begin with that folder"
        )
    return checked(AlignConfig(training, feedback))


def of_run(folder: str | Path, sets: Sequence[str] = ()) -> AlignConfig:
    """What a run of kind `align` is, with settings over it."""
    folders.require_kind(folder, ALIGN)
    path = Path(folder) / FEEDBACK
    try:
        text = read_text(path)
    except Unread as why:
        raise UsageError(f"{path} cannot be read: {why}") from None
    feedback = core_config.from_dict(FeedbackFile, core_config.parse_toml(text, str(path)), str(path)).align
    training = training_of_run(folder)
    if sets:
        feedback = _feedback(feedback, sets)
        begin = {"run": training}
        training = core_config.load(TrainConfig, preset="run", presets=begin, sets=_of_training(sets))
    return checked(AlignConfig(training, feedback))


def checked(config: AlignConfig) -> AlignConfig:
    """The same with nothing left open, or it is refused."""
    align = config.align
    core_config.check_fields(align, _SECTION)
    known = [*ALGORITHMS, *PREFERENCES]
    if align.algorithm not in known:
        raise unknown("align.algorithm", align.algorithm, known)
    if align.is_of_pairs and align.preferences is None:
        words = f"align.algorithm is {align.algorithm} and no file of pairs is named: give one with "
        raise UsageError(words, Argument("preferences"))
    if not align.is_of_pairs:
        _check_task(align)
        if align.prompts * align.answers % align.minibatches:
            raise UsageError(f"align.minibatches is {align.minibatches}: expected a divisor of the "
                             f"{align.prompts * align.answers} answers of a batch")  # fmt: skip
        half = max(1, config.training.context // 2)
        if half < align.longest and not (align.max_tokens or align.task in TASKS):
            config = dataclasses.replace(config, align=dataclasses.replace(align, max_tokens=half))
    changes: dict[str, Any] = {"batch": align.rows}
    config = dataclasses.replace(config, training=settled(config.training.changed(train=changes)))
    refuse(CONFLICTS, config)
    return config


def _check_task(align: FeedbackConfig) -> None:
    if not align.task:
        raise UsageError("no task: name one with ", Argument("task"), f": {', '.join(TASKS)}, or FILE.py:FUNCTION")
    if ":" not in align.task and align.task not in TASKS:
        raise unknown("task", align.task, TASKS)
    if ":" in align.task and align.prompts_file is None:
        raise UsageError(f"align.task is {align.task} and ", Argument("prompts_file", "--prompts-file"),
                         " names no prompts: give a JSONL file with a prompt in each line")  # fmt: skip

    if (align.turns > 1) != bool(align.environment):
        raise UsageError(f"align.turns is {align.turns} and align.environment '{align.environment}': a conversation of "
                         "several answers needs a function that speaks between them, and it more than 1")  # fmt: skip


def _feedback(base: FeedbackConfig, sets: Sequence[str]) -> FeedbackConfig:
    own = [f"{key}={text}" for key, text in core_config.split_sets(sets) if key.startswith(_SECTION)]
    return core_config.load(FeedbackFile, preset="run", presets={"run": FeedbackFile(base)}, sets=own).align


def _of_training(sets: Sequence[str]) -> list[str]:
    return [f"{key}={text}" for key, text in core_config.split_sets(sets) if not key.startswith(_SECTION)]


def _begin(start: Path, align: FeedbackConfig) -> TrainConfig:
    """What a run is where nobody says otherwise: a low, constant learning rate, no decay, no dropout."""
    if (start / MODEL_FILE).is_file():
        tokenizer = start / "tokenizer.json"
        model, data = read_config(start), DataConfig(tokenizer=tokenizer if tokenizer.is_file() else None)
    else:
        base = training_of_run(start)
        model, data = base.model, base.data
    rate = 1e-5 if model.width >= 512 else 1e-4
    optimizer = OptimizerConfig(lr=rate, schedule="constant", warmup=0, weight_decay=0.0, betas=(0.9, 0.999))
    rows = align.rows if align.algorithm in (*ALGORITHMS, *PREFERENCES) else 1
    return TrainConfig(
        dataclasses.replace(model, dropout=0.0),
        data,
        LoopConfig(steps=100),
        optimizer,
        plan=ParallelPlan(precision="fp32", microbatch=max(2, min(rows, _MICROBATCH_TOKENS // model.context))),
        evaluate=EvaluateConfig(every=10),
        sample=SampleConfig(tokens=0),
    )


CONFLICTS: tuple[Conflict[AlignConfig], ...] = (
    row("plan.pp", lambda config: config.plan.pp > 1,
        "what a loss of answers needs beside tokens and targets is not handed from stage to stage", "plan.pp=1"),
    row("plan.cp", lambda config: config.plan.cp > 1,
        "answers of a pass differ in length, and a short one would leave a rank without tokens", "plan.cp=1"),
    row("plan.ep", lambda config: config.plan.ep > 1 and not config.align.is_of_pairs,
        "the engine computes with all experts, which no rank has", "plan.ep=1"),
    row("plan.zero", lambda config: config.plan.zero == 3,
        "the engine computes with whole weights, which no replica has", "plan.zero=2"),
    row("plan.offload", lambda config: config.plan.has_chunks and config.plan.pp == 1 and config.plan.zero < 3,
        "weights or activations that move by layer are passed over in a pipeline's order", "plan.offload=optimizer"),
    row("align.placement", lambda config: config.align.placement != "colocated" and config.align.is_of_pairs,
        "pairs are read, and nobody draws answers", "align.placement=colocated"),
    row("align.ahead", lambda config: config.align.batches_ahead > 1 and not config.align.streams,
        "a batch would be drawn whole by weights that are older than they must be", "align.placement=asynchronous"),
    row("align.ahead align.placement", lambda config: config.align.streams and config.align.batches_ahead < 2,
        "an engine that may begin no second batch waits for weights as it does one step off", "align.ahead=2"),
    row("align.repeats align.placement plan.tp",
        lambda config: config.align.repeats is not None and config.align.placement != "asynchronous"
        and (config.align.ranks_beside > 0 or config.plan.tp > 1),
        "each engine takes its steps by itself, whole, when it did: on ranks that train, or on as many as drew",
        "align.placement=asynchronous"),
    row("align.rollout_tp plan.tp", lambda config: config.align.rollout_tp is not None
        and config.plan.tp % config.align.rollout_tp > 0,
        "a rank of an engine joins whole parts of ranks that train", "align.rollout_tp=1"),
    row("align.rollout_tp align.placement", lambda config: (config.align.rollout_tp or 1) > 1
        and config.align.ranks_beside > 0,
        "an engine on ranks of its own is one rank", "align.rollout_tp=1"),
    row("align.invariant align.rollout_tp plan.tp", lambda config: config.align.invariant
        and (config.align.rollout_tp or config.plan.tp) != config.plan.tp,
        "sums over more or fewer ranks are other bits", "align.rollout_tp=none"),
    row("align.invariant", lambda config: config.align.invariant and config.training.lora.rank > 0,
        "the engine multiplies by merged weights, and training by the base and its adapters: sums of other parts",
        "lora.rank=0"),
    row("align.invariant train.compile", lambda config: config.align.invariant and bool(config.train.compile),
        "compiled layers round and add in other places than the engine does", "train.compile=false"),
    row("align.invariant plan.precision", lambda config: config.align.invariant
        and config.plan.precision not in ("fp32", "fp64", "bf16-master"),
        "passes under autocast, or in 8 bits, round in other places than the engine does",
        "plan.precision=fp32" + OR + "plan.precision=bf16-master"),
    row("align.invariant plan.tp", lambda config: config.align.invariant and config.plan.tp > 2,
        "a sum of more than two parts depends on their order, which an exchange chooses by its size", "plan.tp=2"),
    row("align.invariant align.placement plan.tp",
        lambda config: config.align.invariant and config.align.ranks_beside > 0 and config.plan.tp > 1,
        "ranks that only draw answers have whole weights, whose sums are not cut as training's are",
        "align.placement=colocated"),
    row("align.answers align.baseline", lambda config: not config.align.is_of_pairs and config.align.answers == 1
        and config.align.row.baseline in ("group", "group-std", "leave-one-out"),
        "an answer that is compared with the others to its prompt has an advantage of 0 where there are none",
        "align.answers=8" + OR + "align.baseline=batch"),
    row("align.temperature", lambda config: config.align.temperature == 0,
        "all answers to a prompt would be the same one", "align.temperature=1"),
    row("train.method", lambda config: config.train.method != "synchronous",
        "a batch of rollouts follows from weights that all replicas share", "train.method=synchronous"),
    row("train.graph", lambda config: bool(config.train.graph), "answers differ in length", "train.graph=false"),
    row("align.critic align.algorithm", lambda config: config.align.critic == "own"
        and (config.align.is_of_pairs or not config.align.row.has_critic),
        "no critic says what its rewards are compared with", "align.critic=shared" + OR + "align.algorithm=ppo"),
    row("align.reference align.algorithm", lambda config: config.align.reference is not None
        and not config.align.has_reference,
        "the distance to a reference counts for nothing in its loss and rewards", "align.reference=none"),
    row("align.beta align.algorithm",
        lambda config: config.align.algorithm == "ipo" and config.align.pair_row.beta == 0,
        "its loss has 1 / (2 beta)", "align.beta=0.1"),
    row("lora.rank", lambda config: config.align.critic == "own" and config.training.lora.rank > 0,
        "a critic has all its weights trained, which adapters are there to avoid", "align.critic=shared"),
    row("model.expert_capacity", lambda config: config.training.model.expert_capacity > 0,
        "passes that drop what experts have no room for give other log-probabilities than the engine, which drops "
        "nothing", "model.expert_capacity=0"),
    row("align.algorithm align.kl_coefficient", lambda config: bool(config.align.kl_coefficient)
        and not config.align.is_of_pairs and config.align.row.kl == "off",
        "the distance to the reference counts nowhere: align.kl is off, as it is for this algorithm unless set",
        "align.kl=loss" + OR + "align.kl=reward"),
    row("plan.microbatch", lambda config: config.align.is_of_pairs and config.plan.microbatch % 2 > 0,
        "the two answers of a pair are in one microbatch", "plan.microbatch=2"),
)  # fmt: skip
