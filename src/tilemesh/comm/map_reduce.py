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

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError

_TEXT = ("utf-8", "surrogatepass")
"""Keys may be any text of Python's, file names that are not UTF-8 included."""
_LENGTH_BYTES = 4
_MAY_WRAP = 2.0**62  # below a sum of sizes as float64 has it, no sum of whole numbers leaves int64
T = TypeVar("T")
Rows = NDArray[Any]
Combine = Callable[[Rows], Rows]
"""From the rows of values of one key to one row: associative and commutative, as it is applied to parts of them."""


def add(rows: Rows) -> Rows:
    """The usual combination. Whole numbers whose sum may need more than 64 bits are added as Python's."""
    if rows.dtype.kind in "iu" and np.abs(rows.astype(np.float64)).sum(axis=0).max(initial=0) >= _MAY_WRAP:
        rows = rows.astype(object)
    total: Rows = rows.sum(axis=0)
    return total


def mapreduce(
    comm: Communicator,
    items: Iterable[T],
    mapper: Callable[[T], Iterable[tuple[str, Any]]],
    combine: Combine = add,
    dtype: Any = None,
) -> dict[str, Any]:
    """This rank's keys with their values, of the items of all ranks (a collective call).

    `mapper`: from an item to pairs of a key, which is text, and a value, a number or a row of numbers, of one length
    for all. `dtype`: of values; None: int64 where all of all ranks are whole numbers, else float64. Whole numbers are
    exact: one that the dtype cannot hold, a rank's own sum of a key included, is refused.
    """
    return _plain(_mapped(comm, items, mapper, combine, dtype))


def _mapped(
    comm: Communicator,
    items: Iterable[T],
    mapper: Callable[[T], Iterable[tuple[str, Any]]],
    combine: Combine,
    dtype: Any,
) -> dict[str, Rows]:
    pairs: dict[Any, list[Any]] = {}
    for item in items:
        for key, value in mapper(item):
            pairs.setdefault(key, []).append(value)
    rows, agreed = _agreed_rows(comm, pairs, dtype)
    return _shuffled(comm, _combined(comm, rows, combine), combine, agreed)


def shuffle(comm: Communicator, pairs: Mapping[str, Any], combine: Combine = add, dtype: Any = None) -> dict[str, Any]:
    """Send every key to the rank it belongs to, and combine what came for each (a collective call)."""
    rows, agreed = _agreed_rows(comm, {key: [value] for key, value in pairs.items()}, dtype)
    return _plain(_shuffled(comm, {key: values[0] for key, values in rows.items()}, combine, agreed))


def _plain(rows: Mapping[str, Rows]) -> dict[str, Any]:
    """A number where a row has one."""
    return {key: row[0] if len(row) == 1 else row for key, row in rows.items()}


class _Agreed(NamedTuple):
    """What all ranks know of the values: their dtype, and the length of a row (0 where nobody has any)."""

    dtype: Any
    width: int


def _agreed_rows(comm: Communicator, pairs: Mapping[Any, Sequence[Any]], dtype: Any) -> tuple[dict[str, Rows], _Agreed]:
    """The values of each key as an array of rows. What is wrong on one rank is said on all of them, so that none waits
    for another in a call that it does not make."""
    problem, rows = "", dict[str, Rows]()
    try:
        rows = {_text_key(key): _rows_of(values, dtype) for key, values in pairs.items()}
    except UsageError as error:
        problem = str(error)
    lengths = {row.shape[1] for row in rows.values()}
    if len(lengths) > 1:
        problem = problem or f"values of {min(lengths)} and of {max(lengths)} numbers: expected rows of one length"
    mine, is_float = max(lengths, default=0), any(row.dtype.kind == "f" for row in rows.values())
    least = min(lengths, default=math.inf)
    width, shortest, floats, problems = comm.max_over_ranks([mine, -least, is_float, bool(problem)])
    if problems:
        _refuse_together(comm, problem)
    if -shortest < width:
        words = f"values of {int(-shortest)} numbers on one rank and of {int(width)} on another: expected the same"
        raise UsageError(words)
    agreed = np.dtype(dtype) if dtype is not None else np.dtype(np.float64 if floats else np.int64)
    return {key: row.astype(agreed, copy=False) for key, row in rows.items()}, _Agreed(agreed, int(width))


def _text_key(key: Any) -> str:
    if not isinstance(key, str):
        raise UsageError(f"the key {key!r} is of type {type(key).__name__}: expected text, such as str(key)")
    return key


def _rows_of(values: Sequence[Any], dtype: Any) -> Rows:
    """Values of a key, as rows of the wanted dtype, or of int64 or float64."""
    try:
        array = np.array(values)
        if array.dtype.kind == "f" and np.abs(array).max(initial=0) >= 2.0**63:  # numpy's for 2**63 beside -1
            exact = np.array(values, object)
            array = exact if all(isinstance(value, int) for value in exact.flat) else array
        rows = array.reshape(len(values), -1) if array.ndim <= 2 else array
    except (TypeError, ValueError, OverflowError):
        array = rows = np.empty(0, object)
    is_whole = rows.dtype.kind in "biu" or (rows.size > 0 and all(isinstance(value, int) for value in rows.flat))
    if array.ndim not in (1, 2) or not (is_whole or rows.dtype.kind == "f"):
        raise UsageError(f"the value {values[0]!r}: expected a number, or a row of numbers of one length for all")
    usual = np.int64 if is_whole else np.float64
    return _fitting(rows, np.dtype(usual if dtype is None else dtype))


def _fitting(rows: Rows, dtype: np.dtype[Any]) -> Rows:
    """In this dtype; numbers that it cannot hold are refused, never rounded, and never wrap."""
    if dtype.kind in "iu" and rows.dtype != dtype and rows.size:
        if rows.dtype.kind == "f":
            wrong = rows[~(np.isfinite(rows) & (rows == np.floor(rows)))]
            if wrong.size:
                raise UsageError(f"the value {wrong[0]} where dtype is {dtype}: expected whole numbers, or dtype=float")
        limits = np.iinfo(dtype)
        for value in (int(rows.min()), int(rows.max())):
            if not limits.min <= value <= limits.max:
                raise UsageError(f"the value {value} does not fit into {dtype}: set a wider dtype, or dtype=float")
    return rows.astype(dtype, copy=False)


def _combined(comm: Communicator, rows: Mapping[str, Rows], combine: Combine) -> dict[str, Rows]:
    """One row for each key, in the dtype of its rows (a collective call: what is wrong on one rank is said on all)."""
    problem, results = "", dict[str, Rows]()
    for key, values in rows.items():
        try:
            row = values[0] if len(values) == 1 else np.asarray(combine(values)).reshape(-1)
            results[key] = _fitting(row, values.dtype)
        except UsageError as error:
            problem = f"key {key!r}: {error}"
            break
    (problems,) = comm.max_over_ranks([bool(problem)])
    if problems:
        _refuse_together(comm, problem)
    return results


def _refuse_together(comm: Communicator, problem: str) -> NoReturn:
    """Raise on all ranks what is wrong on the first rank that has a problem (a collective call)."""
    words = problem.encode(*_TEXT)
    first = -int(comm.max_over_ranks([-comm.rank if problem else -comm.size])[0])
    (length,) = comm.max_over_ranks([len(words) if comm.rank == first else 0])
    message = np.frombuffer(words, np.uint8) if comm.rank == first else np.empty(int(length), np.uint8)
    said = comm.broadcast(message.copy(), root=first).tobytes().decode(*_TEXT)
    raise UsageError(said if comm.rank == first else f"rank {first}: {said}")


def _shuffled(comm: Communicator, rows: Mapping[str, Rows], combine: Combine, agreed: _Agreed) -> dict[str, Rows]:
    parts: list[list[str]] = [[] for _ in range(comm.size)]
    for key in rows:
        parts[owner(key, comm.size)].append(key)
    texts = [_joined(keys) for keys in parts]
    sizes = np.array([[len(text), len(keys)] for text, keys in zip(texts, parts, strict=True)], np.int64)
    came = comm.all_to_all(sizes)
    values = np.array([rows[key] for keys in parts for key in keys], agreed.dtype).reshape(-1, max(agreed.width, 1))
    keys_bytes = comm.all_to_all(
        np.frombuffer(b"".join(texts), np.uint8), send_counts=sizes[:, 0].tolist(), recv_counts=came[:, 0].tolist()
    )
    received = comm.all_to_all(values, send_counts=sizes[:, 1].tolist(), recv_counts=came[:, 1].tolist())
    grouped: dict[str, list[int]] = {}
    for place, key in enumerate(_apart(keys_bytes.tobytes())):
        grouped.setdefault(key, []).append(place)
    return _combined(comm, {key: received[places] for key, places in grouped.items()}, combine)


def _joined(keys: Iterable[str]) -> bytes:
    """Keys one after the other, each after its length: a key may be any text."""
    coded = [key.encode(*_TEXT) for key in keys]
    return b"".join(len(key).to_bytes(_LENGTH_BYTES, "little") + key for key in coded)


def _apart(joined: bytes) -> Iterator[str]:
    place = 0
    while place < len(joined):
        begin = place + _LENGTH_BYTES
        place = begin + int.from_bytes(joined[place:begin], "little")
        yield joined[begin:place].decode(*_TEXT)


def owner(key: str, ranks: int) -> int:
    """The rank that a key belongs to: the same in every process, which Python's own hash is not."""
    return zlib.crc32(key.encode(*_TEXT)) % ranks


def mapreduce_stream(
    comm: Communicator,
    batches: Iterable[Sequence[T]],
    mapper: Callable[[T], Iterable[tuple[str, Any]]],
    combine: Combine = add,
    dtype: Any = None,
) -> Iterator[dict[str, Any]]:
    """After each micro-batch of a stream, all results so far of this rank's keys. Ranks may have different items, and
    must have equally many micro-batches (a collective call for each)."""
    known: dict[str, Rows] = {}
    for items in batches:
        new = _mapped(comm, items, mapper, combine, dtype)
        both = {key: np.stack([known[key], row]) if key in known else row[None] for key, row in new.items()}
        known |= _combined(comm, both, combine)
        yield _plain(known)


def gathered(comm: Communicator, mine: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of all ranks, on every rank (a collective call): numbers alone, for results that are small."""
    rows, agreed = _agreed_rows(comm, {key: [value] for key, value in mine.items()}, None)
    if agreed.width > 1:
        raise UsageError(f"rows of {agreed.width} numbers: expected one number for each key")
    text = np.frombuffer(_joined(rows), np.uint8)
    values = np.array([row[0, 0] for row in rows.values()], agreed.dtype)
    counts = comm.all_gather(np.array([[len(text), len(values)]], np.int64))
    texts = comm.all_gather(text, counts=counts[:, 0].tolist())
    values_of_all = comm.all_gather(values, counts=counts[:, 1].tolist())
    return dict(zip(_apart(texts.tobytes()), values_of_all.tolist(), strict=True))
