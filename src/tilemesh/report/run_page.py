"""The page of one run: did it work, how fast against the limit, where did time and memory go, what to do next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilemesh.core.units import format_bytes, format_count, format_seconds
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.report import memory_part, run_parts, time_parts
from tilemesh.report.draw import Table, grid, numbers
from tilemesh.report.html import Child, Html, el, join, page, tied
from tilemesh.report.rows import percent, row_table
from tilemesh.report.run import RUNNING, Run
from tilemesh.report.verdict import Verdict, improve, judge
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.names import CONFIG
from tilemesh.runs.values import number, section
from tilemesh.runs.values import numbers as figures


@dataclass(frozen=True)
class Beside:
    """What stands beside a run and is not in its folder: made from its configuration by whoever may."""

    rows: Sequence[Row] = ()
    why_no_rows: str = ""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Bytes a rank that the planner expects, by kind."""


def render(run: Run, beside: Beside, *, live: str | None = None) -> str:
    """The whole page; `live` is the folder's version when the page is to follow it."""
    body = _training(run, beside, live) if run.kind in (TRAIN.name, "") else _other(run, beside, live)
    return page(f"{run.name}: tilemesh", body, live=live)


def _other(run: Run, beside: Beside, live: str | None) -> Html:
    """A run of a kind that has no page of its own: its summary beside its prediction, its events, its environment."""
    predicted = flat(run.predicted)
    figures = [[key, str(value), str(predicted.get(key, "-"))] for key, value in flat(run.summary).items()]
    table = Table(["figure", "value", "predicted"], figures, words=True)
    return join(
        el(
            "header",
            el("h1", run.name),
            el("p", f"A run of kind '{run.kind}': {run.state}, step {run.last_step:,}.", class_="quiet"),
            el("p", _watching(run, live), class_="quiet", id="state") if live is not None else None,
            _missing(run),
        ),
        _section(
            "summary", "What it came to", grid(table) if figures else run_parts.absent("a summary", "not there yet")
        ),
        _section("events", "Checkpoints, restarts and warnings", run_parts.events(run)),
        _section("again", "To run it again", _again(run, beside)),
    )


def _training(run: Run, beside: Beside, live: str | None) -> Html:
    return join(
        _header(run, beside, live),
        _section(
            "learning",
            "Did it learn",
            el("div", run_parts.loss(run), run_parts.speed(run), run_parts.progress(run), class_="pair"),
        ),
        _section("rows", "How fast, against prediction and limit", _rows(beside)),
        _section(
            "time", "Where the time went", time_parts.by_rank(run), time_parts.savings(run, _of_limit(run, beside))
        ),
        _section("timeline", "A few steps, a lane a rank", time_parts.lanes(run)),
        _section("memory", "Where the memory went", memory_part.memory(run, beside.memory)),
        _section("mesh", "The mesh and what crosses it", run_parts.mesh(run)),
        _section("events", "Checkpoints, restarts and warnings", run_parts.events(run)),
        _section("again", "To run it again", _again(run, beside)),
    )


def _section(name: str, title: str, *parts: Child) -> Html:
    return el("section", el("h2", title, id=name), *parts)


def _of_limit(run: Run, beside: Beside) -> float | None:
    """What the row says; of a run that goes on, by the limit written down before it began."""
    taken, limit_s = run.step_time(), number(run.predicted.get("limit_s"))
    if run.state == RUNNING and taken is not None and 0 < limit_s < math.inf:
        return limit_s / taken.median
    return next((row.of_limit for row in beside.rows if row.name == "step time"), None)


def _why_no_limit(beside: Beside) -> str:
    """Why a step cannot be held against the limit; empty where it can."""
    reasons = [row.missing.get(key) for row in beside.rows if row.name == "step time" for key in ("measured", "limit")]
    return next((reason for reason in reasons if reason), "" if beside.rows else beside.why_no_rows)


# ---- the top ---------------------------------------------------------------------------------------------------


def _header(run: Run, beside: Beside, live: str | None) -> Html:
    of_limit = _of_limit(run, beside)
    links = ("learning", "rows", "time", "timeline", "memory", "mesh", "events", "again")
    return el(
        "header",
        el("h1", run.name),
        el("p", _what(run), class_="quiet"),
        _verdict(judge(run, of_limit, _why_no_limit(beside)), improve(run, of_limit)),
        el("p", _watching(run, live), class_="quiet", id="state") if live is not None else None,
        _facts(run, beside),
        _missing(run),
        el("nav", *(el("a", name, href=f"#{name}") for name in links), aria_label="sections"),
    )


def _verdict(found: Verdict, advice: str) -> Html:
    return join(
        el("p", tied(found.sentence), class_="verdict bad" if found.is_bad else "verdict"),
        el("p", el("b", "What can be done: "), tied(advice)) if advice else None,
    )


def _watching(run: Run, live: str | None) -> str:
    return "Following the run: this page refreshes by itself." if run.state == RUNNING else "Following the folder."


def _what(run: Run) -> str:
    model, plan = section(run.summary, "model") or section(run.config, "model"), run.plan
    parts = []
    if number(run.summary.get("parameters"), 0) > 0:
        parts.append(f"{format_count(run.summary['parameters'])} parameters")
    shape = [f"{key} {model[key]}" for key in ("layers", "width", "heads", "vocabulary") if key in model]
    parts += [", ".join(shape)] if shape else []
    axes = " x ".join(f"{axis} {plan[axis]}" for axis in ("dp", "tp", "pp") if axis in plan)
    parts += [f"{axes} = {run.world} rank{'s' * (run.world > 1)}"] if axes else []
    parts += [str(plan["precision"])] if "precision" in plan else []
    where = [str(run.summary[key]) for key in ("backend", "device", "machine") if run.summary.get(key)]
    return " · ".join(
        [*parts, " on ".join([" ".join(where[:1]), ", ".join(where[1:])]).strip() if where else ""]
    ).strip(" ·")


def _facts(run: Run, beside: Beside) -> Html:
    facts: list[tuple[str, str, str]] = []
    losses = [value for _, value in run.figure("loss")]
    if losses:
        planned = f" of {run.planned_steps:,}" if run.planned_steps else ""
        shown = f"{losses[-1]:.4g}" if math.isfinite(losses[-1]) else "not a number"
        facts.append(("training loss", shown, f"step {run.last_step:,}{planned}"))
    held = run.figure("held_out")
    if held:
        facts.append(("held-out loss", f"{held[-1][1]:.4g}", f"step {held[-1][0]:,}"))
    speed, of_what = _speed(run, beside)
    if speed is not None:
        facts.append(("tokens/s", format_count(speed.median), of_what))
    taken = run.step_time()
    if taken is not None:
        facts.append(
            ("a step", format_seconds(taken.median), f"{format_seconds(taken.p20)} to {format_seconds(taken.p80)}")
        )
    of_limit = _of_limit(run, beside)
    if of_limit is not None:
        facts.append(("of the limit", percent(of_limit), "as calibrated on this machine"))
    most = max(figures(run.summary, "peak_memory_bytes"), default=0.0)
    if most > 0:
        facts.append(("memory", format_bytes(most), "the largest rank, its process included"))
    total = number(run.summary.get("seconds"))
    if math.isfinite(total):
        first = number(run.summary.get("seconds_to_first_step"))
        facts.append(
            ("in all", format_seconds(total), f"first step after {format_seconds(first)}" if first > 0 else "")
        )
    items = [el("div", el("dt", what), el("dd", value, el("small", aside))) for what, value, aside in facts]
    return el("dl", *items, class_="facts")


def _speed(run: Run, beside: Beside) -> tuple[Sample | None, str]:
    """As the table of rows has it, so that it goes with the step's time; else of the last steps there are."""
    told = next((row.measured for row in beside.rows if row.name == "throughput"), None)
    return (told, "at the median step") if told else (run.tail("tokens_per_s"), f"median of {run.tail_words}")


def _missing(run: Run) -> Html | None:
    gaps = run_parts.gap_words(run)
    if not run.missing and not gaps:
        return None
    items = [el("li", f"{what}: {why}") for what, why in run.missing.items()] + [el("li", gap) for gap in gaps]
    return el("div", el("b", "What this page cannot show"), el("ul", *items), class_="missing")


# ---- the figures and the way back ------------------------------------------------------------------------------


def _rows(beside: Beside) -> Html:
    if not beside.rows:
        return run_parts.absent("no rows", beside.why_no_rows or "the run has no summary")
    words = (
        "Errors of a prediction are coloured in three steps: within 15 %, within 50 %, beyond. 100 % is at the limit."
    )
    return join(el("p", words, class_="quiet"), row_table(beside.rows))


def _again(run: Run, beside: Beside) -> Html:
    told = run.environment.get("commands")
    commands = [str(one) for one in told] if isinstance(told, list) and told else []
    guess = f"tilemesh train {run.folder.rstrip('/')}/{CONFIG}"
    shown = join(
        el("p", "What was typed:" if commands else "The command was not kept; this runs the same configuration:"),
        el("pre", "\n".join(commands) or guess),
    )
    environment = _environment(run, beside)
    settings = [[key, str(value)] for key, value in flat(run.config).items()]
    return join(
        shown,
        el("p", "The environment:"),
        grid(
            Table(
                ["what", "value"],
                [[key, el("td", value, class_="words")] for key, value in environment.items()],
                words=True,
            )
        )
        if environment
        else run_parts.absent("the environment", "the folder does not say"),
        numbers(Table(["setting", "value"], settings, words=True), "Every setting") if settings else None,
        el("details", el("summary", "Text it wrote"), el("pre", run.sample)) if run.sample else None,
    )


def _environment(run: Run, beside: Beside) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in (run.environment, run.summary):
        for key in ("machine", "backend", "device", "cores", "cluster", "commit", "versions", "host"):
            value = source.get(key)
            if isinstance(value, Mapping):
                found[key] = ", ".join(f"{name} {one}" for name, one in value.items())
            elif value is not None:
                found[key] = str(value)
    return found


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"train": {"steps": 2}}` as `{"train.steps": 2}`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found
