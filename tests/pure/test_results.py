"""What documents claim is what committed rows say: docs/results.md is made again, and each claim looked for."""

from __future__ import annotations

import re
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


def test_the_picture_is_drawn_from_the_rows() -> None:
    drawn = SCRIPT.picture(SCRIPT.select(SCRIPT.GRADED, name="grade"))
    assert drawn == (ROOT / "docs/pictures/loop.svg").read_text(), "run `python scripts/results.py`"
    assert drawn.count("predicted before") == 1
    assert drawn.count('class="predicted"') == 15


FIGURE = re.compile(
    r"\d[\d.,]*\s?(?:×(?! ?(?:tp|dp|pp)\b)|%|(?:ms|µs|s|times|seconds|minutes|GiB|MiB|GB|nats|tokens/s)\b)"
    r"|\b\d+ of \d+\b|\d+\.\d+(?= (?:to|and|of)\b)"
)


def figures_without_a_row(text: str, claims: list[str]) -> list[str]:
    """Measured-looking numbers outside of code, links and claims."""
    for claim in sorted(claims, key=len, reverse=True):
        text = text.replace(claim, "")
    plain = re.sub(r"^```.*?^```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.MULTILINE | re.DOTALL)
    return FIGURE.findall(plain)


def test_the_readme_claims_nothing_without_a_row() -> None:
    readme = (ROOT / "README.md").read_text()
    claims = [claim.text for claim in CLAIMS if claim.document == "README.md"]
    assert len(claims) >= 9
    assert figures_without_a_row(readme, claims) == []


@pytest.mark.parametrize(
    "claim", ["It is 1.3× as fast.", "in 12 of 14 cases", "takes 40 ms", "0.93 to 0.97 of it", "within 5 %"]
)
def test_a_claim_without_a_row_is_noticed(claim: str) -> None:
    assert figures_without_a_row(f"A sentence. {claim} `4 ms` dp 2 × tp 2, Python 3.11", []) != []
    assert figures_without_a_row(f"A sentence. {claim} `4 ms` dp 2 × tp 2, Python 3.11", [claim]) == []


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
