"""Make token shards, which training maps into memory. Train on them with
`tilemesh train --set data.source=FOLDER`.

Stopped with Ctrl-C or SIGTERM it keeps what it has read, and the same command goes on from there; killed, it goes
on from the last whole shard.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from tilemesh.cli.output import on_signals, progress, tell
from tilemesh.core.errors import UsageError
from tilemesh.core.options import OutFolder, argument, flag_of, option, option_fields
from tilemesh.core.units import format_bytes

LINE_EVERY_S = 5.0  # in a log


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    source: str = argument(..., "stdlib, a text, JSON, JSONL or Parquet file, or a folder.", "SOURCE")
    out: OutFolder = argument(..., "Where to write the shards.", "FOLDER")
    tokenizer: str | None = option(None, "A tokenizer.json; without one, bytes.", "FILE")
    field: str = option("", "Of each record; by default text, or messages.", "NAME")
    chat: bool = option(False, "Records are conversations; only answers count.")
    held_out: float = option(0.02, "The fraction that is not trained on.")
    pattern: str = option("*", "Which files of a folder, such as *.py.")


def prepare(options: PrepareOptions) -> None:
    """Write the shards and say what they are."""
    from tilemesh.data.config import DataConfig
    from tilemesh.data.corpus import left_out_words
    from tilemesh.data.documents import left_out_files, misnamed_words
    from tilemesh.data.prepare import PreparationStoppedError
    from tilemesh.data.prepare import prepare as write_shards

    console, stop = Console(stderr=True, highlight=False, markup=False), StopRequest()
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "tokenizer")}
    try:
        data = DataConfig(**settings, tokenizer=None if options.tokenizer is None else Path(options.tokenizer))
        with progress(console, columns, LogLines()) as shown, on_signals(stop, signal.SIGINT, signal.SIGTERM):
            written = write_shards(data, options.out, on_progress=shown, is_asked_to_stop=lambda: stop.has_come)
    except PreparationStoppedError as stopped:
        raise KeyboardInterrupt(str(stopped)) from None
    except UsageError as error:
        typed = {f"data.{field.name}": flag_of(field) for field, _ in option_fields(PrepareOptions)}
        raise error.as_typed(typed | {"data.chat=true": "--chat"}) from None
    if skipped := left_out_files(data):
        tell(left_out_words(skipped))
    if misnamed := misnamed_words(data):
        tell(misnamed.replace("data.field", "--field"))
    total, shards = sum(written["files"].values()), len(written["files"])
    kind = f"{written['dtype']}, vocabulary {written['vocabulary']}"
    print(f"{options.out}: {total:,} tokens in {shards} shards of {kind}")


class StopRequest:
    """Whether SIGINT (Ctrl-C) or SIGTERM came; a second one ends the command at once."""

    has_come = False

    def __call__(self, number: int, frame: object) -> None:
        if self.has_come:
            raise KeyboardInterrupt
        self.has_come = True
        # Not by print: the signal may have come in the middle of one.
        os.write(2, b"tilemesh: stopping after this document\n")


class LogLines:
    """A line now and then; nothing for what is done at once."""

    def __init__(self) -> None:
        self._next = time.monotonic() + LINE_EVERY_S

    def __call__(self, done: int, total: int, words: str = "") -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY_S
            share = f"{done / max(1, total):.0%}".replace("%", " %")
            tell(f"read {format_bytes(done)} of {format_bytes(total)} ({share})")
