"""What chapter 17 runs: a model of 84,000 weights that sorts six digits, made smaller in every way tilemesh knows."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.compress.distill import distill
from tilemesh.compress.prepare import prepare
from tilemesh.compress.recipe import read_recipe
from tilemesh.guide.clock import repeated
from tilemesh.measure.calibrate_operators import torch_threads
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer

SHAPE = ModelConfig(
    vocabulary=16, context=16, layers=2, width=64, heads=4, mlp_width=128, activation="swiglu", norm="rmsnorm",
    positions="rotary", tied=False, biases=False,
)  # fmt: skip
DIGITS, MARK = 6, 10


class Quality(NamedTuple):
    """Of 512 sequences that were not trained on: the share that is sorted without a fault, and the loss."""

    right: float
    loss: float


def sequences(count: int, seed: int) -> Tensor:
    """Six digits, a mark, and the same six in order."""
    digits = torch.randint(0, 10, (count, DIGITS), generator=torch.Generator().manual_seed(seed))
    return torch.cat([digits, torch.full((count, 1), MARK), digits.sort(1).values], 1)


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])[:, DIGITS:]
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, DIGITS + 1 :].flatten())


@torch_threads(1)  # the model is so small that threads would mostly wait for one another
def train(model: Transformer, steps: int, lr: float = 3e-3, seed: int = 0, teacher: Transformer | None = None) -> None:
    """AdamW with a falling rate; with a teacher half of the loss is to agree with its probabilities."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    taught = distill(model, teacher) if teacher is not None else None
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        tokens = sequences(32, 1000 * seed + step + 1)
        optimizer.zero_grad()
        if taught is None:
            loss = loss_of(model, tokens)
        else:
            total, count = taught(tokens[:, :-1], tokens[:, 1:])
            loss = total / count
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def quality(model: Transformer) -> Quality:
    tokens = sequences(512, 0)
    with torch.no_grad():
        predicted = model(tokens[:, :-1])[:, DIGITS:].argmax(-1)
        right = (predicted == tokens[:, DIGITS + 1 :]).all(1).double().mean()
        return Quality(float(right), float(loss_of(model, tokens)))


def trained_with_rounding(model: Transformer, recipe: str, steps: int = 60) -> Transformer:
    """Quantisation-aware training: weights are rounded in every pass, and the exact ones underneath learn."""
    rounded = copy.deepcopy(model).train()
    prepare(rounded, read_recipe(recipe))
    train(rounded, steps, 1e-3, seed=1)
    return rounded.eval()


def rounding_error(bits: int, group: int) -> float:
    """The error of rounding normal numbers to so many bits with a scale per group, as a share of their size."""
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64).view(-1, group)
    most = 2 ** (bits - 1) - 1
    scale = values.abs().amax(1, keepdim=True) / most
    rounded = (values / scale).round().clamp(-most - 1, most) * scale
    return float((rounded - values).square().mean().sqrt())


def product_seconds(rows: int, zeros: float = 0.0) -> float:
    """A product with a matrix of so many rows and 1,024 columns, a share of whose weights is zero."""
    draw = torch.Generator().manual_seed(0)
    matrix, x = torch.randn(rows, 1024, generator=draw), torch.randn(64, 1024, generator=draw)
    matrix *= torch.rand(matrix.shape, generator=draw) >= zeros
    return statistics.median(repeated(lambda: functional.linear(x, matrix), 10))


def held_bytes(model: Transformer) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def weights_of(model: Transformer) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
