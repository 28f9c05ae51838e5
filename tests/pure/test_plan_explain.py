"""Every formula that `plan --explain` prints is evaluated: with its letters, with its numbers, and its sums added up.

A printed number stands for all that round to it; what is computed from it must reach what is printed as the result.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.choose import search
from tilemesh.plan.explain import ExplainedFigure, ExplainedPart, flops_section, model_sections, parameter_section
from tilemesh.plan.explain_plan import plan_sections
from tilemesh.plan.space import Pins

UNITS = {
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "GB": 1e9, "FLOP": 1, "FLOP/B": 1, "%": 0.01,
    "ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "TFLOP/s": 1e12, "PFLOP/s": 1e15,
    "B/s": 1, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12,
}  # fmt: skip
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
COUNTS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
UNIT = re.compile(f"(?: ?({'|'.join(sorted(map(re.escape, UNITS), key=len, reverse=True))})|([kMGT]))(?![\\w/])")
WORDS = ("total", "step", "activations", "reserved", "not yet there", "bubble and waiting", "recomputed", "all",
         "data-parallel exchange", "moving to the host", "waiting for the host", "passes in flight")  # fmt: skip
"""Rows that give what was simulated, measured or assumed, or a sum that has its own test."""


class Rounded(tuple[float, float]):
    """An interval: what a printed number may stand for."""

    def __new__(cls, low: float, high: float) -> Rounded:
        return super().__new__(cls, (low, high))

    def _all(self, other: Any, of: Any) -> Rounded:
        ends = other if isinstance(other, Rounded) else (other, other)
        values = [of(a, b) for a in self for b in ends]
        return Rounded(min(values), max(values))

    def __add__(self, other: Any) -> Rounded:
        return self._all(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> Rounded:
        return self._all(other, lambda a, b: a - b)

    def __mul__(self, other: Any) -> Rounded:
        return self._all(other, lambda a, b: a * b)

    def __truediv__(self, other: Any) -> Rounded:
        return self._all(other, lambda a, b: a / b)


def printed(text: str, unit: float = 1.0) -> Rounded:
    """Whole numbers are exact; of others half a unit of the last digit is unknown."""
    mantissa, _, exponent = text.replace(",", "").partition("e")
    half = 0.0
    if "." in mantissa or exponent or unit != 1:
        half = 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    value = float(text.replace(",", ""))
    slack = 1e-12 * abs(value)
    return Rounded((value - half - slack) * unit, (value + half + slack) * unit)


def evaluate(text: str, letters: dict[str, float]) -> Rounded:
    """An expression as it is printed: `2 T D (2 Q + 2 K) L` multiplies what stands side by side."""
    made: list[str] = []
    values: list[Rounded] = []
    rest = text.replace("kv heads", "kv_heads").strip()
    while rest:
        if match := NUMBER.match(rest):
            rest = rest[match.end() :]
            unit = 1.0
            if (named := UNIT.match(rest)) is not None:
                rest, unit = rest[named.end() :], (UNITS | COUNTS)[named[1] or named[2]]
            values.append(printed(match[0], unit))
        elif match := re.match(r"[A-Za-z_]+", rest):
            rest = rest[match.end() :]
            if match[0] == "x":
                made.append("*")
                rest = rest.strip()
                continue
            if match[0] == "B":  # bytes, of the number before it
                rest = rest.strip()
                continue
            values.append(printed("1") * letters[match[0]])
        else:
            if rest[0] == "(" and made and made[-1] not in "+-*/(":
                made.append("*")
            assert rest[0] in "+-*/()", f"{rest[0]!r} in {text!r}"
            made.append(rest[0])
            rest = rest[1:].strip()
            continue
        if made and made[-1] not in "+-*/(":
            made.append("*")
        made.append(f"v[{len(values) - 1}]")
        rest = rest.strip()
    result = eval("".join(made), {"v": values})
    assert isinstance(result, Rounded)
    return result


def result_of(row: ExplainedFigure) -> list[Rounded]:
    """Each figure that is given as the result: `1.7 GB = 1.6 GiB`."""
    text = re.split(r" \(|, \d+\.\d%|, 100%| of ", row.value)[0]
    return [evaluate(part, {}) for part in text.split(" = ")]


def meet(one: Rounded, other: Rounded, slack: float = 0.0) -> bool:
    return one[0] <= other[1] + slack and other[0] <= one[1] + slack


def check(parts: list[ExplainedPart], letters: dict[str, float]) -> int:
    """How many expressions were evaluated."""
    evaluated = 0
    for part in parts:
        for row in part.rows:
            if part.title.startswith("Roofline"):
                if "/" in row.formula:
                    assert meet(evaluate(row.formula, {}), evaluate(row.numbers, {}), 0.5), row  # printed as whole
                    evaluated += 1
                continue
            if row.formula == "sum" or row.what in WORDS or row.value == "dropped, recomputed":
                continue
            if "not the last stage" in row.numbers or row.formula.startswith("simulated") or row.value == "no bound":
                continue
            results = result_of(row)
            given = dict(re.findall(r"(\w) = ([\d,.]+)", row.numbers))
            if given:
                bound = {name: float(value.replace(",", "")) for name, value in given.items()}
                wanted = evaluate(row.formula, letters | bound)
            else:
                wanted = evaluate(row.numbers, {})
            # A shard is rounded up to whole parameters, a mean to whole elements.
            slack = 64.0 if "ZeRO" in row.what + row.formula or "mean" in row.what else 0.0
            slack += 1.0 if "/" in row.numbers and "B x" in row.formula else 0.0
            for result in results:
                assert meet(wanted, result, slack), f"{part.title}: {row}: {wanted}"
            evaluated += 1
            words = {*re.findall(r"[A-Za-z_]+", row.formula.replace("kv heads", "kv_heads"))} - {"x", "B"}
            if not given and words <= letters.keys():
                assert meet(evaluate(row.formula, letters), wanted, 64.0 * (slack > 0)), f"{part.title}: {row}"
                evaluated += 1
    return evaluated


MODELS: dict[str, ModelConfig] = {
    "gpt": preset("gpt2-124m"),
    "llama": preset("llama-3-8b"),
    "gemma": ModelConfig(
        layers=6, width=1152, heads=4, kv_heads=1, head_width=256, mlp_width=6912, vocabulary=262144, context=512,
        norm="rmsnorm", norm_place="sandwich", positions="rotary", activation="geglu", qk_norm="head", biases=False,
        window=128, full_layers=(5,), norm_offset=True,
    ),
    "olmo": ModelConfig(
        layers=4, width=512, heads=8, vocabulary=1000, context=256, norm="rmsnorm", norm_place="branch",
        positions="rotary", activation="swiglu", qk_norm="full", biases="qkv", tied=False,
    ),
    "neox": ModelConfig(
        layers=4, width=512, heads=8, vocabulary=1000, context=256, parallel_residual=True, biases="mlp", kv_heads=2,
    ),
}  # fmt: skip
LAYOUTS: list[dict[str, Any]] = [
    {"precision": "bf16-master"},
    {"precision": "bf16", "recompute": "full", "microbatch": 3},
    {"precision": "bf16-master", "attention": "materialized", "recompute": "selective", "dp": 8, "zero": 1},
    {"precision": "fp32", "recompute": "operators"},
]


def letters_of(model: ModelConfig, context: int, plan: ParallelPlan, sequences: int) -> dict[str, float]:
    return {
        "L": model.layers, "D": model.width, "Q": model.query_width, "K": model.kv_width, "E": model.head_width,
        "F": model.mlp_width, "V": model.vocabulary, "S": context, "T": sequences * context, "b": plan.microbatch,
        "N": count_parameters(model).total, "heads": model.heads, "tp": plan.tp, "a": model.heads, "t": plan.tp,
        "kv_heads": model.kv_heads,
    }  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
@pytest.mark.parametrize("name", MODELS)
def test_what_is_said_of_a_model_computes(name: str, layout: dict[str, Any]) -> None:
    model, plan = MODELS[name], ParallelPlan(**layout)
    parts = model_sections(model, model.context, plan)
    letters = letters_of(model, model.context, plan, 1)
    rounded = [part._replace(rows=[row for row in part.rows if "N rounded" in row.what]) for part in parts]
    plain = [part._replace(rows=[row for row in part.rows if "N rounded" not in row.what]) for part in parts]
    by_recipe = {
        key: value for key, value in letters.items() if key not in ("a", "t")
    }  # its rows have a tp of their own
    assert check([part for part in plain if "by recipe" not in part.title], letters) > 40
    assert check([part for part in plain if "by recipe" in part.title], by_recipe) >= 6
    assert check(rounded, {}) == 2


PLANS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("llama", "16xh100", 64, {}),
    ("gpt", "8xh100", 64, {"pp": 4, "schedule": "interleaved", "precision": "bf16"}),
    ("gpt", "4xh100", 32, {"pp": 2, "tp": 2, "schedule": "dualpipe"}),
    ("gemma", "2x6xa100", 24, {"tp": 4, "zero": 0}),
    ("olmo", "4xcpu", 8, {"dp": 2, "pp": 2}),
    ("neox", "8xa100", 16, {"tp": 2, "dp": 4, "zero": 3, "recompute": "full"}),
    ("llama", "8xh100", 16, {"offload": "optimizer", "dp": 8}),
]


@pytest.mark.parametrize(("name", "alone"), [("qwen3-30b-a3b", 1), ("deepseek-v3", 3)])
def test_what_is_said_of_experts_and_latents_computes_or_is_given_alone(name: str, alone: int) -> None:
    model = preset(name)
    parts = [parameter_section(model), flops_section(model, 1, model.context, "none")]
    computed = [
        part._replace(rows=[row for row in part.rows if row.formula and not row.what.startswith("6 N T")])
        for part in parts
    ]
    assert check(computed, letters_of(model, model.context, ParallelPlan(), 1)) > 5
    assert [len([row for row in part.rows if not row.formula]) for part in parts] == [alone, alone]
    assert parts[0].rows[-1].value == f"{count_parameters(model).total:,}"


@pytest.mark.parametrize(("name", "cluster", "batch", "fixed"), PLANS)
def test_what_is_said_of_a_plan_computes(name: str, cluster: str, batch: int, fixed: dict[str, Any]) -> None:
    model = MODELS[name]
    result = search(model, cluster, batch=batch, pins=Pins(**fixed))
    parts = plan_sections(result)
    assert check(parts, letters_of(model, result.context, result.best.plan, batch)) > 25


def total(rows: list[ExplainedFigure], but: tuple[str, ...]) -> Rounded:
    """Of the rows above a sum, less what is taken off."""
    sum_of = printed("0")
    for row in rows:
        if row.what not in but and row.value != "dropped, recomputed":
            value = result_of(row._replace(value=row.value.lstrip("-")))[-1]
            sum_of = sum_of - value if row.value.startswith("-") else sum_of + value
    return sum_of


@pytest.mark.parametrize("name", MODELS)
def test_sums_add_up(name: str) -> None:
    model = MODELS[name]
    result = search(model, "8xh100", batch=32)
    parts = [*model_sections(model, model.context, ParallelPlan(precision="bf16")), *plan_sections(result)]
    sums = 0
    for part in parts:
        ends = [place for place, row in enumerate(part.rows) if row.formula == "sum"]
        for place in ends:
            each = [row for row in part.rows[:place] if not row.what.endswith(", a layer")]
            found = result_of(part.rows[place])
            assert meet(total(each, ("parameters P",)), found[-1]), f"{part.title}: {part.rows[place]}"
            sums += 1
    assert sums >= 6


def test_what_a_layer_with_experts_keeps_is_what_memory_is_made_of() -> None:
    pins = Pins.parse(["ep=8", "recompute=none"])
    sections = plan_sections(search(preset("mixtral-8x7b"), "8xh200", batch=64, shown=1, pins=pins))
    kept, memory = sections[1], sections[2]
    (size,) = re.findall(r"\(([\d,]+) B\)", kept.rows[-1].value)
    assert f"{size} B per layer and microbatch" in next(row.numbers for row in memory.rows if row.what == "activations")
    assert "experts of the busiest rank with 1.073 times the mean rows" in kept.title
