"""Pipeline schedules as data: what each stage does, in which order; checked, simulated and drawn by anyone.

The one idea: a schedule is a list of actions for each stage and nothing else. A model cut into `stages * interleave`
chunks runs chunk c on stage c % stages. The forward pass of a microbatch on a chunk waits for the chunk below, the
backward pass for the chunk above and for its own forward pass; all else (bubble, activations in flight, deadlock)
follows from the lists, by simulation. GPipe (Huang et al. 2019), 1F1B (PipeDream, Narayanan et al. 2019) and
interleaved 1F1B (Narayanan et al. 2021) are three ways to write the lists.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilemesh.core.errors import UsageError, unknown

SCHEDULES = ("gpipe", "1f1b", "interleaved")

_NOT_YET = float("-inf")
_SETTLED_ROUNDS = 2  # rounds of `stages` microbatches before the pace of a pipeline is looked at
_STEADY_ROUNDS = 3  # rounds that must take equally long to be its pace
_SAME = 1e-9
_CHEAP_PASSES = 8_000  # to walk through for the pace of one pipeline


class Action(NamedTuple):
    """One pass of one microbatch through one chunk of the model."""

    forward: bool
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{'F' if self.forward else 'B'}{self.microbatch}/{self.chunk}"


@dataclass(frozen=True)
class PipelineSchedule:
    """What each stage does, in order."""

    name: str
    stages: int
    microbatches: int
    interleave: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def chunks(self) -> int:
        return self.stages * self.interleave


class Slot(NamedTuple):
    """An action with its place on the clock."""

    stage: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A schedule, run on a clock."""

    total_s: float
    busy_s: tuple[float, ...]
    """Work of each stage."""
    slots: tuple[Slot, ...] = ()
    """Every action, where they were asked for."""

    @property
    def bubble(self) -> float:
        """The part of the stages' time in which they wait, averaged over the stages."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.total_s) if self.total_s else 0.0


# ---- making ----------------------------------------------------------------------------------------------------


def build(name: str, stages: int, microbatches: int, interleave: int = 1) -> PipelineSchedule:
    """The schedule of that name."""
    if name not in SCHEDULES:
        raise unknown("pipeline schedule", name, SCHEDULES)
    for word, value in (("stages", stages), ("microbatches", microbatches), ("interleave", interleave)):
        if value < 1:
            raise UsageError(f"a pipeline with {value} {word}: expected at least 1")
    if name != "interleaved" and interleave > 1:
        raise UsageError(f"schedule {name} has one chunk a stage, interleave is {interleave}: use interleaved")
    if name == "interleaved" and microbatches % stages:
        raise UsageError(
            f"interleaved: {microbatches} microbatches are no multiple of {stages} stages; the schedule takes them in "
            "groups of as many as there are stages"
        )
    lists = (tuple(_stage_actions(name, stage, stages, microbatches, interleave)) for stage in range(stages))
    return PipelineSchedule(name, stages, microbatches, interleave, tuple(lists))


def warmup(name: str, stage: int, stages: int, microbatches: int, interleave: int = 1) -> int:
    """Forward passes a stage does before its first backward pass, the one that precedes it directly not counted."""
    if name == "gpipe":
        return microbatches - 1
    if name == "1f1b":
        return min(microbatches, stages - stage) - 1
    # All chunks but the last for the first group, and twice the distance to the last stage: there and back.
    return min(microbatches * interleave - 1, (interleave - 1) * stages + 2 * (stages - 1 - stage))


def in_flight(name: str, stage: int, stages: int, microbatches: int, interleave: int = 1) -> int:
    """The most passes of chunks whose activations a stage holds at once: `peak_in_flight`, in closed form."""
    return warmup(name, stage, stages, microbatches, interleave) + 1


def bubble_fraction(name: str, stages: int, microbatches: int, interleave: int = 1) -> float:
    """(p-1)/(m+p-1), and (p-1)/(v m+p-1) interleaved: what simulation gives when all chunks take equally long."""
    chunks = interleave if name == "interleaved" else 1
    return (stages - 1) / (chunks * microbatches + stages - 1)


def _stage_actions(name: str, stage: int, stages: int, microbatches: int, interleave: int) -> Iterator[Action]:
    forwards = [Action(True, *_place(k, stage, stages, interleave)) for k in range(microbatches * interleave)]
    backwards = [
        Action(False, microbatch, (interleave - 1 - chunk // stages) * stages + stage)
        for _, microbatch, chunk in forwards
    ]
    ahead = warmup(name, stage, stages, microbatches, interleave)
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


def _place(k: int, stage: int, stages: int, interleave: int) -> tuple[int, int]:
    """Microbatch and chunk of a stage's k-th forward pass: a group of `stages` microbatches on each chunk in turn."""
    group, within = divmod(k, stages * interleave)
    return group * stages + within % stages, within // stages * stages + stage


# ---- judging ---------------------------------------------------------------------------------------------------


def check(schedule: PipelineSchedule) -> None:
    """Raises UsageError unless every pass happens once, on its stage, and no stage waits for ever."""
    wanted = {
        Action(forward, microbatch, chunk)
        for forward in (True, False)
        for microbatch in range(schedule.microbatches)
        for chunk in range(schedule.chunks)
    }
    seen: set[Action] = set()
    if len(schedule.actions) != schedule.stages:
        raise UsageError(f"{len(schedule.actions)} lists of actions for {schedule.stages} stages")
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            if action not in wanted:
                raise UsageError(f"stage {stage} does {action}, which this pipeline does not have")
            if action.chunk % schedule.stages != stage:
                raise UsageError(f"stage {stage} does {action}: chunk {action.chunk} lies on another stage")
            if action in seen:
                raise UsageError(f"stage {stage} does {action} twice")
            seen.add(action)
    if seen != wanted:
        raise UsageError(f"nobody does {min(wanted - seen)}")
    simulate(schedule, [1.0] * schedule.chunks, [1.0] * schedule.chunks)


def peak_in_flight(schedule: PipelineSchedule, chunk_weights: Sequence[float] | None = None) -> list[float]:
    """For each stage the most activations held at once: passes of chunks, each weighing 1 or what is given."""
    weights = [1.0] * schedule.chunks if chunk_weights is None else chunk_weights
    peaks = []
    for actions in schedule.actions:
        held = peak = 0.0
        for forward, _, chunk in actions:
            held += weights[chunk] if forward else -weights[chunk]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def simulate(
    schedule: PipelineSchedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: float = 0.0,
    keep_slots: bool = False,
) -> Timeline:
    """Runs the lists on a clock: seconds of each chunk's two passes, and of the way between two stages.

    A transfer delays whoever waits for it and occupies nobody; a sender that is held up by sending has that time in
    its passes. UsageError when the stages wait for one another for ever.
    """
    stages, top, count = schedule.stages, schedule.chunks - 1, schedule.microbatches
    # When each pass of each chunk and microbatch ended.
    forward_ends = [[_NOT_YET] * count for _ in range(top + 1)]
    backward_ends = [[_NOT_YET] * count for _ in range(top + 1)]
    way_s = transfer_s if stages > 1 else 0.0
    done, clock, busy = [0] * stages, [0.0] * stages, [0.0] * stages
    slots: list[Slot] = []
    ready, listed = list(range(stages)), [True] * stages
    while ready:
        stage = ready.pop()
        listed[stage] = False
        now, at, actions = clock[stage], done[stage], schedule.actions[stage]
        while at < len(actions):
            forward, microbatch, chunk = actions[at]
            # What the pass waits for: its input from the chunk before; at the ends of the pipeline, only itself.
            if forward:
                came = forward_ends[chunk - 1][microbatch] + way_s if chunk else 0.0
                took, reader = forward_s[chunk], (chunk + 1) % stages
            else:
                came = forward_ends[chunk][microbatch]
                if came != _NOT_YET and chunk != top:
                    came = backward_ends[chunk + 1][microbatch] + way_s
                took, reader = backward_s[chunk], (chunk - 1) % stages
            if came == _NOT_YET:
                break  # whoever makes it wakes this stage
            start = came if came > now else now
            now = start + took
            (forward_ends if forward else backward_ends)[chunk][microbatch] = now
            busy[stage] += took
            at += 1
            if keep_slots:
                slots.append(Slot(stage, actions[at - 1], start, now))
            if not listed[reader] and reader != stage:
                listed[reader] = True
                ready.append(reader)
        clock[stage], done[stage] = now, at
    _require_finished(schedule, done)
    return Timeline(max(clock), tuple(busy), tuple(slots))


def simulated_passes(stages: int, microbatches: int, interleave: int) -> int:
    """How many passes `simulated_s` walks through where the pace is steady from the start: its least cost."""
    first = _SETTLED_ROUNDS * stages + microbatches % stages
    walked = microbatches if microbatches <= first + stages else 2 * first + stages
    return 2 * stages * interleave * walked


def simulated_s(
    name: str,
    stages: int,
    microbatches: int,
    interleave: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
) -> float:
    """Length of a step without walking through all of it: the steady state repeats every `stages` microbatches.

    Short runs, each a round longer, show what one more round costs; when that has stayed the same it is taken for the
    rest. Equal stages are at their pace at once and give what simulating everything gives; uneven ones may drift for
    some rounds, which are walked as long as they are cheap, and tests hold what is left.
    """
    whole = _SETTLED_ROUNDS * stages + microbatches % stages
    if microbatches <= whole + stages:
        return simulate(_built(name, stages, microbatches, interleave), forward_s, backward_s).total_s
    even = len({*forward_s}) == len({*backward_s}) == 1
    walked = 2 * stages * interleave * whole
    taken_s = simulate(_built(name, stages, whole, interleave), forward_s, backward_s).total_s
    rounds_s: list[float] = []
    while whole < microbatches:
        whole += stages
        longer_s = simulate(_built(name, stages, whole, interleave), forward_s, backward_s).total_s
        rounds_s.append(longer_s - taken_s)
        taken_s = longer_s
        walked += 2 * stages * interleave * whole
        last = rounds_s[-_STEADY_ROUNDS:]
        if even or walked > _CHEAP_PASSES or (len(last) == _STEADY_ROUNDS and max(last) - min(last) <= _SAME * taken_s):
            break
    return taken_s + rounds_s[-1] * ((microbatches - whole) // stages)


_built = functools.lru_cache(maxsize=32)(build)


def _require_finished(schedule: PipelineSchedule, done: Sequence[int]) -> None:
    stuck = [
        f"stage {stage} at {actions[count]}"
        for stage, (actions, count) in enumerate(zip(schedule.actions, done, strict=True))
        if count < len(actions)
    ]
    if stuck:
        raise UsageError(f"schedule {schedule.name} deadlocks: {', '.join(stuck[:4])} wait for ever")
