"""What a run says while it runs: rank 0 makes events, one place turns them into a bar on a terminal or lines in a log.

Rank 0's output goes through the launcher where there is one, so events cross that pipe as JSON lines behind a mark;
under mpiexec, srun or torchrun there is nobody to read them and rank 0 shows them itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tilemesh.core.context import JOB_VARIABLE, membership
from tilemesh.core.units import format_bytes, format_rate, format_seconds

MARK = b"\x1e"
LINE_EVERY_S = 2.0  # in a log; a bar shows every step


def emitter(on: bool) -> Callable[[Mapping[str, Any]], None]:
    """How this rank's events reach people: through the launcher, directly, or (other ranks) not at all."""
    if not on:
        return lambda event: None
    if JOB_VARIABLE in os.environ:

        def send(event: Mapping[str, Any]) -> None:
            with contextlib.suppress(OSError):
                os.write(1, MARK + json.dumps(event).encode() + b"\n")

        return send
    # mpiexec's pipe to a rank says it is a terminal; what comes out at its end may be a log.
    plain = Console(highlight=False, markup=False, force_terminal=False) if membership() is not None else None
    return Shown(plain).event


def step_words(event: Mapping[str, Any]) -> str:
    """One step in a line of a log."""
    parts = [f"step {event['step']:>5}/{event['steps']}", f"loss {event['loss']:.4f}"]
    if event.get("held_out") is not None:
        parts.append(f"held-out {event['held_out']:.4f}")
    parts += [format_rate(event["tokens_per_s"], "tokens/s"), f"{format_bytes(event['memory_bytes'])} a rank"]
    left = event["left_s"]
    parts.append("done" if event["step"] == event["steps"] else f"{format_seconds(max(left, 0.001))} left")
    return "  ".join(parts)


class Shown:
    """Events on this process's standard output."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, markup=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last = -LINE_EVERY_S

    def line(self, rank: int, stream: str, line: bytes) -> None:
        """A launcher's sink: events are shown, whatever else a rank prints passes with its number."""
        if rank == 0 and line.startswith(MARK):
            with contextlib.suppress(ValueError):
                self.event(json.loads(line[len(MARK) :]))
            return
        text = line.decode(errors="replace")
        if stream == "err":
            self._clear()
            print(f"[{rank}] {text}", file=sys.stderr, flush=True)
        else:
            self.console.print(f"[{rank}] {text}", soft_wrap=True)

    def event(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind == "say":
            self.console.print(event["text"], soft_wrap=True)
        elif kind == "step":
            self._step(event)
        elif kind == "end":
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _clear(self) -> None:
        if self._bar is not None:
            self._bar.refresh()

    def _step(self, event: Mapping[str, Any]) -> None:
        is_last = event["step"] == event["steps"]
        now = time.monotonic()
        if not self.console.is_terminal:
            if is_last or event.get("held_out") is not None or event.get("first") or now - self._last >= LINE_EVERY_S:
                self._last = now
                self.console.print(step_words(event), soft_wrap=True)
                with contextlib.suppress(OSError):
                    self.console.file.flush()
            return
        if self._bar is None:
            columns = (
                TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task("", total=event["steps"])
            self._bar.start()
        assert self._task is not None
        words = (
            f"loss {event['loss']:.3f}  {format_rate(event['tokens_per_s'], 'tokens/s')}  "
            f"{format_bytes(event['memory_bytes'])} a rank"
        )
        self._bar.update(self._task, completed=event["step"], description=words)
        if event.get("held_out") is not None:
            self.console.print(step_words(event), soft_wrap=True)
        if is_last:
            self.close()
