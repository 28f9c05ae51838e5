"""The examples and the notebook run, and show what they promise: on threads here, on processes in tests/mpi."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilemesh.comm import run_threads, schedules
from tilemesh.comm.schedules.book import ALGORITHMS, BOOK, build
from tilemesh.comm.schedules.check import check
from tilemesh.comm.schedules.cost import Traffic, traffic

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_hello() -> None:
    lines = run_threads(8, load("hello")["main"])
    assert lines[3] == (
        "rank 3 of 8 over threads: all ranks add up to 28; in my group I am 1 of 4, and its ranks add up to 16"
    )


def test_messages() -> None:
    lines = run_threads(5, load("messages")["main"])
    assert lines[0] == "rank 0: my neighbour before me is 4; the token came back as [1, 2, 3, 4, 5]"
    assert lines[4] == "rank 4: my neighbour before me is 3"


def test_collectives_arrive_as_in_the_picture() -> None:
    page = run_threads(3, load("collectives")["main"])[0]
    assert page is not None
    assert "  rank 1   b0 b1 b2   →   a1 b1 c1   =  1 11 21" in page
    assert "  rank 2   c0 c1 c2   →   . . Σ2   =  36" in page
    assert page.count("=") == 8 * 3


def test_groups_of_a_2_by_4_mesh() -> None:
    page = run_threads(8, load("groups")["main"])[0]
    assert page is not None
    assert "[0, 1, 2, 3] [4, 5, 6, 7]" in page
    assert "[0, 4] [1, 5] [2, 6] [3, 7]" in page
    assert page.splitlines()[-1].endswith("[5] [6] [7]")


def test_the_minimal_collectives_are_timed_beside_the_built_in_ones() -> None:
    main = load("minimal")["main"]
    table = run_threads(2, lambda comm: main(comm, seconds=0.01))[0]
    assert table is not None
    for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        assert name in table
    assert table.count("bytes 1024") == table.count("bytes 262144") == 5
    assert "no fit for this machine" in table


def test_the_deadlock_is_explained_and_both_ways_out_work(capsys: pytest.CaptureFixture[str]) -> None:
    load("deadlock")["main"]()
    said = capsys.readouterr().out
    assert "rank 0 has waited" in said
    assert "in send to rank 1" in said
    assert "meanwhile: rank 1 is in send to rank 0" in said
    assert "in turns: the ranks got [1, 0]" in said
    assert "both at once: the ranks got [1, 0]" in said


def test_a_missing_wait_reads_too_early() -> None:
    assert run_threads(4, load("missing_wait")["main"]) == [(-1.0, 4.0)] * 4


def test_the_notebook_runs_from_top_to_bottom() -> None:
    notebook = json.loads((EXAMPLES / "collectives.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    stored = "".join("".join(out.get("text", [])) for cell in notebook["cells"] for out in cell.get("outputs", []))
    assert stored == said.getvalue(), "run scripts/notebooks.py"
    assert "rank 7 of 8: the ranks add up to 28" in said.getvalue()
    assert "rank 0 heard from rank 7" in said.getvalue()
    assert "row (tensor parallel): (0, 1, 2, 3) (4, 5, 6, 7)" in said.getvalue()
    assert "column (data parallel): (0, 4) (1, 5) (2, 6) (3, 7)" in said.getvalue()
    assert "alone: (0,) (1,) (2,)" in said.getvalue()
    assert "ring all_reduce: 8 ranks, 8 chunks" in said.getvalue()


def test_the_code_on_the_documentation_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (EXAMPLES.parent / "docs" / "comm" / "README.md").read_text(encoding="utf-8")
    first, observing = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(first, names)
    exec(observing, names)
    assert ("world", "all_reduce", "naive") in names["seconds"]
    assert list(names["parts"]) == ["copy", "wire", "reduce", "wait"]
    said = capsys.readouterr().out
    assert "all_reduce of 64 MiB float32 on 1 rank over threads: naive (one rank: nothing moves)" in said


def test_the_schedule_of_the_how_to_is_proved_drawn_counted_and_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (EXAMPLES.parent / "docs" / "extending.md").read_text(encoding="utf-8")
    section = page.partition("## Add a schedule")[2].partition("\n## ")[0]
    builder, tried = re.findall(r"```python\n(.*?)```", section, re.S)
    names: dict[str, Any] = {}
    exec(builder, names)
    star = types.ModuleType("star")
    vars(star).update(names)
    monkeypatch.setattr(schedules, "star", star, raising=False)
    exec(tried, {})
    assert "star all_reduce: 4 ranks, 1 chunk" in capsys.readouterr().out
    monkeypatch.setitem(BOOK["all_reduce"], "star", names["all_reduce"])
    for ranks in range(1, 20):
        check(build("all_reduce", "star", ranks))
    # It has no closed form: what it sends is counted.
    sent = [traffic("all_reduce", "star", 4, 1000, rank=rank) for rank in range(4)]
    assert sent == [Traffic(3, 3000), *[Traffic(1, 1000)] * 3]
    totals = run_threads(3, lambda comm: comm.all_reduce(np.arange(5.0) + comm.rank, algorithm="star"))
    assert all(np.array_equal(total, 3 * np.arange(5.0) + 3) for total in totals)
    assert (
        "3 messages, 3 KiB sent by the busiest rank"
        in run_threads(4, lambda comm: str(comm.explain("all_reduce", 1024)))[0].partition("star")[2].partition("\n")[0]
    )


def test_the_page_lists_every_algorithm_with_what_it_serves() -> None:
    page = (EXAMPLES.parent / "docs" / "comm" / "README.md").read_text(encoding="utf-8")
    assert [name for name in ALGORITHMS if f"`{name}`" not in page] == []
