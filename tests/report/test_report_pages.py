"""Pages opened in a real Chromium: silent, alone, drawn, legible at any width, and usable with keys alone."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tilemesh.cli.pages import beside, write_pages
from tilemesh.comm.schedules.book import build
from tilemesh.core.files import write_text
from tilemesh.core.scene import Scene
from tilemesh.measure.row import Row, write_rows
from tilemesh.measure.sample import Sample
from tilemesh.plan.choose import search
from tilemesh.plan.why import why
from tilemesh.report import collective_page, kernel_charts, plan_page, run, run_page, serve
from tilemesh.report.html import Html
from tilemesh.report.html import page as page_of_body
from tilemesh.report.kernel_charts import RowWork
from tilemesh.report.picture import svg
from tilemesh.runs import metrics
from tilemesh.runs.folder import new_run
from tilemesh.runs.journal import Journal
from tilemesh.runs.kind import Kind

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MakeRun = Callable[..., Path]

# A page may ask the loopback server it came from; nothing else, and from disk nothing at all.
WIDE, NARROW = 1280, 390
CHECKS = Path(__file__).with_name("checks.js").read_text()


def check(page: Any, charts: int) -> None:
    """What holds for every page."""
    page.value(CHECKS)
    assert page.complaints() == []
    assert page.requests() == []
    assert page.value("document.querySelectorAll('figure svg, canvas, .bars, .heat, .mesh').length") >= charts
    # Nothing sticks out at the side; wide tables scroll within themselves.
    assert page.value("document.documentElement.scrollWidth") <= page.value("innerWidth")
    assert page.value("checks.squeezed()") == 0
    assert page.value("checks.small()") == []
    assert page.value("checks.cutOff()") == 0
    assert page.value("checks.overlaps()") == []
    assert page.value("checks.contrast()") >= 4.5


@pytest.mark.parametrize(("width", "dark"), [(WIDE, False), (WIDE, True), (NARROW, False), (NARROW, True)])
def test_a_runs_page(browser: Any, make_run: MakeRun, width: int, dark: bool) -> None:
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        for number, kind in enumerate(("stopped", "resumed", "warning")):  # signs that meet
            file.write(f'{{"kind": "{kind}", "step": 60, "why": "because", "at": {1.79e9 + 12 + number / 10}}}\n')
    (path,) = write_pages([str(folder)], None)
    with browser.open(f"file://{path}", width=width, dark=dark) as page:
        check(page, charts=8)
        signs = "[...document.querySelector('.plot').querySelectorAll('.sign')]"
        rows = f"new Set({signs}.map(one => one.style.getPropertyValue('--row'))).size"
        assert page.value(rows) == 4  # checkpoints, and each of the three above the other
        ground = page.value("getComputedStyle(document.documentElement).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") is not dark
        assert page.value("checks.colours()") > 4  # the canvas has been drawn on
        # Every chart has its numbers in a table beneath it (the mesh's and the rows' tables stand open).
        without = "[...document.querySelectorAll('figure')].filter(one => !one.querySelector('table')).length"
        assert page.value(without) == 0


def test_keys_alone_reach_everything_in_the_order_it_stands(browser: Any, make_run: MakeRun) -> None:
    (path,) = write_pages([str(make_run())], None)
    with browser.open(f"file://{path}") as page:
        page.value(CHECKS)
        reached = []
        for _ in range(page.value("checks.reachable()")):
            page.press("Tab")
            reached.append(page.value("checks.focused()"))
        assert [one for one in reached if one["tag"] == "BODY"] == []
        # Downwards, but for neighbours in two columns.
        tops = [one["top"] for one in reached]
        assert all(later > earlier - 500 for earlier, later in itertools.pairwise(tops))
        assert all(one["outline"] != "none" for one in reached)  # where one is can be seen
        page.press("Tab")
        assert page.value("document.activeElement.tagName") in ("BODY", "A")


def test_arrows_read_a_chart_and_move_the_timeline(browser: Any, make_run: MakeRun) -> None:
    (path,) = write_pages([str(make_run())], None)
    with browser.open(f"file://{path}") as page:
        page.value("document.querySelector('.plot').focus()")
        last = page.value("document.querySelector('.chart output').textContent")
        assert last.startswith("step 60 · mean 1.")
        page.press("Home")
        page.press("ArrowRight")
        assert page.value("document.querySelector('.chart output').textContent").startswith("step 2 · mean")
        page.value("document.querySelector('canvas').focus()")
        page.value(CHECKS)
        seen = [page.value("checks.picture()")]
        for key in ("+", "ArrowLeft", "0"):
            page.press(key)
            seen.append(page.value("checks.picture()"))
        assert len(set(seen)) == 4
        page.press("n")
        assert page.value("document.querySelector('.timeline output').textContent").startswith("rank 0 · data")
        page.press("ArrowDown")
        assert page.value("document.querySelector('.timeline output').textContent").startswith("rank 1 · ")
        assert page.complaints() == []


def test_names_and_text_are_shown_never_run(browser: Any, make_run: MakeRun) -> None:
    folder = make_run("<script>alert(1)<" + "long" * 50)
    evil = "</script><img src=x onerror=alert(2)><svg onload=alert(3)>"
    (folder / "sample.txt").write_text(evil)
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config + f'[data]\nsource = "{evil}"\n"{evil}" = 1\n')
    trace = (folder / "trace.json").read_text()
    (folder / "trace.json").write_text(trace.replace('"forward"', '"</script><img src=x>"'))
    (path,) = write_pages([str(folder)], str(folder.parent / "page.html"))
    with browser.open(f"file://{path}") as page:
        check(page, charts=7)
        assert page.value("document.querySelector('h1').textContent").startswith("<script>alert(1)<long")
        assert page.value("document.querySelectorAll('img, [onload], [onerror]').length") == 0
        assert page.value("document.querySelectorAll('script:not([type])').length") == 1


def test_ten_thousand_steps_of_sixty_four_ranks(browser: Any, make_run: MakeRun) -> None:
    folder = make_run(steps=10_000, dp=8, tp=8, traced=4, layers=24, seconds=0.4)
    (path,) = write_pages([str(folder)], None)
    assert Path(path).stat().st_size < 10e6
    with browser.open(f"file://{path}") as page:
        check(page, charts=7)
        assert page.seconds < 10  # 2 s is the promise; measured apart, since a test's machine may be busy


@pytest.mark.parametrize("left", [("config.toml",), ("metrics.jsonl",), ("metrics.jsonl", "config.toml")])
def test_an_incomplete_run_has_a_page_too(browser: Any, make_run: MakeRun, left: tuple[str, ...]) -> None:
    folder = make_run(summary=False)
    for path in list(folder.iterdir()):
        if path.is_file() and path.name not in left:
            path.unlink()
    if "metrics.jsonl" in left:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        lines[7] = '{"kind": "step", "step": 8, "loss": NaN, "tokens_per_s": null}'
        (folder / "metrics.jsonl").write_text("\n".join(lines[:20] + lines[30:])[:-40])
    (path,) = write_pages([str(folder)], None)
    with browser.open(f"file://{path}", width=NARROW) as page:
        check(page, charts=0)
        missing = page.value("document.querySelector('.missing').textContent")
        assert "summary.json" in missing
        assert "metrics.jsonl" not in left or "steps 21 to 30: not in the metrics" in missing
        assert page.value("document.querySelectorAll('.gap').length") == (5 if "metrics.jsonl" in left else 0)


def test_two_runs_side_by_side(browser: Any, make_run: MakeRun) -> None:
    runs = [str(make_run("first")), str(make_run("second", lr=0.001, seconds=0.2))]
    (path,) = write_pages(runs, None)
    assert path.endswith("first/report-beside-second.html")
    for width in (WIDE, NARROW):
        with browser.open(f"file://{path}", width=width) as page:
            check(page, charts=4)
            assert "optimizer.lr changed" in page.value("document.querySelector('.verdict').textContent")
            assert page.value("document.querySelectorAll('td.worse').length") >= 2


@pytest.mark.parametrize(("width", "dark"), [(WIDE, False), (NARROW, True)])
def test_the_pages_of_a_kind_without_its_own(browser: Any, tmp_path: Path, width: int, dark: bool) -> None:
    kind = Kind("dice")
    for name, ending in (("whole", ""), ("failed", metrics.FAILED)):
        folder = new_run(kind, "sides = 6\n", tmp_path / name)
        journal = Journal(folder)
        for step in range(1, 31):
            journal.add(metrics.STEP, step, eyes=1 + step % 6, odd=math.nan if step % 5 == 0 else step)
            if step % 10 == 0:
                journal.add("rolled-off", step, text="a die fell off <b>the table</b>")
        if ending:
            journal.add(ending, 30, why="the table broke")
        else:
            journal.summarize(kind, {"mean": 3.5, "by": {"six": 5}})
    for paths, words in ((["whole"], "Done after step 30."), (["failed"], "Failed at step 30: the table broke."),
                         (["whole", "failed"], "no figure differs")):  # fmt: skip
        (path,) = write_pages([str(tmp_path / name) for name in paths], None)
        with browser.open(f"file://{path}", width=width, dark=dark) as page:
            check(page, charts=2)
            assert words in page.value("document.querySelector('.verdict').textContent")


# ---- benches and plans -----------------------------------------------------------------------------------------


def test_a_kernels_page(browser: Any, tmp_path: Path) -> None:
    files = [str(RESULTS / "matmul_rows_h200_float16.jsonl"), str(RESULTS / "matmul_grid_h200_float16.jsonl")]
    (path,) = write_pages(files, str(tmp_path / "kernel.html"))
    for width, dark in ((WIDE, True), (NARROW, False)):
        with browser.open(f"file://{path}", width=width, dark=dark) as page:
            check(page, charts=5)
            assert page.value("document.querySelectorAll('.heat').length") == 3
            assert "of the limit" in page.value("document.querySelector('.verdict').textContent")


def test_rows_of_a_calibration_have_a_page(browser: Any, tmp_path: Path) -> None:
    (path,) = write_pages([str(RESULTS / "calibration-neoverse-n1-2c.jsonl")], str(tmp_path / "rows.html"))
    with browser.open(f"file://{path}", width=NARROW) as page:
        check(page, charts=1)


def collective_rows() -> Iterator[Row]:
    stamp: dict[str, Any] = {
        "machine": "made-up",
        "versions": {},
        "commit": None,
        "command": "tilemesh bench collective",
    }
    for size in (64, 4096, 262144, 16 << 20):
        for name, seconds in (("auto", 3e-6 + size / 2e9), ("ring", 2e-5 + size / 2e9), ("tree", 2e-6 + size / 1e9)):
            case: dict[str, Any] = {
                "transport": "mpi", "ranks": 8, "buffers": "ordinary", "bytes": size, "algorithm": name, "cores": 2,
                "picked": "tree" if size < 1e5 else "ring", "in_set-up": 0.1, "in_copy": 0.2, "in_wire": 0.4,
                "in_reduce": 0.1, "in_wait": 0.2,
            }  # fmt: skip
            native = Sample.of([4e-6 + size / 1.5e9])
            yield Row(name="all_reduce", case=case, unit="s", predicted=seconds * 1.1, measured=Sample.of([seconds]),
                      limit=size / 4e9, peers={"native": native}, **stamp)  # fmt: skip


def test_a_collectives_page(browser: Any, tmp_path: Path) -> None:
    rows = list(collective_rows())
    write_rows(rows, tmp_path / "rows.jsonl")
    (path,) = write_pages([str(tmp_path / "rows.jsonl")], str(tmp_path / "collective.html"))
    picture = svg(collective_page.drawings(rows))
    assert ">all_reduce, 8 ranks, ordinary arrays<" in picture
    assert all(f">{name}<" in picture for name in ("auto", "native", "limit", "ring", "tree"))
    ET.fromstring(picture)
    assert [change[2:] for change in collective_page.panels_of(rows)[0].crossovers()] == [("tree", "ring")]
    with browser.open(f"file://{path}", width=NARROW) as page:
        check(page, charts=4)
        words = page.value("document.querySelector('.verdict').textContent")
        assert words == "auto is faster than native in 4 of 4 cases, equal in 0; median speedup 1.33×."
        assert "ring overtakes tree between 4 KiB and 256 KiB" in page.value("document.body.textContent")
        page.value("document.querySelector('input[type=range]').focus()")
        first = page.value("document.querySelector('.rounds output').textContent")
        page.press("ArrowRight")
        assert page.value("document.querySelector('.rounds output').textContent") != first
        assert page.value("document.querySelector('.rounds').querySelectorAll('.round.on').length") == 1


def test_a_collectives_page_says_what_its_lines_are() -> None:
    rows = list(collective_rows())
    text = collective_page.render(rows)
    assert "auto: what tilemesh picks for each size; native: the collective of the library underneath" in text
    assert "the other lines: tilemesh&#x27;s algorithms, each one forced." in text
    assert "native_by_us" not in text
    assert "more ranks than cores" not in text
    crowded = [
        replace(row, case={**row.case, "oversubscribed": True}) for row in rows if row.case["algorithm"] == "auto"
    ]
    text = collective_page.render(crowded)
    assert "There were more ranks than cores" in text
    assert "the other lines" not in text


def test_a_collectives_page_says_where_native_is_furthest_ahead() -> None:
    rows = [
        replace(row, peers={"native": Sample.of([row.measured.median * factor])})
        for row, factor in zip(collective_rows(), [0.5] + [2.0] * 11, strict=True)
        if row.measured
    ]
    assert collective_page.verdict(collective_page.panels_of(rows)) == (
        "auto is faster than native in 3 of 4 cases, equal in 0; median speedup 2.00×; native is furthest ahead in "
        "all_reduce, 8 ranks, ordinary arrays at 64 B, taking 50 % less time."
    )


def test_rows_of_other_transports_and_machines_are_apart() -> None:
    rows = [row for row in collective_rows() if row.case["algorithm"] == "auto"]
    (once,) = collective_page.panels_of(rows)
    slower = [replace(row, measured=Sample.of([1.0]), case={**row.case, "transport": "gloo"}) for row in rows]
    assert [(panel.title, panel.times["auto"][0][1] == 1.0) for panel in collective_page.panels_of(rows + slower)] == [
        ("all_reduce, 8 ranks over mpi, ordinary arrays", False),
        ("all_reduce, 8 ranks over gloo, ordinary arrays", True),
    ]
    elsewhere = [replace(row, machine="other") for row in rows]
    assert [panel.where for panel in collective_page.panels_of(rows + elsewhere)] == [" on made-up", " on other"]
    assert "<h1>Collectives on made-up and other</h1>" in collective_page.render(rows + elsewhere)
    again = [replace(row, measured=Sample.of([2.0])) for row in rows]  # the later row of a cell
    (panel,) = collective_page.panels_of(rows + again)
    assert {seconds for _, seconds in panel.times["auto"]} == {2.0}
    assert len(panel.auto) == len(once.auto)


def test_a_shape_on_two_machines_is_in_two_charts() -> None:
    (row, *_) = collective_rows()
    row = replace(row, name="softmax", case={"shape": "4x4", "dtype": "float32"}, peers={}, missing={"peers": "none"})
    pairs = [(each, RowWork(1e6, 1e6)) for each in (row, replace(row, machine="other"))]
    titles = [drawing.title for drawing in kernel_charts.rates(pairs)]
    assert titles == ["softmax, float32, on made-up", "softmax, float32, on other"]


def test_a_collectives_page_explains_arrays_from_comm_empty() -> None:
    rows = list(collective_rows())
    explained = "makes an array that the other ranks of this machine can read where it is"
    assert explained not in collective_page.render(rows)
    shared = [replace(row, case={**row.case, "buffers": "empty"}) for row in rows]
    text = collective_page.render(shared)
    assert "all_reduce, 8 ranks, arrays from comm.empty" in text
    assert explained in text
    assert "arrays of comm.empty" not in text
    assert "empty arrays" not in text


@pytest.mark.parametrize("file", ["train_h200.jsonl", "ladder_h200.jsonl", "methods-neoverse-n1-2c.jsonl"])
def test_the_names_of_bars_of_rows_stand_on_one_line(browser: Any, tmp_path: Path, file: str) -> None:
    (path,) = write_pages([str(RESULTS / file)], str(tmp_path / "rows.html"))
    for width in (WIDE, 800):
        with browser.open(f"file://{path}", width=width) as page:
            page.value(CHECKS)
            assert page.value("document.querySelectorAll('.bars .who').length") > 2
            assert page.value("checks.wrapped()") == []
            assert page.value("document.documentElement.scrollWidth") <= page.value("innerWidth")


def test_every_round_of_a_schedule_is_drawn(browser: Any, tmp_path: Path) -> None:
    write_text(collective_page.render([], [build("all_reduce", "ring", 8)]), tmp_path / "ring.html")
    with browser.open(f"file://{tmp_path}/ring.html") as page:
        check(page, charts=1)
        assert page.value("document.querySelectorAll('.round').length") == len(
            list(build("all_reduce", "ring", 8).rounds())
        )
        arrows = "[...document.querySelectorAll('.round')].map(one => one.querySelectorAll('path.line').length)"
        assert set(page.value(arrows)) <= {0, 8}


def test_a_plans_page(browser: Any, tmp_path: Path) -> None:
    result = search("gpt3-175b", "64xh100", batch=64)
    write_text(plan_page.render(result, "gpt3-175b", why(result)), tmp_path / "plan.html")
    for width, dark in ((WIDE, False), (NARROW, True)):
        with browser.open(f"file://{tmp_path}/plan.html", width=width, dark=dark) as page:
            check(page, charts=4)
            shown = page.value("document.body.textContent")
            assert "Train: whether tilemesh train can run it." in shown  # every column that needs it is explained
            assert "Each layout as formulas estimate it" in shown


@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    [
        pytest.param("llama-3-8b", "8xh100", 128, marks=pytest.mark.slow),
        ("gpt3-175b", "1024xh100", 128),  # whose names are the longest
    ],
)
def test_the_names_of_a_plans_bars_do_not_wrap(
    browser: Any, tmp_path: Path, model: str, cluster: str, batch: int
) -> None:
    result = search(model, cluster, batch=batch)
    write_text(plan_page.render(result, model, why(result)), tmp_path / "plan.html")
    for width in (1200, 1100, 800, 700):  # two charts beside each other, and one above the other
        with browser.open(f"file://{tmp_path}/plan.html", width=width) as page:
            check(page, charts=4)
            names = page.value("[...document.querySelectorAll('.bars .who')].map(one => one.textContent)")
            assert len(names) == 2 * len(result.predictions) > 2
            assert page.value("checks.wrapped()") == []
            # The whole table of the best layouts is seen, its last column too, without scrolling to the side.
            if width >= 1100:
                assert page.value("(box => box.scrollWidth - box.clientWidth)(document.querySelector('.scroll'))") <= 0
            # The names leave the bars room, and each begins a row of the table of the best layouts.
            least = "Math.min(...[...document.querySelectorAll('.bar')].map(one => one.getBoundingClientRect().width))"
            assert page.value(least) > 140
            rows = page.value(
                "[...document.querySelector('table').tBodies[0].rows].map(one => one.cells[0].textContent)"
            )
            assert [row.split(":")[0] for row in rows] * 2 == [name.split(":")[0] for name in names]


def test_a_drawing_in_a_page_keeps_its_letters(browser: Any, tmp_path: Path) -> None:
    """A drawing's classes are the page's too, whose style sheet must not make its words larger than their boxes."""
    scene = Scene(300, 100, "a drawing")
    scene.note(10, 50, "small")
    scene.text(10, 80, "quiet", size=9.5, quiet=True)
    write_text(page_of_body("drawing", Html(scene.svg())), tmp_path / "drawing.html")
    with browser.open(f"file://{tmp_path}/drawing.html") as page:
        each = "one => [one.getAttribute('font-size') + 'px', getComputedStyle(one).fontSize]"
        shown = page.value(f"[...document.querySelectorAll('svg text')].map({each})")
        assert len(shown) == 3
        assert all(asked == drawn for asked, drawn in shown), shown


# ---- watching --------------------------------------------------------------------------------------------------


def test_a_run_in_progress_is_followed(browser: Any, make_run: MakeRun) -> None:
    folder = make_run(steps=20, planned=100, summary=False)

    def render(live: str) -> str:
        found = run.read(folder)
        return run_page.render(found, beside(found), live=live)

    server = serve.PageServer(str(folder), render)
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        with browser.open(server.address) as page:
            assert page.complaints() == []
            page.value("document.querySelector('details').open = true")
            page.value("document.querySelector('.plot').focus()")
            page.value(CHECKS)
            page.value("document.querySelector('.timeline button[data-key=\"+\"]').click()")
            zoomed = page.value("checks.picture()")
            assert "step 20 of 100" in page.value("document.querySelector('.verdict').textContent")
            with (folder / "metrics.jsonl").open("a") as file:
                file.write('{"kind": "step", "step": 21, "loss": 1.5, "seconds": 0.1, "tokens_per_s": 20000}\n')
            end = time.monotonic() + 30
            while "step 21 of 100" not in page.value("document.querySelector('.verdict').textContent"):
                assert time.monotonic() < end, "the page did not follow"
                time.sleep(0.1)
            assert page.value("document.querySelector('details').open") is True
            assert page.value("document.activeElement.className") == "plot"
            assert page.value("checks.picture()") == zoomed
            assert all(url.startswith(server.address) for url in page.requests())
            assert page.complaints() == []
            folder.rename(folder.with_name("elsewhere"))
            end = time.monotonic() + 60
            while "is no folder" not in page.value("document.getElementById('state').textContent"):
                assert time.monotonic() < end, "the page did not say that the folder has gone"
                time.sleep(0.1)
            assert "step 21 of 100" in page.value("document.querySelector('.verdict').textContent")
    finally:
        server.close()
