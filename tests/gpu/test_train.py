"""Training on a GPU: resumed bit for bit with deterministic=true, a replayed step as a launched one; bad losses."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tilemesh.core.errors import RunError
from tilemesh.runs.files import read_object
from tilemesh.runs.manifest import Manifest, folder_name
from tilemesh.runs.metrics import latest
from tilemesh.runs.names import CHECKPOINTS, CHOICES, SUMMARY
from tilemesh.train import graph
from tilemesh.train.config import TrainConfig
from tilemesh.train.job import fit
from tilemesh.train.load import load

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SMALL = (
    "model.layers=3,model.width=256,model.heads=4,model.context=128,train.steps=12,train.batch=8,plan.microbatch=4,"
    "checkpoint.every=6,evaluate.every=6,sample.tokens=16,optimizer.warmup=2,train.deterministic=true"
)


def made(*sets: str) -> TrainConfig:
    return load(mesh="dp=1", sets=[SMALL, *sets], gpus=1)


def digests(folder: Path, step: int) -> list[str]:
    return [one.sha256 for one in Manifest.read(folder / CHECKPOINTS / folder_name(step)).files]


@pytest.mark.parametrize(
    "sets",
    [
        "plan.precision=bf16",
        "plan.precision=bf16-master,plan.recompute=full,plan.recompute_every=2",
        "plan.precision=bf16,train.compile=true,plan.microbatch=8",  # one microbatch: weights of products are 16-bit
        "plan.precision=bf16,train.compile=true,plan.offload=activations+weights",
        "plan.precision=fp16",
        "plan.precision=bf16,model.dropout=0.1",
    ],
)
def test_stopped_and_resumed_is_never_stopped(sets: str, tmp_path: Path) -> None:
    config = made(sets)
    whole = fit(config, run=tmp_path / "whole")
    fit(config, run=tmp_path / "parts", stop_after=5)
    parts = fit(resume=tmp_path / "parts")
    assert (whole.step, parts.step) == (12, 12)
    assert digests(tmp_path / "whole", 12) == digests(tmp_path / "parts", 12)
    ours, theirs = (
        [line["loss"] for line in latest(tmp_path / name) if line["kind"] == "step"] for name in ("whole", "parts")
    )
    assert ours == theirs
    assert whole.loss < 5.0


@pytest.mark.parametrize(
    "sets",
    [
        "plan.precision=bf16",
        "plan.precision=bf16-master,plan.recompute=full,plan.recompute_every=2,evaluate.every=2",
        "plan.precision=bf16,train.compile=true,model.dropout=0.1",
        "plan.precision=fp32,optimizer.name=sgd,optimizer.lr=0.1,checkpoint.every=1",
        "plan.precision=fp64,optimizer.clip=0",
        "plan.precision=bf16,train.kernels=tilemesh",
        "plan.precision=bf16,train.kernels=tilemesh,train.compile=layers",
        "plan.precision=bf16,model.experts=8,model.biases=false,model.balance_loss=0.01",
        "plan.precision=bf16-master,model.experts=4,model.biases=false,plan.recompute=full,train.kernels=tilemesh",
    ],
)
def test_a_replayed_step_is_the_launched_one(sets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, while held-out text is read and checkpoints are written in between."""
    config = made(sets, "train.steps=8,checkpoint.keep=1")
    replays = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", _counted(torch.cuda.CUDAGraph.replay, replays))
    fit(config, run=tmp_path / "replayed")
    assert len(replays) == 8 - graph.PLAIN_STEPS
    assert read_object(tmp_path / "replayed" / CHOICES)["graph"] is True
    monkeypatch.setattr(graph, "PLAIN_STEPS", 100)
    torch.compiler.reset()  # what was compiled before decides what is compiled anew, and so the rounding
    fit(config, run=tmp_path / "launched")
    assert len(replays) == 8 - 2
    assert digests(tmp_path / "replayed", 8) == digests(tmp_path / "launched", 8)
    ours, theirs = (
        [
            (line["loss"], line["norm"], line.get("held_out"))
            for line in latest(tmp_path / name)
            if line["kind"] == "step"
        ]
        for name in ("replayed", "launched")
    )
    assert ours == theirs
    torch.compiler.reset()
    fit(made(sets, "train.steps=8,checkpoint.keep=1,train.graph=false"), run=tmp_path / "plain")
    assert len(replays) == 8 - 2
    assert digests(tmp_path / "replayed", 8) == digests(tmp_path / "plain", 8)


def _counted(replay: Callable[[Any], None], replays: list[int]) -> Callable[[Any], None]:
    def counted(self: Any) -> None:
        replays.append(1)
        replay(self)

    return counted


def test_a_gpu_that_is_nearly_full_keeps_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "REPLAY_ROOM", 0.0)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", None)
    assert fit(made("plan.precision=bf16,train.steps=4"), run=tmp_path / "run").step == 4


def test_a_gpu_that_is_nearly_full_keeps_the_graph_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "REPLAY_ROOM", 0.0)
    fit(made("plan.precision=bf16,train.steps=4,train.graph=true"), run=tmp_path / "run")
    assert read_object(tmp_path / "run" / CHOICES)["graph"] is True


WORKSPACE_BYTES = 32 << 20
"""What cuBLAS keeps for each (thread, stream) that ever multiplied, on Hopper and with train.deterministic."""


def test_a_second_run_in_a_process_counts_its_own_memory(tmp_path: Path) -> None:
    """Its peak, less what others left in this process before; and a run leaves nothing behind but workspaces.

    Of each parameter 16 bytes (weight, gradient, two moments) and 2 of a bf16 copy: 35.9 M x 18 = 647 MB for the large
    model, 2.5 M x 18 = 45 MB for the small one. To either come the activations of 4 x 128 tokens, a few tens of MB, and
    workspaces of cuBLAS and cuBLASLt: two threads (forward, backward) on two streams (the current one, the captures').
    """
    own, before = [], []
    for name, width in (("large", 1024), ("small", 256)):
        gc.collect()
        before.append(torch.cuda.memory_allocated())
        fit(made(f"plan.precision=bf16,train.steps=4,model.width={width}"), run=tmp_path / name)
        [peak] = read_object(tmp_path / name / SUMMARY)["peak_memory_bytes"]
        own.append(peak - before[-1])
    assert own[1] < own[0] / 2
    assert before[1] - before[0] <= 8 * WORKSPACE_BYTES  # less than half of what the large model takes


def test_a_bad_loss_is_found_and_its_step_named_though_steps_are_not_waited_for(tmp_path: Path) -> None:
    config = made("plan.precision=bf16,optimizer.lr=1e30,optimizer.warmup=0,optimizer.clip=0")
    with pytest.raises(RunError, match=r"step [23]: (loss|the gradient)"):
        fit(config, run=tmp_path / "run")
    assert list((tmp_path / "run").glob("bad-batch-step-*"))


def test_a_step_that_cannot_be_captured_says_so(tmp_path: Path) -> None:
    """In a process of its own: what a capture that failed leaves behind is nobody else's."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; from tilemesh.parallel.laid import Laid; from tilemesh.train.load import load\n"
        "from tilemesh.train.job import fit\n"
        "loss = Laid.loss\n"
        "def waits(self, *args, **options):\n"
        "    total, count = loss(self, *args, **options)\n"
        "    float(total)\n"
        "    return total, count\n"
        "Laid.loss = waits\n"
        f"fit(load(mesh='dp=1', sets=[{SMALL!r}], gpus=1), run=sys.argv[1])\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode
    assert "the step cannot be captured in a CUDA graph" in done.stderr
    assert "train.graph=false" in done.stderr
