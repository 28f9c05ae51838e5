"""How long a step takes with each way of exchanging gradients, all in one run, in turns.

    compute     no exchange at all: what no exchange can be faster than
    after       the buckets, one after the other, once backward has ended
    bucketed    the buckets, each as soon as it is full, during backward
    naive       one blocking all_reduce a parameter, once backward has ended

What `bucketed` hides is (after - bucketed) / (after - compute): the same bytes in the same pieces, only earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from tilemesh.bench.train.exchange import config_of
from tilemesh.comm.connection import connect
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.measure.ranks import rank_timer
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import compare
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.weights import count_parameters
from tilemesh.parallel.apply import lay
from tilemesh.parallel.buckets import Bucketed
from tilemesh.parallel.gradients import Way, read
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Mesh


def on_a_rank(model: str, **settings: Any) -> dict[str, Any]:
    """What a rank measured: every rank has the same, of the slowest one at each turn."""
    config, comm = config_of(model), connect()
    samples = measure(comm, config, **settings)
    case = {
        "transport": comm.backend, "parameters": count_parameters(config).total, "rows": settings["rows"],
        "tokens": settings["tokens"], "bucket_bytes": settings["bucket_bytes"], "algorithm": settings["algorithm"],
    }  # fmt: skip
    return {"case": case, "samples": {name: asdict(sample) for name, sample in samples.items()}}


def measure(
    comm: Communicator,
    config: ModelConfig,
    *,
    rows: int,
    tokens: int,
    bucket_bytes: int,
    algorithm: str = "auto",
    repeats: int = 30,
    seconds: float = 40.0,
) -> dict[str, Sample]:
    """Seconds a step by way of exchanging, the slowest rank's; the same on every rank (a collective call)."""
    if comm.size < 2:
        raise UsageError("an exchange among 1 rank: give at least 2")
    mesh = Mesh(comm, dp=comm.size)
    generator = torch.Generator().manual_seed(comm.rank)
    tokens_BT = torch.randint(0, config.vocabulary, (rows, tokens), generator=generator)
    targets_BT = torch.randint(0, config.vocabulary, (rows, tokens), generator=generator)

    def laid(mesh: Mesh, gradients: str | Way = "bucketed") -> Laid:
        plan = ParallelPlan(dp=mesh.dp.size, precision="fp32")
        model = Transformer(config, seed=1)
        return lay(model, mesh, plan, algorithm=algorithm, gradients=gradients, bucket_bytes=bucket_bytes)

    def step(model: Laid) -> Callable[[int], object]:
        def run(_: int) -> float:
            loss, count = model.loss(tokens_BT, targets_BT, dropout_seed=1)
            model.gradients.backward(loss, count)
            return read([model.gradients.finish(max_norm=1.0)])[0][0]

        return run

    candidates = {
        "compute": step(laid(Mesh(connect("alone")))),
        "after": step(laid(mesh, lambda parts: Bucketed(parts, bucket_bytes, overlap=False))),
        "bucketed": step(laid(mesh)),
        "naive": step(laid(mesh, "naive")),
    }
    timer = rank_timer(comm)
    return dict(compare(candidates, timer=timer, repeats=repeats, warmup=2, seconds=seconds, on_error="raise"))
