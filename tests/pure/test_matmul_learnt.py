"""Shapes nobody tuned: what is offered for them, and what the model that travels with the package chooses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.hardware import DEVICES
from tilemesh.kernels.matmul import learnt, select
from tilemesh.kernels.matmul.config import Config, refusal
from tilemesh.kernels.matmul.cost import copy_bytes, rates_of
from tilemesh.kernels.matmul.portfolio import PORTFOLIO, offered
from tilemesh.kernels.matmul.problem import LAYOUTS, Problem, dense
from tilemesh.kernels.tuning.table import TunedEntry, TunedTable

RATES = rates_of(DEVICES["h200"], "float16")
H200 = learnt.shipped("NVIDIA H200")

sides = st.one_of(st.integers(1, 70), st.integers(64, 16384))
problems = st.builds(
    dense,
    sides,
    sides,
    sides,
    dtype=st.sampled_from(["float16", "bfloat16"]),
    layout=st.sampled_from(LAYOUTS),
    c_kind=st.sampled_from(["full", "row", "none"]),
)


@given(problems)
@settings(max_examples=60, deadline=None)
def test_whatever_is_offered_runs_and_has_finite_features(problem: Problem) -> None:
    configs = offered(problem)
    assert Config("library") in configs
    assert all(refusal(config, problem) is None for config in configs)
    rows = [learnt.features(problem, config, RATES) for config in configs]
    assert len({len(row) for row in rows}) == 1
    assert all(math.isfinite(value) for row in rows for value in row)


def test_no_configuration_is_in_the_portfolio_twice() -> None:
    assert len(set(PORTFOLIO)) == len(PORTFOLIO)


def test_the_model_that_travels_with_the_package_is_of_these_features() -> None:
    assert H200 is not None
    columns = len(learnt.features(dense(64, 64, 64), Config("library"), RATES))
    assert H200.model.feature.min() >= 0
    assert H200.model.feature.max() < columns
    assert learnt.shipped("Some other GPU") is None


@given(problems)
@settings(max_examples=40, deadline=None)
def test_its_choice_runs(problem: Problem) -> None:
    chosen = select.choose(problem, [], RATES, H200)
    assert refusal(chosen, problem) is None
    without = select.choose(problem, [], RATES, H200, select.GpuFeatures(tma=False, hopper=False))
    assert not without.uses_tma


def test_it_takes_what_trials_showed() -> None:
    """Cases far from any tuned shape where one way was ahead of the library by half and more."""
    assert H200 is not None
    kinds = {
        key: select.by_learnt(problem, H200, RATES).kind
        for key, problem in {
            "deep and narrow": dense(64, 128, 5376),
            "large": dense(2048, 3584, 576, layout="tt"),
            "three columns": dense(5504, 3, 896, layout="tt"),
        }.items()
    }
    assert kinds == {"deep and narrow": "split", "large": "pingpong", "three columns": "tma"}


def test_a_tuned_shape_of_nearly_the_same_size_comes_first_and_a_farther_one_does_not() -> None:
    odd = Config("tma", 128, 64, 32, 4, 2)
    near, far = dense(2048, 2048, 2048), dense(1200, 2048, 2048)
    table = TunedTable("NVIDIA H200", {}, {near.key: TunedEntry(odd, 1e-5)})
    assert select.choose(dense(2048, 2048, 2048, activation="gelu"), [table], RATES, H200) == odd
    assert select.choose(far, [table], RATES, H200) != odd
    assert select.choose(far, [table], RATES, None) == odd


def test_it_speaks_only_for_what_it_has_seen() -> None:
    assert H200 is not None
    assert H200.speaks_for(dense(64, 64, 64))
    assert not H200.speaks_for(dense(64, 64, 64, dtype="float32"))
    assert not H200.speaks_for(dense(64, 0, 64))
    seen_only_full = learnt.Learnt(H200.model, ("full",))
    assert not seen_only_full.speaks_for(dense(64, 64, 64, c_kind="row"))


@pytest.mark.parametrize(("m", "n"), [(1823, 1), (1, 1823)])
def test_no_matrix_is_copied_to_multiply_a_vector(m: int, n: int) -> None:
    """Rows of an odd length: tiles that load by TMA, and the padded library, would copy the matrix first."""
    problem = dense(m, n, 6663, dtype="bfloat16")
    ways = offered(problem)
    assert any(config.kind == "library" for config in ways)
    assert not any(copy_bytes(problem, config) for config in ways)
    assert any(copy_bytes(dense(1823, 2, 6663), config) for config in offered(dense(1823, 2, 6663)))


def test_a_call_that_waits_for_the_host_is_not_put_together_from_three() -> None:
    """Copies, the vendor's product and a pass take 64 to 67 us of host time on shapes whose kernels take 15 to 22."""
    for shape, layout in (((331, 1375, 1715), "nn"), ((646, 7710, 260), "tn")):
        problem = dense(*shape, layout=layout)
        ranked = select.ranked(problem, H200, RATES)
        assert ranked[0].padded
        chosen = select.by_learnt(problem, H200, RATES)
        assert chosen.kind != "library"
        expected = H200.expected_s(problem, [chosen, ranked[0]], RATES)
        assert expected[0] <= select.NEARLY_AS_FAST * expected[1]
    for shape in ((3320, 3154, 2612), (9591, 9951, 2019)):  # long enough for the host to be ahead
        assert select.by_learnt(dense(*shape, layout="nt"), H200, RATES).padded
