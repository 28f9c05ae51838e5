"""How much of a pipeline's messages computing hides: one schedule with messages left to move, waited for, and tiny.

A pass multiplies matrices for about as long as a layer takes, and gives a message of a layer's size to the next stage.
Three runs of the same list, in turns: as training does it (a send is begun and left alone), with every send waited for
until it has been taken, and with messages of a few bytes. Where nothing is hidden, the first takes as long as the
second; where all is, as long as the third.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilemesh.bench.harness import Estimate, exactly, make_row
from tilemesh.bench.train.sleeping import FORWARD_S, SleepingChunk, program_of, timed_in_turns
from tilemesh.comm.connection import connect
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.step.action import Action, StepProgram
from tilemesh.launch import Ranks
from tilemesh.measure.ranks import ranks_case
from tilemesh.measure.row import CaseValue, Row
from tilemesh.parallel.run import StepRunner

SIZE = 512
"""Of the square matrices that are multiplied."""
TINY = 16
PRODUCTS = 8
"""Of a pass."""
RUNS = ("left to move", "waited for", "tiny")


class ComputingChunk(SleepingChunk):
    """A chunk whose passes make so many products on this rank's core, and a message of so many numbers."""

    def __init__(self, products: int, numbers: int) -> None:
        self.products, self.numbers = products, numbers
        self._a, self._b = torch.rand(2, SIZE, SIZE)
        self._out = torch.empty(SIZE, SIZE)

    def spend(self, seconds: float) -> Tensor:
        """As many products for every half of a pass as for another."""
        for _ in range(self.products * round(seconds / FORWARD_S)):
            torch.mm(self._a, self._b, out=self._out)
        return torch.ones(self.numbers)


class WaitingRunner(StepRunner):
    """Waits for every send until it has been taken: in the order that was proved for sends that block."""

    def __init__(self, program: StepProgram, comm: Communicator, chunks: dict[int, ComputingChunk]) -> None:
        super().__init__(program, comm, chunks)
        self.actions = [(action, str(action)) for action in program.actions[comm.rank]]

    def _send(self, action: Action) -> None:
        super()._send(action)
        self.flush()


def sends_rows(
    ranks: int, schedule: str, sizes: Sequence[int], microbatches: int, repeats: int, transport: str
) -> list[Row]:
    """How much of messages computing hides, by their size: (waited for - left to move) / (waited for - tiny)."""
    rows = []
    with Ranks(ranks, transport=transport) as started:
        for nbytes in sizes:
            arguments = (schedule, transport, microbatches, PRODUCTS, nbytes, repeats)
            seconds_of = started.call(f"{__name__}:on_ranks", *arguments, timeout_s=120)[0]
            left_s, waited_s, tiny_s = (statistics.median(seconds_of[name]) for name in RUNS)
            hidden = (waited_s - left_s) / (waited_s - tiny_s) if waited_s > tiny_s else None
            case: dict[str, CaseValue] = {"schedule": schedule, "microbatches": microbatches, "bytes": nbytes}
            case |= {"transport": transport, **ranks_case(ranks)}
            seconds = {f"{name.replace(' ', '_')}_s": statistics.median(seconds_of[name]) for name in RUNS}
            rows.append(
                make_row(
                    "pipeline sends", case | seconds, None if hidden is None else exactly(hidden), unit="fraction",
                    predicted=Estimate(None, "no model of overlap"), limit=Estimate(1.0),
                    missing={} if hidden is not None else {"measured": "waiting for messages costs nothing here"},
                    no_peers="torch's sends are of its own schedule",
                )
            )  # fmt: skip
    return rows


def on_ranks(
    schedule: str, transport: str, microbatches: int, products: int, nbytes: int, repeats: int
) -> dict[str, list[float]] | None:
    """Seconds of each step by `RUNS`, on rank 0. A function for `launch.call`."""
    torch.set_num_threads(1)
    comm = connect(transport, timeout_s=60.0)
    program = program_of(schedule, comm.size, microbatches)
    steps: dict[str, Callable[[], object]] = {}
    for name in RUNS:
        numbers = TINY if name == "tiny" else nbytes // 4
        chunks = {chunk: ComputingChunk(products, numbers) for chunk in program.placement.held[comm.rank]}
        if name == "waited for":
            steps[name] = WaitingRunner(program, comm, chunks)
        else:
            steps[name] = StepRunner(program, comm, chunks)
    return timed_in_turns(comm, steps, repeats)
