"""Values that no command should stumble over, by name: a case is printed and repeated by these names.

Every value is text, as it comes from a command line or a file. `NUMBERS` are for what should be a number, `PATHS` for
what should be a file or a folder (those that lie in the playground are made by `playground.py`), `WORDS` for the rest.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence

SEED = 16

NUMBERS: Mapping[str, str] = {
    "nothing": "",
    "zero": "0",
    "minus one": "-1",
    "a half": "0.5",
    "NaN": "nan",
    "infinity": "inf",
    "minus infinity": "-inf",
    "superscript two": "²",
    "Arabic digits": "١٢",
    "5,000 digits": "9" * 5000,
    "a million": "1000000",
    "2^31": str(2**31),
    "2^63": str(2**63),
    "2^64": str(2**64),
    "1e308": "1e308",
    "a denormal": "1e-320",
    "hexadecimal": "0x10",
    "a word": "many",
}

PATHS: Mapping[str, str] = {
    "nothing": "",
    "a missing file": "nowhere/nothing.toml",
    "a folder": "folder",
    "an empty file": "empty.toml",
    "bytes that are no text": "binary.toml",
    "deeply nested TOML": "deep.toml",
    "deeply nested JSON": "deep.jsonl",
    "wrong types": "types.toml",
    "wrong JSON types": "types.jsonl",
    "a file in /proc": "/proc/x",
    "process memory": "/proc/self/mem",
    "a full device": "/dev/full",
    "the null device": "/dev/null",
    "below a file": "text.txt/below.svg",
    "nobody's home": "~nosuchuser/x",
    "a loop of links": "loop",
    "a name too long": "n" * 300 + ".svg",
    "a name that is no UTF-8": os.fsdecode(b"\xff.svg"),
    "a number": "7",
}

READ = (
    "--init", "--gpu", "--plan", "--resume", "--recipe", "--api-key", "--tls-cert", "--tls-key", "--draft", "--adapter",
    "--data", "--tokenizer", "--tried", "--trace", "[PRESET|CONFIG.toml]", "[CONFIG.toml|PRESET]",
    "[CONFIG.toml|PRESET|FILE.py:FUNCTION]", "RUN", "RUN|FOLDER",
    "[RUN|FOLDER]", "--prompts-file", "--preferences", "--task", "RUN...", "RUN ... | ROWS.jsonl ...", "SOURCE",
    "RUNS.toml", "FILE.py:FUNCTION", "MODEL", "--grade",
)  # fmt: skip
"""Options, and arguments by their metavar, that name what a command reads; others that name paths, what it writes."""


def is_written(called: str) -> bool:
    return called in (
        *WRITTEN,
        "--out",
        "--run",
        "--csv",
        "--profile",
        "--turn",
        "--notebook",
        "--fallback-dir",
        "FOLDER",
    )


# Options that name what is written at the end, and paths at which nothing can be: refused before the work begins.
WRITTEN = ("--json", "--html", "--chart", "--svg")
NOTHING = "nothing"
MAY_BE_EMPTY = ("--prompt", "COMMAND")
"""Text, and the words of a user's own script; every other value that is empty is refused."""
UNWRITABLE = (NOTHING, "a folder", "a file in /proc", "below a file", "a loop of links", "a name too long")

WORDS: Mapping[str, str] = {
    "nothing": "",
    "a space": " ",
    "zero": "0",
    "minus one": "-1",
    "NaN": "nan",
    "superscript two": "²",
    "superscript shape": "²x2x2",
    "superscript mesh": "dp=²",
    "5,000 digits": "9" * 5000,
    "5,000 digits in a mesh": "dp=" + "9" * 5000,
    "5,000 digits in a shape": "1x1x" + "9" * 5000,
    "a million": "1000000",
    "2^64": str(2**64),
    "a comma": ",",
    "an equals sign": "=",
    "an open bracket": "[",
    "rich markup": "[/bold]",
    "a quote": '"',
    "a percent sign": "%s",
    "two lines": "one\ntwo",
    "an unknown word": "nonsense",
    "a very long word": "w" * 20_000,
    "a missing file": "nowhere/nothing.toml",
    "nobody's home": "~nosuchuser/x",
    "bytes that are no UTF-8": os.fsdecode(b"\xff\xfe"),
    "an option": "--nonsense",
}

ALL: Mapping[str, str] = {**WORDS, **PATHS, **NUMBERS}


# By default (3,700 cases) each place gets some of the values, and together they get all; all for each are 19,400.
EVERY_VALUE = os.environ.get("FUZZ") == "all"


def some(labels: Sequence[str], count: int, of: str) -> list[str]:
    """So many of the labels, always the same ones for the same `of`; all of them with FUZZ=all."""
    ordered = sorted(labels, key=lambda label: zlib.crc32(f"{SEED}{of}{label}".encode()))
    return ordered if EVERY_VALUE else ordered[:count]
