"""Commands that are killed, and what then reads what they left: nothing half-written may be taken for whole.

A SIGKILL is felt only in what lies on the disk, so its moments are enumerated by what changes there: before each change
of a file that the command makes (seen by an audit hook), and in the middle of what it wrote last, which is then cut in
half. What reads the folder afterwards refuses it in one line, or it holds every byte that the whole one holds.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hostile
from fuzz_cases import BASES, Case

WRITTEN = "written"
READERS_OF_A_STATE = 2
_STEP = "train.steps=1,checkpoint.every=0,evaluate.every=0"
_COMPRESS = BASES["compress"][0]
_SERVED = (("serve", WRITTEN, "--port", "0", "--pages", "8"),) if find_spec("uvicorn") else ()
_AS_A_MODEL: tuple[tuple[str, ...], ...] = (
    ("generate", WRITTEN, "--prompt", "a", "--tokens", "2"),
    *_SERVED,
    ("train", "tiny.toml", "--mesh", "dp=1", "--set", _STEP, "--init", WRITTEN, "--out", "new"),
    ("train", "tiny.toml", "--mesh", "dp=1", "--set", f"{_STEP},distill.teacher={WRITTEN}", "--out", "new"),
    tuple(_COMPRESS.words("compress", {"--out": "smaller"}, (WRITTEN,))),
)
_AS_SHARDS = (("train", "tiny.toml", "--mesh", "dp=1", "--set", f"{_STEP},data.source={WRITTEN}", "--out", "new"),)
_AS_A_RUN = (
    ("train", "--resume", WRITTEN),
    ("generate", WRITTEN, "--prompt", "a", "--tokens", "2"),
    *_SERVED,
    ("export", WRITTEN, "others"),
    ("report", WRITTEN, "--html", "page.html"),
)


@dataclass(frozen=True)
class Killed:
    """A command that writes the folder `written`."""

    words: tuple[str, ...]
    changes: int
    """More than it makes: the last case kills nothing, and its reader has to take what is there."""
    readers: tuple[tuple[str, ...], ...]
    own: Callable[[str], bool] = lambda name: True
    """Which files of the folder are the same each time that the command comes to its end."""


def _of_model(name: str) -> bool:
    """Beside the model, `compress` leaves rows, times and the machine that they are of."""
    return name.endswith(".safetensors") or name.startswith(("config.json", "tokenizer"))


KILLED: Mapping[str, Killed] = {
    "export": Killed(("export", "run", WRITTEN), 24, _AS_A_MODEL),
    "compress": Killed(tuple(_COMPRESS.words("compress", {})), 36, _AS_A_MODEL[:-1], _of_model),
    "data prepare": Killed(("data", "prepare", "text.txt", WRITTEN), 14, _AS_SHARDS),
    "data prepare with a tokenizer": Killed(
        ("data", "prepare", "text.txt", WRITTEN, "--tokenizer", "exported/tokenizer.json"), 22, _AS_SHARDS
    ),
    "train": Killed(
        ("train", "tiny.toml", "--mesh", "dp=1", "--set", "checkpoint.background=false", "--out", WRITTEN),
        80, _AS_A_RUN, lambda name: name.endswith(".safetensors") and "step-00000002" in name,
    ),
    "train from weights": Killed(
        ("train", "tiny.toml", "--mesh", "dp=1", "--set", "checkpoint.background=false", "--init", "exported",
         "--out", WRITTEN), 80, _AS_A_RUN[:1], lambda name: name.endswith(".safetensors") and "step-00000002" in name,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """Which command is killed before which of its changes; `cuts`: and what it wrote last is cut in half."""

    command: str
    change: int
    cuts: bool


def kill_cases() -> Iterator[Case]:
    for name, killed in KILLED.items():
        for change in range(1, killed.changes + 1):
            for cuts in (False, True)[: 1 + (1 < change < killed.changes)]:
                said = f"kills: {name}, before change {change}{' and cut' if cuts else ''}"
                readers = {" ".join(words)[:80]: words for words in (*killed.readers, killed.words)}
                for label in hostile.some([*readers], READERS_OF_A_STATE, said):
                    yield Case(f"{said}; then {label}", readers[label], kill=Kill(name, change, cuts))


def die_before(change: int, folder: str) -> Callable[[], int]:
    """End this process by SIGKILL when it is about to make so many changes of files below a folder; returns what says
    how many it has made."""
    made = 0

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal made
        if event == "open":
            is_change = isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        else:
            is_change = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")
        if is_change and any(
            isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(folder) for path in arguments[:2]
        ):
            made += 1
            if made >= change:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(see)
    return lambda: made


def leave_half(kill: Kill, root: Path, run_killed: Callable[[str, tuple[str, ...], int], bool]) -> bool:
    """Fill `root/case` with what the kill leaves; whether there was one. `run_killed` runs words in a folder."""
    words = KILLED[kill.command].words
    was_killed = run_killed("case", words, kill.change)
    if kill.cuts:
        shutil.copytree(root / "playground", root / "before", symlinks=True)
        run_killed("before", words, kill.change - 1)
        before, now = (_contents(root / name / WRITTEN) for name in ("before", "case"))
        if before.keys() <= now.keys():  # a file that only got another name was never half of one
            for name, content in now.items():
                kept = before.get(name, b"") if name.endswith(".jsonl") else b""
                if name not in before or len(content) > len(kept) > 0:  # new, or a line longer
                    (root / "case" / WRITTEN / name).write_bytes(content[: (len(kept) + len(content)) // 2])
        shutil.rmtree(root / "before")
    return was_killed


def taken_for_whole(case: Case, root: Path, run_killed: Callable[[str, tuple[str, ...], int], bool]) -> str:
    """What is missing in a folder that a reader took; nothing where it is whole."""
    assert case.kill is not None
    killed = KILLED[case.kill.command]
    if case.words[0] == "report" or (case.kill.command.startswith("train") and "--resume" not in case.words):
        return ""  # a run may be looked at in any state; its checkpoints have digests
    whole = root / f"whole {case.kill.command}"
    if not whole.exists():
        shutil.copytree(root / "playground", whole, symlinks=True)
        run_killed(whole.name, killed.words, sys.maxsize)
    expected, there = (_contents(place / WRITTEN) for place in (whole, root / "case"))
    lacking = [name for name in expected if killed.own(name) and there.get(name) != expected[name]]
    return f"took for whole a folder in which {', '.join(lacking[:3])} is not" if lacking else ""


def _contents(folder: Path) -> dict[str, bytes]:
    """By name, what lies in a folder; not its lock, which is written elsewhere and then linked."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "lock.json" not in path.name]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
