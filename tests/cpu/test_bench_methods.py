"""`tilemesh bench methods`: its command's refusals, how it counts, and its page."""

from __future__ import annotations

import math

import pytest
import torch
from typer.testing import CliRunner

from tilemesh.bench.methods import bounds
from tilemesh.bench.methods import ranks as rank_side
from tilemesh.bench.methods.run import METHODS, parse_slow, throughput
from tilemesh.bench.methods.traffic import RoundTrip, hotspots
from tilemesh.cli.main import make_app
from tilemesh.comm import run_threads
from tilemesh.core.errors import UsageError
from tilemesh.measure.machine import stamp
from tilemesh.measure.method_curve import BoundCurve, MethodCurve, ServerLoad
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.report import methods_page


def test_what_is_slow_is_read_and_refused() -> None:
    assert parse_slow("rank=2,factor=3") == (2, 3.0)
    assert parse_slow("factor=8") == (3, 8.0)
    for wrong in ("rank=9", "factor=0.5", "speed=3", "rank", "rank=a"):
        with pytest.raises(UsageError, match="expected rank"):
            parse_slow(wrong)
    for options in (["--slow", "rank=7"], ["--steps", "1"], ["--blocks", "0"]):
        assert isinstance(CliRunner().invoke(make_app(), ["bench", "methods", *options]).exception, UsageError)


def test_steps_count_until_the_first_worker_is_through() -> None:
    seen = [{"began": 10.0, "steps": [11.0, 12.0]}, {"began": 10.5, "steps": [11.5, 13.0]}, {"began": 10.0}]
    assert throughput(seen) == pytest.approx(3 / 2)


def test_every_method_runs_keeps_its_bound_and_equals_its_replay() -> None:
    """All cases of the bench on threads, with computing that takes no time."""
    cases = [{"bound": None, "period": 1, **method, "slow": {"rank": 1, "factor": 3.0}} for method in METHODS.values()]

    def main(comm: object) -> list[dict]:
        return rank_side.straggler_runs(cases, 2, 1, 6, 0.001, comm)  # type: ignore[arg-type]

    taken = run_threads(3, main)
    for number, method in enumerate(METHODS.values()):
        seen = [rank[number] for rank in taken]
        assert throughput(seen) > 0
        assert seen[0]["losses"][-1][1] < seen[0]["losses"][0][1]
        if method["method"] == "server":
            assert seen[2]["lead"] <= (math.inf if method["bound"] is None else method["bound"])
            assert rank_side.replay_difference(seen[2:], 2) < 1e-10


def test_ssp_stays_below_its_expectation_bound_and_too_large_a_bound_does_not_converge() -> None:
    """On ranks that are threads, whose workers keep what they read."""
    taken = run_threads(4, lambda comm: bounds.bounded_runs([0, 4], True, 3, 30, 3.0, comm))
    found = [bounds.excess([rank[number]["losses"] for rank in taken[:3]]) for number in (0, 1)]
    assert 0 < found[0] < bounds.excess_limit(0, 3, 30)
    assert 0 < found[1] < bounds.excess_limit(4, 3, 30)
    # Two weights of the ball are at most its diameter apart, half of whose square is F²; (4 F L)² 2 (s + 1) P / (P T).
    squared = 16 * (2 * bounds.RADIUS) ** 2 / 2 * bounds.LIPSCHITZ**2 * 2 / 30
    assert [bounds.excess_limit(bound, 3, 30) ** 2 for bound in (0, 4)] == pytest.approx([squared, 5 * squared])
    taken = run_threads(4, lambda comm: bounds.bounded_runs([0, 30], False, 3, 70, 3.0, comm))
    fresh, stale = taken[0][0]["losses"], taken[0][1]["losses"]
    assert fresh[-1] < 0.1 * fresh[0]
    assert bounds.CONVERGES_BELOW < 30
    assert stale[-1] > 10 * stale[0]


def test_the_gradient_of_the_convex_problem_is_its_derivative_and_no_longer_than_said() -> None:
    rows = bounds.convex_rows(1, 2)
    weights = torch.linspace(-1, 1, bounds.DIMS, dtype=torch.float64).requires_grad_()
    bounds.convex_loss(weights, rows).backward()
    mine = bounds.convex_gradient(weights.detach(), rows)
    torch.testing.assert_close(mine, weights.grad)
    assert float(mine.norm()) <= bounds.LIPSCHITZ
    assert bounds.least_loss(rows) <= float(bounds.convex_loss(bounds.projected(weights.detach()), rows))


def test_traffic_of_many_workers_is_predicted_from_one() -> None:
    """A round trip of 4 ms of which the server has 1: 1, 4 and then no more than 4 workers' worth."""
    trip = RoundTrip.of([[0.4, 0.1], [], [0.1, 0.1]], 100)
    assert trip == RoundTrip(0.004, 0.001, pytest.approx(0.002), 1)
    assert trip.rate(1, 1, 50, cores=64) == pytest.approx(250, rel=0.05)
    assert trip.rate(2, 1, 50, cores=64) == pytest.approx(500, rel=0.1)
    assert trip.rate(16, 1, 50, cores=64) == pytest.approx(1000, rel=0.1)
    assert trip.rate(16, 1, 50, cores=1) == pytest.approx(500)  # what one core can do
    loads, (note,) = hotspots(trip, 0.02)
    assert {load.servers for load in loads} == {1, 2, 4}
    assert "1 server: 32 workers, 2 servers: 64 workers" in note


def test_the_page_shows_every_method_and_says_why() -> None:
    curves = [
        MethodCurve(name, "rank 3, 4x", [(0.0, 2.3), (1.0, 1.9)], [0.9, 0.8], [(0, 3), (2, 1)], 1, 1e-16)
        for name in METHODS
    ]
    told = {"predicted": 1.0, "limit": 2.0, **stamp()}
    case = {"slow": "rank 3, 4x", "workers": 4, "servers": 1}
    synchronous = Sample(40.0, 39.0, 41.0, 2)
    rows = [
        Row(name="straggler", unit="steps/s", case={"method": "ASP", **case}, measured=Sample(120.0, 118.0, 121.0, 2),
            peers={"synchronous": synchronous}, **told),
    ]  # fmt: skip
    excess = Row(
        name="excess loss", unit="nats", case={"bound": 3, "workers": 4}, measured=Sample(0.06, 0.06, 0.06, 1),
        predicted=None, limit=3.2, missing={"predicted": "none", "peers": "none"}, **stamp(),
    )  # fmt: skip
    loads = [ServerLoad(workers, 1, 1 / workers, 0.5, 0.01 * workers) for workers in (1, 4, 16)]
    diverging = [BoundCurve(0, [1.0, 0.1]), BoundCurve(30, [1.0, 100.0])]
    page = methods_page.render([*rows, excess], curves, ["A note"], loads, diverging)
    assert len(methods_page.drawings(curves, loads, diverging)) == 4
    for words in (
        "ASP 3.00",
        "uses the bound up once",
        "Loss against time",
        "Utilisation",
        "Staleness",
        "A bound too large to converge",
        "Expectation bound",
        "at most 3.2",
        "Queueing",
        "beside synchronous there",
        "A note.",
        *METHODS,
    ):
        assert words in page
