"""`tilemesh bench collective --draw`, and that schedules need nothing but Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tilemesh.cli.commands.bench.collective import CollectiveOptions, collective
from tilemesh.cli.typed import run
from tilemesh.comm.schedules import draw as drawing
from tilemesh.comm.schedules.book import algorithms, build
from tilemesh.comm.schedules.draw import LEGEND
from tilemesh.core.errors import UsageError


def bench_collective(*names: str, **options: Any) -> None:
    run(collective, CollectiveOptions(collectives=names, **options))


def test_the_schedule_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    bench_collective("all_reduce", draw="ring", ranks="8", svg=tmp_path / "ring.svg")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "ring all_reduce: 8 ranks, 8 chunks"
    assert said.pop() == f"svg: {tmp_path / 'ring.svg'}"
    assert len(said) == 3 + 1 + 14 + len(["", *LEGEND.splitlines()])
    monkeypatch.delenv("COLUMNS")
    bench_collective("all_reduce", draw="ring", ranks="8")
    narrow = capsys.readouterr().out.splitlines()
    assert max(map(len, narrow)) <= 100
    heads = [line.split("  ") for line in narrow if line.startswith("round")]
    assert [name.strip() for head in heads for name in head if name.strip() != "round" and name] == [
        f"rank {rank}" for rank in range(8)
    ]
    assert len(heads) == 2
    assert len(narrow) == len(said) + len(heads[1:]) * (1 + 15 + 1)  # the names of ranks, rounds 0 to 14, a blank line
    image = ET.parse(tmp_path / "ring.svg")
    tips = list(image.iter("{http://www.w3.org/2000/svg}polygon"))
    assert len(tips) == 14 * 8


def labels(picture: str) -> list[tuple[float, float, float, float]]:
    """The boxes of the labels beside the arrows: (left, top, right, bottom), at 6.5 × 11 pixels a letter."""
    boxes = []
    for one in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text"):
        x, y, classes = float(one.get("x", 0)), float(one.get("y", 0)), one.get("class", "").split()
        width = 6.5 * len(one.text or "")
        if "quiet" in classes and one.get("font-size") == "11":
            left = x - width if "end" in classes else x
            boxes.append((left, y - 9, left + width, y + 2))
    return boxes


@pytest.mark.parametrize(
    ("collective", "algorithm"), [("all_reduce", "ring"), ("all_to_all", "naive"), ("all_to_all", "bruck")]
)
def test_no_label_covers_another(collective: str, algorithm: str) -> None:
    boxes = labels(drawing.svg(build(collective, algorithm, 9)))
    assert len(boxes) > 20
    for number, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[:number]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert apart, (other, boxes[number])


def test_a_thousand_ranks_are_more_than_a_drawing_holds() -> None:
    for draw in (drawing.text, drawing.svg):
        with pytest.raises(UsageError, match="a drawing of 1000 ranks: nobody can read one of more than 128"):
            draw(build("all_reduce", "ring", 1000))


def test_nodes_of_a_drawing(capsys: pytest.CaptureFixture[str]) -> None:
    bench_collective("all_reduce", draw="hierarchical", ranks="4", node_size=2)
    first = capsys.readouterr().out
    bench_collective("all_reduce", draw="hierarchical", ranks="4")
    assert first != capsys.readouterr().out
    with pytest.raises(UsageError, match="node_size is 0: expected a whole number, at least 1"):
        bench_collective("all_reduce", draw="hierarchical", ranks="4", node_size=0)
    bench_collective("all_reduce", draw="ring", ranks="1")
    assert capsys.readouterr().out.startswith("ring all_reduce: 1 rank, 1 chunk\n")


def test_wrong_use_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown collective to bench 'allreduce': did you mean 'all_reduce'"):
        bench_collective("allreduce")
    with pytest.raises(UsageError, match="unknown algorithm 'rign': did you mean 'ring'"):
        bench_collective("all_reduce", algorithms="rign")
    with pytest.raises(UsageError, match="unknown transport 'tcp'"):
        bench_collective("all_reduce", transport="tcp")
    with pytest.raises(UsageError, match=r"expected a file that ends in \.svg"):
        bench_collective("all_reduce", chart="x.gif")
    with pytest.raises(UsageError, match="--fit with 1 rank: expected at least 2"):
        bench_collective(fit=True, ranks="1")
    with pytest.raises(UsageError, match="unknown topology 'torus'"):
        bench_collective(simulate="torus")
    with pytest.raises(UsageError, match="--simulate and --fit: each is a run of its own"):
        bench_collective(simulate="ring", fit=True)
    with pytest.raises(UsageError, match="unknown algorithm for broadcast 'trea': did you mean 'tree'"):
        bench_collective("broadcast", draw="trea")
    bench_collective("broadcast", draw="tree", svg=tmp_path / "new" / "x.svg")
    assert (tmp_path / "new" / "x.svg").is_file()


def test_a_simulation_shows_who_overtakes_whom(capsys: pytest.CaptureFixture[str]) -> None:
    bench_collective("all_reduce", simulate="two-level", ranks="64", sizes="1KiB..64MiB")
    page = capsys.readouterr().out
    assert "all_reduce, 64 ranks, two-level: seconds as simulated" in page
    assert "tree is overtaken by hierarchical between 64 KiB and 256 KiB" in page
    assert "tree is overtaken by ring between 1 MiB and 4 MiB" in page


def test_a_simulation_of_named_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    bench_collective("all_to_all", simulate="flat", ranks="8", sizes="1KiB", algorithms="bruck,naive")
    (head,) = (line for line in capsys.readouterr().out.splitlines() if line.endswith("quickest"))
    assert head.split() == ["size", "bruck", "naive", "quickest"]
    with pytest.raises(UsageError, match="none of ring serves all_to_all: expected some of pairwise, bruck"):
        bench_collective("all_to_all", simulate="flat", algorithms="ring")


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("topology", ["two-level", "flat"])
def test_a_simulation_fits_100_columns_and_keeps_its_headings_apart(
    collective: str, topology: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    names = algorithms(collective)
    bench_collective(collective, simulate=topology, ranks="16", sizes="4B,64MiB", algorithms=",".join(names))
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 100
    heads = [line.split() for line in lines if line.endswith("   quickest")]
    assert len(heads) > 1
    assert all(head[0] == "size" for head in heads)
    assert tuple(name for head in heads for name in head[1:-1]) == names
    rows = [line.split() for line in lines if line.lstrip().startswith("4 B")]
    assert len(rows) == len(heads)
    assert len({row[-1] for row in rows}) == 1


@pytest.mark.parametrize("module", ["tilemesh.comm", "tilemesh.comm.schedules.book", "tilemesh.comm.schedules.draw"])
def test_schedules_load_neither_numpy_nor_torch_nor_mpi(module: str) -> None:
    code = f"import {module}, sys; print(sorted({{'torch', 'mpi4py', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
