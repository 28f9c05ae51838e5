"""Steps that others published of experts, long sequences and fp8, predicted: half of them within 15 % in time, all that
say their memory within 5 %. Rows are data; nothing is chosen for one of them.

What a row leaves open follows a rule: recomputation is the least with which the layout is predicted to fit (None
below), stages are cut as Megatron cuts them. Two figures are not the planner's own. Attention of software of 2025 is
cuDNN's, as measured on an H200 (590 and 493 TFLOP/s). What a host needs for a layer with experts that drops no token
(`HOST_LAYER_S`) is fitted, on the one row that it holds up (marked, and not counted).
`python tests/pure/test_plan_oracles.py` prints the table that docs/plan/LOG.md has.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tilemesh.core.calibration import Rates
from tilemesh.core.described_gpu import GpuDescription
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan, Recompute
from tilemesh.model.config import preset
from tilemesh.model.work.operations import published_flops
from tilemesh.model.work.task import Code
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.prediction import Prediction
from tilemesh.plan.step import predict

LOG = Path(__file__).parents[2] / "docs" / "plan" / "LOG.md"
BOARD = GpuDescription("h100-500w", "h100", memory_gib=96, bandwidth_tb_per_s=2.4, power_w=500)
TITAN = Rates()
CUDNN = Rates(attention_flops_per_s={"forward-128": 590e12, "backward-128": 493e12})
HOST_LAYER_S = 9.44e-3
_NONE = 1e-9
MOE = dataclasses.replace(
    CUDNN,
    host_s={
        "llama-fused-passes-layer": HOST_LAYER_S, "llama-fused-passes": _NONE, "llama-fused-update-layer": _NONE,
        "llama-fused-update": _NONE, "exchange-call": _NONE,  # they are in the layer's
    },
)  # fmt: skip


class PublishedRow(NamedTuple):
    words: str
    source: str
    model: str
    cluster: str
    plan: dict[str, Any]
    context: int
    tokens_per_s: float
    """Of each GPU."""
    rates: Rates
    recompute: Recompute | None = None
    memory_gib: float | None = None
    code: Code = "fused"
    fitted: bool = False


def by_step(step_s: float, batch: int, context: int, gpus: int) -> float:
    return batch * context / step_s / gpus


def by_flops(model: str, context: int, tflops: float) -> float:
    """Of a table that counts as Megatron-Bridge does."""
    return tflops * 1e12 / published_flops(preset(model), context)


def fsdp(**settings: Any) -> dict[str, Any]:
    return {"zero": 3, **settings}


def staged(tp: int, pp: int, interleave: int, **settings: Any) -> dict[str, Any]:
    common = {"schedule": "interleaved", "zero": 1, "precision": "bf16-master"}
    return {**common, "tp": tp, "pp": pp, "interleave": interleave, "sequence_parallel": tp > 1, **settings}


QWEN, SMALL, ZOO = "qwen3-235b-a22b", "qwen3-30b-a3b", "Megatron-MoE-ModelZoo"
WHOLE: dict[str, Any] = {"expert_tp": 1}
CUT = (2, *(3,) * 30, 2)
"""94 layers, embedding and head in 96 places: 32 chunks of three."""
THIN = (1, *(2,) * 30, 1, *(1,) * 32)
"""The same in 96 chunks of one; here 64, as many layers on each stage."""
FSDP_QWEN = fsdp(
    dp=128, tp=2, ep=8, **WHOLE, microbatch=4, accumulation=4, sequence_parallel=True, precision="bf16-master"
)
BRIDGE_30 = {"dp": 8, "ep": 8, "accumulation": 128, "precision": "fp8"}
ROWS = [
    PublishedRow("Llama 3 8B fp8, FSDP", "Bridge 25.11", "llama-3-8b", "8xh100",
        fsdp(dp=8, accumulation=16, precision="fp8"), 8192, 14451, CUDNN),
    PublishedRow("Llama 3 70B fp8, TP 4 PP 8 VP 5", "Bridge 26.02", "llama-3-70b", "64xh100",
        staged(4, 8, 5, dp=2, accumulation=128, precision="fp8"), 8192, 1621, CUDNN),
    PublishedRow("Qwen3-30B-A3B fp8, PP 2 VP 12 EP 8", "Bridge", SMALL, "16xh100",
        staged(1, 2, 12, **BRIDGE_30), 4096, 5113, MOE),
    PublishedRow("same, VP 24, tokens dropped", "Bridge", SMALL, "16xh100",
        staged(1, 2, 24, **BRIDGE_30), 4096, 10494, CUDNN),
    PublishedRow("Qwen3-235B, TP 2 EP 8, FSDP", ZOO, QWEN, "256xh100",
        FSDP_QWEN, 4096, by_step(17.6, 2048, 4096, 256), MOE, "full"),
    PublishedRow("Qwen3-235B, TP 2 PP 8 VP 4 EP 32", ZOO, QWEN, "256xh100",
        staged(2, 8, 4, dp=16, ep=32, **WHOLE, accumulation=128, chunk_layers=CUT), 4096,
        by_step(19.7, 2048, 4096, 256), MOE),
    PublishedRow("Qwen3-235B, TP 2 PP 32 VP 3 EP 8", ZOO, QWEN, "256xh100",
        staged(2, 32, 2, dp=4, ep=8, **WHOLE, accumulation=512, chunk_layers=THIN), 4096,
        by_step(24.2, 2048, 4096, 256), MOE),
    PublishedRow("Qwen3-235B, TP 4 PP 8 VP 4 EP 8", ZOO, QWEN, "256xh100",
        staged(4, 8, 4, dp=8, ep=8, **WHOLE, accumulation=256, chunk_layers=CUT), 4096,
        by_step(29.0, 2048, 4096, 256), MOE, fitted=True),
    PublishedRow("same, 16k", ZOO, QWEN, "256xh100",
        staged(4, 8, 4, dp=8, ep=8, **WHOLE, accumulation=128, chunk_layers=CUT), 16384,
        by_flops(QWEN, 16384, 295), MOE),
    PublishedRow("same, 32k, CP 2", ZOO, QWEN, "256xh100",
        staged(4, 8, 4, dp=4, cp=2, ep=8, **WHOLE, accumulation=128, chunk_layers=CUT), 32768,
        by_flops(QWEN, 32768, 335), MOE),
    PublishedRow("Llama 3 8B fp8, 32k", "torchtitan", "llama-3-8b", "8xh100-500w",
        fsdp(dp=8, precision="fp8"), 32768, 3890, TITAN, "full", 83.9, "compiled"),
    PublishedRow("Llama 3 8B fp8, 65k, CP 2", "torchtitan", "llama-3-8b", "8xh100-500w",
        fsdp(dp=4, cp=2, precision="fp8"), 65536, 2540, TITAN, "full", 84.2, "compiled"),
    PublishedRow("Llama 3 8B fp8, batch 2", "torchtitan", "llama-3-8b", "8xh100-500w",
        fsdp(dp=8, microbatch=2, precision="fp8"), 8192, 8532, TITAN, "operators", None, "compiled"),
    PublishedRow("Llama 3 8B bf16, batch 1", "torchao", "llama-3-8b", "8xh100-500w",
        fsdp(dp=8, precision="bf16-master"), 8192, 6150, TITAN, "operators", 47.7, "compiled"),
    PublishedRow("Llama 3 8B fp8, batch 1", "torchao", "llama-3-8b", "8xh100-500w",
        fsdp(dp=8, precision="fp8"), 8192, 7689.5, TITAN, "operators", 47.7, "compiled"),
    *(
        PublishedRow(f"Llama 3 405B on {gpus:,}, TP 8 PP 16", "Llama 3 paper", "llama-3-405b", f"{gpus}xh100",
            staged(8, 16, 7, dp=gpus // 128, accumulation=accumulation), 8192,
            tflops * 1e12 / (6 * count_parameters(preset("llama-3-405b")).total), TITAN, "none")
        for gpus, accumulation, tflops in ((8192, 32, 430), (16384, 16, 400))
    ),
]  # fmt: skip
MISSES = {
    "Qwen3-30B-A3B fp8, PP 2 VP 12 EP 8": "likely launches: rows of each of 16 experts are padded and cast apart",
    "same, VP 24, tokens dropped": "how many tokens drop and are padded is not said; all are counted",
    "same, 16k": "what was recomputed is not said: everything would be -5 %",
    "Llama 3 8B fp8, 32k": "likely attention: cuDNN's is predicted; with FlashAttention-2's rate +5 %",
    "Llama 3 8B fp8, 65k, CP 2": "as above; with FlashAttention-2's rate +12 %",
}
"""Beyond 15 % in time, and what is known of why."""


def prediction(row: PublishedRow, told: float = 1.0) -> Prediction:
    """Benchmarks balance their routers (`told`); recomputed is what the row says, or the least that fits."""
    cluster = parse_cluster(row.cluster, BOARD.node if BOARD.name in row.cluster else None)
    imbalance = told if row.plan.get("ep", 1) > 1 else 0.0
    tried: list[Recompute] = [row.recompute] if row.recompute else ["none", "operators", "full"]
    plans = (ParallelPlan(**row.plan, recompute=recompute) for recompute in tried)
    found = (
        predict(preset(row.model), cluster, plan, row.context, rates=row.rates, code=row.code, imbalance=imbalance)
        for plan in plans
    )
    last = None
    for last in found:
        if last.fits:
            return last
    assert last is not None
    return last


@functools.cache
def predictions() -> dict[str, Prediction]:
    return {row.words + row.source: prediction(row) for row in ROWS}


def errors(row: PublishedRow) -> tuple[float, float | None]:
    """Of the step's time and of memory: predicted over published, less 1."""
    found = predictions()[row.words + row.source]
    memory = None if row.memory_gib is None else found.memory.total_bytes / 2**30 / row.memory_gib - 1
    return row.tokens_per_s * found.plan.world / found.tokens_per_s - 1, memory


def test_time_is_within_15_percent_at_the_median_and_misses_are_named() -> None:
    graded = {row.words: errors(row)[0] for row in ROWS if not row.fitted}
    assert statistics.median(map(abs, graded.values())) <= 0.15
    assert {words for words, error in graded.items() if abs(error) > 0.15} == set(MISSES)


@pytest.mark.parametrize("row", [row for row in ROWS if row.memory_gib], ids=lambda row: f"{row.source} {row.words}")
def test_memory_is_within_5_percent(row: PublishedRow) -> None:
    assert errors(row)[1] == pytest.approx(0, abs=0.05)


def test_layouts_of_one_model_come_in_the_published_order_but_for_one_pair() -> None:
    """Qwen3-235B at 4,096 tokens: PP 32 (24.2 s) is predicted before EP 32 (19.7 s), all others as published."""
    rows = [row for row in ROWS if row.model == QWEN and row.context == 4096]
    published = sorted(rows, key=lambda row: -row.tokens_per_s)
    predicted = sorted(rows, key=lambda row: -predictions()[row.words + row.source].tokens_per_s)
    assert [row.words[12:] for row in published] == [
        "TP 2 EP 8, FSDP", "TP 2 PP 8 VP 4 EP 32", "TP 2 PP 32 VP 3 EP 8", "TP 4 PP 8 VP 4 EP 8"
    ]  # fmt: skip
    assert predicted == [published[0], published[2], published[1], published[3]]


def test_real_routing_slows_the_longer_step_as_the_shorter_ones_imbalance_says() -> None:
    """295 to 237 TFLOP/s at 16k, on which the imbalance is fitted, and 335 to 277 at 32k, on which it is graded."""
    short, long = (row for row in ROWS if row.model == QWEN and row.context > 4096)

    def slower(row: PublishedRow, told: float) -> float:
        even = prediction(row)
        return prediction(row._replace(recompute=even.plan.recompute), told).step_time_s / even.step_time_s

    low, high = 1.0, 4.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if slower(short, middle) < 295 / 237 else (low, middle)
    assert 1.2 < low < 2.5
    assert slower(long, low) == pytest.approx(335 / 277, rel=0.05)


def table() -> str:
    lines = ["| row | source | published tokens/s per GPU | predicted | time | memory |", "|---|---|---|---|---|---|"]
    for row in ROWS:
        found, (time, memory) = predictions()[row.words + row.source], errors(row)
        predicted = found.tokens_per_s / found.plan.world
        how = f"{time:+.0%}".replace("%", " %")
        how = f"{how} (fitted)" if row.fitted else f"**{how}**" if abs(time) > 0.15 else how
        room = "" if memory is None else f"{found.memory.total_bytes / 2**30:.1f} for {row.memory_gib} GiB"
        lines.append(f"| {row.words} | {row.source} | {row.tokens_per_s:,.0f} | {predicted:,.0f} | {how} | {room} |")
    return "\n".join(lines)


def test_the_log_has_this_table() -> None:
    assert table() in LOG.read_text(), "python tests/pure/test_plan_oracles.py prints the table for docs/plan/LOG.md"


if __name__ == "__main__":
    print(table())
