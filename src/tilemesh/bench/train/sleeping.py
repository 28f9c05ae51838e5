"""Stages that sleep: how much longer a schedule's step takes than its simulation says, without any computing.

A pass of such a chunk sleeps as long as it is said to take, so ranks may outnumber cores, and what a step takes more
than its simulated time is the runtime's own: Python between actions, messages, and waking up. torch's own schedules run
over the same sleeps in the same processes, turn by turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.bench.harness import Estimate, make_row
from tilemesh.comm.connection import connect
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.step.action import Payload, StepProgram
from tilemesh.core.step.book import build
from tilemesh.core.step.passes import exchange
from tilemesh.core.step.simulate import StepTimes, simulate
from tilemesh.launch import Ranks
from tilemesh.measure.ranks import ranks_case, slowest_s
from tilemesh.measure.row import CaseValue, Row
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import in_turns
from tilemesh.parallel.run import Services, StepRunner

FORWARD_S = INPUT_S = WEIGHT_S = 0.010
NUMBERS = 16
"""In a message."""
PEERS = ("gpipe", "1f1b", "interleaved", "zb-v")
"""Schedules that torch has, too."""


def program_of(schedule: str, ranks: int, microbatches: int) -> StepProgram:
    return exchange(build(schedule, ranks, microbatches))


def simulated_s(schedule: str, ranks: int, microbatches: int) -> float:
    """What the step takes if nothing but the sleeps takes time."""
    program = program_of(schedule, ranks, microbatches)
    return simulate(program, StepTimes.even(program.chunks, FORWARD_S, INPUT_S, WEIGHT_S)).total_s


class SleepingChunk:
    """A chunk whose passes take the time they are said to, and make a few numbers."""

    numbers = NUMBERS

    def spend(self, seconds: float) -> Tensor:
        time.sleep(seconds)
        return torch.zeros(self.numbers)

    def forward(self, microbatch: int, piece: int, x: Tensor | None, *, keeps: bool) -> Tensor:
        return self.spend(FORWARD_S)

    def recompute(self, microbatch: int, piece: int) -> None:
        self.spend(FORWARD_S)

    def backward(self, microbatch: int, piece: int, gradient: Tensor | None, *, splits: bool) -> Tensor:
        return self.spend(INPUT_S if splits else INPUT_S + WEIGHT_S)

    def weights(self, microbatch: int, piece: int) -> None:
        self.spend(WEIGHT_S)

    def landing(self, microbatch: int, piece: int, of: Payload) -> Tensor:
        return torch.empty(self.numbers)


def sleeping_rows(
    ranks: int, schedules: Sequence[str], microbatches: int, repeats: int, transport: str, peers: bool
) -> list[Row]:
    """Each schedule's step beside its simulation and, over gloo, torch's schedule of the same name."""
    with Ranks(ranks, transport=transport) as started:
        taken = started.call(f"{__name__}:on_ranks", list(schedules), microbatches, repeats, peers, timeout_s=300)[0]
    rows = []
    for name in schedules:
        simulated = Estimate(simulated_s(name, ranks, microbatches))
        theirs = taken.get(f"torch {name}")
        case: dict[str, CaseValue] = {"schedule": name, "microbatches": microbatches, "transport": transport}
        rows.append(
            make_row(
                "sleeping stages", {**case, **ranks_case(ranks)}, Sample.of(taken[name]),
                predicted=simulated, limit=simulated, peers={"torch": Sample.of(theirs)} if theirs else {},
                no_peers="torch has no such schedule" if peers else "left out: --no-peers",
            )
        )  # fmt: skip
    return rows


SERVICES: Services = {("REDUCE", "gradient"): lambda action: None}
"""Two holders of a chunk have nothing to sum here."""


def on_ranks(schedules: Sequence[str], microbatches: int, repeats: int, peers: bool) -> dict[str, list[float]] | None:
    """Seconds of each step by schedule, "torch NAME" for torch's own; on rank 0. A function for `launch.call`."""
    torch.set_num_threads(1)
    comm = connect("torch" if peers else "auto", timeout_s=60.0)
    steps: dict[str, Callable[[], object]] = {}
    for schedule in schedules:
        program = program_of(schedule, comm.size, microbatches)
        chunks = {chunk: SleepingChunk() for chunk in program.placement.held[comm.rank]}
        steps[schedule] = StepRunner(program, comm, chunks, SERVICES)
        if peers and schedule in PEERS:
            steps[f"torch {schedule}"] = torch_step(schedule, comm, microbatches)
    return timed_in_turns(comm, steps, repeats)


def timed_in_turns(
    comm: Communicator, steps: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]] | None:
    """Seconds of each step on the rank that took longest, one kind after the other in every turn; on rank 0."""
    taken = in_turns({name: partial(slowest_s, comm, step) for name, step in steps.items()}, repeats)
    return taken if comm.rank == 0 else None


# ---- torch's own -----------------------------------------------------------------------------------------------


class _SleepingPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient.clone(), None, None


class _SleepingModule(nn.Module):
    """For torch's stages, which find the two halves of backward in the graph: one sleeps on the way to the input, the
    other on the way to the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, NUMBERS))

    def forward(self, x: Tensor) -> Tensor:
        sleeping: Any = _SleepingPass.apply
        y: Tensor = sleeping(x, FORWARD_S, INPUT_S) + sleeping(self.weight, 0.0, WEIGHT_S)
        return y


def torch_step(schedule: str, comm: Communicator, microbatches: int) -> Callable[[], object]:
    """A step of torch's schedule of that name over sleeping stages."""
    from tilemesh.bench.train.torch_pipeline import torch_schedule  # late: it imports for seconds

    ranks, rank = comm.size, comm.rank
    chunks = {"interleaved": (rank, rank + ranks), "zb-v": (rank, 2 * ranks - 1 - rank)}.get(schedule, (rank,))
    count = ranks * len(chunks)
    modules: dict[int, nn.Module] = {chunk: _SleepingModule() for chunk in chunks}
    runner = torch_schedule(schedule, modules, count, microbatches, lambda y, target: (y - target).sum())
    x = torch.zeros(microbatches, NUMBERS)
    has_last = count - 1 in chunks

    def step() -> None:
        inputs = (x.clone().requires_grad_(),) if 0 in chunks else ()
        if has_last:
            runner.step(*inputs, target=x, losses=[])
        else:
            runner.step(*inputs)

    return step
