"""What a run tells whoever started it while it runs: events, as plain values handed to one function.

    {"kind": "run", "folder": ...}                        the folder is there; nothing has been trained yet
    {"kind": "say", "text": ...}                          a sentence of rank 0
    {"kind": "step", "step": ..., "loss": ..., ...}       the figures of a step, as in metrics.jsonl, and what is left
    {"kind": "output", "rank": ..., "stream": ..., "text": ...}   a line that a started rank printed
    {"kind": "launcher", "text": ...}                     what the launcher says: a restart, a signal
    {"kind": "end", "step": ..., "saved_step": ..., ...}  rank 0 is done, and the result

Events of a started rank cross its output pipe as JSON lines behind a mark.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from tilemesh.launch.output import Sink

Listener = Callable[[Mapping[str, Any]], None]

MARK = b"\x1e"


def ignore(event: Mapping[str, Any]) -> None:
    """A listener that listens to nothing."""


def send(event: Mapping[str, Any]) -> None:
    """From a started rank 0 to the process that started it."""
    with contextlib.suppress(OSError):
        os.write(1, MARK + json.dumps(event).encode() + b"\n")


def sink_to(listener: Listener) -> Sink:
    """What a launcher gives its ranks' lines to: events as they are, whatever else a rank prints as `output`."""

    def line(rank: int, stream: str, text: bytes) -> None:
        if rank == 0 and text.startswith(MARK):
            with contextlib.suppress(ValueError):
                listener(json.loads(text[len(MARK) :]))
            return
        listener({"kind": "output", "rank": rank, "stream": stream, "text": text.decode(errors="replace")})

    return line
