"""MapReduce on a communicator: map, combine, shuffle by key, reduce.

The one idea: keys are bytes and values are rows of numbers, so what is shuffled is two buffers. Every key belongs to
the rank that a hash of it names. `combine` adds up what one rank has of a key before anything is sent, which is what
makes it cheap: word counts send each rank's vocabulary, not its text. A shuffle is one all_to_all for sizes, one for
keys and one for values.

    counts = mapreduce(comm, lines, lambda line: [(word, 1) for word in line.split()])

Three words that are used for different things: a *batch* is all of a fixed set of data, a *mini-batch* the part of it
that one update of a model sees, a *micro-batch* either a part of a mini-batch (pipelines) or a short stretch of a
stream (here, `mapreduce_stream`). OLAP asks few questions about much data, which is what this is for; OLTP changes few
records many times per second, which it is not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError

_TEXT = ("utf-8", "surrogatepass")
"""Keys may be any text of Python's, file names that are not UTF-8 included."""
T = TypeVar("T")
Rows = NDArray[Any]
Combine = Callable[[Rows], Rows]
"""From the rows of values of one key to one row: associative and commutative, as it is applied to parts of them."""


def add(rows: Rows) -> Rows:
    """The usual combination."""
    made: Rows = rows.sum(axis=0)
    return made


def mapreduce(
    comm: Communicator,
    items: Iterable[T],
    mapper: Callable[[T], Iterable[tuple[str, Any]]],
    combine: Combine = add,
    dtype: Any = np.int64,
) -> dict[str, Any]:
    """This rank's keys with their values, of the items of all ranks (a collective call).

    `mapper`: from an item to pairs of a key and a value, a number or a row of numbers, of one length for all.
    """
    pairs: dict[str, list[Any]] = {}
    for item in items:
        for key, value in mapper(item):
            pairs.setdefault(key, []).append(value)
    return shuffle(comm, {key: combine(np.array(values, dtype)) for key, values in pairs.items()}, combine, dtype)


def shuffle(
    comm: Communicator, pairs: Mapping[str, Any], combine: Combine = add, dtype: Any = np.int64
) -> dict[str, Any]:
    """Send every key to the rank it belongs to, and combine what came for each (a collective call)."""
    rows = {key: np.atleast_1d(np.asarray(value, dtype)) for key, value in pairs.items()}
    lengths = {row.shape for row in rows.values()}
    if len(lengths) > 1 or any(row.ndim > 1 for row in rows.values()):
        raise UsageError(f"values of {len(lengths)} shapes, such as {min(lengths)}: expected rows of one length")
    width = int(comm.max_over_ranks([float(next(iter(lengths))[0]) if lengths else 0.0])[0])
    if lengths and lengths != {(width,)}:
        raise UsageError(f"values of {min(lengths)[0]} numbers here and of {width} elsewhere: expected the same")
    parts: list[list[str]] = [[] for _ in range(comm.size)]
    for key in rows:
        parts[owner(key, comm.size)].append(key)
    texts = ["\0".join(keys).encode(*_TEXT) for keys in parts]
    sizes = np.array([[len(text), len(keys)] for text, keys in zip(texts, parts, strict=True)], np.int64)
    came = comm.all_to_all(sizes)
    values = np.array([rows[key] for keys in parts for key in keys], dtype).reshape(-1, max(width, 1))
    keys_bytes = comm.all_to_all(
        np.frombuffer(b"".join(texts), np.uint8), send_counts=sizes[:, 0].tolist(), recv_counts=came[:, 0].tolist()
    )
    found = comm.all_to_all(values, send_counts=sizes[:, 1].tolist(), recv_counts=came[:, 1].tolist())
    grouped: dict[str, list[int]] = {}
    place = begin = 0
    for length, count in came.tolist():
        text = keys_bytes[begin : begin + length].tobytes().decode(*_TEXT)
        for key in text.split("\0") if count else ():
            grouped.setdefault(key, []).append(place)
            place += 1
        begin += length
    reduced = {key: combine(found[places]) if len(places) > 1 else found[places[0]] for key, places in grouped.items()}
    return {key: value[0] if width == 1 else value for key, value in reduced.items()}


def owner(key: str, ranks: int) -> int:
    """The rank that a key belongs to: the same in every process, which Python's own hash is not."""
    return zlib.crc32(key.encode(*_TEXT)) % ranks


def mapreduce_stream(
    comm: Communicator,
    batches: Iterable[Sequence[T]],
    mapper: Callable[[T], Iterable[tuple[str, Any]]],
    combine: Combine = add,
    dtype: Any = np.int64,
) -> Iterator[dict[str, Any]]:
    """After each micro-batch of a stream, all results so far of this rank's keys. Ranks may have different items, and
    must have equally many micro-batches (a collective call for each)."""
    known: dict[str, Any] = {}
    for items in batches:
        for key, value in mapreduce(comm, items, mapper, combine, dtype).items():
            known[key] = combine(np.array([known[key], value])) if key in known else value
        yield dict(known)


def gathered(comm: Communicator, mine: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of all ranks, on every rank (a collective call): numbers alone, for results that are small."""
    text = "\0".join(f"{key}\1{value}" for key, value in mine.items()).encode(*_TEXT)
    counts = [int(count) for count in comm.all_gather(np.array([len(text)], np.int64))]
    whole = comm.all_gather(np.frombuffer(text, np.uint8), counts=counts)
    ends = np.cumsum([0, *counts])
    found: dict[str, Any] = {}
    for begin, end in pairwise(ends):
        for pair in whole[begin:end].tobytes().decode(*_TEXT).split("\0") if end > begin else ():
            key, _, value = pair.partition("\1")
            found[key] = float(value) if "." in value or "e" in value else int(value)
    return found
