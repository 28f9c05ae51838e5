"""What the planner says of a run, before its first rank starts; and what this machine was measured to reach."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tilemesh.core import calibration
from tilemesh.core.busy import SECTION as BUSY
from tilemesh.core.busy import Busyness
from tilemesh.core.calibration import Rates
from tilemesh.core.config import to_dict
from tilemesh.core.conflicts import refusals
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import Cluster, device_for, parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.program import settled
from tilemesh.measure.machine import stamp, this_machine
from tilemesh.methods.rules import bound_of
from tilemesh.methods.simulate import NAP_S, ServerTimes, simulate_server
from tilemesh.model.adapter import adapter_parameters
from tilemesh.model.config import ModelConfig
from tilemesh.model.kernels import TORCH
from tilemesh.model.work.operations import model_flops, peak_of_step
from tilemesh.model.work.routing import imbalance
from tilemesh.model.work.step_exchanges import step_exchanges
from tilemesh.model.work.task import Code, Task
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.choose import search
from tilemesh.plan.local import local_readings
from tilemesh.plan.prediction import Prediction, prediction_figures
from tilemesh.plan.ranges import MODEL_ERRORS, predicted_range
from tilemesh.plan.space import Pins
from tilemesh.plan.step import Estimator
from tilemesh.train.config import TrainConfig
from tilemesh.train.conflicts import OF_CONFIG, may_replay
from tilemesh.train.rules import kept_share

_CLOCKS = 40
_NAPS = 5
"""In which a message of a step is noticed half a nap late: a worker's push and pull, a server's two headers and a
gradient."""


def predict_run(config: TrainConfig, gpus: Sequence[str]) -> dict[str, Any]:
    """Step time, memory and exchange share as the planner sees them; or why it cannot."""
    if why := not_modelled(config):
        return {"missing": f"the planner: {why} is not modelled", **stamp()}
    on_gpu = bool(gpus) and config.train.device != "cpu"
    try:
        known = _clusters(config, gpus, on_gpu)
        plan = settled(config.plan, config.model.layers)
        own = estimator(config, *known[0])
        prediction, *others = own.predict(plan), *(estimator(config, *each).predict(plan) for each in known[1:])
    except UsageError as error:
        return {"missing": f"the planner: {error}", **stamp()}
    cluster, memory = known[0][0], prediction.memory
    own_bytes = round(memory.optimizer_bytes * kept_share(config.optimizer, plan.precision))
    prediction = dataclasses.replace(prediction, memory=dataclasses.replace(memory, optimizer_bytes=own_bytes))
    figures = {
        **stamp(),
        **prediction_figures(prediction),
        "step_time_s": prediction.step_time_s,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "exchange_share": prediction.times.exposed_s / prediction.step_time_s,
        **(_server_figures(config, prediction, cluster) if config.train.method == "server" else {}),
        **(_local_figures(config, prediction, own) if config.train.method == "local" else {}),
        "memory_bytes": prediction.memory.seen_bytes(cluster.device.kind),
        "limit_s": _limit_s(config, on_gpu),
        **_doubt(),
    }
    slower = [1.0, *(other.step_time_s / prediction.step_time_s for other in others)]
    values = {
        "step_time_s": [figures["step_time_s"] * ratio for ratio in slower],
        "memory_bytes": [figures["memory_bytes"]],
    }
    errors = MODEL_ERRORS[cluster.device.kind]
    ranges = {name: predicted_range(each, errors[name]) for name, each in values.items()}
    return {**figures, "ranges": {name: list(both) for name, both in ranges.items()}, "readings": len(known)}


def not_modelled(config: TrainConfig) -> str:
    """What a run computes that the planner knows nothing of; empty: nothing."""
    if config.lora.rank:
        return "training adapters beside frozen weights"
    if config.method.compress != "none":
        return f"what method.compress={config.method.compress} takes to make its messages"
    if config.distill.teacher is not None:
        return "what a teacher beside the student takes"
    if config.compress.recipe:
        return "what a recipe takes to round or mask weights in every pass"
    return "what Muon takes to make matrices orthogonal" if config.optimizer.name == "muon" else ""


def _clusters(config: TrainConfig, gpus: Sequence[str], on_gpu: bool) -> list[tuple[Cluster, Rates | None]]:
    """What a run's ranks are, once for each reading of a calibration."""
    device = device_for(gpus[0]) if on_gpu else None
    try:
        readings = local_readings(f"{config.plan.world}xlocal" + ("" if on_gpu else "-cpu"), this_machine())
        return [(each.cluster, each.rates) for each in readings]
    except UsageError:  # a GPU that was not calibrated, or ranks on several machines: by its datasheet
        if device is None:
            raise
        return [(parse_cluster(f"{config.plan.world}x{device.name}"), None)]


def best_layout(config: TrainConfig, gpus: Sequence[str]) -> tuple[ParallelPlan, float, float]:
    """Of as many ranks on this machine the layout that is predicted to be quickest, its step time, and that of the
    run's own. UsageError or RunError where the planner cannot."""
    cluster, rates = _clusters(config, gpus, bool(gpus) and config.train.device != "cpu")[0]
    own = estimator(config, cluster, rates)
    best = search(
        config.model, cluster, batch=config.batch, context=config.context, shown=1, rates=rates, code=own.code,
        pins=Pins(precision=config.plan.precision, attention=config.plan.attention), imbalance=own.imbalance,
        accepts=lambda plan: not list(refusals(OF_CONFIG, dataclasses.replace(config, plan=plan))),
    ).best.settled_plan  # fmt: skip
    then_s, now_s = (own.predict(plan).step_time_s for plan in (best, settled(config.plan, config.model.layers)))
    return best, then_s, now_s


def estimator(config: TrainConfig, cluster: Cluster, rates: Rates | None, beside: int = 0) -> Estimator:
    """The cost model of what a run is configured to compute. `rates`: what was measured of a device of the cluster;
    `beside`: as `Room`'s."""
    code: Code = "compiled" if config.train.compile else "eager"
    # On a CPU tilemesh's loss is torch's, from logits of all tokens.
    is_chunked = cluster.device.kind == "gpu" and config.kernels_on("cuda").loss != TORCH
    return Estimator(
        config.model, cluster, config.context, rates, code, may_replay(config), is_chunked,
        imbalance=_imbalance(config), beside=beside,
    )  # fmt: skip


def _imbalance(config: TrainConfig) -> float:
    """Of ranks that share out experts, as `Estimator` takes it: by how often tokens of this run's text are the same,
    where nothing evens its routers out."""
    model, plan = config.model, config.plan
    if config.train.force_balance or plan.ep == 1 or model.balance_loss:
        return float(config.train.force_balance)
    from tilemesh.data.corpus import equal_tokens  # reads text, with numpy

    return imbalance(model, Task.of(plan, config.context), equal_tokens(config.data))


def _server_figures(config: TrainConfig, predicted: Prediction, cluster: Cluster) -> dict[str, Any]:
    """What differs from the prediction for data parallelism, by the same names: the simulator of servers that take one
    message at a time, with what the planner says a worker computes and the link between ranks.

    `exchanges` count one worker's bytes of weights and of gradients in a step, to all servers together.
    """
    method, workers = config.method, config.plan.dp
    trained = (
        adapter_parameters(config.model, config.lora) if config.lora.rank else count_parameters(config.model).total
    )
    nbytes = trained * (8 if config.plan.precision == "fp64" else 4)
    inside_s = predicted.times.exposed_s - predicted.times.dp_s
    computing_s = predicted.times.total_s - predicted.times.dp_s - predicted.times.optimizer_s
    link = cluster.node.intra
    copied_s = 2 * nbytes / cluster.device.memory_bytes_per_s
    on_the_way_s = 2 * nbytes / method.servers / link.bytes_per_s + 4 * link.latency_s + _NAPS * NAP_S / 2
    times = ServerTimes(copied_s, copied_s + predicted.times.optimizer_s, on_the_way_s / 4, method.servers)
    bound = bound_of(method.consistency, method.staleness)
    run = simulate_server(workers, _CLOCKS, lambda worker, clock: computing_s, bound, times, method.batch)
    step_s = workers / run.throughput
    outside_s = step_s - computing_s
    return {
        **_in_steps_of(predicted, step_s, inside_s + outside_s),
        "times": {**dataclasses.asdict(predicted.times), "dp_s": outside_s, "optimizer_s": 0.0},
        "traffic": {**_inside(predicted.traffic), "server": nbytes},
        "exchanges": {**_inside(predicted.exchanges), "server": {"push": nbytes, "pull": nbytes}},
    }


def _local_figures(config: TrainConfig, predicted: Prediction, own: Estimator) -> dict[str, Any]:
    """What differs where replicas step by themselves and average their weights: times and traffic are means over the
    run's steps; `exchanges` are those of its first step, which a run counts."""
    method, plan, steps = config.method, predicted.plan, config.train.steps
    if method.period == 1:  # gradients are exchanged instead
        return {}
    alone = dataclasses.replace(plan, dp=1)
    together, inside = min(method.start, steps), own.data_exchange(alone)
    rounds = math.ceil((steps - together) / method.period)
    replicas = own.clock.group(plan.dp, plan.tp * plan.cp)
    nbytes = own.updated_parameters(plan) * (8 if plan.precision == "fp64" else 4)
    round_s, round_bytes = replicas.exchange_s("all_reduce", nbytes), replicas.sent_bytes(nbytes, "all_reduce")

    def mean(common: float, inside: float, averaged: float) -> float:
        return (together * common + (steps - together) * inside + rounds * averaged) / steps

    dp_s = mean(predicted.times.dp_s, inside.exposed_s, round_s)
    saved_s = predicted.times.dp_s - dp_s
    task = own.room.task(alone)
    return {
        **_in_steps_of(predicted, predicted.step_time_s - saved_s, predicted.times.exposed_s - saved_s),
        "times": {**dataclasses.asdict(predicted.times), "dp_s": dp_s},
        "traffic": {**predicted.traffic, "dp": mean(predicted.traffic["dp"], inside.sent_bytes, round_bytes)},
        "exchanges": predicted.exchanges
        if together
        else step_exchanges(config.model, alone, task, predicted.chunk_layers),
    }


def _in_steps_of(predicted: Prediction, step_s: float, exposed_s: float) -> dict[str, Any]:
    """What follows from another step time, of which so much is communication that nothing hides."""
    slower = predicted.step_time_s / step_s
    return {
        "step_time_s": step_s,
        "tokens_per_s": predicted.tokens / step_s,
        "mfu": predicted.mfu * slower,
        "hfu": predicted.hfu * slower,
        "exchange_share": exposed_s / step_s,
        "exposed_communication_s": exposed_s,
    }


def _inside(moved: dict[str, Any]) -> dict[str, Any]:
    """What the ranks of a worker exchange among themselves."""
    return {axis: nbytes for axis, nbytes in moved.items() if axis != "dp"}


def _doubt() -> dict[str, str]:
    """What disturbed the calibration that this comes from; nothing where nothing did."""
    known = calibration.find(this_machine().id)
    busy = None if known is None else Busyness.from_dict(known.extra.get(BUSY))
    return {} if busy is None or not busy.is_busy else {"calibration_busy": busy.words}


def products_of(summary: Mapping[str, Any]) -> ParallelPlan:
    """What a run's plan says of its products."""
    return ParallelPlan(**{key: summary["plan"][key] for key in ("precision", "fp8_scales") if key in summary["plan"]})


def calibrated_peak(summary: Mapping[str, Any]) -> tuple[float | None, str]:
    """FLOP/s of all ranks' devices together at the rates that were measured of them (`peak_of_step`), or why that is
    not known."""
    plan, is_cpu = products_of(summary), summary["device"] == "cpu"
    if is_cpu:  # which emulates products in 8 bits
        plan = ParallelPlan(precision="bf16" if plan.precision == "fp8" else plan.precision)
    try:
        known = calibration.find(str(summary["machine"]))
    except RunError as error:
        return None, str(error)
    if known is None:
        return None, "this machine has no calibration: run `tilemesh calibrate` once"
    rates = known.all_cores if is_cpu else known.gpu
    peaks = {} if rates is None else rates.matmul_flops_per_s
    for dtype in (plan.compute_dtype, plan.peak_dtype):
        if dtype not in peaks:
            return None, f"no matmul in {dtype} was calibrated on this machine"
    peak = peak_of_step(ModelConfig(**summary["model"]), int(summary["context"]), plan, peaks)
    return peak * (1 if is_cpu else summary["world"]), ""


def _limit_s(config: TrainConfig, on_gpu: bool) -> float | None:
    """A step whose model FLOPs all ran at the calibrated peak: what the ranks weigh their compute against."""
    peak, _ = run_peak(config, on_gpu)
    return None if peak is None else model_flops(config.model, config.batch, config.context) / peak


def run_peak(config: TrainConfig, on_gpu: bool) -> tuple[float | None, str]:
    """`calibrated_peak` of a run on this machine."""
    return calibrated_peak(
        {
            "plan": config.plan.to_dict(), "machine": this_machine().id, "device": "cuda" if on_gpu else "cpu",
            "world": config.plan.world, "model": to_dict(config.model), "context": config.context,
        }
    )  # fmt: skip
