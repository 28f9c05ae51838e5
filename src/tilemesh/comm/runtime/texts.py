"""Words that ranks tell one another, as steps: they move with everything else that is under way, and never alone.

A text travels as one message of 256 bytes, its length in front; what does not fit follows in a second one, so that
nothing is ever cut off.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from tilemesh.comm.runtime.transport import Bytes, Message, Token, Transport

T = TypeVar("T")
Steps: TypeAlias = Generator[Token, None, T]  # yields what must be done before it can go on, and returns a T

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
        whole = np.concatenate([head, rests[rank]]) if rank in rests else head
        texts[rank] = bytes(whole[_HEAD.size :][: lengths[rank]]).decode()
    return texts


def _packed(raw: bytes) -> Bytes:
    whole = np.zeros(max(_BYTES, _HEAD.size + len(raw)), np.uint8)
    whole[: _HEAD.size + len(raw)] = np.frombuffer(_HEAD.pack(len(raw)) + raw, np.uint8)
    return whole


def _post(transport: Transport, sent: dict[int, Bytes], landing: dict[int, Bytes], tag: int) -> Steps[None]:
    messages = [Message(False, rank, transport.view(region), region.nbytes) for rank, region in landing.items()]
    messages += [Message(True, rank, transport.view(region), region.nbytes) for rank, region in sent.items()]
    if messages:
        yield transport.post(messages, tag)
