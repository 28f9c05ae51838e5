"""Energy counters by what the system says: files as Linux has them, and NVML's functions as its header has them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from tilemesh.core.energy import EnergyCounter, EnergyMeter, cpu_counter, gpu_counter, modelled_watts


def domain(folder: Path, name: str, kind: str, microjoules: int, most: int = 1000) -> None:
    (folder / name).mkdir(exist_ok=True)
    for file, value in (("name", kind), ("energy_uj", microjoules), ("max_energy_range_uj", most)):
        (folder / name / file).write_text(f"{value}\n")


def test_packages_and_memory_add_up_and_a_counter_that_begins_again_goes_on(tmp_path: Path, clock: list[float]) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", 100)
    domain(tmp_path, "intel-rapl:0:0", "core", 70)  # is in its package's
    domain(tmp_path, "intel-rapl:0:1", "dram", 10)
    domain(tmp_path, "intel-rapl:1", "package-1", 990)
    counter = cpu_counter(tmp_path)
    assert isinstance(counter, EnergyCounter)
    meter = EnergyMeter(counter)
    clock[0] += 1
    assert (meter.source, meter.take()) == ("RAPL", 0)
    clock[0] += 1
    domain(tmp_path, "intel-rapl:0", "package-0", 150)
    domain(tmp_path, "intel-rapl:0:0", "core", 500)
    domain(tmp_path, "intel-rapl:0:1", "dram", 15)
    domain(tmp_path, "intel-rapl:1", "package-1", 30)  # 990 → 1000 → 30
    assert meter.take() == pytest.approx((50 + 5 + 40) / 1e6, rel=1e-9)
    clock[0] += 1
    assert meter.take() == 0


def test_why_there_is_no_figure_is_said(tmp_path: Path) -> None:
    assert cpu_counter(tmp_path) == "not measured: this machine has no RAPL counters"
    domain(tmp_path, "intel-rapl:0", "package-0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert "energy_uj cannot be read" in str(cpu_counter(tmp_path))
    meter = EnergyMeter(cpu_counter(tmp_path))
    assert meter.take() is None
    assert meter.source.startswith("not measured")


class Nvml:
    """Two of its functions, with results as the header has them: 0, or an error's number."""

    def __init__(self, millijoules: list[int], counts: bool = True) -> None:
        self.millijoules, self.counts = millijoules, counts

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        handle._obj.value = 7
        return 0 if name == b"GPU-abc" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: ctypes.c_void_p, energy: Any) -> int:
        assert handle.value == 7
        if not self.counts:
            return 3
        energy._obj.value = self.millijoules.pop(0)
        return 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, which a test moves on."""
    now = [0.0]
    monkeypatch.setattr("tilemesh.core.energy.time.monotonic", lambda: now[0])
    return now


def test_a_gpu_counts_in_millijoules_and_over_more_than_a_moment(clock: list[float]) -> None:
    counter = gpu_counter("abc", Nvml([1, 1000, 1000 + 2**40, 1000 + 2**40, 5000 + 2**40]))
    assert isinstance(counter, EnergyCounter)
    meter = EnergyMeter(counter)
    clock[0] += 3
    assert (meter.source, meter.take()) == ("NVML", 2**40 / 1e3)
    clock[0] += 0.1
    assert meter.take() is None
    assert meter.why_none == "not measured: nothing took 2 s, which NVML's counter needs"
    clock[0] += 2.5
    assert meter.take() == 4
    assert gpu_counter("GPU-abc", Nvml([1])).device == counter.device  # type: ignore[union-attr]
    assert "knows no device GPU-x" in str(gpu_counter("x", Nvml([1])))
    assert "counts no energy" in str(gpu_counter("abc", Nvml([], counts=False)))


def test_the_model_is_a_line_from_idle_to_the_limit() -> None:
    assert modelled_watts(700, 0, 1 / 7) == pytest.approx(100)
    assert modelled_watts(700, 1, 1 / 7) == pytest.approx(700)
    assert modelled_watts(700, 0.5, 1 / 7) == pytest.approx(400)
