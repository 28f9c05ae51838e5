"""Ranks that make different calls: what each of them is told, and that the communicator goes on working."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilemesh.comm import Communicator, connect
from tilemesh.comm.runtime import group
from tilemesh.core.errors import UsageError

ONES = np.ones(4)

# What rank 1 calls where the others make the first call.
PAIRS: dict[str, tuple[Callable[[Communicator], Any], Callable[[Communicator], Any]]] = {
    "length": (lambda comm: comm.all_reduce(np.ones(4)), lambda comm: comm.all_reduce(np.ones(5))),
    "large length": (lambda comm: comm.all_reduce(np.ones(90_000)), lambda comm: comm.all_reduce(np.ones(90_001))),
    "small and large": (lambda comm: comm.all_reduce(np.ones(4)), lambda comm: comm.all_reduce(np.ones(90_000))),
    "dtype": (lambda comm: comm.all_reduce(ONES), lambda comm: comm.all_reduce(ONES.view(np.int64))),
    "operation": (lambda comm: comm.all_reduce(ONES), lambda comm: comm.all_reduce(ONES, "max")),
    "algorithm": (lambda comm: comm.all_reduce(ONES, algorithm="ring"), lambda comm: comm.all_reduce(ONES)),
    "collective": (lambda comm: comm.all_reduce(ONES), lambda comm: comm.all_gather(ONES)),
    "root": (lambda comm: comm.broadcast(ONES, 0), lambda comm: comm.broadcast(ONES, 1)),
    "root of a reduce": (lambda comm: comm.reduce(ONES, root=0), lambda comm: comm.reduce(ONES, root=1)),
    "root of a scatter": (lambda comm: comm.scatter(ONES, root=0), lambda comm: comm.scatter(ONES, root=1)),
    "axis": (
        lambda comm: comm.all_gather(np.ones((2, 2)), axis=0),
        lambda comm: comm.all_gather(np.ones((2, 2)), axis=1),
    ),
    "reduce or not": (lambda comm: comm.all_reduce(ONES), lambda comm: comm.reduce(ONES)),
    "barrier": (lambda comm: comm.barrier(), lambda comm: comm.all_reduce(ONES)),
    "group": (lambda comm: comm.split(0), lambda comm: comm.all_reduce(ONES)),
    "memory": (lambda comm: comm.empty(8), lambda comm: comm.empty(9)),
    "flat length": (
        lambda comm: comm.all_reduce(np.ones(4), algorithm="flat"),
        lambda comm: comm.all_reduce(np.ones(5), algorithm="flat"),
    ),
    "flat_one dtype": (
        lambda comm: comm.all_reduce(ONES, algorithm="flat_one"),
        lambda comm: comm.all_reduce(ONES.view(np.int64), algorithm="flat_one"),
    ),
    "flat and flat_one": (
        lambda comm: comm.all_reduce(ONES, algorithm="flat"),
        lambda comm: comm.all_reduce(ONES, algorithm="flat_one"),
    ),
    "flat collective": (
        lambda comm: comm.reduce_scatter(ONES, algorithm="flat"),
        lambda comm: comm.all_gather(ONES, algorithm="flat"),
    ),
    "flat root": (
        lambda comm: comm.broadcast(ONES, 0, algorithm="flat"),
        lambda comm: comm.broadcast(ONES, 1, algorithm="flat"),
    ),
    "flat, large": (
        lambda comm: comm.all_reduce(np.ones(90_000), algorithm="flat"),
        lambda comm: comm.all_reduce(np.ones(90_000), "max", algorithm="flat"),
    ),
    "background": (
        lambda comm: comm.all_reduce(ONES, wait=False).wait(),
        lambda comm: comm.reduce(ONES, wait=False).wait(),
    ),
}


def told(comm: Communicator, name: str) -> str:
    """What this rank is told; afterwards all make the same calls again, and get the right answers."""
    usual, other = PAIRS[name]
    try:
        (other if comm.rank == 1 else usual)(comm)
        words = "nothing"
    except UsageError as error:
        words = str(error)
    for turn in range(3):
        total = comm.all_reduce(np.full(600, comm.rank + turn))
        assert (total == sum(range(comm.size)) + turn * comm.size).all(), name
        assert comm.all_gather(np.array([comm.rank])).tolist() == list(range(comm.size)), name
        whole = comm.reduce(np.arange(3), algorithm="tree")
        assert (whole is None) == (comm.rank != 0), name
    return words


def repeated(comm: Communicator, name: str) -> str:
    """The same after both calls have been made by all ranks together, so that they are kept ready."""
    for call in PAIRS[name]:
        for _ in range(2):
            call(comm)
    return told(comm, name)


def all_told(comm: Communicator, *, is_repeated: bool, names: tuple[str, ...] = tuple(PAIRS)) -> dict[str, str]:
    return {name: (repeated if is_repeated else told)(comm, name) for name in names}


def on_a_rank(is_repeated: bool, has_arena: bool, names: list[str]) -> dict[str, str]:
    open_arena = group.open_arena
    if not has_arena:  # as on ranks of several machines
        group.open_arena = lambda *_, **__: None  # type: ignore[assignment]
    try:
        with connect(timeout_s=30.0) as comm:
            assert (comm.arena is not None) == has_arena
            return all_told(comm, is_repeated=is_repeated, names=tuple(names))
    finally:
        group.open_arena = open_arena
