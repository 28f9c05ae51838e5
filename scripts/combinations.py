"""Which training features work together: every pair of them is asked for, and the page of the answers is made.

The one idea: a list of features with the settings that switch each on, over one base. A pair is asked for as a user
would (`load`, then `preview`: nothing is trained), so what is refused, and why, is what the code says.
`python scripts/combinations.py > docs/parallel/combinations.md` writes the page; a test compares.
"""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tilemesh.core.config import split_sets
from tilemesh.core.conflicts import OR, ConflictError, ConflictWords
from tilemesh.model.families.book import to_json
from tilemesh.train.load import load
from tilemesh.train.preview import preview

BASE = {
    "train.device": "cpu", "plan.dp": "1", "plan.tp": "1", "plan.precision": "fp32", "optimizer.clip": "0",
    "model.tied": "false",
}  # fmt: skip
"""What every pair stands on: the default preset as one process, without what is a feature below."""
AXES = ("plan.dp", "plan.tp", "plan.pp", "plan.cp")
"""Where two features set different sizes of an axis, the larger one counts."""
LISTS = ("plan.offload",)
"""Settings that name several things: of two features, both are named."""
FOLDER = "FOLDER"
"""Stands for a Hugging Face folder with the base's model."""


class Feature(NamedTuple):
    """Something that a run may have."""

    name: str
    settings: str
    """What switches it on, as `--set` takes it."""


FEATURES = (
    Feature("tensor parallelism", "plan.tp=2"),
    Feature("sequence parallelism", "plan.tp=2,plan.sequence_parallel=true"),
    Feature("context parallelism", "plan.cp=2"),
    Feature("context parallelism by heads", "plan.cp=2,plan.cp_exchange=heads,model.kv_heads=4"),
    Feature("pipeline", "plan.pp=2,plan.schedule=1f1b"),
    Feature("zero-bubble pipeline", "plan.pp=2,plan.schedule=zb-v"),
    Feature("two-directional pipeline", "plan.pp=2,plan.schedule=dualpipe"),
    Feature("slices of sequences", "plan.pp=2,plan.schedule=terapipe,plan.slices=2"),
    Feature("asynchronous pipeline", "plan.pp=2,plan.schedule=pipedream"),
    Feature("asynchronous pipeline, one version", "plan.pp=2,plan.schedule=ampnet"),
    Feature("ZeRO-1", "plan.dp=2,plan.zero=1"),
    Feature("ZeRO-2", "plan.dp=2,plan.zero=2"),
    Feature("ZeRO-3", "plan.dp=2,plan.zero=3"),
    Feature("optimizer on the host", "plan.offload=optimizer"),
    Feature("activations on the host", "plan.offload=activations"),
    Feature("weights on the host", "plan.offload=weights,plan.prefetch=0"),
    Feature("recomputation by operator", "plan.recompute=operators"),
    Feature("full recomputation", "plan.recompute=full"),
    Feature("bf16 with master weights", "plan.precision=bf16-master"),
    Feature("products in 8 bits", "plan.precision=fp8"),
    Feature("fp16 with a scaled loss", "plan.precision=fp16"),
    Feature("torch.compile", "train.compile=true"),
    Feature("clipped gradients", "optimizer.clip=1"),
    Feature("Muon", "optimizer.name=muon"),
    Feature("tied embeddings", "model.tied=true"),
    Feature("experts", "model.experts=4"),
    Feature("expert parallelism", "model.experts=4,plan.dp=2,plan.ep=2"),
    Feature(
        "whole experts on ranks of tp",
        "model.experts=4,plan.tp=2,plan.sequence_parallel=true,plan.ep=2,plan.expert_tp=1",
    ),
    Feature("balanced experts", "model.experts=4,model.balance_loss=0.01"),
    Feature("experts with capacity", "model.experts=4,model.expert_capacity=1.25"),
    Feature("LoRA", "lora.rank=4,lora.base=FOLDER"),
    Feature("rounding while training", "compress.recipe=int8"),
    Feature("pruning while training", "compress.recipe=2:4"),
    Feature("teacher", "distill.teacher=FOLDER"),
    Feature("parameter server", "plan.dp=2,train.method=server"),
    Feature("local updates", "plan.dp=2,train.method=local"),
    Feature("compressed gradients", "plan.dp=2,method.compress=top-k"),
    Feature("packed documents", "data.packing=documents"),
    Feature("early stopping", "evaluate.patience=3"),
)
"""Schedules that update weights within a step differ, for a pair, only in whether versions of weights are kept."""


def pairs() -> Iterator[tuple[Feature, Feature, dict[str, str]]]:
    """Every two features that a configuration can name together, and their settings."""
    for first, second in itertools.combinations(FEATURES, 2):
        settings = joined(dict(split_sets([first.settings])), dict(split_sets([second.settings])))
        if settings is not None:
            yield first, second, settings


def joined(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str] | None:
    """The settings of both; None where they are alternatives (one key, two values), or one includes the other."""
    if first.items() <= second.items() or second.items() <= first.items():
        return None
    both = {**first, **second}
    for key in first.keys() & second.keys():
        if key in AXES:
            both[key] = max(first[key], second[key], key=int)
        elif key in LISTS:
            both[key] = f"{first[key]}+{second[key]}"
        elif first[key] != second[key]:
            return None
    return both


def refusal(settings: Mapping[str, str], folder: Path) -> ConflictWords | None:
    """Why these settings over the base are refused; None where they would be trained. `folder`: for models."""
    model = {key: text for key, text in {**BASE, **settings}.items() if key.startswith("model.")}
    (folder / "config.json").write_text(_described(*(f"{key}={text}" for key, text in model.items())))
    texts = [f"{key}={text.replace(FOLDER, str(folder))}" for key, text in {**BASE, **settings}.items()]
    try:
        preview(load(sets=texts))
    except ConflictError as error:
        return error.refusal._replace(setting=error.refusal.setting.replace(str(folder), FOLDER))
    return None


@functools.cache
def _described(*sets: str) -> str:
    """The config.json of the default preset's model with these settings."""
    return json.dumps(to_json(load(sets=sets).model, "float32"))


@functools.cache
def refusals() -> dict[tuple[Feature, Feature], ConflictWords | None]:
    """Of every pair, why it is refused, or None."""
    with tempfile.TemporaryDirectory() as folder:
        return {(first, second): refusal(settings, Path(folder)) for first, second, settings in pairs()}


# ---- the page --------------------------------------------------------------------------------------------------

_PAGE = """# Combinations

Which features of a training run work together. Of {pairs} pairs {works} work and **{refused} are refused**, before
anything is started: `tilemesh train … --dry-run` says the same of a whole configuration.

This page is generated: `python scripts/combinations.py > docs/parallel/combinations.md`. Each pair is asked for
with the settings of both features over the default preset on one process ({base}).

## Features

| | feature | settings | refused with |
|---:|---|---|---:|
{features}

## Pairs

✓: works. –: not a pair (the two are values of one setting, or one includes the other). A number: refused, for the
reason below.

{matrix}

## Reasons

| | pairs | set, such as | why | instead |
|---:|---:|---|---|---|
{reasons}
"""


def page() -> str:
    """The page of all pairs, as Markdown."""
    answers = refusals()
    refused = {pair: refusal for pair, refusal in answers.items() if refusal is not None}
    reasons = list(dict.fromkeys(refusal.why for refusal in refused.values()))
    number = {feature: place for place, feature in enumerate(FEATURES, 1)}
    features = [
        f"| {number[feature]} | {feature.name} | `{feature.settings}` | {sum(feature in pair for pair in refused)} |"
        for feature in FEATURES
    ]
    matrix = [f"| | {' | '.join(str(number[feature]) for feature in FEATURES)} |", "|---|" + "---|" * len(FEATURES)]
    for row in FEATURES:
        cells = []
        for column in FEATURES:
            pair = (row, column) if (row, column) in answers else (column, row)
            reason = refused[pair].why if pair in refused else None
            cells.append(str(1 + reasons.index(reason)) if reason else "✓" if pair in answers else "–")
        matrix.append(f"| {number[row]} {row.name} | {' | '.join(cells)} |")
    said = []
    for place, reason in enumerate(reasons, 1):
        met = [refusal for refusal in refused.values() if refusal.why == reason]
        instead = ", ".join(dict.fromkeys(f"`{way}`" for refusal in met for way in refusal.instead.split(OR)))
        said.append(f"| {place} | {len(met)} | {met[0].setting} | {reason} | {instead} |")
    return _PAGE.format(
        pairs=len(answers), works=len(answers) - len(refused), refused=len(refused),
        base=", ".join(f"`{key}={text}`" for key, text in BASE.items()), features="\n".join(features),
        matrix="\n".join(matrix), reasons="\n".join(said),
    )  # fmt: skip


if __name__ == "__main__":
    print(page(), end="")
