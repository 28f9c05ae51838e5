"""What answers are paid: a task's score, a user's functions in processes of their own, reward models; with weights.

An answer that cannot be scored is never paid: it gets the least that any answer of the batch got, and at most 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilemesh.align.checks import check_order
from tilemesh.align.config import FeedbackConfig
from tilemesh.align.formulas.rollout import Floats
from tilemesh.align.head import add_value_head, scores
from tilemesh.align.inputs import read_reward, read_scorers
from tilemesh.align.tasks import TASKS, Score
from tilemesh.align.verifier import MAIN, Scored, Verifier, read_parts
from tilemesh.data.cases import Case
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.apply import lay_beside
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.shard import take
from tilemesh.runs.reader import open_checkpoint

Item = tuple[str, str, Case]
"""Prompt, answer, case."""


class Paid(NamedTuple):
    """Of each answer: what it is paid, by part, before weights; and why one could not be scored."""

    parts: dict[str, Floats]
    failures: list[str]


def score_builtin(score: Score, items: Sequence[Item]) -> list[Scored]:
    return [read_parts(score(*item))._replace(place=place) for place, item in enumerate(items)]


class Rewards:
    """All that pays, by name and weight."""

    def __init__(self, align: FeedbackConfig, laid: Laid | None) -> None:
        """`laid`: what reward models are laid beside; None on a rank that only draws answers, which has none."""
        scorers = read_scorers(align)
        self.weights = {name: scorer.weight for name, scorer in scorers.items()}
        self._verifiers, self.models = dict[str, Any](), dict[str, Laid]()
        for name, (spec, _, is_model) in scorers.items():
            if spec in TASKS:
                score = TASKS[spec].score
                self._verifiers[name] = lambda items, score=score: score_builtin(score, items)
            elif not is_model:
                self._verifiers[name] = Verifier(spec, align.deadline_s)
            elif laid is not None:
                self.models[name] = read_reward_model(Path(spec), laid)

    def verify(self, items: Sequence[Item]) -> Paid:
        """What verifiers pay. Parts beside `score` are named after it and count for nothing."""
        parts: dict[str, Floats] = {}
        failures: list[str] = []
        for name, verifier in self._verifiers.items():
            scored = verifier(items)
            check_order([each.place for each in scored], name)
            failures += [f"{name}: {each.failure}" for each in scored if each.failure]
            for part in dict.fromkeys(part for each in scored for part in each.parts):
                key = name if part == MAIN else f"{name}.{part}"
                parts[key] = np.array([each.parts.get(part, np.nan) for each in scored])
            parts.setdefault(name, np.full(len(items), np.nan))
        return Paid(parts, failures)

    def total(self, parts: Mapping[str, Floats]) -> Floats:
        """What each answer is paid: the weighted sum, and for what could not be scored the least."""
        total = np.zeros(len(next(iter(parts.values()))))
        for name, weight in self.weights.items():
            if weight:  # what counts for nothing may be missing
                total = total + weight * parts[name]
        bad = ~np.isfinite(total)
        least = min(0.0, float(total[~bad].min(initial=0.0)))
        return np.where(bad, least, total)

    @torch.no_grad()
    def judge(self, tokens_BT: Tensor, last_B: Tensor) -> dict[str, Floats]:
        """What reward models give rows of whole sequences (a collective call along tp)."""
        return {name: scores(model, tokens_BT, last_B).double().cpu().numpy() for name, model in self.models.items()}

    def close(self) -> None:
        for verifier in self._verifiers.values():
            if isinstance(verifier, Verifier):
                verifier.close()


@torch.no_grad()
def read_reward_model(folder: Path, laid: Laid) -> Laid:
    """The reward model of a run beside the model that is trained."""
    model = Transformer(read_reward(folder, laid.model.config), device="meta", dtype=laid.stream_dtype)
    add_value_head(model)
    beside, reader = lay_beside(model, laid), open_checkpoint(folder, None, lambda text: None)
    for name, (parameter, shard) in beside.weights().items():
        parameter.copy_(take(shard, reader.weight(name)))
    return beside
