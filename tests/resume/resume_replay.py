"""What servers wrote of a run, done again in one process: the weights that an asynchronous run has to have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tilemesh.comm import run_threads
from tilemesh.data.corpus import open_corpus
from tilemesh.measure.trace import Trace
from tilemesh.methods.record import read_record, replay, standing
from tilemesh.methods.rules import Push
from tilemesh.methods.server import mean_update
from tilemesh.parallel import Mesh
from tilemesh.parallel.gradients import GradientStep
from tilemesh.parallel.mesh import Axis
from tilemesh.runs.names import SERVER_RECORDS
from tilemesh.train.config import TrainConfig
from tilemesh.train.optimizer import Optimizer
from tilemesh.train.rank import lay_model, make_stepper
from tilemesh.train.record import Recorder
from tilemesh.train.served import FlatWeights, WorkerSource, as_worker, served_shard


class Pushing(Optimizer):
    """Keeps what a worker would push."""

    pushed: torch.Tensor
    targets: float

    def update(self, rate: Any, done: GradientStep) -> GradientStep:
        gradients = [value.grad for value in self.stepped.values() if value.grad is not None]
        self.pushed, self.targets = torch.cat([gradient.reshape(-1) for gradient in gradients]), float(done.tokens)
        return done


def replayed(config: TrainConfig, folder: Path) -> dict[str, torch.Tensor]:
    """The weights that the records of a run's servers come to, by their names in a checkpoint."""
    here, servers, alone = torch.device("cpu"), config.method.servers, run_threads(1, lambda comm: comm)[0]
    laid = lay_model(as_worker(config), Mesh(alone), here, False)
    held = laid.gradients.stepped
    shards = [served_shard(config, held, number) for number in range(servers)]
    vectors, corpus = FlatWeights(held, servers), open_corpus(config.data)
    sources = [
        WorkerSource(config, corpus, Axis("dp", config.plan.dp, number, (0,), alone), here)
        for number in range(config.plan.dp)
    ]
    optimizer = Pushing(config.optimizer, held, config.plan.precision)
    stepper = make_stepper(config, laid, optimizer, sources[0], Recorder(Trace(None)))
    targets: dict[Push, float] = {}

    def gradient(push: Push, read: list[torch.Tensor]) -> list[torch.Tensor]:
        vectors.flat.copy_(torch.cat(read))
        stepper.source = sources[push.worker]
        stepper(push.clock + 1)
        targets[push] = optimizer.targets
        return [optimizer.pushed[cut].clone() for cut in vectors.cuts]

    def apply(server: int, pushes: Sequence[Push], gradients: list[torch.Tensor], scale: float) -> None:
        counts = [targets[push] for push in pushes]
        mean_update(shards[server], pushes, gradients, config.plan.dp, scale, counts)

    records = [standing(read_record(folder / SERVER_RECORDS / f"{number}.jsonl")) for number in range(servers)]
    replay(records, lambda server: shards[server].weights.clone(), gradient, apply)
    flat = torch.cat([shard.weights for shard in shards])
    return {f"weight:{name}": value for name, value in zip(vectors.held, vectors.split(flat), strict=True)}
