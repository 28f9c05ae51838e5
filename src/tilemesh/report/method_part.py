"""The part of a training run's page about its method, where that is not one exchange of whole gradients per step:
staleness of a server's updates, what workers waited, bytes saved by compression, how far replicas went apart, versions
and delays of an asynchronous pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.report.bars import Bar, BarPart, bars
from tilemesh.report.draw import PageTable, figure
from tilemesh.report.html import Child, Html, el, join
from tilemesh.report.rows import percent
from tilemesh.report.run import Run
from tilemesh.runs.values import count, number, numbers, section

_DIVERGENCE = "Divergence from synchronous training:"


def method(run: Run) -> Child:
    """None for a run by data parallelism, or of an older version."""
    facts = section(run.summary, "method")
    if run.servers:
        return _servers(run.servers)
    if "compress" in facts:
        dense, sent = number(facts.get("whole_bytes"), 0.0), number(facts.get("sent_bytes"), 0.0)
        saved = 1 - sent / dense if dense else 0.0
        return el(
            "p",
            f"Gradients compressed by {facts['compress']}: {format_bytes(sent)} sent per step and rank instead of "
            f"{format_bytes(dense)}, {percent(saved)} less. {_DIVERGENCE} of what a step has to send, gradients and "
            f"what earlier steps left out, {percent(number(facts.get('left_out'), 0.0))} by norm waits for later ones.",
        )
    if "period" in facts:
        apart = number(facts.get("spread"), 0.0)
        return el(
            "p",
            f"Weights averaged every {facts['period']} steps, {facts.get('rounds')} times in {facts.get('steps')} "
            f"steps. {_DIVERGENCE} at the last average rank 0 had gone {apart:.2e} of the weights' norm from the mean.",
        )
    if "delays" in facts:
        return _versions(facts)
    return None


def _apart(divergence: Mapping[str, Any]) -> str:
    if not divergence:
        return "–"
    return f"{number(divergence.get('mean'), 0.0):.1e} in the mean, {number(divergence.get('most'), 0.0):.1e} at most"


def _versions(facts: Mapping[str, Any]) -> Html:
    """Of each stage: versions of its weights, and how old the weights of a gradient are when it is applied."""
    versions, delays = numbers(facts, "versions"), numbers(facts, "delays")
    stages = list(enumerate(zip(versions, delays, strict=False)))
    most = max(delays, default=1.0)
    items = [
        Bar(f"stage {stage}", [BarPart(delay, stage % 8, f"{delay:.3g} updates", f"{delay:.3g}")],
            f"{kept:.0f} version{'s' * (kept > 1)}")
        for stage, (kept, delay) in stages
    ]  # fmt: skip
    rows = [[f"stage {stage}", f"{kept:.0f}", f"{delay:.3g}"] for stage, (kept, delay) in stages]
    words = (
        f"{facts.get('schedule')}: {number(facts.get('updates'), 0.0):.0f} updates, "
        f"{number(facts.get('updates_per_step'), 0.0):.0f} in each step. Bars: updates from a forward pass to the one "
        f"that its gradient makes, the own one included; 1 is what a synchronous step has. {_DIVERGENCE} on the first "
        f"stage the weights of a gradient were up to {number(facts.get('divergence'), 0.0):.1e} of their norm from "
        "those that it was applied to."
    )
    head = ["", "versions of the weights held", "delay in updates"]
    return join(figure("Delay", words, bars(items, most=most), PageTable(head, rows), wide=True))


def age_parts(ages: Sequence[tuple[int, int]]) -> list[BarPart]:
    """A bar of gradients by how many updates old their weights were; `ages`: (updates, how many gradients)."""
    total = sum(many for _, many in ages) or 1
    shares = [(age, many / total) for age, many in ages]
    return [BarPart(share, age % 8, f"{age} updates old: {percent(share)}", str(age)) for age, share in shares]


def _servers(servers: Sequence[Mapping[str, Any]]) -> Html:
    items, rows = [], []
    for place, server in enumerate(servers):
        staleness = server.get("staleness")
        pairs = [pair for pair in (staleness if isinstance(staleness, list) else ()) if isinstance(pair, list)]
        ages = [(count(pair[0], 0), count(pair[1], 0)) for pair in pairs if len(pair) == 2]
        items.append(Bar(f"server {place}", age_parts(ages), f"{number(server.get('updates'), 0.0):.0f} updates"))
        rows.append(
            [
                f"server {place}",
                ", ".join(f"{age}: {many}" for age, many in ages),
                format_bytes(number(server.get("bytes"), 0.0)),
                format_seconds(number(server.get("busy_s"), 0.0)),
                ", ".join(format_seconds(seconds) for seconds in numbers(server, "waited_s")),
                ", ".join(f"{worker:g}" for worker in numbers(server, "given_up")) or "none",
                _apart(section(server, "divergence")),
            ]
        )
    head = ["", "gradients by age in updates", "bytes", "busy", "workers waited for others", "given up", "divergence"]
    words = (
        "Gradients by the updates that were made between the read of their weights and their own application, since "
        f"the run was last started. {_DIVERGENCE} how far the weights that a gradient was applied to were from those "
        "that it was computed from, by their norm; a synchronous step has 0."
    )
    return join(figure("Staleness", words, bars(items, most=1.0), PageTable(head, rows), wide=True))
