"""The ladder's measurements with the interpreter in a GPU's place, and the reads of our own kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import tilemesh as tm
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import find_device
from tilemesh.guide.ladder import gpu, rungs, studies
from tilemesh.guide.ladder.interpret import launch
from tilemesh.guide.ladder.ours import OurRung, our_rungs
from tilemesh.kernels.matmul.config import Config
from tilemesh.measure.timing import LoopTimer


def count_triton(config: Config, n: int) -> int:
    """Elements that a Triton kernel reads for an n x n x n product without C, counted in Triton's interpreter."""
    random = np.random.default_rng(0)
    a, b = (torch.from_numpy(random.standard_normal((n, n)).astype(np.float16)) for _ in range(2))
    with _counting() as counted:
        result = tm.kernels.fused_matmul(a, b, activation="none", implementation="interpret", config=config)
    assert torch.allclose(result.float(), a.float() @ b.float(), atol=2**-9 * n, rtol=2**-9)
    return sum(counted)


@contextmanager
def _counting() -> Iterator[list[int]]:
    """Every load of Triton's interpreter adds its elements to the list; one through a descriptor is a masked one."""
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    original = builder.create_masked_load
    counted: list[int] = []

    def masked_load(pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        counted.append(int(np.asarray(mask.data).sum()))
        return original(pointers, mask, *rest, **named)

    builder.create_masked_load = masked_load
    try:
        yield counted
    finally:
        del builder.create_masked_load  # the class's own again


def interpreted(text, name, dynamic_bytes):
    """What NVRTC would be given, run by the interpreter."""

    def run(grid, block, arguments, dynamic):
        names = re.search(rf"void (?:__launch_bounds__\(.*?\) )?{name}\((.*?)\)", text).group(1)
        words = [parameter.split()[-1].lstrip("*") for parameter in names.split(",")]
        given = {}
        for word, value in zip(words, arguments, strict=True):
            if isinstance(value, torch.Tensor):
                value = (
                    value.view(torch.int16).numpy().view(np.uint16) if value.dtype is torch.float16 else value.numpy()
                )
            given[word] = value
        launch(text, name, grid, block, given, dynamic // 2)

    return gpu.CompiledKernel(run, 32, dynamic_bytes, 0, dynamic_bytes)


PLACE = gpu.LadderPlace("cpu", find_device("h200"), 0, interpreted, lambda: LoopTimer(min_reading_s=1e-6))
SMALL = (
    rungs.v1(side=8),
    rungs.tensor_cores(tile=64, s=16, wm=32, wn=16),
    rungs.half(lm=32, ln=64, s=32, wm=16, wn=32, stages=3),
)


def test_rows_of_the_ladder():
    rows = gpu.ladder_rows(64, rungs=SMALL, ours=(), repeats=1, seconds=0.01, on=PLACE)
    assert [row.case["rung"] for row in rows] == ["v1", "tensor cores", "lower precision"]
    assert [row.case["global_reads"] for row in rows] == [2 * 64**3, 2 * 64**3 / 64, 64**3 * 3 / 64]
    for row in rows:
        assert None not in (row.predicted, row.measured, row.limit)
        assert "torch" in row.peers


def test_a_rung_that_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(rungs.Rung, "text", lambda rung: rungs.source("v1.cu").replace("sum +=", "sum ="))
    with pytest.raises(RunError, match="rung v1: relative error"):
        gpu.ladder_rows(64, rungs=SMALL[:1], ours=(), repeats=1, seconds=0.01, on=PLACE)


def test_rows_of_the_studies(monkeypatch):
    few = {
        "divergence": {"1": studies.divergence(1, 1, 4, 1), "2": studies.divergence(2, 1, 4, 1)},
        "coalescing": {"1": studies.strided_copy(1, 1), "2": studies.strided_copy(2, 1)},
        "bank conflicts": {"1": studies.strided_banks(1), "2": studies.strided_banks(2)},
        "convolution": {"global": studies.convolution(shared=False), "shared": studies.convolution(shared=True)},
    }
    assert set(few) == set(gpu.study_kernels()) == set(gpu.RATIOS)
    monkeypatch.setattr(gpu, "study_kernels", lambda blocks: few)
    rows = gpu.study_rows(repeats=1, seconds=0.01, blocks=1, on=PLACE)
    assert {row.case["study"] for row in rows} == {*few, "occupancy"}
    ratios = {row.case["study"]: row.predicted for row in rows if row.predicted}
    plain = {row.case["study"]: row.measured.median for row in reversed(rows) if not row.predicted}
    expected = {"divergence": 2, "coalescing": 1.5, "bank conflicts": 2, "convolution": 1}
    assert ratios == {study: pytest.approx(plain[study] * ratio) for study, ratio in expected.items()}


def test_without_a_gpu_the_measurement_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UsageError, match="need an NVIDIA GPU"):
        gpu.ladder_rows()
    with pytest.raises(UsageError, match="need an NVIDIA GPU"):
        gpu.first_rows()


@pytest.mark.parametrize("config", [Config("pointer", 32, 64, 32, 4, 3), our_rungs()[0].config], ids=lambda c: c.label)
def test_triton_reads_what_the_formula_says(config):
    n = 2 * max(config.block_m, config.block_n) if config.kind == "pointer" else 256
    assert count_triton(config, n) == OurRung("", "", "", config).predicted(n)


@pytest.mark.parametrize("paired", [False, True])
def test_pingpong_reads_what_the_formula_says(paired, monkeypatch):
    gluon_machine = pytest.importorskip("gluon_machine")
    pytest.importorskip("tilemesh.kernels.matmul.pingpong")
    from test_matmul_pingpong import emulate, given

    from tilemesh.kernels.matmul.problem import dense

    config, n, loads = Config("pingpong", 128 if paired else 64, 64, 32, 4, 3, paired=paired), 256, []
    original = gluon_machine.Global.load

    def counting(self, where):
        loads.append(self.part(where).size)
        return original(self, where)

    problem = dense(n, n, n, c_kind="none", activation="none")
    arrays, _ = given(problem)
    monkeypatch.setattr(gluon_machine.Global, "load", counting)
    emulate(problem, config, arrays)
    assert sum(loads) == OurRung("", "", "", config).predicted(n)
