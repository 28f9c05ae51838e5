"""The page on what each axis costs: its tables are what the planner says today, within a tenth."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import preset
from tilemesh.plan.step import predict

PAGE = (Path(__file__).parents[2] / "docs" / "parallel" / "axes.md").read_text()
ALIKE: dict[str, Any] = {"precision": "bf16-master", "recompute": "full"}
CLOSE = 0.1
"""Constants of the planner move a little as more is measured; what the page concludes from them does not."""


def layout(words: str, sequences: int) -> ParallelPlan:
    """As the page's first column names it."""
    sizes = {name: int(size) for name, size in re.findall(r"\b(dp|tp|pp|cp|ep|expert_tp) (\d+)", words)}
    zero = re.search(r"ZeRO-(\d)", words)
    more: dict[str, Any] = {"zero": int(zero[1]) if zero else 0, "sequence_parallel": sizes.get("tp", 1) > 1}
    way = re.search(r" by (\S+),", words)
    exchange = way[1] if way else "ring"
    return ParallelPlan(accumulation=sequences // sizes["dp"], cp_exchange=exchange, **sizes, **more, **ALIKE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("title", "model", "cluster", "context", "sequences"),
    [
        ("## Experts", "qwen3-30b-a3b", "32xh100", 4096, 128),
        ("## Long sequences", "llama-3-8b", "8xh100", 65536, 8),
    ],
)
def test_the_tables_are_what_the_planner_says(
    title: str, model: str, cluster: str, context: int, sequences: int
) -> None:
    section = PAGE.partition(title)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (dp [^|]+) \| ([\d.]+) \| ([\d.]+)([^|]*) \| ([\d.]+) [^|]* \| ([\d,]+) \|", section, re.M)
    assert len(rows) >= 5
    steps = {}
    for words, step_s, gib, fits, exposed_s, sent in rows:
        plan = layout(words, sequences)
        says = predict(preset(model), parse_cluster(cluster), plan, context, code="eager")
        steps[words] = says.step_time_s
        assert float(step_s) == pytest.approx(says.step_time_s, rel=CLOSE), words
        assert float(gib) == pytest.approx(says.memory.total_bytes / 2**30, rel=CLOSE), words
        assert ("does not fit" in fits) == (says.memory.total_bytes > says.usable_bytes), words
        travels = says.times.tp_s + says.times.cp_s + says.times.ep_s + says.times.dp_s
        assert float(exposed_s) == pytest.approx(travels, rel=CLOSE, abs=0.01), words
        assert float(sent.replace(",", "")) == pytest.approx(sum(says.traffic.values()) / 1e9, rel=CLOSE), words
    # The page's conclusions: an order, wherever layouts differ by more than a few percent.
    if title == "## Experts":
        assert min(steps, key=steps.__getitem__) == "dp 32, ep 8, ZeRO-1"
        assert steps["dp 32, ep 8, ZeRO-1"] < 0.6 * min(steps["dp 32, ZeRO-3"], steps["dp 32, ep 32, ZeRO-1"])
    else:
        assert max(steps, key=steps.__getitem__) == "dp 1, tp 8 with sequence parallelism"
