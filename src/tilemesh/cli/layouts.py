"""What `tilemesh plan` prints: the table of layouts, the arithmetic, and the reasons."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from tilemesh.core.units import format_bytes, format_count, format_seconds, parse_count
from tilemesh.model.work.task import Code
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.choose import DEFAULT_BATCH_TOKENS, SearchResult
from tilemesh.plan.explain import ExplainedPart
from tilemesh.plan.prediction import Prediction, trainable
from tilemesh.plan.why import runner_up, why

WIDTH = 100
"""Columns that the table of layouts takes at most, where its figures allow that; and all else in a pipe, which has no
width of its own."""
_NATURAL = 1000  # wider than any table: what it is measured in


def plan_console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(stderr=stderr, highlight=False, markup=False, width=WIDTH)
    return console


_CODES: Mapping[Code, str] = {
    "fused": "hand-fused code, as Megatron's (--code fused)",
    "compiled": "our model under torch.compile (--code compiled)",
    "eager": "our model, operation by operation (--code eager)",
}


def headline(name: str, batch: int | None, batch_tokens: str | None, result: SearchResult) -> str:
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
    code = result.estimator().clock.code(result.best.plan)
    looked = f"{result.considered:,} layout{plural} looked at, {result.fitting:,} fit; figures of {_CODES[code]}"
    return f"{words}{pinned}\n{looked}"


def print_layouts(console: Console, result: SearchResult) -> None:
    """A line a layout, and below them what `tilemesh train` lacks for some. Silent columns are left out."""
    said = [trainable(prediction.plan, result.refused) for prediction in result.predictions]
    lacks = [words for words in dict.fromkeys(said) if words != "yes"]
    marks = {"yes": "yes"} | {words: f"no [{place}]" for place, words in enumerate(lacks, start=1)}
    numbered = enumerate(zip(result.predictions, said, strict=True), start=1)
    lines = [_cells(place, prediction, marks[words]) for place, (prediction, words) in numbered]
    silent = {name for name in _OPTIONAL if all(line[name] in ("-", "0.0%") for line in lines)}
    shown = [{heading: text for heading, text in line.items() if heading not in silent} for line in lines]
    wide, narrow = _table(shown, gap=2), _table(shown, gap=1)
    measured = console.options.update(max_width=_NATURAL)
    table = wide if console.measure(wide, options=measured).maximum <= min(console.width, WIDTH) else narrow
    print_whole(console, table)
    for words in lacks:
        console.print(f"{marks[words].removeprefix('no ')} {words} (`tilemesh train`)", soft_wrap=True)


def print_whole(console: Console, table: Table) -> None:
    """A terminal too narrow for a table breaks its lines; a figure is never cut."""
    natural = console.measure(table, options=console.options.update(max_width=_NATURAL)).maximum
    whole = Console(file=console.file, width=max(console.width, natural), highlight=False, markup=False)
    whole.print(table)


_OPTIONAL = ("pp", "seq", "ZeRO", "schedule", "recompute", "bubble")
_LEFT = ("schedule", "recompute", "seq", "train")


def _table(lines: Sequence[Mapping[str, str]], gap: int) -> Table:
    """Lines with a column for each of their keys, so many blanks apart."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, gap - 1, 0, 0))
    for heading in lines[0]:
        table.add_column(heading, justify="left" if heading in _LEFT else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line.values())
    return table


def _cells(place: int, prediction: Prediction, train: str) -> dict[str, str]:
    p = prediction.plan
    schedule = "-" if p.pp == 1 else p.schedule + (f" {p.interleave}" if p.interleave > 1 else "")
    return {
        "": str(place), "dp": str(p.dp), "tp": str(p.tp), "pp": "-" if p.pp == 1 else str(p.pp),
        "seq": "yes" if p.sequence_parallel else "-", "ZeRO": str(p.zero or "-"),
        "batch": f"{p.accumulation}x{p.microbatch}", "schedule": schedule,
        "recompute": "-" if p.recompute == "none" else p.recompute,
        "step": _seconds(prediction.step_time_s), "tok/s": format_count(prediction.tokens_per_s),
        "MFU": f"{prediction.mfu:.1%}",
        "memory": format_bytes(prediction.memory.total_bytes), "bubble": f"{prediction.bubble_fraction:.1%}",
        "comm": f"{prediction.times.exposed_s / prediction.step_time_s:.1%}", "train": train,
    }  # fmt: skip


def _seconds(value: float) -> str:
    """Four digits where the ten lines would else look alike."""
    return f"{value:.2f} s" if 10 <= value < 120 else format_seconds(value)


def print_sections(console: Console, sections: Iterable[ExplainedPart]) -> None:
    for section in sections:
        console.print(f"\n{section.title}")
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
        for column in ("what", "formula", "numbers", "value"):
            table.add_column(column, overflow="fold", justify="right" if column == "value" else "left")
        for row in section.rows:
            table.add_row(f"  {row.what}", row.formula, row.numbers, row.value)
        console.print(table)
        if section.note:
            console.print(f"  {section.note}")
    console.print()


def reasons_for(result: SearchResult) -> list[str]:
    """Why the first, and what the second loses."""
    lines = [*why(result), *filter(None, [_sentence(runner_up(result))])]
    if result.cluster.device.kind != "cpu":
        return lines
    # A rank of a CPU is some of its cores.
    words = ("GPU", "rank"), *((f"{word} {result.cluster.device.name}", f"{word} rank") for word in ("one", "One"))
    for old, new in words:
        lines = [line.replace(old, new) for line in lines]
    return lines


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""
