"""Rows as a table for people: case | predicted | measured | limit | of limit | each peer | speedup.

What all rows share (name, dtype, ranks) is said once, above. A column that is missing carries a mark, and the reason
stands below, once. Cells take one line where the width allows it, two where it does not, and columns that still do
not fit go into a further table below: a number is never cut. On a terminal there is colour; in a pipe the same text
is plain.
"""

from __future__ import annotations

import io
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilemesh.core.units import format_bytes, format_count, format_plain, format_rate, format_seconds
from tilemesh.measure.row import COMPUTES_LESS, CaseValue, Row
from tilemesh.measure.sample import Sample, equal

# A pipe has no width of its own; what is wider than this is broken by most of what shows text.
PIPE_WIDTH = 100

GAP = 2  # blanks between two columns

FASTER, SLOWER, SAME, QUIET = "green", "red", "dim", "dim"

# The scales core/units.py writes in.
SECONDS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
BINARY = ("", "K", "M", "G", "T", "P")
DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def print_rows(rows: Sequence[Row], console: Console | None = None, figure: str = "measured") -> None:
    """Print rows to the terminal, or plain to a pipe (as wide as COLUMNS says, or 100). `figure`: how the results were
    had, which names their column."""
    if not rows:
        return
    console = console or Console()
    if console.is_terminal:
        _print(rows, console, console.width, figure)
    else:
        console.file.write(render(rows, pipe_width(), figure))


def pipe_width() -> int:
    """How wide text in a pipe may be: what COLUMNS says, or 100."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() else PIPE_WIDTH


def print_words(words: str, console: Console, style: str | None = None) -> None:
    """Print a sentence, broken between words where the line ends; longer words such as paths stay whole. What begins
    with blanks, `- ` or a label (`data:  `) goes on below its first word."""
    width = console.width if console.is_terminal else max(pipe_width(), 1)
    broken = (wrapped(line, width, further=" " * len(_LEAD.findall(line)[0])) for line in words.split("\n"))
    console.print("\n".join(broken), style=style, soft_wrap=True, markup=False)


_LEAD = re.compile(r"^ *(?:- |\w+: {2,})?")


def wrapped(words: str, width: int, indent: str = "", further: str = "") -> str:
    """Words broken between them, the first line behind `indent` and others behind `further`. A number stays with its
    unit, and so does what a NO-BREAK SPACE joins, which becomes an ordinary one."""
    joined = _UNIT.sub("\N{NO-BREAK SPACE}", words)
    lines = textwrap.fill(
        joined, width, initial_indent=indent, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\N{NO-BREAK SPACE}", " ")


_UNIT = re.compile(r"(?<=\d) (?=(?:%|(?:[KMGTP]i?)?B(?:/s)?|[mµn]?s|min|h)(?!\w))")
"""The space between a number and its unit."""


def render(rows: Sequence[Row], width: int = PIPE_WIDTH, figure: str = "measured") -> str:
    """Rows as plain, aligned text without colour or trailing blanks."""
    if not rows:
        return ""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    _print(rows, console, width, figure)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def format_value(value: float, unit: str) -> str:
    """A number with its unit at a readable scale: `12.3 µs`, `4.8 TB/s`, `61 %`."""
    if unit == "s":
        return format_seconds(value)
    if unit == "B":
        return format_bytes(value)
    if unit == "nats":  # per token
        return f"{value:.4f} nats"
    if unit == "fraction":
        return f"{value:.1%}".replace("%", " %")
    if unit == "count":
        return format_count(value)
    return format_rate(value, unit)


@dataclass(frozen=True)
class _Notes:
    """Reasons in the order a reader meets them; the same reason has one number."""

    reasons: list[str]

    def mark(self, reason: str) -> Text:
        return Text(f"[{self.reasons.index(reason) + 1}]", style=QUIET)


@dataclass(frozen=True)
class _Column:
    """A header and its cells; each is a main part and an aside that goes beside it or below it."""

    header: tuple[str, str]
    cells: list[tuple[Text, Text]]
    number: bool = True

    def text(self, parts: tuple[Text, Text], between: str) -> Text:
        return Text(between).join([part for part in parts if part.plain])

    def width(self, between: str) -> int:
        header = Text(self.header[0]), Text(self.header[1])
        texts = [self.text(parts, between) for parts in [header, *self.cells]]
        return max((cell_len(line) for text in texts for line in text.plain.split("\n")), default=0)


def _print(rows: Sequence[Row], console: Console, width: int, figure: str) -> None:
    shared = _shared_case(rows)
    names = list(dict.fromkeys(row.name for row in rows))
    heading = " · ".join([*(names if len(names) == 1 else []), *_case_words(shared)])
    if heading:
        console.print(Text(heading, style="bold"))
    order = ["predicted", "measured", "limit", *_peer_names(rows), "peers"]
    notes = _Notes(
        list(dict.fromkeys(row.missing[column] for row in rows for column in order if column in row.missing))
    )
    lead = _lead_columns(rows, shared)
    columns = _columns(rows, notes, figure)
    between = " " if _total(lead + columns, " ") <= width else "\n"
    for index, some in enumerate(_that_fit(lead, columns, between, width)):
        if index:
            console.print()
        missing = {cell.plain for cell, _ in some[0].cells}
        if index and len(some) == 1 and len(missing) == 1 and "[" in min(missing):  # one reason: no table of it
            console.print(some[0].text((Text(some[0].header[0]), some[0].cells[0][0]), " "))
        else:
            console.print(_table(rows, [*lead, *some], between))
    for number, reason in enumerate(notes.reasons, start=1):
        console.print(Text(f"[{number}] {reason}", style=QUIET))


def _total(columns: Sequence[_Column], between: str) -> int:
    return sum(column.width(between) + GAP for column in columns) - GAP


def _that_fit(lead: list[_Column], columns: list[_Column], between: str, width: int) -> Iterator[list[_Column]]:
    """Columns in groups that fit beside the leading ones; a group has one column at least."""
    group: list[_Column] = []
    for column in columns:
        if group and _total([*lead, *group, column], between) > width:
            yield group
            group = []
        group.append(column)
    yield group


def _table(rows: Sequence[Row], columns: Sequence[_Column], between: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold")
    for column in columns:
        header = column.text((Text(column.header[0]), Text(column.header[1])), between)
        if column.number:
            table.add_column(header, justify="right", no_wrap=True)
        else:
            table.add_column(header, overflow="fold")
    for index, row in enumerate(rows):
        if index and row.name != rows[index - 1].name:
            table.add_section()
        table.add_row(*(column.text(column.cells[index], between) for column in columns))
    return table


def _lead_columns(rows: Sequence[Row], shared: dict[str, CaseValue]) -> list[_Column]:
    """What a row is about: its name, where they differ and only when it changes, and its own part of the case."""
    nothing = Text("")
    cases = [" ".join(_case_words({k: v for k, v in row.case.items() if k not in shared})) for row in rows]
    lead = [_Column(("case", ""), [(Text(case), nothing) for case in cases], number=False)] if any(cases) else []
    if len({row.name for row in rows}) > 1:
        before = ["", *(row.name for row in rows)]
        names = [
            (Text("" if row.name == above else row.name), nothing) for row, above in zip(rows, before, strict=False)
        ]
        lead.insert(0, _Column(("what", ""), names, number=False))
    return lead


def _columns(rows: Sequence[Row], notes: _Notes, figure: str) -> list[_Column]:
    nothing = Text("")
    peers = _peer_names(rows)
    guesses = [_Column(("your guess", "(error)"), [_guess(row) for row in rows])]
    columns = [
        *(guesses if any(row.guess is not None for row in rows) else []),
        _Column(("predicted", "(error)"), [_predicted(row, notes) for row in rows]),
        _Column((figure, "p20–p80" if figure == "measured" else ""), [_measured(row, notes) for row in rows]),
        _Column(("limit", ""), [(_limit(row, notes), nothing) for row in rows]),
    ]
    if any(row.of_limit is not None for row in rows):
        shares = [(Text("" if row.of_limit is None else _percent(row.of_limit)), nothing) for row in rows]
        columns.append(_Column(("of", "limit"), shares))
    several = len(peers) > 1
    columns += [_Column((peer, ""), [_peer(row, peer, notes, several) for row in rows]) for peer in peers]
    header = ("speedup", "vs best" if several else "")
    return [*columns, _Column(header, [(_best(row, notes), nothing) for row in rows])]


def _predicted(row: Row, notes: _Notes) -> tuple[Text, Text]:
    if row.predicted is None:
        return notes.mark(row.missing["predicted"]), Text("")
    return Text(format_value(row.predicted, row.unit)), _error(row.prediction_error)


def _guess(row: Row) -> tuple[Text, Text]:
    if row.guess is None:
        return Text(""), Text("")
    return Text(format_value(row.guess, row.unit)), _error(row.guess_error)


def _error(error: float | None) -> Text:
    return Text("" if error is None else f"({error:+.0%})".replace("%", " %"), style=QUIET)


def _measured(row: Row, notes: _Notes) -> tuple[Text, Text]:
    if row.measured is None:
        return notes.mark(row.missing["measured"]), Text("")
    shown = Text(format_value(row.measured.median, row.unit), style="bold")
    return shown, Text(_spread(row.measured, row.unit), style=QUIET)


def _limit(row: Row, notes: _Notes) -> Text:
    return notes.mark(row.missing["limit"]) if row.limit is None else Text(format_value(row.limit, row.unit))


def _peer(row: Row, peer: str, notes: _Notes, with_speedup: bool) -> tuple[Text, Text]:
    """What a peer reached and the speedup over it. Empty where the row has no such peer."""
    if peer in row.missing:
        return notes.mark(row.missing[peer]), Text("")
    if peer not in row.peers:
        return Text(""), Text("")
    shown = Text(format_value(row.peers[peer].median, row.unit))
    return shown, _speedup(row, peer) if with_speedup and row.measured is not None else Text("")


def _best(row: Row, notes: _Notes) -> Text:
    """The speedup over the peer that comes closest, of those that compute the same."""
    if "peers" in row.missing and not row.peers:
        return notes.mark(row.missing["peers"])
    factors = {name: factor for name, factor in row.speedup.items() if name not in COMPUTES_LESS}
    return _speedup(row, min(factors, key=factors.__getitem__)) if factors else Text("")


def _speedup(row: Row, peer: str) -> Text:
    """`1.31×`, or `1.01× =` where the two cannot be told apart."""
    assert row.measured is not None
    factor = row.speedup[peer]
    shown = f"{factor:.2f}×" if factor < 99.5 else f"{factor:.0f}×"
    if equal(row.measured, row.peers[peer], row.unit):
        return Text(f"{shown} =", style=SAME)
    return Text(shown, style=FASTER if factor > 1 else SLOWER)


def _spread(sample: Sample, unit: str) -> str:
    """`4.50–5.50`: both ends at the scale the median is shown in. One reading has no spread."""
    if sample.n == 1:
        return ""
    scale = _scale(format_value(sample.median, unit), unit)
    return "–".join(_three_digits(end / scale) for end in (sample.p20, sample.p80))


def _scale(shown: str, unit: str) -> float:
    """How much a 1 in a formatted value stands for: `26 µs` is in 1e-6 s."""
    number, _, word = shown.partition(" ")
    if unit == "fraction":
        return 0.01
    if unit == "s":
        return SECONDS[word]
    if unit == "count":
        return 1000.0 ** DECIMAL.index(number[-1] if number[-1].isalpha() else "")
    if unit == "B":
        return 1024.0 ** BINARY.index(word.removesuffix("B").removesuffix("i"))
    prefix = word.removesuffix(unit) or (number[-1] if number[-1].isalpha() else "")
    return 1000.0 ** DECIMAL.index(prefix)


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _percent(fraction: float) -> str:
    return f"{fraction:.0%}".replace("%", " %") if fraction >= 0.1 else f"{fraction:.1%}".replace("%", " %")


def _peer_names(rows: Sequence[Row]) -> list[str]:
    """Every peer of any row, in the order they appear, those that are missing everywhere included."""
    columns = ("predicted", "measured", "limit", "peers")
    named = [name for row in rows for name in (*row.peers, *row.missing) if name not in columns]
    return list(dict.fromkeys(named))


def _shared_case(rows: Sequence[Row]) -> dict[str, CaseValue]:
    """What the case says in every row alike; nothing when there is one row only."""
    if len(rows) < 2:
        return {}
    first = rows[0].case
    return {k: v for k, v in first.items() if all(k in row.case and row.case[k] == v for row in rows[1:])}


def _case_words(case: dict[str, CaseValue]) -> list[str]:
    words = []
    for key, value in case.items():
        if isinstance(value, bool):
            words.append(key if value else f"not {key}")
        elif isinstance(value, str):
            words.append(value)
        elif value is not None:
            words.append(f"{key} {format_plain(value)}" if isinstance(value, float) else f"{key} {value}")
    return words
