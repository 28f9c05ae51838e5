"""Published times of steps that learn from feedback: within a source, every pair is ranked as it was measured.

Sources say batches, longest answers and how many GPUs do what; none says how long answers were on average, so each
source's mean is ASSUMED, and ranks must be right over a range of it. Times themselves are not held to anything: what
they come to is in docs/plan/LOG.md.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tilemesh.core.described_gpu import DensePeaks, GpuDescription
from tilemesh.core.hardware import Cluster, parse_cluster
from tilemesh.core.placement import AlignWork, Placement, Pool
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig, preset
from tilemesh.plan.align import AlignEstimator
from tilemesh.plan.placements import search_placements
from tilemesh.plan.space import Pins

H20 = GpuDescription(
    "h20", "h100", memory_gib=96, bandwidth_tb_per_s=4.0, multiprocessors=78, tflops=DensePeaks(bf16=148, fp16=148)
).node
_LLAMA: dict[str, Any] = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "biases": False}
QWEN_7B = ModelConfig(vocabulary=152_064, context=32_768, layers=28, width=3584, heads=28, kv_heads=4, mlp_width=18_944,
                      tied=False, **_LLAMA)  # fmt: skip
QWEN_4B = ModelConfig(vocabulary=151_936, context=40_960, layers=36, width=2560, heads=32, kv_heads=8, head_width=128,
                      mlp_width=9728, tied=True, **_LLAMA)  # fmt: skip
FSDP = Pins(zero=3, tp=1, pp=1, cp=1, precision="bf16-master")


class Published(NamedTuple):
    """`drawing`: ranks that only draw answers; 0: all do everything in turn."""

    seconds: float
    cluster: str
    kind: str
    drawing: int = 0
    old: bool = True


class Source(NamedTuple):
    """Rows of one document: comparable with one another only."""

    document: str
    model: ModelConfig
    work: AlignWork
    """With the mean assumed."""
    means: tuple[int, ...]
    pins: Pins
    rows: tuple[Published, ...]


DAPO = AlignWork(prompts=512, answers=16, prompt=256, tokens=28_672, minibatches=16, epochs=1, reference=False)
SOURCES = (
    # 512 prompts x 16, minibatches of 32, answers of up to 28k tokens, H20; asynchronous steps take the engine's
    # log-probabilities for old ones.
    Source(
        "verl, docs/advance/fully_async.md", QWEN_7B, DAPO, (1500, 2500, 4000), FSDP,
        (
            Published(790, "32xh20", "colocated"), Published(365, "64xh20", "colocated"),
            Published(189, "64xh20", "asynchronous", 32, old=False),
        ),
    ),
    # Answers of up to 20,480 tokens; 480 prompts, which 12 ranks divide: the document says nothing of the batch.
    Source(
        "verl, docs/advance/one_step_off.md", QWEN_7B, replace(DAPO, prompts=480, tokens=20_480), (700, 1000, 1300),
        FSDP,
        (Published(749, "16xh20", "colocated"), Published(520, "16xh20", "one-step-off", 4)),
    ),
    # 2,048 answers per batch, minibatches of 512, sequences of 1,060 and 1,129 tokens on average (published).
    Source(
        "NeMo-RL 0.4, docs/about/performance-summary.md, Llama 3.1 8B on 16 H100", preset("llama-3-8b"),
        AlignWork(prompts=64, answers=32, prompt=160, tokens=3936, minibatches=4, epochs=1, reference=True),
        (800, 900, 1000), Pins(pp=2, tp=1),
        (Published(97.7, "16xh100", "colocated"), Published(74.6, "16xh100", "one-step-off", 8)),
    ),
    # The same for 30B-A3B on 32 H100, 3,154 tokens on average; the layout of release 0.4's colocated row, which leaves
    # open how experts lie over tp: cut. Whole ones (expert_tp=1) are predicted at 77.7 and 84.8 s, the other way round.
    Source(
        "NeMo-RL 0.6, Qwen3-30B-A3B on 32 H100", preset("qwen3-30b-a3b"),
        AlignWork(prompts=64, answers=32, prompt=256, tokens=3840, minibatches=4, epochs=1, reference=True),
        (2900,), Pins(zero=1, tp=2, pp=1, ep=8, expert_tp=0),
        (Published(192, "32xh100", "colocated"), Published(152, "32xh100", "one-step-off", 16)),
    ),
)  # fmt: skip


def cluster_of(name: str) -> Cluster:
    return parse_cluster(name, H20 if name.endswith("h20") else None)


def predicted_s(source: Source, row: Published, mean: int) -> float:
    work = replace(source.work, mean=mean, old=row.old)
    code = "compiled" if row.cluster.endswith("h20") else None
    estimator = AlignEstimator(source.model, cluster_of(row.cluster), work, code=code)
    return search_placements(estimator, (row.kind,), source.pins, drawing=row.drawing or None)[0].step.seconds


@pytest.mark.parametrize("source", SOURCES, ids=[source.document for source in SOURCES])
def test_every_pair_of_a_source_is_ranked_as_it_was_measured(source: Source) -> None:
    missed = []
    for mean in source.means:
        predicted = {row: predicted_s(source, row, mean) for row in source.rows}
        missed += [
            (mean, one, other)
            for one, other in itertools.combinations(source.rows, 2)
            if (one.seconds < other.seconds) != (predicted[one] < predicted[other])
        ]
    assert missed == []


def test_weights_go_to_engines_as_quickly_as_others_measured() -> None:
    """4B in 0.21 to 0.34 s and 30B in 0.74 to 1.0 s: each GPU of an engine receives its part once, over its adapter."""
    work, plan = AlignWork(prompts=64, answers=16, tokens=1024, reference=False), ParallelPlan(dp=4, tp=4)
    for model, tp, least, most in ((QWEN_4B, 1, 0.21, 0.34), (preset("qwen3-30b-a3b"), 2, 0.74, 1.0)):
        estimator = AlignEstimator(model, parse_cluster("32xh100"), work)
        plan = replace(plan, microbatch=4, accumulation=64, precision="bf16-master")
        split = Placement((Pool(16, ("actor",), plan), Pool(16, ("engine",), None, tp)))
        assert least <= estimator.predict(split).seconds["weight sync"] <= most
