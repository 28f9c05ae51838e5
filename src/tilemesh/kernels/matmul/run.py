"""Computing one problem on tensors: each implementation made ready once, then called at low host cost.

`prepare` turns (problem, configuration, device) into a `Runner`, a function of tensors that writes D (and Z, the value
before the activation, when the problem keeps it). All tensors are two-dimensional here; `op.py` sees to that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.activations import reference as activations
from tilemesh.kernels.launch.call import Launched, Place, place_of, scratch_of
from tilemesh.kernels.launch.gpu import Gpu, device_index, gpu_of
from tilemesh.kernels.launch.steps import Buffer, LaunchPlan
from tilemesh.kernels.matmul.config import Config, check, default
from tilemesh.kernels.matmul.padded import PaddedPlan, View, padded_plan
from tilemesh.kernels.matmul.plan import epilogue_plan, tiles_plan
from tilemesh.kernels.matmul.problem import Matrix, Problem

if TYPE_CHECKING:
    from tilemesh.kernels.launch.program import Operand

# a, b, c, d, z: what is given, then what is written.
Runner = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], None]

INTERPRETED_MULTIPROCESSORS = 4  # of the pretended GPU: few, so that small tests have several waves and a tail


def runs_on(gpu: Gpu, kind: str) -> bool:
    """Whether a GPU has what kernels of this kind are written in."""
    return kind in ("pointer", "library") or (gpu.hopper if kind == "pingpong" else gpu.tma)


def matrix_of(tensor: Tensor) -> Matrix:
    """How a 2-d tensor lies in memory."""
    return matrix_at(place_of(tensor))


def matrix_at(place: Place) -> Matrix:
    """The same of a place; the stride of a dim of size 1 is never used, so it is made a good one."""
    (rows, columns), (row_stride, column_stride) = place.shape, place.strides
    if rows == 1 and column_stride == 1:
        row_stride = -(-columns // 16) * 16
    elif columns == 1 and row_stride == 1:
        column_stride = -(-rows // 16) * 16
    return Matrix(rows, columns, row_stride, column_stride, place.aligned)


def prepare(problem: Problem, config: Config, device: torch.device, *, interpret: bool = False) -> Runner:
    """A runner for this configuration. Compiles what is not compiled yet; one that cannot run raises here."""
    if device.type != "cuda" and not interpret and config.kind != "torch":
        raise UsageError(f"implementation '{config.kind}' needs CUDA tensors, got {device}: use 'auto' or 'interpret'")
    if config.kind == "torch":
        check(config, problem)
    if problem.m == 0 or problem.n == 0:
        return _nothing
    if config.kind == "torch" or (problem.k == 0 and config.kind != "pointer"):
        return functools.partial(_torch, problem.activation)
    if interpret:
        if config.kind == "pingpong":
            raise UsageError("kind 'pingpong' is written below what Triton's interpreter knows: use 'persistent'")
        check(config, problem)
        return _Interpreted(problem, config)
    gpu = gpu_of(device_index(device))
    check(config, problem, shared_limit=gpu.shared_bytes)
    if config.kind == "library":
        return _Padded(problem, device) if config.padded else _library(problem, device)
    if config.uses_tma and not gpu.tma:
        raise UsageError(f"kind '{config.kind}' needs TMA, which {gpu.name} does not have: use 'pointer' or 'library'")
    if config.kind == "pingpong" and not gpu.hopper:
        raise UsageError(f"kind 'pingpong' is written for Hopper, {gpu.name} is another generation: use 'persistent'")
    config = config if gpu.tma else replace(config, chained=False)  # launching early came with Hopper, as TMA did
    return TilesRunner(tiles_plan(problem, config, gpu.multiprocessors), problem, device)


def _nothing(a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, z: Tensor | None) -> None:
    """D has no elements."""


def _torch(activation: str, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, z: Tensor | None) -> None:
    total = a @ b if c is None else torch.addmm(c, a, b)
    if z is not None:
        z.copy_(total)
    d.copy_(activations.activate(total, activation))


def operands_of(problem: Problem, buffers: Mapping[str, Buffer]) -> dict[str, Operand]:
    """What compiling needs to know of every tensor that a plan may name."""
    from tilemesh.kernels.launch.program import Operand

    places = (("a", problem.a), ("b", problem.b), ("c", problem.c), ("d", problem.d))
    given = {name: Operand(problem.dtype, matrix.aligned) for name, matrix in places if matrix is not None}
    return {**given, "z": Operand(problem.dtype), **{name: Operand(b.dtype) for name, b in buffers.items()}}


class TilesRunner(Launched):
    """Tile kernels on a GPU. `product`: the plan is of the pass after a product, which it finds where D is."""

    def __init__(self, plan: LaunchPlan, problem: Problem, device: torch.device, *, product: bool = False) -> None:
        from tilemesh.kernels.launch.program import Operand

        operands = {"product": Operand(problem.dtype, problem.d.aligned), **operands_of(problem, plan.buffers)}
        given = ["product"] if product else ["a", "b"]
        super().__init__(plan, operands, [*given, *"c" * (problem.c is not None), "d", *"z" * problem.keep], device)

    def __call__(self, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, z: Tensor | None) -> None:
        self.launch(_addresses(a, b, c, d, z))


def _addresses(*tensors: Tensor | None) -> list[int]:
    """Of those that there are, as a launch takes them."""
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


BLOCK_ALIGNMENT = 128  # elements: where one of several buffers in one allocation may begin


class _Padded:
    """The library on aligned copies: a launch, the vendor's matmul, a launch.

    The copies and the product lie in one allocation, fresh at each call so that streams do not race for it: three
    allocations took longer than the rest of the call's own work.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.device, self.plan = device, padded_plan(problem)
        operands = operands_of(problem, self.plan.buffers)
        has_c, keep = problem.c is not None, problem.keep
        self.before = Launched(self.plan.before, operands, ["a", "b", *self.plan.buffers], device)
        self.after = Launched(self.plan.after, operands, ["product", *"c" * has_c, "d", *"z" * keep], device)
        self.dtype, begins, self.elements = getattr(torch, problem.dtype), {}, 0
        for name, buffer in self.plan.buffers.items():
            begins[name] = self.elements
            self.elements += -(-buffer.elements // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
        self.bytes_in = [begin * problem.element_bytes for begin in begins.values()]
        self.product_bytes_in = begins["product"] * problem.element_bytes
        self.views = [_view_in_block(view, begins) for view in (self.plan.a, self.plan.b, self.plan.out)]

    def __call__(self, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, z: Tensor | None) -> None:
        block = torch.empty(self.elements, dtype=self.dtype, device=self.device)
        address = block.data_ptr()
        self.before.launch([a.data_ptr(), b.data_ptr(), *[address + begin for begin in self.bytes_in]])
        left, right, product = self.views
        torch.mm(
            a if left is None else block.as_strided(*left),
            b if right is None else block.as_strided(*right),
            out=block if product is None else block.as_strided(*product),
        )
        self.after.launch([address + self.product_bytes_in, *_addresses(c, d, z)])


def _view_in_block(view: View, begins: Mapping[str, int]) -> tuple[tuple[int, int], tuple[int, int], int] | None:
    """What `as_strided` takes to see a buffer of the block as a matrix; None for a tensor that was given."""
    if view.of not in begins:
        return None
    matrix = view.matrix
    return (matrix.rows, matrix.columns), (matrix.row_stride, matrix.column_stride), begins[view.of]


def multiply(plan: PaddedPlan, tensors: Mapping[str, Tensor]) -> None:
    """The plan's product, by torch."""

    def part(view: View) -> Tensor:
        tensor, matrix = tensors[view.of], view.matrix
        strides = (matrix.row_stride, matrix.column_stride)
        return tensor.as_strided((matrix.rows, matrix.columns), strides, tensor.storage_offset())

    torch.mm(part(plan.a), part(plan.b), out=part(plan.out))


def _library(problem: Problem, device: torch.device) -> Runner:
    """The vendor's matmul, then one pass for C and the activation; or all in one where its own epilogue can do it."""
    if problem.epilogue_in_library:
        gelu = problem.activation == "gelu_tanh"

        def in_one(a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, z: Tensor | None) -> None:
            assert c is not None
            torch._addmm_activation(c.reshape(-1), a, b, use_gelu=gelu, out=d)

        return in_one
    if problem.c is None and problem.activation == "none" and not problem.keep:

        def alone(a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, z: Tensor | None) -> None:
            torch.mm(a, b, out=d)

        return alone
    finish = TilesRunner(epilogue_plan(problem, problem.d), problem, device, product=True)

    def two(a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, z: Tensor | None) -> None:
        torch.mm(a, b, out=d)
        finish.launch(_addresses(d, c, d, z))

    return two


class _Interpreted:
    """The same plan on the CPU. The interpreter multiplies bfloat16 wrongly: there products are taken in float32."""

    def __init__(self, problem: Problem, config: Config) -> None:
        self.padded = padded_plan(problem) if config.padded else None
        self.library = config.kind == "library" and not config.padded
        if self.padded:
            self.plan = self.padded.after
        elif self.library:
            self.plan = epilogue_plan(problem, problem.d)
        else:
            self.plan = tiles_plan(problem, config, INTERPRETED_MULTIPROCESSORS, interpreted=True)

    def __call__(self, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, z: Tensor | None) -> None:
        from tilemesh.kernels.launch import interpret

        tensors: dict[str, Tensor | None] = {"a": a, "b": b, "c": c, "d": d, "z": z}
        scratch = scratch_of(self.padded.buffers if self.padded else self.plan.buffers, a.device)
        tensors |= scratch
        if self.padded:
            interpret.run(self.padded.before, tensors)
            multiply(self.padded, {"a": a, "b": b, **scratch})
        if self.library:
            torch.mm(a, b, out=d)
            tensors["product"] = d
        interpret.run(self.plan, tensors, written=("d", "z"))


def interpreted_default(problem: Problem) -> Config:
    """Small enough to interpret quickly, several tiles even for small matrices."""
    block = 64 if max(problem.m, problem.n) <= 256 else 128
    base = default("pointer", problem)
    return Config("pointer", min(block, base.block_m), block, base.block_k)
