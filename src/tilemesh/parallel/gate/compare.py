"""Training a layout beside one process, and how far apart the two are.

Every rank calls `run`; rank 0 has the results. A case that is not within its bound is looked at again, layer by layer,
for the first place where the two differ: `find.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import Precision
from tilemesh.kernels.accuracy import norm_error
from tilemesh.model.config import ModelConfig
from tilemesh.model.programs.program import TRAINING
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.agree import tell
from tilemesh.parallel.apply import lay
from tilemesh.parallel.gate import alone
from tilemesh.parallel.gate.alone import GateTrace
from tilemesh.parallel.gate.cases import BOUND, MAX_NORM, NORM_BOUND, OPERATIONS, ORDER_FACTOR, STEPS, Case, rate_of
from tilemesh.parallel.gate.find import AGREES, find, step_pieces
from tilemesh.parallel.gate.plant_numerics import Plant
from tilemesh.parallel.gate.rules import GateOptimizer, PaperRule
from tilemesh.parallel.gate.types import misplaced
from tilemesh.parallel.gradients import read
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import Held
from tilemesh.parallel.zero3 import NotWholeError


@dataclass(frozen=True)
class Apart:
    """Relative differences between two trainings, the largest over the steps: of loss, gradient and weights; and of the
    norm that was reported from that of the layout's own gradients."""

    loss: float
    gradient: float
    weights: float
    norm: float = 0.0

    def within(self, bound: Apart) -> bool:
        """Written so that NaN is not within anything."""
        return all(value <= limit for value, limit in zip(astuple(self), astuple(bound), strict=True))


@dataclass(frozen=True)
class GateResult:
    case: Case
    apart: Apart
    bound: Apart
    where: str = ""
    """On failure: the first layer and parameter that differ."""

    @property
    def passed(self) -> bool:
        return self.apart.within(self.bound)


class _OwnRule:
    """The gate's own, on shards: it works element by element."""

    def __init__(self, held: Mapping[str, Held]) -> None:
        self.held, self.rule = held, PaperRule("")

    def step(self, rate: float, divisor: Tensor | None = None) -> None:
        values = {name: mine.tensor for name, mine in self.held.items() if mine.tensor.grad is not None}
        self.rule.step(values, {name: value.grad for name, value in values.items() if value.grad is not None})


@dataclass
class Gate:
    """The gate as one rank runs it. `plant`: a bug to put into every laid model, to see that the gate sees it; with
    `stops_when_found` a case that shows it is the last. `optimizer`: makes the one of a name (`OPTIMIZERS`) over a laid
    model in a precision; its settings are to be `SETTINGS`."""

    comm: Communicator
    device: str = "cpu"
    plant: Plant | None = None
    stops_when_found: bool = False
    optimizer: Callable[[str, Laid, Precision], GateOptimizer] | None = None
    checks_types: bool = True
    """Whether a layout whose placements do not fit together is refused before it runs (`types.py`)."""
    traces: dict[tuple[object, ...], GateTrace] = field(default_factory=dict)

    def run(self, cases: Sequence[Case]) -> Iterator[GateResult]:
        """Results on rank 0 as they come, nothing on the others (a collective call: every rank takes all of it)."""
        # Stable: on one mesh cases come in the order given.
        ordered = sorted(cases, key=lambda case: (-case.layout.world, *case.layout.axes.values()))
        for axes, alike in itertools.groupby(ordered, key=lambda case: case.layout.axes):
            ranks = math.prod(axes.values())
            group = self.comm.split(0 if self.comm.rank < ranks else None)
            mesh = None if group is None else Mesh(group, **axes)
            is_last = False
            for case in alike:
                result = None if mesh is None else self._one(case, mesh)
                if ranks < self.comm.size:  # who has no part in it waits for one case at a time, not for all
                    self.comm.barrier()
                is_last = self.stops_when_found and self._is_red(result)
                if result is not None:
                    yield result
                if is_last:
                    break
            for opened in (mesh, group):
                if opened is not None:
                    opened.close()
            if is_last:
                return

    def _is_red(self, result: GateResult | None) -> bool:
        """Whether rank 0 has a result that failed; the same on every rank."""
        verdict = np.array([float(result is not None and not result.passed)])
        return bool(self.comm.broadcast(verdict, root=0)[0])

    def _one(self, case: Case, mesh: Mesh) -> GateResult | None:
        laid = self.laid(case, mesh)
        if self.checks_types and (fault := self._misplaced(mesh, laid)):
            return self._unrun(case, mesh, f"refused before it ran: {fault}")
        try:
            trace = self.train(case, mesh, laid)
        except NotWholeError as error:  # replicas follow one list: all of them are here
            return self._unrun(case, mesh, str(error))
        verdict = np.zeros(1)
        result = None
        if trace is not None:
            reference = self.trace(case)
            result = GateResult(case, apart(trace, reference), self.bound(case))
            verdict[0] = not result.passed
        if not mesh.comm.broadcast(verdict, root=0)[0]:
            return result
        where = find(case, self.config(case), mesh, self.laid(case, mesh), self.device)
        setting = self._setting(case, mesh)
        if result is None or trace is None:
            return None
        if where.startswith(AGREES):
            where += f", first in {_first_apart(trace.weights, self.trace(case).weights)}"
        return dataclasses.replace(result, where=f"{where} (comes with {setting})" if setting else where)

    def _unrun(self, case: Case, mesh: Mesh, where: str) -> GateResult | None:
        nothing = Apart(math.nan, math.nan, math.nan, math.nan)
        return None if mesh.comm.rank else GateResult(case, nothing, self.bound(case), where)

    def _misplaced(self, mesh: Mesh, laid: Laid) -> str:
        """What the first rank that has a fault says of its placements; the same on every rank."""
        faults = misplaced(laid)
        root = int(mesh.comm.all_reduce(np.array([mesh.comm.rank if faults else mesh.comm.size]), "min")[0])
        return tell(mesh.comm, "".join(faults[:1]), root) if root < mesh.comm.size else ""

    def _setting(self, case: Case, mesh: Mesh) -> str:
        """The first axis, or other setting, without which a case that fails passes; of a single one this."""
        fewer = list(_with_less(case))
        for setting, smaller in fewer[:-1]:
            ranks = smaller.layout.world
            group = mesh.comm.split(0 if mesh.comm.rank < ranks else None)
            verdict = np.zeros(1)
            if group is not None:
                part = Mesh(group, **smaller.layout.axes)
                trace = self.train(smaller, part, self.laid(smaller, part))
                if trace is not None:
                    verdict[0] = apart(trace, self.trace(smaller)).within(self.bound(smaller))
                part.close()
                group.close()
            if mesh.comm.broadcast(verdict, root=0)[0]:
                return setting
        return fewer[-1][0] if fewer else ""

    def laid(self, case: Case, mesh: Mesh) -> Laid:
        config = self.config(case)
        use = dataclasses.replace(TRAINING, marked=case.packed)
        if case.weights:
            model = alone.whole_model(config, case.precision, case.weights, self.device)
            laid = lay(model, mesh, case.layout, device=self.device, bucket_bytes=32 << 10, use=use)
        else:
            model = Transformer(config, device="meta", dtype=alone.weights_dtype(case.precision))
            laid = lay(model, mesh, case.layout, device=self.device, bucket_bytes=32 << 10, use=use)
            laid.load(alone.start(config, case.precision))
        if self.plant is not None and self.plant.applies(case):
            self.plant.put(laid)
        return laid

    def config(self, case: Case) -> ModelConfig:
        """What our own model is made from: a planted bug that all layouts share is in here."""
        return case.config if self.plant is None else self.plant.shared(case.config)

    def steps(self, case: Case, laid: Laid) -> GateOptimizer:
        """What steps the layout's parameters."""
        if not case.optimizer:
            return _OwnRule(laid.gradients.stepped)
        if self.optimizer is None:
            raise UsageError(f"a case of {case.optimizer}, and the gate was given no optimizer: pass Gate(optimizer=…)")
        optimizer = self.optimizer(case.optimizer, laid, case.precision)
        return optimizer if self.plant is None or not self.plant.applies(case) else self.plant.steps(optimizer)

    def train(self, case: Case, mesh: Mesh, laid: Laid) -> GateTrace | None:
        """The layout's training, whole, on rank 0 of the mesh."""
        config, optimizer = case.config, self.steps(case, laid)
        losses, norms, gradients = [], [], []
        for step in range(STEPS):
            tokens_BT, targets_BT = (x.to(self.device) for x in alone.batch(config, step, case.packed))
            pieces = step_pieces(case.layout, mesh.dp.index, tokens_BT, targets_BT)
            laid.passes(pieces, dropout_seed=alone.dropout_seed(step), scale=case.scale)
            # 16-bit gradients are left as they are, for the optimizer to divide: dividing would round them.
            done = laid.gradients.finish(MAX_NORM, divide=case.precision != "bf16-master")
            [(loss_mean, norm)] = read([done])
            clip = min(1.0, MAX_NORM / (norm + 1e-6)) * (1.0 if done.divisor is None else float(done.divisor))
            gradients.append(  # as they were before clipping
                {name: value.double() / clip for name, value in (laid.gather_gradients() or {}).items()}
            )
            losses.append(loss_mean)
            norms.append(norm)
            optimizer.step(rate_of(case.optimizer), done.divisor)
            laid.gradients.updated()
        weights = laid.gather()
        if weights is None:
            return None
        trained = {name: weights[name] for name in gradients[-1]}  # codes of few bits stay what they were
        return GateTrace(losses, norms, gradients, trained if case.weights else weights)

    def trace(self, case: Case, parts: int = 1, pieces: int = 1) -> GateTrace:
        config = case.config if case.by_papers else self.config(case)
        settings = (config, case.precision, case.weights, case.optimizer, case.by_papers, case.packed)
        key = (*settings, parts, pieces)
        if key not in self.traces:
            self.traces[key] = alone.train(*settings, parts=parts, pieces=pieces, device=self.device)
        return self.traces[key]

    def bound(self, case: Case) -> Apart:
        """1e-10 in float64; elsewhere twice what another order of summation does to one process."""
        if case.precision == "fp64":
            return Apart(BOUND, BOUND, BOUND, BOUND)
        # A layout that cuts nothing still sums in another order than a process does: at least two parts and pieces.
        parts, pieces = max(2, case.layout.tp), max(2, case.layout.replicas * case.layout.accumulation)
        other = apart(self.trace(case, parts, pieces), self.trace(case))
        # A loss is one number: by luck two orders may agree to the last bit, which says nothing of a third.
        least = torch.finfo(torch.float32 if case.precision == "fp32" else torch.bfloat16).eps
        # So may products be that a CPU happens to add up alike in both orders.
        stored = alone.weights_dtype(case.precision)
        chain = norm_error(OPERATIONS * case.config.layers, stored)
        return Apart(
            ORDER_FACTOR * max(other.loss, least),
            ORDER_FACTOR * max(other.gradient, chain),
            ORDER_FACTOR * max(other.weights, norm_error(STEPS, stored)),
            NORM_BOUND,
        )


def _with_less(case: Case) -> Iterator[tuple[str, Case]]:
    """A case without each of its axes and settings in turn: those first that others are folded out of or cut over."""
    unset: dict[str, dict[str, Any]] = {
        "recompute": {"recompute": "none", "recompute_every": 1},
        "ep": {"ep": 1},
        "cp": {"cp": 1},
        "expert_tp": {"expert_tp": 0},
        "tp": {"tp": 1, "sequence_parallel": False, "expert_tp": 0},
        "pp": {"pp": 1, "schedule": "1f1b", "interleave": 1, "slices": 1},
        "zero": {"zero": 0, "zero_group": 0, "prefetch": 1},
        "dp": {"dp": 1, "ep": 1, "zero": 0, "zero_group": 0, "prefetch": 1},
    }
    for setting, settings in unset.items():
        if getattr(case.layout, setting) not in (0, 1, "none") or (setting == "expert_tp" and case.layout.routes_apart):
            try:
                yield setting, dataclasses.replace(case, layout=dataclasses.replace(case.layout, **settings))
            except UsageError:  # what is left is no plan
                continue


def _first_apart(values: dict[str, Tensor], reference: dict[str, Tensor]) -> str:
    """The parameter that is furthest from what it should be, as a part of its own size."""
    return max(reference, key=lambda name: distance({name: values[name]}, {name: reference[name]}))


def apart(trace: GateTrace, reference: GateTrace) -> Apart:
    losses = [abs(a - b) / abs(b) for a, b in zip(trace.losses, reference.losses, strict=True)]
    norms = [abs(a - b) / abs(b) for a, b in zip(trace.norms, reference.norms, strict=True)]
    gradients = [distance(a, b) for a, b in zip(trace.gradients, reference.gradients, strict=True)]
    own = [
        abs(norm - size) / size for norm, size in zip(trace.norms, map(alone.whole_norm, trace.gradients), strict=True)
    ]
    # `max` drops a NaN that does not come first; the sum keeps it.
    worst = [math.nan if math.isnan(sum(values)) else max(values) for values in (losses, norms + gradients, own)]
    return Apart(worst[0], worst[1], distance(trace.weights, reference.weights), worst[2])


def distance(values: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The norm of the difference over the whole model, relative to the norm of `reference`."""
    assert values.keys() == reference.keys()
    off = sum(
        float((values[name].double().cpu() - right.double().cpu()).square().sum()) for name, right in reference.items()
    )
    return math.sqrt(off) / alone.whole_norm(reference)
