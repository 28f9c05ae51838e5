"""Kernels of an engine's steps are known before its weights, and who fails to compile them costs time alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tilemesh.kernels import context
from tilemesh.kernels.launch import call, compile_ahead
from tilemesh.kernels.launch.call import operands_of
from tilemesh.kernels.launch.program import Operand, describe
from tilemesh.kernels.launch.rehearsal import rehearse
from tilemesh.model.config import ModelConfig
from tilemesh.model.fresh import give_memory
from tilemesh.model.transformer import Transformer
from tilemesh.serve import ahead
from tilemesh.serve.config import EngineConfig
from tilemesh.serve.device_steps import PlainCalls
from tilemesh.serve.runner import Runner
from tilemesh.serve.scheduler import ServeLimits

LIMITS = ServeLimits(pages=16, context=64, step_tokens=128, chunk_tokens=128, running=3)
CPU = torch.device("cpu")


def _model() -> Transformer:
    config = ModelConfig(
        layers=3, width=64, heads=4, kv_heads=2, vocabulary=96, context=64, mlp_width=128, norm="rmsnorm",
        positions="rotary", activation="swiglu", biases=False,
    )  # fmt: skip
    return Transformer(config, device="meta", dtype=torch.float64).eval().requires_grad_(False)


def _runner(model: Transformer) -> Runner:
    give_memory(model, CPU, together=True)
    return Runner(model, LIMITS, CPU, implementation="interpret", graphs=PlainCalls(), packed=False)


def test_a_rehearsal_finds_what_steps_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two of three layers, without weights, and in float64, which no C function of a CPU takes. What is launched is
    noted by whoever would interpret it."""
    launched: set[tuple[object, ...]] = set()

    def note(program: call.Interpreted, tensors: Sequence[torch.Tensor]) -> None:
        given = dict(zip(program.names, tensors, strict=True))
        places = {name: call.place_of(tensor) for name, tensor in given.items()}
        launched.update(describe(step, operands_of(program.plan, places)).key for step in program.plan.steps)
        for name in program.written:
            given[name].zero_()

    def take_steps(model: Transformer) -> None:
        model.layers = torch.nn.ModuleList(ahead._different_layers(model))
        assert len(model.layers) == 2
        steps = _runner(model).ahead
        assert steps is not None
        steps.rehearse()

    monkeypatch.setattr(call.Interpreted, "launch", note)
    with context.use(context.Context(on_cpu="interpret")), torch.inference_mode():
        plans = rehearse(lambda: take_steps(_model()), CPU)
        assert not launched
        steps = _runner(_model()).ahead
        assert steps is not None
        steps.prepare_all()
    found = {describe(step, operands_of(plan, places)).key for plan, places in plans for step in plan.steps}
    assert found == launched
    assert len(found) > 5


def test_a_kernel_is_handed_over_once_and_as_it_will_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    step_of = {}

    def twice(function: Any, device: torch.device) -> list[Any]:
        from tilemesh.kernels.likeliest import draw

        place = call.Place((4, 96), (96, 1), "float32", True)
        rows = call.Place((4,), (1,), "float64", True)
        tokens = call.Place((4,), (1,), "int64", True)
        names = {"logits": place, "temperature": rows, "uniform": rows, "tokens": tokens, "scores": rows}
        plan = draw.plan(names)
        step_of["step"] = plan.steps[0]
        return [(plan, names), (plan, names)]

    monkeypatch.setattr("tilemesh.kernels.launch.rehearsal.rehearse", twice)
    (job,) = ahead.kernel_jobs(_model(), LIMITS, CPU, ("cuda", 90, 32))
    step, operands = compile_ahead._own_step(json.loads(json.dumps(job)))
    assert step == step_of["step"]
    assert operands["logits"] == Operand("float32")


def test_without_workers_or_a_list_the_model_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(workers: object) -> None:
        raise OSError("no more processes")

    config, device, model = EngineConfig(prepare=True, pages=4), torch.device("cuda", 0), _model()
    monkeypatch.setattr(ahead, "worker_count", lambda: 1)
    with ahead.kernels_ahead(config, CPU) as foresee:
        foresee(model)
    with monkeypatch.context() as without:
        without.setattr(compile_ahead.CompilingProcess, "_begin", refused)
        without.setattr(compile_ahead, "_WORKERS", compile_ahead.CompilingProcesses())
        with ahead.kernels_ahead(config, device) as foresee:
            foresee(model)
    given: list[object] = []
    monkeypatch.setattr(ahead, "kernel_jobs", lambda *arguments: given.append(arguments) or 1 / 0)
    monkeypatch.setattr(ahead, "gpu_of", lambda index: type("Gpu", (), {"arch": 90}))
    monkeypatch.setattr(ahead, "start_workers", lambda count: None)
    monkeypatch.setattr(ahead, "AheadCompilers", lambda count: compile_ahead.AheadCompilers(0))
    with ahead.kernels_ahead(config, device) as foresee:
        foresee(model)
    assert len(given) == 1
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_worker_that_hangs_is_ended_and_nobody_waits_for_one_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[str]] = []

    def hanging(worker: compile_ahead.CompilingProcess) -> subprocess.Popen[str]:
        if started:
            raise OSError("no more processes")
        sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        started.append(subprocess.Popen(sleeps, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[0]

    monkeypatch.setattr(compile_ahead.CompilingProcess, "_begin", hanging)
    monkeypatch.setattr(compile_ahead, "_WORKERS", compile_ahead.CompilingProcesses())
    monkeypatch.setattr(compile_ahead, "_warm", lambda: None)
    monkeypatch.setattr(compile_ahead, "JOB_S", 0.1)
    monkeypatch.setattr(compile_ahead, "IDLE_S", 0.1)
    with compile_ahead.AheadCompilers(1) as compilers:
        compilers.hand_over([{"length": 1}, {"length": 2}])
    assert compilers.done == 0
    assert started[0].wait(timeout=60)
