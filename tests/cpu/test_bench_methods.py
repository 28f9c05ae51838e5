"""`tilemesh bench methods`: its command's refusals, how it counts, and its page."""

from __future__ import annotations

import math

import pytest
from typer.testing import CliRunner

from tilemesh.bench.methods import ranks as rank_side
from tilemesh.bench.methods.run import METHODS, parse_slow, throughput
from tilemesh.cli.main import app
from tilemesh.comm import run_threads
from tilemesh.core.errors import UsageError
from tilemesh.measure.machine import stamp
from tilemesh.measure.method_curve import MethodCurve
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
        assert isinstance(CliRunner().invoke(app, ["bench", "methods", *options]).exception, UsageError)


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
    page = methods_page.render(rows, curves, ["A note"])
    for words in (
        "ASP 3.00",
        "uses the bound up once",
        "Loss against time",
        "Utilisation",
        "Staleness",
        "A note.",
        *METHODS,
    ):
        assert words in page
