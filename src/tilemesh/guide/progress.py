"""What a reader has done: one JSON file in the user's state folder, written whole after each chapter and exercise.

`$XDG_STATE_HOME/tilemesh/guide.json`, or the same under `~/.local/state`. It holds, by chapter, when it was last run to
its end, the predictions with what was measured, and which exercises were answered rightly after how many tries. Without
a terminal nothing is remembered: what the cost model answers is no progress of a reader's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.core.files import read_json_object, write_text

SCHEMA = 1


@dataclass(frozen=True)
class Guessed:
    """A prediction of the reader's beside what was measured; both in the unit's own scale."""

    question: str
    unit: str
    guess: float
    measured: float

    @property
    def factor(self) -> float:
        """How many times too much or too little: 1 is exact, 2 is twice or half."""
        if self.guess == self.measured:
            return 1.0
        if self.guess <= 0 or self.measured <= 0:
            return float("inf")
        return max(self.guess / self.measured, self.measured / self.guess)


@dataclass
class ChapterDone:
    """One chapter's state."""

    finished: str = ""
    """When it last ran to its end, ISO 8601; empty: not yet."""
    guesses: list[Guessed] = field(default_factory=list)
    solved: dict[str, int] = field(default_factory=dict)
    """Exercises answered rightly, each with the number of tries it took."""
    tries: dict[str, int] = field(default_factory=dict)
    """Wrong answers so far, by exercise."""


def default_path() -> Path:
    """Where progress lies for this user."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification has relative paths ignored.
    root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return root / "tilemesh" / "guide.json"


class ReaderProgress:
    """The file, read and written whole."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()
        self.chapters: dict[str, ChapterDone] = {}
        if self.path.exists():
            self.chapters = _chapters(read_json_object(self.path), self.path)

    def of(self, key: str) -> ChapterDone:
        return self.chapters.setdefault(key, ChapterDone())

    def finish(self, key: str, guesses: list[Guessed]) -> None:
        """A chapter ran to its end, with these guesses; they replace those of an earlier run, if there are any."""
        done = self.of(key)
        done.finished = datetime.now(UTC).isoformat(timespec="seconds")
        done.guesses = guesses or done.guesses  # whoever reads it once more and skips has still guessed
        self.save()

    def answered(self, key: str, exercise: str, right: bool) -> None:
        """An answer was given; of an exercise that is solved nothing changes any more."""
        done = self.of(key)
        if exercise in done.solved:
            return
        done.tries[exercise] = done.tries.get(exercise, 0) + 1
        if right:
            done.solved[exercise] = done.tries.pop(exercise)
        self.save()

    def save(self) -> None:
        body = {"schema": SCHEMA, "chapters": {key: asdict(done) for key, done in self.chapters.items()}}
        write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", self.path)


def _chapters(body: Mapping[str, Any], path: Path) -> dict[str, ChapterDone]:
    try:
        if body["schema"] != SCHEMA:
            raise ValueError(f"schema {body['schema']!r}")
        return {
            str(key): ChapterDone(
                finished=str(entry["finished"]),
                guesses=[Guessed(str(g["question"]), str(g["unit"]), float(g["guess"]), float(g["measured"]))
                         for g in entry["guesses"]],
                solved={str(name): int(tries) for name, tries in entry["solved"].items()},
                tries={str(name): int(tries) for name, tries in entry["tries"].items()},
            )
            for key, entry in body["chapters"].items()
        }  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"'{path}' is no progress of the guide ({error}): remove it to begin anew") from None
