"""Prompts, or pairs of answers, with whatever else is known of each: the objects of a JSONL file, all in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilemesh.core.errors import UsageError

_MOST_BYTES = 1 << 28
Case = Mapping[str, Any]
"""A prompt (`prompt`, or `messages` of a conversation) and what else a score needs to know."""


_WANTED = ("prompt", "messages")


def read_cases(path: Path) -> list[Case]:
    """The objects of a JSONL file, each of which has one of the keys that are wanted."""
    try:
        with path.open("rb") as file:  # a device such as /dev/zero has no end
            content = file.read(_MOST_BYTES)
        if len(content) == _MOST_BYTES:  # said before its text is read, which may be cut within a character
            raise UsageError(f"{path} is larger than {_MOST_BYTES >> 20} MiB: give fewer lines")
        lines = content.decode("utf-8-sig").split("\n")  # U+2028 and its like may stand in JSON
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: expected a JSONL file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}: expected a JSONL file") from None
    cases: list[Case] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {number} is no JSON: {error}") from None
        if not isinstance(case, dict) or not any(key in case for key in _WANTED):
            raise UsageError(f"{path}, line {number}: expected an object with {' or '.join(_WANTED)}")
        cases.append(case)
    if not cases:
        raise UsageError(f"{path} has no line: expected an object with {' or '.join(_WANTED)} in each")
    return cases
