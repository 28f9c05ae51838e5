"""The rows of `tilemesh bench train`: tokens per second of ours and of the peers, the planner's guess and the limit;
and the memory that each takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilemesh.bench.train.compare import OURS, TrainComparison
from tilemesh.core.cores import available_cores
from tilemesh.measure.machine import stamp, this_machine
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.model.work.operations import model_flops
from tilemesh.train.config import TrainConfig
from tilemesh.train.predict import calibrated_peak


def train_rows(
    config: TrainConfig, compared: TrainComparison, predicted: Mapping[str, Any], gpus: Sequence[str]
) -> list[Row]:
    """Tokens per second and memory, ours beside the peers."""
    plan, tokens = config.plan, config.tokens_per_step
    device = "cuda" if gpus and config.train.device != "cpu" else "cpu"
    known = {"plan": plan.to_dict(), "machine": this_machine().id, "device": device, "world": plan.world}
    peak, why = calibrated_peak(known)
    flops = model_flops(config.model, config.batch, config.context)
    guess = predicted.get("step_time_s")
    missing = dict(compared.missing)
    if guess is None:
        missing["predicted"] = str(predicted["missing"])
    if peak is None:
        missing["limit"] = why
    if not compared.peers and not compared.missing:
        missing["peers"] = "none was asked for"
    case: dict[str, str | int | float | bool | None] = {
        "layers": config.model.layers, "width": config.model.width, "batch": config.batch, "context": config.context,
        "dp": plan.dp, "tp": plan.tp, **({"pp": plan.pp, "schedule": plan.schedule_name} if plan.pp > 1 else {}),
        **({"zero": plan.zero} if plan.zero else {}), "precision": plan.precision, "cores": available_cores(),
        "compiled": bool(config.train.compile),
    }  # fmt: skip
    row = Row(
        name="train", case=case, unit="tokens/s", predicted=None if guess is None else tokens / guess,
        measured=compared.ours.rate(tokens), limit=None if peak is None else tokens * peak / flops,
        peers={name: sample.rate(tokens) for name, sample in compared.peers.items()}, missing=missing, **stamp(),
    )  # fmt: skip
    taken = {name: Sample.of([float(count)]) for name, count in compared.memory_bytes.items()}
    gone = dict(compared.missing) if compared.peers or compared.missing else {"peers": "none was asked for"}
    gone["predicted"] = "what the planner counts holds the libraries' own memory too, which is left out here"
    gone["limit"] = "no step was said to be the smallest possible"
    memory = Row(
        name="train memory", case=case, unit="B", predicted=None, measured=taken.pop(OURS), limit=None, peers=taken,
        missing=gone, **stamp(),
    )  # fmt: skip
    return [row, memory]
