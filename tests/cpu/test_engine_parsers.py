"""What is written for other engines, read by their own parsers and, of DeepSpeed and accelerate, run: where they are
installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig, preset
from tilemesh.plan.engines.engine import EngineJob, OtherEngine
from tilemesh.plan.engines.tables import ACCELERATE, DEEPSPEED, ENGINES, MEGATRON, TORCHTITAN
from tilemesh.plan.engines.write import LAUNCH, engine_files

pytest.importorskip("transformers")
SCRIPT = Path(__file__).with_name("engine_script.py")
PLANS = (
    ParallelPlan(dp=8, tp=2, sequence_parallel=True, zero=2, microbatch=2, accumulation=4),
    ParallelPlan(dp=8, tp=2, zero=3, accumulation=2, recompute="full"),
    ParallelPlan(dp=16, zero=3, zero_group=8, recompute="operators"),
    ParallelPlan(dp=2, tp=2, pp=4, accumulation=8, schedule="interleaved", interleave=2, sequence_parallel=True),
    ParallelPlan(dp=4, pp=4, zero=3, accumulation=8, chunk_layers=(7, 9, 9, 7)),
    ParallelPlan(dp=4, pp=4, zero=1, accumulation=8, chunk_layers=(7, 9, 9, 7), precision="bf16-master"),
    ParallelPlan(dp=8, pp=2, accumulation=8, schedule="interleaved", interleave=4, precision="bf16-master"),
    ParallelPlan(dp=16, zero=3, offload="optimizer+weights", precision="bf16-master", recompute="full"),
    ParallelPlan(dp=8, tp=2, zero=1, precision="bf16-master", accumulation=4),
    ParallelPlan(dp=16, precision="fp32"),
    ParallelPlan(dp=16, zero=3, zero_group=8, recompute="full"),
)


def jobs(name: str) -> Iterator[EngineJob]:
    made = (EngineJob(preset("llama-3-8b"), plan, parse_cluster("2x8xh100"), 8192, "llama-3-8b") for plan in PLANS)
    ours = [job for job in made if not any(ENGINES[name].why_not(job))]
    assert len(ours) >= 2
    return iter(ours)


def test_torchtitan() -> None:
    for needed in ("tyro", "torchtitan", "torchdata", "datasets"):
        pytest.importorskip(needed)
    from torchtitan.config import ConfigManager

    for job in jobs("torchtitan"):
        lines = engine_files(TORCHTITAN, job, "")[LAUNCH].partition("torchtitan.train")[2].replace("\\\n", " ")
        config = ConfigManager().parse_args([word for word in shlex.split(lines) if word != "$@"])
        layout, plan = config.parallelism, job.plan
        degrees = (layout.data_parallel_replicate_degree, layout.data_parallel_shard_degree)
        assert degrees[0] * degrees[1] == plan.dp
        assert (layout.tensor_parallel_degree, layout.pipeline_parallel_degree) == (plan.tp, plan.pp)
        parts = layout.module_fqns_per_model_part
        assert (parts is None) == (plan.pp == 1)
        assert parts is None or [sum("layers" in name for name in part) for part in parts] == list(
            plan.chunk_layers or [32 // plan.chunks] * plan.chunks
        )
        assert (config.activation_checkpoint is None) == (plan.recompute == "none")


def test_megatron() -> None:
    core = pytest.importorskip("megatron.core.transformer")
    import dataclasses

    import torch

    fields = {field.name for field in dataclasses.fields(core.TransformerConfig)}
    for job in jobs("megatron"):
        flags = {name.replace("-", "_"): value for name, value in MEGATRON.values(job).items()}
        known = {name: value for name, value in flags.items() if name in fields and name != "attention_backend"}
        assert len(known) >= 10
        config = core.TransformerConfig(
            **known, gated_linear_unit=True, add_bias_linear=False, pipeline_dtype=torch.bfloat16
        )
        assert (config.num_layers, config.num_query_groups, config.hidden_size) == (32, 8, 4096)
        layout = config.pipeline_model_parallel_layout
        if layout is not None:
            # by stage and by chunk, the kinds of its layers
            counts = [sum(kind.name == "decoder" for kind in chunk) for stage in layout.layout for chunk in stage]
            assert counts == list(job.plan.chunk_layers)


def test_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import config as theirs

    for job in jobs("deepspeed"):
        monkeypatch.setattr(theirs.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(theirs.dist, "get_world_size", lambda plan=job.plan: plan.world)
        read = theirs.DeepSpeedConfig(json.loads(engine_files(DEEPSPEED, job, "")[DEEPSPEED.file]))
        assert (read.train_batch_size, read.gradient_accumulation_steps) == (
            job.plan.batch * job.plan.tp,  # it counts all ranks
            job.plan.accumulation,
        )
        assert int(read.zero_config.stage) == job.plan.zero
        assert (read.zero_config.offload_optimizer is not None) == ("optimizer" in job.plan.offloads)


def test_accelerate(tmp_path: Path) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate import ParallelismConfig

    for job in jobs("accelerate"):
        path = tmp_path / ACCELERATE.file
        path.write_text(engine_files(ACCELERATE, job, "")[ACCELERATE.file])
        words = [
            "--config_file",
            str(path),
            "--machine_rank",
            "1",
            "--main_process_ip",
            "a",
            "--main_process_port",
            "1",
        ]
        args, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args([*words, "s.py"]))
        assert (args.num_processes, args.num_machines, args.use_fsdp) == (16, 2, job.plan.zero > 1)
        if job.plan.zero > 1:
            sizes = {
                name: getattr(args, f"parallelism_config_{name}")
                for name in ("dp_replicate_size", "dp_shard_size", "tp_size")
            }
            assert ParallelismConfig(**sizes).total_size == 16
            assert (args.fsdp_version, args.fsdp_reshard_after_forward) == (2, job.plan.zero == 3)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("engine", "zero"), [(DEEPSPEED, 2), (ACCELERATE, 0)], ids=["deepspeed", "accelerate"])
def test_two_ranks_lose_what_one_process_does(engine: OtherEngine, zero: int, tmp_path: Path) -> None:
    if importlib.util.find_spec(engine.name) is None:
        pytest.skip(f"{engine.name} is not installed")
    plan = ParallelPlan(dp=2, zero=zero, accumulation=2, precision="fp32")
    model = ModelConfig(layers=2, width=32, heads=2, vocabulary=64, context=16)
    job = EngineJob(model, plan, parse_cluster("2xcpu"), 16, "small")
    assert not any(engine.why_not(job))
    for file, text in engine_files(engine, job, "").items():
        (tmp_path / file).write_text(text)
    for word, module in (("torchrun", "torch.distributed.run"), ("accelerate", "accelerate.commands.accelerate_cli")):
        (tmp_path / word).write_text(f'#!/bin/bash\nexec {sys.executable} -m {module} "$@"\n')
        (tmp_path / word).chmod(0o755)
    there = {"SCRIPT": str(SCRIPT), "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ours, theirs = tmp_path / "plain.json", tmp_path / "theirs.json"
    subprocess.run([sys.executable, SCRIPT, "plain", ours], check=True, timeout=300)
    words = ["bash", tmp_path / LAUNCH, engine.name, theirs]
    subprocess.run(words, check=True, timeout=300, env=dict(os.environ) | there)
    # Sums of a few hundred float32 products in another order, four steps.
    assert json.loads(theirs.read_text()) == pytest.approx(json.loads(ours.read_text()), rel=1e-5)
