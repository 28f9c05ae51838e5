"""Kernels that are compiled in the background while torch.compile traces: from fake tensors, each once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilemesh.kernels import context
from tilemesh.kernels.launch.ahead import KernelsAhead, compiling_ahead
from tilemesh.kernels.launch.steps import FitError, Pointer, Step
from tilemesh.kernels.norm.reference import rms_norm

program = pytest.importorskip("tilemesh.kernels.launch.program")

H200 = program.GPUTarget("cuda", 90, 32)
ROWS = "tilemesh.kernels.linear_cross_entropy.kernel:scale_pass"


def step(block: int = 256) -> Step:
    arguments = {"value": Pointer("value"), "factor": Pointer("factor"), "N": 1000}
    return Step(ROWS, (4, 1), arguments, {"BLOCK": block, "WIDE": False}, warps=4)


OPERANDS = {"value": program.Operand("bfloat16"), "factor": program.Operand("float32")}


def test_a_kernel_that_a_thread_compiles_is_the_one_that_is_found(monkeypatch):
    compiled = []
    plain = program.triton.compile
    monkeypatch.setattr(program.triton, "compile", lambda *given, **more: compiled.append(1) or plain(*given, **more))
    monkeypatch.setattr(program, "KERNELS", {})
    with ThreadPoolExecutor(2) as executor:
        for block in (256, 512, 256):
            program.compile_later(step(block), OPERANDS, executor, H200)
        found = [program.compile_step(step(block), OPERANDS, H200) for block in (512, 256, 256)]
    assert found[1] is found[2]
    assert found[0] is not found[1]
    assert len(compiled) == 2
    assert not program.BEGUN


def test_what_does_not_compile_is_said_where_it_is_waited_for(monkeypatch):
    def fails(*given, **more):
        raise FitError("too large")

    monkeypatch.setattr(program.triton, "compile", fails)
    monkeypatch.setattr(program, "KERNELS", {})
    with ThreadPoolExecutor(1) as executor:
        program.compile_later(step(), OPERANDS, executor, H200)
        with pytest.raises(FitError, match="too large"):
            program.compile_step(step(), OPERANDS, H200)
    assert not program.BEGUN


def test_tracing_plans_a_call_once_and_never_by_a_symbol(monkeypatch):
    planned = []
    monkeypatch.setattr(KernelsAhead, "compile", lambda self, plan, operands: planned.append(plan.steps[0].kernel))
    with FakeTensorMode(), compiling_ahead(1):
        x, weight = torch.empty(8, 64, device="cuda"), torch.empty(64, device="cuda")
        for _ in range(3):  # as the layers of a model
            assert rms_norm(x, weight).shape == x.shape
        assert planned == ["tilemesh.kernels.norm.kernel:forward_pass"]
        rms_norm(torch.empty(16, 64, device="cuda"), weight)
        assert len(planned) == 2
    assert context.current.ahead is None
    with FakeTensorMode():
        rms_norm(torch.empty(24, 64, device="cuda"), torch.empty(64, device="cuda"))
    assert len(planned) == 2


def test_compiled_code_computes_the_same_beside_it():
    x = torch.randn(6, 10)
    function = torch.compile(lambda x: rms_norm(x, implementation="interpret"), backend="aot_eager", dynamic=True)
    with compiling_ahead(1):
        for rows in (2, 4, 6):
            torch.testing.assert_close(function(x[:rows]), rms_norm(x[:rows]))
