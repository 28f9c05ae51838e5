"""The warp-specialised kernel's own source, run on the CPU by gluon_machine.py.

One case of each kind is compiled for an H200 as well.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import gluon_machine
import numpy as np
import pytest
import torch
from gluon_machine import Address, Barrier, Global, Machine
from triton.backends.compiler import GPUTarget

import tilemesh as tm
from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.activations import kernel as activation_kernels
from tilemesh.kernels.activations import reference as activations
from tilemesh.kernels.launch import program
from tilemesh.kernels.launch.steps import Descriptor, FitError, Pointer
from tilemesh.kernels.matmul import kernel, reference
from tilemesh.kernels.matmul.config import Config, check, refusal
from tilemesh.kernels.matmul.plan import tiles_plan
from tilemesh.kernels.matmul.problem import Matrix, dense
from tilemesh.kernels.matmul.tuning import compile_ahead

pingpong = pytest.importorskip("tilemesh.kernels.matmul.pingpong")
quick_activations = pytest.importorskip("tilemesh.kernels.activations.hopper")


def emulate(problem, config, tensors, programs=3):
    """Every program of the plan's one launch, one after the other."""
    (step,) = tiles_plan(problem, config, programs).steps
    values = {}
    for name, argument in step.arguments.items():
        if isinstance(argument, Descriptor):
            flat = tensors[argument.of]
            lies = np.lib.stride_tricks.as_strided(flat, argument.shape, [2 * stride for stride in argument.strides])
            values[name] = Global(lies, argument.block)
        elif isinstance(argument, Pointer):
            values[name] = Address(tensors[argument.of].reshape(-1))
        else:
            values[name] = argument
    for index in range(step.grid[0]):
        Machine(index, step.grid[0], activation_kernels, quick_activations, kernel, pingpong).run(
            "pingpong_tiles", {**values, **step.constants}
        )


def given(problem, seed=0):
    """Tensors that lie as the problem says, and the same as torch's."""
    generator = np.random.default_rng(seed)
    arrays, views = {}, {}
    for name, matrix in (("a", problem.a), ("b", problem.b), ("c", problem.c), ("d", problem.d), ("z", problem.d)):
        if matrix is not None:
            arrays[name] = (generator.standard_normal(matrix.reach) * 0.5).astype(np.float16)
            view = torch.from_numpy(arrays[name]).as_strided(
                (matrix.rows, matrix.columns), (matrix.row_stride, matrix.column_stride)
            )
            views[name] = view
    return arrays, views


CASES = [
    (Config("pingpong", 64, 64, 32, 4, 3), (200, 136, 96), "full", "relu", "nn", False),
    (Config("pingpong", 64, 64, 32, 4, 2), (640, 64, 40), "full", "gelu", "nt", True),
    (Config("pingpong", 64, 128, 64, 4, 5), (72, 1000, 600), "row", "silu", "tn", False),
    (Config("pingpong", 64, 64, 64, 4, 4, group=2), (130, 520, 64), "column", "gelu_tanh", "tt", True),
    (Config("pingpong", 128, 64, 32, 4, 3, paired=True), (400, 136, 96), "full", "relu", "nn", False),
    (Config("pingpong", 128, 64, 32, 4, 2, paired=True), (200, 200, 200), "none", "squared_relu", "tt", True),
    (Config("pingpong", 128, 128, 64, 4, 3, paired=True), (136, 264, 72), "row", "none", "nt", False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].label} {case[2]}")
def test_the_kernels_source_computes_what_torch_does(case):
    config, (m, n, k), c_kind, activation, layout, keep = case
    if "t" in (layout[0],) and m % 8:
        m += 8 - m % 8
    problem = dense(m, n, k, c_kind=c_kind, activation=activation, layout=layout, keep=keep)
    check(config, problem)
    arrays, views = given(problem)
    arrays["d"][:] = np.nan
    arrays["z"][:] = np.nan
    emulate(problem, config, arrays)
    c = views.get("c")
    exact = reference.exact(views["a"], views["b"], c, activation)
    bound = reference.error_bound(views["a"], views["b"], c, activation)
    assert (wrong := excess(views["d"], exact, bound)) is None, wrong
    if keep:
        before = reference.exact(views["a"], views["b"], c, "none")
        bound = reference.error_bound(views["a"], views["b"], c, "none")
        assert (wrong := excess(views["z"], before, bound)) is None, wrong


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu", "relu"])
def test_a_product_times_an_activations_derivative(activation):
    config, shape = Config("pingpong", 64, 64, 32, 4, 3), (200, 136, 96)
    problem = replace(dense(*shape, activation=activation), slope=True)
    check(config, problem)
    arrays, views = given(problem)
    arrays["d"][:] = np.nan
    emulate(problem, config, arrays)
    a, b, c = (views[name].double() for name in "abc")
    exact = activations.gradient(a @ b, c, activation)
    # The product's own bound times the derivative, which is at most 1.13 and computed to a few units in float32.
    bound = 1.2 * reference.error_bound(views["a"], views["b"], None, "none") + 2**-11 * exact.abs()
    assert (wrong := excess(views["d"], exact, bound)) is None, wrong


def test_the_stand_in_notices_a_stage_given_back_too_early():
    """The test's own test: with an arrival lost, or one too many, the emulation fails instead of passing."""
    problem = dense(200, 136, 512)
    arrays, _ = given(problem)
    plain = Barrier.change

    def lost(self, arrivals=0, due=0):
        plain(self, arrivals if due or self.phase < 1 else 0, due)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Barrier, "change", lost)
        patch.setattr(gluon_machine, "PATIENCE_S", 0.3)
        with pytest.raises(RuntimeError, match="would hang"):
            emulate(problem, CASES[0][0], arrays)


@pytest.mark.parametrize(("c_kind", "keep", "layout"), [("full", False, "nn"), ("row", True, "nt")])
def test_it_compiles_for_an_h200(c_kind, keep, layout):
    config = Config("pingpong", 256, 128, 64, 4, 3, paired=True) if keep else Config("pingpong", 128, 128, 64, 4, 5)
    assert compile_ahead(dense(512, 512, 512, c_kind=c_kind, keep=keep, layout=layout), config, 132, 90) is None


def test_a_product_times_a_derivative_compiles_for_an_h200():
    problem = replace(dense(512, 512, 512, activation="gelu_tanh", dtype="bfloat16"), slope=True)
    assert compile_ahead(problem, Config("pingpong", 128, 128, 64, 4, 5), 132, 90) is None
    assert "needs kind pingpong" in str(refusal(Config("tma"), problem))


def test_a_triton_that_does_not_take_it_leaves_auto_its_other_kernels(monkeypatch):
    def fails(*given, **more):
        raise TypeError("arrive() takes 1 argument")

    problem, config = dense(520, 520, 520), Config("pingpong", 64, 128, 64, 4, 3)
    (step,) = tiles_plan(problem, config, 132).steps
    operands = {name: program.Operand("float16") for name in "abcd"}
    monkeypatch.setattr(program.triton, "compile", fails)
    with pytest.raises(FitError, match="arrive"):  # which `auto` answers with the library
        program.compile_step(step, operands, GPUTarget("cuda", 90, 32))


def test_what_it_cannot_do_is_said():
    config = Config("pingpong", 128, 128, 64, 4, 5)
    turned = dense(256, 256, 256)
    turned = type(turned)(**{**vars(turned), "d": Matrix(256, 256, 1, 256)})
    refused = [
        (config, dense(256, 255, 256)), (config, dense(256, 256, 256, dtype="float32")), (config, turned),
        (Config("pingpong", 128, 128, 64, 8, 5), dense(256, 256, 256)),
        (Config("pingpong", 512, 64, 64, 4, 2, paired=True), dense(256, 256, 256)),
        (Config("pingpong", 128, 128, 64, 4, 5, prefetch=True), dense(256, 256, 256)),
        (Config("pingpong", 128, 128, 64, 4, 6), dense(256, 256, 256)),
        (Config("pingpong", 128, 128, 64, 4, 1), dense(256, 256, 256)),
        (Config("tma", 128, 128, 64, 4, 3, paired=True), dense(256, 256, 256)),
    ]  # fmt: skip
    assert all(refusal(*pair) for pair in refused)
    a = torch.ones(16, 16, dtype=torch.float16)
    with pytest.raises(UsageError, match="interpreter"):
        tm.kernels.fused_matmul(a, a, implementation="interpret", config=config)


def test_compiling_works_in_a_process_that_interpreted_first():
    """The interpreter patches Triton's language: what it leaves patched must not reach the compiler."""
    code = """
import torch, tilemesh as tm
from tilemesh.kernels.matmul.problem import dense
from tilemesh.kernels.matmul.tuning import compile_ahead
tm.kernels.fused_matmul(torch.ones(4, 4), torch.ones(4, 4), activation="gelu", implementation="interpret")
for config in (tm.kernels.Config("pointer", 16, 32, 32, 1, 2), tm.kernels.Config("pingpong", 128, 128, 64, 4, 5)):
    assert compile_ahead(dense(64, 64, 64), config, 132, 90) is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)
