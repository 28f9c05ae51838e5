"""The table: every column at every width, marks and reasons, times and rates, nothing cut."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from tilemesh.measure import table
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.measure.table import PIPE_WIDTH, format_value, print_rows, print_words, wrapped

WIDE = 160
"""Where a cell takes one line; most tests are about what stands in it."""
STORED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("co[lm]*.jsonl"))


def render(rows: Sequence[Row], width: int = WIDE) -> str:
    return table.render(rows, width)


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_every_table_of_stored_rows_fits_the_width_of_a_pipe(file: Path) -> None:
    text = table.render([Row.from_json(line) for line in file.read_text().splitlines()])
    assert max(cell_len(line) for line in text.splitlines()) <= PIPE_WIDTH == 100


def sample(median: float, spread: float = 0.1) -> Sample:
    return Sample(median, median * (1 - spread), median * (1 + spread), 30)


def row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "name": "matmul kernel",
        "case": {"shape": "512x512x512", "dtype": "fp16"},
        "unit": "s",
        "predicted": 4e-6,
        "measured": sample(5e-6),
        "limit": 2.5e-6,
        "peers": {"eager": sample(10e-6)},
        "missing": {},
        "machine": "box-1",
        "versions": {},
        "commit": None,
        "command": "tilemesh bench",
    }
    return Row(**(fields | changes))


def words(text: str) -> str:
    return " ".join(text.split())


def test_one_row_holds_every_column() -> None:
    text = words(render([row()]))
    assert "case predicted (error) measured p20–p80 limit of limit eager speedup" in text
    assert "512x512x512 fp16 4 µs (-20 %) 5 µs 4.50–5.50 2.5 µs 50 % 10 µs 2.00×" in text


def test_rates_point_the_other_way() -> None:
    text = words(
        render([row(unit="B/s", predicted=6e9, measured=sample(4e9), limit=16e9, peers={"numpy": sample(8e9)})])
    )
    assert "6 GB/s (+50 %) 4 GB/s 3.60–4.40 16 GB/s 25 % 8 GB/s 0.50×" in text


def test_what_cannot_be_told_apart_is_marked() -> None:
    assert "1.01× =" in render([row(peers={"eager": sample(5.05e-6)})])
    assert "2.00× =" not in render([row()])


def test_what_all_rows_share_is_said_once_above() -> None:
    text = render([row(case={"shape": s, "dtype": "fp16", "oversubscribed": False}) for s in ("1x1", "2x2")])
    assert text.splitlines()[0] == "matmul kernel · fp16 · not oversubscribed"
    assert text.count("fp16") == 1


def test_names_that_differ_become_a_column_and_are_not_repeated() -> None:
    rows = [row(case={"n": 1}), row(case={"n": 2}), row(name="copy", case={"n": 1})]
    lines = render(rows).splitlines()
    assert sum("matmul kernel" in line for line in lines) == 1
    assert any(line.startswith("copy") for line in lines)


def test_a_reason_stands_below_once_and_its_mark_in_every_place() -> None:
    rows = [
        row(case={"n": 1}, limit=None, missing={"limit": "no datasheet", "compile": "cannot be captured"}),
        row(case={"n": 2}, limit=None, predicted=None, missing={"limit": "no datasheet", "predicted": "no model"}),
    ]
    text = render(rows)
    assert text.count("no datasheet") == 1
    assert re.findall(r"^\[\d\].*$", text, re.MULTILINE) == [
        "[1] no datasheet",
        "[2] cannot be captured",
        "[3] no model",
    ]
    assert text.count("[1]") == 3  # two cells, one reason
    assert "of limit" not in text


def test_a_column_that_nothing_has_takes_no_table_of_its_own() -> None:
    alone = [row(name=name, peers={}, missing={"peers": "nothing to compare with"}) for name in ("step", "long " * 4)]
    texts = [render(alone, width).splitlines() for width in range(60, 100)]
    assert any(line.startswith("speedup [1]") for lines in texts for line in lines)
    for lines in texts:
        headings = [line for line in lines if line.startswith("what")]
        assert not any(line.split() == ["what", "speedup"] for line in headings)
        assert lines[-1] == "[1] nothing to compare with"


def test_a_row_that_was_not_measured_still_shows_the_rest() -> None:
    text = words(render([row(measured=None, missing={"measured": "needs a GPU"})]))
    assert "4 µs [1] 2.5 µs 10 µs" in text


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("peers", [0, 1, 6])
def test_fits_the_width_and_cuts_no_number(width: int, peers: int) -> None:
    named = {f"peer-number-{i}": sample(7.77e-6 + i * 1e-6) for i in range(peers)}
    missing = {} if peers else {"peers": "nobody else does this"}
    rows = [row(case={"shape": f"{n}x8192x8192"}, peers=named, missing=missing) for n in (64, 8192)]
    text = render(rows, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for number in [
        "4 µs",
        "5 µs",
        "4.50–5.50",
        "2.5 µs",
        "50 %",
        *(format_value(p.median, "s") for p in named.values()),
    ]:
        assert text.count(number) >= 2, number


def test_several_peers_show_the_speedup_over_each_and_over_the_best() -> None:
    text = words(render([row(peers={"eager": sample(10e-6), "compile": sample(7.5e-6)})]))
    assert text.endswith("10 µs 2.00× 7.5 µs 1.50× 1.50×")


@pytest.mark.parametrize(
    ("unit", "median", "shown"),
    [
        ("s", 1e-6, "1 µs 0.90–1.10"),
        ("s", 100.0, "100 s 90.0–110"),
        ("FLOP/s", 7.89e14, "789 TFLOP/s 710–868"),
        ("tokens/s", 541e3, "541k tokens/s 487–595"),
        ("B", 3 * 2**30, "3 GiB 2.70–3.30"),
        ("fraction", 0.5, "50.0 % 45.0–55.0"),
    ],
)
def test_spread_reads_at_the_medians_scale(unit: str, median: float, shown: str) -> None:
    assert shown in words(render([row(unit=unit, measured=sample(median))]))


def test_a_pipe_gets_plain_text_and_a_terminal_colour() -> None:
    pipe = io.StringIO()
    print_rows([row()], Console(file=pipe, force_terminal=False))
    assert "\x1b" not in pipe.getvalue()
    assert "2.00×" in pipe.getvalue()
    terminal = io.StringIO()
    print_rows([row()], Console(file=terminal, force_terminal=True, width=100, color_system="standard"))
    assert "\x1b[32m2.00×" in terminal.getvalue()  # faster is green


def test_no_rows_print_nothing() -> None:
    assert render([]) == ""


def test_a_width_that_is_no_number_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "abc")
    out = io.StringIO()
    print_rows([row()], Console(file=out, force_terminal=False))
    assert out.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_sentence_breaks_between_words(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    console = Console(file=io.StringIO(), width=20, force_terminal=is_terminal, highlight=False, markup=False)
    path = "/a/path/that/is/longer/than/a/line"
    print_words(f"what was written is in {path} now", console)
    assert isinstance(console.file, io.StringIO)
    assert [line.strip() for line in console.file.getvalue().splitlines()] == ["what was written is", "in", path, "now"]


@pytest.mark.parametrize("unit", ["%", "s", "ms", "µs", "GiB", "B/s", "min"])
def test_a_unit_stays_with_its_number(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    console = Console(file=io.StringIO(), force_terminal=False)
    print_words(f"as it is counted 10 {unit}, of it", console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == f"as it is counted\n10 {unit}, of it\n"


def test_a_number_and_a_word_may_be_parted() -> None:
    assert wrapped("it takes all of 10 seconds", 18, "- ", "  ") == "- it takes all of\n  10 seconds"


def test_a_sentence_in_a_pipe_fits_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    console = Console(file=io.StringIO(), force_terminal=False)
    words = "every rank has its own part of the model " * 8
    print_words(words, console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert 90 < max(len(line) for line in lines) <= PIPE_WIDTH
    assert " ".join(lines).split() == words.split()


def test_one_reading_has_no_spread() -> None:
    text = words(render([row(measured=Sample.of([5e-6]))]))
    assert "(-20 %) 5 µs 2.5 µs" in text


def test_what_computes_less_is_shown_and_is_not_the_best_peer() -> None:
    text = render([row(peers={"eager": sample(10e-6), "a @ b alone": sample(4e-6)})])
    assert text.splitlines()[-1].endswith("2.00×")
    assert "0.80×" in text
    alone = render([row(peers={"a @ b alone": sample(4e-6)})])
    assert not alone.splitlines()[-1].endswith("×")
