"""What a run's routers do, layer by layer: how often each expert is picked, and how sure routers are.

The one idea: layers add up what they choose where they choose it, in training and the first time alone (neither
held-out text nor a layer that is computed again counts), and all ranks put it together when the held-out text is looked
at. What experts with a capacity drop (`model/capacity.py`) counts among their picks.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tilemesh.model.experts import Experts, RouterLoad
from tilemesh.parallel.laid import Laid

DIGITS = 4
"""Of what is written down."""


class RouterWatch:
    """The routers of a laid model, from now on."""

    def __init__(self, laid: Laid, in_turn: bool = False) -> None:
        """`in_turn`: tokens go to experts in turn from now on, whatever routers say."""
        self.comm = laid.mesh.comm
        self.layers: dict[int, Experts] = {}
        for name, module in laid.module.named_modules():
            if isinstance(module, Experts):
                self.layers[int(name.split(".")[1])] = module
                module.load = RouterLoad(module.config.experts, module.router.weight.device)
                module.router.in_turn = in_turn

    def figures(self, layers: tuple[int, ...], experts: int) -> dict[str, Any]:
        """Of these layers since the last call, over all ranks (a collective call): the load of each expert over the
        mean, the part of all picks that was dropped, and the entropy of routers' probabilities over that of all being
        alike."""
        if not layers:
            return {}
        sums = torch.zeros(len(layers), experts + 3, dtype=torch.float64)
        for layer, module in self.layers.items():
            assert module.load is not None
            sums[layers.index(layer)] = module.load.take().cpu()
        total = torch.from_numpy(self.comm.all_reduce(sums.numpy()))  # ranks of tp count the same tokens, all alike
        tokens = total[:, -1:].clamp(min=1)
        picks = total[:, :-3]
        load, dropped = picks / picks.mean(1, keepdim=True).clamp(min=1), total[:, -3] / picks.sum(1).clamp(min=1)
        entropy = total[:, -2] / tokens[:, 0] / math.log(max(2, experts))
        return {
            "expert_load": [[round(value, DIGITS) for value in row] for row in load.tolist()],
            "dropped_picks": [round(value, DIGITS) for value in dropped.tolist()],
            "router_entropy": [round(value, DIGITS) for value in entropy.tolist()],
            "busiest_expert": round(float(load.max()), DIGITS),
        }
