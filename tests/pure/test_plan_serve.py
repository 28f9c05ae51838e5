"""Planning for serving: memory by hand, Little's law, choices, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tilemesh.cli.main import main
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.model.config import preset
from tilemesh.plan.serving import (
    LOAD,
    PAGE_TOKENS,
    ServeDemand,
    cost_per_million,
    joules_per_token,
    serve_layouts,
    serving_reasons,
    steady_state,
)
from tilemesh.plan.serving_clock import StepClock

DEMAND = ServeDemand(rate=5.0, prompt=1000, output=300)


def test_memory_of_an_8b_model_on_an_h200() -> None:
    (layout,), refused = serve_layouts(preset("llama-3-8b"), parse_cluster("1xh200"), DEMAND)
    assert refused == []
    assert layout.token_bytes == 131_072
    assert layout.weight_bytes == 2 * 8_030_261_248
    # 139.8 GiB seen by a program, 5 % left free, 1.5 GiB of a process's own, 15 GiB of weights; pages of 2 MiB.
    assert layout.pages == pytest.approx((143156 * 2**20 * 0.95 - 3 * 2**29 - layout.weight_bytes) / 2**21, rel=0.01)
    assert layout.fits == layout.pages // -(-1300 // PAGE_TOKENS)


def test_the_batch_for_a_rate_is_littles_law() -> None:
    (layout,), _ = serve_layouts(preset("llama-3-8b"), parse_cluster("1xh200"), DEMAND)
    assert layout.needed is not None
    state = layout.needed
    assert state.batch == pytest.approx(state.requests_per_s * DEMAND.output * state.step_s)
    assert LOAD * state.requests_per_s >= DEMAND.rate
    assert state.limit_s < state.step_s
    clock = StepClock(preset("llama-3-8b"), parse_cluster("1xh200"))
    assert steady_state(clock, DEMAND, 2 * state.batch).step_s > state.step_s


def test_more_ranks_have_more_pages_each_and_what_does_not_fit_says_why() -> None:
    layouts, refused = serve_layouts(preset("llama-3-70b"), parse_cluster("8xh200"), DEMAND)
    by_tp = {layout.tp: layout for layout in layouts}
    assert set(by_tp) | {1} == {1, 2, 4, 8}
    assert by_tp[8].pages > by_tp[4].pages > by_tp[2].pages
    assert all(layout.tp * layout.replicas == 8 for layout in layouts)
    assert [line for line in refused if line.startswith("tp 1: weights")] or 1 in by_tp
    with pytest.raises(RunError, match="nothing fits"):
        serve_layouts(preset("llama-3-70b"), parse_cluster("1xh100"), DEMAND)
    with pytest.raises(UsageError, match="the context is"):
        serve_layouts(preset("tinyllama-1.1b"), parse_cluster("1xh100"), ServeDemand(1.0, 2000, 300))


def test_a_promise_bounds_the_batch_and_a_rate_too_high_is_said() -> None:
    model, cluster = preset("llama-3-8b"), parse_cluster("1xh200")
    (free,), _ = serve_layouts(model, cluster, DEMAND)
    (bound,), _ = serve_layouts(model, cluster, ServeDemand(5.0, 1000, 300, between_tokens_s=0.012))
    assert bound.largest.batch < free.largest.batch
    assert bound.largest.step_s <= 0.012
    demand = ServeDemand(1e5, 1000, 300)
    layouts, refused = serve_layouts(model, cluster, demand)
    assert layouts[0].needed is None
    assert "No layout serves" in serving_reasons(layouts, refused, demand)[0]
    for bad in ({"rate": 0.0}, {"prompt": 0}, {"output": -1}):
        with pytest.raises(UsageError, match="expected above 0 and at most"):
            ServeDemand(**{"rate": 1.0, "prompt": 10, "output": 10, **bad})  # type: ignore[arg-type]


def test_money_and_energy() -> None:
    assert cost_per_million(3.6, 2, 1000.0) == pytest.approx(2.0)
    assert joules_per_token(700.0, 2, 1400.0) == pytest.approx(1.0)


def test_the_command_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # a terminal breaks lines that are too long for it; nothing is cut
    target = tmp_path / "plan.json"
    words = "plan tinyllama-1.1b --serve --cluster 2xh200 --rate 20 --prompt 200 --output 20 --price 3 --power 700"
    assert main([*words.split(), "--goal", "ttft=1,itl=0.1", "--json", str(target)]) == 0
    shown = capsys.readouterr().out
    for piece in ("KV/token", "Little", "Why", "million output tokens", " J at 700 W"):
        assert piece in " ".join(shown.split())
    assert "…" not in shown
    batch = re.search(r"batches of up to ([\d,]+) per replica", " ".join(shown.split()))
    assert batch is not None  # the loads are of this batch, not of the smaller one that the rate needs
    found = json.loads(target.read_text())
    assert int(batch[1].replace(",", "")) > found["batch"]
    assert found["kv_bytes_per_token"] * found["tp"] == 22_528
    assert len(found["loads"]) >= 4
    for load in found["loads"]:
        assert load["ttft_p50"] > 0
        # A history that begins and ends empty has fewer inside on average than the rate's law says, never more; many
        # fewer where all of its few hundred requests come within the time that one takes.
        assert load["inside"] < 1.6 * load["little"]
        if load["share"] <= 0.25:
            assert load["inside"] > 0.5 * load["little"]
    assert found["cost_per_million_tokens"] > 0


def test_what_is_printed_fits_100_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["plan", "llama-3-8b", "--serve", "--cluster", "16xa100", "--rate", "200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 100] == []
    heading = next(line for line in lines if "KV/token" in line)
    assert heading.split()[-4:] == ["tok/s", "req/s", "limit", "serves"]  # not cut, not broken


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("plan tiny --rate 3", "--serve"),
        ("plan tiny --serve", "cluster"),
        ("plan tiny --serve --cluster 1xh200 --rate -1", "--rate"),
        ("plan tiny --serve --cluster 1xh200 --batch 3", "about training"),
        ("plan tiny --serve --cluster 1xh200 --prompt 9 --output 9 --dtype fp8", "dtype"),
        ("plan tiny --serve --cluster 1xh200 --prompt 500", "context"),
        ("plan tiny --serve --cluster 1xh200 --price 0", "--price"),
        ("plan tiny --serve --cluster 1xh200 --goal x=1", "goal"),
    ],
)
def test_wrong_use_is_one_line(words: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert said.count("\n") == 1
