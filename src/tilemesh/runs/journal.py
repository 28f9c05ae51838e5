"""The metrics of a run and the small files beside them, written while it runs.

A disk that is full must not end a run: what cannot be written is reported once, loudly, and the run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tilemesh.runs.files import write_text
from tilemesh.runs.jsontext import to_text
from tilemesh.runs.kind import Kind
from tilemesh.runs.names import METRICS, SCHEMA, SUMMARY


class Journal:
    """The metrics file and the small files beside it. One process writes: of several ranks all but the first have one
    that is not `on` and writes nothing. `say` hears what cannot be written."""

    def __init__(self, folder: Path, on: bool = True, say: Callable[[str], None] = print) -> None:
        self.folder, self.on, self.say = folder, on, say
        self._complained: set[str] = set()
        if on:
            self._end_line()

    def add(self, kind: str, step: int, **values: Any) -> None:
        """One line of metrics: a step's figures or an event (`metrics.py` names them), with the time it was written.

        Values are what JSON holds; numbers of numpy and torch, NaN and infinities are taken as well (`jsontext.py`).
        """
        line = to_text({"kind": kind, "step": step, **values, "at": time.time()}, METRICS)
        self._try(METRICS, lambda: self._append(line + "\n"))

    def write(self, name: str, value: Mapping[str, Any] | str) -> None:
        """One of the folder's files, by its name in `names.py`: a JSON object or text."""
        text = value if isinstance(value, str) else to_text(value, name, indent=1) + "\n"
        self._try(name, lambda: write_text(self.folder / name, text))

    def summarize(self, kind: Kind, summary: Mapping[str, Any]) -> None:
        """Write the results of the run, with their schema and kind."""
        kind.check_summary(summary, SUMMARY)
        self.write(SUMMARY, {"schema": SCHEMA, "kind": kind.name, **summary})

    def _append(self, line: str) -> None:
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(line)

    def _end_line(self) -> None:
        """A run that was killed may have left half a line: what follows must not be joined to it."""
        path = self.folder / METRICS
        try:
            is_whole = path.read_bytes()[-1:] in (b"", b"\n")
        except OSError:
            return
        if not is_whole:
            self._try(METRICS, lambda: self._append("\n"))

    def _try(self, name: str, write: Callable[[], None]) -> None:
        if not self.on:
            return
        try:
            write()
        except OSError as error:
            if name not in self._complained:
                self._complained.add(name)
                self.say(f"{self.folder / name} CANNOT BE WRITTEN: {error.strerror}; the run goes on without it")
