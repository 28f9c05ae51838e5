"""Whatever a folder's files say, a page is made of it: values of any kind in any place."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilemesh.cli.pages import beside
from tilemesh.report import compare_page, run, run_page

MakeRun = Callable[..., Path]
ODD: list[Any] = [
    None, True, 0, -1, 1, 10**30, -(10**30), 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"), "",
    "nan", "<script>", "\u202e\ud800", [], [None], [[1]], [float("nan")] * 3, {}, {"a": {}}, {"dp": "two"}, {"": None},
]  # fmt: skip


def changed(value: Any, chance: random.Random) -> Any:
    """The same, with some things somewhere inside replaced, dropped or doubled."""
    if chance.random() < 0.06:
        return chance.choice(ODD)
    if isinstance(value, dict):
        return {key: changed(one, chance) for key, one in value.items() if chance.random() > 0.04}
    if isinstance(value, list):
        return [changed(one, chance) for one in value for _ in range(chance.choice((0, 1, 1, 1, 1, 2)))]
    return value


@pytest.mark.parametrize("seed", range(30))
def test_a_page_is_made_whatever_the_files_say(make_run: MakeRun, seed: int) -> None:
    folder, chance = make_run(steps=20, traced=2, layers=1), random.Random(seed)
    predicted = {"step_time_s": 0.1, "memory": {"weights_bytes": 10, "total_bytes": 10}, "times": {"compute_s": 0.1},
                 "exchanges": {"tp": {"all_reduce": 5}}}  # fmt: skip
    (folder / "predicted.json").write_text(json.dumps(predicted))
    for name in ("summary.json", "predicted.json", "trace.json"):
        text = json.dumps(changed(json.loads((folder / name).read_text()), chance))
        (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    chance.shuffle(lines)
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(changed(line, chance)) for line in lines))
    found = run.read(folder)
    page = run_page.render(found, beside(found))
    page.encode("utf-8")
    assert page.count("<script>") == 1
    compare_page.render(found, beside(found), found, beside(found))
