"""What servers wrote of a run, done again by the ranks of one worker: the weights that such a run has to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tilemesh.comm import Communicator, run_threads
from tilemesh.data.corpus import open_corpus
from tilemesh.measure.trace import Trace
from tilemesh.methods.record import read_record, replay, standing
from tilemesh.methods.rules import Push
from tilemesh.methods.server import mean_update
from tilemesh.parallel import Mesh
from tilemesh.parallel.gradients import GradientStep
from tilemesh.parallel.mesh import Axis
from tilemesh.parallel.shard import take
from tilemesh.runs.names import SERVER_RECORDS
from tilemesh.train.config import TrainConfig
from tilemesh.train.optimizer import Optimizer
from tilemesh.train.rank import lay_model, make_stepper
from tilemesh.train.record import Recorder
from tilemesh.train.resume import load_stored
from tilemesh.train.servers import FlatWeights, WorkerSource, as_server, as_worker, server_shard


class Pushing(Optimizer):
    """Keeps what a worker would say of its gradient."""

    done: GradientStep
    has_masters = False

    @property
    def divides_wide(self) -> bool:
        return self.has_masters

    def update(self, rate: Any, done: GradientStep) -> GradientStep:
        self.done = done
        return done


def replayed(config: TrainConfig, folder: Path) -> dict[str, torch.Tensor]:
    """The weights that the records of a run's servers come to, by their names in a checkpoint."""
    ranks = config.plan.world // config.plan.dp
    return run_threads(ranks, lambda comm: _replayed(config, folder, comm))[0]


def _replayed(config: TrainConfig, folder: Path, comm: Communicator) -> dict[str, torch.Tensor]:
    """As one rank of a worker, which is all workers in turn. Each has all of the servers."""
    here, servers, alone = torch.device("cpu"), config.method.servers, comm.split(comm.rank)
    laid = lay_model(as_worker(config), Mesh(comm, **as_worker(config).plan.axes), here, False)
    if config.lora.rank:
        load_stored(laid, config.lora.base)
    held = lay_model(as_server(config), Mesh(alone), here, False).gradients.stepped
    own = laid.gradients.stepped

    def whole(values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Of every rank's parts, on all ranks."""
        on_first = laid.gather(values, {name: mine.shard for name, mine in own.items()}) or {}
        given = [on_first.get(name, torch.empty_like(mine.tensor)) for name, mine in held.items()]
        return [comm.broadcast(value.to(mine.tensor.dtype)) for value, mine in zip(given, held.values(), strict=True)]

    with torch.no_grad():
        for mine, value in zip(held.values(), whole({name: mine.tensor for name, mine in own.items()}), strict=True):
            mine.tensor.copy_(value)
    shards = [server_shard(config, held, number) for number in range(servers)]
    vectors, corpus = FlatWeights(held, servers), open_corpus(config.data)
    sources = [
        WorkerSource(config, corpus, Axis("dp", config.plan.dp, number, (0,), comm), here)
        for number in range(config.plan.dp)
    ]
    optimizer = Pushing(config.optimizer, {}, "fp32")
    optimizer.has_masters = config.plan.precision == "bf16-master"
    stepper = make_stepper(config, laid, optimizer, sources[0], Recorder(Trace(None)))
    targets: dict[Push, float] = {}
    records = [standing(read_record(folder / SERVER_RECORDS / f"{number}.jsonl")) for number in range(servers)]
    # Each worker has a loss scale of its own, which fp16 gradients are rounded by.
    scales = {event.pushes[0]: event.scale for event in records[0] if event.kind == "push"}

    def gradient(push: Push, read: list[torch.Tensor]) -> list[torch.Tensor]:
        vectors.flat.copy_(torch.cat(read))
        with torch.no_grad():
            for name, mine in own.items():
                mine.tensor.copy_(take(mine.shard, held[name].tensor))
        stepper.source = sources[push.worker // config.plan.tp]
        stepper.scale.value *= scales[push] / stepper.scale.factor
        stepper(push.clock + 1)
        targets[push] = float(optimizer.done.tokens)
        pushed = torch.cat([each.reshape(-1) for each in whole({n: mine.tensor.grad for n, mine in own.items()})])
        if optimizer.done.divisor is not None:
            pushed.div_(optimizer.done.divisor)
        return [pushed[cut].clone() for cut in vectors.cuts]

    def apply(server: int, pushes: Sequence[Push], gradients: list[torch.Tensor], scale: float) -> None:
        counts = [targets[push] for push in pushes]
        mean_update(shards[server], pushes, gradients, config.plan.dp, scale, counts)

    replay(records, lambda server: shards[server].weights.clone(), gradient, apply)
    flat = torch.cat([shard.weights for shard in shards])
    return {f"weight:{name}": value for name, value in zip(vectors.held, vectors.split(flat), strict=True)}
