"""The warp-specialised grouped products' own source, run on the CPU by gluon_machine.py, and compiled for an H200."""

from __future__ import annotations

from functools import partial

import gluon_machine
import numpy as np
import pytest
import torch
from gluon_machine import Address, Barrier, Global, Machine
from triton.backends.compiler import GPUTarget

from tilemesh.kernels import warps
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.grouped_linear import plan
from tilemesh.kernels.grouped_linear.plan import GroupedTarget, GroupedTile
from tilemesh.kernels.grouped_linear.reference import error_bound, exact
from tilemesh.kernels.launch.call import Place, place_of
from tilemesh.kernels.launch.program import Operand, compile_step
from tilemesh.kernels.launch.steps import Descriptor, Pointer
from tilemesh.kernels.matmul import kernel as matmul_kernel

hopper = pytest.importorskip("tilemesh.kernels.grouped_linear.hopper")

PROGRAMS = 3  # multiprocessors of the pretended GPU: few, so that a program has several tiles
LOADS = {
    "idle groups first, between and last": [0, 0, 150, 0, 1, 37, 0],
    "one group has all": [0, 200, 0],
    "whole tiles": [64, 128, 64],
    "few rows each": [3, 1, 0, 2, 5],
}


def emulate(make, tensors: dict[str, torch.Tensor], **options) -> None:
    """Every program of a plan's one launch, one after the other."""
    (step,) = make({name: place_of(tensor) for name, tensor in tensors.items()}, **options).steps
    assert step.kernel.startswith(hopper.__name__)
    values = {}
    for name, argument in step.arguments.items():
        if isinstance(argument, Descriptor):
            values[name] = Global(tensors[argument.of].view(argument.shape).numpy(), argument.block)
        elif isinstance(argument, Pointer):
            values[name] = Address(tensors[argument.of].view(-1).numpy())
        else:
            values[name] = argument
    for number in range(step.grid[0]):
        Machine(number, step.grid[0], matmul_kernel, warps, hopper).run(step.function, values | dict(step.constants))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "rows_tile", lambda *sizes: GroupedTile(64, 32, 64, 3))
    monkeypatch.setattr(plan, "weights_tile", lambda *sizes: GroupedTile(32, 32, 32, 3))


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 2).half()


@pytest.mark.parametrize("counts", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("turned", [False, True], ids=["forward", "gradient of rows"])
def test_rows_times_the_matrix_of_their_group(counts: list[int], turned: bool) -> None:
    rows, groups, inner, outputs = sum(counts), len(counts), 128 if turned else 72, 72
    x, weight = drawn(rows, inner, seed=1), drawn(groups, outputs, inner, seed=2)
    ends = torch.tensor(counts).cumsum(0).int()
    y = torch.full((rows, outputs), torch.nan, dtype=torch.float16)
    stored = weight.transpose(1, 2).contiguous() if turned else weight
    emulate(
        plan.rows_plan, {"x": x, "w": stored.flatten(0, 1), "ends": ends, "y": y}, groups=groups, turned=turned,
        target=GroupedTarget(multiprocessors=PROGRAMS),
    )  # fmt: skip
    assert (wrong := excess(y, exact(x, weight, ends), error_bound(x, weight, ends))) is None, wrong


@pytest.mark.parametrize("counts", LOADS.values(), ids=LOADS)
def test_gradients_of_weights_are_sums_over_their_own_rows(counts: list[int]) -> None:
    """Also where what lies before and after a group's rows is no number."""
    rows, groups, inputs, outputs = sum(counts), len(counts), 40, 72
    x, grad = drawn(rows, inputs, seed=3), drawn(rows, outputs, seed=4)
    x[torch.tensor(counts).cumsum(0)[:-1].clamp(max=rows - 1), 0] = torch.inf
    ends = torch.tensor(counts).cumsum(0).int()
    dw = torch.full((groups, outputs, inputs), torch.nan, dtype=torch.float16)
    with np.errstate(all="ignore"):
        emulate(
            plan.weights_plan,
            {"grad": grad, "x": x, "ends": ends, "dw": dw},
            target=GroupedTarget(multiprocessors=PROGRAMS),
        )
    stops = [0, *ends.tolist()]
    for group in range(groups):
        mine = slice(stops[group], stops[group + 1])
        finite = x[mine].isfinite().all(0)
        true = grad[mine].double().T @ x[mine].double()
        room = 2**-10 * (grad[mine].double().abs().T @ x[mine].double().abs()) + 2**-24
        assert excess(dw[group][:, finite], true[:, finite], room[:, finite]) is None
        assert not dw[group][:, ~finite].isfinite().any()


def test_a_lost_arrival_is_noticed() -> None:
    """The test's own test."""
    plain = Barrier.change
    x, weight, ends = drawn(200, 512, seed=1), drawn(2, 64, 512, seed=2), torch.tensor([130, 200]).int()
    y = torch.empty(200, 64, dtype=torch.float16)

    def lost(self, arrivals=0, due=0):
        plain(self, arrivals if due or self.phase < 1 else 0, due)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Barrier, "change", lost)
        patch.setattr(gluon_machine, "PATIENCE_S", 0.3)
        with pytest.raises(RuntimeError, match="would hang"):
            emulate(
                plan.rows_plan, {"x": x, "w": weight.flatten(0, 1), "ends": ends, "y": y}, groups=2, turned=False,
                target=GroupedTarget(multiprocessors=PROGRAMS),
            )  # fmt: skip


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "which", [pytest.param("forward", marks=SLOW), pytest.param("gradient of rows", marks=SLOW), "gradient of weights"]
)
def test_the_kernels_compile_for_an_h200_that_is_not_here(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # in their own tiles

    def place(*shape: int, dtype: str = "bfloat16") -> Place:
        return Place(shape, tuple(torch.empty(shape, device="meta").stride()), dtype, True)

    ends, target = {"ends": place(8, dtype="int32")}, GroupedTarget(multiprocessors=132)
    turned = which == "gradient of rows"
    wide, narrow = (4096, 14336) if turned else (14336, 4096)
    places = ends | {"x": place(16384, narrow), "w": place(8 * 14336, 4096), "y": place(16384, wide)}
    make = partial(plan.rows_plan, groups=8, turned=turned, target=target)
    if which == "gradient of weights":
        places = ends | {"grad": place(16384, 14336), "x": place(16384, 4096), "dw": place(8, 14336, 4096)}
        make = partial(plan.weights_plan, target=target)
    (step,) = make(places).steps
    operands = {name: Operand(where.dtype) for name, where in places.items()}
    compiled = compile_step(step, operands, GPUTarget("cuda", 90, 32))
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 232_448
