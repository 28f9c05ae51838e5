"""The page of a serving benchmark: what is in its folder, and the page in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilemesh.bench.serve.record import write_serve_run
from tilemesh.bench.serve.run import LoadPoint, ServeFindings
from tilemesh.cli.pages import write_pages
from tilemesh.core.hardware import parse_cluster
from tilemesh.measure.machine import stamp
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.model.config import preset
from tilemesh.plan.serving_clock import StepClock
from tilemesh.report import run
from tilemesh.report.kinds import page_of
from tilemesh.runs.contents import read_contents
from tilemesh.serve.figures import ServeGoal, load_figures
from tilemesh.serve.scheduler import ServeLimits
from tilemesh.serve.simulate import fresh_requests, poisson_arrivals, predicted, simulate

CHECKS = Path(__file__).with_name("checks.js").read_text()


def findings() -> ServeFindings:
    clock = StepClock(preset("tinyllama-1.1b"), parse_cluster("1xh200"))
    found = ServeFindings()
    for rate in (None, 20.0, 60.0, 200.0):
        arrivals = [0] * 30 if rate is None else poisson_arrivals(rate, 30)
        limits = ServeLimits(pages=300, context=2048, running=16)
        history = simulate(limits, fresh_requests(arrivals, [120] * 30, [30] * 30), predicted(clock))
        figures = load_figures(history.requests.values(), ServeGoal(0.05, 0.01))
        found.points.append(LoadPoint(rate, figures, figures, history))
        if rate is not None:
            found.rows.append(
                Row(
                    name="serve, first token",
                    case={"rate": rate, "requests": 30},
                    unit="s",
                    predicted=figures.ttft_p50,
                    measured=Sample.of([figures.ttft_p50]),
                    limit=1e-3,
                    missing={"peers": "none was asked for"},
                    **stamp(),
                )
            )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"model": "tinyllama-1.1b", "dtype": "bf16", "device": "cpu", "pages": 300, "running": 16, "goal": None}
    return write_serve_run(str(tmp_path_factory.mktemp("serve") / "run"), settings, findings(), 16)


def test_the_folder_has_every_step_and_what_it_came_to(folder: Path) -> None:
    found = read_contents(folder)
    assert found.kind == "serve"
    shown = run.read(folder)
    assert shown.state == run.DONE
    assert sum(one["prefill"] for one in shown.steps) == 4 * 30 * 120
    assert {one["load"] for one in shown.steps} == {"all at once", "20 requests/s", "60 requests/s", "200 requests/s"}
    assert [point["rate"] for point in shown.summary["points"]] == [None, 20.0, 60.0, 200.0]
    assert page_of("serve") is not page_of("anything")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_in_a_browser(browser: Any, folder: Path, width: int, dark: bool) -> None:
    (path,) = write_pages([str(folder)], None)
    with browser.open(f"file://{path}", width=width, dark=dark) as page:
        page.value(CHECKS)
        assert page.complaints() == []
        assert page.requests() == []
        assert page.value("document.querySelectorAll('figure svg').length") >= 16
        assert page.value("document.documentElement.scrollWidth") <= page.value("innerWidth")
        assert page.value("checks.small()") == []
        assert page.value("checks.overlaps()") == []
        assert page.value("checks.contrast()") >= 4.5
        text = page.value("document.body.innerText")
        for words in ("Latency against load", "Tokens in each step", "page waste", "predicted"):
            assert words in text


def test_a_damaged_summary_still_gives_a_page(folder: Path, tmp_path: Path) -> None:
    (folder / "summary.json").write_text('{"schema": 1, "kind": "serve", "model": 3, "points": [1, {"rate": "x"}]}')
    target = tmp_path / "page.html"
    write_pages([str(folder)], str(target))
    assert "What each step computed" in target.read_text()
