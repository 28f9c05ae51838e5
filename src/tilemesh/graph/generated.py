"""Running regions by generated kernels: C on a CPU, Triton on a GPU (or in Triton's interpreter, for tests).

A kernel's text holds the strides of its operands. They are found by running the program once on torch's fake tensors,
which have shapes and strides and no data; then all kernels are compiled together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tilemesh.core.errors import UsageError, unknown
from tilemesh.graph import kernel_c
from tilemesh.graph.by_torch import dtype_of
from tilemesh.graph.compile_ahead import AheadCompilers
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.kernel_plan import plan_kernel, reordered
from tilemesh.graph.size import known

Tensor = torch.Tensor
WAYS = ("c", "triton", "interpret")


def way_for(device: torch.device) -> str | None:
    """How regions are computed on a device; None: operator by operator, because nothing compiles kernels here."""
    if device.type == "cuda":
        from tilemesh.kernels.launch.implementation import implementation_of

        return "triton" if implementation_of("auto", [torch.empty(0, device=device)]) == "triton" else None
    return "c" if device.type == "cpu" and kernel_c.compiler() is not None else None


def server(way: str) -> Callable[[Node], bool]:
    """Which nodes this way can compute."""
    if way not in WAYS:
        raise unknown("way to compute regions", way, WAYS)
    if way == "c":
        return kernel_c.serves
    from tilemesh.graph import kernel_triton

    return kernel_triton.serves


class RegionCall:
    """One region of a program. `prepare` gives it its kernel."""

    def __init__(self, node: Node, device: torch.device) -> None:
        self.node, self.body, self.device = node, node["body"], device
        self.strides: list[tuple[int, ...]] | None = None
        self.order: tuple[int, ...] = ()  # of the dims in memory, where rows do not lie one after the other
        self.back: tuple[int, ...] = ()
        self._set_body(self.body)
        self.launch: Callable[[Sequence[Tensor], list[Tensor]], None] | None = None

    def _set_body(self, body: Graph) -> None:
        self.body = body
        self.shapes = [([known(size, {}) for size in output.shape], dtype_of(output.dtype)) for output in body.outputs]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        if self.strides is None:
            self._lay_out(tensors)
        if self.order:
            tensors = tuple(
                tensor.permute(self.order) if whole else tensor
                for tensor, whole in zip(tensors, self.whole, strict=True)
            )
        outputs = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.shapes]
        if self.launch is not None:
            self._run(tensors, outputs)
        elif self.strides is not None:
            raise UsageError("a region was run before its kernel was made")
        else:
            self.strides = [tuple(tensor.stride()) for tensor in tensors]
        return [output.permute(self.back) for output in outputs] if self.order else outputs

    def _lay_out(self, tensors: Sequence[Tensor]) -> None:
        """Decides how results lie in memory, from how operands do."""
        made = None
        if not self.node["columns"]:
            made = reordered(self.body, [tuple(tensor.stride()) for tensor in tensors])
        if made is not None:
            shape = self.body.outputs[0].shape
            self.whole = [node.shape == shape for node in self.body.inputs]
            body, self.order = made
            self.back = tuple(self.order.index(dim) for dim in range(len(self.order)))
            self._set_body(body)

    def _run(self, tensors: Sequence[Tensor], outputs: list[Tensor]) -> None:
        assert self.launch is not None
        assert self.strides is not None
        for tensor, strides in zip(tensors, self.strides, strict=True):
            if tensor.stride() != strides:
                tensors = tuple(map(_laid, tensors, self.strides))
                break
        self.launch(tensors, outputs)


def _laid(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A tensor with the strides that a kernel was made for; of dims of size 1 they do not matter."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if all(own == expected or size == 1 for size, own, expected in pairs):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def prepare(
    calls: Sequence[RegionCall],
    function: Callable[[list[Any]], Any],
    inputs: Sequence[Any],
    device: torch.device,
    way: str,
    ahead: AheadCompilers | None = None,
) -> None:
    """Finds the strides by a run without data, and gives every region its kernel."""
    mode = detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode, torch.no_grad():
            function([_fake(value, mode) for value in inputs])
    finally:
        mode.allow_non_fake_inputs = before
    plans = []
    for call in calls:
        assert call.strides is not None
        plans.append(plan_kernel(call.body, call.node["space"], call.node["columns"], call.strides))
    if way == "c":
        for call, kernel in zip(calls, kernel_c.load_kernels(plans), strict=True):
            call.launch = _c_launch(kernel)
        return
    from tilemesh.graph import kernel_triton

    written_plans = kernel_triton.launch_plans(plans, device)
    if ahead is not None and ahead.workers:
        _compiled_ahead(written_plans, calls, ahead)
    for call, (plan, written) in zip(calls, written_plans, strict=True):
        call.launch = _triton_launch(plan, written, call, way)


def _compiled_ahead(plans: Sequence[tuple[Any, Any]], calls: Sequence[RegionCall], ahead: AheadCompilers) -> None:
    """Fills Triton's cache on disk with the kernels of a program."""
    import triton

    target = triton.runtime.driver.active.get_current_target()
    jobs = {}
    for (plan, written), call in zip(plans, calls, strict=True):
        (step,) = plan.steps
        module, _, _ = step.kernel.partition(":")
        jobs[written.text] = {
            "module": module, "path": sys.modules[module].__file__, "kernel": step.kernel, "grid": step.grid,
            "constants": dict(step.constants), "warps": step.warps, "length": len(written.text),
            "dtypes": dict(zip(_names(call), _dtypes(written, call), strict=True)),
            "target": [target.backend, target.arch, target.warp_size],
        }  # fmt: skip
    ahead.compile(list(jobs.values()))


def _operands(written: Any, call: RegionCall, aligned: bool) -> dict[str, Any]:
    """What compiling needs to know of a region's tensors; sums over rows are partial sums, and wide."""
    from tilemesh.kernels.launch.program import Operand

    names, dtypes = _names(call), _dtypes(written, call)
    return {name: Operand(dtype, aligned) for name, dtype in zip(names, dtypes, strict=True)}


def _names(call: RegionCall) -> list[str]:
    return [
        *(f"i{place}" for place in range(len(call.body.inputs))),
        *(f"o{place}" for place in range(len(call.body.outputs))),
    ]


def _dtypes(written: Any, call: RegionCall) -> list[str]:
    dtypes = [node.dtype for node in (*call.body.inputs, *call.body.outputs)]
    for place in written.sums:
        at = len(call.body.inputs) + place
        dtypes[at] = "float64" if dtypes[at] == "float64" else "float32"
    return dtypes


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return mode.from_tensor(value, static_shapes=True)
    return value


def _c_launch(kernel: Any) -> Callable[[Sequence[Tensor], list[Tensor]], None]:
    def launch(tensors: Sequence[Tensor], outputs: list[Tensor]) -> None:
        kernel(*[tensor.data_ptr() for tensor in tensors], *[output.data_ptr() for output in outputs])

    return launch


def _triton_launch(
    plan: Any, written: Any, call: RegionCall, way: str
) -> Callable[[Sequence[Tensor], list[Tensor]], None]:
    """A launch, and the addition of what its programs summed over their rows."""
    from tilemesh.kernels.launch import interpret
    from tilemesh.kernels.launch.gpu import current_stream, device_index
    from tilemesh.kernels.launch.program import LaunchProgram

    names, dtypes = _names(call), _dtypes(written, call)
    programs: dict[bool, LaunchProgram] = {}

    def launch(tensors: Sequence[Tensor], outputs: list[Tensor]) -> None:
        targets = list(outputs)
        for place, columns in written.sums.items():
            kind = dtype_of(dtypes[len(tensors) + place])
            targets[place] = torch.empty(written.grid, columns, dtype=kind, device=call.device)
        everything = [*tensors, *targets]
        if way == "interpret":
            interpret.run(plan, dict(zip(names, everything, strict=True)), names[len(tensors) :])
        else:
            addresses = [tensor.data_ptr() for tensor in everything]
            aligned = not any(address % 16 for address in addresses)
            program = programs.get(aligned)
            if program is None:
                program = programs[aligned] = LaunchProgram(plan, _operands(written, call, aligned), names)
            program(current_stream(device_index(call.device)), *addresses)
        for place in written.sums:
            outputs[place].copy_(targets[place].sum(0).reshape(outputs[place].shape))

    return launch
