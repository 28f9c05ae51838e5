"""A small model that knows a task a little: where runs that learn from feedback begin in tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from tilemesh.align.tasks import TASKS
from tilemesh.data.cases import Case
from tilemesh.model import huggingface
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer

SMALL = ModelConfig(
    vocabulary=256, context=32, layers=2, width=48, heads=4, kv_heads=2, mlp_width=96, activation="swiglu",
    norm="rmsnorm", positions="rotary", tied=False, biases=False,
)  # fmt: skip


def write_start(
    folder: Path,
    task: str,
    steps: int,
    seed: int = 0,
    config: ModelConfig = SMALL,
    example: Callable[[random.Random, Case], str] | None = None,
) -> Path:
    """A Hugging Face folder with a model that was shown so many batches of answers: right ones, or `example`'s."""
    chance = random.Random(seed)
    model = Transformer(config, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    number = 0
    for _ in range(steps):
        lines = []
        for _ in range(64):
            case = TASKS[task].case(1000 + seed, number)
            answer = TASKS[task].example(case) if example is None else example(chance, case)
            lines.append((case["prompt"].encode(), f"{answer}\n".encode()))
            number += 1
        longest = max(len(prompt + answer) for prompt, answer in lines)
        tokens = torch.zeros(len(lines), longest, dtype=torch.int64)
        targets = torch.full((len(lines), longest), -100)
        for row, (prompt, answer) in enumerate(lines):
            text = torch.tensor(list(prompt + answer))
            tokens[row, : len(text)] = text
            targets[row, len(prompt) - 1 : len(text) - 1] = text[len(prompt) :]
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
        optimizer.step()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    folder.mkdir(parents=True)
    huggingface.save_parameters(config, weights, folder, {"eos_token_id": 0})
    return folder
