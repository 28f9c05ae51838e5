"""Debug mode (`TILEMESH_DEBUG=collectives`): before each collective the ranks compare what they were asked to do.

Every rank sends its call, as text of fixed length, to every other. If they differ, all ranks raise and name who
differs, instead of exchanging wrong bytes or waiting for ever.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np

from tilemesh.comm.runtime.transport import Message, Transport
from tilemesh.core.errors import UsageError

VARIABLE = "TILEMESH_DEBUG"
_BYTES = 256


def is_on() -> bool:
    return "collectives" in os.environ.get(VARIABLE, "").split(",")


def compare_calls(transport: Transport, call: str, tag: int) -> None:
    """Raise on every rank unless all ranks make the same call."""
    calls = exchange_text(transport, call, tag)
    if len(set(calls)) == 1:
        return
    usual = Counter(calls).most_common(1)[0][0]
    odd = [f"rank {rank} calls {text}" for rank, text in enumerate(calls) if text != usual]
    others = [str(rank) for rank, text in enumerate(calls) if text == usual]
    who = f"rank{'s' if len(others) > 1 else ''} {', '.join(others)}"
    raise UsageError(f"the ranks disagree: {'; '.join(odd)}; {who} call{'' if len(others) > 1 else 's'} {usual}")


def exchange_text(transport: Transport, text: str, tag: int) -> list[str]:
    """Every rank's text, in rank order; at most 255 bytes each."""
    mine = np.zeros(_BYTES, np.uint8)
    raw = np.frombuffer(text.encode()[: _BYTES - 1], np.uint8)
    mine[: raw.size] = raw
    rows = np.zeros((transport.size, _BYTES), np.uint8)
    rows[transport.rank] = mine
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    messages = [Message(False, rank, transport.view(rows[rank]), _BYTES) for rank in others]
    messages += [Message(True, rank, transport.view(mine), _BYTES) for rank in others]
    transport.post(messages, tag).wait()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]


def spread_text(transport: Transport, text: str, root: int, tag: int) -> str:
    """The root's text on every rank; at most 255 bytes."""
    row = np.zeros(_BYTES, np.uint8)
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    if transport.rank == root:
        raw = np.frombuffer(text.encode()[: _BYTES - 1], np.uint8)
        row[: raw.size] = raw
        messages = [Message(True, rank, transport.view(row), _BYTES) for rank in others]
    else:
        messages = [Message(False, root, transport.view(row), _BYTES)]
    transport.post(messages, tag).wait()
    return bytes(row).rstrip(b"\0").decode(errors="replace")
