"""Settings that do not go together: the page of feature pairs is what the code says, and every row of conflicts is met
by some configuration, said in one line and ended by what it says to set."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tilemesh.core.config import split_sets
from tilemesh.core.conflicts import OR, ConflictError, ConflictWords
from tilemesh.core.errors import UsageError
from tilemesh.core.step.book import asynchronous
from tilemesh.train.conflicts import CONFLICTS, may_replay
from tilemesh.train.load import load

ROOT = Path(__file__).parents[2]
SCRIPT: Any = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "combinations.py")))
BASE, FEATURES, FOLDER, joined, pairs, refusal, refusals = (
    SCRIPT.BASE, SCRIPT.FEATURES, SCRIPT.FOLDER, SCRIPT.joined, SCRIPT.pairs, SCRIPT.refusal, SCRIPT.refusals,
)  # fmt: skip
PAGE = ROOT / "docs" / "parallel" / "combinations.md"
GRAPH = "train.graph=true,train.device=auto,"
BEYOND_PAIRS = (
    "plan.zero=1", "plan.dp=2,plan.zero_group=2", "plan.dp=4,plan.zero=1,plan.zero_group=3",
    "plan.tp=4,plan.sequence_parallel=true,plan.expert_tp=2",
    "model.experts=4,plan.dp=4,plan.ep=4,plan.zero=1,plan.zero_group=2",
    "plan.recompute=operators,plan.recompute_every=2", "plan.pp=2,plan.recompute_stages=[0]",
    "plan.pp=2,plan.recompute=full,plan.recompute_stages=[0,2]",
    "plan.pp=2,plan.schedule=dualpipe,plan.recompute=full,plan.recompute_stages=[0]",
    "plan.pp=2,plan.schedule=zb-v,plan.offload=weights", "plan.schedule=pipedream", "plan.attention=materialized",
    "train.context=999", "plan.pp=2,plan.schedule=terapipe,plan.slices=200",
    "plan.cp=4,train.context=3", "plan.cp=4,plan.pp=2,plan.schedule=terapipe,plan.slices=64",
    *(f"train.compile=true,{cut},plan.recompute=operators" for cut in ("plan.cp=2", "model.experts=4")),
    *(
        f"{waits},{missing}=0"
        for waits in ("evaluate.patience=2", "checkpoint.keep_best=true")
        for missing in ("evaluate.every", "evaluate.sequences", "data.held_out")
    ),
    "plan.tp=2,compress.recipe=unstructured-50", "plan.tp=2,plan.precision=fp8,model.kv_heads=1",
    "plan.dp=2,train.method=server,train.device=cuda", "train.method=local", "method.compress=int8",
    "plan.dp=2,method.compress=int8,model.experts=4,model.router_bias=true,model.router_scores=sigmoid,model.kv_heads=4,"
    "model.latent_width=8,model.rotary_fraction=0.5,model.mlp_width=64,model.shared_width=64",
    "plan.dp=2,train.method=server,method.servers=500", "lora.rank=4", "train.batch=8,plan.accumulation=3",
    "train.batch=8,plan.microbatch=3", "train.batch=8,plan.microbatch=2,plan.accumulation=3",
    *(f"plan.dp=2,train.method=local,method.period=10,{key}=25" for key in (
        "checkpoint.every", "evaluate.every", "method.start")),
    *(GRAPH + more for more in (
        "plan.dp=2", "plan.tp=2", "plan.pp=2", "plan.cp=2", "train.device=cpu", "plan.precision=fp16",
        "optimizer.fused=false",
        "optimizer.name=lion", "data.packing=documents", "data.chat=true,data.packing=stream", "plan.offload=optimizer",
        "compress.recipe=int8", f"model.experts=4,lora.rank=4,lora.base={FOLDER}", f"distill.teacher={FOLDER}")),
)  # fmt: skip
"""Settings over the base of the pairs, for rows that no pair of features meets."""

ALIKE = {"pipedream": "pipedream-2bw", "ampnet": "pipemare"}


def test_the_page_in_the_documents_is_the_generated_one() -> None:
    assert PAGE.read_text() == SCRIPT.page(), "run `python scripts/combinations.py > docs/parallel/combinations.md`"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_alone_is_taken(feature: Any, tmp_path: Path) -> None:
    assert refusal(dict(split_sets([feature.settings])), tmp_path) is None


def test_pairs_have_the_settings_of_both() -> None:
    assert joined({"plan.tp": "2"}, {"plan.tp": "2", "plan.zero": "1"}) is None  # one includes the other
    assert joined({"plan.zero": "1"}, {"plan.zero": "2"}) is None  # alternatives
    assert joined({"plan.dp": "2", "a.b": "1"}, {"plan.dp": "10"}) == {"plan.dp": "10", "a.b": "1"}
    both = joined({"plan.offload": "weights"}, {"plan.offload": "optimizer"})
    assert both == {"plan.offload": "weights+optimizer"}


@pytest.mark.parametrize(("first", "other"), ALIKE.items())
def test_asynchronous_schedules_refuse_the_same(first: str, other: str, tmp_path: Path) -> None:
    """So that one of those that keep versions of weights stands for them, and one for those that do not."""
    assert {*ALIKE, *ALIKE.values()} == {*asynchronous()}
    asked = [settings for *_, settings in pairs() if settings.get("plan.schedule") == first]
    assert len(asked) > 20
    for settings in asked:
        said = str(refusal(settings, tmp_path))
        assert str(refusal(settings | {"plan.schedule": other}, tmp_path)) == said.replace(first, other)


def told(refused: ConflictWords) -> tuple[str, ...]:
    """Which settings a refusal is about."""
    return tuple(words.partition(" is ")[0] for words in refused.setting.split(" and "))


def test_every_row_is_met_and_ends_as_it_says(tmp_path: Path) -> None:
    of_pairs = {(first, second): settings for first, second, settings in pairs()}
    examples = [(of_pairs[pair], refused) for pair, refused in refusals().items() if refused is not None]
    for text in BEYOND_PAIRS:
        settings = dict(split_sets([text]))
        refused = refusal(settings, tmp_path)
        assert refused is not None, text
        examples.append((settings, refused))
    met: set[tuple[str, ...]] = set()
    for settings, refused in examples:
        if told(refused) in met:
            continue
        assert "\n" not in str(refused)
        met.add(told(refused))
        for way in refused.instead.split(OR):
            try:
                after = refusal(settings | dict(split_sets([way])), tmp_path)
            except UsageError as error:
                if "expected" in str(error):
                    raise
                continue  # what was said with it makes no sense without it, such as sequences cut over one rank
            assert after is None or told(after) != told(refused), f"{refused}, and {way} does not end it"
    assert met == {row.settings for row in CONFLICTS}


def test_a_plan_alone_and_in_a_configuration_are_refused_in_the_same_words() -> None:
    words = "zero is 1 and {}dp is 1: ZeRO shares among replicas and there is one; set {}zero=0"
    with pytest.raises(ConflictError, match=words.format("plan.", "plan.")):
        load(sets=[f"{key}={text}" for key, text in {**BASE, "plan.zero": "1"}.items()])


def test_a_mesh_that_cannot_share_out_experts_names_one_that_can() -> None:
    with pytest.raises(UsageError, match=r"plan\.ep is 3: dp 2 do not .*; set the mesh dp=2,ep=2 or dp=3,ep=3$"):
        load(sets=["model.experts=6,plan.dp=2,plan.tp=1,plan.ep=3"])


def test_ranks_that_share_a_latent_are_told_of_it() -> None:
    latent = "model.kv_heads=4,model.heads=4,model.latent_width=8,model.biases=false,model.rotary_fraction=0.5"
    with pytest.raises(ConflictError, match=r"or the latent .*; set plan\.tp=1 or plan\.precision=bf16-master$"):
        load(sets=[latent, "model.positions=rotary,plan.precision=fp8,plan.tp=2"])


def test_steps_may_become_a_graph_where_no_row_keeps_them_from_it() -> None:
    made = load(sets=["train.device=auto,plan.dp=1,plan.tp=1"])
    assert may_replay(made)
    assert not may_replay(load(sets=["train.device=auto,plan.dp=1,plan.tp=1,train.graph=false"]))
    assert not may_replay(load(sets=["train.device=auto,plan.dp=2,plan.tp=1"]))
