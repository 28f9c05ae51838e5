"""The guide's GPU rows, with the CPU in place of the GPU: tensors instead of arrays, the rest is the same code."""

from __future__ import annotations

import io
from functools import partial
from importlib import import_module
from typing import Any

import pytest
from rich.console import Console

from tilemesh.comm import run_threads
from tilemesh.guide import on_gpu
from tilemesh.guide.book import part_of
from tilemesh.guide.collectives import work as collectives
from tilemesh.guide.data_parallel import work as data_parallel
from tilemesh.guide.dataflow import work as dataflow
from tilemesh.guide.pipelines import work as pipelines
from tilemesh.guide.runner import run_part
from tilemesh.guide.tensor_parallel import work as tensor_parallel
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.measure.table import render

SMALL: dict[str, partial[tuple[Row, float]]] = {
    "data_parallel": partial(data_parallel.gpu_row, samples=24, width=16),
    "tensor_parallel": partial(tensor_parallel.gpu_row, tokens=8, width=16, hidden=32),
    "pipelines": partial(pipelines.gpu_row, width=8),
}


@pytest.mark.parametrize("folder", SMALL)
def test_ranks_that_share_a_device_compute_what_one_process_does(folder: str) -> None:
    row, apart = SMALL[folder]("cpu")
    assert 0 <= apart < 1e-10
    assert row.measured is not None
    assert row.measured.n == 5
    assert row.predicted is not None
    assert row.predicted >= row.peers["one process"].median, "sending adds to one process's time"
    assert "'cpu'" in row.missing["limit"]
    assert "gpu" in row.case
    assert "one process" in render([row])


def test_an_all_reduce_of_gpu_tensors_is_a_row() -> None:
    times = run_threads(4, partial(collectives.seconds_on, nbytes=1 << 16, device="cpu"))
    assert [len(one) for one in times] == [3] * 4
    row = on_gpu.all_reduce_row("cpu", 4, 1 << 16, Sample.of([1e-3]), lambda: Sample.of(times[0]))
    assert row.predicted is not None
    assert row.predicted > 1e-3
    assert row.peers["from host memory"].median == 1e-3


def test_a_known_gpu_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "name_of", lambda device: "NVIDIA H200")
    row, _ = SMALL["data_parallel"]("cpu")
    assert row.limit == pytest.approx(5 * 2 * 24 * 16 * 16 / 66.9e12)
    copied = on_gpu.all_reduce_row("cpu", 4, 1 << 20, Sample.of([1e-3]), lambda: Sample.of([2e-3]))
    assert copied.limit is not None
    assert copied.limit > 4 * (1 << 20) / 100e9


@pytest.mark.slow
@pytest.mark.parametrize(("key", "folder"), [("5", "data_parallel"), ("6", "tensor_parallel"), ("7", "pipelines")])
def test_a_chapter_adds_its_gpu_row(key: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work: Any = import_module(f"tilemesh.guide.{folder}.work")
    monkeypatch.setattr(on_gpu, "gpu", lambda: "cpu")
    monkeypatch.setattr(work, "gpu_row", SMALL[folder])
    rows = run_part(part_of(key), Console(file=io.StringIO(), width=120))
    assert sum("gpu" in row.case for row in rows) == 1


def test_chapter_15_times_its_network_on_a_device() -> None:
    seconds = dataflow.on_device("cpu", (1, 2))
    assert set(seconds) == {f"batch {batch}{layout}" for batch in (1, 2) for layout in ("", ", channels last")}
    assert min(seconds.values()) > 0
