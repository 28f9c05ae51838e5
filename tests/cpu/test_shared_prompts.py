"""One copy of a prompt for all its answers gives what a row for each gives, values and gradients, in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from align_start import SMALL

from tilemesh.align.formulas.rollout import Rollout, Segment, pack
from tilemesh.align.shared import padded_rows, shared_rows
from tilemesh.model.loss import IGNORED
from tilemesh.model.shared_prompts import SharedPrompts
from tilemesh.model.transformer import Transformer

CPU = torch.device("cpu")
MODELS = {
    "grouped heads": SMALL,
    "learnt positions": dataclasses.replace(SMALL, positions="learned", kv_heads=4),
    "windows": dataclasses.replace(SMALL, window=5),
    "soft caps": dataclasses.replace(SMALL, window=3, score_cap=0.5, logit_cap=2.0),
    "sinks": dataclasses.replace(SMALL, window=3, score_sink=True),
}


def answers(prompts: list[int], each: int, seed: int) -> Rollout:
    """To prompts of these lengths; of 1 to 9 tokens, one of them a conversation of two turns."""
    chance = np.random.default_rng(seed)
    sequences, group = [], []
    for number, length in enumerate(prompts):
        prompt = Segment(chance.integers(0, 256, length).tolist())
        for answer in range(each):
            drawn = [chance.integers(0, 256, chance.integers(1, 10)).tolist() for _ in range(2)]
            turns = [Segment(tokens, [-1.0] * len(tokens), [1] * len(tokens)) for tokens in drawn]
            sequences.append([prompt, turns[0], *([Segment([7, 8]), turns[1]] if answer == 1 else [])])
            group.append(number)
    return pack(sequences, group, ["stop"] * len(group))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prompts", [[6, 3, 11], [1, 1], [1, 4], [5]])
def test_it_is_what_a_row_for_each_answer_gives(name: str, prompts: list[int]) -> None:
    rollout = answers(prompts, 4, seed=len(prompts))
    model = Transformer(MODELS[name], seed=1, dtype=torch.float64)
    rows = range(1, len(rollout))
    results = []
    for make in (padded_rows, shared_rows):
        tokens_BT, targets_BT, places_S4 = make(rollout, rows, CPU)
        model.zero_grad()
        cache = SharedPrompts(places_S4, CPU) if len(places_S4) else None
        is_trained = targets_BT != IGNORED
        logprob_N = model(tokens_BT, cache=cache).log_softmax(-1)[is_trained].gather(1, targets_BT[is_trained][:, None])
        (logprob_N[:, 0] * torch.arange(1.0, 1 + len(logprob_N))).sum().backward()
        results.append((logprob_N[:, 0].detach(), [parameter.grad for parameter in model.parameters()]))
    (padded_N, gradients), (shared_N, others) = results
    assert len(shared_N) == int(rollout.trained[1:].sum())
    torch.testing.assert_close(shared_N, padded_N, rtol=0, atol=1e-12)
    for ours, theirs in zip(others, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    count = sum(length - 1 for length in prompts) + sum(
        len(rollout.tokens[rollout.row(row)]) - prompts[int(rollout.group[row])] for row in rows
    )
    assert tokens_BT.shape == (1, count)  # each prompt once, and no padding
