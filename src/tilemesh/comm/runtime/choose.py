"""Which algorithm a call uses. `auto` takes what the machine's fit predicts to be quickest, else a rule of thumb.

The answer depends only on what all ranks know alike (collective, bytes, rank count, dtype, transport, and a fit that
one rank has read for all): ranks that disagreed here would wait for one another for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tilemesh.comm.runtime.arithmetic import WIDENED, is_complex, orders, widens
from tilemesh.comm.runtime.fit import Fit
from tilemesh.comm.runtime.transport import Transport
from tilemesh.comm.schedules.book import BOOK, is_direct, is_shared, require_algorithm
from tilemesh.comm.schedules.collectives import REDUCING
from tilemesh.comm.schedules.cost import traffic
from tilemesh.comm.schedules.hierarchical import NODE_SIZE
from tilemesh.core.errors import UsageError
from tilemesh.core.units import format_bytes, format_seconds

DIRECT_BYTES = 64 << 10  # below this a copy to the stage costs less than a meeting more
SETTLED_BYTES = 1 << 20  # from here on bytes decide, and a way that copies less is not slower
UNSURE = 1.1  # predictions err by about as much
SURE = 1.05  # how much quicker than the library's own a way of ours must have been, in readings apart from its own
SMALL_BYTES = 16 << 10  # below this rounds cost more than bytes

# Before any fit: the algorithm up to so many bytes. One of ours stands only where it was quicker than MPI's own, called
# by us, on every machine that was measured (two and sixteen cores, arm64 and x86-64); what it copies to and from the
# stage makes it the slower one elsewhere, which depends on caches that nobody knows yet.
_ANY = 1 << 62
_LINES = (
    128  # a pair of cache lines: numpy takes longer to be called for each rank's numbers than MPI's loop to add them
)
_CROWDED: dict[str, tuple[tuple[int, str], ...]] = {  # ranks outnumber cores
    "all_reduce": ((512, "native"), (32 << 10, "flat_one"), (512 << 10, "native"), (_ANY, "flat_slices")),
    "reduce_scatter": ((512, "native"), (32 << 10, "flat"), (2 << 20, "native"), (_ANY, "flat")),
    "all_gather": ((64 << 10, "flat"), (_ANY, "native")),
    "all_to_all": ((32 << 10, "flat"), (_ANY, "native")),
    "broadcast": ((_ANY, "flat"),),
}
_ROOMY: dict[str, tuple[tuple[int, str], ...]] = _CROWDED | {  # every rank has a core
    "all_reduce": ((_LINES, "native"), (32 << 10, "flat"), (_ANY, "flat_slices")),
    "reduce_scatter": ((_LINES, "native"), (_ANY, "flat")),
}
_FLAT_READ_BYTES = 64 << 10  # by a rank with a core, in an all_reduce: beyond, the ranks had better share the additions
_MANY = 4  # ranks from which on a rank's own block of an all_gather is little beside what it reads
_SOCKETS = ("torch",)  # gloo sends over sockets even on one node: shared memory is quicker at every size

_SMALL = {
    "all_reduce": "recursive_doubling",
    "reduce_scatter": "recursive_halving",
    "all_gather": "bruck",
    "all_to_all": "bruck",
    "broadcast": "tree",
    "reduce": "tree",
    "scatter": "tree",
    "gather": "tree",
    "barrier": "recursive_doubling",
}
_LARGE = _SMALL | {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring", "all_to_all": "pairwise"}


class Request(NamedTuple):
    """What is known of a call before it starts. `private`: sizes that only the two ranks concerned know."""

    collective: str
    nbytes: int
    dtype: str
    op: str
    uneven: bool = False
    private: bool = False


@dataclass(frozen=True)
class Choice:
    """`direct`: what to use instead if every rank's arrays lie in the arena, which only the call itself can tell."""

    algorithm: str
    why: str
    direct: str | None = None

    def taken(self, *, in_arena: bool) -> str:
        """What a call comes to. `in_arena`: every rank's input and result lie in the arena."""
        if not in_arena or self.direct is None:
            return self.algorithm
        return "direct_slices" if self.direct == "direct+" else self.direct


class Choices:
    """What `auto` picked for each kind of call, and repeats, so that a run which goes on adds in the same order.

    `earlier`: the table of an earlier run, whose picks are kept to; `table`: what was picked (or repeated) now. Both
    are plain JSON: algorithms by "group collective bytes dtype operation", with "uneven" after it where blocks differ.
    """

    def __init__(self, earlier: Mapping[str, str] | None = None) -> None:
        self.earlier = dict(earlier or {})
        self.table: dict[str, str] = {}

    def pick(self, group: str, request: Request, now: Callable[[], str], can: Callable[[str], bool]) -> str:
        """The algorithm for this kind of call: as it was picked before, else what `now()` says.

        `can`: whether an algorithm serves this call here. A run that goes on over another transport may lack one, such
        as the library's own on threads; then its sums may round otherwise.
        """
        uneven = " uneven" if request.uneven else ""  # fewer algorithms may serve it
        key = f"{group} {request.collective} {request.nbytes} {request.dtype} {request.op}{uneven}"
        if key not in self.table:
            before = self.earlier.get(key)
            self.table[key] = before if before is not None and can(before) else now()
        return self.table[key]


def choose(request: Request, algorithm: str, transport: Transport, fit: Fit | None = None) -> Choice:
    """The algorithm to use; what was asked for by name is checked and kept."""
    if algorithm == "auto":
        return _auto(request, transport, fit)
    require_algorithm(request.collective, algorithm, ("native", "auto"))
    refusal = refuses(request, algorithm, transport)
    if refusal:
        raise UsageError(f"algorithm '{algorithm}' cannot serve this {request.collective}: {refusal}")
    return Choice(algorithm, "asked for")


def refuses(request: Request, algorithm: str, transport: Transport) -> str | None:
    """Why this algorithm cannot serve the call, or None."""
    if algorithm == "native":
        return transport.lacks(request.collective, request.dtype, request.op, request.uneven)
    if is_shared(algorithm) and not transport.caps.arena:
        return f"it needs memory that the ranks share, which {transport.name} does not offer here"
    if is_direct(algorithm) and request.op == "avg" and request.dtype in WIDENED and request.collective in REDUCING:
        return f"an average of {request.dtype} is computed in float32, in memory of its own"
    if request.private and (is_shared(algorithm) or algorithm.startswith(("bruck", "hierarchical"))):
        return "it must know every rank's block sizes; with send_counts and recv_counts use pairwise, naive or native"
    return None


def direct_way(collective: str, nbytes: int, ranks: int) -> str | None:
    """What a call of that size becomes when all its arrays turn out to lie in the arena. The same on every rank.

    `ranks`: among which an all_gather's bytes are divided before they count; 1 where a fit knows better.
    """
    mine = nbytes // ranks if collective == "all_gather" else nbytes
    if mine < DIRECT_BYTES or "direct" not in BOOK[collective]:
        return None
    return "direct+" if collective == "all_reduce" else "direct"


def candidates(request: Request, transport: Transport) -> dict[str, str | None]:
    """Every algorithm for the collective, with why it is out of the question (None: it is not)."""
    names = ("native", *BOOK[request.collective])
    return {name: refuses(request, name, transport) for name in names}


def predicted(request: Request, transport: Transport, fit: Fit) -> dict[str, float]:
    """Seconds of every algorithm that can serve the call and that the fit tells something of."""
    known = {}
    for name, refusal in candidates(request, transport).items():
        seconds = None if refusal else fit.seconds(request.collective, name, request.nbytes)
        if seconds is not None:
            known[name] = seconds
    return known


def _auto(request: Request, transport: Transport, fit: Fit | None) -> Choice:
    if transport.size == 1:
        return Choice("naive", "one rank: nothing moves")
    if fit is not None and not request.private:
        choice = _fitted(request, transport, fit)
        if choice is not None:
            return choice
    if transport.caps.arena and not request.private and request.collective in _CROWDED:
        direct = direct_way(request.collective, request.nbytes, transport.size)
        natively = transport.name not in _SOCKETS and _is_plain(request, transport)
        name = unfitted(request.collective, request.nbytes, transport.size, transport.caps.crowded, natively=natively)
        if name == "native":
            why = f"{transport.name}'s own is the safe choice for this size until this machine is fitted"
        else:
            why = "through shared memory, until this machine is fitted"
        return Choice(name, why, direct)
    if refuses(request, "native", transport) is None:
        return Choice("native", f"{transport.name}'s own is the safe choice until this machine is fitted")
    is_small = request.nbytes < SMALL_BYTES
    name = (_SMALL if is_small else _LARGE)[request.collective]
    if refuses(request, name, transport):
        name = _LARGE[request.collective]
    side = "below" if is_small else "from"
    return Choice(name, f"{format_bytes(request.nbytes)}, {side} {format_bytes(SMALL_BYTES)} on")


def unfitted(collective: str, nbytes: int, ranks: int, crowded: bool, *, natively: bool = True) -> str:
    """Of ordinary arrays, among ranks that share memory: an algorithm that is quick on any machine, or native.

    `natively`: whether the library's own may be taken; where not, the one of ours for the next larger sizes is.
    """
    if not crowded and collective == "all_gather" and ranks >= _MANY:
        return "flat"
    if not crowded and collective == "all_reduce" and nbytes * ranks > _FLAT_READ_BYTES:
        return "flat_slices"
    table = [entry for entry in (_CROWDED if crowded else _ROOMY)[collective] if natively or entry[1] != "native"]
    return next((name for most, name in table if nbytes <= most), table[-1][1])


def _is_plain(request: Request, transport: Transport) -> bool:
    """Whether the library's own serves this call as it is: what is put around it costs more passes over the data."""
    collective, dtype, op = request.collective, request.dtype, request.op
    around = widens(collective, dtype, op, transport.caps) or orders(collective, dtype, op) or is_complex(dtype)
    return not around and refuses(request, "native", transport) is None


def _fitted(request: Request, transport: Transport, fit: Fit) -> Choice | None:
    """What was measured to be quickest; the library's own wherever nothing of ours is surely quicker."""
    known = predicted(request, transport, fit)
    if transport.caps.arena and not _is_plain(request, transport):
        known.pop("native", None)  # measured without what is put around it here
    ordinary = {name: seconds for name, seconds in known.items() if not is_direct(name)}
    # What was only simulated errs to its own favour: it does not know what ranks do to each other's caches.
    measured = {name: ordinary[name] for name in ordinary if fit.has_measured(request.collective, name)}
    ordinary = measured or ordinary
    if not ordinary:
        return None
    collective, nbytes = request.collective, request.nbytes

    def beats_native(name: str, margin: float) -> bool:
        return "native" not in known or fit.beats(collective, name, "native", nbytes, margin, apart=margin > 1)

    direct = direct_way(collective, nbytes, 1)
    there = min((known[name] for name in known if is_direct(name) and beats_native(name, 1.0)), default=math.inf)
    # Of two that are predicted alike the one that copies less: large readings of a fit are the least sure.
    bound = min(ordinary.values()) * (UNSURE if nbytes >= SETTLED_BYTES else 1.0)
    if there >= bound:
        direct = None
    if direct is not None:  # found not to be open to all, a call goes on through the arena, or natively
        ordinary = {name: ordinary[name] for name in ordinary if is_shared(name) or name == "native"}
    sure = {name: ordinary[name] for name in ordinary if name == "native" or beats_native(name, SURE)}
    name = min(sure, key=lambda algorithm: sure[algorithm])
    why = f"{format_seconds(sure[name])} predicted from this machine's fit"
    if name == "native" and min(ordinary, key=lambda algorithm: ordinary[algorithm]) != "native":
        why += ", and nothing of ours was surely quicker at the sizes measured around it"
    return Choice(name, why, direct)


# `comm.explain` -------------------------------------------------------------------------------------------------------


def explanation(transport: Transport, request: Request, node_size: int | None, fit: Fit | None = None) -> str:
    """One line for the choice, one an algorithm: its predicted cost, and the most that any rank sends."""
    choice = choose(request, "auto", transport, fit)
    ranks = transport.size
    those = f"{ranks} rank{'s' if ranks > 1 else ''}"
    seconds = {} if fit is None else predicted(request, transport, fit)
    lines = [
        f"{request.collective} of {format_bytes(request.nbytes)} {request.dtype} on {those} "
        f"over {transport.name}: {choice.algorithm} ({choice.why})"
    ]
    if choice.direct is not None:
        lines.append("  from arrays of comm.empty() on every rank: direct, without a copy to the stage")
    for name, refusal in candidates(request, transport).items():
        cost = f"{format_seconds(seconds[name]):>9}  " if name in seconds else f"{'?':>9}  " if fit else ""
        words = (refusal and f"cannot: {refusal}") or _sends(name, request, transport, node_size or NODE_SIZE)
        lines.append(f"  {name:<20} {'' if refusal else cost}{words}")
    if fit is None and ranks > 1:
        lines.append("  no costs: this machine is not fitted; run `tilemesh bench collective --fit`")
    return "\n".join(lines)


def _sends(name: str, request: Request, transport: Transport, node_size: int) -> str:
    ranks = transport.size
    if name == "native":
        wider = widens(request.collective, request.dtype, request.op, transport.caps)
        ordered = orders(request.collective, request.dtype, request.op)
        return (
            f"the library's own{f'; widens to {wider} on the wire' if wider else ''}"
            f"{'; sends whole numbers of the same order' if ordered else ''}"
        )
    if is_shared(name):
        return "sends nothing: reads the neighbours' " + ("arrays (of comm.empty)" if is_direct(name) else "stage")
    collective, nbytes = request.collective, request.nbytes
    each = [traffic(collective, name, ranks, nbytes, rank=rank, node_size=node_size) for rank in range(ranks)]
    most = max(each, key=lambda sent: sent.nbytes)
    if request.op == "avg" and request.dtype in WIDENED:
        return f"{most.messages} messages, {format_bytes(2 * most.nbytes)} sent by the busiest rank (as float32)"
    return f"{most.messages} messages, {format_bytes(most.nbytes)} sent by the busiest rank"
