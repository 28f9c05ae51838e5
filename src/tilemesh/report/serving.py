"""The page of a serving benchmark: latency against load with its prediction, the steps, the pages, the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilemesh.core.units import format_count, format_seconds
from tilemesh.report import run_parts
from tilemesh.report.draw import Line, PageTable, Plot, PlotAxis, around, chart
from tilemesh.report.html import Child, Fact, Html, el, pair
from tilemesh.report.kind_page import Beside, KindPage, PageSection, PairSection, Verdict
from tilemesh.report.rows import percent
from tilemesh.report.run import Run
from tilemesh.report.verdict import state_verdict
from tilemesh.runs.names import METRICS, SUMMARY
from tilemesh.runs.values import number, section

MOST_POINTS = 300
MOST_LOADS = 6
"""Loads whose steps are drawn; a page of more would be long and say no more."""
_EQUAL = 0.2


def _online(run: Run) -> list[Mapping[str, Any]]:
    points = [point for point in run.points if number(point.get("rate"), 0) > 0]
    return sorted(points, key=lambda point: number(point["rate"]))


def _about(run: Run) -> str:
    settings = section(run.config, "serve")
    parts = [str(settings[key]) for key in ("model", "dtype", "device") if key in settings]
    parts += [f"{settings[key]} {key}" for key in ("pages", "running", "step_tokens") if key in settings]
    return " · ".join(parts) or "A serving benchmark."


def _verdict(run: Run, beside: Beside) -> Verdict:
    if run.was_cut_short or not run.points:
        return state_verdict(run)
    errors = []
    for point in _online(run):
        for key in ("ttft_p50", "itl_p50"):
            measured, guess = (number(section(point, which).get(key)) for which in ("measured", "predicted"))
            if measured > 0 and math.isfinite(guess):
                errors.append(abs(guess / measured - 1))
    best = max((number(section(point, "measured").get("tokens_per_s"), 0) for point in run.points), default=0.0)
    sentence = f"Up to {format_count(best)} output tokens per second."
    if errors:
        within = sum(error <= _EQUAL for error in errors)
        sentence += f" {within} of {len(errors)} medians of latency came within 20 % of their prediction."
    kept = [number(section(point, "measured").get("goodput")) for point in _online(run)]
    late = [point for point, share in zip(_online(run), kept, strict=True) if share < 0.99]
    advice = ""
    if late:
        rate = number(late[0]["rate"])
        advice = f"At {rate:g} requests/s some requests miss the goal: add a replica, or allow a longer time."
    return Verdict(sentence, False, advice)


def _facts(run: Run, beside: Beside) -> list[Fact]:
    facts = []
    for name, key in (("first token", "ttft_p50"), ("between tokens", "itl_p50")):
        figures = [number(section(point, "measured").get(key)) for point in _online(run)]
        if figures:
            rates = _online(run)
            facts.append(Fact(name, format_seconds(figures[0]), f"median at {number(rates[0]['rate']):g} requests/s"))
    used = [value for _, value in run.figure("pages_used")]
    pages = number(section(run.config, "serve").get("pages"))
    if used and pages > 0:
        facts.append(Fact("pages", percent(max(used) / pages), f"of {pages:,.0f} in use at most"))
    waste = _waste(run.steps)
    if waste is not None:
        facts.append(Fact("page waste", percent(waste, 1), "places of pages in use that hold nothing"))
    steps = run.figure("seconds")
    if steps:
        ordered = sorted(value for _, value in steps)
        facts.append(Fact("a step", format_seconds(ordered[len(ordered) // 2]), f"median of {len(ordered):,}"))
    return facts


def _waste(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Of the places in pages that requests held, the share without a token, over all steps."""
    places = sum(number(step.get("held_places"), 0) for step in steps)
    tokens = sum(number(step.get("held_tokens"), 0) for step in steps)
    return 1 - tokens / places if places > 0 else None


# ---- latency against load --------------------------------------------------------------------------------------


def _load(run: Run, beside: Beside) -> Html | None:
    if not _online(run):
        return None
    charts = [
        _against_load(run, "Time to first token", "seconds", ("ttft_p50", "ttft_p99"), format_seconds),
        _against_load(run, "Time between tokens", "seconds", ("itl_p50", "itl_p99"), format_seconds),
        _against_load(run, "Output tokens per second", "tokens/s", ("tokens_per_s",), format_count),
        _against_load(run, "Requests under way", "requests", ("inside",), "{:.3g}".format),
    ]
    return el("div", *charts, class_="pair")


_WORDS = {"ttft_p50": "median", "ttft_p99": "p99", "itl_p50": "median", "itl_p99": "p99"}


def _against_load(run: Run, title: str, words: str, keys: Sequence[str], show: Callable[[float], str]) -> Html:
    points = _online(run)
    rates = [number(point["rate"]) for point in points]
    lines, head = [], ["requests/s"]
    columns: list[list[float]] = []
    for colour, key in enumerate(keys):
        for which in ("measured", "predicted"):
            values = [number(section(point, which).get(key)) for point in points]
            name = f"{_WORDS.get(key, '')} {which}".strip()
            drawn = [(rate, value) for rate, value in zip(rates, values, strict=True) if math.isfinite(value)]
            lines.append(Line(name, drawn, colour, dashed=which == "predicted", dots=True))
            head.append(name)
            columns.append(values)
    finite = [value for column in columns for value in column if math.isfinite(value)]
    x = PlotAxis(*around(rates, zero=True), "requests per second")
    y = PlotAxis(*around(finite, zero=True), words, show)
    rows: list[list[Child]] = [
        [f"{rate:g}", *(show(column[place]) if math.isfinite(column[place]) else "–" for column in columns)]
        for place, rate in enumerate(rates)
    ]
    table = PageTable(head, rows, [x.place(rate) for rate in rates])
    return chart(
        title, "Dashed: predicted before it was measured, by the engine's own scheduler.", Plot(x, y, lines), table
    )


# ---- steps over time -------------------------------------------------------------------------------------------


def _loads(run: Run) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Steps by the load that they belong to."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for step in run.steps:
        groups.setdefault(str(step.get("load", "")), []).append(step)
    return list(groups.items())[-MOST_LOADS:]


def _each_load(title: str, words: str, series: Mapping[str, str]) -> Callable[[Run, Beside], Html | None]:
    """Figures of the steps over time, a chart for each load. `series`: their keys, and what they are called."""

    def body(run: Run, beside: Beside) -> Html | None:
        charts = (
            _over_time(f"{title}, {name}" if name else title, words, steps, series)
            for name, steps in _loads(run)
            if any(key in step for step in steps for key in series)
        )
        return pair(*charts)

    return body


_STEPS = _each_load("Tokens in each step", "tokens", {"prefill": "tokens of prompts", "decode": "tokens that decode"})
_PAGES = _each_load("Pages", "pages", {"pages_used": "in use", "pages_idle": "kept for prompts that begin alike"})
_BATCH = _each_load(
    "Requests in each step",
    "requests",
    {"decoding": "requests that decode", "prefilling": "requests with a prompt", "waiting": "requests that wait"},
)


def _over_time(title: str, words: str, steps: Sequence[Mapping[str, Any]], series: Mapping[str, str]) -> Html:
    size = -(-len(steps) // MOST_POINTS)
    groups = [steps[begin : begin + size] for begin in range(0, len(steps), size)]
    times = [number(group[0].get("at_s"), 0.0) for group in groups]
    lines, columns = [], []
    for colour, (key, name) in enumerate(series.items()):
        values = [sum(number(sample.get(key), 0.0) for sample in group) / len(group) for group in groups]
        lines.append(Line(name, list(zip(times, values, strict=True)), colour))
        columns.append(values)
    x = PlotAxis(*around(times, zero=True, margin=0.02), "seconds")
    y = PlotAxis(*around([value for column in columns for value in column], zero=True), words)
    rows: list[list[Child]] = [
        [f"{at:.3g}", *(f"{column[place]:.4g}" for column in columns)] for place, at in enumerate(times)
    ]
    table = PageTable(["seconds", *series.values()], rows, [x.place(at) for at in times])
    note = f"Mean of {size} steps at a time." if size > 1 else ""
    return chart(title, note, Plot(x, y, lines), table)


# ---- two runs --------------------------------------------------------------------------------------------------


def _side_by_side(first: Run, second: Run, names: tuple[str, str]) -> Html | None:
    keys = [
        key for key in ("seconds", "prefill", "decode", "running") if key in first.figures and key in second.figures
    ]
    return pair(*(run_parts.overlay(key, key, key, (first, second), names, zero=True) for key in keys))


SERVE_PAGE = KindPage(
    about=_about,
    verdict=_verdict,
    facts=_facts,
    sections=(
        PageSection("load", "Latency against load", _load),
        run_parts.rows_section("Against prediction, limit and peer", ("rate", "batch", "requests")),
        PageSection("steps", "What each step computed", _STEPS),
        PageSection("batch", "Who was in the batch", _BATCH),
        PageSection("pages", "How full the pages were", _PAGES),
        run_parts.EVENTS,
        run_parts.AGAIN,
    ),
    pairs=(PairSection("Side by side", _side_by_side),),
    expects={METRICS: "the steps", SUMMARY: "latency against load"},
)
