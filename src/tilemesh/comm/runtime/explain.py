"""`comm.explain`: what `auto` would pick for a call, why, and what each algorithm would send."""

from __future__ import annotations

from tilemesh.comm.runtime.choose import Request, candidates, choose
from tilemesh.comm.runtime.native import WIDENED, orders, widens
from tilemesh.comm.runtime.transport import Transport
from tilemesh.comm.schedules.cost import traffic
from tilemesh.comm.schedules.hierarchical import NODE_SIZE
from tilemesh.core.units import format_bytes


def explanation(transport: Transport, request: Request, node_size: int | None) -> str:
    """One line for the choice, one an algorithm: the most that any rank sends."""
    choice = choose(request, "auto", transport)
    ranks = transport.size
    those = f"{ranks} rank{'s' if ranks > 1 else ''}"
    lines = [
        f"{request.collective} of {format_bytes(request.nbytes)} {request.dtype} on {those} "
        f"over {transport.name}: {choice.algorithm} ({choice.why})"
    ]
    for name, refusal in candidates(request, transport).items():
        lines.append(
            f"  {name:<20} {(refusal and f'cannot: {refusal}') or _sends(name, request, ranks, node_size or NODE_SIZE)}"
        )
    return "\n".join(lines)


def _sends(name: str, request: Request, ranks: int, node_size: int) -> str:
    if name == "native":
        widened = widens(request.collective, request.dtype)
        ordered = orders(request.collective, request.dtype, request.op)
        return (
            f"the library's own{'; widens to float32 on the wire' if widened else ''}"
            f"{'; sends whole numbers of the same order' if ordered else ''}"
        )
    if name.startswith("flat"):
        return "sends nothing: reads the neighbours' memory"
    collective, nbytes = request.collective, request.nbytes
    each = [traffic(collective, name, ranks, nbytes, rank=rank, node_size=node_size) for rank in range(ranks)]
    most = max(each, key=lambda one: one.nbytes)
    if request.op == "avg" and request.dtype in WIDENED:
        return f"{most.messages} messages, {format_bytes(2 * most.nbytes)} sent by the busiest rank (as float32)"
    return f"{most.messages} messages, {format_bytes(most.nbytes)} sent by the busiest rank"
