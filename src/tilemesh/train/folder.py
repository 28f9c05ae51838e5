"""The run folder: everything there is to know of a run, in files that people and programs read.

    config.toml      what was run                     metrics.jsonl   one object a step, appended as it happens
    choices.json     what `auto` picked               trace.json      for Perfetto, a lane a rank
    checkpoints/     step-00000050/, newest last      summary.json    what it came to
    predicted.json   what the planner said before     sample.txt      text it wrote at the end

A disk that is full must not end a run: what cannot be written is said once, loudly, and training goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tilemesh.core.errors import RunError, UsageError
from tilemesh.train import config as configs
from tilemesh.train.config import TrainConfig
from tilemesh.train.manifest import checkpoints

CONFIG, METRICS, CHOICES, SUMMARY = "config.toml", "metrics.jsonl", "choices.json", "summary.json"
PREDICTED, SAMPLE, CHECKPOINTS, TRACE = "predicted.json", "sample.txt", "checkpoints", "trace"
RUNS = "runs"


def new_run(config: TrainConfig, path: str | Path | None = None, name: str = "run") -> Path:
    """A fresh folder with the configuration in it: the one named, or the next one under runs/."""
    folder = Path(path) if path is not None else _fresh(Path(RUNS), name)
    if (folder / CONFIG).exists():
        raise UsageError(f"{folder} has a run already: go on with --resume {folder}, or name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CONFIG, config.to_toml())
    except OSError as error:
        raise RunError(f"run folder {folder}: {error.strerror}") from None
    return folder


def _fresh(base: Path, name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(100):
        folder = base / (f"{stamp}-{name}" + (f"-{number}" if number else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"run folder {folder}: {error.strerror}") from None
        return folder
    raise RunError(f"no free name for a run under {base}")


def read_config(folder: str | Path) -> TrainConfig:
    path = Path(folder) / CONFIG
    try:
        return configs.from_toml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        runs = sorted(Path(RUNS).glob(f"*/{CONFIG}"))
        hint = f"; the newest here is {runs[-1].parent}" if runs else ""
        raise UsageError(f"{folder} is no run: it has no {CONFIG}{hint}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def write_text(path: Path, text: str) -> None:
    """Under another name first: whoever reads the file meets the old or the new one, never half of one."""
    other = path.with_name(f".{path.name}.new")
    other.write_text(text, encoding="utf-8")
    os.replace(other, path)


def read_json(path: Path) -> dict[str, Any]:
    """What a file of this folder says; empty when it is not there or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def newest_checkpoint(folder: str | Path) -> int | None:
    found = checkpoints(Path(folder) / CHECKPOINTS)
    return found[0][0] if found else None


class Journal:
    """The metrics file and the small files beside it, written by rank 0; the others hold one that writes nothing."""

    def __init__(self, folder: Path, on: bool, say: Callable[[str], None]) -> None:
        self.folder, self.on, self.say = folder, on, say
        self._complained: set[str] = set()
        if on:
            self._end_line()

    def add(self, **values: Any) -> None:
        """One line of metrics, with the time it was written."""
        self._try(METRICS, lambda: self._append(json.dumps({**values, "at": time.time()}) + "\n"))

    def write(self, name: str, value: Mapping[str, Any] | str) -> None:
        text = value if isinstance(value, str) else json.dumps(value, indent=1) + "\n"
        self._try(name, lambda: write_text(self.folder / name, text))

    def _append(self, line: str) -> None:
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(line)

    def _end_line(self) -> None:
        """A run that was killed may have left half a line: what follows must not be joined to it."""
        path = self.folder / METRICS
        try:
            whole = path.read_bytes()[-1:] in (b"", b"\n")
        except OSError:
            return
        if not whole:
            self._try(METRICS, lambda: self._append("\n"))

    def _try(self, name: str, write: Callable[[], None]) -> None:
        if not self.on:
            return
        try:
            write()
        except OSError as error:
            if name not in self._complained:
                self._complained.add(name)
                self.say(f"{self.folder / name} CANNOT BE WRITTEN: {error.strerror}; training goes on without it")


def last_line(folder: str | Path) -> dict[str, Any]:
    """What a run's metrics say last; empty where they say nothing."""
    return next(_backwards(folder), {})


def last_step(folder: str | Path) -> int:
    """The step a run had done last when its metrics end: not the highest one, where it went back."""
    return next((int(one["step"]) for one in _backwards(folder) if one.get("kind") == "step"), 0)


def _backwards(folder: str | Path) -> Iterator[dict[str, Any]]:
    for line in reversed(_text(folder).split("\n")):
        with contextlib.suppress(ValueError):  # half a line
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(found.get("step"), int):
                yield found


def _text(folder: str | Path) -> str:
    try:
        return (Path(folder) / METRICS).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def metrics(folder: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's metrics, later ones replacing what an interrupted attempt wrote of the same step."""
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    for line in _text(folder).split("\n"):
        try:
            found = json.loads(line)
            latest[str(found["kind"]), int(found["step"])] = found
        except (ValueError, KeyError, TypeError):
            continue  # half a line
    yield from sorted(latest.values(), key=lambda one: int(one["step"]))
