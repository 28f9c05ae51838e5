"""The page of feature pairs is what the code says of each; what is on it once stands for what it leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilemesh.core.config import split_sets
from tilemesh.core.plan import ASYNCHRONOUS
from tilemesh.train.combinations import FEATURES, joined, page, pairs, refusal

PAGE = Path(__file__).parents[2] / "docs" / "parallel" / "combinations.md"


def test_the_page_in_the_documents_is_the_generated_one() -> None:
    assert PAGE.read_text() == page(), "run `python -m tilemesh.train.combinations > docs/parallel/combinations.md`"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_alone_is_taken(feature: tuple[str, str], tmp_path: Path) -> None:
    assert refusal(dict(split_sets([feature[1]])), tmp_path) == ""


def test_pairs_have_the_settings_of_both() -> None:
    assert joined({"plan.tp": "2"}, {"plan.tp": "2", "plan.zero": "1"}) is None  # one includes the other
    assert joined({"plan.zero": "1"}, {"plan.zero": "2"}) is None  # alternatives
    assert joined({"plan.dp": "2", "a.b": "1"}, {"plan.dp": "10"}) == {"plan.dp": "10", "a.b": "1"}
    both = joined({"plan.offload": "weights"}, {"plan.offload": "optimizer"})
    assert both == {"plan.offload": "weights+optimizer"}


def test_asynchronous_schedules_refuse_the_same(tmp_path: Path) -> None:
    """So that one of them stands for all."""
    first, *others = ASYNCHRONOUS
    asked = [settings for *_, settings in pairs() if settings.get("plan.schedule") == first]
    assert len(asked) > 20
    for settings in asked:
        said = refusal(settings, tmp_path)
        for other in others:
            assert refusal(settings | {"plan.schedule": other}, tmp_path) == said.replace(first, other)
