"""Costs add up, and limits lie where the roofline says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.calibration import Calibration, Rates
from tilemesh.core.cost import Ceiling, Cost, bound_by, limit_s, limits_s, memory_s
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import H200, T4

counts = st.integers(min_value=0, max_value=10**15)
costs = st.builds(Cost, counts, counts, counts, counts, counts, counts, st.just("bf16"))
DATASHEET = Ceiling.of_device(H200)
UNEVEN = Ceiling("test", {"fp32": 100.0, "bf16": 400.0}, copy_bytes_per_s=10, read_bytes_per_s=20, write_bytes_per_s=5)


def matmul(m: int, n: int, k: int) -> Cost:
    return Cost(flops=2 * m * n * k, bytes_read=2 * (m * k + k * n), bytes_written=2 * m * n, launches=1, dtype="bf16")


@settings(deadline=None)
@given(costs, costs, costs, st.integers(0, 5))
def test_costs_are_a_module_over_the_integers(a: Cost, b: Cost, c: Cost, times: int) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + Cost(dtype="bf16") == a
    assert times * (a + b) == a * times + b * times
    assert sum([a, b, c]) == a + b + c
    assert 3 * a == a + a + a


def test_every_count_is_added_and_scaled() -> None:
    assert Cost(1, 2, 3, 4, 5, 6) + Cost(10, 20, 30, 40, 50, 60) == Cost(11, 22, 33, 44, 55, 66)
    assert Cost(1, 2, 3, 4, 5, 6) * 2 == Cost(2, 4, 6, 8, 10, 12)


def test_flops_of_two_dtypes_do_not_add() -> None:
    with pytest.raises(UsageError) as caught:
        Cost(flops=1, dtype="fp32") + Cost(flops=1, dtype="bf16")
    assert str(caught.value) == "FLOPs in fp32 and bf16 do not add up: keep two costs, use limits_s on both"


def test_bytes_alone_have_no_dtype_to_disagree_about() -> None:
    copy = Cost(bytes_read=4, bytes_written=4)
    assert (copy + matmul(2, 2, 2)).dtype == "bf16"
    assert (matmul(2, 2, 2) + copy).dtype == "bf16"


def test_a_cost_is_scaled_by_whole_numbers_only() -> None:
    with pytest.raises(TypeError):
        Cost(flops=1) * 0.5  # type: ignore[operator]
    with pytest.raises(UsageError) as caught:
        Cost(flops=1) * -1
    assert str(caught.value) == "flops of a cost is -1: expected 0 or more"


def test_intensity() -> None:
    assert matmul(1024, 1024, 1024).intensity == pytest.approx(1024 / 3)
    assert Cost(flops=1).intensity == math.inf
    assert Cost(messages=1).intensity == 0.0


def test_limit_of_a_large_matmul_is_compute() -> None:
    cost = matmul(8192, 8192, 8192)
    assert limit_s(cost, DATASHEET) == pytest.approx(2 * 8192**3 / 989.4e12)
    assert bound_by(cost, DATASHEET) == "compute"


def test_limit_of_a_narrow_matmul_is_memory() -> None:
    cost = matmul(16, 8192, 8192)
    assert limit_s(cost, DATASHEET) == pytest.approx(cost.bytes_moved / 4.8e12)
    assert bound_by(cost, DATASHEET) == "memory"


@settings(deadline=None)
@given(costs)
def test_the_ridge_is_where_the_sides_meet(cost: Cost) -> None:
    """On a datasheet, where one bandwidth serves all, the side follows from intensity alone."""
    if cost.bytes_moved and abs(cost.intensity / DATASHEET.ridge("bf16") - 1) > 1e-9:
        assert (bound_by(cost, DATASHEET) == "compute") == (cost.intensity > DATASHEET.ridge("bf16"))


@settings(deadline=None)
@given(costs, costs)
def test_a_limit_only_grows_and_fusing_never_raises_it(a: Cost, b: Cost) -> None:
    together, apart = limit_s(a + b, DATASHEET), limits_s([a, b], DATASHEET)
    slack = 1 + 1e-12
    assert max(limit_s(a, DATASHEET), limit_s(b, DATASHEET)) <= together * slack
    assert together <= apart * slack


def test_reads_and_writes_go_at_their_own_rates() -> None:
    assert memory_s(Cost(bytes_read=40), UNEVEN) == 2.0
    assert memory_s(Cost(bytes_written=40), UNEVEN) == 8.0
    assert memory_s(Cost(bytes_read=40, bytes_written=40), UNEVEN) == 8.0
    assert memory_s(Cost(bytes_read=60, bytes_written=40), UNEVEN) == 9.0


def test_limits_of_steps_in_different_dtypes_add_as_time() -> None:
    assert limits_s([Cost(flops=100), Cost(flops=400, dtype="bf16")], UNEVEN) == 2.0
    assert limits_s([], UNEVEN) == 0.0


def test_work_without_flops_needs_no_peak() -> None:
    assert limit_s(Cost(bytes_read=320, dtype="bf16"), Ceiling.of_device(T4)) == pytest.approx(1e-9)


def test_a_dtype_without_a_peak_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        limit_s(Cost(flops=1, dtype="bf16"), Ceiling.of_device(T4))
    assert str(caught.value) == "no matmul peak for dtype 'bf16' (t4 datasheet): known are fp64, fp32, fp16"


def test_ceiling_of_a_calibration() -> None:
    rates = Rates({"fp32": 50e9}, copy_bytes_per_s=6e9, read_bytes_per_s=9e9)
    here = Calibration("id", "a box", "2025-01-01", one_core=rates, all_cores=Rates({"fp32": 1.0}))
    ceiling = Ceiling.of_calibration(here, "one_core")
    assert ceiling == Ceiling("one_core of a box, measured 2025-01-01", {"fp32": 50e9}, 6e9, 9e9, 6e9)
    with pytest.raises(UsageError) as caught:
        Ceiling.of_calibration(here, "all_cores")
    assert str(caught.value) == "'all_cores' of a box has no copy bandwidth: calibrate this machine again"
