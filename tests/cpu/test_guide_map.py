"""The map's figures are what the papers' formulas give."""

from __future__ import annotations

from pathlib import Path

from tilemesh.guide.book import PARTS
from tilemesh.guide.draw import every_figure
from tilemesh.guide.overview import map_rows


def test_figures_of_llama_3_8b_on_eight_gpus() -> None:
    rows = {row.big: row for row in map_rows()}
    weights = 8_030_261_248  # Llama 3 8B's, as published
    assert rows["the batch"].keeps == f"all {16 * weights / 1e9:.3g} GB of weights and states"
    assert f"{2 * 7 / 8 * 2 * weights / 1e9:.3g} GB per step" in rows["the batch"].costs
    assert rows["weights and states"].keeps.endswith(f"→ {2 * weights / 1e9:.3g} GB")
    assert "bubble of 18%" in rows["all layers"].costs  # 7 / (32 + 7)
    assert rows["four models"].keeps.startswith(f"{36 * weights / 1e9:.3g} GB")
    assert rows["keys and values"].keeps == "4.29 GB per request of 32k"  # 131,072 bytes per token


def test_the_drawing_is_the_codes() -> None:
    drawn = Path(__file__).parents[2] / "docs" / "guide" / "overview.svg"
    assert drawn.read_text() == every_figure()["overview.svg"], "run `python -m tilemesh.guide.draw docs/guide`"


def test_every_chapter_that_the_map_names_is_there() -> None:
    named = {key.strip() for row in map_rows() for key in row.where.split(",") if not key.startswith("docs/")}
    assert named <= {part.key for part in PARTS}
    assert {part.key for part in PARTS if part.key.isdecimal()} - named == {"1", "2", "3", "4"}  # nothing is cut there
