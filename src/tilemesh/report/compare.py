"""Two runs side by side, as values: what differs in the configuration, and which figures differ by more than noise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilemesh.measure.row import CaseValue, Row, higher_is_better
from tilemesh.measure.sample import Sample, equal
from tilemesh.report.run import Run, flat
from tilemesh.runs.values import number

SAME, BETTER, WORSE, DIFFERS, UNSURE = "within noise", "better", "worse", "differs", "measured once"


@dataclass(frozen=True)
class Change:
    """A setting that differs; None where a run does not have it."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Difference:
    """A figure of both runs. `verdict` is about the second; `ratio` is second over first."""

    name: str
    unit: str
    first: Sample
    second: Sample
    verdict: str

    @property
    def ratio(self) -> float | None:
        return self.second.median / self.first.median if self.first.median else None


def changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Change]:
    """Settings that differ, of two flat configurations."""
    names = list(dict.fromkeys([*first, *second]))
    return [Change(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]


def training_differences(
    first: Run, first_rows: Sequence[Row], second: Run, second_rows: Sequence[Row]
) -> list[Difference]:
    """Every figure that two training runs have: the rows', then losses at the end of the run."""
    differences = of_rows(first_rows, second_rows)
    if not differences:
        for name, unit, a, b in (
            ("step time", "s", first.step_time(), second.step_time()),
            ("throughput", "tokens/s", first.tail("tokens_per_s"), second.tail("tokens_per_s")),
        ):
            if a is not None and b is not None:
                differences.append(_difference(name, unit, a, b, higher_is_better(unit)))
    a, b = first.tail("loss"), second.tail("loss")
    if a is not None and b is not None:
        differences.append(_difference("training loss, last steps", "nats", a, b, False))
    losses = [number(run.figure("held_out")[-1][1]) for run in (first, second) if run.figure("held_out")]
    if len(losses) == 2 and all(map(math.isfinite, losses)):
        differences.append(_difference("held-out loss, last", "nats", _once(losses[0]), _once(losses[1]), False))
    return differences


def general_differences(
    first: Run, first_rows: Sequence[Row], second: Run, second_rows: Sequence[Row]
) -> list[Difference]:
    """Every figure that two runs of any kind have: the rows', the summaries', and what their last steps say."""
    differences = of_rows(first_rows, second_rows)
    ours, theirs = summary_figures(first), summary_figures(second)
    differences += [
        _difference(name, "", _once(ours[name]), _once(theirs[name]), None) for name in ours if name in theirs
    ]
    for key in first.figures:
        a, b = first.tail(key), second.tail(key)
        if a is not None and b is not None:
            differences.append(_difference(f"{key}, last steps", "", a, b, None))
    return differences


def summary_figures(run: Run) -> dict[str, float]:
    """The numbers of a run's summary, by name; none of a summary that the run has gone on from."""
    summary = {} if run.is_behind else flat(run.summary)
    figures = {name: number(value) for name, value in summary.items() if name not in ("schema", "kind")}
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def of_rows(first: Sequence[Row], second: Sequence[Row]) -> list[Difference]:
    """What both have measured: rows of one name, and of one case where a run has several of that name."""
    ours, theirs = _by_case(first), _by_case(second)
    names = Counter(name for name, _ in (*ours, *theirs))
    differences = []
    for (name, case), rows in ours.items():
        alike = theirs.get((name, case), [])
        if names[name] == 2 and not alike:  # a row of each run, whatever they were measured at
            alike = next((others for (other, _), others in theirs.items() if other == name), [])
        if len(rows) != 1 or len(alike) != 1:
            continue
        row, other = rows[0], alike[0]
        if row.measured is not None and other.measured is not None and row.unit == other.unit:
            words = [f"{key} {value}" for key, value in case] if names[name] > 2 else []
            title = ", ".join([name, *words])
            differences.append(_difference(title, row.unit, row.measured, other.measured, _more_is_better(row)))
    return differences


_TELLING = ("recipe", "rate", "batch", "shared", "how")
"""What of a row's case tells it from others of its name in a run."""


def _by_case(rows: Sequence[Row]) -> dict[tuple[str, tuple[tuple[str, CaseValue], ...]], list[Row]]:
    cases: dict[tuple[str, tuple[tuple[str, CaseValue], ...]], list[Row]] = {}
    for row in rows:
        case = tuple((key, row.case[key]) for key in _TELLING if key in row.case)
        cases.setdefault((row.name, case), []).append(row)
    return cases


def _once(value: float) -> Sample:
    return Sample(value, value, value, 1)


def _more_is_better(row: Row) -> bool:
    # A share of the step that goes into exchanges is a fraction of which less is better.
    return higher_is_better(row.unit) and row.name != "exchange share"


def _difference(name: str, unit: str, first: Sample, second: Sample, more_is_better: bool | None) -> Difference:
    """`more_is_better`: None where nobody has said which way is better."""
    if first.median == second.median or (equal(first, second) and max(first.n, second.n) > 1):
        verdict = SAME
    elif first.n == 1 and second.n == 1:
        verdict = UNSURE
    elif more_is_better is None:
        verdict = DIFFERS
    else:
        verdict = BETTER if (second.median > first.median) == more_is_better else WORSE
    return Difference(name, unit, first, second, verdict)


def sentence(name: str, changed: Sequence[Change], differences: Sequence[Difference]) -> str:
    """What two runs, the second of this name, come to: what was changed, and what of it can be told from noise."""
    settings = [change.name for change in changed if not change.name.startswith(("sample.", "checkpoint."))]
    more = f" and {len(settings) - 3} more" if len(settings) > 3 else ""
    what = f"{', '.join(settings[:3])}{more} changed" if settings else "The configurations are the same"
    if not differences:
        return f"{what}; the runs have no figure in common."
    differing = [difference for difference in differences if difference.verdict in (BETTER, WORSE, DIFFERS)]
    once = [difference for difference in differences if difference.verdict == UNSURE]
    if not differing and not once:
        return f"{what}; no figure differs by more than noise."
    most = max(differing or once, key=lambda difference: abs((difference.ratio or 1) - 1))
    figures = f"{len(differing or once)} of {len(differences)} figures differ"
    differ = f"{figures} by more than noise" if differing else f"{figures}, each measured once"
    verdict = f", which is {most.verdict}" if most.verdict in (BETTER, WORSE) else ""
    return f"{what}; {differ}, most of all {most.name}: {_change(most)} {name}{verdict}."


def _change(difference: Difference) -> str:
    ratio = difference.ratio
    if ratio is None or ratio < 0:
        return f"{difference.first.median:.4g} before, {difference.second.median:.4g} in"
    if ratio >= 10:
        return f"{ratio:.3g} times as much in"
    by = f"{abs(ratio - 1):.{0 if abs(ratio - 1) >= 0.01 else 2}%}"
    return f"{by.replace('%', ' %')} {'more' if ratio > 1 else 'less'} in"
