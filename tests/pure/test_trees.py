"""Boosted trees: what they fit, how they are written, and that all trees descend as one would by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.kernels.tuning import trees


def sample(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three features, of which the first two decide; the third is noise."""
    values = np.random.default_rng(seed).integers(0, 16, (rows, 3)) / 4  # few values: a cut lies between any two
    return values, np.where(values[:, 0] > 2, 3.0, 0.0) + np.floor(values[:, 1])


def test_a_step_function_is_learnt_and_noise_is_not_cut_by() -> None:
    values, wanted = sample(800)
    model = trees.fit(values, wanted, np.ones(800), trees=120, depth=3, share=0.2)
    fresh, expected = sample(200, seed=1)
    wrong = np.abs(model.predict(fresh) - expected)
    assert np.median(wrong) < 0.1
    assert wrong.mean() < 0.1 * np.abs(expected - expected.mean()).mean()
    first = model.feature[:20][model.cut[:20] < np.inf]
    assert (first == 2).mean() < 0.2


def test_weights_count() -> None:
    values = np.zeros((20, 1))
    wanted = np.array([0.0] * 10 + [1.0] * 10)
    model = trees.fit(values, wanted, np.array([1.0] * 10 + [3.0] * 10), trees=3)
    assert model.predict([[0.0]])[0] == pytest.approx(0.75, abs=0.02)  # leaves are drawn to zero by one row's weight


@given(st.integers(0, 10_000), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_all_trees_descend_as_one_would_by_hand(seed: int, depth: int) -> None:
    values, wanted = sample(60, seed)
    model = trees.fit(values, wanted, np.ones(60), trees=4, depth=depth)

    def by_hand(row: np.ndarray) -> float:
        total = model.base
        for feature, cut, leaf in zip(model.feature, model.cut, model.leaf, strict=True):
            node = 0
            while node < len(feature):
                node = 2 * node + (2 if row[feature[node]] > cut[node] else 1)
            total += leaf[node - len(feature)]
        return float(total)

    assert model.predict(values[:9]) == pytest.approx([by_hand(row) for row in values[:9]], abs=1e-12)


def test_what_is_written_reads_back_to_five_digits() -> None:
    values, wanted = sample(100)
    model = trees.fit(values, wanted, np.ones(100), trees=30)
    again = trees.from_dict(json.loads(json.dumps(trees.to_dict(model), allow_nan=False)))
    assert again.predict(values) == pytest.approx(model.predict(values), abs=1e-4 * 30)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"base": 0, "feature": [[0]], "cut": [[1.0, 2.0]], "leaf": [[0.0, 1.0]]},
        {"base": 0, "feature": [[0, 1]], "cut": [[1.0, 2.0]], "leaf": [[0.0, 1.0, 2.0]]},
        {"base": "x", "feature": [[0]], "cut": [[1.0]], "leaf": [[0.0, 1.0]]},
    ],
)
def test_what_is_no_model_is_refused(body: dict) -> None:
    with pytest.raises(UsageError, match="tree"):
        trees.from_dict(body)
