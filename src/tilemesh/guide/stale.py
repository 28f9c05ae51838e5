"""Drawings of training without a barrier: a parameter server on the clock, and asynchronous pipelines.

The server is `methods.simulate`'s, the pipelines are the lists that `train` runs; every box has the version of the
weights that it reads.
"""

from __future__ import annotations

from tilemesh.core.scene import LaneBlock, lanes
from tilemesh.core.step.book import build
from tilemesh.core.step.check import check
from tilemesh.core.step.search import PassTimes
from tilemesh.core.step.simulate import simulate
from tilemesh.methods.simulate import ServerTimes, simulate_server, slow_rank

SERVED = ServerTimes(pull_s=0.1, push_s=0.1)


def figures() -> dict[str, str]:
    """By file name, for `docs/guide/figures/`."""
    return {
        "server.svg": server(),
        "ampnet.svg": pipeline("ampnet", "AMPNet: every pass reads the newest weights"),
        "pipedream-2bw.svg": pipeline("pipedream-2bw", "PipeDream-2BW: the first new weights are read by microbatch 8"),
    }


def server(workers: int = 3, clocks: int = 4) -> str:
    """Workers that pull, compute and push; one is slow, and with a bound of 1 the others wait for it."""
    lines = []
    for row, (name, bound) in enumerate((("BSP", 0.0), ("SSP(1)", 1.0), ("ASP", float("inf")))):
        run = simulate_server(workers, clocks, slow_rank(workers - 1, 2.0), bound, SERVED, keep_spans=True)
        lines.append((name, row, run))
    blocks = [
        LaneBlock(row * workers + span.worker, span.began_s, span.ended_s, str(span.clock), span.clock % 4)
        for _, row, run in lines
        for span in run.spans
    ]
    names = [f"{name}, worker {worker}" for name, _, _ in lines for worker in range(workers)]
    rates = ", ".join(f"{name} {run.throughput:.2f}" for name, _, run in lines)
    return lanes(
        "A parameter server: each box is a step between a pull and a push; worker 2 is twice as slow",
        names,
        blocks,
        unit="time",
        note=f"gaps: waiting for the server, or for the slowest worker. Pushes per unit of time: {rates}",
        left=124,
    )


def pipeline(name: str, title: str, stages: int = 4, microbatches: int = 12) -> str:
    """An asynchronous pipeline on the clock; boxes are coloured by the version of the weights that they read."""
    program = build(name, stages, microbatches)
    check(program)
    timeline = simulate(program, PassTimes().times(program), keep_slots=True)
    blocks = [
        LaneBlock(
            slot.rank,
            slot.start_s,
            slot.end_s,
            str(slot.action.microbatch),
            slot.action.version % 4,
            pale=slot.action.kind == "F",
        )
        for slot in timeline.slots
        if slot.action.kind in ("F", "B")
    ]
    note = (
        "pale: forward · full: backward · colour: the version of the weights (0 blue, 1 brown, 2 green, 3 pink, 4 blue)"
    )
    return lanes(
        f"{title}; {timeline.bubble:.1%} bubble",
        [f"rank {rank}" for rank in range(stages)],
        blocks,
        unit="time",
        note=note,
    )
