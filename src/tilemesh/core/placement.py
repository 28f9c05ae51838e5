"""Where the models of a run that learns from feedback lie, and what a step of it does when: values, proved and timed.

The one idea: a placement is pools of ranks, each with the models that lie there, and how many batches of answers are
drawn ahead of the update. What a step does follows from it as phases, each on some pools and after others; one checker
proves a placement, one simulator times the phases. Who chooses it (`plan/align.py`), draws it (`report/placement.py`)
and runs it (`align/placement.py`) is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from tilemesh.core.config import check_fields
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.ranges import Range

ACTOR, ENGINE, CRITIC, REFERENCE, REWARD = "actor", "engine", "critic", "reference", "reward"
MODELS = (ACTOR, ENGINE, CRITIC, REFERENCE, REWARD)
ROLLOUT, REWARDS, REFERENCES, VALUES, OLD, UPDATE, CRITIC_UPDATE, SYNC = PHASES = (
    "rollout", "reward", "reference", "values", "old", "update", "critic update", "weight sync",
)  # fmt: skip
"""Of a step: `old` are log-probabilities by the weights before it; `weight sync` brings new ones to the engine."""
PASSES = {REWARDS: REWARD, REFERENCES: REFERENCE, VALUES: CRITIC, OLD: ACTOR}
UPDATES = {UPDATE: ACTOR, CRITIC_UPDATE: CRITIC}
"""Phases, and the models that do them."""
STEP_TOKENS = 4096
"""Of a step of the engine at most: nobody waits for a first token, so all prompts may come at once."""
KINDS = {"colocated": 0, "split": 0, "one-step-off": 1, "asynchronous": 2}
"""Of placements, and how many batches are drawn ahead."""
_SIMULATED, _MEASURED = 16, 8
"""Steps that are simulated, and those of them, the last, that a step's time is the mean of."""
_CLASSES = 32
"""Lengths of answers that are told apart."""
Count = Annotated[int, Range(1, 2**31 - 1)]


@dataclass(frozen=True)
class AlignWork:
    """What a step of a run that learns from feedback is to do. Fields that are None: as the algorithm's row says."""

    prompts: Count = 64
    answers: Count = 16
    prompt: Count = 256
    """Tokens of a prompt."""
    tokens: Count = 1024
    """Of the longest answer."""
    mean: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Of answers, on average; 0: all are as long as the longest."""
    algorithm: str = "grpo"
    minibatches: Count = 1
    epochs: Count | None = None
    critic: Literal["none", "head", "own"] | None = None
    """A value head on the actor, or a model of its own."""
    reference: bool | None = None
    old: bool | None = None
    """Whether log-probabilities by the weights before a batch's updates are computed."""
    reward: Literal["function", "model"] = "function"
    reward_s: Annotated[float, Range(0)] = 0.0
    """Seconds that a function takes for a batch."""
    lora: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Rank of the actor's adapters, whose base is then the reference; 0: all weights are trained."""
    running: Count = 256
    """Answers that an engine computes at a time."""
    repacks: bool = False
    """Whether an engine has its weights once more, in the layout of a CPU's products."""
    packed: bool = False
    """Whether answers of a group pass through models with one copy of their prompt, and without padding."""

    def __post_init__(self) -> None:
        check_fields(self, "")

    @property
    def rows(self) -> int:
        """Sequences of one update."""
        return self.prompts * self.answers // self.minibatches

    @property
    def updates(self) -> int:
        return self.minibatches * (self.epochs or 1)

    @property
    def mean_tokens(self) -> int:
        return min(self.tokens, self.mean or self.tokens)

    def lengths(self) -> list[float]:
        """Tokens of a few answers, ascending, whose mean is that of all: of answers that end with the same probability
        after every token, cut at the longest. A mean and a longest give one such distribution."""
        if self.mean_tokens >= self.tokens:
            return [float(self.tokens)] * _CLASSES
        low, high = 1e-9 / self.tokens, 1.0 / self.mean_tokens
        for _ in range(60):  # the rate r with (1 - exp(-r longest)) / r = mean, by halving
            rate = (low + high) / 2
            is_low = -math.expm1(-rate * self.tokens) / rate > self.mean_tokens
            low, high = (rate, high) if is_low else (low, rate)
        drawn = [min(self.tokens, -math.log1p(-(place + 0.5) / _CLASSES) / low) for place in range(_CLASSES)]
        scale = self.mean_tokens * _CLASSES / sum(drawn)
        return [min(float(self.tokens), scale * length) for length in drawn]

    @property
    def mean_age(self) -> float:
        """Tokens of an answer that is being drawn, on average, where others take the places of those that end."""
        each = self.lengths()
        return sum(length * length for length in each) / (2 * sum(each))

    def check(self, context: int) -> None:
        """Refuse what a model with this context cannot do."""
        if self.prompt + self.tokens > context + 1:
            raise UsageError(f"prompt={self.prompt} and tokens={self.tokens}: the context is {context}; set one lower")
        if self.prompts * self.answers % self.minibatches:
            answers = self.prompts * self.answers
            raise UsageError(f"{self.minibatches} minibatches of {answers} answers: expected a divisor")


@dataclass(frozen=True)
class Pool:
    """Ranks that do the same at the same time."""

    ranks: int
    models: tuple[str, ...]
    """Of MODELS, those whose weights lie here."""
    plan: ParallelPlan | None = None
    """How all of these but the engine are laid out; None where there is no other."""
    rollout_tp: int = 1
    """Ranks of one replica of the engine."""


@dataclass(frozen=True)
class Placement:
    """`ahead`: batches of answers that are drawn before the update that they would follow; 0: none."""

    pools: tuple[Pool, ...]
    ahead: int = 0

    @property
    def kind(self) -> str:
        if len(self.pools) == 1:
            return "colocated"
        return {0: "split", 1: "one-step-off"}.get(self.ahead, "asynchronous")

    @property
    def world(self) -> int:
        return sum(pool.ranks for pool in self.pools)

    def pool_of(self, model: str) -> int:
        """The number of the pool that a model lies on."""
        return next(number for number, pool in enumerate(self.pools) if model in pool.models)

    def pool(self, model: str) -> Pool:
        """The pool that a model lies on."""
        return self.pools[self.pool_of(model)]

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(model for pool in self.pools for model in pool.models)


def check(placement: Placement, world: int) -> None:
    """Refuse what cannot be a placement on so many ranks."""
    models = placement.models
    for model in models:
        if model not in MODELS or models.count(model) > 1:
            raise UsageError(f"a placement has {model} {models.count(model)} times: expected each of {MODELS} once")
    if ACTOR not in models or ENGINE not in models:
        raise UsageError(f"a placement of {', '.join(models)}: expected an actor that learns and an engine that draws")
    if placement.world != world:
        raise UsageError(f"pools of {placement.world} ranks on a cluster of {world}: make their sizes add up")
    if not 0 <= placement.ahead <= 64:
        raise UsageError(f"{placement.ahead} batches ahead: expected 0 to 64")
    for pool in placement.pools:
        others = [model for model in pool.models if model != ENGINE]
        if others and (pool.plan is None or pool.plan.world != pool.ranks):
            laid = "no layout" if pool.plan is None else f"a layout of {pool.plan.world} ranks"
            raise UsageError(f"{', '.join(others)} on {pool.ranks} ranks with {laid}: expected one of as many")
        if ENGINE in pool.models and pool.ranks % pool.rollout_tp:
            raise UsageError(f"engines of {pool.rollout_tp} ranks on {pool.ranks}: expected a divisor")


class Phase(NamedTuple):
    """Something that pools do in a step. `after`: phases, each with how many steps earlier."""

    name: str
    pools: tuple[int, ...]
    after: tuple[tuple[str, int], ...]
    ahead: int = 0
    """Of so many steps later than the update that it is listed with."""


def step_phases(placement: Placement, seconds: Mapping[str, float]) -> list[Phase]:
    """What a step does, in the order in which each pool does its part; phases without seconds are left out."""
    ahead, drawing = placement.ahead, placement.pool_of(ENGINE)
    scores = [name for name in PASSES if seconds.get(name)]
    phases = [Phase(ROLLOUT, (drawing,), ((SYNC, 1 + ahead),), ahead)]
    for name in scores:
        model = PASSES[name]
        pool = placement.pool_of(model) if model in placement.models else drawing  # a function's rewards
        # Of frozen models beside the engine: for the answers that have just been drawn.
        early = ahead if pool == drawing and name in (REWARDS, REFERENCES) else 0
        phases.append(Phase(name, (pool,), ((ROLLOUT, 0),), early))
    for name, model in UPDATES.items():
        if seconds.get(name):
            needs = [(each, 0) for each in scores] or [(ROLLOUT, 0)]
            phases.append(Phase(name, (placement.pool_of(model),), tuple(needs)))
    updated, writes = placement.pool_of(ACTOR), seconds.get(SYNC, 0.0) > 0
    return [*phases, Phase(SYNC, tuple(sorted({updated, drawing})) if writes else (updated,), ((UPDATE, 0),))]


class PhaseSpan(NamedTuple):
    """A phase of a step, on one pool."""

    name: str
    pool: int
    step: int
    begin_s: float
    end_s: float


class StepTime(NamedTuple):
    """A step in a steady state."""

    seconds: float
    spans: tuple[PhaseSpan, ...]
    """Of the last steps simulated."""
    idle: tuple[float, ...]
    """Of each pool, the share of a step in which it does nothing."""


def simulate(placement: Placement, seconds: Mapping[str, float]) -> StepTime:
    """The time of a step where every phase takes so long: each pool does its phases in order, each when what it needs
    is done."""
    phases = step_phases(placement, seconds)
    free = [0.0] * len(placement.pools)
    ended: dict[tuple[str, int], float] = {}
    spans: list[PhaseSpan] = []
    for listed in range(-placement.ahead, _SIMULATED):
        for phase in phases:
            step = listed + phase.ahead
            if step < 0 or (listed < 0 and not phase.ahead):
                continue
            ready = [ended.get((name, step - back), 0.0) for name, back in phase.after]
            begin = max([*ready, *(free[pool] for pool in phase.pools)])
            end = begin + seconds.get(phase.name, 0.0)
            ended[phase.name, step] = end
            for pool in phase.pools:
                free[pool] = end
                spans.append(PhaseSpan(phase.name, pool, step, begin, end))
    last, before = _SIMULATED - 1, _SIMULATED - 1 - _MEASURED
    step_s = (ended[SYNC, last] - ended[SYNC, before]) / _MEASURED
    each = [sum(span.end_s - span.begin_s for span in spans if span.pool == pool and before < span.step <= last)
            for pool in range(len(free))]  # fmt: skip
    idle = tuple(max(0.0, 1 - busy / _MEASURED / step_s) for busy in each)
    return StepTime(step_s, tuple(span for span in spans if span.step > last - 2), idle)


def idle_share(placement: Placement, step: StepTime) -> float:
    """Of all ranks' time."""
    return sum(pool.ranks * idle for pool, idle in zip(placement.pools, step.idle, strict=True)) / placement.world


def reshard_bytes(model_bytes: float, tp: int, pp: int, engine_tp: int) -> float:
    """What a rank receives where a training layout becomes the engine's: what it needs less what it has of that.

    With an engine cut no finer than training this is (tp pp - tg) / (tg tp pp) M, HybridFlow's volume (Sheng et al.
    2025, arXiv 2409.19256, table 2), and the peak of weights M / tg.
    """
    return model_bytes * (1 / engine_tp - 1 / (pp * max(tp, engine_tp)))
