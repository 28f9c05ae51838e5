"""Every pipeline schedule by its name, or by its own lists of passes.

The one idea: a schedule is known here and nowhere else. Those of this package are the files of `schedules/`; another
package offers its own by an entry point of the group `tilemesh.schedules`, or calls `register`. What comes from outside
is proved before it is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import pkgutil

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.packages import entry_points_of
from tilemesh.core.step import schedules
from tilemesh.core.step.action import PASSES, StepProgram
from tilemesh.core.step.schedule import PipelineSchedule, PipeShape

GROUP = "tilemesh.schedules"
"""Of entry points in other packages."""
LIST_WORDS = "the schedule's list"
"""What lists of passes that stand for no name are called in messages."""
_PROVED = tuple(itertools.product((2, 3, 4), (1, 2, 3, 4, 6, 8, 12)))
"""Stages and microbatches for which a schedule from outside is proved, where it takes them."""


def _files() -> dict[str, PipelineSchedule]:
    modules = [
        importlib.import_module(f"{schedules.__name__}.{file.name}")
        for file in pkgutil.iter_modules(schedules.__path__)
    ]
    return {schedule.name: schedule for module in modules for schedule in module.SCHEDULES}


_known = _files()


def all_schedules() -> list[PipelineSchedule]:
    """By name, those of other packages too."""
    _join_packages()
    return [_known[name] for name in sorted(_known)]


def synchronous() -> tuple[str, ...]:
    """Schedules whose step is that of one process."""
    return tuple(schedule.name for schedule in all_schedules() if schedule.updates is None)


def asynchronous() -> tuple[str, ...]:
    """Schedules that update weights while microbatches are under way."""
    return tuple(schedule.name for schedule in all_schedules() if schedule.updates is not None)


def find(name: str) -> PipelineSchedule:
    """The schedule of that name, or the one that a list of passes is."""
    if name in _known:
        return _known[name]
    if is_listed(name):
        return listed(name)
    _join_packages()
    if name not in _known:
        raise unknown("schedule", name, (*synchronous(), *asynchronous()))
    return _known[name]


def build(name: str, stages: int, microbatches: int, per_rank: int | None = None, slices: int = 1) -> StepProgram:
    """The schedule of that name on so many ranks.

    `per_rank`: chunks, for the schedules that leave it open (default 2 there). `slices`: of each sequence,
    for those that cut them.
    """
    schedule = find(name)
    for word, value in (("stages", stages), ("microbatches", microbatches), ("chunks", per_rank), ("slices", slices)):
        if value is not None and value < 1:
            raise UsageError(f"a pipeline with {value} {word}: expected at least 1")
    if slices > 1 and not schedule.cuts_sequences:
        others = " or ".join(other.name for other in all_schedules() if other.cuts_sequences)
        raise UsageError(f"schedule {name} does not cut sequences, and {slices} slices were asked for: use {others}")
    if not schedule.interleaves and per_rank is not None:
        fixed = len(schedule.placement(stages).held[0])
        if per_rank != fixed:
            others = " or ".join(other.name for other in all_schedules() if other.interleaves)
            chunks = f"{fixed} chunk{'s' * (fixed > 1)} per rank"
            raise UsageError(f"schedule {name} has {chunks}, {per_rank} were asked for: use {others}")
    interleave = 1 if not schedule.interleaves else 2 if per_rank is None else per_rank
    return schedule.build(PipeShape(stages, microbatches, interleave, slices))


def schedules_page() -> str:
    """A Markdown section on all schedules."""
    lines = [
        "## Pipeline schedules", "",
        "What `plan.schedule` may name ([how they work](parallel/schedules.md)). An asynchronous one updates weights "
        "within a step, while other microbatches are under way.", "",
        "| schedule | what it does | what it takes |", "|---|---|---|",
    ]  # fmt: skip
    for schedule in all_schedules():
        takes = ["`plan.interleave` of 2 or more"] * bool(schedule.interleaves) + [
            "`plan.slices`"
        ] * schedule.cuts_sequences
        meaning = "asynchronous: " * (schedule.updates is not None) + schedule.meaning
        lines.append(f"| `{schedule.name}` | {meaning} | {', '.join(takes)} |")
    return "\n".join(lines) + "\n"


# ---- lists of passes ---------------------------------------------------------------------------------------------


def is_listed(name: str) -> bool:
    """Whether a schedule is a list of passes and no name."""
    return "," in name


@functools.lru_cache(maxsize=32)
def listed(text: str) -> PipelineSchedule:
    """What a list of passes is, proved; messages, gathers and sums that it may hold are left out, since passes add
    them."""
    from tilemesh.core.step.check import check
    from tilemesh.core.step.text import from_csv

    program = from_csv(text, LIST_WORDS)
    if program.slices > 1 or "UPDATE" in program.kinds:
        more = "cuts sequences: use schedule=terapipe" if program.slices > 1 else "updates weights: leave UPDATE out"
        raise UsageError(f"{LIST_WORDS} {more}")
    passes = tuple(tuple(action for action in actions if action.kind in PASSES) for actions in program.actions)
    check(dataclasses.replace(program, actions=passes))
    stages, microbatches = program.ranks, program.microbatches

    def refuses(pp: int, accumulation: int) -> str | None:
        if (pp, accumulation) == (stages, microbatches):
            return None
        return f"is a list for pp {stages} and {microbatches} microbatches: pp is {pp} and accumulation {accumulation}"

    return PipelineSchedule(
        LIST_WORDS,
        "a list of passes of one's own",
        lambda shape: passes,
        lambda stages: program.placement,
        is_split="I" in program.kinds,
        is_settling=False,
        microbatches=lambda stages: (microbatches, 1),
        refuses=refuses,
    )


# ---- schedules from outside --------------------------------------------------------------------------------------


def register(schedule: PipelineSchedule) -> None:
    """Take a schedule from outside of this package, for this process, if its lists can be proved."""
    if schedule.name in _known or is_listed(schedule.name):
        raise UsageError(f"schedule '{schedule.name}' is there already, or has a comma: choose another name")
    prove(schedule)
    _known[schedule.name] = schedule


def prove(schedule: PipelineSchedule) -> None:
    """Refuse a schedule that is not what it says, for some numbers of stages and microbatches that it takes."""
    from tilemesh.core.step.check import check
    from tilemesh.core.step.passes import exchange

    shapes = [shape for shape in _PROVED if schedule.why_not(*shape) is None]
    if not shapes:
        raise UsageError(f"schedule '{schedule.name}' takes none of 2 to 4 stages with up to 12 microbatches")
    programs = [schedule.build(PipeShape(*shape, *schedule.interleaves[:1])) for shape in shapes]
    for program in programs:
        check(program)
        check(exchange(program))
    kinds = frozenset[str]().union(*(program.kinds for program in programs))
    for says, kind, field in (
        (schedule.is_split, "I", "is_split"),
        (schedule.updates is not None, "UPDATE", "updates"),
    ):
        if says != (kind in kinds):
            raise UsageError(
                f"schedule '{schedule.name}': its lists have {'' if kind in kinds else 'no '}{kind}, and {field} says "
                "otherwise"
            )


@functools.cache
def _join_packages() -> None:
    """Once: reading what is installed takes longer than finding a schedule of our own."""
    for schedule in entry_points_of(GROUP, PipelineSchedule):
        if _known.get(schedule.name) is not schedule:
            register(schedule)
