"""What the page of combinations calls working trains: two steps of every such pair, on ranks that are threads."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest

from tilemesh.comm import run_threads
from tilemesh.core.conflicts import ConflictError
from tilemesh.model import huggingface
from tilemesh.model.transformer import Transformer
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.metrics import latest
from tilemesh.train.load import load
from tilemesh.train.rank import train_here

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "combinations.py"))
BASE, FOLDER, pairs = SCRIPT["BASE"], SCRIPT["FOLDER"], SCRIPT["pairs"]
SMALL = {
    **BASE, "model.layers": "4", "model.width": "16", "model.heads": "4", "model.kv_heads": "2", "model.context": "16",
    "train.steps": "2", "train.batch": "8", "train.trace_steps": "0", "evaluate.every": "2", "evaluate.sequences": "2",
    "checkpoint.every": "2", "checkpoint.background": "false", "sample.tokens": "0", "method.period": "2",
}  # fmt: skip
ASKED = [
    pytest.param(settings, id=f"{first.name} x {second.name}", marks=[] if place % 101 == 7 else pytest.mark.slow)
    for place, (first, second, settings) in enumerate(pairs())
    if "train.compile" not in settings  # minutes each, and no work for threads
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(f'{{"text": "line {number} jumps over {number * 7}"}}\n' for number in range(300)))
    return path


@pytest.mark.parametrize("settings", ASKED)
def test_a_pair_that_works_trains(settings: dict[str, str], text: Path, tmp_path: Path) -> None:
    base = {**SMALL, **settings, "data.source": str(text)}
    model = load(sets=[f"{key}={value}" for key, value in base.items() if key.startswith("model.")]).model
    sets = [f"{key}={value.replace(FOLDER, str(tmp_path / 'model'))}" for key, value in base.items()]
    if FOLDER in settings.values():
        huggingface.save(Transformer(model, seed=5), tmp_path / "model")
    try:
        config = load(sets=sets)
    except ConflictError:
        return  # the page says why
    new_run(TRAIN, config.to_toml(), tmp_path / "run")
    run_threads(config.ranks, lambda comm: train_here(config, tmp_path / "run", comm))
    losses = [line["loss"] for line in latest(tmp_path / "run") if line["kind"] == "step"]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
