"""The timed exchange: what is called hidden, its rows, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilemesh.bench.train.exchange import hidden, rows_of
from tilemesh.bench.train.exchange_rank import measure
from tilemesh.comm import connect, run_threads
from tilemesh.core.errors import UsageError
from tilemesh.launch.start import find_mpiexec
from tilemesh.measure.sample import Sample
from tilemesh.model.config import ModelConfig

TINY = ModelConfig(layers=1, width=8, heads=2, vocabulary=16, context=8)


def samples(**medians: float) -> dict[str, Sample]:
    return {name: Sample(value, value * 0.999, value * 1.001, 9) for name, value in medians.items()}


@pytest.mark.parametrize(
    ("bucketed", "fraction"), [(1.0, 1.0), (1.25, 0.5), (1.5, 0.0), (1.75, -0.5)], ids=["all", "half", "none", "worse"]
)
def test_hidden_is_what_the_step_does_not_show(bucketed: float, fraction: float) -> None:
    found = samples(compute=1.0, after=1.5, bucketed=bucketed, naive=2.0)
    assert hidden(found) == pytest.approx(fraction)
    step, share = rows_of({"samples": {n: vars_of(s) for n, s in found.items()}, "case": {"rows": 1}}, 4)
    assert step.limit == 1.0
    assert step.speedup["naive"] == pytest.approx(2.0 / bucketed)
    assert share.measured is not None
    assert share.measured.median == pytest.approx(fraction)


def vars_of(sample: Sample) -> dict[str, float]:
    return {"median": sample.median, "p20": sample.p20, "p80": sample.p80, "n": sample.n}


def test_a_share_of_nothing_is_not_told() -> None:
    found = samples(compute=1.0, after=1.001, bucketed=0.9, naive=1.0)
    assert hidden(found) is None
    _, share = rows_of({"samples": {n: vars_of(s) for n, s in found.items()}, "case": {}}, 2)
    assert share.measured is None
    assert "too small" in share.missing["measured"]


def test_all_ways_are_timed_on_all_ranks_alike() -> None:
    results = run_threads(
        2, lambda comm: measure(comm, TINY, rows=1, tokens=4, bucket_bytes=100, repeats=3, seconds=1.0)
    )
    assert results[0].keys() == {"compute", "after", "bucketed", "naive"}
    assert results[0] == results[1]


def test_an_exchange_with_nobody_is_refused() -> None:
    with pytest.raises(UsageError, match="give at least 2"):
        measure(connect("alone"), TINY, rows=1, tokens=4, bucket_bytes=100)


@pytest.mark.slow
@pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    line = [sys.executable, "-m", "tilemesh", "bench", "exchange", "--ranks", "2", "--transport", "mpi", "--rows", "1"]
    line += ["--tokens", "8", "--repeats", "3", "--json", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "step with gradient exchange" in done.stdout
    assert [json.loads(row)["unit"] for row in file.read_text().splitlines()] == ["s", "fraction"]
