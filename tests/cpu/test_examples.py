"""Examples do what their words say."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilemesh.comm import run_threads
from tilemesh.data.digits import drawn_digits, load_digits

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_digits_are_there_without_a_download() -> None:
    digits = load_digits()
    assert digits.images.shape == (1797, 8, 8)
    assert digits.images.min() >= 0
    assert digits.images.max() <= 1
    assert sorted(set(digits.labels.tolist())) == list(range(10))
    assert digits.source.startswith(("handwritten", "drawn"))


def test_drawn_digits_follow_from_their_seed_and_are_told_apart_by_their_means() -> None:
    digits, again, others = drawn_digits(600, 1), drawn_digits(600, 1), drawn_digits(600, 2)
    assert np.array_equal(digits.images, again.images)
    means = np.stack([digits.images[digits.labels == digit].mean(0) for digit in range(10)])
    distances = ((others.images[:, None] - means) ** 2).sum((2, 3))
    share = float((distances.argmin(1) == others.labels).mean())
    assert 0.6 < share < 0.97  # readable, and not so easy that a network has nothing to learn


@pytest.mark.slow
def test_asynchronous_pipelines_read_97_percent_of_the_digits() -> None:
    module = example("asynchronous_digits")
    shares = module["main"](lambda function: run_threads(4, function))
    for name in ("ampnet", "pipemare", "pipedream"):
        assert shares[name] >= 0.97, (name, shares)


def test_a_network_without_filters_is_the_network_with_those_filters_at_zero() -> None:
    module = example("filter_pruning")
    model = module["network"](6, 8).double()
    smaller = module["pruned"](model, 0.5).double()
    with torch.no_grad():
        for place in (0, 3):
            strength = model[place].weight.abs().sum((1, 2, 3))
            for parameter in (model[place].weight, model[place].bias):
                parameter[strength.argsort()[: len(strength) // 2]] = 0
        images = module["IMAGES"][:50].double()
        assert float((model(images) - smaller(images)).abs().max()) < 1e-6  # copied through float32
    assert [smaller[place].weight.shape[0] for place in (0, 3)] == [3, 4]


@pytest.mark.slow
def test_pruned_filters_save_operations_and_single_weights_do_not() -> None:
    rows = example("filter_pruning")["main"]()
    assert rows["and trained again"][0] > max(0.9, rows["filters taken out"][0])
    assert rows["and trained again"][2] < 0.4 * rows["whole"][2] == 0.4 * rows["single weights, again"][2]


def test_features_by_tasks_and_by_rows_are_the_same() -> None:
    module = example("task_parallel")
    for found in run_threads(2, module["main"]):
        assert found["apart"] == 0
        assert found["tasks, predicted"] >= found["rows, predicted"]
    assert module["assigned"]([1.0, 5.0, 2.0, 3.0], 2) == [[1, 0], [3, 2]]
    assert sorted(task for own in module["assigned"]([4.0, 1.0, 1.0, 1.0], 2) for task in own) == [0, 1, 2, 3]
    assert module["assigned"]([4.0, 1.0, 1.0, 1.0], 2)[0] == [0]  # the dearest alone: the others are less together


@pytest.mark.slow
def test_networks_k_means_and_regression_are_those_of_one_process() -> None:
    module = example("data_parallel")
    for report in run_threads(2, module["main"]):
        assert report.keys() == {"CNN", "RNN", "K-means", "logistic regression"}
        for name, (far, _) in report.items():
            assert far < 1e-9, name  # float64 sums in another order, over 120 steps


def test_two_steps_of_a_recurrent_network_are_those_of_one_process() -> None:
    module = example("data_parallel")
    train, lines = module["train"], module["Lines"]
    train.__globals__["STEPS"] = 2
    alone = run_threads(1, lambda comm: train(comm, lines))[0][0]
    together = run_threads(2, lambda comm: train(comm, lines))[1][0]
    assert module["difference"](together, alone) < 1e-12


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loop_sees_drift_deploys_and_rolls_back(tmp_path: Path) -> None:
    journal = example("loop")["main"](tmp_path)
    assert [step.what for step in journal] == [
        "evaluate", "watch", "watch", "compare", "deploy", "watch", "roll back",
    ]  # fmt: skip
    assert "as usual" in journal[1].words
    assert "DRIFT" in journal[2].words
    assert journal[5].surprise > journal[4].surprise
    assert "are back" in journal[6].words


def test_the_loops_monitor_counts_standard_errors() -> None:
    monitor = example("loop")["Monitor"].of([1.0, 3.0, 1.0, 3.0, 2.0])
    assert monitor.mean == 2
    assert monitor.spread == 1
    assert monitor.excess([3.0] * 9) == pytest.approx(3.0)
