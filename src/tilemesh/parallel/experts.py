"""Experts shared out among replicas: a token's activations travel to whoever has its expert, and the result back.

The one idea: neighbours along dp, `plan.ep` of them, hold the experts together, and all else of the model each. What a
replica's router sends to another's experts travels in one all_to_all with as many rows for each rank as it has tokens
for it, and back in another; gradients go the same ways. The loss is a sum, so an expert's gradient is that of all
tokens which passed it, whoever sent them, and is summed over the replicas with the same experts alone.

Where a layer is computed again, it routes again: the same operators on the same numbers, so with the same bits, and
ranks tell one another anew how many rows come. Ranks make as many passes as one another, or `Laid.stand_by`.

N: rows of this rank; M: rows that came for this rank's experts; X: experts; D: width.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.deferral import product_dtype
from tilemesh.model.experts import Computation, Experts
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.tensor import exchanged

EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)(\..*)")
"""The name of an expert's parameter: before its number, the number, after it."""


class ExpertElsewhere(NamedTuple):
    """Of a parameter that another replica holds."""

    twin: str
    """What this rank holds in the same place among its own experts."""
    at: int
    """Which of `ep` neighbours holds it."""


@dataclass(frozen=True)
class ExpertExchange:
    """How rows reach the experts of other ranks: see `Experts.exchange`."""

    comm: Communicator
    algorithm: str = "auto"

    def __call__(self, rows_ND: Tensor, counts_X: Tensor, compute: Computation) -> Tensor:
        """What experts, wherever they are, make of rows that are ordered by expert, so many for each. `compute`: those
        of this rank, of rows ordered alike."""
        counts = counts_X.view(self.comm.size, -1)
        arriving: Tensor = self.comm.all_to_all(counts.contiguous(), algorithm=self.algorithm)
        sends, receives = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows_MD = self._move(rows_ND.to(product_dtype(rows_ND)), sends, receives)
        own = torch.arange(arriving.shape[1], device=rows_ND.device).repeat(self.comm.size)
        order = own.repeat_interleave(arriving.flatten()).argsort(stable=True)  # they came rank by rank
        results = compute(rows_MD[order], arriving.sum(0))
        return self._move(results[order.argsort()], receives, sends)

    def _move(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        def move(x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
            y: Tensor = self.comm.all_to_all(
                x.contiguous(), send_counts=sends, recv_counts=receives, algorithm=self.algorithm
            )
            return y

        return exchanged(rows, lambda x: move(x, sends, receives), lambda grad: move(grad, receives, sends))


def share_experts(model: nn.Module, mesh: Mesh, plan: ParallelPlan, algorithm: str) -> dict[str, ExpertElsewhere]:
    """Leave a model those of its experts that this rank holds; the parameters that others hold. A collective call."""
    if plan.ep == 1:
        return {}
    comm = mesh.among((("dp", plan.ep),))
    before = [name for name, _ in model.named_parameters()]
    count = 0
    for module in model.modules():
        if isinstance(module, Experts):
            count = module.config.experts // plan.ep
            for number in [*module.experts._modules]:
                if int(number) // count != comm.rank:
                    del module.experts._modules[number]
            module.exchange = ExpertExchange(comm, algorithm)
    elsewhere = {}
    for name in before:
        parts = EXPERT.fullmatch(name)
        if parts and int(parts[2]) // count != comm.rank:
            at, place = divmod(int(parts[2]), count)
            elsewhere[name] = ExpertElsewhere(f"{parts[1]}{comm.rank * count + place}{parts[3]}", at)
    return elsewhere
