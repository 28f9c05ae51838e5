"""Every schedule by its name, or by its own lists of passes: what it is called with, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.plan import ASYNCHRONOUS, LIST_WORDS, is_listed
from tilemesh.core.step.action import PASSES, StepProgram
from tilemesh.core.step.asynchronous import asynchronous
from tilemesh.core.step.check import check
from tilemesh.core.step.placement import ChunkPlacement, loop, two_ways, vee
from tilemesh.core.step.schedules import breadth_first, gpipe, interleaved, one_f_one_b, zb_h1, zb_h2
from tilemesh.core.step.slices import terapipe
from tilemesh.core.step.text import from_csv
from tilemesh.core.step.two_ways import chimera, dual_pipe, dual_pipe_v
from tilemesh.core.step.vees import vee_schedule, zb_v

_Maker = Callable[[int, int], StepProgram]

_ONE_CHUNK: dict[str, _Maker] = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-h2": zb_h2}
_SEVERAL_CHUNKS = {"interleaved": interleaved, "breadth-first": breadth_first}
_TWO_CHUNKS: dict[str, _Maker] = {
    "zb-v": zb_v,
    "v-half": lambda ranks, microbatches: vee_schedule("v-half", ranks, microbatches),
    "v-min": lambda ranks, microbatches: vee_schedule("v-min", ranks, microbatches),
    "dualpipe-v": dual_pipe_v,
}
_BOTH_WAYS: dict[str, _Maker] = {"dualpipe": dual_pipe, "chimera": chimera}

SCHEDULES = (*_ONE_CHUNK, *_SEVERAL_CHUNKS, *_TWO_CHUNKS, *_BOTH_WAYS, "terapipe")
"""Those whose step is that of one process; `ASYNCHRONOUS` are the others."""
_SPLIT = frozenset(("zb-h1", "zb-h2", *_TWO_CHUNKS, "dualpipe"))


@functools.lru_cache(maxsize=32)
def listed(text: str) -> StepProgram:
    """The passes of a list, proved; messages, gathers and sums that it may hold are left out, since passes add them."""
    whole = from_csv(text, LIST_WORDS)
    if whole.slices > 1 or "UPDATE" in whole.kinds:
        more = "cuts sequences: use schedule=terapipe" if whole.slices > 1 else "updates weights: leave UPDATE out"
        raise UsageError(f"{LIST_WORDS} {more}")
    passes = tuple(tuple(action for action in actions if action.kind in PASSES) for actions in whole.actions)
    placement = dataclasses.replace(whole.placement, name=f"listed {whole.placement.directions}")
    program = dataclasses.replace(whole, actions=passes, placement=placement)
    check(program)
    return program


@functools.cache
def is_split(name: str) -> bool:
    """Whether a schedule does backward passes in two halves, some or all."""
    return "I" in listed(name).kinds if is_listed(name) else name in _SPLIT


@functools.cache
def chunk_placement(name: str, stages: int, per_rank: int = 1) -> ChunkPlacement:
    """Which rank has which chunk in the schedule of that name, without making its lists."""
    if is_listed(name):
        return listed(name).placement
    if name in _TWO_CHUNKS:
        return vee(stages)
    return two_ways(stages) if name in _BOTH_WAYS else loop(stages, per_rank if name in _SEVERAL_CHUNKS else 1)


def microbatches_of(name: str, stages: int) -> tuple[int, int]:
    """How many microbatches a schedule takes: at least so many, and a multiple of so many."""
    if is_listed(name):
        return listed(name).microbatches, 1
    if name in ("interleaved", "pipedream-2bw"):
        return stages, stages
    if name in _BOTH_WAYS:
        return (2 * stages if name == "dualpipe" else 2), 2
    return (2 * stages if name == "dualpipe-v" else 1), 1


def why_not_built(name: str, stages: int, microbatches: int) -> str | None:
    """Why a schedule cannot be made for so many stages and microbatches, with the nearest that can; None: it can."""
    if is_listed(name):
        program = listed(name)
        if (program.ranks, program.microbatches) == (stages, microbatches):
            return None
        return (
            f"is a list for pp {program.ranks} and {program.microbatches} microbatches: pp is {stages} and "
            f"accumulation {microbatches}"
        )
    if name in _BOTH_WAYS and stages % 2:
        return f"{name} takes an even number of stages: pp is {stages}, the next that can is {stages + 1}"
    least, multiple = microbatches_of(name, stages)
    nearest = max(least, -(-microbatches // multiple) * multiple)
    if nearest == microbatches:
        return None
    taken = f"at least {least}" if multiple == 1 else f"a multiple of {multiple}, at least {least}"
    return (
        f"{name} with pp {stages} takes {taken} microbatches: accumulation is {microbatches}, {nearest} is the next "
        "that can"
    )


def build(name: str, stages: int, microbatches: int, per_rank: int | None = None, slices: int = 1) -> StepProgram:
    """The schedule of that name on so many ranks.

    `per_rank`: chunks per rank, for the schedules that leave it open (default 2 there). `slices`: of each sequence,
    for terapipe.
    """
    if is_listed(name):
        reason = why_not_built(name, stages, microbatches)
        if reason:
            raise UsageError(f"schedule {reason}")
        return listed(name)
    if name not in (*SCHEDULES, *ASYNCHRONOUS):
        raise unknown("pipeline schedule", name, (*SCHEDULES, *ASYNCHRONOUS))
    for word, value in (("stages", stages), ("microbatches", microbatches), ("chunks", per_rank), ("slices", slices)):
        if value is not None and value < 1:
            raise UsageError(f"a pipeline with {value} {word}: expected at least 1")
    if slices > 1 and name != "terapipe":
        raise UsageError(f"schedule {name} does not cut sequences, and {slices} slices were asked for: use terapipe")
    if name in _SEVERAL_CHUNKS:
        return _SEVERAL_CHUNKS[name](stages, microbatches, 2 if per_rank is None else per_rank)
    fixed = 2 if name in _TWO_CHUNKS or name in _BOTH_WAYS else 1
    if per_rank not in (None, fixed):
        raise UsageError(
            f"schedule {name} has {fixed} chunk{'s' if fixed > 1 else ''} per rank, {per_rank} were asked for: "
            "use interleaved or breadth-first"
        )
    if name == "terapipe":
        return terapipe(stages, microbatches, slices)
    if name in ASYNCHRONOUS:
        return asynchronous(name, stages, microbatches, stages if name == "pipedream-2bw" else 1)
    return (_ONE_CHUNK | _TWO_CHUNKS | _BOTH_WAYS)[name](stages, microbatches)
