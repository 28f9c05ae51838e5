"""MapReduce against plain Python, and its programs against what one process and scikit-learn compute."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tilemesh.comm import Communicator, connect, mapreduce, run_threads
from tilemesh.comm.map_reduce import gathered, mapreduce_stream, owner
from tilemesh.core.errors import UsageError
from tilemesh.methods.programs import k_means, k_means_speedup, logistic_regression, small_cnn, word_counts

LINES = [
    f"the {word} and the {word} of {number % 7}"
    for number, word in enumerate(["tile", "mesh", "rank", "été", "語"] * 9)
]


@settings(max_examples=15, deadline=None)
@example(["a file \udc80 name"], 2)
@given(st.lists(st.text(max_size=20), max_size=20), st.integers(1, 4))
def test_words_of_all_ranks_are_counted_once(lines: list[str], ranks: int) -> None:
    parts = run_threads(ranks, lambda comm: word_counts(comm, lines[comm.rank :: ranks]))
    whole = Counter(word for line in lines for word in line.split())
    assert sum(len(part) for part in parts) == len(whole)
    assert dict(whole) == {word: count for part in parts for word, count in part.items()}
    assert all(owner(word, ranks) == rank for rank, part in enumerate(parts) for word in part)


def test_a_combination_of_rows_and_a_result_that_everybody_has() -> None:
    """The largest and the number of values of each key."""

    def main(comm: Communicator) -> tuple[dict, dict]:
        def mapped(number: int) -> list[tuple[str, tuple[int, int]]]:
            return [(f"k{number % 3}", (number, 1))]

        def largest(rows: np.ndarray) -> np.ndarray:
            return np.array([rows[:, 0].max(), rows[:, 1].sum()])

        found = mapreduce(comm, range(comm.rank, 30, comm.size), mapped, largest)
        return found, gathered(comm, {key: value[0] for key, value in found.items()})

    for _, everyone in run_threads(3, main):
        assert everyone == {"k0": 27, "k1": 28, "k2": 29}
    assert {k: tuple(v) for part, _ in run_threads(3, main) for k, v in part.items()} == {
        "k0": (27, 10), "k1": (28, 10), "k2": (29, 10),
    }  # fmt: skip


def test_a_stream_in_micro_batches_ends_where_the_batch_ends() -> None:
    def main(comm: Communicator) -> list[dict]:
        mine = LINES[comm.rank :: 2]
        batches = [mine[begin : begin + 5] for begin in range(0, 20, 5)]
        found = list(mapreduce_stream(comm, batches, lambda line: ((word, 1) for word in line.split())))
        return [*found, word_counts(comm, mine[:20])]

    for results in run_threads(2, main):
        assert results[-2] == results[-1]
        assert sum(results[0].values()) < sum(results[1].values())


@pytest.mark.parametrize(
    ("pairs", "dtype", "words"),
    [
        ([("a", [1, 2]), ("b", [1])], None, "rows of one length"),
        ([("a", [1, 2]), ("a", [1])], None, "a row of numbers of one length"),
        ([(1, 1)], None, "the key 1 is of type int: expected text"),
        ([(b"a", 1)], None, "the key b'a' is of type bytes"),
        ([("a", "many")], None, "the value 'many': expected a number"),
        ([("a", None)], None, "the value None"),
        ([("a", 0.5)], int, "the value 0.5 where dtype is int64: expected whole numbers, or dtype=float"),
        ([("a", float("nan"))], int, "the value nan where dtype is int64"),
    ],
)
def test_what_cannot_be_used_is_refused_on_every_rank_in_one_line(pairs: list, dtype: object, words: str) -> None:
    """One rank is given it; the others would wait for it in the exchange, and refuse too."""

    def main(comm: Communicator) -> str:
        with pytest.raises(UsageError) as refused:
            mapreduce(comm, pairs if comm.rank == 1 else [], lambda pair: [pair], dtype=dtype)
        assert mapreduce(comm, ["x"], lambda key: [(key, 1)]) in ({}, {"x": 3})  # it is usable as before
        return str(refused.value)

    said = run_threads(3, main)
    assert words in said[1]
    assert "\n" not in said[1]
    assert said[0] == said[2]
    assert said[0] == f"rank 1: {said[1]}"


def test_any_text_is_a_key_and_values_keep_what_they_are() -> None:
    """Zero characters and empty text; fractions, infinities and NaN; whole numbers beside fractions elsewhere."""
    given = {"a\0b": 0.5, "": float("inf"), "n": float("nan"), "\1": -2.25}

    def main(comm: Communicator) -> tuple[dict, dict, dict]:
        mine = mapreduce(comm, list(given.items()) if comm.rank == 0 else [("w", 3)], lambda pair: [pair])
        whole = mapreduce(comm, [("w", 2**53 + 1)], lambda pair: [pair])
        return mine, gathered(comm, mine), whole

    found = run_threads(2, main)
    assert sum(len(mine) for mine, _, _ in found) == 5
    for _, everyone, _ in found:
        assert str(everyone.pop("n")) == "nan"
        assert everyone == {"a\0b": 0.5, "": float("inf"), "\1": -2.25, "w": 3.0}
    assert {key: int(value) for _, _, whole in found for key, value in whole.items()} == {"w": 2**54 + 2}


@pytest.mark.parametrize(
    ("values", "dtype", "sums"),
    [
        ([2**62] * 4, None, None),
        ([2**62, -(2**62), -1, 2**62], None, 2**62 - 1),
        ([2**63 - 2, 1, 0, 0], None, 2**63 - 1),
        ([-(2**62)] * 2, None, -(2**63)),
        ([2**63], None, None),
        ([2**63, -1], None, None),
        ([2**63, 2**62], np.uint64, 2**63 + 2**62),
        ([2**63, 2**63], np.uint64, None),
        ([-1], np.uint64, None),
        ([100, 27], np.int8, 127),
        ([100, 28], np.int8, None),
        ([300], np.int8, None),
        ([1e19], int, None),
        ([2**62, 0.5], None, 2.0**62),
    ],
)
def test_whole_numbers_are_exact_or_refused_on_every_rank(values: list, dtype: object, sums: int | None) -> None:
    """They never wrap: neither where one rank has all of a key's, nor where each has some, nor along a stream."""

    def main(comm: Communicator) -> None:
        mine = values[comm.rank :: comm.size]
        everything = values if comm.rank == 1 else []

        def total(items: list) -> dict:
            return mapreduce(comm, items, lambda value: [("k", value)], dtype=dtype)

        def streamed() -> dict:
            batches = [mine[turn : turn + 1] for turn in range(len(values))]
            *_, last = mapreduce_stream(comm, batches, lambda value: [("k", value)], dtype=dtype)
            return last

        for run in (lambda: total(mine), lambda: total(everything), streamed):
            if sums is not None:
                found = run()
                assert not found or found["k"] == sums
                assert comm.max_over_ranks([len(found)])[0] == 1
                continue
            with pytest.raises(UsageError, match="does not fit into"):
                run()

    run_threads(2, main)


def test_rows_of_other_lengths_elsewhere_are_refused() -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="values of 1 numbers on one rank and of 2 on another"):
            mapreduce(comm, [comm.rank], lambda rank: [("k", (1, 2) if rank else (1,))])
        with pytest.raises(UsageError, match="rows of 2 numbers"):
            gathered(comm, {"a": [1, 2]})

    run_threads(2, main)


def test_the_example_counts_the_words_of_its_folder() -> None:
    path = Path(__file__).parents[2] / "examples" / "mapreduce.py"
    example_module = runpy.run_path(str(path))
    text = "\n".join(file.read_text() for file in sorted(path.parent.glob("*.py")))
    for counts in run_threads(2, example_module["main"]):
        assert counts == dict(Counter(text.split()))


def points_of(count: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(10, 4)) * 5
    points = centres[draw.integers(0, 10, count)] + draw.normal(size=(count, 4))
    return points, points[:10].copy()


def test_k_means_is_what_scikit_learn_found_from_the_same_start() -> None:
    """Its results, kept in a file with the points; after 1, 4 and all iterations, on 1 and 3 ranks."""
    kept = json.loads((Path(__file__).parent / "k_means_scikit_learn.json").read_text())
    points = np.array(kept["points"])
    for wanted in kept["results"]:
        for ranks in (1, 3):
            found, *others = run_threads(
                ranks,
                lambda comm: k_means(comm, points[comm.rank :: comm.size], points[:6], wanted["iterations"]),  # noqa: B023
            )
            assert all(np.array_equal(found.centres, other.centres) for other in others)
            # Sums of 240 numbers in another order: 240 units of rounding of values up to 10.
            np.testing.assert_allclose(found.centres, wanted["centres"], rtol=0, atol=240 * 10 * 2.3e-16)


def test_k_means_is_scikit_learns_from_the_same_start() -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    points, first = points_of(3000)
    wanted = cluster.KMeans(10, init=first, n_init=1, max_iter=12, tol=0, algorithm="lloyd").fit(points)
    for ranks in (1, 3):
        for found in run_threads(ranks, lambda comm: k_means(comm, points[comm.rank :: comm.size], first, 12)):
            # Sums of 300 numbers in another order: 300 units of rounding of values up to 20.
            np.testing.assert_allclose(found.centres, wanted.cluster_centers_, rtol=0, atol=300 * 20 * 2.3e-16)


def test_k_means_lowers_its_inertia_and_keeps_centres_without_points() -> None:
    points, first = points_of(500)
    first[3] = 1e6
    inertias = [k_means(connect("alone"), points, first, count).inertia for count in (1, 2, 5)]
    assert inertias == sorted(inertias, reverse=True)
    found = k_means(connect("alone"), points, first, 50)
    assert (found.centres[3] == 1e6).all()
    assert found.iterations < 50
    with pytest.raises(UsageError, match="rows of one length"):
        k_means(connect("alone"), points, first[:, :2], 1)


def test_k_means_of_bytes_and_of_float32_far_from_zero_is_that_of_the_same_numbers() -> None:
    bytes_drawn = np.random.default_rng(0).integers(0, 256, (500, 4), np.uint8)
    for points in (bytes_drawn, (points_of(500)[0] + 3000).astype(np.float32)):
        found, wanted = (
            k_means(connect("alone"), given, points[:6], 3) for given in (points, points.astype(np.float64))
        )
        assert found.inertia == wanted.inertia
        assert np.array_equal(found.centres, wanted.centres)


def test_logistic_regression_and_a_small_network_are_what_one_process_computes() -> None:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(90, 5))
    y = (x @ np.arange(5.0) > 0).astype(float)
    alone, loss = logistic_regression(connect("alone"), x, y, 200, 1.0)
    assert loss < 0.1
    images = torch.from_numpy(draw.normal(size=(24, 1, 6, 6)))
    labels = (images.mean(dim=(1, 2, 3)) > 0).long()
    network, first = small_cnn(connect("alone"), images, labels, 30, 0.5)
    assert first < 0.3

    def main(comm: Communicator) -> None:
        mine = slice(comm.rank, None, 3)
        np.testing.assert_allclose(logistic_regression(comm, x[mine], y[mine], 200, 1.0)[0], alone, rtol=1e-9)
        found, _ = small_cnn(comm, images[mine], labels[mine], 30, 0.5)
        torch.testing.assert_close(found, network, rtol=1e-8, atol=1e-10)

    run_threads(3, main)


def test_the_speedup_of_a_hundred_million_points() -> None:
    """Without a sum it is p; with a sum as long as a rank's share of an iteration it is p / 2."""
    assert k_means_speedup(100_000_000, 10, 4, 100, 20, 1e9, 0.0)[2] == pytest.approx(100)
    assert k_means_speedup(100_000_000, 10, 4, 100, 20, 1e9, 0.04)[2] == pytest.approx(50)


@pytest.mark.parametrize("wrong", [0, 2])
def test_what_is_wrong_on_one_rank_is_said_on_all(wrong: int) -> None:
    """Whichever rank's error a caller gets to see."""

    def main(comm: Communicator) -> str:
        value = "text" if comm.rank == wrong else 1
        with pytest.raises(UsageError) as refused:
            mapreduce(comm, [0], lambda item: [("word", value)], np.sum)
        return str(refused.value)

    for rank, words in enumerate(run_threads(3, main)):
        assert words.startswith("the value" if rank == wrong else f"rank {wrong}: the value")
        assert "expected a number" in words
