"""The page of compressed models: loss against bytes and against speed with the frontier, error per matrix,
histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilemesh.core.units import format_bytes, format_change, format_seconds
from tilemesh.report import run_parts
from tilemesh.report.draw import Dots, Line, PageTable, Plot, PlotAxis, PlotLayer, around, chart, frontier
from tilemesh.report.html import Child, Fact, Html, el, pair
from tilemesh.report.kernel_charts import names_beside
from tilemesh.report.kind_page import Beside, KindPage, PageSection, Verdict
from tilemesh.report.run import Run
from tilemesh.report.verdict import state_verdict
from tilemesh.runs.names import SUMMARY
from tilemesh.runs.values import number, numbers, section

MOST_DRAWN = 6
_TELLS = 1.02  # times of two models that differ by less are no difference on most machines


def _points(run: Run) -> list[dict[str, Any]]:
    """Recipes that were measured; of a damaged summary one may have no name."""
    return [{"recipe": "unnamed", **point} for point in run.points]


def _times(more: object, less: object) -> float:
    return number(more) / (number(less) or math.nan)


def speedup(point: Mapping[str, Any]) -> float:
    """Of decoding, over the plain model timed in turns with this recipe: the machine is not as quick all the time, so
    times of different turns say nothing about each other."""
    return _times(point.get("plain_decode_s"), point.get("decode_s"))


def _about(run: Run) -> str:
    settings = section(run.config, "compress")
    words = {"model": "{}", "sequences": "judged on {} sequences of held-out text", "calibrated": "calibrated on {}"}
    return " · ".join(form.format(settings[key]) for key, form in words.items() if key in settings) or "Compression."


def _verdict(run: Run, beside: Beside) -> Verdict:
    points = _points(run)
    if not points:
        return state_verdict(run)
    recipes, is_part = section(run.config, "compress").get("recipes"), run.summary.get("interrupted") is True
    early = f"Ended after {len(points)} of {len(recipes)} recipes. " if is_part and isinstance(recipes, list) else ""
    plain = number(points[0].get("plain_loss"), 0.0)
    good = [point for point in points if number(point.get("loss")) < plain + 0.01]
    if not good:
        return Verdict(f"{early}Every recipe costs more than 0.01 nats per token of held-out loss.")
    best = min(good, key=lambda point: number(point.get("bytes")))
    smaller = f"{_times(best.get('plain_bytes'), best.get('bytes')):.1f} times smaller"
    return Verdict(f"{early}{best['recipe']} makes the model {smaller} for less than 0.01 nats per token.")


def _facts(run: Run, beside: Beside) -> list[Fact]:
    points = _points(run)
    if not points:
        return []
    first = points[0]
    quick = max(points, key=speedup)
    beside_plain = f"{speedup(quick):.2f}× the plain model's speed, timed in turns"
    is_quicker = speedup(quick) > _TELLS
    return [
        Fact("plain model", f"{number(first.get('plain_loss')):.4f}", "nats per token, held out"),
        Fact("its size", format_bytes(number(first.get("plain_bytes")))),
        Fact(
            "quickest to decode",
            str(quick["recipe"]) if is_quicker else "plain model",
            beside_plain if is_quicker else f"the quickest recipe, {quick['recipe']}, has {beside_plain}",
        ),
    ]


def _scatter(
    title: str,
    words: str,
    pairs: Sequence[tuple[str, float, float]],
    plain: tuple[float, float],
    show: Callable[[float], str],
    more: Mapping[str, Sequence[str]] | None = None,
    is_more_better: bool = False,
) -> Html:
    """Loss up, `words` across; the frontier is joined. `more`: further columns of the table."""
    drawn = [(x, y) for _, x, y in pairs]
    sign = -1 if is_more_better else 1
    everything = [*drawn, plain]
    edge = [everything[i] for i in frontier([(sign * x, y) for x, y in everything])]
    x = PlotAxis(*around([place[0] for place in (*drawn, plain)], zero=True), words, show, binary=show is format_bytes)
    low, high = around([place[1] for place in (*drawn, plain)])
    digits = min(8, max(3, math.ceil(1 - math.log10(max(high - low, 1e-9)))))  # so that two marks never read the same
    y = PlotAxis(low, high, "held-out loss, nats per token", f"{{:.{digits}f}}".format)
    layers: list[PlotLayer] = [
        Line("frontier: none is better in both", edge, 1, dashed=True),
        Dots("recipes", drawn, 0, words=[f"{name}: {show(a)}, {b:.4f}" for name, a, b in pairs]),
        Dots("plain model", [plain], 2, words=[f"plain model: {show(plain[0])}, {plain[1]:.4f}"]),
    ]
    # Those on the frontier come first: where there is no room for all names, theirs are shown.
    first = sorted(pairs, key=lambda pair: (pair[1], pair[2]) not in edge)
    layers += names_beside([(a, b) for _, a, b in first], [plain], [name for name, _, _ in first], x, y)
    more = more or {}
    rows: list[list[Child]] = [
        [name, show(a), *others, f"{b:.4f}", format_change(b - plain[1]), "yes" if (a, b) in edge else ""]
        for (name, a, b), *others in zip(pairs, *more.values(), strict=True)
    ]
    head = ["recipe", words, *more, "loss", "change", "on the frontier"]
    table = PageTable(head, rows, [x.place(a) for _, a, _ in pairs])
    alone = [name for name, a, b in pairs if (a, b) in edge] if len(edge) == 1 else []
    sentence = f"{alone[0]} is ahead of all others in both, by however little." if alone else ""
    return chart(title, sentence, Plot(x, y, layers), table)


def _trade(run: Run, beside: Beside) -> Html | None:
    return _charts(points) if (points := _points(run)) else None


def together(runs: Sequence[Run]) -> Html:
    """All recipes of several runs in the same charts, where they were judged alike."""
    points = [point for run in runs for point in _points(run)]
    if not points:
        return el("p", "No recipe was measured.")
    plain = {(round(number(point.get("plain_loss")), 6), number(point.get("plain_bytes"))) for point in points}
    if len(plain) > 1:
        losses = ", ".join(f"{loss:.4f}" for loss, _ in sorted(plain))
        return el(
            "p",
            f"The plain models of these runs have losses of {losses}: other models, or judged on other text, so that "
            "recipes of different runs cannot be compared.",
        )
    return _charts(points)


def _charts(points: Sequence[Mapping[str, Any]]) -> Html:
    loss, first = [number(point.get("loss")) for point in points], points[0]
    names = [str(point["recipe"]) for point in points]
    plain = number(first.get("plain_loss"))
    sizes = [number(point.get("bytes")) for point in points]
    seconds = {
        "a token": [format_seconds(number(point.get("decode_s"))) for point in points],
        "the plain model's, in turns": [format_seconds(number(point.get("plain_decode_s"))) for point in points],
    }
    return el(  # one below the other: charts side by side are too narrow for the recipes' names
        "div",
        _scatter(
            "Loss against bytes",
            "size of the model",
            list(zip(names, sizes, loss, strict=True)),
            (number(first.get("plain_bytes")), plain),
            format_bytes,
        ),
        _scatter(
            "Loss against decoding speed",
            "tokens/s over those of the plain model, timed in turns",
            list(zip(names, map(speedup, points), loss, strict=True)),
            (1.0, plain),
            "{:.2f}×".format,
            seconds,
            is_more_better=True,
        ),
    )


def _errors(run: Run, beside: Beside) -> Html | None:
    """Relative error of every matrix, a line per recipe."""
    drawn = {str(point["recipe"]): section(point, "errors") for point in _points(run) if section(point, "errors")}
    errors = {recipe: drawn[recipe] for recipe in [*drawn][:MOST_DRAWN]}
    if not errors:
        return None
    matrices = [name for name in next(iter(errors.values())) if any(own.get(name) for own in errors.values())]
    columns = {recipe: [number(own.get(name)) for name in matrices] for recipe, own in errors.items()}
    known = [[(place, value) for place, value in enumerate(own) if math.isfinite(value)] for own in columns.values()]
    lines = [Line(recipe, points, colour) for colour, (recipe, points) in enumerate(zip(columns, known, strict=True))]
    x = PlotAxis(0, max(1, len(matrices) - 1), "matrix, in the order of computation", whole=True)
    values = [value for points in known for _, value in points]
    y = PlotAxis(*around(values, zero=True), "relative error of the weights", "{:.3g}".format)
    rows: list[list[Child]] = [
        [name, *(f"{value:.4f}" if math.isfinite(value) else "–" for value in row)]
        for name, *row in zip(matrices, *columns.values(), strict=True)
    ]
    table = PageTable(["matrix", *columns], rows, [x.place(p) for p in range(len(matrices))])
    return chart("Error per matrix", "Norm of the change over the norm of the matrix.", Plot(x, y, lines), table)


def _histograms(run: Run, beside: Beside) -> Html | None:
    charts: list[Html] = []
    for point in _points(run):
        parts = (section(point, "before"), section(point, "after"))
        pairs = [list(zip(numbers(part, "centre"), numbers(part, "count"), strict=False)) for part in parts]
        if not all(pairs) or len(charts) == MOST_DRAWN:
            continue
        x = PlotAxis(*around(at for at, _ in pairs[0]), "weight", "{:.3g}".format)
        y = PlotAxis(*around((many for part in pairs for _, many in part), zero=True), "how many")
        lines = [Line("before", pairs[0], 0), Line("after", pairs[1], 1)]
        rows: list[list[Child]] = [[f"{a:.4g}", f"{b:g}"] for a, b in pairs[1]]
        table = PageTable(["weight", "after"], rows, [x.place(min(max(a, x.low), x.high)) for a, _ in pairs[1]])
        charts.append(chart(f"{point['recipe']}: {point.get('matrix')}", "", Plot(x, y, lines), table))
    return pair(*charts)


COMPRESS_PAGE = KindPage(
    about=_about,
    verdict=_verdict,
    facts=_facts,
    sections=(
        PageSection("trade", "What is lost and what is gained", _trade),
        run_parts.rows_section("Against prediction and peers", ["recipe"]),
        PageSection("errors", "Where the error is", _errors),
        PageSection("weights", "Weights before and after", _histograms),
        run_parts.AGAIN,
    ),
    together=together,
    expects={SUMMARY: "loss, bytes and times"},
)
