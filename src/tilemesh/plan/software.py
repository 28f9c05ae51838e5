"""Software profiles: how long an engine of some time takes beside the cost model's own figures.

The one idea: the same GPU runs the same products with other kernels, so a profile is four factors (products, attention,
passes over memory, exchanges) over one of three kinds of code, and where it was read. Nothing else of a prediction
changes: the factors go into the rates of a device and the links of a cluster.

A profile is fitted on some runs and graded on the others. Few runs must not decide on four factors by themselves: a
factor of 1.6 counts as unlikely as an error of 10 %, so what the runs do not show stays 1.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tilemesh.core import config
from tilemesh.core.calibration import Rates
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.hardware import Cluster, ClusterNode, Link
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.ranges import Range
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.task import Code
from tilemesh.plan.step import predict

PARTS = ("products", "attention", "passes", "exchanges")
_SPREAD, _PRIOR = 0.1, 0.5
"""Expected logarithms: of a run's error, and of a factor."""
_ROUNDS = 2
"""A step is nearly a sum of its parts; what hides behind what may change once."""


Factor = Annotated[float, Range(0, 100, above=True)]


@dataclass(frozen=True)
class Software:
    """What runs a plan, and how its figures were come by. The factors: its seconds over the cost model's own."""

    name: str
    source: str
    code: Code
    """The kind of code that the cost model takes it for."""
    products: Factor = 1.0
    attention: Factor = 1.0
    passes: Factor = 1.0
    """Of what only moves bytes: norms, activations, losses."""
    exchanges: Factor = 1.0

    @property
    def words(self) -> str:
        return f"{self.name} ({self.source})"

    @property
    def factors(self) -> dict[str, float]:
        return {part: getattr(self, part) for part in PARTS}

    def taking(self, factors: Mapping[str, float]) -> Software:
        """The same with other factors, all or some of them."""
        return Software(self.name, self.source, self.code, **{**self.factors, **factors})

    def on(self, cluster: Cluster, rates: Rates | None) -> tuple[Cluster, Rates | None]:
        """A cluster and the rates of its device as this software sees them."""
        factors = self.factors
        if set(factors.values()) == {1.0}:
            return cluster, rates
        nodes = (_slower(cluster.node, factors.pop("exchanges")),) * len(cluster.nodes)
        parts = tuple(self.on(part, None)[0] for part in cluster.parts)
        slower = dataclasses.replace(cluster, nodes=nodes, parts=parts)
        return slower, dataclasses.replace(rates or Rates(), times_as_long=factors)


SOFTWARE = {
    each.name: each
    for each in (
        Software("fused", "Megatron's kernels, fitted on an A100 in 2022; see plan/constants.py", "fused"),
        Software("compiled", "torch.compile, as measured on an H200 with torch 2.11", "compiled"),
        Software("eager", "PyTorch's own kernels, as measured on an H200 with torch 2.11", "eager"),
        # Fitted by `tilemesh plan fit benchmarks/software/FILE.toml`.
        Software(
            "torchtitan-2025",
            "torchtitan's and torchao's published runs, December 2024 to 2025, compiled, on H100 of 500 W",
            "compiled", products=0.96, attention=1.265, passes=0.979, exchanges=1.123,
        ),
        Software(
            "megatron-2025", "Megatron-Bridge 25.11 and 26.02 and the Llama 3 paper, dense models on H100",
            "fused", products=0.968, attention=0.818, passes=0.89, exchanges=1.016,
        ),
        Software(
            "llm-foundry-2023", "llm-foundry's tables of 2023, eager PyTorch with FSDP on H100",
            "eager", products=1.146, attention=1.404, passes=0.792, exchanges=1.181,
        ),
    )
}  # fmt: skip


def read_software(text: str) -> Software:
    """One that is known by its name, or a profile's file."""
    if not text.endswith(".toml"):
        if text not in SOFTWARE:
            raise unknown("software", text, [*SOFTWARE, "PROFILE.toml"])
        return SOFTWARE[text]
    return config.from_dict(Software, config.read_toml(text, "profile"), text)


def _slower(node: ClusterNode, times: float) -> ClusterNode:
    def link(link: Link) -> Link:
        return dataclasses.replace(link, bytes_per_s=link.bytes_per_s / times, latency_s=link.latency_s * times)

    return dataclasses.replace(node, intra=link(node.intra), inter=link(node.inter))


# Fitting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredRun:
    """One that was measured or published."""

    name: str
    model: ModelConfig
    plan: ParallelPlan
    cluster: Cluster
    context: int
    step_s: float
    held_out: bool = False
    """To be graded on, not fitted."""
    rates: Rates | None = None
    imbalance: float = 0.0

    def predicted_s(self, software: Software) -> float:
        cluster, rates = software.on(self.cluster, self.rates)
        how: dict[str, Any] = {"rates": rates, "code": software.code, "imbalance": self.imbalance}
        return predict(self.model, cluster, self.plan, self.context, **how).step_time_s

    def error(self, software: Software) -> float:
        """Of the step's time: predicted over measured, less 1."""
        return self.predicted_s(software) / self.step_s - 1


def fit_software(name: str, source: str, code: Code, runs: Sequence[MeasuredRun]) -> Software:
    """The factors with which the runs that are not held out are predicted best."""
    fitted = [run for run in runs if not run.held_out]
    if not fitted:
        raise UsageError(f"a profile of {len(runs)} runs of which none is to be fitted: leave one without held_out")
    software = Software(name, source, code)
    for _ in range(_ROUNDS):
        software = _nearer(software, fitted)
    return software.taking({part: round(times, 3) for part, times in software.factors.items()})


def errors(software: Software, runs: Sequence[MeasuredRun]) -> tuple[float, float]:
    """The median and the greatest of the sizes of their errors."""
    sizes = [abs(run.error(software)) for run in runs]
    return statistics.median(sizes), max(sizes)


def _nearer(software: Software, runs: Sequence[MeasuredRun]) -> Software:
    """By one round: each part's share of each step as it is now, and the factors that suit them."""
    now = software.factors
    steps = [run.predicted_s(software) for run in runs]
    shares = []
    for part in PARTS:
        twice = software.taking({part: 2 * now[part]})
        shares.append([run.predicted_s(twice) - step for run, step in zip(runs, steps, strict=True)])

    def cost(logs: Sequence[float]) -> float:
        more = [math.exp(log) / now[part] - 1 for part, log in zip(PARTS, logs, strict=True)]
        total = sum((log / _PRIOR) ** 2 for log in logs)
        for place, (run, step) in enumerate(zip(runs, steps, strict=True)):
            seconds = step + sum(by * share[place] for by, share in zip(more, shares, strict=True))
            total += (math.log(max(seconds, 0.01 * step) / run.step_s) / _SPREAD) ** 2
        return total

    logs = lowest(cost, [math.log(now[part]) for part in PARTS])
    return software.taking({part: math.exp(log) for part, log in zip(PARTS, logs, strict=True)})


def lowest(cost: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """Where a function of few numbers is lowest: by steps along each, ever shorter ones."""
    at, least, step = list(start), cost(start), 0.5
    while step > 1e-4:
        tried = [[*at[:place], at[place] + by, *at[place + 1 :]] for place in range(len(at)) for by in (-step, step)]
        best = min(tried, key=cost)
        if cost(best) < least:
            at, least = best, cost(best)
        else:
            step /= 2
    return at
