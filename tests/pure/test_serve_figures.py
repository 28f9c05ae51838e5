"""Latency figures and goals, computed by hand beside."""

from __future__ import annotations

import pytest

from tilemesh.core.errors import UsageError
from tilemesh.serve.figures import ServeGoal, load_figures, quantile
from tilemesh.serve.history import RequestRecord
from tilemesh.serve.request import FinishReason

MS = 1_000_000


def record(asked: int, *tokens: int) -> RequestRecord:
    """Times in milliseconds."""
    made = RequestRecord("1/0", asked * MS, asked * MS, 0, (1, 2), len(tokens))
    made.token_ns = [token * MS for token in tokens]
    return made


def test_figures_of_two_requests() -> None:
    found = load_figures([record(0, 10, 14, 18), record(5, 25, 25, 45)], ServeGoal(0.015, 0.01))
    assert found.output_tokens == 6
    assert found.seconds == pytest.approx(0.045)
    assert found.tokens_per_s == pytest.approx(6 / 0.045)
    assert found.ttft_p50 == pytest.approx(0.015)  # of 10 and 20 ms
    assert found.itl_p50 == pytest.approx(0.004)  # of 4, 4 and 20 ms; two tokens of one step are one gap
    assert found.itl_p99 == pytest.approx(0.004 + 0.98 * 0.016)
    assert found.inside == pytest.approx((18 + 40) / 45)
    assert found.goodput == 0.5  # the second one's first token took 20 ms


def test_what_was_never_answered_breaks_the_promise() -> None:
    assert load_figures([record(0, 10), record(0)]).goodput == 0.5
    failed = record(0, 10, 11)
    failed.finish = FinishReason.ERROR  # after its second token
    assert load_figures([record(0, 10), failed]).goodput == 0.5
    with pytest.raises(UsageError, match="no request was answered"):
        load_figures([record(0)])


def test_goals_are_read_and_refused() -> None:
    assert ServeGoal.parse(None) == ServeGoal()
    assert ServeGoal.parse("ttft=1.5, itl=0.1") == ServeGoal(1.5, 0.1)
    for bad in ("ttft", "ttft=x", "itl=-1", "speed=3", "itl=0"):
        with pytest.raises(UsageError, match="no goal"):
            ServeGoal.parse(bad)


def test_quantiles_lie_between_values() -> None:
    assert quantile([], 0.5) == 0.0
    assert quantile([1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.25) == pytest.approx(1.25)
