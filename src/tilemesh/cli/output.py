"""What a command came to, as one value, and the one place that prints and writes it.

A command returns an `Output`: text for people, rows or objects for `--json`, and what its other files hold. `show`
writes the files that the user named and prints the text; where a file is `-`, text goes to standard error.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn
    from rich.table import Table

    from tilemesh.core.advice import NextCommand
    from tilemesh.measure.row import Row
    from tilemesh.report.draw import Drawing

Block: TypeAlias = "str | Sequence[str | Row] | Table"
"""A sentence, broken between words; lines, as they are; rows, as their table; or another table."""
TABLE_WIDTH = 100
"""Columns that a table takes at most, where its figures allow that."""
_LABELS = {"html": "page", "json": "rows", "out": "written"}


class ProgressListener(Protocol):
    """Told how much of how much is done, and what comes next."""

    def __call__(self, done: int, total: int, words: str = "") -> None: ...


@dataclass(frozen=True)
class Output:
    """What a command came to. `files`: by the name of an option, what makes its file; called where that was given."""

    text: Sequence[Block] = ()
    json: Sequence[Row | Mapping[str, Any]] = ()
    files: Mapping[str, Callable[[], str | Sequence[Drawing]]] = field(default_factory=dict)
    exit_code: int = 0
    next: NextCommand | None = None
    """What to try after it."""


def show(output: Output, options: Any, console: Console | None = None) -> int:
    """Write what the options name, print the text and where the files are; the exit code."""
    makers: dict[str, Callable[[], str | Sequence[Drawing]]]
    makers = {"json": lambda: "".join(map(_json_line, output.json)), **output.files}
    paths = {name: path for name in makers if (path := getattr(options, name, None)) is not None}
    console = console or console_beside(*paths.values())
    # Files first: whoever reads the text may stop early, as `| head` does.
    for name, path in paths.items():
        _write(makers[name](), path)
    for item in output.text:
        print_block(item, console)
    for name, path in paths.items():
        if path != "-":
            console.print(f"{_LABELS.get(name, name)}: {path}", soft_wrap=True)
    if output.next is not None:
        predicted = f"\n         predicted: {output.next.gain}" * bool(output.next.gain)
        console.print(f"next:    {program()} {output.next.words}{predicted}", soft_wrap=True)
    return output.exit_code


def program() -> str:
    """How to call this command again from here: by its name, or where a shell does not find that, by where it lies."""
    if shutil.which("tilemesh"):
        return "tilemesh"
    script = Path(sys.executable).with_name("tilemesh")
    words = str(script) if script.exists() else sys.executable
    near = os.path.relpath(words)
    return (words if near.startswith("..") else near) + ("" if script.exists() else " -m tilemesh")


def _write(content: str | Sequence[Drawing], path: str) -> None:
    from tilemesh.core.files import write_output

    if isinstance(content, str):
        write_output(content, path)
    else:
        from tilemesh.report.picture import write_picture

        write_picture(content, path)


def print_block(item: Block, console: Console) -> None:
    from rich.table import Table

    from tilemesh.measure.table import print_rows, print_words

    if isinstance(item, str):
        print_words(item, console)
    elif isinstance(item, Table):
        _print_table(item, console)
    else:
        for line in item:
            if isinstance(line, str):
                console.print(line, soft_wrap=True)
        print_rows([row for row in item if not isinstance(row, str)], console)


def _print_table(table: Table, console: Console) -> None:
    """A terminal too narrow for a table of figures breaks its lines; a figure is never cut."""
    width, unbounded = console.width, console.options.update(max_width=1000)
    if all(column.no_wrap for column in table.columns):
        if console.measure(table, options=unbounded).maximum > min(width, TABLE_WIDTH):
            table.padding = (0, 0, 0, 0)
        console.width = max(width, console.measure(table, options=unbounded).maximum)
    console.print(table)
    console.width = width


def _json_line(line: Row | Mapping[str, Any]) -> str:
    import json

    from tilemesh.measure.row import Row

    return (line.to_json() if isinstance(line, Row) else json.dumps(line, allow_nan=False)) + "\n"


def console_beside(*paths: str | None) -> Console:
    """Standard output, or standard error where one of these files is standard output."""
    from rich.console import Console

    from tilemesh.measure.table import pipe_width

    console = Console(stderr="-" in paths, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = pipe_width()
    return console


def table_of(lines: Sequence[Mapping[str, str]], left: Sequence[str] = ()) -> Table:
    """Lines with a column for each of their keys; those of `left` begin at the left."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for heading in lines[0] if lines else ():
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line.values())
    return table


@contextmanager
def progress(console: Console, columns: Sequence[ProgressColumn], line: ProgressListener) -> Iterator[ProgressListener]:
    """What hears of progress: a bar with these columns on a terminal; elsewhere `line`, which may print one."""
    from rich.progress import Progress

    if not console.is_terminal:
        yield line
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, words="": bar.update(task, completed=done, total=total, description=words)


@contextmanager
def on_signals(handler: Callable[[int, object], None], *numbers: int) -> Iterator[None]:
    """These signals go to a handler, and afterwards where they went before."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def interrupt(number: int, frame: object) -> None:
    """For `on_signals`: a scheduler's or `timeout`'s SIGTERM ends a command as Ctrl-C does, with what there is."""
    raise KeyboardInterrupt


def tell(text: str) -> None:
    """A line on standard error."""
    print(f"tilemesh: {text}", file=sys.stderr, flush=True)
