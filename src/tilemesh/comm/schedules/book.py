"""Every schedule by name: which algorithms serve which collective, and the one function that makes them.

A new algorithm is a builder `(ranks, root) -> Schedule` and a line in this table; checking, drawing, counting,
simulating and running it need nothing more. What its name says is relied upon: `flat…` goes through memory that ranks
share, `direct…` reads the neighbours' inputs in place, `…_segmented` is given `segments`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from tilemesh.comm.schedules import bruck, exchange, flat, hierarchical, naive, pairwise, recursive, ring, tree
from tilemesh.comm.schedules.collectives import require_collective
from tilemesh.comm.schedules.schedule import Schedule
from tilemesh.core.errors import UsageError, unknown

Builder = Callable[..., Schedule]

SEGMENTS = 4  # of a segmented ring, unless told otherwise

BOOK: dict[str, dict[str, Builder]] = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "ring_segmented": ring.all_reduce,
        "recursive_doubling": recursive.all_reduce,
        "rabenseifner": recursive.halving_doubling,
        "tree": tree.all_reduce,
        "hierarchical": hierarchical.all_reduce,
        "flat": flat.all_reduce,
        "flat_one": flat.all_reduce_by_one,
        "flat_slices": flat.all_reduce_slices,
        "direct": flat.direct_all_reduce,
        "direct_slices": flat.direct_all_reduce_slices,
        "naive": naive.all_reduce,
    },
    "reduce_scatter": {
        "ring": ring.reduce_scatter,
        "ring_segmented": ring.reduce_scatter,
        "recursive_halving": recursive.reduce_scatter,
        "pairwise": pairwise.reduce_scatter,
        "tree": tree.reduce_scatter,
        "hierarchical": hierarchical.reduce_scatter,
        "flat": flat.reduce_scatter,
        "flat_one": flat.reduce_scatter_by_one,
        "direct": flat.direct_reduce_scatter,
        "naive": naive.reduce_scatter,
    },
    "all_gather": {
        "ring": ring.all_gather,
        "ring_segmented": ring.all_gather,
        "recursive_doubling": recursive.all_gather,
        "bruck": bruck.all_gather,
        "pairwise": pairwise.all_gather,
        "tree": tree.all_gather,
        "hierarchical": hierarchical.all_gather,
        "flat": flat.all_gather,
        "direct": flat.direct_all_gather,
        "naive": naive.all_gather,
    },
    "all_to_all": {
        "pairwise": pairwise.all_to_all,
        "bruck": bruck.all_to_all,
        "hierarchical": exchange.all_to_all,
        "flat": flat.all_to_all,
        "direct": flat.direct_all_to_all,
        "naive": naive.all_to_all,
    },
    "broadcast": {
        "tree": tree.broadcast,
        "ring": ring.broadcast,
        "ring_segmented": ring.broadcast,
        "hierarchical": hierarchical.broadcast,
        "flat": flat.broadcast,
        "direct": flat.direct_broadcast,
        "naive": naive.broadcast,
    },
    "reduce": {
        "tree": tree.reduce,
        "ring": ring.reduce,
        "ring_segmented": ring.reduce,
        "hierarchical": hierarchical.reduce,
        "flat": flat.reduce,
        "naive": naive.reduce,
    },
    "scatter": {"tree": tree.scatter, "flat": flat.scatter, "naive": naive.scatter},
    "gather": {"tree": tree.gather, "flat": flat.gather, "naive": naive.gather},
    "barrier": {"recursive_doubling": recursive.barrier, "tree": tree.barrier, "naive": naive.barrier},
}

ALGORITHMS = tuple(dict.fromkeys(name for row in BOOK.values() for name in row))


def is_shared(algorithm: str) -> bool:
    """Whether it goes through memory that the ranks share."""
    return algorithm.startswith(("flat", "direct"))


def is_direct(algorithm: str) -> bool:
    """Whether it reads the neighbours' inputs where they are."""
    return algorithm.startswith("direct")


def algorithms(collective: str) -> tuple[str, ...]:
    """The algorithms that can serve a collective."""
    require_collective(collective)
    return tuple(BOOK[collective])


def require_algorithm(collective: str, algorithm: str, also: tuple[str, ...] = ()) -> None:
    """Refuse an unknown algorithm, and one that cannot serve this collective. `also`: names known to the caller."""
    known = (*algorithms(collective), *also)
    if algorithm in known:
        return
    if algorithm in ALGORITHMS:
        raise UsageError(f"algorithm '{algorithm}' cannot serve {collective}: those that can are {', '.join(known)}")
    raise unknown(f"algorithm for {collective}", algorithm, known)


def build(
    collective: str,
    algorithm: str,
    ranks: int,
    root: int = 0,
    *,
    segments: int = SEGMENTS,
    stage_segments: int = 1,
    node_size: int | None = None,
) -> Schedule:
    """The schedule of that name. `segments` matters to the segmented ones, `node_size` to those that know nodes.

    `stage_segments`: in how many the shared-memory ones pass over the stage.
    """
    require_algorithm(collective, algorithm)
    for what, value in (("ranks", ranks), ("root", root), ("segments", segments), ("node_size", node_size)):
        if value is not None and not isinstance(value, int):
            raise UsageError(f"{what} is {value!r}: expected a whole number")
    if ranks < 1:
        raise UsageError(f"{ranks} ranks: expected at least 1")
    if not 0 <= root < ranks:
        raise UsageError(f"root {root} is not a rank: expected 0 to {ranks - 1}")
    if segments < 2:
        raise UsageError(f"a ring in {segments} segments: expected at least 2 (plain 'ring' has one)")
    if node_size is not None and node_size < 1:
        raise UsageError(f"nodes of {node_size} ranks: expected at least 1")
    make = BOOK[collective][algorithm]
    takes = inspect.signature(make).parameters
    options: dict[str, int] = {}
    if algorithm.endswith("_segmented"):
        options["segments"] = segments
    elif is_shared(algorithm) and "segments" in takes:
        options["segments"] = stage_segments
    elif "node_size" in takes:
        options["node_size"] = node_size or hierarchical.NODE_SIZE
    return make(ranks, root, **options)
