"""What a resumed run may be: values of each axis, as settings; a case has one of each.

The one idea: everything else being plain, a pair of values either trains or is refused by `load`; the cover
(`cover.txt`, written by `resume_run.py --make`) has every pair that trains in some case.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from unittest import mock

from tilemesh.core.errors import UsageError
from tilemesh.core.step.book import all_schedules, find
from tilemesh.train import load as loading
from tilemesh.train.config import TrainConfig

COVER = Path(__file__).parent / "cover.txt"
STEPS, EVERY = 7, 4
"""Of a run, and between its checkpoints."""

SMALL = (
    "model.layers=4,model.width=16,model.heads=2,model.kv_heads=2,model.mlp_width=32,model.context=16,train.batch=8,"
    f"train.steps={STEPS},checkpoint.every={EVERY},evaluate.every={EVERY},evaluate.sequences=4,sample.tokens=4,"
    "optimizer.warmup=2,optimizer.lr=0.01,train.trace_steps=0,train.device=cpu,train.timeout_s=60,data.held_out=0.1"
)


def _schedule(name: str) -> str:
    sets = [f"plan.schedule={name}", "plan.microbatch=1"]
    sets += ["plan.interleave=2"] * bool(find(name).interleaves) + ["plan.slices=2"] * find(name).cuts_sequences
    sets += ["optimizer.clip=0", "model.tied=false", "method.anneal=9"] * (find(name).updates is not None)
    return ",".join(sets)


LAYOUTS = {
    "alone": ("dp=1", ""),
    "dp2": ("dp=2", "plan.microbatch=2"),
    "dp3": ("dp=3", "train.batch=9,plan.microbatch=3"),
    "tp2": ("tp=2", ""),
    "tp2-sequence": ("tp=2", "plan.sequence_parallel=true"),
    "dp2-tp2": ("dp=2,tp=2", ""),
    "zero1": ("dp=2", "plan.zero=1"),
    "zero2": ("dp=2", "plan.zero=2,plan.microbatch=2"),
    "zero3": ("dp=2", "plan.zero=3"),
    "offload": ("dp=1", "plan.offload=optimizer"),
    "dp2-pp2": ("dp=2,pp=2", "plan.microbatch=2"),
    **{name: ("pp=2", _schedule(name)) for name in (schedule.name for schedule in all_schedules())},
}
"""By name, the mesh and settings."""

AXES: dict[str, Mapping[str, str]] = {
    "layout": {name: sets for name, (_, sets) in LAYOUTS.items()},
    "transport": dict.fromkeys(("threads", "mpi", "torch"), ""),
    "precision": {name: f"plan.precision={name}" for name in ("fp32", "bf16", "bf16-master", "fp16", "fp64")},
    "method": {
        "synchronous": "",
        "bsp": "train.method=server,method.servers=2",
        "ssp": "train.method=server,method.consistency=ssp,method.staleness=1,optimizer.clip=0",
        "asp": "train.method=server,method.consistency=asp,method.servers=2,method.batch=2,optimizer.clip=0",
        "local": "train.method=local,method.period=2",
        "diloco": "train.method=local,method.period=2,method.outer_lr=0.7,method.outer_momentum=0.9",
        "top-k": "method.compress=top-k",
        "random-k": "method.compress=random-k",
        "one-bit": "method.compress=one-bit",
        "int8": "method.compress=int8",
        "powersgd": "method.compress=powersgd,method.rank=1",
    },
    "optimizer": {
        "adamw": "",
        "sgd": "optimizer.name=sgd",
        "plain-sgd": "optimizer.name=sgd,optimizer.momentum=0",
        "lion": "optimizer.name=lion",
        "muon": "optimizer.name=muon",
    },
    "lora": {"whole": "", "lora": "lora.rank=2"},
    "recipe": {
        "exact": "",
        **{name: f"compress.recipe={name}" for name in ("int4-g16", "int8-a8", "2:4", "unstructured-50")},
    },
    "teacher": {"untaught": "", "taught": "distill.teacher={place}/teacher"},
    "data": {
        "text": "data.source={place}/text.txt",
        "documents": "data.source={place}/text.jsonl,data.packing=documents",
        "padded": "data.source={place}/text.jsonl,data.packing=none",
        "chat": "data.source={place}/chat.jsonl,data.chat=true,data.packing=documents",
        "mixture": "data.mixture=[{place}/text.txt=3,{place}/text.jsonl=1]",
        "shards": "data.source={place}/shards",
    },
    "more": {
        "plain": "",
        "dropout": "model.dropout=0.1",
        "recompute": "plan.recompute=full",
        "foreground": "checkpoint.background=false,optimizer.fused=false",
    },
    "stop": dict.fromkeys(("1", "3", "4", "6", "2-5", "killed", "ended"), ""),
}
"""By axis and value, settings. Stops: after a step, after one and then another, killed in the step before the last,
or not before the end."""

PLAIN = {axis: next(iter(values)) for axis, values in AXES.items()} | {"layout": "dp2"}
EVERYTHING = PLAIN | {"data": "shards", "teacher": "taught", "lora": "lora"}
"""Names all files."""
Case = dict[str, str]


def named(case: Mapping[str, str]) -> str:
    return " ".join(case[axis] for axis in AXES)


def of_name(name: str) -> Case:
    case = dict(zip(AXES, name.split(), strict=True))
    for axis, value in case.items():
        if value not in AXES[axis]:
            raise ValueError(f"{axis} {value} of '{name}': expected one of {', '.join(AXES[axis])}")
    return case


def cover() -> list[str]:
    """The names of all cases, in the order of the file."""
    return COVER.read_text().splitlines()


def pairs_of(case: Mapping[str, str]) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def all_pairs() -> Iterator[frozenset[tuple[str, str]]]:
    """Every pair of values of two axes."""
    for one, other in combinations(AXES, 2):
        for first in AXES[one]:
            yield from (frozenset({(one, first), (other, second)}) for second in AXES[other])


def config_of(case: Mapping[str, str], place: Path) -> TrainConfig:
    """The configuration of a case, over the files of `furnish(place)`."""
    mesh, _ = LAYOUTS[case["layout"]]
    sets = [values[case[axis]].format(place=place) for axis, values in AXES.items()]
    sets = [SMALL, *(piece for piece in sets if piece)]
    return loading.load(mesh=mesh, sets=sets, init=place / "base" if case["lora"] == "lora" else None)


def is_trained(case: Mapping[str, str], place: Path) -> bool:
    """Whether `load` takes it. The nearest layout that works, which a refusal names, is not looked for."""
    with mock.patch.object(loading, "_with_advice", lambda error, again: error), contextlib.suppress(UsageError):
        config_of(case, place)
        return True
    return False


def furnish(place: Path, case: Mapping[str, str] = EVERYTHING) -> Path:
    """The files that a case names: text of several kinds, a teacher and a model to add adapters to."""
    from tilemesh.data.config import DataConfig
    from tilemesh.data.prepare import prepare
    from tilemesh.model import huggingface
    from tilemesh.model.transformer import Transformer

    place.mkdir(parents=True, exist_ok=True)
    (place / "text.txt").write_text("".join(f"line {n}: {n * 7} dogs and {n * 13} foxes\n" for n in range(300)))
    records = [{"text": f"{n}: " + "fox " * (n % 5)} for n in range(300)]
    (place / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "x" * (1 + n % 7)}]}
        for n in range(300)
    ]
    (place / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chats))
    if case["data"] == "shards":
        prepare(DataConfig(source=str(place / "text.txt"), held_out=0.1), place / "shards")
    for name, axis in (("teacher", "teacher"), ("base", "lora")):
        if case[axis] != PLAIN[axis]:
            huggingface.save(Transformer(config_of(PLAIN, place).model, seed=len(name)), place / name)
    return place
