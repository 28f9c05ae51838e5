"""Parts of a run's page about time: kinds by rank, what could be saved, and the timeline."""

from __future__ import annotations

from typing import Any

from tilemesh.core.step.action import WITHIN
from tilemesh.core.units import format_seconds
from tilemesh.report import spans, step_page, timeline
from tilemesh.report.bars import Bar, BarPart, bars, bars_by_kind
from tilemesh.report.draw import PageTable, figure
from tilemesh.report.html import Html
from tilemesh.report.rows import percent
from tilemesh.report.run import Run
from tilemesh.report.run_parts import absent
from tilemesh.report.verdict import savings as find_savings
from tilemesh.report.verdict import shares_of
from tilemesh.runs.names import TRACE
from tilemesh.runs.values import number, section

MOST_SPANS = 40_000
MOST_STEPS = 8


def by_rank(run: Run) -> Html:
    """Seconds a step by kind, a bar a rank: from the trace, else from what the run says of each rank or the slowest."""
    measured, source = _seconds(run)
    if not measured:
        return absent("time by kind", "neither a trace nor shares of a step are in the folder")
    guess = _predicted(run)
    return bars_by_kind(
        "Time by kind, per step",
        source,
        {"predicted": guess, **measured} if guess else measured,
        spans.KINDS,
        format_seconds,
        head="rank",
        total="step",
        label=lambda seconds, total: percent(seconds / total if total else 0.0),
    )


def _seconds(run: Run) -> tuple[dict[str, dict[str, float]], str]:
    ranks = run.summary.get("ranks")
    if isinstance(ranks, list) and not run.is_behind:
        measured = {
            str(rank_seconds.get("name", f"rank {index}")): _of_rank(rank_seconds)
            for index, rank_seconds in enumerate(ranks)
            if isinstance(rank_seconds, dict)
        }
        if measured and all(measured.values()):
            return measured, "Medians of ordinary steps, as each rank measured them."
    if run.timeline is not None:
        steps = spans.ordinary(run.timeline.steps)
        each = {f"rank {rank}": spans.seconds_by_kind(mine, steps) for rank, mine in run.timeline.ranks.items()}
        return each, f"Means over the {len(steps)} traced steps from step {steps[0].number} on."
    shares, step = shares_of(run), run.step_time()
    if shares and step is not None:
        seconds = {kind: share * step.median for kind, share in shares.items() if share > 0}
        return {"slowest rank": seconds}, "There is no trace: this is what the run says of its slowest rank."
    return {}, ""


def _predicted(run: Run) -> dict[str, float]:
    """The planner's step, in the kinds that are measured; empty where it made none."""
    times = {key: number(value, 0.0) for key, value in section(run.predicted, "times").items()}
    sums = {
        spans.COMPUTE: ("compute_s", "recompute_s", "optimizer_s", "offload_s", "host_s"),
        spans.EXCHANGE: ("tp_s", "cp_s", "ep_s", "pp_s", "dp_s"),
        spans.IDLE: ("bubble_s",),
    }
    summed = {kind: sum(times.get(key, 0.0) for key in keys) for kind, keys in sums.items()}
    return {kind: seconds for kind, seconds in summed.items() if seconds > 0}


def _of_rank(figures: dict[str, Any]) -> dict[str, float]:
    step = number(figures.get("step_s"), 0.0)
    parts = {kind: max(0.0, number(figures.get(f"{kind}_s"), 0.0)) for kind in (spans.EXCHANGE, spans.DATA, spans.IDLE)}
    return {spans.COMPUTE: max(0.0, step - sum(parts.values())), **parts} if step > 0 else {}


def savings(run: Run, of_limit: float | None) -> Html | None:
    possible = find_savings(shares_of(run), of_limit)
    if not possible:
        return None
    shares = [(saving.what, saving.fraction) for saving in possible]
    items = [Bar(what, [BarPart(share, 0, f"{what}: {share:.1%}")], percent(share)) for what, share in shares]
    table = PageTable(["what", "of the step, at most"], [[what, percent(share, 1)] for what, share in shares])
    words = "How much shorter a step would be if this were perfect: an upper bound, not a promise."
    return figure("What could be saved", words, bars(items, most=1.0), table, wide=True)


# ---- the timeline ----------------------------------------------------------------------------------------------


def lanes(run: Run) -> Html:
    """The last traced steps, one lane per rank."""
    if run.timeline is None:
        return absent("the timeline", run.missing.get(TRACE, "no trace"))
    steps = spans.last_steps(run.timeline, MOST_SPANS, MOST_STEPS)
    begin, end = steps[0].began_s - 1e-9, steps[-1].ended_s
    drawn = []
    for rank, each in run.timeline.ranks.items():
        for name, several in ((f"rank {rank}", each), (f"experts {rank}", run.timeline.experts.get(rank, ()))):
            pieces = [
                timeline.LanePiece(span.began_s, span.ended_s, span.name, kind, span.depth)
                for span in several
                if begin <= span.began_s <= end
                for kind in [span.action if span.action in WITHIN else span.kind]
            ]
            drawn += [timeline.Lane(name, pieces)] if pieces or several is each else []
    stretches = [timeline.Stretch(f"step {step.number}", step.began_s, step.ended_s) for step in steps]
    words = f"Steps {steps[0].number} to {steps[-1].number} of what was traced."
    if run.timeline.experts:
        words += " Beneath each rank, what its passes exchange with experts of other ranks."
    return timeline.draw("Timeline", words, drawn, stretches, _LANE_KINDS, _span_table(run.timeline, steps))


_LANE_KINDS = dict(spans.KINDS) | {kind: step_page.KINDS[kind] for kind in map(str, WITHIN)}


def _span_table(traced: spans.TraceTimeline, steps: list[spans.TracedStep]) -> PageTable:
    """What a rank's spans of one name add up to in these steps."""
    totals: dict[tuple[str, str], list[float]] = {}
    zero = steps[0].began_s - 1e-9
    for each in traced.ranks.values():
        for span in each:
            if span.began_s >= zero:
                sums = totals.setdefault((span.name, span.kind), [0.0, 0.0, 0.0])
                lasted = span.ended_s - span.began_s
                sums[0], sums[1], sums[2] = sums[0] + 1, sums[1] + lasted, max(sums[2], lasted)
    share = max(1, len(traced.ranks) * len(steps))
    rows = [
        [name, spans.KINDS[kind][0], f"{count / share:.3g}", format_seconds(total / share), format_seconds(longest)]
        for (name, kind), (count, total, longest) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]
    head = ["span", "kind", "per step and rank", "seconds per step and rank", "longest"]
    return PageTable(head, rows, note="A span's seconds include those of the spans inside it.")
