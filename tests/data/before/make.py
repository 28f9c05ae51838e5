"""Writes what this folder keeps: runs, models and configurations as an earlier commit (b8de1263) wrote them.

Run once, with that commit's `src` on the path and this folder as the working directory (`test_before.py` reads the
results with today's code). To keep a format before it is changed, check the commit out, add a case and run this there.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from tilemesh.comm import run_threads
from tilemesh.compress import shrink
from tilemesh.model import huggingface
from tilemesh.runs import folder as folders
from tilemesh.runs.base import write_base
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.metrics import latest
from tilemesh.train import load_config
from tilemesh.train.export import export
from tilemesh.train.rank import train_here

STEPS, MORE = 3, 2
"""Steps of a run that is kept, and those after which it is compared again."""
SMALL = (
    "model.layers=2", "model.width=4", "model.heads=2", "model.mlp_width=4", "model.context=16", "model.tied=true",
    "train.steps=3", "train.batch=8", "train.device=cpu", "train.trace_steps=0", "train.kernels=torch",
    "plan.microbatch=2", "optimizer.clip=0", "optimizer.lr=0.01", "evaluate.sequences=0", "checkpoint.every=0",
    "checkpoint.background=false", "sample.tokens=0", "data.source=text.txt", "data.held_out=0.0",
)  # fmt: skip
SGD = ("optimizer.name=sgd", "optimizer.lr=0.1")
PLAIN_SGD = (*SGD, "optimizer.momentum=0")
OUTER = ("method.period=1", "method.outer_momentum=0.9", "method.outer_lr=0.7")
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": ("dp=1", ()),
    "sharded": ("dp=2,tp=2,pp=2", ("plan.zero=3", "plan.schedule=1f1b", *SGD)),
    "recipe": ("dp=1", ("compress.recipe=2:4", *PLAIN_SGD)),
    "lora": ("dp=1", ("lora.rank=2",)),
    "local": ("dp=2", ("train.method=local", *OUTER, *SGD)),
    "server": ("dp=2", ("train.method=server", *SGD)),
    "compressed": ("dp=2", ("method.compress=top-k", *PLAIN_SGD)),
    "asynchronous": ("pp=2", ("plan.schedule=pipemare", "model.tied=false", *PLAIN_SGD)),
}
"""A mesh and settings by the name of a run."""
RECIPES = {"int4": "int4-g4", "factored": "rank-60"}
KEPT = ("run.json", "config.toml", "checkpoints", "base.json", "choices.json")
"""What a run is made of; the rest says how it went, some of it with paths."""
OVER = ("plan.precision=fp64", f"train.steps={STEPS + MORE}")


def train(mesh: str, sets: tuple[str, ...], run: Path, init: str | None = None) -> None:
    config = load_config(sets=[*SMALL, *sets], mesh=mesh, init=init)
    folders.new_run(TRAIN, config.to_toml(), run)
    if config.lora.base is not None:
        write_base(run, config.lora.base)
    run_threads(config.ranks, lambda comm: train_here(config, run, comm, init=init))


def losses_after(run: Path, copy: Path) -> list[float]:
    """Of the steps after those kept, in float64: what weights, moments and all else that was kept come to."""
    shutil.copytree(run, copy)
    config = load_config(resume=copy, sets=OVER)
    run_threads(config.ranks, lambda comm: train_here(config, copy, comm, resume=True))
    lines = {line["step"]: line["loss"] for line in latest(copy) if line["kind"] == "step"}
    return [lines[step] for step in range(STEPS + 1, STEPS + MORE + 1)]


def logits(folder: Path) -> list[float]:
    """Of the last of some tokens, in float64."""
    model = huggingface.load(folder).double().eval()
    with torch.no_grad():
        return [float(value) for value in model(torch.arange(65, 81)[None])[0, -1, ::16]]


def main() -> None:
    work = Path(sys.argv[1])
    Path("text.txt").write_text("".join(f"{a} times {b} is {a * b}.\n" for a in range(1, 13) for b in range(1, 13)))
    expected: dict[str, Any] = {}
    for name, (mesh, sets) in RUNS.items():
        run = work / name
        train(mesh, sets, run, init="exported" if name == "lora" else None)
        for part in KEPT:
            if (run / part).is_dir():
                shutil.copytree(run / part, Path(name) / part)
            elif (run / part).exists():
                Path(name).mkdir(exist_ok=True)
                shutil.copy(run / part, Path(name) / part)
        exported = Path("exported") if name == "plain" else work / f"{name}-exported"
        export(run, exported)
        expected[name] = {"logits": logits(exported), "losses": losses_after(run, work / f"{name}-on")}
    expected["exported"] = {"logits": expected["plain"]["logits"]}
    lora = Path("lora/config.toml")
    lora.write_text(lora.read_text().replace(str(Path("exported").resolve()), "exported"))
    for name, recipe in RECIPES.items():
        tokens = torch.tensor([[*Path("text.txt").read_bytes()[: 64 * 17]]]).view(64, 17)
        huggingface.save(shrink(huggingface.load("exported"), recipe, tokens), name)
        expected[name] = {"logits": logits(Path(name))}
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


main()
