"""The ladder on a GPU: compiles each rung's text with NVRTC, checks its result, and times it beside torch.

The same text runs in the interpreter (`rungs.count`); rows carry the reads that were predicted there.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilemesh as tm
from tilemesh.bench.harness import Estimate, make_row
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import Device, device_for, host_link
from tilemesh.guide.clock import repeated
from tilemesh.guide.ladder import studies
from tilemesh.guide.ladder.ours import OurRung, our_rungs
from tilemesh.guide.ladder.rungs import Rung, ladder, source, v1
from tilemesh.guide.ladder.times import RungTime, predicted_time
from tilemesh.kernels.launch.driver import kernel_attribute
from tilemesh.measure.gpu import KernelTimer, l2_cache_bytes, rotating_sets
from tilemesh.measure.row import CaseValue, Row
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import Comparison, Timer, compare

# CUDA driver API, CUfunction_attribute.
_SHARED_BYTES, _LOCAL_BYTES, _REGISTERS = 1, 3, 4


Launch = Callable[..., None]


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel, and what the compiler reserved for it."""

    launch: Launch  # (grid, block, arguments, bytes of dynamic shared memory)
    registers: int  # of a thread
    shared_bytes: int  # of a block, dynamic ones included
    local_bytes: int  # of a thread: what did not fit into registers
    dynamic_bytes: int = 0

    def __call__(
        self, grid: tuple[int, int], block: tuple[int, int], arguments: Sequence[Any], unused: int = 0
    ) -> None:
        """unused: further bytes of shared memory, reserved to keep other blocks away."""
        self.launch(grid, block, arguments, self.dynamic_bytes + unused)


@dataclass(frozen=True)
class LadderPlace:
    """Where the ladder is measured. A test puts the interpreter and the CPU in a GPU's place."""

    name: str  # as torch names it
    device: Device
    l2_bytes: int
    compile: Callable[[str, str, int], CompiledKernel]  # text, kernel's name, bytes of dynamic shared memory
    timer: Callable[[], Timer]


def this_gpu() -> LadderPlace:
    if not torch.cuda.is_available():
        raise UsageError("the ladder's kernels need an NVIDIA GPU; their reads are counted without one (`rungs.count`)")
    device = device_for(torch.cuda.get_device_name())
    if device is None:
        raise UsageError(f"the ladder's rows need the datasheet of {torch.cuda.get_device_name()} in core/hardware.py")
    return LadderPlace("cuda", device, l2_cache_bytes(), compiled, KernelTimer)


def compiled(text: str, name: str, dynamic_bytes: int = 0) -> CompiledKernel:
    """By NVRTC, for this GPU. Shared memory beyond 48 KiB has to be asked for, and all that there is, is."""
    kernel = torch.cuda._compile_kernel(source("warp_ops.cuh") + text, name)
    static = kernel_attribute(kernel, _SHARED_BYTES)
    most = int(torch.cuda.get_device_properties().shared_memory_per_block_optin) - static  # type: ignore[attr-defined]
    kernel.set_shared_memory_config(most)

    def launch(grid: tuple[int, int], block: tuple[int, int], arguments: Sequence[Any], dynamic: int) -> None:
        kernel((*grid, 1), (*block, 1), list(arguments), shared_mem=dynamic)

    registers, local = (kernel_attribute(kernel, which) for which in (_REGISTERS, _LOCAL_BYTES))
    return CompiledKernel(launch, registers, static + dynamic_bytes, local, dynamic_bytes)


# The ladder -----------------------------------------------------------------------------------------------------------

Operands = tuple[Tensor, Tensor]
Sets = Sequence[Operands]


def ladder_rows(
    n: int = 4096,
    *,
    rungs: Sequence[Rung] | None = None,
    ours: Sequence[OurRung] | None = None,
    repeats: int = 10,
    seconds: float = 6.0,
    on: LadderPlace | None = None,
) -> list[Row]:
    """A row for each rung, the CUDA ones and ours; those of one precision are timed together with torch's product."""
    place = on or this_gpu()
    chosen, last = ladder() if rungs is None else rungs, our_rungs() if ours is None else ours
    rows: list[Row] = []
    for units in ("fp32", "tf32", "fp16"):
        cuda = [rung for rung in chosen if rung.units == units]
        own = [rung for rung in last if rung.units == units]
        if cuda or own:
            predicted = {rung.key: predicted_time(rung, n, place.device) for rung in cuda}
            rows += _timed_group(n, units, cuda, own, predicted, place, repeats, seconds)
    return rows


def _timed_group(
    n: int,
    units: str,
    rungs: Sequence[Rung],
    ours: Sequence[OurRung],
    predicted: Mapping[str, RungTime],
    place: LadderPlace,
    repeats: int,
    seconds: float,
) -> list[Row]:
    dtype = torch.float16 if units == "fp16" else torch.float32
    generator = torch.Generator(place.name).manual_seed(0)

    def make(index: int) -> Operands:
        a, b = (torch.randn(n, n, generator=generator, device=place.name).to(dtype) for _ in range(2))
        return a, b

    sets = rotating_sets(make, 2 * n * n * dtype.itemsize, place.l2_bytes)
    kernels = {rung.key: place.compile(rung.text(), "matmul", rung.dynamic * 2) for rung in rungs}
    calls: dict[str, Callable[[int], object]] = {
        rung.key: functools.partial(_by_rung, rung, kernels[rung.key], sets, torch.empty_like(sets[0][0]))
        for rung in rungs
    }
    calls |= {our.key: functools.partial(_by_ours, our, sets) for our in ours}
    calls["torch"] = functools.partial(_by_torch, sets)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = units == "tf32"
    try:
        for name, call in calls.items():
            _check(name, call(0), sets[0], units)
        timed = compare(calls, timer=place.timer(), repeats=repeats, seconds=seconds, sets=len(sets), warmup=1)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return [
        _ladder_row(_case(rung, kernels[rung.key], n, predicted[rung.key], place), predicted[rung.key], timed, place)
        for rung in rungs
    ] + [
        _ladder_row(our.case(n), None, timed, place)
        for our in ours
    ]  # fmt: skip


def _by_rung(rung: Rung, kernel: CompiledKernel, sets: Sets, c: Tensor, index: int) -> Tensor:
    a, b = sets[index]
    kernel(rung.grid(len(a)), rung.block, [a, b, c, len(a)])
    return c


def _by_ours(rung: OurRung, sets: Sets, index: int) -> Tensor:
    a, b = sets[index]
    config = rung.config
    result: Tensor = tm.kernels.fused_matmul(a, b, activation="none", implementation=config.kind, config=config)
    return result


def _by_torch(sets: Sets, index: int) -> Tensor:
    return sets[index][0] @ sets[index][1]


def _case(rung: Rung, kernel: CompiledKernel, n: int, predicted: RungTime, place: LadderPlace) -> dict[str, Any]:
    reads, shared = rung.predicted(n)
    resident = studies.occupancy(place.device, rung.threads, kernel.registers, kernel.shared_bytes)
    return {
        "rung": rung.key, "n": n, "units": rung.units, "global_reads": reads, "shared_reads": shared,
        "bound_by": predicted.bound_by, "registers": kernel.registers, "local_bytes": kernel.local_bytes,
        "shared_bytes": kernel.shared_bytes, "blocks_per_sm": resident.blocks,
    }  # fmt: skip


def _ladder_row(case: Mapping[str, Any], predicted: RungTime | None, timed: Comparison, place: LadderPlace) -> Row:
    measured = timed.get(case["rung"])
    predicted_s = None if predicted is None else predicted.predicted_s
    return make_row(
        "ladder", {**case, "limit_from": "datasheet"}, measured, peers={"torch": timed["torch"]},
        predicted=Estimate(predicted_s, "the counting model knows CUDA text only"),
        limit=Estimate(2 * case["n"] ** 3 / place.device.peak(case["units"])),
        missing={} if measured else {"measured": timed.missing[case["rung"]]},
    )  # fmt: skip


def _check(name: str, result: object, operands: Operands, units: str) -> None:
    """Against float64, over the whole matrix: rounding of the operands, and of sums in float32."""
    assert isinstance(result, Tensor)
    exact = operands[0].double() @ operands[1].double()
    error = float((result.double() - exact).norm() / exact.norm())
    bound = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 1e-3}[units]
    if not error <= bound:
        raise RunError(f"rung {name}: relative error {error:.1e} against float64, expected at most {bound:.0e}")


# The studies ----------------------------------------------------------------------------------------------------------


def study_kernels(blocks: int = 2**17) -> dict[str, dict[str, studies.SmallKernel]]:
    """The variants of each study, the plain one first."""
    paths = {f"{paths} paths": studies.divergence(paths, 1, 4096, blocks // 128, 256) for paths in (1, 2, 4, 8, 32)}
    strides = (1, 2, 4, 8, 16, 32, 33)
    return {
        "divergence": {**paths, "32 paths, whole warps": studies.divergence(32, 32, 4096, blocks // 128, 256)},
        "coalescing": {f"stride {stride}": studies.strided_copy(stride, blocks, 256) for stride in (1, 2, 4, 8, 32)},
        "bank conflicts": {f"stride {stride}": studies.strided_banks(stride, 4096, blocks // 16) for stride in strides},
        "convolution": {
            "global": studies.convolution(shared=False, blocks=2 * blocks),
            "shared": studies.convolution(shared=True, blocks=2 * blocks),
        },
    }


# Time over that of the plain variant, from what the interpreter counts.
RATIOS: dict[str, Callable[[studies.SmallKernel], float]] = {
    "divergence": lambda kernel: studies.paths_in_warp(kernel.constants["PATHS"], kernel.constants["RUN"]),
    # Half of a copy's bytes are written, in order; a sector of 32 bytes holds 8 elements.
    "coalescing": lambda kernel: (min(8, kernel.constants["STRIDE"]) + 1) / 2,
    "bank conflicts": lambda kernel: studies.passes_per_request(kernel.constants["STRIDE"]),
    "convolution": lambda kernel: 1.0,  # the L1 serves the second and third reading: device memory sees one
}


def study_rows(
    repeats: int = 15, seconds: float = 1.5, blocks: int = 2**17, on: LadderPlace | None = None
) -> list[Row]:
    """Divergence, coalescing, bank conflicts, the convolution and occupancy."""
    place = on or this_gpu()
    rows: list[Row] = []
    for study, kernels in study_kernels(blocks).items():
        calls = {name: _study_call(kernel, place) for name, kernel in kernels.items()}
        timed = compare(calls, timer=place.timer(), repeats=repeats, seconds=seconds, warmup=1)
        plain = next(iter(kernels))
        for name, kernel in kernels.items():
            predicted_s = None if name == plain else timed[plain].median * RATIOS[study](kernel)
            predicted = Estimate(predicted_s, "the others are predicted from this one")
            rows.append(_study_row(study, name, predicted, timed[name], Estimate(None, "a study of ratios")))
    return rows + _occupancy_rows(place, repeats, seconds, blocks)


def _study_row(
    study: str, variant: str, predicted: Estimate, measured: Sample, limit: Estimate, **more: CaseValue
) -> Row:
    return make_row(
        "ladder study", {"study": study, "variant": variant, **more}, measured, predicted=predicted, limit=limit,
        no_peers="variants of one kernel are compared",
    )  # fmt: skip


def _study_call(small: studies.SmallKernel, place: LadderPlace, unused: int = 0) -> Callable[[int], object]:
    kernel = place.compile(small.text(), small.name, 0)
    values = torch.randn(small.inputs, device=place.name)
    output = torch.empty(small.grid[0] * small.block[0], device=place.name)

    def call(index: int) -> Tensor:
        kernel(small.grid, small.block, [values, output, output.numel()], unused)
        return output

    return call


def _occupancy_rows(place: LadderPlace, repeats: int, seconds: float, blocks: int) -> list[Row]:
    """A copy whose blocks reserve shared memory that they do not use: fewer of them fit, fewer bytes are in flight."""
    small = studies.strided_copy(1, blocks, 256)
    registers = place.compile(small.text(), small.name, 0).registers
    resident = {
        unused: studies.occupancy(place.device, 256, registers, unused) for unused in (0, 40_000, 90_000, 200_000)
    }
    calls = {f"{fits.blocks} blocks": _study_call(small, place, unused) for unused, fits in resident.items()}
    timed = compare(calls, timer=place.timer(), repeats=repeats, seconds=seconds, warmup=1)
    predicted = Estimate(None, "no model of latency")
    limit = Estimate(8 * small.inputs / place.device.memory_bytes_per_s)
    return [
        _study_row("occupancy", name, predicted, timed[name], limit, warps_per_sm=fits.warps, limit_from="datasheet")
        for name, fits in zip(calls, resident.values(), strict=True)
    ]


# The first kernel -----------------------------------------------------------------------------------------------------


def first_rows(copied_bytes: int = 2**26, repeats: int = 15) -> list[Row]:
    """A launch returns at once, and the result is there later; a copy from pinned memory runs at the link's rate."""
    place = this_gpu()
    rung, n = v1(), 2048
    kernel = place.compile(rung.text(), "matmul", 0)
    a, b, c = (torch.randn(n, n, device=place.name) for _ in range(3))
    returned, finished = [], []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        _by_rung(rung, kernel, [(a, b)], c, 0)
        returned.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        finished.append(time.perf_counter() - begin)
    expected = predicted_time(rung, n, place.device).predicted_s
    rows = [
        _first_row("launch returns", place.device.launch_s, returned[1:], None),
        _first_row("result is there", place.device.launch_s + expected, finished[1:], None),
    ]
    target = torch.empty(copied_bytes, dtype=torch.uint8, device=place.name)
    plain = torch.ones(copied_bytes, dtype=torch.uint8)
    limit = copied_bytes / host_link(place.device).bytes_per_s
    for word, source_, predicted in (("pageable", plain, None), ("pinned", plain.pin_memory(), limit)):
        copy = functools.partial(target.copy_, source_, non_blocking=word == "pinned")
        wait = torch.cuda.synchronize
        name = f"{copied_bytes >> 20} MiB from {word} memory"
        rows.append(_first_row(name, predicted, repeated(copy, repeats, before=wait, after=wait), limit))
    return rows


def _first_row(what: str, predicted: float | None, readings: Sequence[float], limit: float | None) -> Row:
    no_model, no_limit = "no model of the driver's staging buffer", "none of hardware"
    measured = Sample.of(readings)
    return _study_row("first kernel", what, Estimate(predicted, no_model), measured, Estimate(limit, no_limit))
