"""The page of a pipeline schedule: its passes in time, and the activations every rank keeps."""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.core.step.action import COMPUTE, StepProgram, parts
from tilemesh.core.step.draw import Curve
from tilemesh.core.step.simulate import Timeline
from tilemesh.report import timeline as lanes_of
from tilemesh.report.draw import Line, PageTable, Plot, PlotAxis, chart
from tilemesh.report.html import Html, article, el

KINDS = {
    "F": ("forward", 0), "B": ("backward", 7), "I": ("gradient of inputs", 7), "W": ("gradient of weights", 1),
    "FB": ("forward and backward overlapped", 2), "RECOMPUTE": ("forward again", 4),
    "DISPATCH": ("rows to experts of other ranks", 5), "COMBINE": ("results of experts back", 3),
}  # fmt: skip
MOST_LINES = 8  # colours that can be told apart


def render(program: StepProgram, timeline: Timeline, memory: Sequence[Curve], words: str) -> str:
    """`words`: the lines that describe the schedule, the first its name."""
    title, *rest = words.splitlines()
    pieces: list[list[lanes_of.LanePiece]] = [[] for _ in range(program.ranks)]
    for slot in sorted(timeline.slots, key=lambda slot: slot.start_s):
        if slot.action.kind in COMPUTE:
            names = ", ".join(str(part) for part in parts(slot.action)) or str(slot.action)
            pieces[slot.rank].append(lanes_of.LanePiece(slot.start_s, slot.end_s, names, slot.action.kind))
    lanes = []
    for rank, mine in enumerate(pieces):
        lanes += [lanes_of.Lane(f"rank {rank}", mine), *exchange_lanes(timeline, rank, f"experts {rank}")]
    rows = [
        [f"rank {rank}", f"{busy:g}", f"{timeline.total_s - busy:g}", f"{max(value for _, value in memory[rank]):g}"]
        for rank, busy in enumerate(timeline.busy_s)
    ]
    table = PageTable(["rank", "busy", "waiting", "most kept"], rows)
    stretches = [lanes_of.Stretch("all of it", 0.0, timeline.total_s)]
    passes = lanes_of.draw("Passes", "What each rank computes, in time.", lanes, stretches, KINDS, table)
    return article(title, "tilemesh plan", None, *(el("p", line) for line in rest), passes, _memory(memory))


def exchange_lanes(timeline: Timeline, rank: int, name: str) -> list[lanes_of.Lane]:
    """What a rank exchanges with experts of others, as a lane; none where it exchanges nothing."""
    mine = [slot for slot in timeline.exchanges if slot.rank == rank and slot.end_s > slot.start_s]
    mine.sort(key=lambda slot: slot.start_s)
    pieces = [lanes_of.LanePiece(slot.start_s, slot.end_s, str(slot.action), slot.action.kind) for slot in mine]
    return [lanes_of.Lane(name, pieces)] if pieces else []


def _memory(memory: Sequence[Curve]) -> Html:
    shown = memory[:MOST_LINES]
    lines = [Line(f"rank {rank}", _steps(curve), colour=rank, dashed=rank > 3) for rank, curve in enumerate(shown)]
    moments = [moment for curve in shown for moment, _ in curve]
    values = [value for curve in shown for _, value in curve]
    words = "Activations that each rank keeps, in microbatches of its part of the model."
    if len(memory) > MOST_LINES:
        words += f" The first {MOST_LINES} of {len(memory)} ranks."
    across, up = (PlotAxis(0.0, max(ends, default=1.0), name) for ends, name in ((moments, "time"), (values, "kept")))
    plot = Plot(across, up, lines)
    rows = [[f"rank {rank}", f"{max(value for _, value in curve):g}"] for rank, curve in enumerate(memory)]
    return chart("Memory", words, plot, PageTable(["rank", "most kept"], rows), wide=True)


def _steps(curve: Curve) -> list[tuple[float, float | None]]:
    """A curve that jumps: each value until the next."""
    points: list[tuple[float, float | None]] = []
    for moment, value in curve:
        if points:
            points.append((moment, points[-1][1]))
        points.append((moment, value))
    return points
