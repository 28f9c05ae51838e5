"""What the planner says of a run, before its first rank starts; and what this machine was measured to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilemesh.core import calibration
from tilemesh.core.busy import SECTION as BUSY
from tilemesh.core.busy import Busyness
from tilemesh.core.calibration import Rates
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import Cluster, device_for, parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.program import settled
from tilemesh.measure.machine import stamp, this_machine
from tilemesh.model.kernels import TORCH
from tilemesh.model.work.operations import model_flops
from tilemesh.model.work.task import Code
from tilemesh.plan.local import local_machine
from tilemesh.plan.prediction import prediction_figures
from tilemesh.plan.step import predict
from tilemesh.train.config import TrainConfig
from tilemesh.train.conflicts import may_replay
from tilemesh.train.served_prediction import served_figures


def predict_run(config: TrainConfig, gpus: Sequence[str]) -> dict[str, Any]:
    """Step time, memory and exchange share as the planner sees them; or why it cannot."""
    if config.lora.rank:
        return {"missing": "the planner: training adapters beside frozen weights is not modelled", **stamp()}
    on_gpu = bool(gpus) and config.train.device != "cpu"
    device = device_for(gpus[0]) if on_gpu else None
    try:
        try:
            here = local_machine(f"{config.plan.world}xlocal" + ("" if on_gpu else "-cpu"), this_machine())
            cluster: Cluster = here.cluster
            rates: Rates | None = here.rates
        except UsageError:  # a GPU that was not calibrated, or ranks on several machines: by its datasheet
            if device is None:
                raise
            cluster, rates = parse_cluster(f"{config.plan.world}x{device.name}"), None
        code: Code = "compiled" if config.train.compile else "eager"
        model, plan = config.model, settled(config.plan, config.model.layers)
        # On a CPU tilemesh's loss is torch's, from logits of all tokens.
        is_chunked = on_gpu and config.kernels_on("cuda").loss != TORCH
        prediction = predict(
            model,
            cluster,
            plan,
            config.context,
            rates=rates,
            code=code,
            graph=may_replay(config),
            chunked_loss=is_chunked,
        )
    except UsageError as error:
        return {"missing": f"the planner: {error}", **stamp()}
    return {
        **stamp(),
        **prediction_figures(prediction),
        "step_time_s": prediction.step_time_s,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "exchange_share": prediction.times.exposed_s / prediction.step_time_s,
        **(served_figures(config, prediction, cluster) if config.train.method == "server" else {}),
        "memory_bytes": prediction.memory.seen_bytes(cluster.device.kind),
        "limit_s": _limit_s(config, on_gpu),
        **_doubt(),
    }


def _doubt() -> dict[str, str]:
    """What disturbed the calibration that this comes from; nothing where nothing did."""
    known = calibration.find(this_machine().id)
    busy = None if known is None else Busyness.from_dict(known.extra.get(BUSY))
    return {} if busy is None or not busy.is_busy else {"calibration_busy": busy.words}


def compute_dtype(summary: Mapping[str, Any]) -> str:
    """What products of a run are made in."""
    return ParallelPlan(precision=summary["plan"]["precision"]).compute_dtype


def calibrated_peak(summary: Mapping[str, Any]) -> tuple[float | None, str]:
    """FLOP/s that all ranks' devices together were measured to reach, or why that is not known."""
    dtype = compute_dtype(summary)
    try:
        known = calibration.find(str(summary["machine"]))
    except RunError as error:
        return None, str(error)
    if known is None:
        return None, "this machine has no calibration: run `tilemesh calibrate` once"
    rates = known.all_cores if summary["device"] == "cpu" else known.gpu
    rate = None if rates is None else rates.matmul_flops_per_s.get(dtype)
    if rate is None:
        return None, f"no matmul in {dtype} was calibrated on this machine"
    return rate * (1 if summary["device"] == "cpu" else summary["world"]), ""


def _limit_s(config: TrainConfig, on_gpu: bool) -> float | None:
    """A step whose model FLOPs all ran at the calibrated peak: what the ranks weigh their compute against."""
    device = "cuda" if on_gpu else "cpu"
    known = {"plan": config.plan.to_dict(), "machine": this_machine().id, "device": device, "world": config.plan.world}
    peak, _ = calibrated_peak(known)
    return None if peak is None else model_flops(config.model, config.batch, config.context) / peak
