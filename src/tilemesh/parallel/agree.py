"""Whether all ranks were given the same: a digest compared at start-up, the difference named where there is one.

Ranks that were configured differently would train something nobody asked for, or wait for one another for ever. And
what one rank alone knows, all are told (`tell`), so that none goes on where another has given up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError


def agree(comm: Communicator, values: Mapping[str, Any]) -> None:
    """Raise on every rank, with the rank and the key, unless all ranks give the same values (a collective call).

    Values are compared as JSON, what JSON does not know as text. Equal ones cost an exchange of 32 bytes per rank.
    """
    texts = {key: json.dumps(value, sort_keys=True, default=str) for key, value in values.items()}
    whole = json.dumps(texts, sort_keys=True).encode()
    digest = np.frombuffer(hashlib.sha256(whole).digest(), np.uint8)
    rows = comm.all_gather(digest.reshape(1, -1))
    if (rows == rows[0]).all():
        return
    raise UsageError(_difference([json.loads(each) for each in everyones(comm, whole)]))


def everyones(comm: Communicator, raw: bytes) -> list[bytes]:
    """What each rank gives, in order of rank, on every rank (a collective call)."""
    if comm.size == 1:
        return [raw]
    lengths = comm.all_gather(np.array([len(raw)], np.int64)).tolist()
    joined = comm.all_gather(np.frombuffer(raw, np.uint8), counts=lengths).tobytes()
    ends = np.cumsum(lengths).tolist()
    return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def tell(comm: Communicator, text: str, root: int = 0) -> str:
    """The root's text, on every rank (a collective call); what the others give is not looked at."""
    return tell_bytes(comm, text.encode(), root).decode()


def tell_bytes(comm: Communicator, raw: bytes, root: int = 0) -> bytes:
    """As `tell`."""
    length = int(comm.broadcast(np.array([len(raw)], np.int64), root=root)[0])
    if not length:
        return b""
    mine = np.frombuffer(raw, np.uint8) if comm.rank == root else np.zeros(length, np.uint8)
    return bytes(comm.broadcast(mine, root=root))


def tell_all(comm: Communicator, text: str) -> list[str]:
    """Every rank's text, on every rank (a collective call)."""
    return [each.decode() for each in everyones(comm, text.encode())]


def _difference(everyone: list[dict[str, str]]) -> str:
    """The first rank that differs from rank 0, and in what."""
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        keys = [key for key in sorted(first.keys() | theirs.keys()) if first.get(key) != theirs.get(key)]
        if keys:
            key = keys[0]
            more = f" (and {len(keys) - 1} more keys)" if len(keys) > 1 else ""
            return (
                f"the ranks were configured differently: {key} is {first.get(key, 'not given')} on rank 0 and "
                f"{theirs.get(key, 'not given')} on rank {rank}{more}; start all ranks with the same configuration"
            )
    raise AssertionError("digests differ and texts do not")
