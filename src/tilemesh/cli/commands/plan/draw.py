"""Draw a pipeline schedule with its memory, proved and timed. Of the schedules by name, searched, or of a CSV file."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tilemesh.cli.commands.plan.train import origin
from tilemesh.cli.output import Output
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.options import OutFile, argument, option, refuse
from tilemesh.core.ranges import Range
from tilemesh.core.step import draw as drawing
from tilemesh.core.step.action import RoutedLayers, StepProgram
from tilemesh.core.step.book import all_schedules, build
from tilemesh.core.step.check import check
from tilemesh.core.step.memory import memory_curve
from tilemesh.core.step.search import ExpertTimes, PassTimes, search
from tilemesh.core.step.simulate import Timeline, simulate
from tilemesh.core.step.slices import slice_lengths, slice_shares
from tilemesh.core.step.text import from_csv, to_csv

MOST_PASSES = 40_000  # ranks x microbatches x chunks: beyond that making and proving takes minutes

LEAST_S, MOST_S = 1e-9, 1e9
"""Of a pass that is drawn: sums and quotients of such times stay numbers."""
DRAWN_TOKENS, DRAWN_ATTENTION = 64, 0.25
"""Of a drawn sequence: its tokens, and what attention takes of a pass through all of them at once."""


def drawn_slice_time(tokens: int, before: int) -> float:
    """Of a pass through the whole sequence, what a slice takes: attention is to all tokens up to its end."""
    attention = tokens * (tokens + before) / DRAWN_TOKENS**2
    return (1 - DRAWN_ATTENTION) * tokens / DRAWN_TOKENS + DRAWN_ATTENTION * attention


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    schedule: str = argument(..., "zb-v, 1f1b, ..., search, or a CSV file.", "SCHEDULE")
    stages: Annotated[int, Range(1)] = option(4, "Ranks.", "N")
    microbatches: Annotated[int, Range(1)] = option(8, "Of a step.", "N")
    chunks: int | None = option(None, "Chunks per rank, where it is open.", "N")
    slices: Annotated[int, Range(1)] | None = option(
        None, "Of terapipe: slices of a sequence, their lengths found for it.", "N"
    )
    times: str | None = option(None, "Seconds of the passes and of a transfer. [default: 1,1,1,0]", "F,I,W[,T]")
    experts: str | None = option(
        None,
        "Seconds of rows to experts of other ranks, of their results back, and of what F and I compute beside the "
        "former (shared experts).",
        "D,C[,S]",
    )
    memory: Annotated[float, Range(0, above=True)] | None = option(
        None,
        "Of search: the most activations a rank keeps, in microbatches of its part of the model. [default: stages]",
        "N",
    )
    svg: OutFile | None = option(None, "Write the drawing as an SVG.", "FILE")
    csv: OutFile | None = option(None, "Write its actions in torch's format.", "FILE")
    json: OutFile | None = option(None, "Every figure by name; - for stdout.", "FILE")
    html: OutFile | None = option(None, "The drawing as a page.", "FILE")


def draw(options: DrawOptions) -> Output:
    from tilemesh.measure.table import PIPE_WIDTH
    from tilemesh.report.step_page import render

    times = _times(options.times, options.experts)
    program = _program(options, times)
    if times.experts is not None:  # each chunk is drawn as one layer
        routed = tuple(RoutedLayers(((chunk,),)) for chunk in range(program.chunks))
        program = dataclasses.replace(program, routed=routed)
    lengths = _slice_lengths(program)
    if program.slices > 1:
        times = dataclasses.replace(times, slice_shares=slice_shares(lengths, drawn_slice_time))
    check(program)
    timeline = simulate(program, times.times(program), keep_slots=True)
    curves = drawing.curves(program, timeline, memory_curve(program, times.sizes(program)))
    words = _words(program, timeline, curves, times)
    columns = shutil.get_terminal_size((PIPE_WIDTH, 0)).columns
    files = {
        "svg": lambda: drawing.svg(program, timeline, curves, words.splitlines()[0]),
        "csv": lambda: to_csv(program),
        "html": lambda: render(program, timeline, curves, words),
    }
    drawn = drawing.text(program, timeline, curves, columns)
    return Output([words, drawn.splitlines()], [_figures(program, timeline, curves, times)], files)


def _slice_lengths(program: StepProgram) -> tuple[int, ...]:
    if program.slices > DRAWN_TOKENS:
        raise UsageError(f"{program.slices} slices of a sequence of {DRAWN_TOKENS} tokens: expected at most as many")
    return slice_lengths(DRAWN_TOKENS, program.ranks, program.slices, drawn_slice_time)


def _times(text: str | None, experts: str | None) -> PassTimes:
    forward_s, input_s, weight_s, *transfer_s = (1.0, 1.0, 1.0) if text is None else _seconds(
        text, "--times", "F, I, W and of a transfer, such as 1,1,1,0.1", 3
    )  # fmt: skip
    if not forward_s + input_s + weight_s:
        raise UsageError(f"--times {text}: all passes take no time; give some, such as 1,1,1")
    times = PassTimes(forward_s, input_s, weight_s, sum(transfer_s))
    if experts is None:
        return times
    routed = ExpertTimes(*_seconds(experts, "--experts", "dispatch, combine and what is computed beside the former", 2))
    if routed.beside_s > min(forward_s, input_s):
        least = f"F {forward_s:g} and I {input_s:g}"
        raise UsageError(f"--experts {experts}: what is computed beside the dispatch is a part of {least}; give less")
    return dataclasses.replace(times, experts=routed)


def _seconds(text: str, name: str, what: str, count: int) -> list[float]:
    """So many numbers, or one more."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (count, count + 1) or any(value and not LEAST_S <= value <= MOST_S for value in values):
        raise UsageError(f"{name} {text}: expected seconds of {what}, each 0 or from {LEAST_S:g} to {MOST_S:g}")
    return values


def _program(options: DrawOptions, times: PassTimes) -> StepProgram:
    name = options.schedule
    if name.endswith(".csv"):
        why = "{} with a file of actions: it says so itself; leave it out"
        refuse(options, why, "stages", "microbatches", "chunks", "slices")
        try:
            return from_csv(Path(name).read_text(encoding="utf-8"), Path(name).stem)
        except FileNotFoundError:
            raise UsageError(f"{name} does not exist: expected a file with a line of actions per rank") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{name}: the file cannot be read: {error}") from None
    stages, microbatches = options.stages, options.microbatches
    size = stages * microbatches * (options.chunks or 1) * (options.slices or 1)
    if size > MOST_PASSES:
        raise UsageError(f"{size} passes are too many to draw: expected at most {MOST_PASSES}")
    if name == "search":
        refuse(options, "{} with search: it finds that itself; leave it out", "chunks", "slices")
        return search(stages, microbatches, times, stages if options.memory is None else options.memory)
    if options.memory is not None:
        raise UsageError("--memory is a limit for search: the other schedules keep what they keep")
    known = {schedule.name: schedule for schedule in all_schedules()}
    if name not in known:
        raise unknown("pipeline schedule", name, (*known, "search"))
    slices = options.slices or (4 if known[name].cuts_sequences else 1)
    return build(name, stages, microbatches, options.chunks, slices)


def _words(program: StepProgram, timeline: Timeline, curves: Sequence[drawing.Curve], times: PassTimes) -> str:
    per_rank = max(len(chunks) for chunks in program.placement.held)
    peaks = [max(value for _, value in curve) for curve in curves]
    cut = ""
    if program.slices > 1:
        *first, last = map(str, _slice_lengths(program))
        cut = f", slices of {', '.join(first)} and {last} of {DRAWN_TOKENS} tokens"
    return (
        f"{program.name}: {program.ranks} stages, {program.microbatches} microbatches, {per_rank} "
        f"chunk{'s' if per_rank > 1 else ''} per rank ({program.placement.name}){cut}\n"
        f"step {timeline.total_s:g} with F {times.forward_s:g}, I {times.input_s:g}, W {times.weight_s:g}, "
        f"transfer {times.transfer_s:g}{_experts_words(times)}; bubble {timeline.bubble:.1%} of all ranks' time, "
        f"{timeline.bubble_rate:.1%} between a rank's first and last pass\n"
        f"activations kept, in microbatches of a rank's part of the model, until their weight gradient: at most "
        f"{max(peaks):g} (by rank: {', '.join(f'{peak:g}' for peak in peaks)})"
    )


def _experts_words(times: PassTimes) -> str:
    if times.experts is None:
        return ""
    dispatch_s, combine_s, beside_s = times.experts
    beside = f", {beside_s:g} computed beside it" if beside_s else ""
    return f", dispatch {dispatch_s:g}{beside}, combine {combine_s:g}"


def _figures(
    program: StepProgram, timeline: Timeline, curves: Sequence[drawing.Curve], times: PassTimes
) -> dict[str, object]:
    return {
        "schedule": program.name, "stages": program.ranks, "microbatches": program.microbatches,
        "chunks": program.chunks, "slices": program.slices, "slice_tokens": list(_slice_lengths(program)),
        "placement": program.placement.directions,
        "times_s": {name: getattr(times, f"{name}_s") for name in ("forward", "input", "weight", "transfer")},
        "experts_s": None if times.experts is None else times.experts._asdict(),
        "step_s": timeline.total_s, "bubble": timeline.bubble, "bubble_rate": timeline.bubble_rate,
        "busy_s": timeline.busy_s,
        "peak_microbatches": [max(value for _, value in curve) for curve in curves],
        "actions": [[str(action) for action in actions] for actions in program.actions],
    } | origin()  # fmt: skip
