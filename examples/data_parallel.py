"""The three examples of every course, and a recurrent network, in data parallel: each rank has its part of the rows.

    python examples/data_parallel.py
    tilemesh launch --ranks 2 -- examples/data_parallel.py

Pictures of digits, 8 × 8. A convolutional network and a recurrent one (which reads a picture line by line) are trained
by `tm.parallel.lay` with dp = ranks: the gradients of all ranks are averaged in every step. K-means and logistic
regression (is it an odd digit?) are one small sum per iteration (`methods/programs.py`). Each is done by one process
too, and the results are the same up to the order of sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tilemesh as tm
from tilemesh.comm import Communicator, connect, run_threads
from tilemesh.core.plan import ParallelPlan
from tilemesh.data.digits import load_digits
from tilemesh.methods.programs import k_means, logistic_regression

DIGITS = load_digits()
STEPS, BATCH = 120, 128


class Lines(nn.Module):
    """A recurrent network: one line of pixels per step, the last state says which digit it was."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.digit = nn.LSTM(8, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.lines(images)
        return self.digit(states[:, -1])  # type: ignore[no-any-return]


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def train(comm: Communicator, make: Callable[[], nn.Module]) -> tuple[list[Tensor], float]:
    """A network's weights after all steps, and the share of held-out pictures that it reads."""
    model = make()
    draw = torch.Generator().manual_seed(0)  # every rank begins with the same weights
    for parameter in model.parameters():
        bound = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.0
        nn.init.uniform_(parameter, -bound, bound, generator=draw)
    mesh = tm.Mesh(comm, dp=comm.size)
    laid = tm.parallel.lay(model.double(), mesh, ParallelPlan(dp=comm.size, precision="fp64"), {})
    optimizer = torch.optim.AdamW(laid.module.parameters(), lr=5e-3)
    images, labels = torch.tensor(DIGITS.images).double(), torch.tensor(DIGITS.labels)
    is_held_out = torch.tensor(DIGITS.is_held_out)
    own = (~is_held_out).nonzero().squeeze(1)
    for _ in range(STEPS):
        rows = own[torch.randperm(len(own), generator=draw)[:BATCH]]  # one batch for all ranks, then cut
        x, y = tm.parallel.split_data(images[rows], labels[rows], mesh.dp.size, mesh.dp.index)
        loss = nn.functional.cross_entropy(laid.module(x), y, reduction="sum")
        laid.gradients.backward(loss, len(y))
        laid.gradients.finish(max_norm=1.0)
        optimizer.step()
    with torch.no_grad():
        right = laid.module(images[is_held_out]).argmax(1) == labels[is_held_out]
    return [parameter.detach() for parameter in laid.module.parameters()], float(right.float().mean())


def programs(comm: Communicator) -> dict[str, tuple[Any, str]]:
    """By name: the numbers that must not depend on how many ranks there are, and what to say of them."""
    x = DIGITS.images.reshape(len(DIGITS.labels), -1).astype(np.float64)
    odd = (DIGITS.labels % 2).astype(np.float64)
    own_x, own_odd = (np.array_split(rows, comm.size)[comm.rank] for rows in (x, odd))
    clusters = k_means(comm, own_x, x[:10], iterations=12)
    weights, loss = logistic_regression(comm, own_x, own_odd, steps=60, rate=0.5)
    share = float((((x @ weights) > 0) == odd).mean())
    read = {name: train(comm, make) for name, make in (("CNN", convolutional), ("RNN", Lines))}
    return {
        **{name: (values, f"reads {accuracy:.1%} of held-out digits") for name, (values, accuracy) in read.items()},
        "K-means": (clusters.centres, f"mean squared distance {clusters.inertia / len(x):.3f} to 10 centres"),
        "logistic regression": (weights, f"loss {loss:.3f}; {share:.1%} of odd and even told apart"),
    }


def difference(ours: Any, theirs: Any) -> float:
    """The largest, of two arrays or two lists of tensors."""
    if isinstance(ours, list):
        return max(difference(a.numpy(), b.numpy()) for a, b in zip(ours, theirs, strict=True))
    return float(np.abs(ours - theirs).max())


def main(comm: Communicator) -> dict[str, tuple[float, str]]:
    """By program: how far from one process's result, and what it came to."""
    began = time.perf_counter()
    together = programs(comm)
    seconds = time.perf_counter() - began
    alone = run_threads(1, programs)[0]
    report = {name: (difference(values, alone[name][0]), words) for name, (values, words) in together.items()}
    if comm.rank == 0:
        print(f"{comm.size} ranks, {seconds:.1f} s; digits {DIGITS.source}")
        for name, (far, words) in report.items():
            print(f"{name:<20} {words}; {far:.0e} from one process")
    return report


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = connect()
    if ranks.size > 1:
        main(ranks)
    else:
        run_threads(2, main)
