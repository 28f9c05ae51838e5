"""The rows of `tilemesh bench train`: tokens per second of ours and of the peers, the planner's guess and the limit;
and the memory that each takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilemesh.bench.harness import NO_PEERS, OURS, Estimate, exactly, make_row
from tilemesh.bench.train.compare import TrainComparison
from tilemesh.core.cores import available_cores
from tilemesh.measure.row import CaseValue, Row
from tilemesh.measure.sample import Sample
from tilemesh.model.work.operations import model_flops
from tilemesh.train.config import TrainConfig
from tilemesh.train.predict import run_peak


def train_rows(
    config: TrainConfig,
    compared: TrainComparison,
    predicted: Mapping[str, Any],
    gpus: Sequence[str],
    also: Mapping[str, tuple[TrainConfig, Mapping[str, Any]]] | None = None,
) -> list[Row]:
    """Tokens per second and memory, ours beside the peers. `also`: ours with other settings and what was predicted of
    it, by the name it has in the comparison; a row each, beside ours."""
    on_gpu = bool(gpus) and config.train.device != "cpu"
    taken = {name: exactly(float(count)) for name, count in compared.memory_bytes.items()}
    no_bytes = "what the planner counts holds the libraries' own memory too, which is left out here"
    # Other settings may have another batch: a step of each is so many tokens of its own.
    tokens = {name: settings.tokens_per_step for name, (settings, _) in (also or {}).items()}
    ours = compared.ours.rate(config.tokens_per_step)
    rates = {name: step.rate(tokens.get(name, config.tokens_per_step)) for name, step in compared.peers.items()}
    row = _rate_row(config, ours, predicted, on_gpu, rates, compared.missing, {})
    memory = make_row(
        "train memory", _case(config), taken.pop(OURS), unit="B", peers=taken, missing=compared.missing,
        no_peers=NO_PEERS, predicted=Estimate(predicted.get("memory_bytes") if on_gpu else None, no_bytes),
        limit=Estimate(None, "no step was said to be the smallest possible"),
    )  # fmt: skip
    rows = [row, memory]
    for name, (settings, guess) in (also or {}).items():
        if name in rates:
            rows.append(_rate_row(settings, rates[name], guess, on_gpu, {OURS: ours}, {}, {"settings": name}))
    return rows


def _case(config: TrainConfig) -> dict[str, CaseValue]:
    plan = config.plan
    return {
        "layers": config.model.layers, "width": config.model.width, "batch": config.batch, "context": config.context,
        "dp": plan.dp, "tp": plan.tp, **({"pp": plan.pp, "schedule": plan.schedule_name} if plan.pp > 1 else {}),
        **({"zero": plan.zero} if plan.zero else {}), "precision": plan.precision, "cores": available_cores(),
        "compiled": bool(config.train.compile),
    }  # fmt: skip


def _rate_row(
    config: TrainConfig,
    measured: Sample,
    predicted: Mapping[str, Any],
    on_gpu: bool,
    peers: Mapping[str, Sample],
    missing: Mapping[str, str],
    labels: Mapping[str, CaseValue],
) -> Row:
    tokens, guess = config.tokens_per_step, predicted.get("step_time_s")
    peak, why = run_peak(config, on_gpu)
    flops = model_flops(config.model, config.batch, config.context)
    return make_row(
        "train", {**_case(config), **labels}, measured, unit="tokens/s",
        predicted=Estimate(None if guess is None else tokens / guess, str(predicted.get("missing"))),
        limit=Estimate(None if peak is None else tokens * peak / flops, why),
        peers=peers, missing=missing, no_peers=NO_PEERS,
    )  # fmt: skip
