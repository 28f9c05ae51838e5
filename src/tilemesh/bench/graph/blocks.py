"""Twelve small models in plain torch, eager, by Inductor and by our backend: forward and step, one and two threads.

`tilemesh bench graph --study blocks`: a row per model, pass and number of threads. What our backend promises on a CPU
is that none of them is slower than eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from tilemesh.bench.graph.models import GptBlock, LlamaBlock, ModelSize
from tilemesh.bench.graph.study import NOT_PREDICTED, study_row
from tilemesh.graph.backend import Backend
from tilemesh.measure.calibrate_operators import torch_threads
from tilemesh.measure.row import Row

SIZE = ModelSize(width=256, layers=1, heads=4, vocabulary=1024, batch=4, tokens=128, side=32)


class PlainAttention(nn.Module):
    """PlainAttention over its own input or another's; `buckets` adds T5's learned bias by distance."""

    def __init__(self, width: int, heads: int, buckets: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=not buckets) for _ in range(4))
        self.bias = nn.Embedding(buckets, heads) if buckets else None

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        source = x if other is None else other
        q, k, v = (
            make(value).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for make, value in ((self.q, x), (self.k, source), (self.v, source))
        )
        mask = None
        if self.bias is not None:
            place = torch.arange(x.shape[1], device=x.device)
            apart = (place[None] - place[:, None]).clamp(-8, 7) + 8
            mask = self.bias(apart).permute(2, 0, 1)[None]
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class EncoderBlock(nn.Module):
    """A block of ViT: layer norms, attention, GELU."""

    def __init__(self, width: int, heads: int, crossed: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = PlainAttention(width, heads)
        self.cross = nn.ModuleList([nn.LayerNorm(width), PlainAttention(width, heads)]) if crossed else None
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        if self.cross is not None:
            norm, attend = self.cross
            x = x + attend(norm(x), other)
        return x + self.mlp(self.last(x))  # type: ignore[no-any-return]


class WhisperBlocks(nn.Module):
    """Two convolutions over a spectrum, a block of an encoder, and one of a decoder that reads it."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        width = size.width
        self.ears = nn.Sequential(
            nn.Conv1d(80, width, 3, padding=1), nn.GELU(), nn.Conv1d(width, width, 3, stride=2, padding=1), nn.GELU()
        )
        self.encoder = EncoderBlock(width, size.heads)
        self.decoder = EncoderBlock(width, size.heads, crossed=True)

    def forward(self, sound: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.decoder(text, self.encoder(self.ears(sound).transpose(1, 2)))  # type: ignore[no-any-return]


class T5Block(nn.Module):
    """Norms without a mean, attention with a bias by distance, a ReLU without biases."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        width = size.width
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = PlainAttention(width, size.heads, buckets=16)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(self.up(self.second(x)).relu())  # type: ignore[no-any-return]


class MixtralBlock(nn.Module):
    """PlainAttention, and four gated experts of which each token goes to two."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        width = size.width
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.router = PlainAttention(width, size.heads), nn.Linear(width, 4, bias=False)
        self.gates, self.ups = (nn.Parameter(torch.randn(4, width, 2 * width) / 16) for _ in range(2))
        self.downs = nn.Parameter(torch.randn(4, 2 * width, width) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        rows = self.second(x).flatten(0, 1)
        chances, chosen = self.router(rows).softmax(-1).topk(2)
        # Each expert takes as many rows as all have on average: a fixed number, as a compiled expert layer has.
        order = chosen.flatten().argsort(stable=True).view(4, -1)
        tokens = order // 2
        picked = rows[tokens]
        mixed = (silu(picked @ self.gates) * (picked @ self.ups)) @ self.downs
        weighed = mixed * chances.flatten()[order][..., None]
        sums = torch.zeros_like(rows).index_add(0, tokens.flatten(), weighed.flatten(0, 1))
        return x + sums.view_as(x)


class ResidualBlock(nn.Module):
    """A basic block of ResNet; where its channels change, its input goes through a convolution too."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.skip = nn.Sequential()
        if before != after:
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) + self.skip(x)).relu()  # type: ignore[no-any-return]


def _twice(before: int, after: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
    return nn.Sequential(*layers)


class SmallUNet(nn.Module):
    """Two levels down, two up, with what was before each."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.bottom = _twice(3, 16), _twice(16, 32), _twice(32, 64)
        self.first, self.last, self.head = _twice(96, 32), _twice(48, 16), nn.Conv2d(16, 3, 1)
        self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.down(x)
        middle = self.middle(self.pool(high))
        low = self.bottom(self.pool(middle))
        middle = self.first(torch.cat([self.grow(low), middle], 1))
        return self.head(self.last(torch.cat([self.grow(middle), high], 1)))  # type: ignore[no-any-return]


class Recommender(nn.Module):
    """Tables of categories and a few numbers, every pair of them multiplied, and an MLP over the products."""

    def __init__(self, tables: int = 8, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, width) for _ in range(tables))
        self.numbers = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)
        )
        self.register_buffer("pairs", torch.stack(tuple(torch.triu_indices(tables + 1, tables + 1, 1))))
        self.pairs: torch.Tensor

    def forward(self, numbers: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        dense = self.numbers(numbers)
        rows = torch.stack([dense, *(table(words[:, place]) for place, table in enumerate(self.tables))], 1)
        products = (rows @ rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], 1)).sigmoid()  # type: ignore[no-any-return]


class LstmBlock(nn.Module):
    """Words, an LSTM and a product over what it leaves. An input without a gradient torch itself cannot compile."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, width)
        self.cell, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(self.table(x))[0])  # type: ignore[no-any-return]


def _mlp(width: int) -> nn.Module:
    layers = [(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width))] * 2
    return nn.Sequential(*(layer for group in layers for layer in group))


def _pictures() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


def _rows(size: ModelSize = SIZE) -> torch.Tensor:
    return torch.randn(size.batch, size.tokens, size.width)


BLOCKS: Mapping[str, Callable[[], Made]] = {
    "gpt2 block": lambda: (GptBlock(SIZE), (_rows(),)),
    "mlp": lambda: (_mlp(SIZE.width), (_rows().flatten(0, 1),)),
    "cnn": lambda: (_pictures(), (torch.randn(8, 3, 64, 64),)),
    "llama block": lambda: (LlamaBlock(SIZE), (_rows(),)),
    "vit block": lambda: (EncoderBlock(SIZE.width, SIZE.heads), (_rows(),)),
    "lstm": lambda: (LstmBlock(128), (torch.randint(1000, (8, 16)),)),
    "u-net": lambda: (SmallUNet(), (torch.randn(2, 3, 64, 64),)),
    "resnet block": lambda: (
        nn.Sequential(ResidualBlock(64, 64), ResidualBlock(64, 128, 2)),
        (torch.randn(4, 64, 28, 28),),
    ),
    "t5 block": lambda: (T5Block(SIZE), (_rows(),)),
    "whisper": lambda: (WhisperBlocks(SIZE), (torch.randn(2, 80, 400), torch.randn(2, 64, SIZE.width))),
    "recommender": lambda: (Recommender(), (torch.randn(512, 13), torch.randint(1000, (512, 8)))),
    "mixtral block": lambda: (MixtralBlock(SIZE), (_rows(),)),
}


@dataclass(frozen=True)
class BlockPass:
    """A model's forward pass in eval mode, or a training step: what one call of a compiled or eager form does."""

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    step: bool

    def run(self, call: Callable[..., Any]) -> torch.Tensor:
        if not self.step:
            with torch.no_grad():
                return call(*self.inputs)  # type: ignore[no-any-return]
        self.module.zero_grad(set_to_none=True)
        loss = call(*self.inputs).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]


def make_pass(name: str, step: bool) -> BlockPass:
    torch.manual_seed(0)
    module, inputs = BLOCKS[name]()
    return BlockPass(module.train(step), inputs, step)


def block_rows(seconds: float, place: torch.device) -> list[Row]:
    """Each model forward and as a step, with one and with two threads."""
    rows = []
    for name in BLOCKS:
        for step in (False, True):
            for threads in (1, 2):
                with torch_threads(threads):
                    rows.append(block_row(name, step, threads, seconds, place))
    return rows


def block_row(name: str, step: bool, threads: int, seconds: float, place: torch.device) -> Row:
    """A model's pass by us, eager and by Inductor, in turns."""
    torch._dynamo.reset()
    torch._dynamo.config.allow_rnn = True
    each = make_pass(name, step)
    each = BlockPass(each.module.to(place), tuple(value.to(place) for value in each.inputs), step)
    forms = {
        "ours": torch.compile(each.module, backend=Backend()),
        "eager": each.module,
        "compile": torch.compile(each.module, backend="inductor"),
    }
    calls = {key: (lambda index, form=form: each.run(form)) for key, form in forms.items()}
    case = {"model": name, "pass": "step" if step else "forward", "threads": threads}
    return study_row("graph block", case, NOT_PREDICTED, calls, seconds, place)
