"""Grouped products' launches: which kernels and tiles for which sizes, forward and backward as torch sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tilemesh.kernels.launch.call import Place, Plan
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.launch.steps import Argument, Descriptor, FitError, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.launch.tensors import for_tma

_KERNELS = "tilemesh.kernels.grouped_linear.kernel"
_HOPPER = "tilemesh.kernels.grouped_linear.hopper"
_BAND = 8  # tiles of rows that take their turns with the tiles of outputs: their weights stay in the L2


class GroupedTarget(NamedTuple):
    """What a plan is made for. multiprocessors: of a Hopper GPU, for its own kernels; 0 for the portable ones."""

    interpreted: bool = False
    multiprocessors: int = 0


class GroupedTile(NamedTuple):
    """Rows, outputs and inputs of a step, and steps that are loaded ahead."""

    m: int
    n: int
    k: int
    stages: int


INTERPRETED = GroupedTile(16, 16, 16, 1)  # small, so that small tests have several of each kind


def rows_tile(rows: int, outputs: int, groups: int, target: GroupedTarget) -> GroupedTile:
    """For rows times matrices: low tiles where groups have few rows, since those are reads of weights."""
    if target.interpreted:
        return INTERPRETED
    low = rows < 64 * groups
    if target.multiprocessors:
        return GroupedTile(64, 128, 64, 7) if low else GroupedTile(128, 128, 64, 5)
    return GroupedTile(64 if low else 128, 256 if outputs >= 1024 else 128, 64, 3)


def weights_tile(inputs: int, target: GroupedTarget) -> GroupedTile:
    """For gradients of weights, whose steps are over rows."""
    if target.interpreted:
        return INTERPRETED
    return (
        GroupedTile(64, 128, 128, 5)
        if target.multiprocessors
        else GroupedTile(64, 128, 256 if inputs >= 1024 else 128, 3)
    )


def rows_plan(places: Mapping[str, Place], *, groups: int, turned: bool, target: GroupedTarget) -> LaunchPlan:
    """y = x w^T, or where the matrices are turned x w. `w`: those of all groups under one another."""
    x, w, y = places["x"], places["w"], places["y"]
    (rows, inner), outputs, high = x.shape, y.shape[1], w.shape[0] // groups
    if turned and inner % 64:  # a step would reach into the next group's matrix
        target = target._replace(multiprocessors=0)
    m, n, k, stages = rows_tile(rows, outputs, groups, target)
    tiles_m, tiles_n = blocks(rows, m) + groups, blocks(outputs, n)
    x_desc = Descriptor("x", x.shape, x.strides, (m, k))
    w_desc = Descriptor("w", w.shape, w.strides, (k, n) if turned else (n, k))
    shared: dict[str, Argument] = {
        "ends": Pointer("ends"), "y": Pointer("y"), "X": groups, "N": outputs, "K": inner, "tiles_n": tiles_n,
        "HIGH": high, "y_m": y.strides[0],
    }  # fmt: skip
    constants: dict[str, object] = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "BAND": _BAND, "TURNED": turned}
    if target.multiprocessors:
        y_desc = Descriptor("y", y.shape, y.strides, (m, n))
        arguments = {"x_desc": x_desc, "w_desc": w_desc, "y_desc": y_desc, **shared}
        grid = (min(target.multiprocessors, tiles_m * tiles_n), 1)
        step = Step(f"{_HOPPER}:grouped_rows", grid, arguments, constants | {"STAGES": stages}, wide=y.wide)
        return LaunchPlan((step,))
    constants |= {"GROUPS": triton.next_power_of_2(groups), "EVEN": inner % k == 0, "UPCAST": target.interpreted}
    step = Step(
        f"{_KERNELS}:rows_pass", (tiles_m * tiles_n, 1), {"x": x_desc, "w": w_desc, "tiles_m": tiles_m, **shared},
        constants, warps=8, stages=stages, wide=w.wide, varying=("tiles_m",),
    )  # fmt: skip
    return LaunchPlan((step,))


def weights_plan(places: Mapping[str, Place], *, target: GroupedTarget) -> LaunchPlan:
    """dw = grad^T x of each group; `dw`: those of all groups."""
    grad, x, dw = places["grad"], places["x"], places["dw"]
    groups, outputs, inputs = dw.shape
    m, n, k, stages = weights_tile(inputs, target)
    each, tiles_k = blocks(outputs, n) * blocks(inputs, k), blocks(inputs, k)
    grad_desc = Descriptor("grad", grad.shape, grad.strides, (m, n))
    x_desc = Descriptor("x", x.shape, x.strides, (m, k))
    shared: dict[str, Argument] = {
        "ends": Pointer("ends"), "dw": Pointer("dw"), "N": outputs, "K": inputs, "d_n": dw.strides[1]
    }  # fmt: skip
    constants: dict[str, object] = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    if target.multiprocessors:
        dw_desc = Descriptor("dw", (groups * outputs, inputs), (dw.strides[1], 1), (n, k))
        tiles = groups * each
        arguments = {"grad_desc": grad_desc, "x_desc": x_desc, "dw_desc": dw_desc, **shared, "X": groups}
        step = Step(
            f"{_HOPPER}:grouped_weights", (min(target.multiprocessors, tiles), 1),
            {**arguments, "each": each, "tiles": tiles}, constants | {"BAND": _BAND, "STAGES": stages}, wide=dw.wide,
        )  # fmt: skip
        return LaunchPlan((step,))
    step = Step(
        f"{_KERNELS}:weights_pass", (each, groups),
        {"grad": grad_desc, "x": x_desc, "tiles_k": tiles_k, "d_g": dw.strides[0], **shared},
        constants | {"UPCAST": target.interpreted}, warps=8, stages=stages, wide=dw.wide,
    )  # fmt: skip
    return LaunchPlan((step,))


def forward(launch: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return multiply_rows(launch, x, weight, ends, turned=False)


def backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, None]:
    (grad,), (x, weight, ends) = gradients, arguments
    dx = multiply_rows(launch, grad, weight, ends, turned=True)
    dw = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    given = {"grad": for_tma(grad), "x": for_tma(x), "ends": ends, "dw": dw}
    _launch(launch, weights_plan, given, "dw")
    return dx, dw, None


def multiply_rows(launch: Any, x: Tensor, weight: Tensor, ends: Tensor, *, turned: bool) -> Tensor:
    """Rows of each group times its matrix, or where the matrices are turned as they come in gradients."""
    groups, outputs = len(weight), weight.shape[2 if turned else 1]
    y = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    given = {"x": for_tma(x), "w": for_tma(weight.flatten(0, 1)), "ends": ends, "y": y}
    _launch(launch, rows_plan, given, "y", groups=groups, turned=turned)
    return y


def _launch(launch: Any, plan: Plan, given: Mapping[str, Tensor], written: str, **more: Any) -> None:
    """A plan; where this Triton cannot compile Hopper's kernel, with the portable one."""
    device, given = given["x"].device, {**given, "ends": given["ends"].contiguous()}
    if device.type == "cuda":
        gpu = gpu_of(device_index(device))
        if gpu.hopper:
            try:
                launch(
                    plan, given, written=(written,), **more, target=GroupedTarget(multiprocessors=gpu.multiprocessors)
                )
                return
            except FitError:
                pass
    launch(plan, given, written=(written,), **more, target=GroupedTarget(interpreted=device.type == "cpu"))
