"""What a forward program keeps for the backward one: torch's least cut, and a cut within a budget of bytes.

torch offers cuts of a joint graph that keep any share of what a backward program reads, and compute the rest again, of
what is dropped the cheapest by operations. `within` takes the first that fits, those that compute least again before
others; a step's fullest moment is counted by lifetimes in the two programs as they will run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from tilemesh.core.errors import UsageError
from tilemesh.core.units import format_bytes
from tilemesh.graph.ir import Graph
from tilemesh.graph.lower import maker
from tilemesh.graph.memory import lifetimes, live_bytes

SHARES = (1.0, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05, 1e-6)
"""Of what the least cut keeps. 1.0 computes only cheap values again. At 0 torch would keep inputs alone, whatever must
be kept."""

Programs = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True)
class StepCut:
    """A cut that was taken: the predicted bytes of a step's values, and the share that is kept (None: everything)."""

    budget: int
    predicted: int | None
    """None: sizes that change from call to call; as little as possible is kept."""
    share: float | None

    def __str__(self) -> str:
        kept = "nothing is computed again" if self.share is None else f"{self.share:.0%} of the least cut is kept"
        predicted = "sizes change, not" if self.predicted is None else format_bytes(self.predicted)
        return f"values of a step: {predicted} predicted, {format_bytes(self.budget)} allowed; {kept}"


def least_cut(joint: fx.GraphModule, inputs: Any, **settings: Any) -> Programs:
    """Forward and backward program by torch's least cut, which keeps what is cheap to keep and computes the rest again.

    Of a loss the cut could keep the logits, or their log-probabilities, which are as large. The forward program has
    the logits anyway and need not write the others, so those are computed again.
    """
    for node in joint.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # drawn again it would be other numbers
        if node.target is torch.ops.aten.eq.Tensor:
            for value in map(maker, node.all_input_nodes):
                # Computed again it may be rounded otherwise, and the largest of a row be equal to none of its elements.
                value.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if node.target is torch.ops.aten.nll_loss_forward.default and isinstance(node.args[0], fx.Node):
            chances = node.args[0]
            if chances.target in (torch.ops.aten.sub.Tensor, torch.ops.aten._to_copy.default):
                chances.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    forward, backward = min_cut_rematerialization_partition(joint, inputs, **settings)
    return forward, backward


def within(
    joint: fx.GraphModule, inputs: Any, budget: int, planned: Callable[[fx.GraphModule], Graph],
    took: Callable[[StepCut], None], **settings: Any,
) -> Programs:  # fmt: skip
    """The first cut whose step fits a budget of bytes. planned: a program as it will run; took: is told the choice."""
    if not all(type(size) is int for value in joint.graph.find_nodes(op="placeholder") for size in _sizes(value)):
        took(StepCut(budget, None, SHARES[-1]))
        return _cut(joint, inputs, SHARES[-1], settings)
    least, least_share = -1, 0.0
    for share in (None, *SHARES):
        programs = _cut(_copied(joint), inputs, share, settings)
        predicted = step_bytes(*programs, planned)
        if predicted <= budget:
            took(StepCut(budget, predicted, share))
            return programs
        if least < 0 or predicted < least:
            least, least_share = predicted, share or 0.0
    raise UsageError(
        f"memory={format_bytes(budget)} is too little: the values of a step take at least"
        f" {format_bytes(least)}, with {least_share:.0%} of the least cut kept; give more, or a smaller batch"
    )


def _cut(joint: fx.GraphModule, inputs: Any, share: float | None, settings: Mapping[str, Any]) -> Programs:
    if share is None:
        forward, backward = default_partition(joint, inputs, **settings)
        return forward, backward
    with functorch_config.patch(activation_memory_budget=share):
        return least_cut(joint, inputs, **settings)


def _copied(joint: fx.GraphModule) -> fx.GraphModule:
    """The same graph of nodes of its own: a cut changes what it is given."""
    graph = fx.Graph()
    output = joint.graph.output_node()
    results = graph.graph_copy(joint.graph, {})
    graph.output(results).meta = copy.copy(output.meta)
    return fx.GraphModule(joint, graph)


def _sizes(placeholder: fx.Node) -> tuple[Any, ...]:
    value = placeholder.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else (value,)


def step_bytes(forward: fx.GraphModule, backward: fx.GraphModule, planned: Callable[[fx.GraphModule], Graph]) -> int:
    """The bytes of a step's values at its fullest moment: parameters, inputs and what torch's operators allocate within
    themselves are not counted."""
    first, second = planned(forward), planned(backward)
    given = {node.name for node in forward.graph.find_nodes(op="placeholder")}
    kept = [node for node in second.inputs if node["name"] not in given]
    return max(max(live_bytes(lives), default=0) for lives in (lifetimes(first), lifetimes(second, kept)))
