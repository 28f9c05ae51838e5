"""Calibration: sizes adapt, predictions come first, figures land where limits look for them, failures are said."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tilemesh.cli.main import make_app
from tilemesh.core.busy import Busyness
from tilemesh.core.calibration import Calibration, Rates, find, path_for
from tilemesh.measure import busy, calibrate_cpu, calibrate_operators
from tilemesh.measure import calibrate as measuring
from tilemesh.measure.busy import OtherWork, again_while_busy
from tilemesh.measure.calibrate import Calibrated, assemble, doubts, measure_figures
from tilemesh.measure.calibrate_layer import BLOCK_CALLS, NORM_MOVES, TURN_MOVES
from tilemesh.measure.calibrate_pinned import Pinned
from tilemesh.measure.figure import Figure, FigureOutcome, best, best_size
from tilemesh.measure.machine import Machine, this_machine
from tilemesh.measure.row import read_rows
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import Comparison, compare
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.operations import layer_work
from tilemesh.model.work.passes import MemoryPass
from tilemesh.model.work.task import Task

TWO_CORES = Machine(id="box-1", words="a box", cpu="x", cores=2, memory_bytes=2**33, gpus=())
ONE_CORE = Machine(id="box-2", words="a small box", cpu="x", cores=1, memory_bytes=2**33, gpus=())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_slow_dtype_ends_at_a_small_size() -> None:
    tried: list[int] = []

    def seconds_at(flops_per_s: float) -> Callable[[int], float]:
        def seconds(size: int) -> float:
            tried.append(size)
            return 2 * size**3 / flops_per_s

        return seconds

    sizes = (32, 64, 128, 256, 512, 1024)
    assert best_size(seconds_at(1e8), sizes, longest_s=0.1, slack=0.1) == 128
    assert max(2 * size**3 / 1e8 for size in tried) <= 0.1
    assert best_size(seconds_at(1e12), sizes, longest_s=0.1, slack=0.1) == 1024


def test_the_best_size_is_not_the_largest_when_rates_fall() -> None:
    times = {32: 32**3 / 1.0, 64: 64**3 / 10.0, 128: 128**3 / 8.0}
    assert best_size(times.__getitem__, times, longest_s=1e9) == 64
    assert best_size(times.__getitem__, times, longest_s=1e9, slack=0.25) == 128


def test_the_fastest_routine_counts_and_peers_stay_peers() -> None:
    result = Comparison(
        {"sum": Sample.of([2.0]), "amax": Sample.of([1.0]), "numpy": Sample.of([0.5])},
        {"broken": ValueError("no")},
    )
    outcome = best(result, 8.0, peers=["numpy"])
    assert (outcome.measured, outcome.case) == (Sample.of([8.0]), {"by": "amax"})
    assert outcome.peers == {"numpy": Sample.of([16.0])}
    none = best(Comparison({}, {"sum": ValueError("no")}), 8.0)
    assert none.measured is None
    assert none.missing["measured"] == "sum: ValueError: no"


def test_figures_are_predicted_before_anything_runs() -> None:
    figures = calibrate_cpu.cpu_figures(TWO_CORES, quick=True)
    assert len(figures) == 49
    by_key = {(f.part, f.rate, f.dtype): f for f in figures}
    one, two = (by_key[part, "matmul_flops_per_s", "fp32"].predicted for part in ("one_core", "all_cores"))
    assert one is not None
    assert two == 2 * one
    assert by_key["one_core", "matmul_flops_per_s", "fp64"].predicted == one / 2
    assert by_key["one_core", "matmul_flops_per_s", "bf16"].missing["predicted"]
    assert {f.part for f in calibrate_cpu.cpu_figures(ONE_CORE)} == {"one_core"}


def test_a_layers_calls_are_counted_as_the_planner_counts_them() -> None:
    """What an operation costs is a tiny layer's time over its calls; the planner multiplies it by its own count."""
    model = ModelConfig(
        layers=1, width=8, heads=2, vocabulary=8, context=8, mlp_width=16, norm="rmsnorm", positions="rotary",
        activation="swiglu", biases=False, tied=False,
    )  # fmt: skip
    work = layer_work(model, Task(1, 8, 8, precision="fp32", code="eager", gpu=False))
    assert sum(getattr(op, "launches", 1) for op in (*work.forward, *work.backward)) == BLOCK_CALLS
    moved = [op.nbytes for op in (*work.forward, *work.backward) if op.name == "norms" and isinstance(op, MemoryPass)]
    assert sum(moved) == 2 * NORM_MOVES * 4 * 8 * 8  # two norms of 8 tokens, 8 wide
    turned = [op.nbytes for op in (*work.forward, *work.backward) if op.name == "rotary" and isinstance(op, MemoryPass)]
    assert sum(turned) == 2 * TURN_MOVES * 4 * 8 * 8  # queries and keys


def test_buffers_go_far_beyond_the_cache_but_leave_memory() -> None:
    mib, gib = 2**20, 2**30
    assert calibrate_cpu.buffer_bytes(64 * gib, cache_bytes=32 * mib) == 256 * mib
    assert calibrate_cpu.buffer_bytes(512 * gib, cache_bytes=512 * mib) == 2 * gib
    assert calibrate_cpu.buffer_bytes(gib, cache_bytes=32 * mib) == 128 * mib
    assert calibrate_cpu.buffer_bytes(64 * gib, quick=True, cache_bytes=64 * mib) == 128 * mib


def test_the_last_cache_is_counted_once_for_those_who_share_it(tmp_path: Path) -> None:
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        for index, level, size in ((0, 1, "64K"), (3, 3, "32768K")):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(text + "\n")
    assert calibrate_cpu.last_cache_bytes(tmp_path) == 64 * 2**20
    assert calibrate_cpu.last_cache_bytes(tmp_path / "nothing") == 32 * 2**20


def test_vectors(tmp_path: Path) -> None:
    (tmp_path / "wide").write_text("flags : fma avx2 avx512f\n")
    (tmp_path / "plain").write_text("flags : fma avx2\n")
    assert calibrate_cpu.vector_bytes(tmp_path / "wide", "x86_64") == 64
    assert calibrate_cpu.vector_bytes(tmp_path / "plain", "x86_64") == 32
    assert calibrate_cpu.vector_bytes(tmp_path / "plain", "aarch64") == 16


def test_torch_gets_its_threads_back() -> None:
    before = torch.get_num_threads()

    def fail_inside() -> None:
        with calibrate_cpu.torch_threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert torch.get_num_threads() == before


def figure(measured: float | Exception, **changes: Any) -> Figure:
    def measure() -> FigureOutcome:
        if isinstance(measured, Exception):
            raise measured
        return FigureOutcome(Sample.of([measured]), case={"by": "hand"})

    fields: dict[str, Any] = {
        "part": "one_core",
        "rate": "copy_bytes_per_s",
        "name": "copy",
        "case": {"cores": 1},
        "unit": "B/s",
        "predicted": 1.0,
        "limit": None,
        "missing": {"limit": "none known", "peers": "none"},
        "measure": measure,
    }
    return Figure(**(fields | changes))


def some_figures(**medians: float) -> list[Figure]:
    return [
        figure(10.0, rate="matmul_flops_per_s", name="matmul", dtype="fp32", unit="FLOP/s"),
        figure(medians.get("copy", 5.0)),
        figure(MemoryError("no room"), rate="read_bytes_per_s", name="read"),
        figure(2e-6, rate="launch_s", name="call", unit="s"),
        figure(medians.get("all_copy", 9.0), part="all_cores"),
        figure(1e-6, part="gpu", rate="kernel_floor_s", name="kernel (device)", unit="s"),
    ]


def test_one_figure_that_fails_is_a_row_that_says_why() -> None:
    told: list[tuple[int, int, str]] = []
    rows = measure_figures(some_figures(), lambda *words: told.append(words))
    assert [row.measured is None for row in rows] == [False, False, True, False, False, False]
    assert rows[2].missing["measured"] == "MemoryError: no room"
    assert rows[1].case == {"cores": 1, "by": "hand"}
    assert told[0] == (0, 6, "matmul fp32, one core")
    assert told[-1] == (6, 6, "done")


def test_medians_land_where_limits_look_for_them() -> None:
    figures = some_figures()
    made = assemble(TWO_CORES, figures, measure_figures(figures))
    assert made.one_core == Rates(matmul_flops_per_s={"fp32": 10.0}, copy_bytes_per_s=5.0, launch_s=2e-6)
    assert made.all_cores == Rates(copy_bytes_per_s=9.0, launch_s=2e-6)
    assert (made.gpu, made.extra) == (None, {"gpu_kernel": {"floor_s": 1e-6}})
    alone = [one for one in figures if one.part == "one_core"]
    small = assemble(ONE_CORE, alone, measure_figures(alone))
    assert small.all_cores == small.one_core


def test_what_others_stored_is_carried_over() -> None:
    Calibration("box-1", "a box", "2026-01-01T00:00:00+00:00").with_section("collectives", {"alpha_s": 1e-6}).save()
    figures = some_figures()
    made = assemble(TWO_CORES, figures, measure_figures(figures))
    assert made.extra["collectives"] == {"alpha_s": 1e-6}


def test_a_busy_machine_raises_doubts() -> None:
    calm = some_figures(copy=5.0, all_copy=9.0)
    rows = measure_figures(calm)
    assert doubts(assemble(TWO_CORES, calm, rows), rows) == []
    slow = some_figures(copy=5.0, all_copy=5.2)
    rows = measure_figures(slow)
    assert doubts(assemble(TWO_CORES, slow, rows), rows) == ["copy on all cores reached only 1.04 times one core"]


@pytest.mark.usefixtures("warm")
def test_this_machine_calibrates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the GPU has tests of its own
    for module in (calibrate_cpu, calibrate_operators):  # the fewest readings there can be
        monkeypatch.setattr(module, "compare", lambda *calls, **named: compare(*calls, **(named | {"seconds": 1e-6})))
    monkeypatch.setattr(calibrate_cpu, "Pinned", lambda cores, seconds: Pinned(cores, 1e-6))
    calibrated = measuring.calibrate(quick=True)
    assert all(row.measured is not None for row in calibrated.rows), [row.missing for row in calibrated.rows]
    one = calibrated.calibration.rates("one_core")
    assert set(one.matmul_flops_per_s) == {"fp32", "fp64", "bf16", "fp16"}
    assert None not in (one.copy_bytes_per_s, one.read_bytes_per_s, one.write_bytes_per_s, one.launch_s)
    assert calibrated.calibration.rates("all_cores").copy_bytes_per_s is not None
    assert Calibration.from_dict(json.loads(json.dumps(calibrated.calibration.to_dict()))) == calibrated.calibration


QUIET = Busyness(0.0, 0.0)


@pytest.fixture
def made() -> Calibrated:
    """A calibration of this machine whose figures cost nothing, for what the command does with one."""
    figures = some_figures()
    rows = measure_figures(figures)
    calibration = assemble(this_machine(), figures, rows)
    layers = dataclasses.replace(calibration.rates("all_cores"), operation_s=1e-6)
    return Calibrated(tuple(rows), dataclasses.replace(calibration, all_cores=layers))


def run(
    made: Calibrated, monkeypatch: pytest.MonkeyPatch, *arguments: str, others: Sequence[float] = (0.0,)
) -> tuple[str, str]:
    """`others`: what other work uses of the cores, try by try."""
    left = [Busyness(share, 0.0) for share in others]
    monkeypatch.setattr(OtherWork, "busyness", lambda self, samples: left.pop(0))
    monkeypatch.setattr(busy, "again_while_busy", partial(again_while_busy, sleep=lambda seconds: None))

    def stand_in(quick: bool, progress: Callable[[int, int, str], None], **named: Any) -> Calibrated:
        progress(0, 1, "matmul, one core")
        progress(1, 1, "done")
        return made

    monkeypatch.setattr(measuring, "calibrate", stand_in)
    result = CliRunner().invoke(make_app(["calibrate"]), ["calibrate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout, result.stderr


def test_the_command_shows_rows_and_stores(made: Calibrated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, _ = run(made, monkeypatch, "--json", str(tmp_path / "rows.jsonl"))
    assert "[1/1] matmul, one core" in out
    assert "predicted" in out
    assert read_rows(tmp_path / "rows.jsonl") == list(made.rows)
    assert find(made.calibration.identity) == made.calibration.with_section("busy", QUIET.to_dict())


def test_a_busy_machine_is_measured_again_and_its_figures_never_replace_quiet_ones(
    made: Calibrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = made.calibration.identity

    def stored() -> object:
        calibration = find(identity)
        assert calibration is not None
        return calibration.extra["busy"]

    def said(*others: float) -> str:
        out, _ = run(made, monkeypatch, others=others)
        assert max(len(line) for line in out.splitlines() if not line.startswith("calibration: ")) <= 100
        return " ".join(out.split())

    out = said(0.5, 0.3, 0.4)
    assert out.count("measuring again in 5 s") == 2
    assert "measured on a busy machine (other work used 30% of the cores)" in out
    assert stored() == Busyness(0.3, 0.0).to_dict()
    out = said(0.5, 0.01)
    assert out.count("measuring again") == 1
    assert stored() == Busyness(0.01, 0.0).to_dict()
    out = said(0.2, 0.2, 0.2)
    assert "was measured on a quieter machine, and stays" in out
    assert stored() == Busyness(0.01, 0.0).to_dict()


def test_if_missing_measures_once(made: Calibrated, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "calibrating once, for predictions and limits: " in run(made, monkeypatch, "--if-missing")[0]
    assert run(made, monkeypatch, "--if-missing") == ("", "")
    path_for(made.calibration.identity).write_text("{")
    assert "`tilemesh calibrate` shows them" in run(made, monkeypatch, "--if-missing")[0]
    all_cores = made.calibration.rates("all_cores")
    dataclasses.replace(made.calibration, all_cores=dataclasses.replace(all_cores, operation_s=None)).save()
    assert "calibrating once" in run(made, monkeypatch, "--if-missing")[0]  # of a version that measured no layers
    assert run(made, monkeypatch, "--if-missing") == ("", "")


def test_rows_have_standard_output_to_themselves(
    made: Calibrated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, err = run(made, monkeypatch, "--json", "-", "--no-save")
    assert [json.loads(line)["name"] for line in out.splitlines()] == [row.name for row in made.rows]
    assert "predicted" in err
    assert find(made.calibration.identity) is None
