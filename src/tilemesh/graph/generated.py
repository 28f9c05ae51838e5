"""Running regions by generated kernels: C on a CPU, Triton on a GPU (or in Triton's interpreter, for tests).

A kernel's text holds the strides of its operands. They are found by running the program once on torch's fake tensors,
which have shapes and strides and no data; then all kernels are compiled together.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tilemesh.core.c_library import compiler
from tilemesh.core.errors import UsageError, unknown
from tilemesh.graph import kernel_c
from tilemesh.graph.by_torch import dtype_of
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.kernel_plan import plan_kernel, reordered
from tilemesh.kernels.launch.compile_ahead import AheadCompilers

Tensor = torch.Tensor
Launch = Callable[[Sequence[Tensor], list[Tensor]], None]
Strides = tuple[tuple[int, ...], ...]
WAYS = ("c", "triton", "interpret")


def way_for(device: torch.device) -> str | None:
    """How regions are computed on a device; None: operator by operator, because nothing compiles kernels here."""
    if device.type == "cuda":
        from tilemesh.kernels.launch.implementation import implementation_of

        return "triton" if implementation_of("auto", [torch.empty(0, device=device)]) == "triton" else None
    return "c" if device.type == "cpu" and compiler() is not None else None


def server(way: str) -> Callable[[Node], bool]:
    """Which nodes this way can compute."""
    if way not in WAYS:
        raise unknown("way to compute regions", way, WAYS)
    if way == "c":
        return kernel_c.CWriter.serves
    from tilemesh.graph import kernel_triton

    return kernel_triton.TritonWriter.serves


class RegionCall:
    """One region of a program. `prepare` gives it its kernel."""

    def __init__(self, node: Node, device: torch.device) -> None:
        self.node, self.body, self.device = node, node["body"], device
        self.strides: Strides | None = None
        self.order: tuple[int, ...] = ()  # of the dims in memory, where rows do not lie one after the other
        self.back: tuple[int, ...] = ()
        self._set_body(self.body)
        self.launch: Launch | None = None
        self.made_for: Callable[[Strides], Launch] | None = None
        self.others: dict[Strides, Launch] = {}  # where operands lie otherwise than torch's fake tensors said

    def _set_body(self, body: Graph) -> None:
        self.body = body
        self.shapes = [(output.shape, dtype_of(output.dtype)) for output in body.outputs]

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
            given = tuple(tensor.stride() for tensor in tensors)
            launch = self.launch if given == self.strides else self._launch_for(tensors, given)
            launch(tensors, outputs)
        elif self.strides is not None:
            raise UsageError("a region was run before its kernel was made")
        else:
            self.strides = tuple(tensor.stride() for tensor in tensors)
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

    def _launch_for(self, tensors: Sequence[Tensor], given: Strides) -> Launch:
        """The kernel for operands with these strides; of dims of size 1 they do not matter."""
        assert self.launch is not None
        assert self.strides is not None
        assert self.made_for is not None
        known = self.others.get(given)
        if known is None:
            alike = tuple(
                tuple(
                    one if size == 1 else own
                    for size, own, one in zip(tensor.shape, tensor.stride(), each, strict=True)
                )
                for tensor, each in zip(tensors, self.strides, strict=True)
            )
            known = self.others[given] = self.launch if alike == self.strides else self.made_for(alike)
        return known


def run_without_data(function: Callable[[list[Any]], Any], inputs: Sequence[Any]) -> Any:
    """Runs a program on torch's fake tensors, which have shapes and strides alone; regions remember those they saw."""
    mode = detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode, torch.no_grad():
            return function([_fake(value, mode) for value in inputs])
    finally:
        mode.allow_non_fake_inputs = before


def prepare(calls: Sequence[RegionCall], device: torch.device, way: str, ahead: AheadCompilers | None = None) -> None:
    """Gives every region its kernel, for the strides that a run without data found."""
    given = [call.strides for call in calls if call.strides is not None]
    for call, launch in zip(calls, _launches(calls, given, device, way, ahead), strict=True):
        call.launch = launch
        call.made_for = functools.partial(_launch_of, call, device, way)


def _launch_of(call: RegionCall, device: torch.device, way: str, strides: Strides) -> Launch:
    return _launches([call], [strides], device, way, None)[0]


def _launches(
    calls: Sequence[RegionCall], given: Sequence[Strides], device: torch.device, way: str, ahead: AheadCompilers | None
) -> list[Launch]:
    """A kernel for each region, for operands with these strides."""
    plans = [
        plan_kernel(call.body, call.node["space"], call.node["columns"], strides)
        for call, strides in zip(calls, given, strict=True)
    ]
    if way == "c":
        return [_c_launch(kernel) for kernel in kernel_c.load_kernels(plans)]
    from tilemesh.graph import kernel_triton

    written_plans = kernel_triton.launch_plans(plans, device)
    if ahead is not None and ahead.open:
        _hand_over(written_plans, calls, ahead)
    return [
        _triton_launch(plan, written, call, way) for call, (plan, written) in zip(calls, written_plans, strict=True)
    ]


def _hand_over(plans: Sequence[tuple[Any, Any]], calls: Sequence[RegionCall], ahead: AheadCompilers) -> None:
    """Lets the workers fill Triton's cache on disk with the kernels of a program."""
    import triton

    ahead.warmed()
    target = triton.runtime.driver.active.get_current_target()
    named = [target.backend, target.arch, target.warp_size]
    jobs: dict[str, dict[str, Any]] = {}
    for (plan, written), call in zip(plans, calls, strict=True):
        jobs |= {step.kernel: kernel_job(written, step, call, named) for step in plan.steps}
    ahead.hand_over(list(jobs.values()))


def kernel_job(written: Any, step: Any, call: RegionCall, target: Sequence[Any]) -> dict[str, Any]:
    """What a worker has to know to compile a region's kernel for a target."""
    module, _, _ = step.kernel.partition(":")
    dtypes = _dtypes(written, call)
    return {
        "module": module, "path": sys.modules[module].__file__, "kernel": step.kernel, "grid": step.grid,
        "constants": dict(step.constants), "warps": step.warps, "length": len(written.text),
        "dtypes": {name: dtypes[pointer.of] for name, pointer in step.arguments.items()}, "target": list(target),
    }  # fmt: skip


def _dtypes(written: Any, call: RegionCall) -> dict[str, str]:
    """The dtypes of a region's operands, results, and what its programs leave of sums over rows."""
    dtypes = {f"i{place}": node.dtype for place, node in enumerate(call.body.inputs)}
    dtypes |= {f"o{place}": node.dtype for place, node in enumerate(call.body.outputs)}
    wide = "float64" if "float64" in {dtypes[f"o{place}"] for place in written.sums} else "float32"
    return dtypes | {f"p{place}": wide for place in written.sums}


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return mode.from_tensor(value, static_shapes=True)
    return value


def _c_launch(kernel: Any) -> Launch:
    def launch(tensors: Sequence[Tensor], outputs: list[Tensor]) -> None:
        kernel(*[tensor.data_ptr() for tensor in tensors], *[output.data_ptr() for output in outputs])

    return launch


def _triton_launch(plan: Any, written: Any, call: RegionCall, way: str) -> Launch:
    """The launches of a region, with memory for what its programs leave of sums over rows."""
    from tilemesh.kernels.launch import interpret
    from tilemesh.kernels.launch.gpu import current_stream, device_index
    from tilemesh.kernels.launch.program import LaunchProgram, Operand

    dtypes = _dtypes(written, call)
    names = list(dtypes)
    programs: dict[bool, LaunchProgram] = {}
    # What programs leave of all sums lies in one block of memory, each sum's part beginning at a whole line.
    apart = -(-written.grid * written.columns // 128) * 128
    kind = dtype_of(dtypes[f"p{written.sums[0]}"]) if written.sums else torch.float32
    device, count = call.device, len(written.sums)

    def launch(tensors: Sequence[Tensor], outputs: list[Tensor]) -> None:
        left = torch.empty(count * apart, dtype=kind, device=device) if count else None
        if way == "interpret":
            parts = [left.narrow(0, apart * place, apart) for place in range(count)] if left is not None else []
            everything = dict(zip(names, [*tensors, *outputs, *parts], strict=True))
            interpret.run(plan, everything, names[len(tensors) : len(tensors) + len(outputs)])
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        addresses += [output.data_ptr() for output in outputs]
        if left is not None:
            first, step = left.data_ptr(), apart * left.element_size()
            addresses += [first + place * step for place in range(count)]
        aligned = not any(address % 16 for address in addresses)
        program = programs.get(aligned)
        if program is None:
            operands = {name: Operand(dtype, aligned) for name, dtype in dtypes.items()}
            program = programs[aligned] = LaunchProgram(plan, operands, names)
        program(current_stream(device_index(device)), *addresses)

    return launch
