"""Memory that runs out: one line that says what was needed and what to change, whoever noticed."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilemesh as tm
from tilemesh.cli.main import explain
from tilemesh.core.errors import RunError
from tilemesh.core.exhausted import out_of_memory
from tilemesh.train import rank

HUGE = 1 << 56  # more address space than any of the served machines has
SETS = (
    "model.layers=1,model.width=16,model.heads=2,model.kv_heads=2,model.mlp_width=32,model.context=16,train.steps=2,"
    "train.batch=4,evaluate.every=0,evaluate.sequences=2,sample.tokens=0,train.trace_steps=0,train.device=cpu"
)


def _torch() -> object:
    return torch.empty(HUGE, dtype=torch.uint8)


def _numpy() -> object:
    return np.zeros(HUGE, np.uint8)


def _python() -> object:
    return bytearray(HUGE)


def _system() -> object:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize(
    ("allocate", "size"),
    [(_torch, "64 PiB"), (_numpy, "64.0 PiB"), (_python, "what is needed next"), (_system, "what is needed next")],
)
def test_whoever_fails_to_allocate_the_command_line_says_so_in_one_line(allocate: Any, size: str) -> None:
    with pytest.raises((MemoryError, RuntimeError, OSError)) as failed:
        allocate()
    for command, less in (("serve", "--pages"), ("compress", "--calibrate"), ("plan", "more memory")):
        line, code = explain(failed.value, [command, "x"]) or ("", 0)
        assert code == 1
        assert less in line
        assert line.startswith(f"out of memory: {size} could not be allocated")


def test_a_gpu_is_told_from_the_machine_and_other_errors_from_both() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139")
    assert out_of_memory(error) == "out of GPU memory: 20.00 GiB could not be allocated"
    for other in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(errno.ENOSPC, "full"),
        KeyError(1),
    ):
        assert out_of_memory(other) is None


def test_training_says_what_the_run_needs_and_what_needs_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "make_stepper", lambda *arguments: _torch())
    text = tmp_path / "text.txt"
    text.write_text("bottles on the wall\n" * 300)
    config = tm.train.load_config(sets=[SETS, f"data.source={text}", "plan.microbatch=4"], mesh="dp=1")
    with pytest.raises(RunError) as failed:
        tm.train.fit(config, run=tmp_path / "run")
    said = re.fullmatch(
        r"out of memory: 64 PiB could not be allocated.*; 1 rank of dp 1 x tp 1 x pp 1, microbatch 4 needs (\S+ \S+) "
        r"as predicted, besides what Python and its libraries take; --set plan\.microbatch=(\d),plan\.accumulation="
        r"(\d) needs (\S+ \S+)",
        str(failed.value),
    )
    assert said is not None, str(failed.value)
    assert int(said[2]) * int(said[3]) == 4
    assert tm.core.units.parse_bytes(said[4]) < tm.core.units.parse_bytes(said[1])


@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v is Linux's")
def test_a_library_that_would_end_the_process_gets_a_line(tmp_path: Path) -> None:
    """OpenBLAS ends a process in which it finds no room, inside of an import, with a line of its own and code 1."""
    (tmp_path / "numpy.py").write_text("import os; os.write(2, b'OpenBLAS error: giving up'); os._exit(1)")
    (tmp_path / "text.txt").write_text("words")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = f"{sys.executable} -m tilemesh data prepare {tmp_path / 'text.txt'} {tmp_path / 'out'}"
    ended = under_limit(4 << 20, f"env PYTHONPATH={path} {command}")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "tilemesh: out of memory: what is needed next could not be allocated (`ulimit -v` allows 4 GiB in all: raise "
        "it); ask for less, or use a machine with more memory\n"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v is Linux's")
def test_a_rank_that_ends_under_a_limit_names_the_limit() -> None:
    code = "from tilemesh.launch.blame import death_reason; print(death_reason(1))"
    ended = under_limit(4 << 20, f"{sys.executable} -c '{code}'")
    assert ended.stdout == "exited with code 1 (`ulimit -v` allows 4 GiB in all: raise it)\n"


def under_limit(kib: int, command: str) -> subprocess.CompletedProcess[str]:
    words = ["bash", "-c", f"ulimit -v {kib}; exec {command}"]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v is Linux's")
@pytest.mark.parametrize("kib", [1_500_000, 1_000_000, 800_000])
def test_a_run_under_a_limit_ends_well_or_in_a_line(kib: int, tmp_path: Path) -> None:
    ended = under_limit(kib, f"{sys.executable} -m tilemesh train --out {tmp_path / 'run'} --mesh dp=1 --set {SETS}")
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 0 or "out of memory" in ended.stderr
