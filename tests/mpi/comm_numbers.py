"""Every algorithm × dtype × operation × length against what numpy computes in one process: a choice changes no result.

Integers take all values of their dtype, so sums and products wrap around. Floats are whole numbers and so exact in any
order; the smallest and largest also see NaN, infinities and both zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np

from tilemesh.comm import Communicator, connect
from tilemesh.comm.runtime.arithmetic import OPERATIONS, UFUNCS, require_operation
from tilemesh.comm.runtime.choose import Request, refuses
from tilemesh.comm.schedules.book import BOOK, is_direct
from tilemesh.comm.schedules.collectives import REDUCING
from tilemesh.core.errors import UsageError

WHOLE = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
DTYPES = (*WHOLE, "bool", "float16", "float32", "float64", np.dtype(np.longdouble).name, "complex64", "complex128")
FEW, MANY = (67,), (1, 2, 15, 16, 17, 31, 64, 65, 1000, 4097, 70_000)
Array = np.ndarray[Any, Any]


def operations(dtype: str) -> list[str]:
    def is_allowed(op: str) -> bool:
        try:
            require_operation(op, dtype)
        except UsageError:
            return False
        return True

    return [op for op in OPERATIONS if is_allowed(op)]


def contribution(dtype: str, op: str, length: int, rank: int) -> Array:
    kind, random = np.dtype(dtype), np.random.default_rng([length, rank])
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return random.integers(limits.min, limits.max, length, dtype=kind, endpoint=True)
    if op in ("min", "max") and kind.kind == "f":
        return random.choice([0.0, -0.0, 1.0, -2.0, np.nan, np.inf, -np.inf], length).astype(kind)
    values = random.choice([-2, -1, 1, 2] if op == "prod" else range(-8, 9), length)
    if kind.kind == "c":
        return (values + 1j * random.permutation(values)).astype(kind)
    return values.astype(kind)


def expected(collective: str, dtype: str, op: str, length: int, comm: Communicator, root: int) -> Array | None:
    total = reduce(UFUNCS[op], [contribution(dtype, op, length, rank) for rank in range(comm.size)])
    if op == "avg":
        total = (total / comm.size).astype(dtype)
    if collective == "reduce_scatter":
        return np.array_split(total, comm.size)[comm.rank]
    return total if collective == "all_reduce" or comm.rank == root else None


def is_right(got: Array | None, wanted: Array | None) -> bool:
    if got is None or wanted is None:
        return got is wanted
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return False
    return got.tobytes() == wanted.tobytes() if got.dtype.kind in "iub" else np.array_equal(got, wanted, equal_nan=True)


def served(comm: Communicator, collective: str, dtype: str, op: str, length: int) -> Iterator[str]:
    request = Request(collective, 1, dtype, op, uneven=collective == "reduce_scatter" and length % comm.size > 0)
    for algorithm in ("native", *BOOK[collective]):
        if refuses(request, algorithm, comm.transport) is None:
            yield algorithm
    yield "auto"


def in_arena(comm: Communicator, x: Array) -> Array:
    copy: Array = comm.empty(x.shape, x.dtype)
    copy[...] = x
    return copy


def kinds(lengths: tuple[int, ...]) -> Iterator[tuple[str, str, str, int]]:
    """Collective, dtype, operation and length."""
    for collective in REDUCING:
        for dtype in DTYPES if collective != "barrier" else ():
            for op in operations(dtype):
                for length in lengths:
                    yield collective, dtype, op, length


def wrong_results(comm: Communicator, lengths: tuple[int, ...], every: int = 1) -> tuple[int, list[str]]:
    """How many results were looked at, and those that were not numpy's. Each call twice: it is kept ready then.

    `every`: of how many cases one is taken. Small integers are always added, because libraries saturate them.
    """
    done, turn, wrong = 0, 0, []
    for collective, dtype, op, length in kinds(lengths):
        root = length % comm.size
        wanted = expected(collective, dtype, op, length, comm, root)
        for algorithm in served(comm, collective, dtype, op, length):
            turn += 1
            if turn % every and not (algorithm == "native" and op == "sum" and dtype in WHOLE[:4]):
                continue
            options: dict[str, Any] = {"root": root} if collective == "reduce" else {}
            x = contribution(dtype, op, length, comm.rank)
            if is_direct(algorithm):
                x = in_arena(comm, x)
                if collective == "all_reduce":
                    options["out"] = comm.empty(x.shape, x.dtype)
            for _ in range(2):
                got = getattr(comm, collective)(x, op, algorithm=algorithm, **options)
                done += 1
                if not is_right(got, wanted):
                    wrong.append(f"{collective} {algorithm} {dtype}[{length}] {op}: {got}, not {wanted}"[:200])
    return done, wrong


def on_a_rank(is_full: bool) -> tuple[int, list[str]]:
    with np.errstate(all="ignore"), connect(timeout_s=60.0) as comm:
        return wrong_results(comm, MANY) if is_full else wrong_results(comm, FEW, every=11)
