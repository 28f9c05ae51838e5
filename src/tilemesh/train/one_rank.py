"""One rank of a large job on the one device at hand: what it computes and holds, measured beside what is predicted.

The rank is laid, fed and stepped as in `tilemesh train`; its communicator is a mirror (`comm/runtime/mirror.py`), so
nothing is sent, and the exchanges' predicted time is added. Values mean nothing: neither weights nor a run are kept.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tilemesh.comm.runtime.mirror import mirror
from tilemesh.core.calibration import Rates
from tilemesh.core.cores import threads_for
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import Cluster, device_for, parse_cluster
from tilemesh.core.ranges import Range
from tilemesh.core.step.program import settled
from tilemesh.launch.rank import THREAD_VARIABLES
from tilemesh.measure.machine import stamp, this_machine, usable_gpus
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.model.fresh import draw
from tilemesh.parallel.gradients import read
from tilemesh.parallel.laid import Laid
from tilemesh.plan.local import local_machine
from tilemesh.plan.prediction import Prediction
from tilemesh.train.config import TrainConfig
from tilemesh.train.lessons import Lessons
from tilemesh.train.loop import WARM_UP_STEPS
from tilemesh.train.memory import peak_bytes
from tilemesh.train.predict import estimator, not_modelled
from tilemesh.train.rank import RankTask, choose_device, make_loop
from tilemesh.train.rows import layout_case

STEPS = WARM_UP_STEPS + 3
"""Those that compile and take memory are not measured."""
_NOT_SENT = "one rank alone: nothing is sent"
_NO_PEER = "a rank alone has no peer"


@dataclass(frozen=True)
class RankOfMany:
    """What is run: the rank, the cluster it would be on, and what the planner says of both."""

    config: TrainConfig
    cluster: Cluster
    rank: int
    predicted: Prediction
    """Of the job, all ranks at work."""
    alone: Prediction
    """Of a rank that has its cores, and a CPU's memory, for itself; on a GPU the same."""
    memory_bytes: int
    """Predicted of this rank's stage, as far as a run can see it."""
    host_s: float = 0.0
    """What the host needs to launch the rank's step; 0 where that was not measured."""

    @property
    def compute_s(self) -> float:
        return self._computing(self.alone)

    @property
    def beside_s(self) -> float:
        """Exchanges, and waiting for other stages."""
        return self.predicted.step_time_s - self._computing(self.predicted)

    def _computing(self, predicted: Prediction) -> float:
        """Of a predicted step, what is neither exchange nor waiting for other stages; no less than launching it."""
        times = predicted.times
        return max(predicted.step_time_s - times.exposed_s - times.bubble_s - times.host_s, self.host_s)


def rank_of_many(config: TrainConfig, cluster: str) -> RankOfMany:
    """The first rank of the stage whose passes take longest, on a cluster such as 8x8xh200, or 4xlocal-cpu."""
    if config.train.method != "synchronous":
        raise UsageError("--one-rank-of runs synchronous training: leave train.method out")
    if why := not_modelled(config):
        raise UsageError(f"--one-rank-of predicts a step of all ranks, and {why} is not modelled: train without it")
    machines, rates = _cluster(cluster, config.train.device)
    plan = config.plan
    if machines.world != plan.world:
        raise UsageError(
            f"--one-rank-of {cluster} is {machines.world} devices and the mesh has {plan.world} ranks: make them agree"
        )
    model = estimator(config, machines, rates)
    plan = settled(plan, config.model.layers)
    predicted = model.predict(plan)
    alone = model
    if machines.device.kind == "cpu":
        alone = estimator(config, *_without_others(machines.world), beside=1 - machines.world)
    stage = model.busiest_stage(plan)
    memory = alone.room.stages(plan, predicted.chunk_layers, (stage,))[0]
    rank = stage * (plan.world // plan.pp)
    seen_bytes = memory.seen_bytes(machines.device.kind)
    return RankOfMany(config, machines, rank, predicted, alone.predict(plan), seen_bytes, model.host_s(plan))


def _without_others(ranks: int) -> tuple[Cluster, Rates | None]:
    """So many ranks of a CPU, of which one alone computes, on the cores that it would have among them."""
    machine = this_machine()
    known = local_machine("1xlocal-cpu", replace(machine, cores=threads_for(ranks, machine.cores)))
    (node,) = known.cluster.nodes
    return Cluster((replace(node, count=ranks),)), known.rates


def _cluster(text: str, device: str) -> tuple[Cluster, Rates | None]:
    """With the rates that were measured of the device at hand, where the cluster is made of such."""
    if "local" in text:
        known = local_machine(text, this_machine())
        return known.cluster, known.rates
    cluster, gpus = parse_cluster(text), usable_gpus()
    here = device_for(gpus[0]) if gpus and device != "cpu" else None
    if here is None or here.name != cluster.device.name:
        gpu = f"a {here.name}" if here is not None else "no GPU"
        raise UsageError(
            f"--one-rank-of {text} needs a {cluster.device.name} here and there is {gpu}: name a cluster of the "
            "device at hand, such as 4xlocal-cpu"
        )
    try:
        return cluster, local_machine("1xlocal", this_machine()).rates
    except UsageError:  # not calibrated: by the datasheet
        return cluster, None


def run_one_rank(job: RankOfMany, say: Callable[[str], None] = lambda text: None, steps: int = STEPS) -> list[Row]:
    """Its rows: computing, memory, and the step with the exchanges as predicted, of so many steps in all."""
    Range(WARM_UP_STEPS + 1).check("stop_after", steps, whole=True)
    node = job.cluster.node.count
    comm = mirror(job.config.plan.world, job.rank, node_size=node)
    device = choose_device(job.config, comm)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
    if device.type == "cpu" and THREAD_VARIABLES[0] not in os.environ:
        torch.set_num_threads(threads_for(job.config.plan.world, this_machine().cores))
    baseline = 0 if device.type == "cuda" else peak_bytes(device)
    lessons, layers = Lessons(job.config), job.config.model.layers
    lessons.open()
    seconds = []
    with tempfile.TemporaryDirectory(prefix="tilemesh-") as folder:
        task = RankTask(job.config, Path(folder), initialize=partial(_draw_here, layers))
        loop = make_loop(task, comm, None, lessons, device)
        for step in range(1, steps + 1):
            began, exchanged = time.perf_counter(), loop.recorder.exchange_s()
            loop.recorder.step = step
            with loop.recorder.in_step():
                result = loop.stepper(step)
            read([result])  # which waits for it
            # What a mirror takes to fill in what it did not receive; on a GPU that is put on the stream, and stays.
            own = loop.recorder.exchange_s() - exchanged if device.type == "cpu" else 0.0
            if step > WARM_UP_STEPS:
                seconds.append(time.perf_counter() - began - own)
            say(f"step {step} of {steps}: {time.perf_counter() - began:.3f} s")
        peak = peak_bytes(device) - baseline
        loop.recorder.trace.close()
        loop.stepper.close()
    lessons.close()
    return _rows(job, Sample.of(seconds), peak)


@torch.no_grad()
def _draw_here(layers: int, laid: Laid) -> None:
    """Weights of the usual spread, this rank's part alone and on its device: drawn whole on the host, as a run draws
    them, those of 8 B parameters take minutes and on a GPU more memory than the rank ever does."""
    for name, (parameter, _) in laid.weights().items():
        draw(name, tuple(parameter.shape), 0, layers, parameter)


def _rows(job: RankOfMany, computing: Sample, peak: int) -> list[Row]:
    plan = job.predicted.plan
    case = {**layout_case(plan), "precision": plan.precision, "ranks": plan.world, "rank": job.rank}
    case |= {"batch": plan.batch, "context": job.config.context}
    added = job.beside_s
    step = Sample(computing.median + added, computing.p20 + added, computing.p80 + added, computing.n)
    limit_s = job.predicted.hardware_flops / job.predicted.peak_flops_per_s
    why = {"peers": _NO_PEER}
    no_limit = {**why, "limit": "depends on the layout"}
    figures = (
        ("computing of one rank", "s", job.compute_s, computing, limit_s, why),
        ("exchanges and waiting", "s", added, None, None, {**no_limit, "measured": _NOT_SENT}),
        ("step: computing + predicted exchanges", "s", job.compute_s + added, step, limit_s, why),
        ("peak memory per rank", "B", job.memory_bytes, Sample.of([float(peak)]), None, no_limit),
    )
    return [
        Row(
            name=name, case=case, unit=unit, predicted=float(guess), measured=measured, limit=limit, missing=missing,
            **stamp(),
        )
        for name, unit, guess, measured, limit, missing in figures
    ]  # fmt: skip
