"""Pairs of answers from a file, of which one was preferred: for DPO and its kin, and for reward models.

A line of the JSONL file has `prompt` (or `messages`), `chosen` and `rejected`. Rows of a batch are chosen and rejected
in turn. Of whole sequences, since a reward model looks at the last token: inputs are not one shorter than targets.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tilemesh.align.config import AlignConfig
from tilemesh.align.head import Reference
from tilemesh.align.objective import FeedbackObjective
from tilemesh.align.prompts import Pair, ServedText, read_pairs, without_last
from tilemesh.align.shared import padded
from tilemesh.data.order import Order, rows_of
from tilemesh.model.loss import IGNORED
from tilemesh.parallel.laid import Laid
from tilemesh.train.source import Microbatch, Source


class PairSource(Source):
    """Pairs in an order that the seed says."""

    names: Sequence[str] = ("tokens", "targets", "floats")

    def __init__(
        self,
        config: AlignConfig,
        laid: Laid,
        reference: Reference | None,
        text: ServedText,
        objective: FeedbackObjective,
    ) -> None:
        self.config, self.laid, self.reference, self.objective = config, laid, reference, objective
        self.mesh, self.device = laid.mesh, next(laid.module.parameters()).device
        pairs = read_pairs(config.align.preferences, text, config.training.context)
        held_out = min(config.align.held_out, len(pairs) // 4)
        self.trained, self.kept = without_last(pairs, held_out, lambda pair: tuple(pair.chosen[: pair.prompt]))
        self._order = Order(len(self.trained), config.train.seed)
        self._steps, self._position = 0, 0

    def fetch(self, number: int) -> list[Microbatch]:
        align, plan, pairs = self.config.align, self.config.plan, self._pairs_of(number)
        count = sum(map(_trained, pairs))
        batches = []
        for micro in range(plan.accumulation):
            rows = rows_of(align.rows, plan.dp, self.mesh.dp.index, plan.accumulation, micro)
            own = pairs[rows.start // 2 : rows.stop // 2]
            batches.append(Microbatch(self._tensors(own, count / align.prompts), rows.start))
        return batches

    def _pairs_of(self, number: int) -> list[Pair]:
        """Of a step."""
        prompts = self.config.align.prompts
        first = self._position // 2 + (number - 1 - self._steps) * prompts
        return [self.trained[self._order.at(first + place)] for place in range(prompts)]

    def held_out(self) -> Iterator[Microbatch]:
        mine = range(self.mesh.dp.index, len(self.kept), self.mesh.dp.size)
        size = max(1, self.config.plan.microbatch // 2)
        weight = sum(map(_trained, self.kept)) / max(1, len(self.kept))  # one of all: the mean is over pairs
        for begin in range(0, len(mine), size):
            pairs = [self.kept[place] for place in mine[begin : begin + size]]
            yield Microbatch(self._tensors(pairs, weight), 0)

    def _tensors(self, pairs: Sequence[Pair], weight: float) -> tuple[Tensor, ...]:
        """Tokens, targets, and of each trained token the reference's log-probability and what a pair counts for."""
        sequences = [sequence for pair in pairs for sequence in pair[:2]]
        prompts = (pair.prompt for pair in pairs for _ in range(2))
        targets = [[IGNORED] * (prompt - 1) + sequence[prompt:] + [IGNORED]
                   for prompt, sequence in zip(prompts, sequences, strict=True)]  # fmt: skip
        tokens_BT, targets_BT = padded(sequences, self.device), padded(targets, self.device, IGNORED)
        reference_N = torch.zeros(sum(map(_trained, pairs)), dtype=torch.float64, device=self.device)
        if self.reference is not None:
            with torch.no_grad():
                reference_N = self.reference(tokens_BT, targets_BT, 1.0).logprob_N.double()
        return tokens_BT, targets_BT, torch.stack((reference_N, torch.full_like(reference_N, weight)))

    def tokens(self, number: int) -> int:
        mean = sum(len(pair.chosen) + len(pair.rejected) for pair in self.trained) / len(self.trained)
        return round(mean * self.config.align.prompts)

    @functools.cached_property
    def _digest(self) -> str:
        return hashlib.sha256(repr((self.trained, self.kept)).encode()).hexdigest()[:16]

    def fingerprint(self) -> str:
        return self._digest

    def held_out_fingerprint(self) -> str:
        return f"{self._digest} {len(self.kept)}"

    def go_on(self, steps: int, position: int) -> None:
        self._steps, self._position = steps, position

    def figures(self, number: int, loss: float) -> dict[str, Any]:
        return self.objective.step_figures(loss, sum(map(_trained, self._pairs_of(number))))


def _trained(pair: Pair) -> int:
    return len(pair.chosen) + len(pair.rejected) - 2 * pair.prompt
