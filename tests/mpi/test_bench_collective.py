"""`tilemesh bench collective` from the command to its rows: fit two ranks, then bench what was not fitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilemesh.bench.collective.cells import Cell
from tilemesh.bench.collective.fit import arrays
from tilemesh.bench.collective.ranks import Bench
from tilemesh.bench.collective.run import CollectiveJob
from tilemesh.cli.main import main
from tilemesh.comm import run_threads
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.runtime.fit import Fit
from tilemesh.core.cores import available_cores
from tilemesh.launch.start import find_mpiexec
from tilemesh.measure.row import Row, read_rows

PARTS = ("set-up", "copy", "wire", "reduce", "wait")


@pytest.mark.slow
@pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")
def test_a_fit_and_rows_with_all_their_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    common = ["bench", "collective", "--ranks", "2", "--transport", "mpi", "--quick"]
    assert main([*common, "--fit", "--sizes", "2KiB"]) == 0
    assert "a meeting takes" in capfd.readouterr().out
    (stored,) = (tmp_path / "tilemesh" / "calibration").iterdir()
    fit = Fit.from_dict(json.loads(stored.read_text())["collectives"][f"mpi/2/{available_cores()}"])
    assert {"message", "reduce", "copy", "call", "all_reduce/native", "all_to_all/direct"} <= set(fit.curves)

    rows_file, chart = tmp_path / "rows.jsonl", tmp_path / "chart.svg"
    assert main([*common, "all_reduce", "--sizes", "512B,1KiB", "--json", str(rows_file), "--chart", str(chart)]) == 0
    page, progress = capfd.readouterr()
    assert max(len(line) for line in page.splitlines() if str(tmp_path) not in line) <= 100  # paths stay whole
    assert "2 ranks: all_reduce 512 bytes, ordinary arrays\n" in progress
    assert "2 ranks: all_reduce 512 bytes, arrays from comm.empty\n" in progress
    assert "native/ours" in page
    assert "auto within 10 % of the quickest it could have picked in" in page
    rows = [row for row in read_rows(rows_file) if row.unit == "s"]
    names = {row.case["algorithm"] for row in rows if row.case["buffers"] == "empty"}
    assert {"auto", "native", "native_by_us", "flat", "flat_one", "direct", "direct_slices", "ring", "tree"} <= names
    for row in rows:
        assert row.measured is not None
        assert (row.predicted is not None) == (row.case["algorithm"] != "native")
        assert row.case["oversubscribed"] in (True, False)
        if row.case["algorithm"] == "auto":
            assert (
                0.97 < sum(float(str(row.case[f"in_{p}"])) for p in ("set-up", "copy", "wire", "reduce", "wait")) < 1.03
            )
            assert "native" in row.speedup
    ring = next(row for row in rows if row.case["algorithm"] == "ring" and row.case["bytes"] == 1024)
    assert ring.case["sent_bytes"] == 1024  # 2 (n - 1) / n of it
    assert chart.read_text().startswith("<svg")


def test_what_computing_hides_has_no_spread() -> None:
    """It follows from three medians: nothing says how far it is from another reading."""

    def measured(comm: Communicator) -> Row:
        bench = Bench(comm, CollectiveJob("command"))
        return bench._overlap("auto", 4096, *arrays(comm, Cell("all_reduce", comm.size, 4096)))

    row, _ = run_threads(2, measured)
    assert row.measured is not None
    assert (row.measured.n, row.unit) == (1, "fraction")
