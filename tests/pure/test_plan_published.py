"""Steps that others published of ordinary PyTorch (torchtitan: `fully_shard`, with and without torch.compile) are
predicted within 10 % in time and 5 % in memory, from a description of the hardware alone.

H100: benchmarks of December 2024 and June 2025 on boards of 96 GB, 2.4 TB/s and 500 W, as tokens/s and peak GiB of each
GPU. A100: its performance page of 2024, whose configuration for 64 of them does not compile. One constant was chosen
with these figures in view: what a board draws idle (`constants.IDLE_POWER`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tilemesh.core.described_gpu import GpuDescription, read_gpu
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import DEVICES, Cluster, parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.work.task import Code
from tilemesh.plan import predict
from tilemesh.plan.speed import speed_of

GIB = 2**30
BOARD = GpuDescription("h100-500w", "h100", memory_gib=96, bandwidth_tb_per_s=2.4, power_w=500)
LLAMA_3_8B, LLAMA_3_70B = preset("llama-3-8b"), preset("llama-3-70b")
LLAMA_2_13B = preset("llama-2-7b").replace(layers=40, width=5120, heads=40, kv_heads=40, mlp_width=13824)
LLAMA_2_70B = LLAMA_3_70B.replace(vocabulary=32000, context=4096)


class PublishedStep(NamedTuple):
    model: ModelConfig
    cluster: str
    code: Code
    plan: dict[str, Any]
    tokens_per_s: float
    """Of each GPU."""
    memory_gib: float | None = None


FSDP: dict[str, Any] = {"zero": 3, "precision": "bf16-master"}
TWO: dict[str, Any] = {**FSDP, "microbatch": 2, "recompute": "operators"}
STEPS = [
    PublishedStep(LLAMA_3_8B, "8xh100-500w", "eager", {"dp": 8, **TWO}, 5762, 82.4),
    PublishedStep(LLAMA_3_8B, "8xh100-500w", "compiled", {"dp": 8, **TWO}, 6667, 77.0),
    PublishedStep(LLAMA_3_8B, "128xh100-500w", "eager", {"dp": 128, **TWO}, 5605, 67.0),
    PublishedStep(LLAMA_3_8B, "128xh100-500w", "compiled", {"dp": 128, **TWO}, 6514, 62.0),
    PublishedStep(
        LLAMA_3_70B, "256xh100-500w", "compiled",
        {"dp": 32, "tp": 8, "sequence_parallel": True, "microbatch": 16, "recompute": "full", **FSDP}, 597,
    ),
    PublishedStep(LLAMA_3_8B, "64xa100", "eager", {"dp": 64, "recompute": "operators", **FSDP}, 2973),
    PublishedStep(LLAMA_3_70B, "64xa100", "eager", {"dp": 64, "recompute": "full", **FSDP}, 331),
    PublishedStep(LLAMA_2_13B, "64xa100", "eager", {"dp": 64, **TWO, "recompute": "none"}, 2162),
    PublishedStep(LLAMA_2_13B, "64xa100", "eager", {"dp": 64, **TWO}, 1904),
    PublishedStep(LLAMA_2_70B, "64xa100", "eager", {"dp": 64, "recompute": "operators", **FSDP}, 355),
    PublishedStep(LLAMA_2_70B, "64xa100", "eager", {"dp": 64, **TWO, "recompute": "full"}, 353),
]  # fmt: skip


def cluster_of(name: str) -> Cluster:
    return parse_cluster(name, BOARD.node if BOARD.name in name else None)


@pytest.mark.parametrize(
    "step", STEPS, ids=[f"{step.cluster} {step.code} {step.tokens_per_s:g} tokens/s" for step in STEPS]
)
def test_published_steps(step: PublishedStep) -> None:
    plan = ParallelPlan(**step.plan)
    found = predict(step.model, cluster_of(step.cluster), plan, code=step.code)
    assert found.tokens_per_s / plan.world == pytest.approx(step.tokens_per_s, rel=0.10)
    if step.memory_gib is not None:
        assert found.memory.total_bytes / GIB == pytest.approx(step.memory_gib, rel=0.05)


# ---- a GPU in a file --------------------------------------------------------------------------------------------


def test_a_described_gpu_is_the_one_it_is_like_but_for_what_is_said(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nlike = "a100"\n')
    (node,) = parse_cluster("4xmine", read_gpu(file)).nodes
    assert (node.count, node.device.kin) == (4, "a100-80")
    plan = ParallelPlan(dp=4, precision="bf16-master")
    mine, known = (
        predict(preset("tinyllama-1.1b"), cluster, plan)
        for cluster in (parse_cluster("4xmine", read_gpu(file)), parse_cluster("4xa100"))
    )
    assert (mine.step_time_s, mine.memory) == (known.step_time_s, known.memory)
    file.write_text(
        'name = "mine"\nlike = "a100"\nmemory_gib = 40\nbandwidth_tb_per_s = 1.555\nper_node = 16\n'
        "link_gb_per_s = 150\nnetwork_gb_per_s = 12.5\n[tflops]\nbf16 = 200\n"
    )
    cluster = parse_cluster("32xmine", read_gpu(file))
    node = cluster.node
    assert cluster.name == "2x16xmine"
    assert (node.device.memory_bytes, node.device.memory_bytes_per_s) == (40 * GIB, 1.555e12)
    assert (node.intra.bytes_per_s, node.inter_bytes_per_s_per_device) == (150e9, 12.5e9)
    assert parse_cluster("2x4xmine", read_gpu(file)).node.inter_bytes_per_s_per_device == 12.5e9
    assert node.device.peak("bf16") == 200e12
    assert node.device.peak("fp32") == DEVICES["a100-80"].peak("fp32")


def test_less_power_means_fewer_flops_and_more_changes_nothing() -> None:
    def rate(power_w: float | None) -> float:
        return speed_of(GpuDescription("mine", "h100", power_w=power_w).node.device, "bf16").flops_per_s

    assert rate(None) == rate(700) == rate(1000) == speed_of(DEVICES["h100"], "bf16").flops_per_s
    assert rate(400) == pytest.approx(rate(700) / 2)  # 300 of 600 W beyond what it draws idle
    assert rate(350) < rate(500) < rate(700)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('like = "h100"', "missing key 'name': expected text"),
        ('name = "mine"', "missing key 'like': expected text"),
        ('name = "Mine"\nlike = "h100"', "name is 'Mine': expected small letters, digits and -, such as h100-500w"),
        ('name = "h100"\nlike = "h100"', "name is 'h100', which is known already: give another, such as my-h100"),
        ('name = "mine"\nlike = "cpu"', "like is 'cpu': expected a GPU, one of t4, a10, a100-80, h100, h200, b200"),
        ('name = "mine"\nlike = "h1000"', "unknown device 'h1000'"),
        ('name = "mine"\nlike = "h100"\npower = 500', "unknown key 'power'"),
        ('name = "mine"\nlike = "h100"\npower_w = -5', "power_w is -5.0: expected a number above 0"),
        ('name = "mine"\nlike = "h100"\n[tflops]\nbf16 = 0', "tflops.bf16 is 0.0: expected a number above 0"),
        ('name = "mine"\nlike = "h100"\nper_node = 0', "per_node is 0: expected a whole number, between 1 and"),
    ],
)
def test_bad_descriptions_are_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "gpu.toml"
    file.write_text(text + "\n")
    with pytest.raises(UsageError) as refused:
        read_gpu(file)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_cluster_of_another_gpu_than_the_described_one_is_refused() -> None:
    with pytest.raises(UsageError, match="is of h100 and the GPU described is h100-500w: write 8xh100-500w"):
        parse_cluster("8xh100", BOARD.node)
