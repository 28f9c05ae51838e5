"""A run on fewer ranks than were asked for: which layout it gets, when ranks count as lost, and who waits beside it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tilemesh.core.errors import RunError, UsageError
from tilemesh.launch.blame import Failure
from tilemesh.model.work.weights import why_not
from tilemesh.runs.manifest import folder_name
from tilemesh.runs.names import CHECKPOINTS, LOCK, PREDICTED
from tilemesh.train import elastic
from tilemesh.train.check import JobRequest, check_job, check_values
from tilemesh.train.config import TrainConfig
from tilemesh.train.elastic import LostRanks, check_min_ranks, fit_to_ranks, wait_beside
from tilemesh.train.load import load

DIED = Failure(1, "was killed by SIGKILL", "step 3", 0.1)


@pytest.fixture(scope="module")
def full() -> TrainConfig:
    sets = "model.layers=2,model.heads=2,model.kv_heads=2,plan.precision=fp64,train.batch=12,train.device=cpu"
    return load("tiny", mesh="dp=2,tp=2,pp=2", sets=[sets])


@pytest.mark.parametrize("ranks", [1, 3, 5, 6])
def test_fewer_ranks_get_another_layout_of_the_same_job(full: TrainConfig, ranks: int) -> None:
    other = fit_to_ranks(full, ranks, 1)
    assert 1 <= other.ranks <= ranks
    assert other.plan.batch == other.batch == full.batch == 12
    assert other.plan.precision == "fp64"
    assert other.changed(plan=vars(full.plan)) == full  # nothing but the plan is another
    assert why_not(other.model, other.plan) is None
    check_values(other)
    assert (
        fit_to_ranks(full, other.ranks, 1) == other
    )  # every rank finds it, also one that knows of those that take part


def test_as_many_ranks_as_were_asked_for_get_what_was_asked_for(full: TrainConfig) -> None:
    assert fit_to_ranks(full, 8, 2) is full
    assert fit_to_ranks(full, 11, 2) is full
    with pytest.raises(RunError, match=r"^3 ranks are there, and --min-ranks is 4: go on when there are more$"):
        fit_to_ranks(full, 3, 4)


def test_ranks_that_divide_nothing_stay_beside() -> None:
    """A batch of 8 and a model of 2 layers with 2 heads over 5 ranks."""
    sets = "model.layers=2,model.heads=2,model.kv_heads=2,train.batch=8,train.device=cpu"
    config = load("tiny", mesh="dp=8", sets=[sets])
    assert fit_to_ranks(config, 5, 3).ranks == 4
    with pytest.raises(RunError, match="no layout of a batch of 8 on 5 to 5 ranks"):
        fit_to_ranks(config, 5, 5)


def test_a_layout_that_cuts_groups_of_a_stored_base_is_passed_over(
    full: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = fit_to_ranks(full, 6, 6)

    def check_stored(config: TrainConfig) -> None:
        if config.plan == usual.plan:
            raise UsageError("groups of 64 do not divide the inputs of a rank")

    monkeypatch.setattr(elastic, "check_stored", check_stored)
    other = fit_to_ranks(full, 6, 6)
    assert other.ranks == 6
    assert other.plan != usual.plan


def test_gpus_are_planned_for_as_what_they_are(full: TrainConfig) -> None:
    big = load("llama-3-8b", mesh="dp=1,tp=8", sets=["train.batch=8"])
    other = fit_to_ranks(big, 7, 4, ["NVIDIA H200"] * 8)
    assert 4 <= other.ranks <= 7
    assert other.plan.precision == big.plan.precision


@pytest.mark.parametrize(
    ("sets", "fewest", "words"),
    [
        ("", 0, "min_ranks is 0: expected 1 to 8"),
        ("", 9, "min_ranks is 9: expected 1 to 8"),
        ("train.method=local", 2, "min_ranks and local: on another number of ranks it trains other weights"),
        ("method.compress=powersgd", 2, "min_ranks and powersgd"),
    ],
)
def test_what_depends_on_the_number_of_ranks_is_refused(sets: str, fewest: int, words: str) -> None:
    config = load("tiny", mesh="dp=8", sets=[sets] if sets else [])
    with pytest.raises(UsageError, match=words):
        check_min_ranks(config, fewest)


def test_min_ranks_needs_somebody_who_starts_again(full: TrainConfig) -> None:
    with pytest.raises(UsageError, match="min_ranks without restarts"):
        check_job(full, JobRequest(min_ranks=2))


def saved(folder: Path, step: int) -> None:
    (folder / CHECKPOINTS / folder_name(step)).mkdir(parents=True)


def test_a_rank_that_dies_again_before_a_checkpoint_is_lost_until_there_is_one(
    full: TrainConfig, tmp_path: Path
) -> None:
    lost = LostRanks(tmp_path, full, 5, lambda: 0)
    assert lost.after(DIED) is full
    fewer = lost.after(DIED)
    assert fewer.ranks == 6
    assert lost.after(DIED) == fewer  # five have no layout: six are tried again
    saved(tmp_path, 4)
    assert lost.after(DIED) is full
    assert lost.after(Failure(None, "took too long", "", 0.0)) is full  # nobody in particular


def test_gpus_that_are_gone_are_lost_ranks(full: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = 8
    monkeypatch.setattr(elastic, "usable_gpus", lambda: ("NVIDIA H200",) * shown)
    on_gpu = full.changed(train={"device": "auto"})
    lost = LostRanks(tmp_path, on_gpu, 2, lambda: shown)
    shown = 6
    assert lost.after(DIED).ranks <= 6
    shown = 8
    saved(tmp_path, 4)
    assert lost.after(DIED) is on_gpu


def test_who_waits_beside_ends_with_the_others(tmp_path: Path) -> None:
    waiting = threading.Thread(target=wait_beside, args=(tmp_path,))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()
    (tmp_path / LOCK).write_text("{}")
    (tmp_path / PREDICTED).write_text("{}")
    time.sleep(0.8)
    assert waiting.is_alive()
    (tmp_path / LOCK).unlink()
    waiting.join(20)
    assert not waiting.is_alive()
