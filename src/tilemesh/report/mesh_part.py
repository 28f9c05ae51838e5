"""The part of a training run's page about its mesh: ranks in their places, and what each axis exchanges in a step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilemesh.core.axes import ORDER, ordered
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.report.bars import mesh_picture
from tilemesh.report.draw import PageTable, figure, grid
from tilemesh.report.html import Child, Html, el, join
from tilemesh.report.run import Run
from tilemesh.report.run_parts import absent
from tilemesh.runs.values import count, number, section


def mesh(run: Run) -> Html:
    """Ranks in their places; lines as thick as what crosses them in a step."""
    sizes = {axis: count(run.plan.get(axis)) for axis in ORDER}
    if run.world <= 1:
        return el("p", "One rank: there is no communication.")
    exchanges = section(run.summary, "exchanges")
    totals = {axis: sum(number(nbytes, 0.0) for nbytes in section(exchanges, axis).values()) for axis in exchanges}
    picture = mesh_picture(ordered(sizes), totals)
    others = [f"{axis} {sizes[axis]}" for axis in ORDER if sizes[axis] > 1 and axis not in ("dp", "tp")]
    panels = f", a grid for each place on {' and '.join(others)}" if others else ""
    keys = (("tp", 0, "to the right"), ("dp", 1, "downwards"))
    legend = [
        el("li", el("i", class_=f"key k{colour}"), f"{axis} {sizes[axis]}, {way}")
        for axis, colour, way in keys
        if sizes[axis] > 1
    ]
    picture = join(el("ul", *legend, class_="legend"), picture)
    beside = el("div", el("div", picture), _traffic(run, exchanges), class_="aside")
    words = f"{run.world} ranks{panels}; a line is as thick as its traffic."
    servers = len(run.servers)
    if servers:
        workers, ranks = sizes["dp"], run.world - servers
        each = f", each of {ranks // workers} ranks," if ranks > workers else ""
        words = (
            f"{workers} worker{'s' * (workers > 1)} (dp){each} and {servers} server{'s' * (servers > 1)} (ranks from "
            f"{ranks} on, not drawn): every worker pulls weights from each server and pushes gradients to it, and "
            "sends other workers nothing."
        )
    return figure("The mesh", words, beside, None, wide=True)


def _traffic(run: Run, exchanges: Mapping[str, object]) -> Html:
    seconds, expected = section(run.summary, "exchange_seconds"), section(run.predicted, "exchanges")
    # Seconds of this attempt's steps; of an older run, of everything it did since it was started.
    counted_steps = run.summary.get("exchange_steps")
    done = count(counted_steps if counted_steps is not None else run.summary.get("step"))
    rows: list[list[Child]] = []
    for axis in exchanges:
        for operation, nbytes in section(exchanges, axis).items():
            spent = number(seconds.get(f"{axis} {operation}"))
            shown = format_seconds(spent / done) if math.isfinite(spent) else "–"
            guess = number(section(expected, axis).get(operation))
            shown_guess = format_bytes(guess) if math.isfinite(guess) else "–"
            rows.append([axis, operation, shown_guess, format_bytes(number(nbytes, 0.0)), shown])
    if not rows:
        return absent("traffic by axis", "the run does not say")
    span = f"the mean of {done:,} steps" if counted_steps is not None else "of the whole run over its steps"
    note = f"Bytes of one step as rank 0 sees them; seconds: {span}."
    head = ["axis", "operation", "predicted", "bytes per step and rank", "seconds per step"]
    return el("div", grid(PageTable(head, rows)), el("p", note, class_="quiet"))
