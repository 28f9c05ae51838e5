"""The page of a plan: memory against step time, where the step of each layout goes, and the first one's pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilemesh.core.step.action import StepProgram
from tilemesh.core.step.simulate import Slot, simulate
from tilemesh.core.units import format_bytes, format_count, format_seconds
from tilemesh.plan.choose import SearchResult
from tilemesh.plan.memory import RankMemory
from tilemesh.plan.prediction import Prediction, trainable
from tilemesh.report import timeline
from tilemesh.report.bars import bars_by_kind
from tilemesh.report.draw import Dots, Line, PageTable, Plot, PlotAxis, PlotLayer, Rule, chart, frontier, grid
from tilemesh.report.html import Child, Fact, Html, article, coded, el, fact_list, headed, join, pair, tied
from tilemesh.report.rows import percent

MOST_POINTS = 2000
ROUNDS = (3, 2, 1)
"""Microbatches drawn, in multiples of the stages: filling, the steady state and draining ..."""
MOST_SLOTS = 6000
"""... and fewer where a browser would drag."""
TIMES = {
    "compute_s": ("compute", 0), "recompute_s": ("recomputation", 5), "tp_s": ("tensor-parallel exchange", 1),
    "pp_s": ("between stages", 3), "bubble_s": ("bubble", 6), "dp_s": ("gradient exchange", 7),
    "optimizer_s": ("optimizer", 2), "offload_s": ("moving to the host", 3), "host_s": ("waiting for the host", 4),
    "cp_s": ("exchange of sequences", 1), "ep_s": ("rows to experts and back", 7),
}  # fmt: skip
MEMORY = {
    "weights_bytes": 0, "gradients_bytes": 1, "optimizer_bytes": 2, "activations_bytes": 3, "logits_bytes": 5,
    "working_bytes": 4, "reserved_bytes": 6,
}  # fmt: skip
PASSES = {"forward": ("forward", 0), "backward": ("backward", 7)}


def render(result: SearchResult, name: str, why: Sequence[str]) -> str:
    best = result.best
    title = f"{name} on {result.cluster.name}"
    return article(
        title,
        "tilemesh plan",
        verdict(best),
        el("p", _asked(result), class_="quiet"),
        fact_list(_facts(best)),
        el("p", tied(f"{result.mfu_words}."), class_="quiet"),
        headed("The best layouts", _table(result)),
        headed("Why the first" if len(result.predictions) > 1 else "Why", el("ul", *(el("li", line) for line in why))),
        headed("Memory against step time", trade_off(result)),
        headed("Where a step and its memory go", pair(_times(result), _memory(result))),
        headed("The pipeline in time", pipeline_lanes(result)),
    )


def _asked(result: SearchResult) -> str:
    """What a step is, without which its time says nothing."""
    fixed = result.pins.describe()
    layouts = "layout" if result.considered == 1 else "layouts"
    return (
        f"A step of {result.batch:,} sequences x {result.context:,} tokens"
        + (f", fixed: {fixed}" if fixed else "")
        + f"; {result.considered:,} {layouts} looked at, {result.fitting:,} fit."
    )


def verdict(best: Prediction) -> str:
    """One sentence: the layout, how near the peak, and what of the step is not compute."""
    lost = {words: getattr(best.times, key) for key, (words, _) in TIMES.items() if key != "compute_s"}
    largest = max(lost, key=lambda kind: lost[kind])
    share = lost[largest] / best.times.total_s if best.times.total_s else 0.0
    exposed = percent(best.times.exposed_s / best.step_time_s)
    saving = f"; the largest saving is {largest}, at most {percent(share)} of the step" if share >= 0.005 else ""
    return (
        f"{best.plan.short()}: {format_seconds(best.step_time_s)} per step, {percent(best.mfu)} of the peak (MFU), "
        f"exposed communication {exposed}{saving}."
    )


def _facts(best: Prediction) -> list[Fact]:
    return [
        Fact("a step", format_seconds(best.step_time_s)),
        Fact("speed", f"{format_count(best.tokens_per_s)} tokens/s"),
        Fact("MFU", percent(best.mfu, 1), f"HFU {percent(best.hfu, 1)}"),
        Fact("memory per rank", format_bytes(best.memory.total_bytes), f"of {format_bytes(best.usable_bytes)} usable"),
        Fact("bubble", percent(best.bubble_fraction, 1), "of the schedule"),
    ]


def _table(result: SearchResult) -> Html:
    head = ["layout", "step", "tokens/s", "MFU", "memory", "bubble", "exposed", "train"]
    rows: list[list[Child]] = [
        [el("td", _numbered(number, prediction), class_="words"),  # wraps, so that the last column is seen
         format_seconds(prediction.step_time_s), format_count(prediction.tokens_per_s), percent(prediction.mfu, 1),
         format_bytes(prediction.memory.total_bytes),
         percent(prediction.bubble_fraction, 1), percent(prediction.times.exposed_s / prediction.step_time_s, 1),
         trainable(prediction.plan, result.refused)]
        for number, prediction in enumerate(result.predictions, 1)
    ]  # fmt: skip
    words = (
        "Memory: per rank. Bubble: idle time of the pipeline's schedule. Exposed: communication that does not hide "
        "behind computing. Train: whether `tilemesh train` can run it."
    )
    return join(grid(PageTable(head, rows)), el("p", coded(words), class_="quiet"))


def _numbered(number: int, prediction: Prediction) -> str:
    return f"{number}: {prediction.plan.short()}"


def bar_name(number: int, prediction: Prediction) -> str:
    """A layout in so few words that they stand on one line beside its bar; the number finds the rest in the table."""
    plan = prediction.plan
    parts = [f"{number}: dp{plan.dp} tp{plan.tp} pp{plan.pp}"]
    if plan.zero:
        parts.append(f"ZeRO-{plan.zero}")
    if plan.pp > 1:
        parts.append(plan.schedule_name + (f" {plan.interleave}" if plan.interleave > 1 else ""))
    return " ".join(parts)


def trade_off(result: SearchResult) -> Html:
    """All layouts that fit as dots, the frontier joined, the first and what a rank has marked."""
    points = [(point.time_s, float(point.nbytes)) for point in result.points]
    front = frontier(points)
    # The slow tail would press everything that matters into a corner.
    right = max(2.5 * points[front[0]][0], 1.05 * max(points[i][0] for i in front))
    best, usable = result.best, float(result.best.usable_bytes)
    on_front = set(front)
    others = [points[i] for i in range(len(points)) if points[i][0] <= right and i not in on_front]
    drawn = others[:: 1 + len(others) // MOST_POINTS]
    labels = [_label(result.points[i].layout.short(), *points[i]) for i in front]
    layers: list[PlotLayer] = [
        Dots("layouts that fit", drawn, 5, 5),
        Line("frontier", [points[i] for i in front], 0),
        Dots("nothing is both faster and smaller", [points[i] for i in front], 0, 8, words=labels),
        Dots(
            "the first, simulated", [(best.step_time_s, float(best.memory.total_bytes))], 1, 13,
            words=[_label(best.plan.short(), best.step_time_s, best.memory.total_bytes)],
        ),
        Rule("usable memory", usable, 1),
    ]  # fmt: skip
    plot = Plot(
        PlotAxis(0, right, "step time", format_seconds if right < 60 else lambda value: f"{value:,.0f} s"),
        PlotAxis(0, usable * 1.06, "bytes per rank", format_bytes, binary=True),
        layers,
        height=380,
    )
    rows: list[list[Child]] = [
        [result.points[i].layout.short(), format_seconds(points[i][0]), format_bytes(points[i][1])] for i in front
    ]
    places = [points[i][0] / right for i in front]
    table = PageTable(["layout on the frontier", "step", "memory"], rows, places)
    hidden = sum(time > right for time, _ in points)
    words = "Each layout as formulas estimate it; the best ones, in the table above, were then simulated."
    words += f" {hidden:,} slower layouts lie to the right." if hidden else ""
    return chart("Trade-off", words, plot, table, wide=True)


def _label(layout: str, time_s: float, nbytes: float) -> str:
    return f"{layout}: {format_seconds(time_s)}, {format_bytes(nbytes)}"


def _bars(
    result: SearchResult,
    title: str,
    words: str,
    sizes: Callable[[Prediction], Mapping[str, float]],
    kinds: Mapping[str, tuple[str, int]],
    show: Callable[[float], str],
    most: float | None = None,
) -> Html:
    """What the best layouts' steps or bytes consist of."""
    numbered = {_numbered(number, best): (number, best) for number, best in enumerate(result.predictions, 1)}
    by_name = {name: sizes(best) for name, (_, best) in numbered.items()}
    short = {name: bar_name(number, best) for name, (number, best) in numbered.items()}
    return bars_by_kind(title, words, by_name, kinds, show, head="layout", most=most, short=short)


def _times(result: SearchResult) -> Html:
    def seconds(prediction: Prediction) -> dict[str, float]:
        return {key: getattr(prediction.times, key) for key in TIMES}

    words = "Seen from the slowest stage; the numbers are those of the best layouts."
    return _bars(result, "Step time", words, seconds, TIMES, format_seconds)


def memory_parts(memory: RankMemory) -> dict[str, int]:
    """What adds up to the fullest moment: of the gradients only those that are there by then."""
    sizes = {key: getattr(memory, key) for key in MEMORY}
    sizes["gradients_bytes"] -= memory.later_bytes
    return sizes


def _memory(result: SearchResult) -> Html:
    kinds = {key: (key.removesuffix("_bytes"), colour) for key, colour in MEMORY.items()}
    usable = result.best.usable_bytes
    words = f"The bars' full length is the {format_bytes(usable)} a rank may use."

    def sizes(prediction: Prediction) -> dict[str, int]:
        return memory_parts(prediction.memory)

    return _bars(result, "Memory per rank", words, sizes, kinds, format_bytes, float(usable))


def simulated(result: SearchResult, best: Prediction) -> tuple[StepProgram, tuple[Slot, ...], float]:
    """The schedule's first microbatches, every pass with its stage, beginning and end, and the seconds of all."""
    plan = best.plan
    per_round = 2 * plan.pp * plan.pp * plan.interleave
    rounds = next((count for count in ROUNDS if count * per_round <= MOST_SLOTS), ROUNDS[-1])
    few = min(plan.accumulation, rounds * plan.pp)
    if plan.pipeline.why_not(plan.pp, few) is not None:  # made for more
        few = plan.accumulation
    estimator = result.estimator()
    schedule = plan.pipeline.build(plan.pipe_shape._replace(microbatches=few))
    simulation = simulate(schedule, estimator.step_times(plan), keep_slots=True)
    return schedule, simulation.slots, simulation.total_s


def pipeline_lanes(result: SearchResult) -> Html:
    """Passes of the first microbatches over the stages, as simulated."""
    prediction = next((prediction for prediction in result.predictions if prediction.plan.pp > 1), None)
    if prediction is None:
        return el("p", "There is no pipeline: every GPU has all layers (pp 1).")
    plan = prediction.plan
    schedule, slots, total = simulated(result, prediction)
    stages: list[list[timeline.LanePiece]] = [[] for _ in range(plan.pp)]
    for slot in sorted(slots, key=lambda slot: slot.start_s):
        kind = "forward" if slot.action.kind == "F" else "backward"
        stages[slot.rank].append(timeline.LanePiece(slot.start_s, slot.end_s, str(slot.action), kind))
    lanes = [timeline.Lane(f"stage {stage}", pieces) for stage, pieces in enumerate(stages)]
    busy = [sum(piece.ended_s - piece.began_s for piece in pieces) for pieces in stages]
    rows = [
        [f"stage {stage}", format_seconds(busy_s), format_seconds(total - busy_s)] for stage, busy_s in enumerate(busy)
    ]
    few = schedule.microbatches < plan.accumulation
    shown = f"the first {schedule.microbatches} of {plan.accumulation}" if few else str(schedule.microbatches)
    words = f"{plan.short()}: {plan.schedule_name}, {plan.pp} stages, {shown} microbatches."
    if prediction is not result.best:
        words = f"The first has no pipeline; this is the first that has one. {words}"
    stretches = [timeline.Stretch("all of it", 0.0, total)]
    return timeline.draw("Pipeline", words, lanes, stretches, PASSES, PageTable(["stage", "busy", "waiting"], rows))
