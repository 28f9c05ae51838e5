"""The rows of `tilemesh bench train`: tokens per second of ours and of the peers, the planner's guess and the limit;
and the memory that each takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilemesh.bench.harness import NO_PEERS, OURS, Estimate, exactly, make_row
from tilemesh.bench.train.compare import TrainComparison
from tilemesh.core.cores import available_cores
from tilemesh.measure.machine import this_machine
from tilemesh.measure.row import CaseValue, Row
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
    case: dict[str, CaseValue] = {
        "layers": config.model.layers, "width": config.model.width, "batch": config.batch, "context": config.context,
        "dp": plan.dp, "tp": plan.tp, **({"pp": plan.pp, "schedule": plan.schedule_name} if plan.pp > 1 else {}),
        **({"zero": plan.zero} if plan.zero else {}), "precision": plan.precision, "cores": available_cores(),
        "compiled": bool(config.train.compile),
    }  # fmt: skip
    row = make_row(
        "train", case, compared.ours.rate(tokens), unit="tokens/s",
        predicted=Estimate(None if guess is None else tokens / guess, str(predicted.get("missing"))),
        limit=Estimate(None if peak is None else tokens * peak / flops, why),
        peers={name: sample.rate(tokens) for name, sample in compared.peers.items()}, missing=compared.missing,
        no_peers=NO_PEERS,
    )  # fmt: skip
    taken = {name: exactly(float(count)) for name, count in compared.memory_bytes.items()}
    memory = make_row(
        "train memory", case, taken.pop(OURS), unit="B", peers=taken, missing=compared.missing, no_peers=NO_PEERS,
        predicted=Estimate(None, "what the planner counts holds the libraries' own memory too, which is left out here"),
        limit=Estimate(None, "no step was said to be the smallest possible"),
    )  # fmt: skip
    return [row, memory]
