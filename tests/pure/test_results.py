"""What documents claim is what committed rows say: docs/results.md is made again, and each claim looked for."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/results.py")))
CLAIMS, TABLES = SCRIPT.load()


def test_the_page_of_results_is_what_the_rows_say() -> None:
    page = SCRIPT.page(CLAIMS, TABLES, SCRIPT.dates())
    assert page == (ROOT / "docs/results.md").read_text(), "run `python scripts/results.py`"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.document}: {claim.text[:50]}")
def test_a_claim_stands_in_its_document_with_the_figures_of_its_rows(claim: object) -> None:
    assert claim.lines, "a claim without rows"
    assert claim.text in (ROOT / claim.document).read_text(), f"{claim.document} should say: {claim.text}"


def test_each_claim_has_a_date() -> None:
    known = SCRIPT.dates()
    for claim in CLAIMS:
        for line in claim.lines:
            assert known[line.file], f"{line.file} is in no commit"
            assert SCRIPT.commit_of(line) in known, "run `python scripts/results.py`"


def test_a_figure_that_changes_is_noticed() -> None:
    """A row altered by one part in ten changes what its claim says."""
    claim = next(claim for claim in CLAIMS if "linear_cross_entropy" in claim.sentence)
    (line,) = claim.lines
    slower = SCRIPT.Line(line.file, line.number, {**line.body, "measured": {"median": line.measured * 1.1}})
    assert SCRIPT.figure("{:.1f}", lambda row: row.measured * 1e3, slower).text not in claim.text


def test_one_row_is_asked_for_and_several_are_refused() -> None:
    with pytest.raises(ValueError, match="a claim needs one"):
        SCRIPT.one("kernels_h200.jsonl", name="softmax")
