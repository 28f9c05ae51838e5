"""Rows that a layer's router sends to experts, where ranks share these out: how many leave a rank, and how many come.

The one idea: a rank sends as many rows as its tokens have picks, whatever the router says, but the busiest rank gets
more than the mean, and all others wait for it. Of tokens that pick at random the excess follows from their number; a
router that prefers some experts has more, which nobody knows before it is trained (`Task.imbalance`).
"""

from __future__ import annotations

import math

from tilemesh.model.config import ModelConfig
from tilemesh.model.work.task import Task
from tilemesh.model.work.weights import touched_experts


def sent_rows(model: ModelConfig, task: Task) -> int:
    """That leave a rank: its tokens' picks. Ranks of tp that do not share an expert each send a share."""
    return -(-task.tokens * model.experts_per_token * task.ranks_per_expert // task.tp)


def busiest_rows(model: ModelConfig, task: Task) -> int:
    """That come to the busiest rank."""
    return math.ceil(sent_rows(model, task) * imbalance(model, task))


def imbalance(model: ModelConfig, task: Task) -> float:
    """Rows of the busiest of the ranks that share out experts, over the mean: as told, or the expected maximum of as
    many random loads, each the sum of what tokens pick among this rank's experts."""
    if task.ep == 1 or not model.experts:
        return 1.0
    if task.imbalance:
        return task.imbalance
    apart = (model.experts - model.experts_per_token) / max(1, model.experts - 1)  # a token picks an expert once
    variance = (1 - 1 / task.ep) * apart / sent_rows(model, task)
    return min(float(task.ep), 1 + math.sqrt(2 * math.log(task.ep) * variance))


def local_experts(model: ModelConfig, task: Task) -> int:
    """Of a rank's experts, those that some row passes."""
    tokens = task.ep * sent_rows(model, task) // model.experts_per_token
    return max(1, round(touched_experts(model, tokens) / task.ep))


def hidden_elements(model: ModelConfig, task: Task) -> int:
    """Of an MLP's hidden layer, or of its experts' and of a shared one's together, on all ranks of tp."""
    if not model.experts:
        return task.tokens * model.mlp_width
    routed = busiest_rows(model, task) * model.mlp_width * task.tp // task.ranks_per_expert
    return routed + task.tokens * model.shared_width
