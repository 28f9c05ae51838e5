"""Planning for serving: memory by hand, Little's law, choices, and the command."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tilemesh.cli.commands.plan import serve as serve_plan
from tilemesh.cli.main import main
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.model.config import preset
from tilemesh.model.work.decoding import SequencePart, least_cost, pass_exchanges, serving_task, weight_bytes
from tilemesh.model.work.routing import busiest_rows
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
from tilemesh.serve import planned
from tilemesh.serve.scheduler import ServeLimits
from tilemesh.serve.simulate import fresh_requests, simulate_with

DEMAND = ServeDemand(rate=5.0, prompt=1000, output=300)


def test_memory_of_an_8b_model_on_an_h200() -> None:
    (layout,), refused = serve_layouts(preset("llama-3-8b"), parse_cluster("1xh200"), DEMAND)
    assert refused == []
    assert layout.token_bytes == 131_072
    assert layout.weight_bytes == 2 * 8_030_261_248
    # 139.8 GiB seen by a program, 5 % left free, 1.5 GiB of a process's own, 15 GiB of weights, and of a step's 512
    # tokens twice the MLP's width and eight times the model's; pages of 2 MiB.
    activations = 512 * (2 * 14336 + 8 * 4096) * 2
    room = 143156 * 2**20 * 0.95 - 3 * 2**29 - layout.weight_bytes - activations
    assert layout.pages == int(room // 2**21)
    assert layout.fits == layout.pages // -(-1300 // PAGE_TOKENS)


def test_the_batch_for_a_rate_is_littles_law() -> None:
    (layout,), _ = serve_layouts(preset("llama-3-8b"), parse_cluster("1xh200"), DEMAND)
    assert layout.needed is not None
    state = layout.needed
    chunks = DEMAND.prompt / min(512, DEMAND.prompt)  # a place each, for a step
    assert state.batch == pytest.approx(state.requests_per_s * (DEMAND.output + chunks) * state.step_s)
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
    with pytest.raises(UsageError, match=r"the context is .*; set --prompt or --output lower"):
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
    demand = ServeDemand(0.1, 1000, 300, between_tokens_s=1e-5)
    layouts, refused = serve_layouts(model, cluster, demand)
    assert layouts[0].needed is None
    assert layouts[0].largest.batch == 1
    assert serving_reasons(layouts, refused, demand)[0].startswith("No layout serves a token every 0.01 ms: this one")
    for bad in ({"rate": 0.0}, {"prompt": 0}, {"output": -1}):
        with pytest.raises(UsageError, match="expected above 0 and at most"):
            ServeDemand(**{"rate": 1.0, "prompt": 10, "output": 10, **bad})  # type: ignore[arg-type]


def test_a_prompt_comes_in_chunks_of_what_a_step_has_room_for() -> None:
    """Beside 341 tokens that decode a step of 512 has room for 171 of a prompt of 400: three chunks."""
    clock = StepClock(preset("tinyllama-1.1b"), parse_cluster("1xh200"))
    state = steady_state(clock, ServeDemand(1.0, 400, 800), 512)
    chunk, tokens = SequencePart(171, 200, 1), [SequencePart(1, 800, 1)] * 341
    assert state.first_token_s == pytest.approx(3 * clock([*tokens, chunk]))


def test_loads_come_as_often_as_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Below what can be served, as many tokens leave as the rate asks for; the drawn gaps had been 12 % too long."""
    asked = ["plan", "llama-3-8b", "--serve", "--cluster", "1xh100", "--prompt", "500", "--output", "64", "--rate", "2"]
    assert main([*asked, "--json", "-"]) == 0
    loads = json.loads(capsys.readouterr().out)["loads"]
    for load in loads:
        if load["share"] < 0.9:
            assert load["requests_per_s"] == pytest.approx(load["rate"], rel=0.03)


def test_lengths_that_nobody_says_fit_the_context() -> None:
    for context, prompt, output, lengths in (
        (128, None, None, (96, 32)), (1024, None, None, (512, 128)), (1024, 1000, None, (1000, 24)),
        (1024, None, 1000, (24, 1000)), (16, 99, 99, (99, 99)),
    ):  # fmt: skip
        assert serve_plan._lengths(serve_plan.ServePlanOptions(prompt=prompt, output=output), context) == lengths


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
    assert main(["plan", "llama-3-8b", "--serve", "--cluster", "8xa100", "--rate", "100", "--step-tokens", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 100 and not line.startswith("next: ")] == []
    heading = next(line for line in lines if "KV/token" in line)
    assert heading.split()[-4:] == ["tok/s", "req/s", "limit", "serves"]  # not cut, not broken


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("plan tiny --rate 3", "--rate is an option of tilemesh plan serve, not of tilemesh plan train"),
        ("plan tiny --serve", "cluster"),
        ("plan tiny --serve --cluster 1xh200 --rate -1", "--rate"),
        ("plan tiny --serve --cluster 1xh200 --batch 3", "--batch is an option of tilemesh plan train"),
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


def test_a_cpu_that_widens_bfloat16_reads_half_and_computes_as_much() -> None:
    clocks = {dtype: StepClock(preset("tinyllama-1.1b"), parse_cluster("1xcpu"), dtype) for dtype in ("fp32", "bf16")}
    one, many = [SequencePart(1, 500, 1)], [SequencePart(512, 512, 1)]
    # One token reads weights, of which half the bytes are half the time; a prompt computes.
    assert clocks["bf16"].limit(one) == pytest.approx(clocks["fp32"].limit(one) / 2)
    assert clocks["bf16"].limit(many) == clocks["fp32"].limit(many)
    assert clocks["bf16"].seconds(one).dense == pytest.approx(clocks["fp32"].seconds(one).dense / 2, rel=0.05)


@pytest.mark.parametrize(
    ("model", "cluster", "tp", "prompt", "output", "batch", "step_tokens"),
    [
        ("llama-3-8b", "8xh100", 8, 4000, 16, 32, 512),
        ("llama-3-8b", "8xh100", 4, 4000, 16, 32, 512),
        ("llama-3-8b", "1xh100", 1, 1000, 50, 24, 128),
        ("llama-3-8b", "1xh200", 1, 64, 64, 32, 32),
        ("llama-3-8b", "1xh100", 1, 100, 20, 16, 512),
        ("tiny", "1xcpu", 1, 32, 16, 24, 64),
    ],
)
def test_what_is_claimed_is_what_the_scheduler_does_when_it_is_never_idle(
    model: str, cluster: str, tp: int, prompt: int, output: int, batch: int, step_tokens: int
) -> None:
    clock = StepClock(preset(model), parse_cluster(cluster), "fp32" if "cpu" in cluster else "bf16", tp)
    claimed = steady_state(clock, ServeDemand(1.0, prompt, output), batch, step_tokens).requests_per_s
    limits = ServeLimits(
        pages=1 << 20, context=8192, page_tokens=PAGE_TOKENS, step_tokens=step_tokens, chunk_tokens=step_tokens,
        running=batch, waiting=1 << 20, share_prefixes=False,
    )  # fmt: skip
    count = 12 * batch
    draws = random.Random(0)  # equal answers would end together, and their successors' prompts come together
    outputs = [draws.randint(output // 2, output + output // 2) for _ in range(count)]
    history = simulate_with(clock, limits, fresh_requests([0] * count, [prompt] * count, outputs))
    ends = sorted(record.token_ns[-1] for record in history.requests.values())
    # Past the beginning, where all prompts are computed at once, and before the end, where none are.
    first, last = count // 3, 5 * count // 6
    assert claimed == pytest.approx((last - first) / (ends[last] - ends[first]) * 1e9, rel=0.1)


def test_a_rate_far_below_what_a_layout_serves_is_simulated() -> None:
    """Its share of that was rounded to 0, and no request ever came."""
    assert main(["plan", "serve", "tiny", "--cluster", "1xh100", "--prompt", "8", "--output", "4"]) == 0


def test_a_simulation_has_no_more_pages_than_its_batch_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small model on a large device millions fit, and making them took a minute and gigabytes."""
    seen: list[ServeLimits] = []

    def simulated(clock: StepClock, limits: ServeLimits, requests: Any) -> Any:
        seen.append(limits)
        return simulate_with(clock, limits, requests)

    monkeypatch.setattr(planned, "simulate_with", simulated)
    assert main(["plan", "serve", "tiny", "--cluster", "1xh100", "--prompt", "8", "--output", "4"]) == 0
    assert {limits.pages for limits in seen} == {2 * limits.running for limits in seen}  # a page, and one to grow into


def test_a_batch_is_no_larger_than_a_step(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    asked = ["--serve", "--cluster", "8xh100", "--prompt", "64", "--output", "16", "--rate", "10"]
    assert main(["plan", "llama-3-8b", *asked, "--step-tokens", "32", "--json", str(target)]) == 0
    plan = json.loads(target.read_text())
    assert all(layout["batch"] <= 32 for layout in plan["layouts"])


@pytest.mark.slow
def test_a_load_is_judged_when_the_engine_has_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times the requests give about the same time per token, and those inside are what Little's law says."""
    figures = []
    for fewest in (planned._FEWEST, 5 * planned._FEWEST):
        monkeypatch.setattr(planned, "_FEWEST", fewest)
        target = tmp_path / f"{fewest}.json"
        asked = ["--serve", "--cluster", "1xh100", "--prompt", "256", "--output", "64", "--rate", "1"]
        assert main(["plan", "llama-3-8b", *asked, "--step-tokens", "256", "--json", str(target)]) == 0
        figures.append({load["share"]: load for load in json.loads(target.read_text())["loads"]})
    for share in planned.LOADS[:-1]:
        few, many = (loads[share] for loads in figures)
        assert few["itl_p50"] == pytest.approx(many["itl_p50"], rel=0.25)
        assert few["inside"] == pytest.approx(few["little"], rel=0.2)


def test_replicas_that_share_out_experts_hold_and_read_a_part_of_them() -> None:
    """Mixtral's weights by hand; two devices of 80 GB have room for it with ep or tp alone."""
    model = preset("mixtral-8x7b")
    experts = 2 * 32 * 8 * 3 * 4096 * 14336
    assert weight_bytes(model, 2) - weight_bytes(model, 2, ep=4) == experts * 3 // 4
    layouts, refused = serve_layouts(model, parse_cluster("2xh100"), DEMAND)
    assert {(layout.tp, layout.ep, layout.replicas) for layout in layouts} == {(1, 2, 2), (2, 1, 1)}
    assert [words.partition(":")[0] for words in refused] == ["tp 1"]
    spread = next(layout for layout in layouts if layout.ep == 2)
    assert "tp 1, ep 2" in " ".join([spread.words, *serving_reasons(layouts, refused, DEMAND)])
    task = serving_task(32, "bf16", ep=2)
    exchanges = pass_exchanges(model, task, 32)
    assert {(part.axis, part.collective) for part in exchanges} == {("ep", "all_to_all")}
    assert [part.nbytes for part in exchanges[1:3]] == [2 * busiest_rows(model, task) * 4096] * 2
    parts = [SequencePart(1, 100, 1)] * 32
    alone, shared = (least_cost(model, parts, serving_task(32, "bf16", ep=ep)).bytes_moved for ep in (1, 2))
    assert alone - shared == pytest.approx(experts / 2, rel=0.01)  # 32 tokens already touch all of them
    dense, _ = serve_layouts(preset("llama-3-8b"), parse_cluster("2xh100"), DEMAND)
    assert {layout.ep for layout in dense} == {1}
