"""What every transport must get right: collectives against closed-form answers, and the rest of the surface.

Runs inside ranks (`on_a_rank`) and on threads alike. Inputs are small whole numbers, exact in every dtype, so
answers are compared bit for bit; that ranks agree on sums that are *not* exact is a case of its own.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pytest
from comm_random import calls_at_random
from numpy.lib.stride_tricks import as_strided

from tilemesh.comm import Communicator, connect, minimal
from tilemesh.comm.runtime.choose import Request, refuses
from tilemesh.comm.schedules.book import ALGORITHMS, BOOK, is_direct, is_shared
from tilemesh.comm.schedules.collectives import BLOCKED, REDUCING, ROOTED, cut
from tilemesh.core.errors import RunError, UsageError

FLOATS = ("float32", "float64", "float16", "bfloat16")
WHOLE = ("int32", "int64", "uint8", "int8", "int16", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *WHOLE, "bool")
OPERATIONS = ("sum", "max", "min", "prod", "avg")
EVERY_DTYPE = (37, 40_000)  # lengths: memory that is kept between calls, and the caller's own
COMBINE: dict[str, Any] = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


@dataclass(frozen=True)
class Case:
    collective: str
    algorithm: str
    dtype: str
    length: int
    op: str = "sum"
    root: int = 0

    def __str__(self) -> str:
        return f"{self.collective}/{self.algorithm} {self.dtype}[{self.length}] {self.op} root {self.root}"


def serves(comm: Communicator, collective: str, algorithm: str, dtype: str, length: int, op: str = "sum") -> bool:
    """Whether that algorithm takes such a call on ordinary arrays; the direct ones are in `arrays_of_the_arena`."""
    uneven = collective in BLOCKED and length % comm.size > 0 and collective != "all_gather"
    request = Request(collective, 1, dtype, op, uneven)
    return refuses(request, algorithm, comm.transport) is None and not (is_direct(algorithm) and comm.size > 1)


def cases(comm: Communicator, full: bool) -> Iterator[Case]:
    """Every collective × algorithm × length × dtype and operation (`kinds`) that can be served."""
    turn = 0
    for collective, row in BOOK.items():
        if collective == "barrier":
            continue
        for algorithm in ("native", "auto", *row):
            for length in (0, 1, 3, *EVERY_DTYPE, 4096) if full else (0, 5, 64, 20_011):
                turn += 1
                root = turn % comm.size if collective in ROOTED else 0
                for dtype, op in kinds(collective, length, turn, full):
                    if algorithm == "auto" or serves(comm, collective, algorithm, dtype, length):
                        yield Case(collective, algorithm, dtype, length, op, root)


def kinds(collective: str, length: int, turn: int, full: bool) -> Iterator[tuple[str, str]]:
    """CI: one dtype and operation, in turn. Full: all of them at two lengths, which stand for all that dtypes change;
    at the others, which are about how a payload is cut, a few in turn."""
    is_every = full and length in EVERY_DTYPE
    some = [DTYPES[(turn + 4 * i) % len(DTYPES)] for i in range(3 if full else 1)]
    for i, dtype in enumerate(DTYPES if is_every else some):
        operations = ["sum"]
        if collective in REDUCING:
            operations = [op for op in OPERATIONS if op != "avg" or dtype in FLOATS]
        for op in operations if is_every else [operations[(turn + i) % len(operations)]]:
            yield dtype, op


def values(case: Case, rank: int) -> np.ndarray[Any, Any]:
    """What a rank contributes, in float64: small whole numbers; products stay small."""
    i = np.arange(case.length)
    if case.op == "prod":
        return np.where((i + rank) % 3 == 0, 2.0, 1.0)
    return ((7 * i + 13 * rank) % 11).astype(np.float64)


def answer(case: Case, comm: Communicator) -> np.ndarray[Any, Any] | None:
    """The closed form, in float64."""
    n, me = comm.size, comm.rank
    everyone = [values(case, rank) for rank in range(n)]
    if case.dtype == "bool":
        everyone = [x.astype(bool).astype(np.float64) for x in everyone]
    is_root = me == case.root
    if case.collective in REDUCING:
        total = reduce(COMBINE[case.op], everyone)
        total = total / n if case.op == "avg" else total
        if case.collective == "reduce_scatter":
            return np.array_split(total, n)[me]
        return total if case.collective == "all_reduce" or is_root else None
    if case.collective in ("all_gather", "gather"):
        return np.concatenate(everyone) if case.collective == "all_gather" or is_root else None
    if case.collective == "broadcast":
        return everyone[case.root]
    if case.collective == "scatter":
        return np.array_split(everyone[case.root], n)[me]
    return np.concatenate([np.array_split(x, n)[me] for x in everyone])


def typed(array: np.ndarray[Any, Any], dtype: str) -> Any:
    """The array in that dtype: numpy, or torch where numpy has none."""
    if dtype == "bfloat16":
        import torch

        return torch.from_numpy(array).to(torch.bfloat16)
    return array.astype(dtype)


def call(comm: Communicator, case: Case, x: Any, **options: Any) -> Any:
    method = getattr(comm, case.collective)
    if case.collective in REDUCING:
        options["op"] = case.op
    if case.collective in ROOTED:
        options["root"] = case.root
    return method(x, algorithm=case.algorithm, **options)


def check_case(comm: Communicator, case: Case) -> None:
    given = typed(values(case, comm.rank), case.dtype)
    before = typed(values(case, comm.rank), case.dtype)
    if case.collective == "scatter" and comm.rank != case.root:
        given = None
    result = call(comm, case, given)
    wanted = answer(case, comm)
    if wanted is None:
        assert result is None
        return
    require_equal(result, typed(wanted, case.dtype))
    if given is not None:
        require_equal(given, before)  # the input is never touched


def require_equal(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    assert got.dtype == wanted.dtype
    assert tuple(got.shape) == tuple(wanted.shape)
    if isinstance(got, np.ndarray):
        assert np.array_equal(got, wanted), f"got {got}, wanted {wanted}"
    else:
        assert got.equal(wanted), f"got {got}, wanted {wanted}"


# The rest of the surface ------------------------------------------------------------------------------------------


def same_bits_everywhere(comm: Communicator) -> None:
    """Sums that round: every rank must get the same bits, and close to the exact ones."""
    for algorithm in ("native", *BOOK["all_reduce"]):
        for dtype in ("float32", "float16", "bfloat16"):
            if not serves(comm, "all_reduce", algorithm, dtype, 0):
                continue
            everyone = [np.random.default_rng(rank).normal(size=1037) for rank in range(comm.size)]
            rounded = [
                np.asarray(typed(x, dtype).float() if dtype == "bfloat16" else typed(x, dtype)) for x in everyone
            ]
            mine = comm.all_reduce(typed(everyone[comm.rank], dtype), algorithm=algorithm)
            bits = mine.view(np.uint8) if isinstance(mine, np.ndarray) else mine.view(__import__("torch").uint8).numpy()
            rows = comm.all_gather(bits.reshape(1, -1), algorithm="ring")
            assert (rows == rows[0]).all(), f"{algorithm} {dtype}: ranks differ"
            as_float = np.asarray(mine.float() if dtype == "bfloat16" else mine, np.float64)
            exact = np.sum([x.astype(np.float64) for x in rounded], axis=0)
            scale = np.sum([np.abs(x.astype(np.float64)) for x in rounded], axis=0)
            epsilon = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}[dtype]
            # Each of at most n - 1 roundings errs by half a unit in the last place of a partial sum.
            assert (np.abs(as_float - exact) <= comm.size * epsilon * scale).all(), (algorithm, dtype)


def bits_of(array: Any) -> np.ndarray[Any, Any]:
    """The bytes that are part of the values. A long double of x86-64 has 80 bits in 16 bytes: the rest is anything."""
    plain = array if isinstance(array, np.ndarray) else array.view(__import__("torch").int16).numpy()
    octets = plain.view(np.uint8).reshape(plain.size, plain.itemsize)
    if plain.dtype == np.longdouble and np.finfo(plain.dtype).nmant == 63:
        octets = np.ascontiguousarray(octets[:, :10])
    return octets.reshape(1, -1)


def extremes_of_zeros_and_nans(comm: Communicator) -> None:
    """-0.0 is below 0.0 and a NaN wins, as the same bits on every rank, whoever held which."""
    n, me = comm.size, comm.rank
    nans = np.array([0x7FC00001, 0xFFC12345], np.uint32).view(np.float32)  # NaNs that differ in sign and payload
    row = np.tile(np.float32([0.0, -0.0, 1.0, -1.0, np.nan, 0.0, np.inf]), 13)
    others = np.tile(np.float32([-0.0, 0.0, 0.0, -0.0, 2.0, 0.0, -0.0]), 13)
    row[::29], others[::31] = nans[0], nans[1]
    mine = (row, others)[me % 2]
    is_lonely = n == 1
    for op, wins in (("min", np.logical_or), ("max", np.logical_and)):
        for dtype in ("float32", "float64", "float16", "bfloat16", "longdouble"):
            x = typed(mine, dtype)
            for algorithm in ("native", "auto", *BOOK["all_reduce"]):
                name = str(np.dtype(dtype).name) if dtype != "bfloat16" else dtype
                if algorithm != "auto" and not serves(comm, "all_reduce", algorithm, name, 0, op):
                    assert algorithm != "native" or comm.backend == "threads" or dtype == "longdouble"
                    continue
                result = comm.all_reduce(x, op, algorithm=algorithm)
                rows = comm.all_gather(bits_of(result), algorithm="ring")
                assert (rows == rows[0]).all(), f"{op} {algorithm} {dtype}: ranks differ"
                if is_lonely:
                    continue
                got = np.asarray(result.float() if dtype == "bfloat16" else result, np.float64)
                wanted = (np.minimum if op == "min" else np.maximum)(row, others).astype(np.float64)
                assert np.array_equal(got, wanted, equal_nan=True), (op, algorithm, dtype)
                both_zero = (row == 0) & (others == 0)
                signs = wins(np.signbit(row), np.signbit(others))
                assert np.array_equal(np.signbit(got[both_zero]), signs[both_zero]), (op, algorithm, dtype)


def averages_of_16_bits(comm: Communicator) -> None:
    """The sum of these is infinite in 16 bits; their average is not."""
    torch = pytest.importorskip("torch")
    for dtype, large in ((torch.float16, 60_000.0), (torch.bfloat16, 3e38)):
        x = torch.full((40,), large).to(dtype)
        for algorithm in ("native", "auto", *BOOK["all_reduce"]):
            name = str(dtype).removeprefix("torch.")
            if dtype == torch.bfloat16 and comm.size > 1:  # float32 ends where bf16 does
                x = torch.full((40,), 1e38 / comm.size).to(dtype)
            if algorithm == "auto" or serves(comm, "all_reduce", algorithm, name, 0, "avg"):
                assert torch.equal(comm.all_reduce(x, "avg", algorithm=algorithm), x), (algorithm, dtype)
        out = torch.empty(40, dtype=dtype)
        assert comm.all_reduce(x, "avg", out=out) is out
        assert torch.equal(out, x)
        parts = comm.reduce_scatter(x.reshape(4, 10), "avg", axis=1, algorithm="ring")
        assert torch.equal(parts, x.reshape(4, 10)[:, : parts.shape[1]])
    at_root = comm.reduce(x, "avg", root=comm.size - 1)
    assert (at_root is None) == (comm.rank != comm.size - 1)


def in_place_and_out(comm: Communicator) -> None:
    for algorithm in ("native", *BOOK["all_reduce"]):
        for length in (6, 50_000):
            if not serves(comm, "all_reduce", algorithm, "float64", 0):
                continue
            x = np.arange(length) + float(comm.rank)
            total = comm.size * np.arange(length) + sum(range(comm.size))
            y = np.empty(length)
            assert comm.all_reduce(x, out=y, algorithm=algorithm) is y
            assert np.array_equal(y, total)
            assert comm.all_reduce(x, out=x, algorithm=algorithm) is x
            assert np.array_equal(x, total), algorithm
    whole = np.zeros((comm.size * 3, 2))
    mine = whole[comm.rank * 3 : comm.rank * 3 + 3]
    mine[:] = comm.rank + 1
    for algorithm in BOOK["all_gather"]:
        if serves(comm, "all_gather", algorithm, "float64", 0):
            comm.all_gather(mine, out=whole, algorithm=algorithm)
            assert np.array_equal(whole[::3, 0], np.arange(comm.size) + 1.0), algorithm
    big = np.arange(comm.size * 9_000, dtype=np.float64) + comm.rank
    wanted = minimal.all_to_all(comm, big)
    comm.all_to_all(big, out=big)
    assert np.array_equal(big, wanted)
    strided = np.zeros((4, 6))[:, ::2]
    comm.all_reduce(np.ones((4, 3)), out=strided)
    assert (strided == comm.size).all()


def axes_and_strides(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    cube = np.arange(2 * (2 * n + 1) * 3, dtype=np.float64).reshape(2, 2 * n + 1, 3)
    for x in (cube, cube.transpose(2, 1, 0).copy().transpose(2, 1, 0), np.asfortranarray(cube), cube[::-1]):
        for axis in (0, 1, 2, -1):
            part = comm.reduce_scatter(x, axis=axis, algorithm="ring")
            require_equal(part, np.ascontiguousarray(np.array_split(n * x, n, axis)[me]))
            comm.all_to_all(x + me, axis=axis)
            exchanged = comm.all_to_all(x + me, axis=axis)  # kept ready, for this axis alone
            wanted = np.concatenate([np.array_split(x + rank, n, axis)[me] for rank in range(n)], axis)
            require_equal(exchanged, wanted)
            joined = comm.all_gather(x + me, axis=axis)
            require_equal(joined, np.concatenate([x + rank for rank in range(n)], axis))
            target = np.empty(joined.shape)
            assert comm.all_gather(x + me, axis=axis, out=target) is target
            require_equal(target, joined)
    scalar = comm.all_reduce(np.array(2.0))
    assert scalar.shape == ()
    assert scalar == 2.0 * n
    read_only = np.ones(5)
    read_only.flags.writeable = False
    assert comm.all_reduce(read_only).tolist() == [n] * 5


def across_boundaries(comm: Communicator) -> None:
    """Numbers that begin in the middle of a word, as views of bytes do: of one rank only, and also as `out`."""
    n, me = comm.size, comm.rank

    def numbers(length: int, shifted: bool) -> Any:
        return np.zeros(8 * length + 8, np.uint8)[shifted : 8 * length + shifted].view(np.float64)

    for algorithm in ("auto", *(["native"] if has_native(comm) else []), "ring"):
        for length in (n, 16_000 * n):
            plain, shifted = numbers(length, False), numbers(length, True)
            plain[:] = shifted[:] = np.arange(length) + me
            total = n * np.arange(length) + n * (n - 1) / 2
            for x in (plain, shifted if me == 0 else plain, shifted):  # the second one while the first is kept ready
                for out in (None, numbers(length, me == n - 1)):
                    require_equal(comm.all_reduce(x, out=out, algorithm=algorithm), total)
            if comm.backend == "mpi" or algorithm != "native":  # gloo has none
                part = np.array_split(total, n)[me]
                require_equal(comm.reduce_scatter(shifted, out=numbers(length // n, True), algorithm=algorithm), part)
            joined = np.concatenate([np.arange(length) + float(rank) for rank in range(n)])
            require_equal(comm.all_gather(shifted, out=numbers(n * length, True), algorithm=algorithm), joined)


def nothing_but_the_numbers_is_added(comm: Communicator) -> None:
    """What earlier calls have left on the stage is in no sum: it would be warned of, or raised on one rank alone."""
    n = comm.size
    ways = [("all_reduce", "auto"), *(("reduce_scatter", name) for name in ("flat", "flat_one", "direct"))]
    ways += [("all_reduce", name) for name in ("flat", "flat_one", "flat_slices", "direct", "direct_slices")]
    for collective, algorithm in ways if comm.transport.caps.arena else ways[:1]:
        for length in (n + 1, 4099 * n - 1, 70_000 * n + 1):  # slots of a stage are as long as the longest part
            left = np.full(length, np.inf if comm.rank % 2 else -np.inf, np.float32)
            for _ in range(2):  # both halves
                comm.all_gather(left)
                comm.all_to_all(left)
            x = comm.empty(length)
            x[:] = 1
            out = comm.empty(length) if collective == "all_reduce" else None
            with np.errstate(all="raise"):
                total = getattr(comm, collective)(x, out=out, algorithm=algorithm)
            assert (total == n).all(), (collective, algorithm, length)


def memory_asked_for_behind_calls_that_have_not_begun(comm: Communicator) -> None:
    """A scatter's root speaks late, so what was called after it begins later on some ranks than on others."""
    n, me = comm.size, comm.rank
    for root in range(n):
        parts = comm.scatter(np.arange(2.0 * n) if me == root else None, root, wait=False)
        total = comm.all_reduce(np.full(63, me, np.uint32), out=np.zeros(63, np.uint32), wait=False)
        block = comm.empty(100 + root)
        block[:] = me
        assert comm.all_gather(block[:1]).tolist() == list(range(n))
        assert total.wait().tolist() == [n * (n - 1) // 2] * 63
        assert parts.wait().tolist() == [2.0 * me, 2.0 * me + 1]


def uneven_parts(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    lengths = [(3 * rank) % 4 for rank in range(n)]  # some of them 0
    mine = np.full((lengths[me], 2), me, np.int64)
    wanted = np.repeat(np.arange(n), lengths)
    for algorithm in ("auto", *BOOK["all_gather"]):
        if algorithm == "auto" or serves(comm, "all_gather", algorithm, "int64", 0):
            joined = comm.all_gather(mine, counts=lengths, algorithm=algorithm)
            assert np.array_equal(joined[:, 0], wanted), algorithm
    at_root = comm.gather(mine, root=n - 1, counts=lengths)
    assert me != n - 1 or np.array_equal(at_root[:, 1], wanted)
    x = np.arange(sum(lengths), dtype=np.float32)
    for algorithm in ("auto", *BOOK["reduce_scatter"]):
        if algorithm == "auto" or serves(comm, "reduce_scatter", algorithm, "float32", 0):
            part = comm.reduce_scatter(x, counts=lengths, algorithm=algorithm)
            start = sum(lengths[:me])
            assert np.array_equal(part, n * x[start : start + lengths[me]]), algorithm
    sends = [(me + 2 * rank) % 3 for rank in range(n)]
    receives = [(rank + 2 * me) % 3 for rank in range(n)]
    for algorithm in ("auto", "pairwise", "naive"):
        got = comm.all_to_all(
            np.full(sum(sends), me, np.int32), send_counts=sends, recv_counts=receives, algorithm=algorithm
        )
        assert np.array_equal(got, np.repeat(np.arange(n), receives)), algorithm
    # One rank has nothing to say while the others have.
    full = [rank != n - 1 for rank in range(n)]
    counts = [int(full[me] and full[rank]) for rank in range(n)]
    for algorithm in ("auto", "native", "pairwise"):
        if algorithm != "native" or serves(comm, "all_to_all", algorithm, "float64", 0):
            x_ = np.full(sum(counts), float(me))
            got = comm.all_to_all(x_, send_counts=counts, recv_counts=counts, algorithm=algorithm)
            assert got.tolist() == [float(rank) for rank in range(n) if counts[rank]], algorithm
    # What reduce_scatter cuts, all_gather with the same counts puts together again.
    y = np.arange(2 * n + 1, dtype=np.float64)
    assert np.array_equal(comm.all_gather(comm.reduce_scatter(y), counts=cut(2 * n + 1, n)), n * y)


def tensors(comm: Communicator) -> None:
    torch = pytest.importorskip("torch")
    n, me = comm.size, comm.rank
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4) + me
    y = comm.all_reduce(x)
    assert torch.equal(y, n * torch.arange(12.0).reshape(3, 4) + sum(range(n)))
    assert comm.all_reduce(x.t()).shape == (4, 3)
    assert torch.equal(comm.all_reduce(x.t()), y.t())
    out = torch.empty(3, 4)
    assert comm.all_reduce(x, out=out) is out
    assert torch.equal(out, y)
    comm.all_reduce(x, out=x)
    assert torch.equal(x, y)
    half = comm.all_gather(torch.full((1, 2), me, dtype=torch.bfloat16), axis=1)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half[0, ::2], torch.arange(n).to(torch.bfloat16))
    leaf = torch.ones(3, requires_grad=True)
    assert torch.equal(comm.all_reduce(leaf), torch.full((3,), float(n)))
    part = comm.scatter(torch.arange(n * 2) if me == 0 else None)
    assert torch.equal(part, torch.arange(2) + 2 * me)
    mean = comm.all_reduce(torch.full((5,), float(me), dtype=torch.bfloat16), "avg", algorithm="ring")
    assert torch.equal(mean, torch.full((5,), (n - 1) / 2, dtype=torch.float32).to(torch.bfloat16))


def tensors_at_addresses_that_come_again(comm: Communicator) -> None:
    """Arrays over tensors are kept by address: of more tensors than are kept, new ones in their place, and in memory
    that was shared before, or is now."""
    torch = pytest.importorskip("torch")
    n, me = comm.size, comm.rank
    ranks = sum(range(n))
    for size in (5, 40_000):
        held = [torch.empty(size) for _ in range(70 if size < 100 else 3)]
        for turn in range(2):
            for number, x in enumerate(held):
                x.fill_(number + turn + me)
                expected = float(n * (number + turn) + ranks)
                assert set(comm.all_reduce(x).tolist()) == {expected}
                assert comm.all_reduce(x, out=x) is x
                assert set(x.tolist()) == {expected}
                held[number] = torch.empty(size)  # most likely where the one before it was
        for turn in range(6):
            x, out = (torch.from_numpy(comm.empty(size, np.float32)) if turn % 2 else torch.empty(size) for _ in "xo")
            for again in range(3):
                x.fill_(turn + again + me)
                comm.all_reduce(x, out=out)
                assert set(out.tolist()) == {float(n * (turn + again) + ranks)}
            del x, out


def handles(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    x = np.arange(3000.0)
    started = [comm.all_reduce(x + i, algorithm="ring", wait=False) for i in range(4)]
    started.append(comm.all_reduce(x + 4, wait=False))  # auto: the library's own where there is one
    started.append(comm.broadcast(x + me, root=n - 1, algorithm="tree", wait=False))
    blocking = comm.all_gather(np.array([me]), algorithm="ring")  # while others are under way
    assert blocking.tolist() == list(range(n))
    # Ranks wait in different orders: all must move while one is waited for.
    order = list(range(6)) if me % 2 else list(reversed(range(6)))
    results = {i: started[i].wait() for i in order}
    for i in range(5):
        assert np.array_equal(results[i], n * (x + i))
    assert np.array_equal(results[5], x + n - 1)
    assert started[0].wait() is results[0]
    handle = comm.all_to_all(np.arange(2 * n), wait=False)
    while not handle.test():
        pass
    assert handle.wait().tolist() == [2 * me, 2 * me + 1] * n
    assert comm.barrier(wait=False).wait() is None


def handles_among_other_calls(comm: Communicator) -> None:
    """What is pending differs from rank to rank, and whoever has nothing pending may not wait in another way for it."""
    x = np.arange(5.0)
    if comm.rank:
        time.sleep(0.05)
    handle = comm.gather(x, wait=False)
    comm.barrier()
    handle.wait()
    group = comm.split(comm.rank % 2)
    handle = group.all_reduce(x, algorithm="ring", wait=False)
    require_equal(comm.all_reduce(x), x * comm.size)
    require_equal(handle.wait(), x * group.size)
    late = comm.irecv(np.empty(5), comm.size - 1) if comm.rank == 0 and comm.size > 1 else None
    require_equal(comm.all_reduce(x), x * comm.size)
    if comm.rank == comm.size - 1 and comm.rank:
        comm.send(x, 0)
    if late is not None:
        require_equal(late.wait(), x)
    group.close()


def waiting_before_or_after(comm: Communicator) -> None:
    """Rank 0 waits for a handle before calls that the others are already in, and which must move it."""
    n, me = comm.size, comm.rank
    x = np.arange(3000.0)
    calls: list[Callable[[], Any]] = [
        lambda: comm.split(me % 2),
        lambda: comm.scatter(np.arange(n) if me == 0 else None),
        comm.duplicate,
    ]
    if has_native(comm):
        calls.append(lambda: comm.all_reduce(x, algorithm="native"))
    for call_ in calls:
        handle = comm.all_reduce(x, algorithm="ring", wait=False)
        if me == 0:
            handle.wait()
        made = call_()
        require_equal(handle.wait(), n * x)
        if isinstance(made, Communicator):
            assert made.all_reduce(np.ones(2))[0] == made.size
            made.close()
    # The library's own must begin in the same order on every rank, also behind a scatter whose root is late.
    if me == n - 1:
        time.sleep(0.03)
    first = comm.scatter(np.arange(2 * n) if me == n - 1 else None, root=n - 1, wait=False)
    second = comm.all_reduce(x, wait=False)
    third = comm.broadcast(x + me, root=0, wait=False)
    require_equal(third.wait(), x)
    require_equal(second.wait(), n * x)
    assert first.wait().tolist() == [2 * me, 2 * me + 1]


def has_native(comm: Communicator) -> bool:
    return comm.transport.lacks("all_reduce", "float64", "sum", False) is None


def natively_in_every_way(comm: Communicator) -> None:
    """Ranks may differ in `wait`, in what they have under way, and in whether they gave the same arrays before."""
    if not has_native(comm):
        return
    n, me = comm.size, comm.rank
    kept = np.zeros(2 * n), np.zeros(2 * n)
    collectives = ("all_reduce", "all_gather", "all_to_all")
    for turn in range(24):
        collective = collectives[turn // 8]
        x, out = kept if (me + turn // 2) % 3 else (np.zeros(2 * n), np.zeros(2 * n))
        x[:] = np.arange(2 * n) + 100 * me + turn
        wanted = getattr(comm, collective)(x, algorithm="naive")
        if collective == "all_gather":
            out = np.zeros(2 * n * n)
        under_way = comm.all_reduce(x, algorithm="ring", wait=False) if turn % 4 == 3 else None
        if under_way is not None and me == 0:
            under_way.wait()  # the others must move it from inside the call below
        result = getattr(comm, collective)(x, out=out, algorithm="native", wait=(me + turn) % 5 != 0)
        if (me + turn) % 5 == 0:
            result = result.wait()
        assert result is out
        require_equal(out, wanted)
        if under_way is not None:
            under_way.wait()


def arrays_that_come_again(comm: Communicator) -> None:
    """Arrays that came twice are known again, and never taken for others that have got their place or their id."""
    n, me = comm.size, comm.rank
    names = ["auto", *(["native"] if has_native(comm) else []), *(["flat"] if comm.transport.caps.arena else [])]
    for algorithm in names:
        for turn in range(12):
            length = n * (1 + turn % 3)
            x, out = np.full(length, me + turn, np.float32), np.zeros(length, np.float32)
            for again in range(4):
                x += again
                out[:] = -1
                assert comm.all_reduce(x, out=out, algorithm=algorithm) is out
                wanted = n * (n - 1) // 2 + n * (turn + again * (again + 1) // 2)
                assert out.tolist() == [wanted] * length, (algorithm, turn, again)
            comm.all_reduce(out, out=out, algorithm=algorithm)  # in place, beside one that is not
            assert out.tolist() == [n * wanted] * length
            del x, out  # the next ones are likely to lie where these lay


def known_arrays_that_are_locked(comm: Communicator) -> None:
    """An `out` that came again and again is refused as any other once it is read-only, before anything is sent."""
    n = comm.size
    for algorithm in ("auto", *(["native"] if has_native(comm) else [])):
        for name in ("all_reduce", "all_to_all"):
            for length in (2 * n, 40_000 * n):
                x, out = comm.empty(length), comm.empty(length)
                x[:] = 1
                for _ in range(4):
                    getattr(comm, name)(x, out=out, algorithm=algorithm)
                held = out.copy()
                x[:] = 2
                out.flags.writeable = False
                with pytest.raises(UsageError, match="read-only"):
                    getattr(comm, name)(x, out=out, algorithm=algorithm)
                require_equal(out, held)
                out.flags.writeable = True
                wanted = np.full(length, 2 * n if name == "all_reduce" else 2, np.float32)
                require_equal(getattr(comm, name)(x, out=out, algorithm=algorithm), wanted)


def from_other_threads(comm: Communicator) -> None:
    """One communicator in one thread after another, and two in two threads at once."""
    n = comm.size
    x = np.arange(2000.0)
    started: list[Any] = []
    for algorithm in ("ring", "auto"):
        starter = threading.Thread(
            target=lambda a=algorithm: started.append(comm.all_reduce(x, algorithm=a, wait=False))
        )
        starter.start()
        starter.join()
    for handle in reversed(started):
        require_equal(handle.wait(), n * x)
    other = comm.duplicate()
    wrong: list[BaseException] = []

    def beside() -> None:
        try:
            for i in range(20):
                handle = other.all_reduce(x + i, algorithm="ring", wait=False)
                require_equal(other.all_reduce(x, algorithm="rabenseifner"), n * x)
                require_equal(handle.wait(), n * (x + i))
                require_equal(other.all_reduce(x), n * x)
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=beside)
    thread.start()
    for i in range(20):
        handle = comm.all_reduce(x - i, algorithm="ring", wait=False)
        require_equal(comm.all_gather(np.array([comm.rank])), np.arange(n))
        require_equal(handle.wait(), n * (x - i))
    thread.join()
    assert wrong == []
    assert not comm.engine.pending
    other.close()


def messages(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    if n == 1:
        return
    to, source = (me + 1) % n, (me - 1) % n
    inbox = np.empty((2, 3))
    receipt = comm.irecv(inbox, source, tag=5)
    comm.isend(np.full((2, 3), float(me)), to, tag=5).wait()
    assert receipt.wait() is inbox
    assert (inbox == source).all()
    # Tags keep messages apart whatever the order they are received in.
    handles_ = [comm.isend(np.array([tag * 10 + me]), to, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        assert comm.recv(np.empty(1, int), source, tag=tag)[0] == tag * 10 + source
    for handle in handles_:
        handle.wait()
    receipt = comm.irecv(np.empty(0), source, tag=3)  # an empty message is one, too
    comm.send(np.empty(0), to, tag=3)
    assert receipt.wait().size == 0
    # Several of one tag, asked for before any has come, waited for in any order: they come as they were sent.
    lengths = (100, 1, 0, 7)
    inboxes = [np.zeros(length) for length in lengths]
    receipts = [comm.irecv(one, source, tag=4) for one in inboxes]
    handles_ = [comm.isend(np.full(length, length + 0.5), to, tag=4) for length in lengths]
    for handle in (*reversed(receipts), *handles_):
        handle.wait()
    assert [one.tolist() for one in inboxes] == [[length + 0.5] * length for length in lengths]
    if comm.backend != "threads":  # where a wrong size ends all ranks: they share their memory
        for length in (3, 5, 0):
            receipt, handle = comm.irecv(np.empty(4), source, tag=6), comm.isend(np.empty(length), to, tag=6)
            with pytest.raises(RunError, match=f"rank {source} sent .* expected"):
                receipt.wait()
            handle.wait()
    strided = np.zeros(8)[::2]
    receipt = comm.irecv(strided, source)
    comm.send(np.arange(4.0), to)
    receipt.wait()
    assert strided.tolist() == [0, 1, 2, 3]
    # A thread moves what this one does not look at: larger than what a library sends without being asked again.
    with comm.engine.moving():
        large = np.empty(1 << 20)
        receipt = comm.irecv(large, source, tag=8, sized=False)
        handle = comm.isend(np.full(1 << 20, float(me)), to, tag=8, sized=False)
        if comm.transport.caps.moved_by_threads:
            deadline = time.monotonic() + 60
            while comm.engine.pending and time.monotonic() < deadline:
                time.sleep(0.001)
            assert not comm.engine.pending
        receipt.wait()
        handle.wait()
    assert (large == source).all()


def groups(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    parity = comm.split(me % 2, key=-me)
    assert parity is not None
    members = sorted((rank for rank in range(n) if rank % 2 == me % 2), reverse=True)
    assert (parity.size, parity.rank) == (len(members), members.index(me))
    assert parity.all_gather(np.array([me])).tolist() == members
    assert parity.all_reduce(np.array([1.0]), algorithm="ring")[0] == len(members)
    assert parity.broadcast(np.array([me]), root=parity.size - 1)[0] == members[-1]
    nested = parity.split(parity.rank // 2)
    assert nested is not None
    pair = members[parity.rank // 2 * 2 :][:2]
    assert nested.all_gather(np.array([me])).tolist() == pair
    none = comm.split(0 if me == 0 else None)
    assert (none is None) == (me != 0)
    # Calls in a group and in the whole do not meet.
    a, b = comm.all_reduce(np.ones(4), wait=False, algorithm="ring"), parity.all_reduce(np.ones(4), wait=False)
    assert b.wait()[0] == parity.size
    assert a.wait()[0] == n


def bytes_on_the_wire(comm: Communicator, algorithms: Sequence[str] = ALGORITHMS) -> None:
    """What the transport counted is what the schedule says, for sizes that do not divide too."""
    from tilemesh.comm.schedules.book import build
    from tilemesh.comm.schedules.collectives import layout
    from tilemesh.comm.schedules.cost import count

    n, me = comm.size, comm.rank
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather"):
        for algorithm in BOOK[collective]:
            if algorithm not in algorithms or not serves(comm, collective, algorithm, "float32", 1):
                continue
            case = Case(collective, algorithm, "float32", 10 * n + 3, root=n // 2)
            sizes = (case.length,)
            if collective in BLOCKED:
                sizes = (case.length,) * n if collective in ("all_gather", "gather") else cut(case.length, n)
            root = case.root if collective in ROOTED else 0
            schedule = build(collective, algorithm, n, root, node_size=comm.node_size)
            received = (sizes[me],) * n if collective == "all_to_all" else ()
            place = layout(collective, me, schedule.root, n, schedule.chunks, sizes, received)
            wanted = count(schedule, lambda _, p=place: p, 4)[me] if n > 1 else None
            before = (comm.sent.messages, comm.sent.nbytes)
            call(comm, case, typed(values(case, me), "float32"))
            sent = (comm.sent.messages - before[0], comm.sent.nbytes - before[1])
            assert sent == ((wanted.messages, wanted.nbytes) if wanted else (0, 0)), case


def the_naive_ones(comm: Communicator) -> None:
    x = np.random.default_rng(comm.rank).normal(size=(2 * comm.size + 1, 3))
    for op in OPERATIONS:
        assert np.allclose(minimal.all_reduce(comm, x, op), comm.all_reduce(x, op), rtol=1e-12)
        assert np.allclose(minimal.reduce_scatter(comm, x, op), comm.reduce_scatter(x, op), rtol=1e-12)
    assert np.array_equal(minimal.all_gather(comm, x), comm.all_gather(x))
    assert np.array_equal(minimal.all_to_all(comm, x), comm.all_to_all(x))
    root = comm.size - 1
    assert np.array_equal(minimal.broadcast(comm, x, root), comm.broadcast(x, root))
    with pytest.raises(UsageError, match="unknown operation 'add'"):
        minimal.all_reduce(comm, x, "add")
    with pytest.raises(UsageError, match="avg of int64"):
        minimal.reduce_scatter(comm, np.arange(3), "avg")


def complex_numbers(comm: Communicator) -> None:
    """Carried and added by every algorithm, as numpy or torch; they have no order."""
    torch = pytest.importorskip("torch")
    n, me = comm.size, comm.rank
    x = (np.arange(2 * n) + 1j * me).astype(np.complex64)
    for algorithm in ("auto", *(["native"] if has_native(comm) else []), "ring"):
        for _ in range(2):
            total = comm.all_reduce(torch.from_numpy(x).conj(), algorithm=algorithm)
            assert total.dtype == torch.complex64
            assert np.array_equal(total.numpy(), n * np.arange(2 * n) - 1j * sum(range(n)))
            plain = comm.all_reduce(torch.from_numpy(x), algorithm=algorithm)
            assert np.array_equal(plain.numpy(), n * np.arange(2 * n) + 1j * sum(range(n)))
        assert np.array_equal(comm.all_gather(x[:1], algorithm=algorithm), 1j * np.arange(n))
    assert np.array_equal(comm.all_reduce(x.astype(np.complex128), "avg").real, np.arange(2 * n))
    assert np.array_equal(comm.all_reduce(np.full(3, 1j), "prod"), np.full(3, 1j**n))
    for op in ("min", "max"):
        with pytest.raises(UsageError, match=f"{op} of complex64: complex numbers have no order"):
            comm.all_reduce(x, op)


def nested_tensors(comm: Communicator) -> None:
    torch = pytest.importorskip("torch")
    # A jagged one on threads alone: the first of a process imports all that compiles, which takes seconds in each rank.
    for layout in (torch.strided, torch.jagged) if comm.backend == "threads" else (torch.strided,):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        for method in (comm.all_reduce, comm.broadcast, comm.all_gather, comm.reduce_scatter, comm.all_to_all):
            with pytest.raises(UsageError, match="input is a nested tensor"):
                method(nested)


def wrong_use(comm: Communicator) -> None:
    """Refused on every rank before anything is sent; and the communicator still works."""
    x = np.ones(4, np.float32)
    n = comm.size
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: comm.all_reduce(x, "add"), "unknown operation 'add': known are sum, prod, min, max, avg"),
        (lambda: comm.all_reduce(x, algorithm="rign"), "unknown algorithm for all_reduce 'rign': did you mean 'ring'?"),
        (lambda: comm.all_reduce(x, algorithm="pairwise"), "algorithm 'pairwise' cannot serve all_reduce"),
        (lambda: comm.broadcast(x, root=n), f"root {n} is not a rank of this communicator: expected 0 to {n - 1}"),
        (lambda: comm.broadcast(x, root=-1), "root -1 is not a rank"),
        (lambda: comm.all_reduce(np.array(["a"])), "input has dtype <U1"),
        (
            lambda: comm.all_reduce(np.zeros(2, "M8[s]")),
            "input has dtype datetime64[s]: a collective carries float, complex",
        ),
        (lambda: comm.all_reduce(np.ones(2, ">f4")), "foreign byte order"),
        (lambda: comm.all_reduce([1, 2]), "input is a list: expected a numpy array or a torch tensor"),
        (lambda: comm.all_reduce(np.ones(3, int), "avg"), "avg of int64"),
        (lambda: comm.all_reduce(x, out=np.ones(5, np.float32)), "out has shape (5,): this call's result has (4,)"),
        (lambda: comm.all_reduce(x, out=np.ones(4)), "out is numpy float64: expected numpy float32"),
        (lambda: comm.all_reduce(x, out=np.broadcast_to(x[:1], 4)), "out is read-only"),
        (lambda: comm.all_reduce(x, out=as_strided(x, (4,), (0,))), "several elements in one place"),
        (lambda: comm.all_gather(x, axis=1), "axis 1 of an array of shape (4,): expected -1 to 0"),
        (lambda: comm.all_gather(np.array(1.0)), "axis 0 of an array of shape ()"),
        (lambda: comm.all_gather(x, counts=[1]), "counts [1]"),
        (lambda: comm.reduce_scatter(x, counts=[1] * (n + 1)), "expected one length of 0 or more for each of"),
        (lambda: comm.reduce_scatter(x, counts=[9] * n), f"add up to {9 * n}: the input has 4 along axis 0"),
        (lambda: comm.all_to_all(x, send_counts=[1] * n), "takes send_counts and recv_counts together"),
        (lambda: comm.send(x, to=comm.rank), f"rank {comm.rank} sends to itself"),
        (lambda: comm.send(x, to=n + 3), f"to {n + 3} is not a rank"),
        (lambda: comm.isend(x, 0, tag=-1), "tag -1"),
        (lambda: comm.all_reduce(np.ones(2, np.longdouble), algorithm="native"), "cannot serve this all_reduce"),
        (lambda: comm.split("red"), "color is 'red': expected a whole number"),
        (lambda: comm.explain("allreduce", 4), "unknown collective 'allreduce'"),
    ]
    for attempt, message in wrong:
        with pytest.raises(UsageError) as caught:
            attempt()
        assert message in str(caught.value), (message, str(caught.value))
        assert isinstance(caught.value, ValueError)
    assert comm.all_reduce(x)[0] == n
    with pytest.raises(UsageError, match="several elements in one place"):  # also where such a call was made before
        comm.all_reduce(x, out=as_strided(x.copy(), (4,), (0,)))
    told = comm.explain("all_reduce", 4096, dtype="bfloat16")
    assert f"on {n} rank{'s' if n > 1 else ''} over" in told
    assert ("widens to float32 on the wire" in told) == (comm.backend != "threads")


def shared_memory_is_there(comm: Communicator) -> None:
    """On one machine every transport has an arena: without this, no shared-memory case above would have run."""
    assert comm.transport.caps.arena
    shared = [name for row in BOOK.values() for name in row if is_shared(name)]
    assert len(shared) >= 15


def arrays_of_the_arena(comm: Communicator) -> None:
    """Every direct algorithm, by name and by choice, from arrays of `empty`; results there and elsewhere."""
    n, me = comm.size, comm.rank
    for length, dtype in ((3 * n, "float32"), (5 * n, "int64"), (70_000 * n, "float64")):
        x = comm.empty(length, dtype)
        x[:] = np.arange(length) % 7 + me
        for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
            wanted = getattr(comm, collective)(np.array(x), algorithm="naive")
            out = comm.empty(wanted.shape, dtype)
            for algorithm in [name for name in BOOK[collective] if is_direct(name)] + ["auto"]:
                out[:] = 0
                assert getattr(comm, collective)(x, out=out, algorithm=algorithm) is out
                assert np.array_equal(out, wanted), (collective, algorithm, length)
                if algorithm != "direct_slices" or n == 1:
                    assert np.array_equal(getattr(comm, collective)(x, algorithm=algorithm), wanted)
        # One rank has its array elsewhere: all must go another way, and the same one.
        odd = np.array(x) if me == n - 1 else x
        assert np.array_equal(comm.all_reduce(odd), comm.all_reduce(np.array(x), algorithm="naive"))
        if n > 1:
            with pytest.raises(UsageError, match=f"the input of rank {n - 1} does not lie in memory that comm.empty"):
                comm.all_reduce(odd, algorithm="direct")
        total = comm.all_reduce(np.array(x), algorithm="naive")
        assert comm.all_reduce(x, out=x) is x  # in place
        assert np.array_equal(x, total)
        gathered = comm.empty((n, length), dtype)
        gathered[me] = me
        comm.all_gather(gathered[me : me + 1], out=gathered)
        assert (gathered == np.arange(n)[:, None]).all()


def arrays_of_the_arena_come_again(comm: Communicator) -> None:
    """Known arrays are not looked at again: what they hold, what others give instead, and their going must tell."""
    n, me = comm.size, comm.rank
    length = 70_000 * n
    for collective, op in (("all_reduce", "avg"), ("reduce_scatter", "sum"), ("all_gather", ""), ("all_to_all", "")):
        arguments = (op,) if op else ()
        x, other = comm.empty(length, "float64"), comm.empty(length, "float64")
        x[:], other[:] = np.arange(length) % 5 + me, np.arange(length) % 3 - me
        kinds = [x, x, x, other, x, x, np.array(other), x, other, x]  # one of the ranks gives these
        shape = getattr(comm, collective)(np.array(x), *arguments, algorithm="naive").shape
        out, elsewhere = comm.empty(shape, "float64"), np.empty(shape)
        for turn, kind in enumerate(kinds):
            mine = kind if me == turn % n else x
            x += 1
            right = getattr(comm, collective)(np.array(mine), *arguments, algorithm="naive")
            # In the second round one rank's result lies elsewhere now and then, too.
            for result in (out, elsewhere if me == turn % n and turn % 3 == 0 else out):
                result[:] = -1
                assert getattr(comm, collective)(mine, *arguments, out=result) is result
                assert np.array_equal(result, right), (collective, turn)
            if kind is x:
                out[:] = -1
                assert getattr(comm, collective)(mine, *arguments, out=out, algorithm="direct") is out
                assert np.array_equal(out, right), (collective, turn)
        blocks = [weakref.ref(_block_of(array)) for array in (x, other, out)]
        del x, other, out, kinds, mine, kind, result
        # A call that was not ready leaves its steps, which hang on one another; and of several threads that collect
        # at once only one does.
        deadline = time.monotonic() + 60
        while any(block() is not None for block in blocks) and time.monotonic() < deadline:
            gc.collect()
        assert [block() for block in blocks] == [None] * 3, collective  # what is kept ready keeps nothing of a caller's
    first, second = (np.zeros(length, np.float32) for _ in range(2))
    for _ in range(4):  # ordinary arrays again and again, where others might have some of the arena
        first += 1
        assert (comm.all_reduce(first, out=second) == n * first).all()


def the_first_array_of_the_arena_is_noticed(comm: Communicator) -> None:
    """Calls made ready while there was none do not look for any; from the first one on all ranks do, and alike."""
    with comm.duplicate() as fresh:
        n, me = fresh.size, fresh.rank
        x, out = np.arange(65_536 * n, dtype=np.float32) + me, np.empty(65_536 * n, np.float32)
        parts = [np.arange(65_536, dtype=np.float32) + 65_536 * me + rank for rank in range(n)]
        wanted = np.concatenate(parts)
        for _ in range(3):
            out[:] = -1
            assert np.array_equal(fresh.all_to_all(x, out=out), wanted)
        there, got = fresh.empty(x.shape, x.dtype), fresh.empty(x.shape, x.dtype)
        there[:] = x
        for turn in range(9):
            given, result = [(x, out), (there, got), (x, out) if me == turn % n else (there, got)][turn % 3]
            result[:] = -1
            assert fresh.all_to_all(given, out=result) is result
            assert np.array_equal(result, wanted), turn


def _block_of(array: Any) -> Any:
    """What all arrays of one block of the arena hang on; of one rank, which has no arena, the array itself."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array


def memory_goes_back(comm: Communicator) -> None:
    """What all ranks have dropped is given out again: in the end as much is taken as before."""
    arena = comm.arena
    gc.collect()  # arrays of the cases before may hang in the tracebacks of expected errors
    comm.barrier()
    places = []
    for turn in range(24):
        x = comm.empty((1 << 18) + turn, np.uint8)
        x[:] = turn
        places.append(int(x.__array_interface__["data"][0]) - arena.start)
        del x
        comm.barrier()
    # Without going back they would lie in 24 places. What cases before, or ranks without a core, drop late moves them.
    assert len(set(places)) <= 12
    kept = [comm.empty(1000, np.float64) for _ in range(5)]
    assert len({int(x.__array_interface__["data"][0]) for x in kept}) == 5
    torch = pytest.importorskip("torch")
    t = comm.empty((3, 4), torch.bfloat16)
    assert t.dtype == torch.bfloat16
    t[:] = 2
    assert comm.all_reduce(t)[0, 0] == 2 * comm.size


def the_same_call_again_with_other_numbers(comm: Communicator) -> None:
    """What is kept ready of a call is where its numbers lie, never the numbers: also where an array is a single one."""
    n, me = comm.size, comm.rank
    for shape in ((), (1,), (4,), (16,), (2, 8), (128,), (600,), (70_000,)):
        x = np.empty(shape, np.float32)
        served = [name for name in BOOK["all_reduce"] if serves(comm, "all_reduce", name, "float32", x.size)]
        for algorithm in ("auto", *served):
            for turn in range(4):
                x[...] = me + turn
                total = comm.all_reduce(x, algorithm=algorithm)
                assert total.shape == shape
                assert (total == n * turn + n * (n - 1) / 2).all(), (algorithm, shape, turn)


def shared_calls_in_every_order(comm: Communicator) -> None:
    """Ranks may differ in `wait`, in strides and in whether a call was made before: memory is taken in call order."""
    n, me = comm.size, comm.rank
    for turn in range(12):
        x = np.arange(600.0) + me + turn
        handles = []
        for i in range(4):
            y = np.repeat(x + i, 2)[::2] if (me + i + turn) % 3 == 0 else x + i
            result = comm.all_reduce(y, algorithm="flat" if i % 2 else "flat_slices", wait=(me + i) % 2 == 0)
            handles.append(result)
        for i, result in enumerate(handles):
            value = result if isinstance(result, np.ndarray) else result.wait()
            assert np.array_equal(value, n * (np.arange(600.0) + turn + i) + n * (n - 1) / 2)
    group = comm.split(me % 2)
    assert np.array_equal(group.all_reduce(np.full(5, me)), np.full(5, sum(range(me % 2, n, 2))))
    big = np.full(400_000, 1.0, np.float32)  # several segments
    for algorithm in ("flat", "flat_slices"):
        assert (group.all_reduce(big, algorithm=algorithm) == group.size).all()
        assert (comm.all_reduce(big, out=big.copy(), algorithm=algorithm) == n).all()
    group.close()


SURFACE = (
    shared_memory_is_there,
    arrays_of_the_arena,
    arrays_of_the_arena_come_again,
    the_first_array_of_the_arena_is_noticed,
    memory_goes_back,
    shared_calls_in_every_order,
    the_same_call_again_with_other_numbers,
    same_bits_everywhere,
    extremes_of_zeros_and_nans,
    averages_of_16_bits,
    in_place_and_out,
    axes_and_strides,
    across_boundaries,
    nothing_but_the_numbers_is_added,
    memory_asked_for_behind_calls_that_have_not_begun,
    uneven_parts,
    tensors,
    tensors_at_addresses_that_come_again,
    handles,
    handles_among_other_calls,
    waiting_before_or_after,
    natively_in_every_way,
    arrays_that_come_again,
    known_arrays_that_are_locked,
    calls_at_random,
    from_other_threads,
    messages,
    groups,
    bytes_on_the_wire,
    the_naive_ones,
    complex_numbers,
    nested_tensors,
    wrong_use,
)


def failures_of(comm: Communicator, chosen: Sequence[Case]) -> list[str]:
    """What went wrong. Goes on after a wrong answer: ranks stay in step."""
    failures = []
    for case in chosen:
        try:
            check_case(comm, case)
        except AssertionError as error:
            failures.append(f"{case}: {str(error).splitlines()[0] if str(error) else 'wrong'}")
    return failures


def run_all(comm: Communicator, *, full: bool) -> tuple[int, list[str]]:
    """Every case; how many, and what went wrong."""
    chosen = list(cases(comm, full))
    failures = failures_of(comm, chosen)
    done = len(chosen)
    for algorithm in ("auto", *BOOK["barrier"]):
        comm.barrier(algorithm=algorithm)
        done += 1
    for part in SURFACE:
        part(comm)
        done += 1
    return done, failures


def run_surface(comm: Communicator) -> tuple[int, list[str]]:
    """What is about calls rather than cases; the bytes of debug mode's own messages are nobody's to count."""
    parts = [part for part in SURFACE if part is not bytes_on_the_wire]
    for part in parts:
        part(comm)
    return len(parts), []


def run_every_algorithm(comm: Communicator) -> tuple[int, list[str]]:
    """The cases, and those parts of the surface that try all algorithms."""
    chosen = list(cases(comm, full=False))
    failures = failures_of(comm, chosen)
    parts = (same_bits_everywhere, extremes_of_zeros_and_nans, averages_of_16_bits, in_place_and_out, bytes_on_the_wire)
    for part in parts:
        part(comm)
    return len(chosen) + len(parts), failures


def run_hierarchical(comm: Communicator, node_size: int) -> tuple[int, list[str]]:
    """The cases of the two-level algorithm, on ranks that are to be taken for nodes of that size."""
    assert comm.node_size == node_size
    chosen = [case for case in cases(comm, full=False) if case.algorithm == "hierarchical"]
    served = {name for name, row in BOOK.items() if "hierarchical" in row}
    assert {case.collective for case in chosen} == served
    failures = failures_of(comm, chosen)
    bytes_on_the_wire(comm, ("hierarchical",))
    return len(chosen) + 1, failures


def on_a_rank(which: str, node_size: int | None = None) -> tuple[int, list[str], str]:
    """The cases of that kind (sample, full, surface, nodes) on a process: how many, what went wrong, over what."""
    gc.freeze()  # cases that wait until arrays are gone collect again and again: not what was imported
    with connect(timeout_s=60.0, node_size=node_size) as comm:
        if which == "nodes":
            assert node_size is not None
            done, failures = run_hierarchical(comm, node_size)
        else:
            done, failures = run_surface(comm) if which == "surface" else run_all(comm, full=which == "full")
        return done, failures, comm.backend
