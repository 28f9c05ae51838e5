"""Events of a run on a terminal or in a log: a progress bar, or a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tilemesh.core.units import format_bytes, format_rate, format_seconds
from tilemesh.measure.table import print_words

LINE_EVERY_S = 2.0  # in a log; a bar shows every step


def step_words(event: Mapping[str, Any]) -> str:
    """One step in a line of a log."""
    loss = f"loss {event['loss']:.4f}" if "loss" in event else "no target counts"
    parts = [f"step {event['step']:>5}/{event['steps']}", loss]
    reward, held_out = event.get("reward"), event.get("held_out")
    if reward is not None:
        parts.append(f"reward {reward:.4f}")
    if held_out is not None:  # of rewards it is what is to fall: the negative one
        parts.append(f"held-out {held_out:.4f}" if reward is None else f"held-out reward {0.0 - held_out:.4f}")
    for key, words in (("unscored", "scored"), ("unheard", "heard by the environment")):
        if event.get(key):
            parts.append(f"{event[key]:.0%} of answers not {words}: {event[key + '_why']}")
    parts += [
        format_rate(event["tokens_per_s"], f"{event.get('counts', 'tokens')}/s"),
        f"{format_bytes(event['memory_bytes'])} per rank",
    ]
    left = event["left_s"]
    parts.append("done" if event["step"] == event["steps"] else f"{format_seconds(max(left, 0.001))} left")
    return "  ".join(parts)


class Shown:
    """A listener that shows events on this process's standard output, and what went wrong on its standard error."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, markup=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last = -LINE_EVERY_S

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind == "run":
            self.console.print(f"run: {event['folder']}", soft_wrap=True)
        elif kind == "say":
            print_words(event["text"], self.console)
        elif kind == "output" and event["stream"] != "err":
            self.console.print(f"[{event['rank']}] {event['text']}", soft_wrap=True)
        elif kind in ("output", "launcher"):
            self._clear()
            who = "tilemesh:" if kind == "launcher" else f"[{event['rank']}]"
            print(f"{who} {event['text']}", file=sys.stderr, flush=True)
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
        name = "loss" if event.get("reward") is None else "reward"
        first = f"{name} {event[name]:.3f}" if name in event else "no target counts"
        rate = f"{event.get('counts', 'tokens')}/s"
        words = f"{first}  {format_rate(event['tokens_per_s'], rate)}  {format_bytes(event['memory_bytes'])} per rank"
        self._bar.update(self._task, completed=event["step"], description=words)
        if event.get("held_out") is not None:
            self.console.print(step_words(event), soft_wrap=True)
        if is_last:
            self.close()
