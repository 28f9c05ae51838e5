"""A Ray of this machine starts torchrun, whose ranks train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilemesh.runs.files import read_object

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_starts_the_ranks_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    sets = "train.steps=4,evaluate.every=0,sample.tokens=0,model.layers=1,model.width=16,model.heads=2,train.device=cpu"
    words = ["train", "tiny", "--mesh", "dp=2", "--set", sets, "--out", str(tmp_path / "run")]
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), "--ranks-per-node", "2", "--", *words]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = read_object(tmp_path / "run" / "summary.json")
    assert (summary["world"], summary["step"], summary["backend"]) == (2, 4, "torch")
