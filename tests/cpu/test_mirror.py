"""One rank of many alone: what its collectives give is what ranks would get that all bring the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tilemesh.comm.connection import run_threads
from tilemesh.comm.runtime import memory
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.runtime.mirror import mirror
from tilemesh.core.errors import UsageError
from tilemesh.parallel.mesh import Mesh

ARRAY = np.arange(1.0, 13.0).reshape(6, 2)
CALLS: dict[str, Callable[[Communicator], Any]] = {
    **{f"all_reduce {op}": lambda comm, op=op: comm.all_reduce(ARRAY, op) for op in ("sum", "avg", "min", "prod")},
    "all_reduce bf16": lambda comm: comm.all_reduce(torch.arange(5, dtype=torch.bfloat16)),
    "all_reduce bool": lambda comm: comm.all_reduce(np.array([True, False])),
    "reduce": lambda comm: comm.reduce(ARRAY, root=1),
    "broadcast": lambda comm: comm.broadcast(ARRAY, root=1),
    "reduce_scatter": lambda comm: comm.reduce_scatter(ARRAY),
    "reduce_scatter uneven": lambda comm: comm.reduce_scatter(ARRAY, counts=(1, 2, 3)),
    "all_gather": lambda comm: comm.all_gather(ARRAY, axis=1),
    "gather": lambda comm: comm.gather(ARRAY, root=1),
    "all_to_all": lambda comm: comm.all_to_all(ARRAY),
    "barrier": lambda comm: comm.barrier(),
    "later": lambda comm: comm.all_reduce(ARRAY, wait=False).wait(),
}


@pytest.mark.parametrize("name", CALLS)
def test_collectives_are_those_of_ranks_that_bring_the_same(name: str) -> None:
    for rank, expected in enumerate(run_threads(3, CALLS[name])):
        if name == "broadcast" and rank != 1:
            continue  # a mirror that brings nothing has nothing
        result = CALLS[name](mirror(3, rank))
        if expected is None:
            assert result is None
        elif isinstance(expected, torch.Tensor):
            assert torch.equal(result, expected)
        else:
            np.testing.assert_array_equal(result, expected)


def test_counts_that_differ_by_rank_are_those_of_copies() -> None:
    """Of copies each sends this one what it sends to itself."""
    comm = mirror(3, 1)
    counts = comm.all_to_all(np.array([4, 1, 1]))
    np.testing.assert_array_equal(counts, [1, 1, 1])
    received = comm.all_to_all(ARRAY, send_counts=(4, 1, 1), recv_counts=tuple(counts))
    np.testing.assert_array_equal(received, ARRAY[[4, 4, 4]])


def test_a_mesh_of_many_ranks_has_its_groups() -> None:
    mesh = Mesh(mirror(64, 37), tp=4, dp=8, pp=2)
    other = mesh.group("dp", "tp")
    assert (mesh.tp.comm.size, mesh.dp.comm.rank, mesh.pp.index, other.size) == (4, 1, 1, 32)
    assert mesh.across("dp", 2).size == 4
    assert mesh.tp.comm.all_reduce(np.ones(1))[0] == 4


def test_ranks_that_come_together_are_compared_with_what_was_expected() -> None:
    def call(comm: Communicator) -> None:
        comm.split(0, expected=(0, 1))

    with pytest.raises(UsageError, match=r"ranks \[0, 1, 2\] come together, expected \[0, 1\]"):
        run_threads(3, call)


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="rank 8 of 8"):
        mirror(8, 8)


def test_where_a_gpu_is_to_write_is_not_copied_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every collective with `out` did that, and waited for it: a second per step of 8 B parameters under ZeRO-3."""
    monkeypatch.setattr(memory, "described", lambda x, what: (tuple(x.shape), memory.Like("float32", "cuda:0")))
    monkeypatch.setattr(memory, "opened", None)
    assert memory.out_array(torch.zeros(3), (3,), memory.Like("float32", "cuda:0")) is None
    with pytest.raises(UsageError, match="out has shape"):
        memory.out_array(torch.zeros(3), (4,), memory.Like("float32", "cuda:0"))
