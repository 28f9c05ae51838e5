"""Kernel time and call time on a real GPU: right work, right sets, clear reasons, nothing left broken behind."""

from __future__ import annotations

import pytest
import torch

from tilemesh.core.errors import RunError
from tilemesh.measure.calibrate import assemble, measure_figures
from tilemesh.measure.calibrate_gpu import gpu_figures
from tilemesh.measure.gpu import CudaGraphs, KernelTimer, call_timer, l2_cache_bytes, rotating_sets
from tilemesh.measure.machine import this_machine
from tilemesh.measure.timing import Check, Timer, compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

N = 256


def timers() -> list[Timer]:
    return [KernelTimer(), call_timer()] if torch.cuda.is_available() else []


@pytest.mark.parametrize("which", [0, 1], ids=["kernel", "call"])
def test_the_work_that_is_timed_is_done_and_verified(which: int) -> None:
    timer = timers()[which]
    sets = [(torch.randn(N, N, device="cuda"), torch.randn(N, N, device="cuda")) for _ in range(3)]
    out = torch.empty(N, N, device="cuda")
    stale = torch.empty(N, N, device="cuda")

    def ours(index: int) -> torch.Tensor:
        return torch.mm(*sets[index], out=out)

    def eager(index: int) -> torch.Tensor:  # allocates its result: in a graph that memory is the graph's own
        return sets[index][0] @ sets[index][1]

    def idle(index: int) -> torch.Tensor:
        return stale

    def poison(name: str, result: object) -> None:
        assert isinstance(result, torch.Tensor)
        result.fill_(float("nan"))

    def verify(name: str, result: object, index: int) -> None:
        assert isinstance(result, torch.Tensor)
        if not torch.allclose(result, sets[index][0] @ sets[index][1], rtol=1e-3, atol=1e-3):
            raise RunError(f"{name} is wrong on set {index}")

    result = compare(
        {"ours": ours, "eager": eager, "idle": idle}, timer=timer, repeats=5, sets=3, check=Check(poison, verify)
    )
    assert {"ours", "eager"} == set(result)
    assert set(result.missing) == {"idle"}  # no kernel at all, or a result that stayed poisoned
    assert 0 < result["ours"].p20 <= result["ours"].p80


def test_what_cannot_be_captured_says_why_and_the_rest_is_timed() -> None:
    x = torch.randn(N, device="cuda")

    def synchronises(index: int) -> float:
        return float(x.sum())

    result = compare({"synchronises": synchronises, "good": lambda i: x.add_(1)}, timer=KernelTimer(), repeats=3)
    assert set(result) == {"good"}
    assert "cannot be captured in a CUDA graph" in result.missing["synchronises"]
    # The stream, random numbers, allocation and further captures are as before.
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()
    assert torch.isfinite(torch.randn(N, device="cuda")).all()
    again = compare({"good": lambda i: x.mul(2.0)}, timer=KernelTimer(), repeats=3)
    assert again.missing == {}


def test_a_failure_in_the_call_itself_is_the_reason() -> None:
    a, b = torch.randn(2, 3, device="cuda"), torch.randn(2, 3, device="cuda")
    result = compare({"wrong": lambda i: a @ b}, timer=KernelTimer(), repeats=3)
    assert "shapes cannot be multiplied" in result.missing["wrong"]


def test_a_capture_replays_on_new_data() -> None:
    x = torch.ones(N, device="cuda")
    graphs = CudaGraphs()
    graphs.warm(lambda: x * 3)
    captured = graphs.capture(lambda: x * 3)
    x.fill_(5.0)
    assert captured.replay_s() > 0
    assert isinstance(captured.result, torch.Tensor)
    assert (captured.result == 15).all()


def test_rotation_goes_past_this_gpus_l2() -> None:
    size = 4 << 20
    made = rotating_sets(lambda index: torch.empty(size, dtype=torch.uint8, device="cuda"), size)
    assert sum(one.numel() for one in made) >= 2 * l2_cache_bytes() > 0


def test_this_gpu_calibrates() -> None:
    before = torch.get_float32_matmul_precision()
    figures = gpu_figures(quick=True)
    rows = measure_figures(figures)
    failed = {row.name + str(dict(row.case)): row.missing["measured"] for row in rows if row.measured is None}
    assert failed == {}
    assert torch.get_float32_matmul_precision() == before
    made = assemble(this_machine(), figures, rows)
    rates = made.rates("gpu")
    assert {"fp64", "fp32", "fp16"} <= set(rates.matmul_flops_per_s)
    assert None not in (rates.copy_bytes_per_s, rates.read_bytes_per_s, rates.write_bytes_per_s, rates.launch_s)
    assert made.extra["gpu_kernel"]["floor_s"] > 0
