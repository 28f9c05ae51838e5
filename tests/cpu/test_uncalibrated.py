"""On a machine without a calibration no command predicts a time: the column is missing and says why.

What is counted (bytes), or computed from this run's own measurements, needs no calibration.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilemesh.bench.graph.study import call_of, inputs_of, predicted_here, study_row
from tilemesh.graph import build
from tilemesh.graph.cost import graph_seconds
from tilemesh.graph.ir import Graph

COUNTED = ("B", "fraction", "launches")
COMMANDS = {
    "studies": ["bench", "graph", "--study", "symbolic,partial,branches,memory", "--seconds", "0.05"],
    "graph": ["bench", "graph", "lstm", "--size", "tiny", "--peers", "eager", "--repeats", "2", "--seconds", "1"],
    "train": ["bench", "train", "tiny", "--peers", "eager", "--blocks", "1", "--steps", "2", "--set", "train.batch=2"],
    "serve": [
        "bench", "serve", "tiny", "--requests", "2", "--blocks", "1", "--peers", "none", "--prompt", "8",
        "--output", "4", "--step-length", "16", "--predict", "machine",
    ],
    "exchange": ["bench", "exchange", "--repeats", "2", "--rows", "1", "--tokens", "16"],
    "collective": ["bench", "collective", "all_reduce", "--ranks", "2", "--sizes", "1KiB", "--quick"],
}  # fmt: skip


def test_a_study_of_graphs_predicts_nothing_without_a_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = torch.device("cpu")
    assert predicted_here(place, lambda device: 1.0)[0] is None
    x = build.argument("x", [8, 8])
    graph = Graph((x,), (build.relu(x),))
    guess = predicted_here(place, functools.partial(graph_seconds, graph))
    calls = dict.fromkeys(("ours", "eager"), call_of(graph, inputs_of(graph, place)))
    row = study_row("graph symbolic", {}, guess, calls, 0.01)
    assert row.predicted is None
    assert "tilemesh calibrate" in row.missing["predicted"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", COMMANDS)
def test_no_time_is_predicted_without_a_calibration(name: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tilemesh", *COMMANDS[name], "--json", str(rows)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert written
    for row in written:
        if row["unit"] in COUNTED:
            continue
        assert row["predicted"] is None, row
        assert row["missing"]["predicted"], row
