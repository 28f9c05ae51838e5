"""The part of a run's page about its pipeline: the step as it was measured above the step as it is simulated, how long
every stage waits, and what its passes keep, predicted beside measured.

The one idea: both sides are the same list of actions. The simulated one takes the times that were predicted before the
run, or the medians that were measured where nothing was predicted; what is left between the two is then the schedule's
run time alone. An action that waits for a message waits inside its span: that part is drawn, and counted, as waiting.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from tilemesh.core import config
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step import pace
from tilemesh.core.step.action import COMPUTE, StepProgram
from tilemesh.core.step.memory import StepBytes, memory_curve
from tilemesh.core.step.passes import offload
from tilemesh.core.step.program import one_rank, routed
from tilemesh.core.step.simulate import ExchangeTimes, RoutedTimes, StepTimes, Timeline, simulate
from tilemesh.core.step.text import parse_action
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.report import spans, timeline
from tilemesh.report.draw import Line, PageTable, Plot, PlotAxis, chart
from tilemesh.report.html import Child, Html, join
from tilemesh.report.rows import percent
from tilemesh.report.run import Run
from tilemesh.report.run_parts import absent
from tilemesh.report.step_page import KINDS as PASSES
from tilemesh.report.step_page import exchange_lanes
from tilemesh.runs.names import CONFIG, TRACE
from tilemesh.runs.values import number, numbers, section

WAITS = "waits"
KINDS = {**PASSES, WAITS: ("waiting (the bubble)", 6)}
MOST_PASSES = 20_000
MOST_STAGES = 4  # whose memory is drawn: two lines each, in colours that can be told apart


@dataclass(frozen=True)
class MeasuredPass:
    """A computing action of one stage: it waited for its input until `began_s`."""

    name: str
    kind: str
    asked_s: float
    began_s: float
    ended_s: float
    live: float | None

    @property
    def busy_s(self) -> float:
        return self.ended_s - self.began_s


Measured = Sequence[Sequence[MeasuredPass]]
"""The passes of a step, by stage."""


def pipeline(run: Run, kept: StepBytes | None) -> Child:
    """`kept`: what the planner expects passes to keep."""
    plan = _plan(run)
    if plan is None or plan.pp == 1:
        return None
    if plan.pp * plan.accumulation * plan.chunks > MOST_PASSES:
        return absent(
            "the pipeline", f"{plan.accumulation} microbatches over {plan.chunks} chunks are too many to draw"
        )
    program = _routed(run, plan, plan.pipeline.build(plan.pipe_shape))
    measured = median_step(run, plan)
    times, whose = _times(run, program, measured)
    if times is None:
        why = run.missing.get(TRACE, "the trace has no actions of a pipeline")
        return absent("the pipeline", f"{why}, and nothing was predicted")
    simulated = simulate(program, times, keep_slots=True)
    return join(_lanes(run, plan, measured, simulated, whose), _memory(run, plan, program, kept))


def memory_over_step(run: Run, kept: StepBytes | None) -> Child:
    """The curve of a run without stages, whose chunks are its layers where these come and go, else all of them."""
    plan = _plan(run)
    if plan is None or plan.pp > 1:
        return None
    chunks = 1 if kept is None else len(kept.kept)
    if plan.accumulation * chunks > MOST_PASSES:
        return absent("memory over the step", f"{plan.accumulation} microbatches of {chunks} chunks are too many")
    return _memory(run, plan, one_rank(chunks, plan.accumulation), kept)


def _plan(run: Run) -> ParallelPlan | None:
    try:
        return config.from_dict(ParallelPlan, dict(run.plan), CONFIG)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RunError):
        return None


# ---- what was measured -------------------------------------------------------------------------------------------


def measured_step(timeline: spans.TraceTimeline, step: spans.TracedStep, plan: ParallelPlan) -> Measured:
    """The passes of one step on the first rank of every stage; empty where some stage has none."""
    stages = []
    for stage in range(plan.pp):
        mine = [
            span
            for span in timeline.ranks.get(stage * plan.replicas * plan.tp, ())
            if step.began_s <= span.began_s <= step.ended_s
        ]
        waits = [span for span in mine if span.name == "wait recv"]
        stages.append([_pass(span, waits) for span in mine if span.action in COMPUTE])
    return stages if all(stages) else []


def _pass(span: spans.TraceSpan, waits: Sequence[spans.TraceSpan]) -> MeasuredPass:
    inside = [wait.ended_s for wait in waits if span.began_s <= wait.began_s < span.ended_s]
    began_s = min(span.ended_s, max(inside, default=span.began_s))
    return MeasuredPass(span.name, span.action, span.began_s, began_s, span.ended_s, span.live)


def median_step(run: Run, plan: ParallelPlan) -> Measured:
    """Of the traced steps the one of median length; empty where there is none."""
    if run.timeline is None:
        return []
    steps = [measured_step(run.timeline, step, plan) for step in spans.ordinary(run.timeline.steps)]
    complete = sorted((step for step in steps if step), key=lambda step: _ends(step)[1] - _ends(step)[0])
    return complete[len(complete) // 2] if complete else []


def _ends(measured: Measured) -> tuple[float, float]:
    return min(each[0].asked_s for each in measured), max(each[-1].ended_s for each in measured)


def _times(run: Run, program: StepProgram, measured: Measured) -> tuple[StepTimes | None, str]:
    """What passes take, and who says so."""
    predicted = section(run.predicted, "pipeline")
    forward, back, weights = (numbers(predicted, name) for name in ("forward_s", "input_s", "weight_s"))
    if len(forward) == len(back) == len(weights) == program.chunks:
        shares = numbers(predicted, "slice_shares")
        if len(shares) != program.slices:
            shares = [1 / program.slices] * program.slices
        moved = number(predicted.get("transfer_s"), 0.0)
        times = StepTimes(forward, back, weights, moved, slice_shares=shares, routed=_routed_times(predicted))
        return times, "with the times that were predicted before the run"
    by_pass: dict[tuple[str, int], list[float]] = {}
    for each in measured:
        for traced in each:
            try:
                action = parse_action(traced.name)
            except UsageError:  # a span of somebody else's making
                continue
            by_pass.setdefault((traced.kind, action.chunk), []).append(traced.busy_s)
    middle = {key: statistics.median(seconds) for key, seconds in by_pass.items()}
    forward, back, weights = [], [], []
    for chunk in range(program.chunks):
        pair = middle.get(("FB", chunk), 0.0)
        first = middle.get(("F", chunk), pair / 3)
        half = middle.get(("I", chunk), middle.get(("B", chunk), 2 * pair / 3))
        if not first or not half:
            return None, ""
        forward.append(first)
        back.append(half)
        weights.append(middle.get(("W", chunk), 0.0))
    return StepTimes(forward, back, weights), "with the median of each chunk's passes as measured"


def _routed(run: Run, plan: ParallelPlan, program: StepProgram) -> StepProgram:
    """With what passes exchange with experts of other ranks."""
    model, counts = section(run.config, "model"), [int(count) for count in numbers(run.predicted, "chunk_layers")]
    if plan.ep == 1 or not number(model.get("experts"), 0.0) or len(counts) != program.chunks:
        return program
    chunks = [range(begin, end) for begin, end in pairwise((0, *accumulate(counts)))]
    dense = {int(layer) for layer in numbers(model, "dense_layers")}
    return routed(program, plan, chunks, [layer for layer in range(sum(counts)) if layer not in dense])


def _routed_times(predicted: Mapping[str, Any]) -> RoutedTimes | None:
    """As `plan/prediction.py` writes them."""
    parts = predicted.get("routed")
    if not isinstance(parts, list) or len(parts) != 3:
        return None
    forward, back = (numbers({"seconds": part}, "seconds") for part in parts[:2])
    if len(forward) != len(back) or len(back) != len(ExchangeTimes._fields):
        return None
    return RoutedTimes(ExchangeTimes(*forward), ExchangeTimes(*back), number(parts[2], 0.0))


# ---- the two timelines ---------------------------------------------------------------------------------------------


def _lanes(run: Run, plan: ParallelPlan, measured: Measured, simulated: Timeline, whose: str) -> Html:
    lanes = []
    rows: list[list[Child]] = []
    lengths = [simulated.total_s]
    if measured:
        zero_s, end_s = _ends(measured)
        lengths.append(end_s - zero_s)
        for stage, each in enumerate(measured):
            pieces = [(traced.began_s - zero_s, traced.ended_s - zero_s, traced.name, traced.kind) for traced in each]
            lanes.append(timeline.Lane(f"run {stage}", _with_waits(pieces, end_s - zero_s)))
            lanes += _exchanged(run, plan, stage, zero_s, end_s)
    for stage in range(plan.pp):
        pieces = [
            (slot.start_s, slot.end_s, str(slot.action), slot.action.kind)
            for slot in simulated.slots
            if slot.rank == stage
        ]
        lanes.append(timeline.Lane(f"sim {stage}", _with_waits(sorted(pieces), simulated.total_s)))
        lanes += exchange_lanes(simulated, stage, f"sim {stage}, experts")
        busy = simulated.busy_s[stage]
        cells = ["–", "–"]
        if measured:
            worked = sum(traced.busy_s for traced in measured[stage])
            cells = [format_seconds(worked), format_seconds(lengths[1] - worked)]
        rows.append([f"stage {stage}", *cells, format_seconds(busy), format_seconds(simulated.total_s - busy)])
    ideal = pace.bubble_fraction(plan.schedule, plan.pp, plan.accumulation, plan.interleave)
    waited = "–"
    if measured:
        worked = sum(traced.busy_s for each in measured for traced in each)
        waited = percent(1 - worked / (plan.pp * lengths[1]), 1)
    rows.append(["all, the step", "", format_seconds(lengths[1]) if measured else "–", "", format_seconds(lengths[0])])
    rows.append(["bubble", "", waited, "", percent(simulated.bubble, 1)])
    words = (
        f"{plan.schedule_name}: {plan.accumulation} microbatches through {plan.chunks} chunks on {plan.pp} stages. "
        + (
            "Run: the stages in the traced step of median length; sim: "
            if measured
            else "No traced step has its actions; this is "
        )
        + f"the same list of actions on the simulator's clock, {whose}. "
        + (f"Stages wait {waited} of the measured step" if measured else "Stages wait")
        + f"{', ' if measured else ' '}{percent(simulated.bubble, 1)} of the simulated one; the schedule itself has "
        + f"{percent(ideal, 1)} if all passes take equally long."
    )
    table = PageTable(
        ["stage", "computes, measured", "waits, measured", "computes, simulated", "waits, simulated"], rows
    )
    stretches = [timeline.Stretch("the step", 0.0, max(lengths))]
    return timeline.draw("Pipeline", words, lanes, stretches, KINDS, table)


def _exchanged(run: Run, plan: ParallelPlan, stage: int, zero_s: float, end_s: float) -> list[timeline.Lane]:
    """What the first rank of a stage exchanged with experts of others in this stretch of the trace."""
    assert run.timeline is not None
    mine = run.timeline.experts.get(stage * plan.replicas * plan.tp, ())
    pieces = [
        timeline.LanePiece(span.began_s - zero_s, span.ended_s - zero_s, span.name, span.action)
        for span in mine
        if zero_s <= span.began_s <= end_s
    ]
    return [timeline.Lane(f"run {stage}, experts", pieces)] if pieces else []


def _with_waits(pieces: Sequence[tuple[float, float, str, str]], total_s: float) -> list[timeline.LanePiece]:
    """A stage's passes, with what lies between them as waiting."""
    lane, now = [], 0.0
    for began_s, ended_s, name, kind in [*pieces, (total_s, total_s, "", "")]:
        if began_s > now:
            lane.append(timeline.LanePiece(now, began_s, "waits", WAITS))
        if name:
            lane.append(timeline.LanePiece(began_s, ended_s, name, kind))
        now = max(now, ended_s)
    return lane


# ---- memory ----------------------------------------------------------------------------------------------------------


def _memory(run: Run, plan: ParallelPlan, program: StepProgram, kept: StepBytes | None) -> Html | None:
    """What passes keep for their backward passes, after each pass of the list."""
    guess, counted = memory_lines(run, plan, program, kept)
    expected = any(guess)
    if not expected and not counted:
        return None
    lines: list[Line] = []
    rows: list[list[Child]] = []
    for stage in range(plan.pp):
        seen = counted.get(stage, [])
        if stage < MOST_STAGES:
            lines += (
                [Line(f"stage {stage}, predicted", list(enumerate(guess[stage])), stage, dashed=True)]
                if expected
                else []
            )
            lines += [Line(f"stage {stage}, measured", list(enumerate(seen)), stage)] if seen else []
        most, peak = max(guess[stage], default=0.0), max(seen, default=0.0)
        error = f"{most / peak - 1:+.1%}" if expected and peak else "–"
        rows.append(
            [f"stage {stage}", format_bytes(most) if expected else "–", format_bytes(peak) if seen else "–", error]
        )
    places = max((len(line.points) for line in lines), default=1)
    top = max((value or 0.0 for line in lines for _, value in line.points), default=1.0)
    across = PlotAxis(0.0, float(places - 1), "passes of the stage done", whole=True)
    plot = Plot(across, PlotAxis(0.0, top * 1.06 or 1.0, "kept", format_bytes, binary=True), lines)
    whose = "each stage" if plan.pp > 1 else "a rank"
    words = f"Activations that {whose} keeps for backward passes, after each of its passes, by liveness of its actions"
    words += "; measured in a traced step." if counted else "; no traced step counted them."
    if plan.pp > MOST_STAGES:
        words += f" The first {MOST_STAGES} of {plan.pp} stages are drawn."
    table = PageTable(["stage", "most, predicted", "most, measured", "error"], rows)
    return chart(f"Memory of {whose} over the step", words, plot, table, wide=True)


def memory_lines(
    run: Run, plan: ParallelPlan, program: StepProgram, kept: StepBytes | None
) -> tuple[list[list[float]], Mapping[int, list[float]]]:
    """By stage, what liveness says and what was counted after each pass; empty where nobody says."""
    if "activations" in plan.offloads:
        program = offload(program, ahead=plan.prefetch)
    is_known = kept is not None and len(kept.kept) == program.chunks
    guess = _after_passes(program, kept) if kept is not None and is_known else [[] for _ in range(plan.pp)]
    return guess, _counted(run, plan)


def _after_passes(program: StepProgram, kept: StepBytes) -> list[list[float]]:
    """The curve of each stage before its first action and after each of its passes, moves to the host in between."""
    return [
        [curve[0], *(alive for alive, action in zip(curve[1:], actions, strict=True) if action.kind in COMPUTE)]
        for curve, actions in zip(memory_curve(program, kept), program.actions, strict=True)
    ]


def _counted(run: Run, plan: ParallelPlan) -> Mapping[int, list[float]]:
    """By stage, the bytes counted after each pass, in the first traced step that has them; they begin at nothing."""
    for step in run.timeline.steps if run.timeline is not None else ():
        assert run.timeline is not None
        measured = measured_step(run.timeline, step, plan)
        live = [[traced.live for traced in each] for each in measured]
        if live and all(value is not None for each in live for value in each):
            return {stage: [0.0, *(value for value in each if value is not None)] for stage, each in enumerate(live)}
    return {}
