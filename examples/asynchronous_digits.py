"""Pipelines without a flush on pictures of digits: do they still learn to read?

    python examples/asynchronous_digits.py
    tilemesh launch --ranks 4 -- examples/asynchronous_digits.py

A network of four layers, one per stage, is trained by 1F1B's passes without a flush: PipeDream keeps the weights that a
forward pass read, PipeDream-2BW two versions, AMPNet none, PipeMare none and corrects. AMPNet (arXiv 1705.09786) reads
97 % of MNIST's digits. "in turn": the same network, updated after every microbatch in one process.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tilemesh.comm import Communicator, connect, run_threads
from tilemesh.core.step.book import asynchronous, build, find
from tilemesh.core.step.passes import exchange
from tilemesh.data.digits import load_digits
from tilemesh.methods.versions import WeightUpdate, version_services, versioned
from tilemesh.parallel.run import StepRunner

STAGES, WIDTH, ROWS, EPOCHS, RATE = 4, 64, 32, 24, 0.3
ANNEAL = 300  # PipeMare: updates until the early stages learn at the full rate
WANTED = 0.97


def layers() -> list[nn.Module]:
    """One per stage, the same in every process."""
    sizes = [64, *[WIDTH] * (STAGES - 1), 10]
    stages: list[nn.Module] = []
    for stage, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(inputs, outputs)
        draw = torch.Generator().manual_seed(stage)  # of its own: ranks may be threads, which share torch's
        nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu", generator=draw)
        nn.init.zeros_(linear.bias)
        stages.append(linear if stage == STAGES - 1 else nn.Sequential(linear, nn.ReLU()))
    return stages


def sgd(parameters: Sequence[nn.Parameter], updates: int, microbatches: int) -> WeightUpdate:
    """Plain SGD by the mean over an update's microbatches; its rate falls to zero over all updates."""

    def move(values: Sequence[Tensor], number: int, divisor: float) -> None:
        rate = RATE * max(0.0, 1 - number / updates) / divisor * updates / microbatches
        for parameter, value in zip(parameters, values, strict=True):
            assert parameter.grad is not None
            value.data.sub_(parameter.grad, alpha=rate)
            parameter.grad.zero_()

    return move


class Stage:
    """The passes of one stage over microbatches of the training pictures; the last one has the loss."""

    def __init__(self, module: nn.Module, stage: int, microbatches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.module, self.is_last, self.microbatches = module, stage == STAGES - 1, microbatches
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, microbatch: int, piece: int, x: Tensor | None, *, keeps: bool) -> Tensor | None:
        pictures, labels = self.microbatches[microbatch]
        inputs = (pictures if x is None else x.detach()).requires_grad_()
        out = self.module(inputs)
        if self.is_last:
            out = nn.functional.cross_entropy(out, labels)
        self.graphs[microbatch] = (inputs, out)
        return None if self.is_last else out.detach()

    def backward(self, microbatch: int, piece: int, gradient: Tensor | None, *, splits: bool) -> Tensor | None:
        inputs, out = self.graphs.pop(microbatch)
        out.backward(gradient)
        return inputs.grad

    def landing(self, microbatch: int, piece: int, of: str) -> Tensor:
        return torch.empty(ROWS, WIDTH)

    def recompute(self, microbatch: int, piece: int) -> None:
        raise NotImplementedError

    def weights(self, microbatch: int, piece: int) -> None:
        raise NotImplementedError


@functools.cache
def pictures() -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor], str]:
    """Microbatches of all epochs, the held-out pictures, and where they come from."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images).flatten(1), torch.tensor(digits.labels)
    is_held_out = torch.tensor(digits.is_held_out)
    own = (~is_held_out).nonzero().squeeze(1)
    draw = torch.Generator().manual_seed(1)
    order = torch.cat([own[torch.randperm(len(own), generator=draw)] for _ in range(EPOCHS)])
    batches = [(images[rows], labels[rows]) for rows in order.split(ROWS) if len(rows) == ROWS]
    return batches[: len(batches) // STAGES * STAGES], (images[is_held_out], labels[is_held_out]), digits.source


def accuracy(stages: Sequence[nn.Module]) -> float:
    """Of the held-out pictures."""
    x, labels = pictures()[1]
    with torch.no_grad():
        for stage in stages:
            x = stage(x)
    return float((x.argmax(1) == labels).float().mean())


def train(comm: Communicator, name: str) -> list[Tensor]:
    """This rank's stage by one schedule, through all epochs; its last weights."""
    microbatches = pictures()[0]
    program = exchange(build(name, STAGES, find(name).microbatches_from(STAGES, len(microbatches))))
    module = layers()[comm.rank]
    updates = sum(action.kind == "UPDATE" for action in program.actions[comm.rank])
    passes = {comm.rank: Stage(module, comm.rank, microbatches)}
    chunks = versioned(program, passes, {comm.rank: module}, lambda own: sgd(own, updates, len(microbatches)), ANNEAL)
    StepRunner(program, comm, chunks, version_services(chunks))()
    chunks[comm.rank].end()
    return [parameter.detach() for parameter in module.parameters()]


def train_in_turn() -> list[nn.Module]:
    """One process, one microbatch after the other."""
    stages = layers()
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    microbatches = pictures()[0]
    move = sgd(parameters, len(microbatches), len(microbatches))
    for number, (x, labels) in enumerate(microbatches):
        nn.functional.cross_entropy(nn.Sequential(*stages)(x), labels).backward()
        move([parameter.data for parameter in parameters], number, 1.0)
    return stages


def main(run: Callable[[Callable[[Communicator], list[Tensor]]], list[list[Tensor]]]) -> dict[str, float]:
    """The share of held-out pictures that each way reads. `run`: calls a function on every rank."""
    read = {"in turn": accuracy(train_in_turn())}
    for name in asynchronous():
        weights = run(lambda comm, name=name: train(comm, name))  # type: ignore[misc]
        stages = layers()
        for stage, values in zip(stages, weights, strict=True):
            for parameter, value in zip(stage.parameters(), values, strict=True):
                parameter.data.copy_(value)
        read[name] = accuracy(stages)
    return read


def on_ranks(comm: Communicator, function: Callable[[Communicator], list[Tensor]]) -> list[list[Tensor]]:
    """On processes: every rank gets the weights of all."""
    own = function(comm)
    shapes = [[parameter.shape for parameter in stage.parameters()] for stage in layers()]
    flat = torch.cat([value.reshape(-1) for value in own])
    sizes = [sum(shape.numel() for shape in stage) for stage in shapes]
    padded = comm.all_gather(torch.cat([flat, flat.new_zeros(max(sizes) - flat.numel())])).reshape(comm.size, -1)
    weights = []
    for row, size, stage in zip(padded, sizes, shapes, strict=True):
        pieces = row[:size].split([shape.numel() for shape in stage])
        weights.append([piece.view(shape) for piece, shape in zip(pieces, stage, strict=True)])
    return weights


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = connect()
    if ranks.size not in (1, STAGES):
        raise SystemExit(f"{ranks.size} ranks: expected one, or {STAGES}, one per stage")
    if ranks.size == 1:
        shares = main(lambda function: run_threads(STAGES, function))
    else:
        shares = main(lambda function: on_ranks(ranks, function))
    if ranks.rank == 0:
        print(f"digits {pictures()[2]}; {len(pictures()[0])} microbatches of {ROWS}, {STAGES} stages")
        for name, share in shares.items():
            print(f"{name:<14} {share:6.1%}  {'reaches' if share >= WANTED else 'below'} {WANTED:.0%}")
