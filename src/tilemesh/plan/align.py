"""What a step of a placement of models takes, and what its ranks hold, where a model learns from feedback.

The one idea: nothing is predicted here that the planner did not know. Updates and passes are those of a training layout
(`step.py`), answers those of an engine's steps (`serving_clock.py`, `rollouts.py`); a placement says which of them wait
for one another (`core/placement.py`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from tilemesh.core import placement as placed
from tilemesh.core.calibration import Rates
from tilemesh.core.hardware import DTYPE_BYTES, Cluster
from tilemesh.core.placement import AlignWork, Placement, Pool, StepTime
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.answers import answer_kept_bytes, answer_operations, text_attention
from tilemesh.model.work.decoding import key_value_bytes, serving_task, step_bytes, weight_bytes
from tilemesh.model.work.task import STATE_BYTES, Code
from tilemesh.model.work.weights import count_parameters, layer_matrices
from tilemesh.plan.constants import ANSWER_ROW_S, HEADROOM
from tilemesh.plan.memory import reserved_bytes, slack_share, state_bytes
from tilemesh.plan.rollouts import most_step_tokens, page_tokens, rollout_s
from tilemesh.plan.serving_clock import StepClock
from tilemesh.plan.space import default_precision
from tilemesh.plan.speed import group, neighbour_s, speed_of
from tilemesh.plan.step import Estimator


@dataclass(frozen=True)
class PlacementPrediction:
    placement: Placement
    seconds: dict[str, float]
    """Of each phase."""
    step: StepTime
    limit_s: float
    """A step whose phases took the least that the hardware allows."""
    memory: tuple[dict[str, int], ...]
    """Bytes of a rank of each pool, by what they are for."""
    usable_bytes: int
    sync_bytes: int
    """That a rank of the engine receives with new weights."""
    tokens: int
    """Of all sequences of a batch."""
    sleeps: bool
    """Whether an engine gives its pages back while models train."""
    limits: dict[str, float]
    """The least seconds of each phase that the hardware allows."""

    @property
    def idle(self) -> float:
        """Of all ranks' time."""
        return placed.idle_share(self.placement, self.step)

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """Of each pool's ranks at most: where an engine sleeps, it and activations take turns, and only the more of
        them counts. Elsewhere what its thread has freed stays there."""
        turns = [min(it.get("pages", 0) + it.get("answers", 0), it.get("activations", 0)) * self.sleeps
                 for it in self.memory]  # fmt: skip
        return tuple(sum(it.values()) - less for it, less in zip(self.memory, turns, strict=True))

    @property
    def fits(self) -> bool:
        return max(self.total_bytes) <= self.usable_bytes


def placement_figures(prediction: PlacementPrediction, updates: int, kind: str) -> dict[str, Any]:
    """What a run's predicted.json says, of each of so many steps with a batch. Seconds are those of ranks that train,
    which wait for answers that others draw."""
    placement, step_s = prediction.placement, prediction.step.seconds
    actor, engine = placement.pool_of(placed.ACTOR), placement.pool_of(placed.ENGINE)
    seconds = dict(prediction.seconds)
    if actor != engine:
        here = [name for name in (*placed.PASSES, *placed.UPDATES, placed.SYNC) if name != placed.REWARDS]
        seconds[placed.ROLLOUT] = max(0.0, step_s - sum(seconds.get(name, 0.0) for name in here))
    parts, total = prediction.memory[actor], prediction.total_bytes
    unseen = [it.get("reserved", 0) if kind == "gpu" else 0 for it in prediction.memory]
    memory = {f"{part}_bytes": size for part, size in parts.items()}
    return {
        "step_time_s": step_s / updates, "limit_s": prediction.limit_s / updates, "fits": prediction.fits,
        "phases": {name: taken / updates for name, taken in seconds.items()}, "idle": prediction.idle,
        "memory": memory | {"total_bytes": total[actor], "usable_bytes": prediction.usable_bytes},
        "memory_bytes": total[actor] - unseen[actor], "tokens_per_s": prediction.tokens / step_s,
        "drawing_memory_bytes": total[engine] - unseen[engine] if actor != engine else None,
    }  # fmt: skip


class AlignEstimator:
    """Predictions for one model and one kind of step on one cluster. `dtype`, `size`: of the engine's weights."""

    def __init__(
        self, model: ModelConfig, cluster: Cluster, work: AlignWork, rates: Rates | None = None,
        code: Code | None = None, headroom: float = HEADROOM,
    ) -> None:  # fmt: skip
        self.model, self.cluster, self.work, self.rates = model, cluster, work, rates
        self.code, self.headroom = code, headroom
        work.check(model.context)
        self.dtype = "bf16" if cluster.device.kind == "gpu" else default_precision(cluster.device)
        self.size = DTYPE_BYTES[self.dtype]
        self.sleeps = cluster.device.kind == "gpu"
        # With one copy of a prompt, without its last token, which comes before each answer.
        packed = (work.prompt - 1) / work.answers + work.mean_tokens
        self._tokens = packed if work.packed else work.prompt + work.mean_tokens
        """Of a sequence, as many as pass through a model for it."""
        self._filled = self._tokens / math.ceil(self._tokens)
        """Of the tokens that layouts are predicted for."""
        self._answer_sizes = work.answers, work.prompt, work.mean_tokens
        self.train = functools.cache(self._estimator)
        self._predicted = functools.cache(lambda ranks, plan: self.train(ranks).predict(plan))
        self._drawn = functools.cache(self._drawn_s)

    def _estimator(self, ranks: int) -> Estimator:
        length, rest = math.ceil(self._tokens), (self.rates, self.code)
        more: dict[str, Any] = {"headroom": self.headroom, "beside": self.cluster.world - ranks}
        return Estimator(self.model, self.cluster.part(ranks), length, *rest, **more)

    def predict(self, placement: Placement) -> PlacementPrediction:
        """Seconds, memory and idle share of a placement, which must be possible."""
        placed.check(placement, self.cluster.world)
        memory, running = self._memory(placement)
        both = {placed.ROLLOUT: self._rollouts(placement, running)}
        if self.work.reward_s:
            both[placed.REWARDS] = (self.work.reward_s,) * 2
        for name, model in placed.PASSES.items():
            if model in placement.models and (model != placed.ACTOR or self.work.old):
                both[name] = self._passes(placement.pool(model))
        for name, model in placed.UPDATES.items():
            if model in placement.models:
                both[name] = self._update(placement.pool(model))
        sync_s, received = self._sync(placement)
        seconds = {name: predicted for name, (predicted, _) in both.items()} | {placed.SYNC: sync_s}
        limits = {name: limit for name, (_, limit) in both.items()}
        least = placed.simulate(placement, limits)
        step, usable = placed.simulate(placement, seconds), self.train(self.cluster.world).usable_bytes
        tokens = self.work.prompts * self.work.answers * (self.work.prompt + self.work.mean_tokens)
        told = (seconds, step, least.seconds, memory, usable, round(received), tokens, self.sleeps, limits)
        return PlacementPrediction(placement, *told)

    def _sequences(self, pool: Pool) -> int:
        """Answers that one replica of the engine draws."""
        return math.ceil(self.work.prompts * self.work.answers / (pool.ranks // pool.rollout_tp))

    def _rollouts(self, placement: Placement, running: int) -> tuple[float, float]:
        pool = placement.pool(placed.ENGINE)
        return self._drawn(pool.rollout_tp, self._sequences(pool), running, placement.ahead > 1)

    def _drawn_s(self, tp: int, sequences: int, running: int, streams: bool) -> tuple[float, float]:
        clock = StepClock(self.model, self.cluster, self.dtype, tp, self.rates, whole=True)
        case = (self.work, sequences, running, streams, max(placed.STEP_TOKENS, running))
        return rollout_s(clock, *case), rollout_s(clock.limit, *case)

    def _update(self, pool: Pool) -> tuple[float, float]:
        """All updates on a batch. Beside adapters, what is frozen has no weight gradients and no optimizer."""
        assert pool.plan is not None
        prediction = self._predicted(pool.ranks, pool.plan)
        step_s, limit_s = prediction.step_time_s, prediction.model_flops / prediction.peak_flops_per_s
        fixed_s = prediction.times.optimizer_s + prediction.times.dp_s
        step_s = fixed_s + self._filled * (step_s - fixed_s) + pool.plan.accumulation * sum(self._answers_s(pool))
        if self.work.lora:
            weight_s = self._filled * sum(self.train(pool.ranks).chunk_times(pool.plan).weight_s) / pool.plan.pp
            step_s -= pool.plan.accumulation * weight_s + fixed_s
            limit_s *= 2 / 3
        return self.work.updates * step_s, self.work.updates * limit_s

    def _passes(self, pool: Pool) -> tuple[float, float]:
        """A forward pass over all sequences of a batch."""
        plan = pool.plan
        assert plan is not None
        prediction, times = self._predicted(pool.ranks, plan), self.work.minibatches
        forward_s = self._filled * sum(self.train(pool.ranks).chunk_times(plan).forward_s) / plan.pp
        forward_s += self._answers_s(pool)[0]
        limit_s = prediction.model_flops / prediction.peak_flops_per_s / 3
        return times * (plan.accumulation + plan.pp - 1) * forward_s, times * limit_s

    def _answers_s(self, pool: Pool) -> tuple[float, float]:
        """What a microbatch takes forward and backward beside one of text; counted on a CPU."""
        assert pool.plan is not None
        if self.sleeps or not self.work.packed:
            return 0.0, 0.0
        task = self.train(pool.ranks).room.task(pool.plan)
        speed = speed_of(self.cluster.device, task.dtype, self.rates, task.code)
        ours = answer_operations(self.model, task, *self._answer_sizes)
        forward_s, backward_s = (
            speed.seconds(own) - speed.seconds(text)
            for own, text in zip(ours, text_attention(self.model, task), strict=True)
        )
        return forward_s + ANSWER_ROW_S * task.sequences, backward_s

    def _sync(self, placement: Placement) -> tuple[float, float]:
        """Weights to the engine: seconds, and bytes that one of its ranks receives."""
        engine, actor = placement.pool(placed.ENGINE), placement.pool(placed.ACTOR)
        plan, tp = actor.plan, engine.rollout_tp
        assert plan is not None
        nbytes = self.size * count_parameters(self.model).total
        others = plan.pp * (plan.zero_ranks if plan.zero == 3 else 1)
        holders = others * max(plan.tp, tp) // tp
        gathered_s = group(self.cluster.part(actor.ranks), holders, 1).exchange_s("all_gather", nbytes / tp)
        if engine is actor:
            return gathered_s, placed.reshard_bytes(nbytes, plan.tp, others, tp)
        # Shards go beside one another, and from one replica on to the next while they come.
        return gathered_s + neighbour_s(self.cluster, self.cluster.world, 1, nbytes / tp), nbytes / tp

    def _memory(self, placement: Placement) -> tuple[tuple[dict[str, int], ...], int]:
        """Bytes of each pool's ranks, and how many answers an engine has room to compute at a time."""
        memory, running = [], 1
        for pool in placement.pools:
            parts = self._states(pool)
            if placed.ENGINE in pool.models:
                whole = weight_bytes(self.model, self.size, pool.rollout_tp)
                parts["engine weights"] = whole * self.work.repacks + (0 if self.is_shared(pool) else whole)
                parts["answers"] = self._step_bytes(pool)
                slack = slack_share(self.cluster.device, self.cluster.world)
                parts["reserved"] += int(slack * parts["answers"])
                room = self.train(self.cluster.world).usable_bytes - sum(parts.values())
                room += parts.get("activations", 0) * self.sleeps
                running, parts["pages"] = self._pages(pool, room)
            memory.append(parts)
        return tuple(memory), running

    def _states(self, pool: Pool) -> dict[str, int]:
        """Of all models but the engine. A reference lies in the memory of an actor's frozen base."""
        if pool.plan is None:
            return {"reserved": reserved_bytes(self.cluster.device, self.cluster.world, False)}
        memory, lora, parts = self._predicted(pool.ranks, pool.plan).memory, self.work.lora, dict[str, int]()
        share = self._trained_share()
        gradients, optimizer = (round(share * each) for each in (memory.gradients_bytes, memory.optimizer_bytes))
        if placed.ACTOR in pool.models:
            adapters = round(share * memory.weights_bytes) if lora else 0
            parts = {"weights": memory.weights_bytes + adapters, "gradients": gradients, "optimizer": optimizer}
        if placed.CRITIC in pool.models:
            parts[placed.CRITIC] = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
        for name in (placed.REFERENCE, placed.REWARD):
            if name in pool.models:
                is_base = name == placed.REFERENCE and lora and placed.ACTOR in pool.models
                parts[name] = 0 if is_base else memory.weights_bytes
        passes = memory.activations_bytes + memory.logits_bytes + memory.working_bytes - memory.later_bytes
        if not {placed.ACTOR, placed.CRITIC} & {*pool.models}:  # nothing is kept for a backward pass
            passes = self.train(pool.ranks).room.pass_bytes(pool.plan)
        reserved = memory.reserved_bytes
        if self.work.packed and not self.sleeps:
            kept = answer_kept_bytes(self.model, self.train(pool.ranks).room.task(pool.plan), *self._answer_sizes)
            before, passes = passes, round(self._filled * passes) + kept
            reserved += int(slack_share(self.cluster.device, self.cluster.world) * (passes - before))
        return parts | {"activations": passes, "reserved": reserved}

    def fits(self, training_bytes: int, pool: Pool) -> bool:
        """Whether beside a layout that takes so much there is room for the pool's other models, in closed form."""
        assert pool.plan is not None
        states = self._state_bytes(pool.ranks, pool.plan)
        beside = sum(states) * (placed.CRITIC in pool.models and placed.ACTOR in pool.models)
        beside += states[0] * len({placed.REFERENCE, placed.REWARD} & {*pool.models})
        if placed.ENGINE in pool.models and not self.is_shared(pool):
            beside += weight_bytes(self.model, self.size, pool.rollout_tp)
        return training_bytes + beside <= self.train(pool.ranks).usable_bytes

    def frozen_bytes(self, ranks: int, plan: ParallelPlan) -> int:
        """Gradients and states that a layout has not where adapters are trained alone."""
        return round(sum(self._state_bytes(ranks, plan)[1:]) * (1 - self._trained_share()))

    def _state_bytes(self, ranks: int, plan: ParallelPlan) -> tuple[int, int, int]:
        layers = -(-self.model.layers // plan.pp)
        dense = self.model.dense_of((layers,))
        parameters = self.train(ranks).room.shards(plan).stage(layers, True, plan.pp == 1, *dense)
        return state_bytes(parameters, plan.precision, plan.zero, plan.zero_ranks)

    def _trained_share(self) -> float:
        """Of parameters: all, or those of adapters of the attention's matrices."""
        each = [weight for weight in layer_matrices(self.model) if weight.name.startswith("attention.")]
        added = self.work.lora * self.model.layers * sum(sum(weight.shape(1)) for weight in each)
        return added / count_parameters(self.model).total if self.work.lora else 1.0

    def is_shared(self, pool: Pool) -> bool:
        """Whether the engine computes with the very memory of the weights that are trained."""
        plan = pool.plan
        if plan is None or placed.ACTOR not in pool.models or self.work.lora:
            return False
        is_alike = STATE_BYTES[plan.precision][0] == self.size
        return is_alike and plan.tp == pool.rollout_tp and plan.pp == 1 and plan.zero < 3

    def _step_bytes(self, pool: Pool) -> int:
        """What a step of the engine has at most beside weights and pages."""
        sequences, tp = self._sequences(pool), pool.rollout_tp
        running = min(sequences, self.work.running)
        tokens = most_step_tokens(self.work, sequences, running, max(placed.STEP_TOKENS, running))
        return step_bytes(self.model, serving_task(tokens, self.dtype, tp, "eager", self.sleeps), running)

    def _pages(self, pool: Pool, room: int) -> tuple[int, int]:
        """As many answers at a time as there are, are allowed, or fit; and the bytes of their pages."""
        sequences, each = self._sequences(pool), key_value_bytes(self.model, self.size, pool.rollout_tp)
        running = min(sequences, self.work.running)
        while True:
            nbytes = each * page_tokens(self.work, running, running < sequences)
            if nbytes <= room or running == 1:
                return running, nbytes
            running = max(1, running * 3 // 4)
