"""`tilemesh bench exchange`: a step with gradients exchanged during backward, after it, and naively, as rows.

The rank's side is `exchange_rank.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tilemesh.bench.harness import Estimate, exactly, make_row
from tilemesh.launch import call
from tilemesh.measure.ranks import ranks_case
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample, equal
from tilemesh.model.config import ModelConfig, preset

_MODELS = {
    "small": ModelConfig(layers=4, width=256, heads=8, vocabulary=2048, context=256),
    "medium": ModelConfig(layers=8, width=512, heads=8, vocabulary=8192, context=256),
}
_NOT_PREDICTED = Estimate(None, "the planner's figures are of GPUs; this machine's compute was not calibrated with it")


def config_of(name: str) -> ModelConfig:
    return _MODELS[name] if name in _MODELS else preset(name)


def exchange_rows(ranks: int, transport: str, **settings: Any) -> list[Row]:
    """Rows of `settings` (model, rows, tokens, bucket_bytes, algorithm, repeats) on so many ranks."""
    taken = call(
        "tilemesh.bench.train.exchange_rank:on_a_rank", ranks, transport=transport,
        sink=lambda rank, stream, line: print(f"[{rank}] {line.decode(errors='replace')}", file=sys.stderr), **settings,
    )  # fmt: skip
    return rows_of(taken[0], ranks)


def rows_of(measured: Mapping[str, Any], ranks: int) -> list[Row]:
    """The step's row, its limit the step without any exchange; and how much of the exchange is hidden."""
    samples = {name: Sample(**sample) for name, sample in measured["samples"].items()}
    case = {**ranks_case(ranks), **measured["case"]}
    step = make_row(
        "step with gradient exchange", case, samples["bucketed"], predicted=_NOT_PREDICTED,
        limit=Estimate(samples["compute"].median),
        peers={"naive": samples["naive"], "after backward": samples["after"]},
    )  # fmt: skip
    fraction = hidden(samples)
    share = make_row(
        "exchange hidden behind backward", case, None if fraction is None else exactly(fraction), unit="fraction",
        predicted=_NOT_PREDICTED, limit=Estimate(1.0), no_peers="a ratio of our own times",
        missing={} if fraction is not None else {"measured": "the exchange is too small to be told from noise"},
    )  # fmt: skip
    return [step, share]


def hidden(samples: Mapping[str, Sample]) -> float | None:
    """The fraction of the exchange that is not seen in the step: 1 all of it, 0 none, below 0 it costs more.

    None where the exchange itself cannot be told from noise.
    """
    after, compute = samples["after"], samples["compute"]
    if equal(after, compute) or after.median < compute.median:
        return None
    return (after.median - samples["bucketed"].median) / (after.median - compute.median)
