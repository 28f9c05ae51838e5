"""Rows that a layer's router sends to experts, where ranks share these out: how many leave a rank, and how many come.

The one idea: a rank sends as many rows as its tokens have picks, whatever the router says, but the busiest rank gets
more than the mean, and all others wait for it. Equal tokens pick alike, at least until a router has learnt otherwise:
so the excess is that of as many random picks as there are different tokens, each weighing as often as it comes. Where a
loss evens routers out, every token is one of its own. What was observed goes before either (`Task.imbalance`), and
experts that drop what is beyond a capacity take no more than that, however much picks them.
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


def equal_tokens(vocabulary: int) -> float:
    """How likely two tokens of a text are the same, uncounted: by Zipf's law the n-th of them comes 1/n as often."""
    return math.pi**2 / 6 / (math.log(vocabulary) + 0.5772 + 0.5 / vocabulary) ** 2 if vocabulary > 1 else 1.0


def imbalance(model: ModelConfig, task: Task, equal: float | None = None) -> float:
    """Rows of the busiest of the ranks that share out experts, over the mean: as told, or the expected maximum of as
    many random loads, each the sum of what tokens pick among this rank's experts. `equal`: as `equal_tokens`. At most
    the capacity."""
    return min(_picked_imbalance(model, task, equal), model.expert_capacity or math.inf)


def _picked_imbalance(model: ModelConfig, task: Task, equal: float | None) -> float:
    if task.ep == 1 or not model.experts:
        return 1.0
    if task.imbalance:
        return task.imbalance
    apart = (model.experts - model.experts_per_token) / max(1, model.experts - 1)  # a token picks an expert once
    alike = 0.0 if model.balance_loss else equal_tokens(model.vocabulary) if equal is None else equal
    alike += model.experts_per_token / (task.ep * sent_rows(model, task))
    variance = (task.ep - 1) * apart / model.experts_per_token * alike
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
