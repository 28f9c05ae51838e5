"""Two runs side by side, as values: what differs in the configuration, and which figures differ by more than noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilemesh.measure.row import Row, higher_is_better
from tilemesh.measure.sample import Sample, equal
from tilemesh.report.run import Run
from tilemesh.runs.values import number

SAME, BETTER, WORSE, UNSURE = "within noise", "better", "worse", "measured once"


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


def differences(first: Run, first_rows: Sequence[Row], second: Run, second_rows: Sequence[Row]) -> list[Difference]:
    """Every figure both runs have: the rows', then losses at the end of the run."""
    theirs = {row.name: row for row in second_rows}
    found = []
    for row in first_rows:
        other = theirs.get(row.name)
        if other is not None and row.measured is not None and other.measured is not None and row.unit == other.unit:
            found.append(_difference(row.name, row.unit, row.measured, other.measured, _more_is_better(row)))
    if not found:
        for name, unit, a, b in (
            ("step time", "s", first.step_time(), second.step_time()),
            ("throughput", "tokens/s", first.tail("tokens_per_s"), second.tail("tokens_per_s")),
        ):
            if a is not None and b is not None:
                found.append(_difference(name, unit, a, b, higher_is_better(unit)))
    a, b = first.tail("loss"), second.tail("loss")
    if a is not None and b is not None:
        found.append(_difference("training loss, last steps", "nats", a, b, False))
    held = [number(one[-1][1]) for one in (first.figure("held_out"), second.figure("held_out")) if one]
    if len(held) == 2:
        once = [Sample(value, value, value, 1) for value in held]
        found.append(_difference("held-out loss, last", "nats", once[0], once[1], False))
    return found


def _more_is_better(row: Row) -> bool:
    # A share of the step that goes into exchanges is a fraction of which less is better.
    return higher_is_better(row.unit) and row.name != "exchange share"


def _difference(name: str, unit: str, first: Sample, second: Sample, more_is_better: bool) -> Difference:
    if equal(first, second):
        verdict = SAME
    elif first.n == 1 and second.n == 1:
        verdict = UNSURE
    else:
        verdict = BETTER if (second.median > first.median) == more_is_better else WORSE
    return Difference(name, unit, first, second, verdict)


def sentence(name: str, changed: Sequence[Change], found: Sequence[Difference]) -> str:
    """What two runs, the second of this name, come to: what was changed, and what of it can be told from noise."""
    settings = [one.name for one in changed if not one.name.startswith(("sample.", "checkpoint."))]
    more = f" and {len(settings) - 3} more" if len(settings) > 3 else ""
    what = f"{', '.join(settings[:3])}{more} changed" if settings else "The configurations are the same"
    told = [one for one in found if one.verdict in (BETTER, WORSE)]
    if not told:
        return f"{what}; no figure differs by more than noise."
    most = max(told, key=lambda one: abs((one.ratio or 1) - 1))
    by = f"{abs((most.ratio or 1) - 1):.0%}".replace("%", " %")
    way = "more" if (most.ratio or 1) > 1 else "less"
    return (
        f"{what}; {len(told)} of {len(found)} figures differ by more than noise, most of all "
        f"{most.name}: {by} {way} in {name}, which is {most.verdict}."
    )
