"""Chosen placements, run on ranks of this machine: measured beside predicted. Part of `tilemesh graph explain --run`.

Every rank traces the program itself, places it by the same choices and computes its parts; results are held against the
whole program's. All placements are timed in turns, by one set of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from tilemesh.cli.chosen import PlacingOptions, program_space, traced_program
from tilemesh.core.axes import members, ranks_of
from tilemesh.core.errors import RunError
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.graph.ir import Node
from tilemesh.measure.sample import Sample
from tilemesh.plan.place.problem import Chosen, PlacementFigures
from tilemesh.plan.place.rules import EXCHANGES
from tilemesh.plan.place.space import PlacementSpace
from tilemesh.train.programs import load_program

if TYPE_CHECKING:
    from tilemesh.comm.runtime.communicator import Communicator
    from tilemesh.measure.row import Row
    from tilemesh.report.html import Html

TIMING_S = 20.0
BEST = 5
"""So many placements, and the worst, are what predictions are judged by."""


@dataclass(frozen=True)
class PlacementRun:
    """What ranks took and sent for a placement, and who chose it."""

    choosers: tuple[str, ...]
    figures: PlacementFigures
    """As they were predicted, the seconds of what is run: small exchanges combined, and begun early."""
    seconds: Sample
    """Of the slowest rank."""
    sent_bytes: float
    """Counted, of a rank on average."""
    busy: str
    """What else the machine did meanwhile."""

    @property
    def error(self) -> float:
        return self.figures.seconds / self.seconds.median - 1


def run_chosen(program: str, options: PlacingOptions, answers: Sequence[Chosen]) -> list[PlacementRun]:
    """Every different placement among the answers, the best predicted one first."""
    from tilemesh.launch.calls import call
    from tilemesh.measure.busy import OtherWork

    same: dict[tuple[int, ...], list[Chosen]] = {}
    for each in answers:
        if each.choice is not None:
            same.setdefault(each.choice, []).append(each)
    others, count = OtherWork(), ranks_of(options.axes)
    choices = [list(choice) for choice in same]
    placing = {field.name: getattr(options, field.name) for field in fields(PlacingOptions)}
    ranks = call("tilemesh.cli.run_placed:on_a_rank", count, program, placing, choices)
    samples = [Sample(**sample) for sample in ranks[0]["samples"]]
    busy = others.busyness(samples).words
    return [
        PlacementRun(
            tuple(each.chooser for each in group),
            replace(figures, seconds=group[0].overlapped_s), samples[at],
            sum(rank["sent"][at] for rank in ranks) / count, busy,
        )
        for at, group in enumerate(same.values())
        if (figures := group[0].figures) is not None
    ]  # fmt: skip


def on_a_rank(program: str, placing: Mapping[str, Any], choices: Sequence[Sequence[int]]) -> dict[str, Any]:
    """For each placement seconds, the slowest rank's, and the bytes that this rank sends."""
    from tilemesh.comm.connection import connect
    from tilemesh.core.heap import keep_freed_memory
    from tilemesh.graph.emit import program as emitted
    from tilemesh.measure.ranks import rank_timer
    from tilemesh.measure.timing import compare

    comm = connect()
    keep_freed_memory()  # as ranks that train do, and as this machine was measured
    space, own = traced_space(program, PlacingOptions(**placing))
    wholes = emitted(space.graph)(*(values := [comm.broadcast(value.contiguous()) for value in own]))
    placements = {str(at): PlacementProgram(space, choice, comm, values) for at, choice in enumerate(choices)}
    for each in placements.values():
        each.require_equal(wholes)
    samples = compare(placements, timer=rank_timer(comm), repeats=15, seconds=TIMING_S, on_error="raise")
    sent = [each.sent_bytes() for each in placements.values()]
    return {"samples": [asdict(samples[name]) for name in placements], "sent": sent}


def traced_space(program: str, options: PlacingOptions) -> tuple[PlacementSpace, list[Any]]:
    """All placements of a user's program, and the tensors of its inputs."""
    import torch

    from tilemesh.graph.by_torch import dtype_of

    model, inputs = load_program(program)
    traced = traced_program(model, inputs, options)
    space, _ = program_space(traced, options)

    def value(node: Node) -> Any:
        """Its own; a gradient of a result, or an optimizer's state."""
        is_drawn = node["name"].startswith("d output")
        fallback = (torch.randn if is_drawn else torch.zeros)(node.shape, dtype=dtype_of(node.dtype))
        return traced.tensors.get(node["name"], fallback)

    return space, [value(node) for node in space.graph.inputs]


class PlacementProgram:
    """One rank's program of a placement, with its parts of the inputs."""

    def __init__(self, space: PlacementSpace, choice: Sequence[int], comm: Communicator, values: Sequence[Any]) -> None:
        from tilemesh.graph.emit import program
        from tilemesh.parallel.placed import exchange_call
        from tilemesh.parallel.shard import take
        from tilemesh.plan.place.overlap import begun_early

        self.cost, self.rank = space.cost, comm.rank
        self.groups: dict[str, Communicator] = {}
        for axis, size in space.cost.axes:
            group = comm.split(members(comm.rank, ((axis, size),), space.cost.axes)[0])
            assert group is not None
            self.groups[axis] = group
        placed = space.placed(choice)
        self.results = [space.result(node, choice) for node in space.graph.outputs]
        graph = space.program(choice, comm.rank)

        def exchange(node: Node, is_begun: bool) -> Any:
            return exchange_call(node, self.groups[node["axis"]], is_begun)

        self.function = program(graph, exchange=exchange, order=begun_early).function
        self.parts = [
            take(placed.placements[node].shard(tuple(value.shape), space.cost.axes, comm.rank), value).contiguous()
            for node, value in zip(space.graph.inputs, values, strict=True)
        ]

    def __call__(self, _: int = 0) -> tuple[Any, ...]:
        return self.function(list(self.parts))

    def require_equal(self, wholes: Sequence[Any]) -> None:
        """As the whole program's results, but for the order of sums."""
        import torch

        from tilemesh.parallel.shard import take

        for at, (part, expected, placement) in enumerate(zip(self(), wholes, self.results, strict=True)):
            own = take(placement.shard(tuple(expected.shape), self.cost.axes, self.rank), expected)
            eps = torch.finfo(part.dtype).eps if expected.is_floating_point() else 0.0
            most = eps**0.5 * max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
            if own.numel() and not float((part - own).abs().max()) <= most:
                raise RunError(f"result {at} on ranks differs from that of one process: this is a fault of tilemesh")

    def sent_bytes(self) -> float:
        """Counted in one step: of the payloads that communicators saw, what a rank sends."""
        total = 0.0

        def observed(axis: str) -> Any:
            def observer(seen: Any) -> Any:
                def note(began_s: float, ended_s: float, calls: int) -> None:
                    nonlocal total
                    total += calls * self.cost.groups[axis].sent_bytes(seen.nbytes, seen.operation)

                return note if seen.is_new and seen.operation in EXCHANGES else None

            return observer

        detach = [comm.observe(observed(axis), every=1) for axis, comm in self.groups.items()]
        self()
        for end in detach:
            end()
        return total


def judged(runs: Sequence[PlacementRun]) -> list[PlacementRun]:
    """The five best by prediction and the worst."""
    return [*runs[:BEST], *runs[BEST:][-1:]]


def run_words(runs: Sequence[PlacementRun]) -> list[str]:
    """How far predictions hold for those that are judged."""
    from tilemesh.plan.grade import rank_correlation

    some = judged(runs)
    measured = [_equal_within(each.seconds.median) for each in some]
    correlation = rank_correlation([_equal_within(each.figures.seconds) for each in some], measured)
    order = "fewer than three placements" if correlation is None else f"rank correlation {correlation:.2f}"
    worst = max(abs(each.error) for each in some)
    is_counted = all(abs(each.sent_bytes - each.figures.sent_bytes) <= 1e-6 * each.sent_bytes for each in runs)
    sent = "as predicted" if is_counted else "not as predicted"
    busy = f"; the machine was shared ({runs[0].busy})" if runs[0].busy else ""
    words = f"the {len(some)} that are the best five and the worst: {order}, errors up to {worst:.0%}"
    return [f"{words}; bytes sent are {sent}{busy}"]


def _equal_within(seconds: float, fraction: float = 0.02) -> int:
    """Times that are closer than this are one: which of them is shorter is not known."""
    return round(math.log(seconds) / math.log1p(fraction))


def run_rows(runs: Sequence[PlacementRun], space: PlacementSpace) -> list[Row]:
    """Time and bytes of each placement."""
    from tilemesh.bench.harness import Estimate, exactly, make_row
    from tilemesh.measure.ranks import ranks_case

    ranks, no_peers = ranks_of(space.cost.axes), "no other program runs this placement"
    least, nothing = Estimate(space.cost.least_s(space.graph)), Estimate(None, "0: copies of everything send nothing")
    rows = []
    for each in runs:
        case = {"chosen by": ", ".join(each.choosers), **ranks_case(ranks), "shared": each.busy or "no"}
        guess = each.figures
        rows += [
            make_row("step", case, each.seconds, predicted=Estimate(guess.seconds), limit=least, no_peers=no_peers),
            make_row(
                "sent per rank", case, exactly(each.sent_bytes), unit="B", predicted=Estimate(guess.sent_bytes),
                limit=nothing, no_peers=no_peers,
            ),
        ]  # fmt: skip
    return rows


def run_page(runs: Sequence[PlacementRun]) -> Html:
    """Measured over predicted time, one point for each placement."""
    from tilemesh.report.draw import Dots, Drawing, Line, PageTable, Plot, PlotAxis, PlotLayer, around

    predicted, measured = [each.figures.seconds for each in runs], [each.seconds.median for each in runs]
    low, high = around([*predicted, *measured])
    layers: list[PlotLayer] = [Line("as predicted", [(low, low), (high, high)], 6)]
    cells = []
    names = [", ".join(each.choosers) for each in runs]
    layers.append(Dots("a placement", [*zip(predicted, measured, strict=True)], 0, words=names))
    for name, seconds, each in zip(names, measured, runs, strict=True):
        sizes = (format_bytes(round(each.figures.sent_bytes)), format_bytes(round(each.sent_bytes)))
        cells.append(
            (name, format_seconds(each.figures.seconds), format_seconds(seconds), f"{each.error:+.0%}", *sizes)
        )
    x, y = (PlotAxis(low, high, f"{word} time of a step", format_seconds) for word in ("predicted", "measured"))
    head = ("chosen by", "predicted", "measured", "error", "sent, predicted", "sent, counted")
    plot, table = Plot(x, y, layers), PageTable(head, cells)
    return Drawing("Predicted and measured", " ".join(run_words(runs)), plot, table).show(wide=True)
