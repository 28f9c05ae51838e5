"""No algorithm changes a result: every dtype and operation over every transport gives what numpy gives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import comm_numbers
from comm_numbers import WHOLE
from started import ranks_of

from tilemesh.comm import run_threads
from tilemesh.comm.runtime.choose import Request, explanation
from tilemesh.comm.runtime.native import library_steps
from tilemesh.comm.runtime.transport import DONE, Caps, NativeCall, Token
from tilemesh.launch.start import find_mpiexec

NEEDS_MPI = pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")
PROCESSES = [pytest.param("mpi", marks=NEEDS_MPI), "torch"]


class SaturatingTransport:
    """A library that adds as Open MPI does with AVX: 8- and 16-bit integers stop at the ends of their range."""

    caps = Caps(native=frozenset({"all_reduce"}), saturating=frozenset({"int8", "uint8", "int16", "uint16"}))
    name, rank, size = "mpi", 0, 2

    def __init__(self, other: Any = None) -> None:
        self.other = other  # what the other rank contributes

    def lacks(self, collective: str, dtype: str, op: str, uneven: bool) -> str | None:
        return None

    def native(self, call: NativeCall) -> Token:
        other = self.other.astype(call.source.dtype)
        if call.source.dtype.itemsize <= 2 and call.op == "sum":
            limits = np.iinfo(call.source.dtype)
            call.target[:] = np.clip(call.source.astype(np.int64) + other, limits.min, limits.max)
        else:
            call.target[:] = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[call.op](
                call.source, other
            )
        return DONE


@settings(deadline=None)
@given(dtype=st.sampled_from(WHOLE), op=st.sampled_from(["sum", "prod", "min", "max"]), data=st.data())
def test_a_library_that_saturates_is_made_to_wrap_around(dtype: str, op: str, data: st.DataObject) -> None:
    limits = np.iinfo(dtype)
    numbers = st.lists(st.integers(limits.min, limits.max), min_size=8, max_size=8)
    mine, other = (np.array(data.draw(numbers), dtype) for _ in range(2))
    result = np.empty_like(mine)
    call = NativeCall("all_reduce", mine, result, op)
    for token in library_steps(SaturatingTransport(other), call, dtype):  # type: ignore[arg-type]
        token.wait()
    wanted = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op](mine, other)
    assert np.array_equal(result, wanted)


def test_the_wider_sum_is_explained() -> None:
    words = explanation(SaturatingTransport(), Request("all_reduce", 64, "uint8", "sum"), None)  # type: ignore[arg-type]
    assert "the library's own; widens to uint32 on the wire" in words
    words = explanation(SaturatingTransport(), Request("all_reduce", 64, "int32", "sum"), None)  # type: ignore[arg-type]
    assert "widens" not in words


def results_over(transport: str, ranks: int, *, full: bool) -> list[Any]:
    if transport == "threads":
        lengths, every = (comm_numbers.MANY, 1) if full else (comm_numbers.FEW, 3)
        with np.errstate(all="ignore"):
            return run_threads(ranks, lambda comm: comm_numbers.wrong_results(comm, lengths, every))
    return list(ranks_of(transport, ranks).call("comm_numbers:on_a_rank", full, timeout_s=900.0))


@pytest.mark.parametrize(
    ("transport", "ranks"), [("threads", 3), pytest.param("mpi", 3, marks=NEEDS_MPI), ("torch", 3)]
)
def test_every_algorithm_gives_what_numpy_gives(transport: str, ranks: int) -> None:
    results = results_over(transport, ranks, full=False)
    assert [wrong for _, wrong in results] == [[]] * ranks
    assert min(done for done, _ in results) > 150


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", ["threads", *PROCESSES])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_algorithm_gives_what_numpy_gives_at_every_length(transport: str, ranks: int) -> None:
    results = results_over(transport, ranks, full=True)
    assert [wrong for _, wrong in results] == [[]] * ranks
