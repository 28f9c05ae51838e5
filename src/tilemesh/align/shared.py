"""Answers to a prompt pass through a model with one copy of it, as the engine drew them: no token is padding.

The one idea: tokens of all prompts, then those of all answers, stand in one row, and only attention tells sequences
apart (`model/shared_prompts.py`). An answer's own part begins with the prompt's last token, which predicts another
token in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilemesh.align.formulas.rollout import Rollout
from tilemesh.model.loss import IGNORED


class PassRows(NamedTuple):
    """What a pass over some sequences of a rollout takes, trained tokens in the order of sequences; targets of others
    are IGNORED."""

    tokens_BT: Tensor
    targets_BT: Tensor
    places_S4: Tensor
    """Of prompts, then of answers, on the host: begin and length of what comes before it, of its own; empty where each
    sequence has a row of its own, padded to the longest."""


def padded(sequences: Sequence[Sequence[int] | np.ndarray], device: torch.device, padding: int = 0) -> Tensor:
    """A row for each."""
    tokens = np.full((len(sequences), max(map(len, sequences))), padding, np.int64)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(tokens).to(device)


def padded_rows(rollout: Rollout, rows: range, device: torch.device) -> PassRows:
    """One sequence per row."""
    tokens_BT = padded([rollout.tokens[rollout.row(row)][:-1] for row in rows], device)
    targets_BT = padded([_targets(rollout, row) for row in rows], device, IGNORED)
    return PassRows(tokens_BT, targets_BT, torch.zeros(0, 4, dtype=torch.int64))


def shared_rows(rollout: Rollout, rows: range, device: torch.device) -> PassRows:
    """All in one row, with one copy of each group's prompt; on a GPU where that saves half of the tokens, since our
    attention kernels take a sequence per row."""
    own = [rollout.tokens[rollout.row(row)] for row in rows]
    shared = [int(rollout.trainable[rollout.row(row)].argmax()) - 1 for row in rows]
    prompts: dict[bytes, tuple[int, int]] = {}
    parts, targets, places, begin = [], [], [], 0
    for sequence, count in zip(own, shared, strict=True):
        if count > 0 and (key := sequence[:count].tobytes()) not in prompts:
            prompts[key] = (begin, count)
            parts.append(sequence[:count])
            targets.append(np.full(count, IGNORED, np.int64))
            places.append((0, 0, begin, count))
            begin += count
    for row, sequence, count in zip(rows, own, shared, strict=True):
        before, count = prompts.get(sequence[: max(0, count)].tobytes(), (0, 0))
        parts.append(sequence[count:-1])
        targets.append(_targets(rollout, row)[count:])
        places.append((before, count, begin, len(parts[-1])))
        begin += len(parts[-1])
    if device.type == "cuda" and 2 * begin > len(rows) * (max(map(len, own)) - 1):
        return padded_rows(rollout, rows, device)
    tokens_1T, targets_1T = (torch.from_numpy(np.concatenate(each))[None].to(device) for each in (parts, targets))
    return PassRows(tokens_1T, targets_1T, torch.tensor(places))


def _targets(rollout: Rollout, row: int) -> np.ndarray:
    drawn = rollout.trainable[rollout.row(row)][1:]
    return np.where(drawn, rollout.tokens[rollout.row(row)][1:], IGNORED)
