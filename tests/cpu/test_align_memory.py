"""Bytes that the planner counts of a run that learns from feedback, beside storages that are alive: of a step of its
engine, of pages, and of what a pass over answers that share prompts keeps."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from align_start import SMALL
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilemesh.align.formulas.rollout import Segment, pack
from tilemesh.align.shared import shared_rows
from tilemesh.model.kernels import PLAIN
from tilemesh.model.shared_prompts import SharedPrompts
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.answers import answer_kept_bytes, answer_operations
from tilemesh.model.work.decoding import serving_task, step_bytes
from tilemesh.model.work.kept import kept_tensors
from tilemesh.model.work.passes import MemoryPass
from tilemesh.model.work.task import Task
from tilemesh.serve.request import ServeRequest
from tilemesh.serve.runner import Runner
from tilemesh.serve.scheduler import Scheduler, ServeLimits
from tilemesh.train.memory import SavedBytes

MODEL = dataclasses.replace(SMALL, layers=3, width=64, mlp_width=256)


class LiveBytes(TorchDispatchMode):
    """Of storages made inside: `peak` at most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (_storages(each) for each in ((args, kwargs), result))
        for key, storage in made.items():
            if key not in given.keys() | self._live.keys():
                self._live[key] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, key)
        self.peak = max(self.peak, sum(self._live.values()))
        return result


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    each = (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return {storage._cdata: storage for storage in each}


@pytest.mark.parametrize("prompt", [7, 40])
def test_a_step_of_the_engine_takes_what_is_counted(prompt: int) -> None:
    """All prompts at once, the second time: tables and pages are there."""
    config = dataclasses.replace(MODEL, context=64)
    model = Transformer(config, seed=0, kernels=PLAIN).requires_grad_(False)
    limits = ServeLimits(pages=512, context=64, step_tokens=4096, chunk_tokens=4096, running=32, share_prefixes=False)
    runner, peaks = Runner(model, limits, packed=False), []
    for turn in range(2):
        scheduler = Scheduler(limits)
        for number in range(32):
            scheduler.add(ServeRequest(f"{turn} {number}", [number] * prompt, 4))
        with LiveBytes() as live:
            runner.run(scheduler.plan())
        peaks.append(live.peak)
    counted = step_bytes(config, serving_task(32 * prompt, "fp32", code="eager", gpu=False), 32)
    assert counted == pytest.approx(peaks[1], rel=0.05)


PROMPTS, ANSWERS, PROMPT, LENGTH = 3, 8, 7, 9


def shared_pass() -> tuple[Tensor, Tensor]:
    """Tokens and places of answers that share prompts."""
    drawn = np.random.default_rng(0).integers(0, 256, (PROMPTS * ANSWERS, LENGTH))
    sequences = [
        [Segment([row // ANSWERS] * PROMPT), Segment(answer.tolist(), [-1.0] * LENGTH, [1] * LENGTH)]
        for row, answer in enumerate(drawn)
    ]
    rollout = pack(sequences, [row // ANSWERS for row in range(len(sequences))], ["length"] * len(sequences))
    tokens_BT, _, places_S4 = shared_rows(rollout, range(len(rollout)), torch.device("cpu"))
    return tokens_BT, places_S4


def tasks(tokens_BT: Tensor) -> tuple[Task, Task]:
    """As text of as many tokens, and as answers."""
    text = Task(1, tokens_BT.shape[1], tokens_BT.shape[1], precision="fp32", code="eager", gpu=False)
    return text, dataclasses.replace(text, sequences=PROMPTS * ANSWERS, queries=LENGTH)


class Gathered(TorchDispatchMode):
    """Inside, the bytes that come out of gathering rows."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index_select.default and result.is_floating_point():
            self.nbytes += result.nbytes
        return result


def test_rows_gathered_for_attention_are_what_is_counted() -> None:
    tokens_BT, places_S4 = shared_pass()
    model = Transformer(MODEL, seed=0, kernels=PLAIN)
    with torch.no_grad(), Gathered() as gathered:
        model(tokens_BT, cache=SharedPrompts(places_S4, torch.device("cpu")))
    forward, _ = answer_operations(MODEL, tasks(tokens_BT)[1], ANSWERS, PROMPT, LENGTH)
    counted = [op.nbytes for op in forward if isinstance(op, MemoryPass) and op.name == "rows to attention and back"]
    assert sum(counted) == 2 * gathered.nbytes  # read and written


def test_what_answers_that_share_prompts_keep_is_what_is_counted() -> None:
    """Of a layer: what three keep beyond what one does."""
    tokens_BT, places_S4 = shared_pass()
    text, task = tasks(tokens_BT)
    saved = []
    for layers in (1, 3):
        model = Transformer(dataclasses.replace(MODEL, layers=layers), seed=0, kernels=PLAIN)
        with SavedBytes(model.parameters()) as each:
            model(tokens_BT, cache=SharedPrompts(places_S4, torch.device("cpu")))
        saved.append(each.peak)
    more = answer_kept_bytes(MODEL, task, ANSWERS, PROMPT, LENGTH) // MODEL.layers
    counted = sum(kept.nbytes for kept in kept_tensors(MODEL, text))
    assert counted + more == pytest.approx((saved[1] - saved[0]) / 2, rel=0.01)
