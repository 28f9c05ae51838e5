"""What must hold between two questions to the planner, over random models, clusters and batches.

More memory, bandwidth or choice is never slower; more layers never need less memory or time; parts add up to the whole;
JSON says what the value says. A sample runs always, all of it with the slow tests.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tilemesh.cli.main import main
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import Cluster, parse_cluster
from tilemesh.core.units import format_bytes, format_count, format_seconds
from tilemesh.model.config import ModelConfig
from tilemesh.plan.choose import NothingFitsError, SearchResult, search
from tilemesh.plan.prediction import Prediction
from tilemesh.plan.space import Pins
from tilemesh.plan.step import Estimator

CLUSTERS = ("1xh100", "2xh100", "4xh100", "8xh100", "2x4xa100", "2x8xh100", "2x6xa100", "3x5xh100", "4xcpu", "1xt4")
EXACT = 1e-9
"""Sums of the same seconds in another order."""


class Case:
    """A question, drawn from its number."""

    def __init__(self, number: int) -> None:
        draws = random.Random(number)
        heads = draws.choice([2, 4, 8, 12, 16])
        fields: dict[str, Any] = {
            "layers": draws.choice([1, 2, 3, 4, 6, 8, 12, 16, 24]),
            "width": heads * draws.choice([16, 32, 64, 128]),
            "heads": heads,
            "vocabulary": draws.choice([256, 1000, 32000, 50257]),
            "context": draws.choice([64, 256, 1024, 2048]),
            "kv_heads": draws.choice([count for count in (1, 2, 4, 8, heads) if heads % count == 0]),
            "norm": draws.choice(["layernorm", "rmsnorm"]),
            "norm_place": draws.choice(["pre", "post", "branch", "sandwich"]),
            "positions": draws.choice(["learned", "rotary"]),
            "activation": draws.choice(["relu", "gelu", "swiglu", "geglu"]),
            "qk_norm": draws.choice(["none", "none", "head"]),
            "biases": draws.choice([True, False, "qkv"]),
            "tied": draws.random() < 0.5,
            "dropout": draws.choice([0.0, 0.0, 0.1]),
        }
        self.model = ModelConfig(**fields)
        self.cluster = parse_cluster(draws.choice(CLUSTERS))
        self.batch = draws.choice([1, 2, 4, 6, 8, 16, 32, 48, 64])
        self.draws = draws

    def search(self, **changes: Any) -> SearchResult | None:
        """None where nothing is possible; a refusal must be true."""
        asked = {"model": self.model, "cluster": self.cluster, "batch": self.batch, **changes}
        try:
            return search(asked.pop("model"), asked.pop("cluster"), **asked)
        except NothingFitsError as error:
            is_true = not error.smallest.fits
        except UsageError:
            is_true = True
        assert is_true, "refused what fits"
        return None

    def best_s(self, **changes: Any) -> float:
        result = self.search(**changes)
        return float("inf") if result is None else result.best.step_time_s


def changed_device(cluster: Cluster, **factors: float) -> Cluster:
    node = cluster.node
    values = {name: getattr(node.device, name) for name in factors}
    changed = {name: type(value)(value * factors[name]) for name, value in values.items()}
    device = dataclasses.replace(node.device, **changed)
    return Cluster((dataclasses.replace(node, device=device),) * len(cluster.nodes))


def changed_links(cluster: Cluster, by: float) -> Cluster:
    node = cluster.node
    links = {
        name: dataclasses.replace(getattr(node, name), bytes_per_s=getattr(node, name).bytes_per_s * by)
        for name in ("intra", "inter")
    }
    return Cluster((dataclasses.replace(node, **links),) * len(cluster.nodes))


# ---- what holds --------------------------------------------------------------------------------------------------


def more_memory_is_never_slower(case: Case) -> None:
    more = changed_device(case.cluster, memory_bytes=2, usable_bytes=2)
    assert case.best_s(cluster=more) <= case.best_s() * (1 + EXACT)


def more_bandwidth_is_never_slower(case: Case) -> None:
    before = case.best_s()
    assert case.best_s(cluster=changed_device(case.cluster, memory_bytes_per_s=1.5)) <= before * (1 + EXACT)
    assert case.best_s(cluster=changed_links(case.cluster, 1.5)) <= before * (1 + EXACT)


def more_choice_is_never_slower(case: Case) -> None:
    before = case.best_s()
    for name, values in {
        "tp": [1, 2, 4], "pp": [1, 2, 3, 4], "dp": [1, 2, 4], "zero": [0, 1, 2, 3], "microbatch": [1, 2, 3, 8],
        "schedule": ["1f1b", "gpipe", "zb-v", "zb-h1", "zb-h2", "interleaved", "v-half", "chimera"],
        "recompute": ["none", "full"], "sequence_parallel": [True, False],
    }.items():  # fmt: skip
        pins = Pins(**{name: case.draws.choice(values)})
        assert before <= case.best_s(pins=pins) * (1 + EXACT), pins


def more_layers_never_need_less(case: Case) -> None:
    result = case.search()
    if result is None:
        return
    plan = result.best.plan
    fewer, more = (
        Estimator(case.model.replace(layers=case.model.layers * by), case.cluster).predict(plan) for by in (1, 2)
    )
    assert more.step_time_s >= fewer.step_time_s * (1 - EXACT)
    assert more.memory.total_bytes >= fewer.memory.total_bytes
    assert more.model_flops > fewer.model_flops
    assert case.best_s(model=case.model.replace(layers=2 * case.model.layers)) >= result.best.step_time_s * (1 - EXACT)


def parts_add_up_and_json_says_the_same(case: Case) -> None:
    result = case.search()
    if result is None:
        return
    for place, found in enumerate(result.predictions):
        assert found.fits
        assert sum(dataclasses.astuple(found.times)) == pytest.approx(found.step_time_s, rel=EXACT)
        check_memory(found)
        assert found.plan.dp * found.plan.tp * found.plan.pp == case.cluster.world
        assert found.plan.batch == case.batch
        assert sum(found.chunk_layers) == case.model.layers
        figures = result.figures(place)
        assert (figures["step_time_s"], figures["mfu"], figures["fits"]) == (found.step_time_s, found.mfu, True)
        assert figures["times"] == {**dataclasses.asdict(found.times), **figures["times"]}
        assert figures["memory"] == {**dataclasses.asdict(found.memory), **figures["memory"]}
    times = [found.step_time_s for found in result.predictions]
    assert times == sorted(times)


def check_memory(found: Prediction) -> None:
    parts = dataclasses.asdict(found.memory)
    later = parts.pop("later_bytes")
    assert sum(parts.values()) - later == found.memory.total_bytes
    assert all(value >= 0 for value in (*parts.values(), later))


RELATIONS = (
    more_memory_is_never_slower, more_bandwidth_is_never_slower, more_choice_is_never_slower,
    more_layers_never_need_less, parts_add_up_and_json_says_the_same,
)  # fmt: skip
SAMPLE = 4
GROUPS, EACH = 20, 50
SETTINGS = (
    "layers",
    "width",
    "heads",
    "kv_heads",
    "vocabulary",
    "context",
    "norm",
    "norm_place",
    "positions",
    "activation",
)


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.__name__)
def test_a_sample_of_what_holds(relation: Any) -> None:
    for number in range(SAMPLE):
        relation(Case(number))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", range(GROUPS))
def test_what_holds_for_a_thousand_questions(group: int) -> None:
    for number in range(group * EACH, (group + 1) * EACH):
        for relation in RELATIONS:
            try:
                relation(Case(number))
            except AssertionError as error:
                raise AssertionError(f"case {number}, {relation.__name__}: {error}") from error


def check_text(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table's columns are the JSON's values, as they are written for a reader."""
    case, target = Case(number), tmp_path / "plan.jsonl"
    sets = ",".join(f"model.{name}={getattr(case.model, name)}" for name in SETTINGS)
    asked = ["--set", f"{sets},model.mlp_width=0,model.head_width=0", "--batch", str(case.batch), "--json", str(target)]
    if main(["plan", "gpt2-124m", "--cluster", case.cluster.name, *asked]) != 0:
        return
    lines = capsys.readouterr().out.splitlines()
    rule = next(number for number, line in enumerate(lines) if line.startswith("──"))
    for row, line in zip(map(json.loads, target.read_text().splitlines()), lines[rule + 1 :], strict=False):
        step_s = row["step_time_s"]
        step = f"{step_s:.2f} s" if 10 <= step_s < 120 else format_seconds(step_s)  # four digits tell layouts apart
        words = [
            f"{row['place'] + 1} ", step, format_count(row["tokens_per_s"]),
            f"{row['mfu']:.0%}", format_bytes(row["memory"]["total_bytes"]),
        ]  # fmt: skip
        words += [f"{row['bubble_fraction']:.1%}"] * ("bubble" in lines[rule - 1])
        for word in words:
            assert f" {word} " in f" {line} ", (word, line)


def test_text_says_what_json_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_text(3, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_text_says_what_json_says_a_hundred_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(100):
        check_text(number, tmp_path, capsys)
