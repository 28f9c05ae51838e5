"""Every chapter of the guide runs from top to bottom, with nobody to ask, and holds what it asserts."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tilemesh.guide import on_gpu
from tilemesh.guide.book import PARTS, GuidePart, part_of
from tilemesh.guide.runner import run_part


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.folder)
def test_a_chapter_runs(part: GuidePart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    out = io.StringIO()
    rows = run_part(part, Console(file=out, width=120))
    assert len(rows) >= 2, "a chapter asks for two predictions at least"
    guessed = [row for row in rows if row.guess is not None]
    assert guessed
    assert all(row.guess == row.predicted for row in guessed), "without a reader the cost model answers"
    assert all(row.measured is not None for row in guessed)
    assert len(guessed) >= 2
    assert all(len(row.name) <= 40 for row in rows), "give long questions a short name for the table"
    assert not list(tmp_path.iterdir()), "a run without a reader is no progress of theirs"


@pytest.mark.slow
def test_chapter_3_adds_its_gpu_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU in the GPU's place, on four processes; the other chapters' rows: tests/cpu/test_guide_gpu.py."""
    monkeypatch.setattr(on_gpu, "gpu", lambda: "cpu")
    rows = run_part(part_of("3"), Console(file=io.StringIO(), width=120))
    (row,) = [row for row in rows if "gpu" in row.case]
    assert row.measured is not None
    assert row.measured.n == 3
    assert list(row.peers) == ["from host memory"]
