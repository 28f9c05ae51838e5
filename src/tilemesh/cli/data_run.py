"""What `tilemesh data prepare` does: call `data.prepare`, and show how far it has come."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tilemesh.core.errors import UsageError
from tilemesh.core.units import format_bytes
from tilemesh.data.config import DataConfig
from tilemesh.data.corpus import left_out_words
from tilemesh.data.documents import left_out_files, misnamed_words
from tilemesh.data.prepare import PreparationStoppedError, prepare

LINE_EVERY_S = 5.0  # in a log


def run_prepare(
    source: str, out: str, tokenizer: str | None, field: str, chat: bool, held_out: float, pattern: str
) -> None:
    """Write the shards and say what they are."""
    chosen = None if tokenizer is None else Path(tokenizer)
    try:
        data = DataConfig(source=source, tokenizer=chosen, field=field, chat=chat, held_out=held_out, pattern=pattern)
        with PreparationShown() as shown, StopSignals() as stop:
            made = prepare(data, out, on_progress=shown, is_asked_to_stop=stop)
    except PreparationStoppedError as stopped:
        raise KeyboardInterrupt(str(stopped)) from None
    except UsageError as error:
        names = ("tokenizer", "field", "chat", "held_out", "pattern")
        typed = {f"data.{name}": f"--{name.replace('_', '-')}" for name in names}
        raise error.as_typed(typed | {"data.source": "SOURCE", "data.chat=true": "--chat"}) from None
    if skipped := left_out_files(data):
        print(f"tilemesh: {left_out_words(skipped)}", file=sys.stderr)
    if misnamed := misnamed_words(data):
        print(f"tilemesh: {misnamed.replace('data.field', '--field')}", file=sys.stderr)
    total = sum(made["files"].values())
    print(f"{out}: {total:,} tokens in {len(made['files'])} shards of {made['dtype']}, vocabulary {made['vocabulary']}")


class StopSignals:
    """Whether SIGINT (Ctrl-C) or SIGTERM came; a second one ends the command at once."""

    def __init__(self) -> None:
        self._is_asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        return self._is_asked

    def _ask(self, number: int, frame: object) -> None:
        if self._is_asked:
            raise KeyboardInterrupt
        self._is_asked = True
        # Not by print: the signal may have come in the middle of one.
        os.write(2, b"tilemesh: stopping after this document\n")


class PreparationShown:
    """A bar with the time left on a terminal, a line now and then elsewhere; nothing for what is done at once."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False, markup=False)
        columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal, transient=True)
        self._task = self._bar.add_task("", total=None)
        self._next = time.monotonic() + LINE_EVERY_S

    def __enter__(self) -> PreparationShown:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, read: int, total: int) -> None:
        self._bar.update(self._task, completed=read, total=total)
        if not self.console.is_terminal and time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY_S
            share = f"{read / max(1, total):.0%}".replace("%", " %")
            print(
                f"tilemesh: read {format_bytes(read)} of {format_bytes(total)} ({share})", file=sys.stderr, flush=True
            )
