"""Words that ranks tell one another, as steps: they move with everything else that is under way, and never alone.

A text travels as one message of 256 bytes, its length in front; what does not fit follows in a second one, so that
nothing is ever cut off.

Debug mode (`TILEMESH_DEBUG=collectives`) uses them: before each collective every rank tells every other its call. If
they differ, all ranks raise and name who differs, instead of exchanging wrong bytes or waiting for ever. What an
all_to_all of private sizes sends and expects is compared pair by pair.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Generator, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from tilemesh.comm.runtime.transport import Bytes, Message, Token, Transport
from tilemesh.core import debug
from tilemesh.core.errors import UsageError

T = TypeVar("T")
Steps: TypeAlias = Generator[Token, None, T]  # yields what must be done before it can go on, and returns a T

_SHOWN = 200  # characters of a call in a message

_HEAD = struct.Struct("<I")
_BYTES = 256


def exchange(transport: Transport, text: str, tag: int) -> Steps[list[str]]:
    """Every rank's text, on every rank, in rank order."""
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    return (yield from _move(transport, text, others, others, tag))


def spread(transport: Transport, text: str, root: int, tag: int) -> Steps[str]:
    """The root's text, on every rank."""
    is_root = transport.rank == root
    others = [rank for rank in range(transport.size) if rank != root] if is_root else []
    texts = yield from _move(transport, text, others, [] if is_root else [root], tag)
    return texts[root]


def _move(transport: Transport, text: str, to: Sequence[int], sources: Sequence[int], tag: int) -> Steps[list[str]]:
    raw = text.encode()
    mine = _packed(raw)
    heads = {rank: np.zeros(_BYTES, np.uint8) for rank in sources}
    yield from _post(transport, dict.fromkeys(to, mine[:_BYTES]), heads, tag)
    lengths = {rank: _HEAD.unpack_from(head.data)[0] for rank, head in heads.items()}
    rests = {rank: np.zeros(n, np.uint8) for rank in sources if (n := lengths[rank] + _HEAD.size - _BYTES) > 0}
    yield from _post(transport, {rank: mine[_BYTES:] for rank in to if mine.size > _BYTES}, rests, tag)
    texts = [text] * transport.size
    for rank, head in heads.items():
        words = np.concatenate([head, rests[rank]]) if rank in rests else head
        texts[rank] = bytes(words[_HEAD.size :][: lengths[rank]]).decode()
    return texts


def _packed(raw: bytes) -> Bytes:
    words = np.zeros(max(_BYTES, _HEAD.size + len(raw)), np.uint8)
    words[: _HEAD.size + len(raw)] = np.frombuffer(_HEAD.pack(len(raw)) + raw, np.uint8)
    return words


def _post(transport: Transport, sent: dict[int, Bytes], landing: dict[int, Bytes], tag: int) -> Steps[None]:
    messages = [Message(False, rank, transport.view(region), region.nbytes) for rank, region in landing.items()]
    messages += [Message(True, rank, transport.view(region), region.nbytes) for rank, region in sent.items()]
    if messages:
        yield transport.post(messages, tag)


# Debug mode -----------------------------------------------------------------------------------------------------------


def is_debugging() -> bool:
    return debug.asks_for("collectives")


def compare_calls(
    transport: Transport, call: str, tag: int, sent: Sequence[int] = (), expected: Sequence[int] = ()
) -> Steps[None]:
    """Raise on every rank unless all make the same call. `sent`, `expected`: elements to and from each rank."""
    rows = [",".join(map(str, counts)) for counts in (sent, expected)]
    rows_of_ranks = [text.split("\n") for text in (yield from exchange(transport, "\n".join([call, *rows]), tag))]
    calls = [row[0] for row in rows_of_ranks]
    if len(set(calls)) > 1:
        raise UsageError(f"the ranks disagree: {_differences(calls, transport.names)}")
    sends, receives = ([[int(n) for n in row[i].split(",") if n] for row in rows_of_ranks] for i in (1, 2))
    for source, row in enumerate(sends):
        for to, elements in enumerate(row):
            if receives[to][source] != elements:
                raise UsageError(
                    f"the ranks disagree: in {calls[0]} rank {transport.names[source]} sends {elements} elements to "
                    f"rank {transport.names[to]}, which expects {receives[to][source]}"
                )


def have_same_mark(transport: Transport, mark: int, tag: int) -> Steps[bool]:
    """Whether all ranks have this mark, known to each of them after log2(n) rounds of 16 bytes."""
    size, rank, distance = transport.size, transport.rank, 1
    low = high = mark
    while distance < size:
        mine, theirs = np.array([low, high], np.int64), np.empty(2, np.int64)
        landing = {(rank - distance) % size: theirs.view(np.uint8)}
        yield from _post(transport, {(rank + distance) % size: mine.view(np.uint8)}, landing, tag)
        low, high = min(low, int(theirs[0])), max(high, int(theirs[1]))
        distance *= 2
    return low == high


def raise_differences(transport: Transport, call: str, tag: int) -> Steps[None]:
    """For ranks that know their calls to differ: raise on every rank, once all have heard every call."""
    try:
        yield from compare_calls(transport, call, tag)
    except UsageError as error:
        yield from exchange(transport, "", tag)
        raise UsageError(str(error)) from None
    raise UsageError(f"the ranks disagree: {call} is not what every rank asked for")


def _differences(calls: Sequence[str], names: Sequence[int]) -> str:
    usual = Counter(calls).most_common(1)[0][0]
    others = [text for text in calls if text != usual]
    named = list(zip(names, calls, strict=True))
    odd = [f"rank {name} calls {_clipped(text, usual)}" for name, text in named if text != usual]
    rest = [str(name) for name, text in named if text == usual]
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
