"""Experts shared out among replicas: a token's activations travel to whoever has its expert, and the result back.

The one idea: neighbours along cp and dp, `plan.ep` of them, hold the experts together, and all else of the model each.
What one rank's router sends to another's experts travels in one all_to_all with as many rows for each rank as it has
tokens for it, and back in another; gradients go the same ways. The loss is a sum, so an expert's gradient is that of
all tokens which passed it, whoever sent them, and is summed over the ranks with the same experts alone.

An exchange is begun and waited for in two places of the graph. What a layer computes between the two, its shared expert
above all, hides it: forward the way to the experts, backward the way of the gradients home. Where a layer is computed
again, rows travel again and nothing is decided again, so nobody asks how many come (`ExpertChoice`). Ranks make as many
passes as one another, or `Laid.stand_by`.

N: rows of this rank; M: rows that came for this rank's experts; X: experts; D: width.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.sequence import runs_of_ranks
from tilemesh.core.step.action import Kind, Payload
from tilemesh.core.tensor_placement import Crossing, S
from tilemesh.kernels.routing.reference import inverse
from tilemesh.model.capacity import PicksBefore
from tilemesh.model.deferral import product_dtype
from tilemesh.model.experts import Computation, ExpertChoice, Experts, Results
from tilemesh.parallel.context import SequenceCounts
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.tensor import Seams

EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)(\..*)")
"""The name of an expert's parameter: before its number, the number, after it."""


class ExpertElsewhere(NamedTuple):
    """Of a parameter that another replica holds."""

    twin: str
    """What this rank holds in the same place among its own experts."""
    at: int
    """Which of `ep` neighbours holds it."""


_TOKENS, _EXPERTS = (S("tokens"), S("tokens")), (S("experts"), S("experts"))
CROSSINGS: Mapping[Kind, Crossing] = {
    "DISPATCH": Crossing("ep", _TOKENS, _EXPERTS),
    "COMBINE": Crossing("ep", _EXPERTS, _TOKENS),
}
"""What travels between tokens and experts: the table that `Journey` runs and `gate/types.py` reads."""


class ArrivingRows(NamedTuple):
    """Of one pass, told once."""

    sends: list[int]
    """How many rows go to each rank ..."""
    receives: list[int]
    """... and come from it."""
    counts: Tensor
    """Of these, by sender and expert here."""


class ExpertRows(NamedTuple):
    """What travelled, in the words of a step's actions."""

    kind: Kind
    of: Payload
    layer: int
    nbytes: int
    """That this rank sent."""


Watch = Callable[[ExpertRows, float, float], None]
"""Told of each exchange when it has been waited for: what it was, and when it began and ended."""


@dataclass(eq=False)
class Journey:
    """Rows of one pass on their way between ranks, and their gradients on the way back."""

    exchange: ExpertExchange
    kind: Kind
    sends: list[int]
    receives: list[int]
    under_way: tuple[Any, Tensor, ExpertRows, float] | None = None
    """What is waited for, where it arrives, what it is and when it began: rows, later gradients."""

    def there(self, rows: Tensor) -> Tensor:
        """Where rows arrive that leave now; not yet to be read."""
        function: Any = _Leave
        landing: Tensor = function.apply(rows, self)
        return landing

    def arrived(self, landing: Tensor) -> Tensor:
        """The rows, once they are all here."""
        function: Any = _Arrive
        rows: Tensor = function.apply(landing, self)
        return rows

    def begin(self, rows: Tensor, of: Payload) -> Tensor:
        """Rows, or gradients the other way."""
        began_s, way = time.perf_counter(), (self.sends, self.receives)
        sends, receives = way if of == "activation" else way[::-1]
        if of == "gradient" and not self.exchange.crossings[self.kind].has_gradient:
            rows = self._staying(rows)
        landing = rows.new_empty(sum(receives), *rows.shape[1:])
        counts: dict[str, Any] = {"send_counts": sends, "recv_counts": receives}
        comm, algorithm = self.exchange.comm, self.exchange.algorithm
        handle = comm.all_to_all(rows.contiguous(), **counts, out=landing, algorithm=algorithm, wait=False)
        self.under_way = handle, landing, ExpertRows(self.kind, of, self.exchange.layer, rows.nbytes), began_s
        return landing

    def _staying(self, grad: Tensor) -> Tensor:
        """Gradients of the rows that came from this rank itself, and zeros."""
        kept, here = torch.zeros_like(grad), self.exchange.comm.rank
        torch.split(kept, self.receives)[here].copy_(torch.split(grad, self.receives)[here])
        return kept

    def wait(self) -> Tensor:
        assert self.under_way is not None
        (handle, landing, what, began_s), self.under_way = self.under_way, None
        handle.wait()
        if self.exchange.watch is not None:
            self.exchange.watch(what, began_s, time.perf_counter())
        return landing


class _Leave(torch.autograd.Function):
    """Forward rows set out; backward their gradients have come home."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return journey.begin(rows, "activation")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.journey.wait(), None


class _Arrive(torch.autograd.Function):
    """Forward rows have come; backward their gradients set out. What autograd hands on meanwhile is nothing."""

    @staticmethod
    def forward(ctx: Any, landing: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        journey.wait()
        return landing.view_as(landing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.journey.begin(grad, "gradient")
        return grad.new_zeros(()).expand_as(grad), None


@dataclass(frozen=True)
class ExpertExchange:
    """How rows reach the experts of other ranks: see `Experts.exchange`."""

    comm: Communicator
    layer: int
    algorithm: str = "auto"
    crossings: Mapping[Kind, Crossing] = field(default_factory=lambda: CROSSINGS)
    watch: Watch | None = None

    def __call__(self, rows_ND: Tensor, choice: ExpertChoice) -> Results:
        if choice.arriving is None:
            choice.arriving = self._ask(choice.counts_X)
        sends, receives, counts = choice.arriving
        dispatch = Journey(self, "DISPATCH", sends, receives)
        landing_MD = dispatch.there(rows_ND.to(product_dtype(rows_ND)))

        def results(compute: Computation) -> Tensor:
            own = torch.arange(counts.shape[1], device=rows_ND.device).repeat(self.comm.size)
            order = own.repeat_interleave(counts.flatten()).argsort(stable=True)  # they came rank by rank
            made = compute(dispatch.arrived(landing_MD).index_select(0, order), counts.sum(0))
            combine = Journey(self, "COMBINE", receives, sends)
            return combine.arrived(combine.there(made.index_select(0, inverse(order))))

        return results

    def _ask(self, counts_X: Tensor) -> ArrivingRows:
        """How many rows come for each expert here."""
        counts = counts_X.view(self.comm.size, -1).contiguous()
        arriving: Tensor = self.comm.all_to_all(counts, algorithm=self.algorithm)
        return ArrivingRows(counts.sum(1).tolist(), arriving.sum(1).tolist(), arriving)


@dataclass(frozen=True)
class RunCounts:
    """What experts that take so many of a sequence call where ranks share it: what its earlier tokens picked."""

    counts: SequenceCounts
    seams: Seams
    cp: int
    tp: int
    """Ranks of each that the tokens are cut over, where rows are routed."""

    def __call__(self, picks_BTX: Tensor) -> PicksBefore:
        tokens = self.seams.sequence_tokens
        shares = runs_of_ranks(tokens, self.cp, self.tp)
        every, own = sorted(run for runs in shares for run in runs), shares[self.counts.comm.rank]
        parts = torch.split(picks_BTX, [run.length for run in own], dim=1)
        own_BRX = picks_BTX.new_zeros(len(picks_BTX), len(every), picks_BTX.shape[-1], dtype=torch.int64)
        for run, part_BTX in zip(own, parts, strict=True):
            own_BRX[:, every.index(run)] = part_BTX.sum(1)
        others_BRX = self.counts(own_BRX) - own_BRX
        before_BRX = others_BRX.cumsum(1) - others_BRX
        places = [every.index(run) for run in own for _ in range(run.length)]
        return PicksBefore(before_BRX[:, places], tokens)


def share_experts(model: nn.Module, mesh: Mesh, plan: ParallelPlan, algorithm: str) -> dict[str, ExpertElsewhere]:
    """Leave a model those of its experts that this rank holds; the parameters that others hold. A collective call."""
    if plan.ep == 1:
        return {}
    comm = mesh.among(plan.expert_spread, "ep")
    before = [name for name, _ in model.named_parameters()]
    count = 0
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            count = module.config.experts // plan.ep
            for number in [*module.experts._modules]:
                if int(number) // count != comm.rank:
                    del module.experts._modules[number]
            module.exchange = ExpertExchange(comm, int(path.split(".")[1]), algorithm)
    elsewhere = {}
    for name in before:
        parts = EXPERT.fullmatch(name)
        if parts and int(parts[2]) // count != comm.rank:
            at, place = divmod(int(parts[2]), count)
            elsewhere[name] = ExpertElsewhere(f"{parts[1]}{comm.rank * count + place}{parts[3]}", at)
    return elsewhere


def watch_experts(model: nn.Module, watch: Watch | None) -> None:
    """Have somebody told of what layers exchange with experts of other ranks."""
    for module in model.modules():
        if isinstance(module, Experts) and isinstance(module.exchange, ExpertExchange):
            module.exchange = dataclasses.replace(module.exchange, watch=watch)
