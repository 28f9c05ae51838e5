"""`tilemesh bench collective --draw`, and that schedules need nothing but Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tilemesh.cli.bench_collective import bench_collective
from tilemesh.comm.schedules.draw import LEGEND
from tilemesh.core.errors import RunError, UsageError


def test_the_schedule_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_collective("all_reduce", draw="ring", ranks=8, svg=tmp_path / "ring.svg")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "ring all_reduce: 8 ranks, 8 chunks"
    assert len(said) == 3 + 1 + 14 + len(["", *LEGEND.splitlines()])
    image = ET.parse(tmp_path / "ring.svg")
    arrows = [line for line in image.iter("{http://www.w3.org/2000/svg}line") if line.get("marker-end")]
    assert len(arrows) == 14 * 8


def test_wrong_use_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"give --draw ALGORITHM; for all_reduce there are ring, "):
        bench_collective("all_reduce")
    with pytest.raises(UsageError, match="unknown algorithm for broadcast 'trea': did you mean 'tree'"):
        bench_collective("broadcast", draw="trea")
    with pytest.raises(RunError, match="could not be written"):
        bench_collective("broadcast", draw="tree", svg=tmp_path / "nowhere" / "x.svg")


@pytest.mark.parametrize("module", ["tilemesh.comm", "tilemesh.comm.schedules.book", "tilemesh.comm.schedules.draw"])
def test_schedules_load_neither_numpy_nor_torch_nor_mpi(module: str) -> None:
    code = f"import {module}, sys; print(sorted({{'torch', 'mpi4py', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
