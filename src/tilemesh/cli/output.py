"""What commands print: rows for people and for a file, and lines beside the output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from tilemesh.measure.row import Row


def console_beside(json: str | None, *, markup: bool = False) -> Console:
    """Standard output, or standard error where the rows go to standard output."""
    from rich.console import Console

    return Console(stderr=json == "-", highlight=False, markup=markup)


def show_rows(rows: Sequence[Row], json: str | None, console: Console) -> None:
    """The rows as a table, and in the file that was named."""
    from tilemesh.measure.row import write_rows
    from tilemesh.measure.table import print_rows

    print_rows(rows, console)
    if json is not None:
        write_rows(rows, json)


def tell(text: str) -> None:
    """A line on standard error."""
    print(f"tilemesh: {text}", file=sys.stderr, flush=True)


def words_of(text: str, *none: str) -> list[str]:
    """The words between commas; `none` are words that stand for no word."""
    return [word.strip() for word in text.split(",") if word.strip() not in ("", *none)]
