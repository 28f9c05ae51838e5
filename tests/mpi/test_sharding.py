"""Who holds what: batches and parameters cut and put together, as values; and whole models through any layout."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

sys.path.insert(0, str(Path(__file__).parent))
import parallel_cases

from tilemesh.comm import run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.shard import Shard
from tilemesh.launch.start import find_mpiexec
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.weights import shard_parameters
from tilemesh.parallel.apply import transformer_splits
from tilemesh.parallel.shard import ColumnSplit, Split, VocabularySplit, elements, join, shard, split_data, take

NEEDS_MPI = pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")
TP2, TP4 = (("tp", 2),), (("tp", 4),)
PROCESSES = [pytest.param("mpi", marks=NEEDS_MPI), "torch"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_whole_models_through_any_layout(ranks: int) -> None:
    run_threads(ranks, parallel_cases.sharding)


@pytest.mark.parametrize("transport", PROCESSES)
def test_whole_models_through_any_layout_of_processes(transport: str) -> None:
    parallel_cases.require_part(transport, "sharding")


@given(rows=some.integers(0, 40), dp=some.integers(1, 9), trailing=some.lists(some.integers(1, 3), max_size=3))
def test_a_batch_is_cut_into_contiguous_views_that_differ_by_at_most_one(
    rows: int, dp: int, trailing: list[int]
) -> None:
    x = np.arange(rows * math.prod(trailing)).reshape(rows, *trailing)
    y = np.arange(rows)
    parts = [split_data(x, y, dp, index) for index in range(dp)]
    assert np.array_equal(np.concatenate([part for part, _ in parts]), x)
    assert np.array_equal(np.concatenate([part for _, part in parts]), y)
    sizes = [len(part) for part, _ in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert all(part.base is not None and np.shares_memory(part, x) for part, _ in parts if part.size)


def test_a_batch_of_tensors_too() -> None:
    x, y = torch.arange(10).reshape(5, 2), torch.arange(5)
    mine, targets = split_data(x, y, 2, 1)
    assert mine.tolist() == [[6, 7], [8, 9]]
    assert targets.tolist() == [3, 4]
    assert mine.data_ptr() == x[3].data_ptr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones((3, 2)), np.ones(4), 2, 0), "x has shape (3, 2) and y (4,): expected as many rows"),
        ((np.ones(3), np.ones(3), 2, 2), "replica 2 of 2: expected an index from 0 and below the size"),
        ((np.ones(3), np.ones(3), 0, 0), "replica 0 of 0"),
        ((np.array(1.0), np.ones(1), 1, 0), "x has shape ()"),
    ],
)
def test_a_batch_that_cannot_be_cut(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_data(*arguments)
    assert message in str(caught.value)


@given(
    tp=some.sampled_from([1, 2, 3, 4, 8]),
    times=some.integers(1, 3),
    split=some.sampled_from(
        ["column", "row", "vocabulary", "whole", ColumnSplit(parts=3), ColumnSplit(units=2, repeats=True)]
    ),
    is_bias=some.booleans(),
    is_torch=some.booleans(),
)
def test_every_split_has_its_inverse(tp: int, times: int, split: str | Split, is_bias: bool, is_torch: bool) -> None:
    """Every number is on some rank, once for each copy, and the parts put together are the whole."""
    if split == ColumnSplit(units=2, repeats=True) and tp == 3:
        return
    rows = 72 * times + (5 if split == "vocabulary" else 0)
    shape = (rows,) if is_bias else (rows, 24)
    name = "layer.bias" if is_bias else "layer.weight"
    whole = np.random.default_rng(times).normal(size=shape)
    given_ = torch.from_numpy(whole) if is_torch else whole
    shards = [shard(name, shape, split, (("tp", tp), ("dp", 2)), rank) for rank in range(2 * tp)]
    parts = [take(mine, given_) for mine in shards]
    assert [tuple(part.shape) for part in parts] == [mine.shape for mine in shards]
    assert type(parts[0]) is type(given_)
    assert np.array_equal(np.asarray(join(shards, parts)), whole)
    assert [shards[-1].on(rank) for rank in range(2 * tp)] == shards
    owners = [mine for mine in shards if mine.writes]
    assert sum(math.prod(mine.shape) for mine in owners) == whole.size
    assert all(mine.rank < tp for mine in owners)


def test_kv_heads_fewer_than_ranks_are_held_by_several() -> None:
    split = ColumnSplit(units=2, repeats=True)
    shards = [shard("fc_k.weight", (6, 4), split, (("tp", 4),), rank) for rank in range(4)]
    assert [(mine.boxes[0][1].begin, mine.copies, mine.writes, mine.summed) for mine in shards] == [
        ((0, 0), 2, True, (("tp", 2),)), ((0, 0), 2, False, (("tp", 2),)),
        ((3, 0), 2, True, (("tp", 2),)), ((3, 0), 2, False, (("tp", 2),)),
    ]  # fmt: skip


def test_a_vocabulary_that_tp_does_not_divide_is_cut_unevenly_without_padding() -> None:
    shards = [shard("t.weight", (10, 2), VocabularySplit(), (("tp", 4),), rank) for rank in range(4)]
    assert [mine.shape for mine in shards] == [(3, 2), (3, 2), (2, 2), (2, 2)]
    whole = np.arange(20.0).reshape(10, 2)
    assert np.array_equal(join(shards, [take(mine, whole) for mine in shards]), whole)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shard("a.weight", (6, 4), "column", TP4), "a.weight: its output of 6 is not divisible by 4 ranks"),
        (lambda: shard("a.weight", (6, 5), "row", TP2), "a.weight: its input of 5 is not divisible by 2 ranks of tp"),
        (lambda: shard("a.weight", (6, 4), "colum", TP2), "unknown split 'colum': did you mean 'column'?"),
        (
            lambda: shard("a.weight", (6, 4), ColumnSplit(units=3), TP2),
            "the 3 units of a.weight cannot be split evenly",
        ),
        (
            lambda: shard("a.weight", (6, 4), ColumnSplit(units=3, repeats=True), TP4),
            "the 3 units of a.weight cannot be split nor repeated evenly over it",
        ),
        (lambda: shard("a.weight", (6, 4), ColumnSplit(units=2), TP4), "tp is 4: the 2 units of a.weight"),
        (
            lambda: shard("t.weight", (3, 2), VocabularySplit(), TP4),
            "t.weight has 3 rows: every rank needs at least one",
        ),
        (lambda: take(Shard("a.weight", (2, 2)), np.ones((2, 3))), "the whole array has shape (2, 3), expected (2, 2)"),
    ],
)
def test_what_cannot_be_cut_is_named(make: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()  # type: ignore[operator]
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["tiny", "gpt2-124m", "tinyllama-1.1b", "llama-3-8b"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_holds_what_the_planner_counts(name: str, tp: int) -> None:
    config: ModelConfig = preset(name)
    counted = shard_parameters(config, tp)
    wanted = config.layers * counted.layer + counted.embeddings + counted.head
    kinds = transformer_splits(config)
    from tilemesh.parallel.apply import _matched

    model = Transformer(config, device="meta")
    found = _matched(model, kinds)
    held = {
        key: shard(
            key, value.shape, found.get(key.rpartition(".")[0], "whole"), (("tp", tp),)
        )  # of the first: the largest
        for key, value in model.named_parameters()
    }
    assert elements(held) == wanted
