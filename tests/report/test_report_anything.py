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
from tilemesh.report.kind_page import Beside
from tilemesh.report.run import Run

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


POINT = {
    "recipe": "int8", "loss": 2.0, "plain_loss": 2.1, "bytes": 10, "plain_bytes": 40, "decode_s": 0.1, "plain_decode_s":
    0.2, "errors": {"a": 0.1}, "matrix": "a", "before": {"centre": [0.0, 1.0], "count": [1, 2]}, "after": {"centre":
    [0.0, 1.0], "count": [0, 3]},
}  # fmt: skip
SERVER = {"staleness": [[0, 5], [1, 3]], "updates": 8, "waited_s": [0.1], "given_up": [1], "divergence": {"mean": 0.1}}
STEPS = [{"step": step, "loss": 3.0, "expert_load": [[1.0, 2.0]], "router_entropy": [0.9]} for step in range(1, 12)]
RUNS: dict[str, dict[str, Any]] = {
    "compress": {"config": {"compress": {"recipes": ["int8", "nf4"]}}, "summary": {"points": [POINT, POINT]}},
    "align": {"samples": [{"step": step, "prompt": "p", "answer": "a", "reward": 0.5} for step in range(9)]},
    "train": {"steps": STEPS, "summary": {
        "plan": {"dp": 2}, "world": 3, "method": {"servers": [SERVER]}, "model": {"dense_layers": [0]}}},
}  # fmt: skip


@pytest.mark.parametrize("kind", RUNS)
def test_so_is_the_page_of_every_kind_of_run(kind: str) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        fields = {name: changed(value, chance) for name, value in RUNS[kind].items()}
        fields = {name: value for name, value in fields.items() if type(value) is type(RUNS[kind][name])}
        for name in {"steps", "samples"} & fields.keys():  # objects, and steps with a number: what a folder is read as
            lines = [line for line in fields[name] if isinstance(line, dict)]
            fields[name] = [line for line in lines if name == "samples" or type(line.get("step")) is int]
        found = Run("name", "folder", "done", kind, **fields)
        run_page.render(found, Beside()).encode("utf-8")
        compare_page.render_several([found, found, found])
