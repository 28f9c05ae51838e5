"""Debug mode (`TILEMESH_DEBUG=collectives`): before each collective the ranks compare what they were asked to do.

Every rank tells every other its call. If they differ, all ranks raise and name who differs, instead of exchanging
wrong bytes or waiting for ever. What a peer-exchange of private sizes sends and expects is compared pair by pair.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from tilemesh.comm.runtime.texts import Steps, exchange
from tilemesh.comm.runtime.transport import Transport
from tilemesh.core.errors import UsageError

VARIABLE = "TILEMESH_DEBUG"
_SHOWN = 200  # characters of a call in a message


def is_on() -> bool:
    return "collectives" in os.environ.get(VARIABLE, "").split(",")


def compare_calls(
    transport: Transport, call: str, tag: int, sent: Sequence[int] = (), expected: Sequence[int] = ()
) -> Steps[None]:
    """Raise on every rank unless all make the same call. `sent`, `expected`: elements to and from each rank."""
    rows = [",".join(map(str, counts)) for counts in (sent, expected)]
    told = [text.split("\n") for text in (yield from exchange(transport, "\n".join([call, *rows]), tag))]
    calls = [row[0] for row in told]
    if len(set(calls)) > 1:
        raise UsageError(f"the ranks disagree: {_differences(calls)}")
    sends, receives = ([[int(n) for n in row[i].split(",") if n] for row in told] for i in (1, 2))
    for source, row in enumerate(sends):
        for to, elements in enumerate(row):
            if receives[to][source] != elements:
                raise UsageError(
                    f"the ranks disagree: in {calls[0]} rank {source} sends {elements} elements to rank {to}, "
                    f"which expects {receives[to][source]}"
                )


def _differences(calls: Sequence[str]) -> str:
    usual = Counter(calls).most_common(1)[0][0]
    others = [text for text in calls if text != usual]
    odd = [f"rank {rank} calls {_clipped(text, usual)}" for rank, text in enumerate(calls) if text != usual]
    rest = [str(rank) for rank, text in enumerate(calls) if text == usual]
    who = f"rank{'s' if len(rest) > 1 else ''} {', '.join(rest)} call{'' if len(rest) > 1 else 's'}"
    return f"{'; '.join(odd)}; {who} {_clipped(usual, others[0])}"


def _clipped(text: str, other: str) -> str:
    """As much of a long call as shows where it differs from the other."""
    if len(text) <= _SHOWN:
        return text
    name = text.partition("(")[0]
    at = next((i for i, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), len(other))
    if at < _SHOWN - 60:
        return f"{text[: _SHOWN - 1]}…"
    return f"{name}(… {text[at - 40 : at + _SHOWN - 60]}{'…' if at + _SHOWN - 60 < len(text) else ''}"
