"""What `tilemesh plan` prints: the table of layouts, the arithmetic, and the reasons."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from rich.table import Table

from tilemesh.cli.output import Block, table_of
from tilemesh.core.units import format_bytes, format_count, format_seconds, parse_count
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.choose import DEFAULT_BATCH_TOKENS, SearchResult
from tilemesh.plan.explain import ExplainedPart
from tilemesh.plan.prediction import Prediction, trainable
from tilemesh.plan.software import Software
from tilemesh.plan.why import runner_up, why


def headline(name: str, batch: int | None, batch_tokens: str | None, result: SearchResult, software: Software) -> str:
    total = result.batch * result.context
    wish = ""
    if batch is None:
        default = batch_tokens is None
        wanted = DEFAULT_BATCH_TOKENS if batch_tokens is None else parse_count(batch_tokens)
        wish = f", {format_count(wanted)} {'by default' if default else 'asked'}" if wanted != total else ""
    words = (
        f"{name}: {count_parameters(result.model).total:,} parameters on {result.cluster.name}, batch of "
        f"{result.batch} sequences x {result.context:,} tokens ({format_count(total)}{wish})"
    )
    pinned = f", fixed: {result.pins.describe()}" if result.pins.describe() else ""
    plural = "" if result.considered == 1 else "s"
    looked = f"{result.considered:,} layout{plural} looked at, {result.fitting:,} fit; figures of {software.words}"
    return f"{words}{pinned}\n{looked}"


def layout_items(result: SearchResult) -> list[Block]:
    """A line a layout, and below them what `tilemesh train` lacks for some. Silent columns are left out."""
    trains = [trainable(prediction.plan, result.refused) for prediction in result.predictions]
    lacks = [words for words in dict.fromkeys(trains) if words != "yes"]
    marks = {"yes": "yes"} | {words: f"no [{place}]" for place, words in enumerate(lacks, start=1)}
    numbered = enumerate(zip(result.predictions, trains, strict=True), start=1)
    lines = [_cells(place, prediction, marks[words] if lacks else "-") for place, (prediction, words) in numbered]
    silent = {name for name in _OPTIONAL if all(line[name] in ("-", "0.0%") for line in lines)}
    shown = [{heading: text for heading, text in line.items() if heading not in silent} for line in lines]
    notes = [f"{marks[words].removeprefix('no ')} {words} (`tilemesh train`)" for words in lacks]
    return [table_of(shown, left=("schedule", "recompute", "seq", "train")), *notes]


_OPTIONAL = ("pp", "cp", "ep", "etp", "seq", "ZeRO", "schedule", "recompute", "bubble", "train")


def _cells(place: int, prediction: Prediction, train: str) -> dict[str, str]:
    p = prediction.plan
    schedule = "-" if p.pp == 1 else p.schedule + (f" {p.interleave}" if p.interleave > 1 else "")
    return {
        "": str(place), "dp": str(p.dp), "tp": str(p.tp), "pp": "-" if p.pp == 1 else str(p.pp),
        "cp": "-" if p.cp == 1 else str(p.cp), "ep": "-" if p.ep == 1 else str(p.ep),
        "etp": str(p.expert_tp) if p.routes_apart else "-",
        "seq": "yes" if p.sequence_parallel else "-", "ZeRO": str(p.zero or "-"),
        "batch": f"{p.accumulation}x{p.microbatch}", "schedule": schedule,
        "recompute": "-" if p.recompute == "none" else p.recompute,
        "step": _seconds(prediction.step_time_s), "tok/s": format_count(prediction.tokens_per_s),
        "MFU": f"{prediction.mfu:.0%}",
        "memory": format_bytes(prediction.memory.total_bytes), "bubble": f"{prediction.bubble_fraction:.1%}",
        "comm": f"{prediction.times.exposed_s / prediction.step_time_s:.1%}", "train": train,
    }  # fmt: skip


def _seconds(value: float) -> str:
    """Four digits where the ten lines would else look alike."""
    return f"{value:.2f} s" if 10 <= value < 120 else format_seconds(value)


def section_items(sections: Iterable[ExplainedPart]) -> Iterator[Block]:
    """The arithmetic, a table per section."""
    for section in sections:
        yield f"\n{section.title}"
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
        for column in ("what", "formula", "numbers", "value"):
            table.add_column(column, overflow="fold", justify="right" if column == "value" else "left")
        for row in section.rows:
            table.add_row(f"  {row.what}", row.formula, row.numbers, row.value)
        yield table
        yield from [f"  {section.note}"] if section.note else []
    yield ""


def reasons_for(result: SearchResult) -> list[str]:
    """Why the first, and what the second loses."""
    lost = runner_up(result)
    lines = [*why(result), *([f"{lost[0].upper()}{lost[1:]}."] if lost else [])]
    if result.cluster.device.kind != "cpu":
        return lines
    # A rank of a CPU is some of its cores.
    device = re.compile(rf"GPU|(?<=\b[oO]ne ){re.escape(result.cluster.device.name)}")
    return [device.sub("rank", line) for line in lines]


def money_words(money: Mapping[str, float], result: SearchResult) -> Iterator[str]:
    """What training costs, in the currency of the price."""
    if not money:
        return
    holder = "GPU" if result.cluster.device.kind == "gpu" else "rank"
    yield (
        f"At {money['price']:g} per {holder} and hour the cluster costs {money['per_hour']:,.6g} per hour, and a "
        f"billion tokens {money['per_billion_tokens']:,.4g}."
    )
    if "budget" in money:
        each = money["tokens"] / count_parameters(result.model).total
        yield (
            f"A budget of {money['budget']:,.10g} is {money['hours']:,.4g} hours: {format_count(money['tokens'])} "
            f"tokens, {each:,.3g} per parameter (about 20 make the best of the FLOPs: Hoffmann et al. 2022)."
        )
