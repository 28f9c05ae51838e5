"""The tuner's search on made-up and on recorded timings, and the command lines that need no GPU to refuse."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from tilemesh.cli.bench_kernel import bench_kernel
from tilemesh.cli.tune import tune
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import DEVICES
from tilemesh.kernels.matmul import cache, choice, search
from tilemesh.kernels.matmul.bench import SUITE
from tilemesh.kernels.matmul.cache import Entry, Table
from tilemesh.kernels.matmul.chart import draw
from tilemesh.kernels.matmul.choice import should_tune
from tilemesh.kernels.matmul.config import Config, space
from tilemesh.kernels.matmul.cost import predict_s, rates_of
from tilemesh.kernels.matmul.problem import dense
from tilemesh.kernels.matmul.run import Gpu
from tilemesh.measure.row import read_rows

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROBLEM = dense(2048, 2048, 2048)
RATES = rates_of(DEVICES["h200"], "float16")
GRID = space(PROBLEM)


def predicted(config: Config) -> float:
    return predict_s(PROBLEM, config, RATES)


def crooked(config: Config) -> float:
    """A truth the cost model does not know: it likes one stage count, and one kind less than predicted."""
    wrong = (
        1
        + 0.1 * abs(config.stages - 4)
        + 0.3 * (config.kind == "persistent")
        + 0.05 * abs(math.log2(config.block_k / 128))
    )
    return predicted(config) * wrong


def test_search_is_bounded_without_repeats_and_the_same_each_time():
    def run():
        return search.search(GRID, predicted, lambda batch: [crooked(config) for config in batch], len(GRID) // 4)

    trials = run()
    assert len(trials) == len(GRID) // 4 == len({trial.config for trial in trials})
    assert trials == run()


def test_search_learns_where_the_model_is_wrong():
    trials = search.search(GRID, predicted, lambda batch: [crooked(config) for config in batch], len(GRID) // 4)
    assert search.best(trials).seconds <= 1.02 * min(crooked(config) for config in GRID)


def test_failures_do_not_stop_the_search():
    def half_fail(batch):
        return [math.inf if config.stages == 3 else crooked(config) for config in batch]

    trials = search.search(GRID, predicted, half_fail, 40)
    assert len(trials) == 40
    assert math.isfinite(search.best(trials).seconds)


def test_small_and_empty_spaces():
    assert search.search([], predicted, list, 5) == []
    assert len(search.search(GRID[:3], predicted, lambda batch: [1.0] * len(batch), 50)) == 3
    assert len(search.search(GRID, predicted, lambda batch: [1.0] * len(batch), 1)) == 1


def test_pruning_keeps_the_best_prediction():
    values = [predicted(config) for config in GRID]
    kept = search.prune(GRID, values)
    assert GRID[values.index(min(values))] in kept
    assert len(kept) < len(GRID)


def test_tune_modes(monkeypatch):
    table = Table("gpu", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for mode, wanted in (("never", False), ("once", True), ("always", True)):
        monkeypatch.setenv("TILEMESH_TUNE", mode)
        assert should_tune(PROBLEM, table) is wanted
        assert should_tune(dense(8, 8, 0), table) is False
    table.entries[PROBLEM.key] = Entry(Config("library"), 1.0)
    assert should_tune(PROBLEM, table) is True  # always
    monkeypatch.setenv("TILEMESH_TUNE", "once")
    assert should_tune(PROBLEM, table) is False
    monkeypatch.setenv("TILEMESH_TUNE", "sometimes")
    with pytest.raises(UsageError, match="TILEMESH_TUNE"):
        should_tune(PROBLEM, table)


def test_names_mean_configurations_on_a_pretended_h200(monkeypatch, tmp_path):
    gpu = Gpu("NVIDIA H200", (9, 0), 132, 232448)
    monkeypatch.setattr(choice, "gpu_of", lambda index: gpu)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TILEMESH_TUNE", raising=False)
    choice.user_table.cache_clear()
    device = torch.device("cuda", 0)
    shipped = cache.shipped("NVIDIA H200").entries
    assert choice.choose(PROBLEM, "auto", None, device) == shipped[PROBLEM.key].config
    mine = Config("pointer", 64, 64, 64)
    cache.store("NVIDIA H200", choice.versions(), {PROBLEM.key: Entry(mine, 1e-5)})
    choice.user_table.cache_clear()
    assert choice.choose(PROBLEM, "auto", None, device) == mine
    assert choice.choose(PROBLEM, "split", None, device).kind == "split"
    assert choice.choose(PROBLEM, "library", None, device) == Config("library")
    assert choice.choose(PROBLEM, "auto", Config("tma"), device) == Config("tma")
    choice.user_table.cache_clear()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tune(["2048x2048"]), "write MxNxK"),
        (lambda: tune(["8x8x8"], dtype="float8"), "unknown dtype"),
        (lambda: tune(["8x8x8"], c="rows"), "did you mean 'row'"),
        (lambda: bench_kernel("softmax"), "unknown operator"),
        (lambda: bench_kernel(shapes="8x8"), "write MxNxK"),
        (lambda: bench_kernel(dtype="float16,int8"), "unknown dtype"),
    ],
)
def test_commands_refuse_what_they_do_not_know(call, words):
    with pytest.raises(UsageError, match=words):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_commands_say_that_they_need_a_gpu():
    with pytest.raises(UsageError, match="GPU"):
        tune(["8x8x8"])
    with pytest.raises(UsageError, match="GPU"):
        bench_kernel(shapes="8x8x8")


def test_the_claim_holds_on_the_recorded_grids():
    """Within 2 % of the grid's best in at most a quarter of its trials, replayed from every trial made on an H200."""
    spec = importlib.util.spec_from_file_location("tuner_claim", BENCHMARKS / "tuner_claim.py")
    claim = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(claim)
    recorded = claim.read_trials(BENCHMARKS / "results" / "matmul_grid_h200_float16.jsonl")
    assert {key.split(" ")[0] for key in recorded} == {"2048x2048x2048", "8192x8192x1024", "64x4096x4096"}
    for key, trials in recorded.items():
        grid, made, ratio = claim.replay(key, trials)
        assert grid == len(space(dense(*(int(side) for side in key.split(" ")[0].split("x"))))), (
            "the grid was not complete"
        )
        assert made * 4 <= grid
        assert ratio <= 1.02


def test_the_chart_shows_every_recorded_shape(tmp_path):
    rows = read_rows(BENCHMARKS / "results" / "matmul_rows_h200_float16.jsonl")
    draw(rows, str(tmp_path / "roofline.svg"))
    text = (tmp_path / "roofline.svg").read_text(encoding="utf-8")
    assert all(f">{shape}<" in text for shape in SUITE)
    with pytest.raises(UsageError, match="svg"):
        draw(rows, str(tmp_path / "roofline.png"))
    with pytest.raises(UsageError, match="no kernel-time rows"):
        draw([], str(tmp_path / "roofline.svg"))
