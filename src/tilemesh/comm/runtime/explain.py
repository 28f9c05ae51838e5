"""`comm.explain`: what `auto` would pick for a call, why, and what each algorithm would send."""

from __future__ import annotations

from tilemesh.comm.runtime.choose import Request, candidates, choose, predicted
from tilemesh.comm.runtime.fit import Fit
from tilemesh.comm.runtime.native import WIDENED, orders, widens
from tilemesh.comm.runtime.transport import Transport
from tilemesh.comm.schedules.book import is_direct, is_shared
from tilemesh.comm.schedules.cost import traffic
from tilemesh.comm.schedules.hierarchical import NODE_SIZE
from tilemesh.core.units import format_bytes, format_seconds


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
        words = (refusal and f"cannot: {refusal}") or _sends(name, request, ranks, node_size or NODE_SIZE)
        lines.append(f"  {name:<20} {'' if refusal else cost}{words}")
    if fit is None and ranks > 1:
        lines.append("  no costs: this machine is not fitted; run `tilemesh bench collective --fit`")
    return "\n".join(lines)


def _sends(name: str, request: Request, ranks: int, node_size: int) -> str:
    if name == "native":
        widened = widens(request.collective, request.dtype)
        ordered = orders(request.collective, request.dtype, request.op)
        return (
            f"the library's own{'; widens to float32 on the wire' if widened else ''}"
            f"{'; sends whole numbers of the same order' if ordered else ''}"
        )
    if is_shared(name):
        return "sends nothing: reads the neighbours' " + ("arrays (of comm.empty)" if is_direct(name) else "stage")
    collective, nbytes = request.collective, request.nbytes
    each = [traffic(collective, name, ranks, nbytes, rank=rank, node_size=node_size) for rank in range(ranks)]
    most = max(each, key=lambda one: one.nbytes)
    if request.op == "avg" and request.dtype in WIDENED:
        return f"{most.messages} messages, {format_bytes(2 * most.nbytes)} sent by the busiest rank (as float32)"
    return f"{most.messages} messages, {format_bytes(most.nbytes)} sent by the busiest rank"
