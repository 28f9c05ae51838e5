"""What `tilemesh plan --serve` does: memory, the layouts, and latency against load by simulating the real scheduler."""

from __future__ import annotations

import json as jsonlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import tilemesh
from tilemesh.cli.plan_run import load_model, named_cluster, print_whole
from tilemesh.cli.targets import check_targets
from tilemesh.core.errors import UsageError
from tilemesh.core.files import write_output
from tilemesh.core.units import format_bytes, format_seconds, parse_fraction
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.constants import HEADROOM
from tilemesh.plan.serving import (
    PAGE_TOKENS,
    ServeDemand,
    ServeLayout,
    cost_per_million,
    joules_per_token,
    serve_layouts,
    serving_reasons,
)
from tilemesh.serve.figures import LoadFigures, ServeGoal, load_figures
from tilemesh.serve.history import RequestRecord
from tilemesh.serve.scheduler import ServeLimits
from tilemesh.serve.simulate import fresh_requests, poisson_arrivals, simulate_with

LOADS = (0.25, 0.5, 0.8, 1.0)
"""Of what the chosen layout serves at most."""
_FEWEST = 250
"""Requests that a load is judged by, at least: as many as are inside at once, where these are more."""
_UNCOUNTED_SHARE = 0.3
"""Of these, those that come before and are not counted: near its limit an engine takes long to have its usual queue."""
_WIDTH = 100
"""Of tables and sentences where nobody says how wide the terminal is."""


@dataclass(frozen=True)
class ServePlanQuestion:
    """What the command line said, as it was said."""

    model: str | None
    cluster: str | None
    gpu: str | None
    sets: tuple[str, ...]
    rate: float
    prompt: int
    output: int
    goal: str | None
    dtype: str | None
    step_tokens: int
    headroom: str | None
    price: float | None
    power: float | None
    json: str | None


@dataclass(frozen=True)
class SimulatedLoad:
    """One replica under a share of the rate."""

    rate: float
    """Of all replicas together."""
    share: float
    """Of what they can serve."""
    figures: LoadFigures
    little: float
    """Rate x time inside: what the requests inside must come to in a steady state."""


def refuse(given: Sequence[str]) -> None:
    """What is about training."""
    if given:
        raise UsageError(f"{given[0]} is about training: leave it out with --serve")


def run(asked: ServePlanQuestion) -> None:
    console = Console(stderr=asked.json == "-", highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(stderr=asked.json == "-", highlight=False, markup=False, width=_WIDTH)
    check_targets(json=asked.json)
    if asked.model is None or asked.cluster is None:
        raise UsageError("--serve needs a model and a cluster: tilemesh plan llama-3-8b --serve --cluster 1xh200")
    for name in ("price", "power"):
        value = getattr(asked, name)
        if value is not None and not 0 < value < 1e9:
            raise UsageError(f"--{name} is {value}: expected a number above 0")
    goal = ServeGoal.parse(asked.goal)
    model = load_model(asked.model, asked.sets)
    cluster, rates = named_cluster(asked.cluster, asked.gpu)
    dtype = asked.dtype or ("bf16" if cluster.device.kind == "gpu" else "fp32")
    demand = ServeDemand(asked.rate, asked.prompt, asked.output, goal.between_tokens_s)
    headroom = HEADROOM if asked.headroom is None else parse_fraction(asked.headroom)
    layouts, refused = serve_layouts(model, cluster, demand, dtype, rates, headroom, asked.step_tokens)
    best = layouts[0]
    loads = [_simulated(best, asked, share, goal) for share in _shares(best, asked.rate)]
    if asked.json is not None:  # before the text, which a reader may not take whole
        write_output(jsonlib.dumps(_object(asked, dtype, cluster.name, layouts, loads)) + "\n", asked.json)
    console.print(
        f"{asked.model}: {count_parameters(model).total:,} parameters in {dtype} on {cluster.name}; {asked.rate:g} "
        f"requests/s of {asked.prompt:,} prompt and {asked.output:,} output tokens"
    )
    console.print(
        f"Keys and values: {format_bytes(best.token_bytes)} per token, {format_bytes(best.token_bytes * PAGE_TOKENS)} "
        f"per page of {PAGE_TOKENS}; weights {format_bytes(best.weight_bytes)}; {best.pages:,} pages fit on each "
        f"device, enough for {best.fits:,} such requests"
    )
    print_whole(console, _layout_table(layouts, demand))
    console.print("first: to the first token; limit: what of a step the hardware needs; serves: the rate asked for")
    console.print(
        f"tp {best.tp}, batches of up to {best.largest.batch:,} per replica, the most that fit and keep the goal, "
        f"simulated with the engine's scheduler once it has filled; a load is a share of what these serve:"
    )
    print_whole(console, _load_table(loads))
    console.print("Why")
    for line in [*serving_reasons(layouts, refused, demand), *_money(asked, best, cluster.world, loads)]:
        console.print(f"  - {line}")


def _shares(best: ServeLayout, rate: float) -> list[float]:
    """Loads to simulate: some shares of what the layout serves, and the rate asked for where it serves that."""
    wanted = rate / best.most_requests_per_s
    return sorted({*LOADS, *([round(wanted, 4)] if wanted < 1.2 else [])})


def _simulated(best: ServeLayout, asked: ServePlanQuestion, share: float, goal: ServeGoal) -> SimulatedLoad:
    state = best.largest
    rate = share * state.requests_per_s  # of one replica
    # Those inside at once when the engine has filled; until then, and when no more come, tokens are too quick.
    inside = min(state.batch, math.ceil(rate * (state.first_token_s + asked.output * state.step_s)))
    measured, after = max(_FEWEST, inside), inside // 2
    before = max(3 * inside // 2, round(_UNCOUNTED_SHARE * measured))
    count = before + measured + after
    limits = ServeLimits(
        pages=best.pages,
        context=best.clock.model.context,
        page_tokens=PAGE_TOKENS,
        step_tokens=asked.step_tokens,
        chunk_tokens=asked.step_tokens,
        running=state.batch,
        waiting=1 << 20,
        share_prefixes=False,
    )
    drawn = poisson_arrivals(rate, count)
    # Hundreds of drawn gaps are 5 % longer or shorter than the rate says: those that count are made to fit it.
    exactly = measured / rate * 1e9 / (drawn[before + measured - 1] - drawn[before - 1])
    arrivals = [round(at_ns * exactly) for at_ns in drawn]
    requests = fresh_requests(arrivals, [asked.prompt] * count, [asked.output] * count)
    history = simulate_with(best.clock, limits, requests)
    everyone = list(history.requests.values())
    records = everyone[before : before + measured]
    whole = sum(record.whole_s or 0.0 for record in records) / len(records)
    figures = _between(load_figures(records, goal), everyone, records[0].asked_ns, records[-1].asked_ns)
    return SimulatedLoad(rate * best.replicas, share, figures, rate * whole)


def _between(figures: LoadFigures, everyone: Sequence[RequestRecord], begin_ns: int, end_ns: int) -> LoadFigures:
    """With rates, and with the requests inside, of all that went on between two moments."""
    seconds = (end_ns - begin_ns) * 1e-9
    spans = ((max(begin_ns, record.asked_ns), min(end_ns, record.token_ns[-1])) for record in everyone)
    tokens = sum(begin_ns < at_ns <= end_ns for record in everyone for at_ns in record.token_ns)
    ended = sum(begin_ns < record.token_ns[-1] <= end_ns for record in everyone)
    return replace(
        figures,
        seconds=seconds,
        output_tokens=tokens,
        tokens_per_s=tokens / seconds,
        requests_per_s=ended / seconds,
        inside=sum(max(0, end - begin) for begin, end in spans) * 1e-9 / seconds,
    )


def _layout_table(layouts: Sequence[ServeLayout], demand: ServeDemand) -> Table:
    table = _table("tp", "replicas", "weights", "KV/token", "pages", "fits", "batch", "ms/token", "first",
                   "tok/s", "req/s", "limit", "serves")  # fmt: skip
    for layout in layouts:
        state = layout.needed or layout.largest
        table.add_row(
            str(layout.tp), str(layout.replicas), format_bytes(layout.weight_bytes), format_bytes(layout.token_bytes),
            f"{layout.pages:,}", f"{layout.fits:,}", str(state.batch), f"{state.step_s * 1e3:.2f}",
            format_seconds(state.first_token_s), f"{state.tokens_per_s * layout.replicas:,.0f}",
            f"{state.requests_per_s * layout.replicas:.2f}", f"{state.limit_s / state.step_s:.0%}",
            "yes" if layout.needed is not None else "no",
        )  # fmt: skip
    return table


def _load_table(loads: Sequence[SimulatedLoad]) -> Table:
    table = _table(
        "load",
        "requests/s",
        "first token p50",
        "p99",
        "ms/token p50",
        "p99",
        "tokens/s",
        "inside",
        "Little",
        "goal kept",
    )
    for load in loads:
        figures = load.figures
        table.add_row(
            f"{load.share:.0%}", f"{load.rate:.2f}", format_seconds(figures.ttft_p50), format_seconds(figures.ttft_p99),
            f"{figures.itl_p50 * 1e3:.2f}", f"{figures.itl_p99 * 1e3:.2f}", f"{figures.tokens_per_s:,.0f}",
            f"{figures.inside:.1f}", f"{load.little:.1f}", f"{figures.goodput:.0%}",
        )  # fmt: skip
    return table


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _money(asked: ServePlanQuestion, best: ServeLayout, devices: int, loads: Sequence[SimulatedLoad]) -> list[str]:
    """At the rate asked for, where it is served; else at the most."""
    tokens = min(asked.rate, best.most_requests_per_s) * asked.output
    lines = []
    if asked.price is not None:
        full = cost_per_million(asked.price, devices, best.tokens_per_s)
        now = cost_per_million(asked.price, devices, tokens)
        lines.append(
            f"A million output tokens cost {now:.3g} at this rate and {full:.3g}"
            f" at most load, at {asked.price:g} per device and hour"
        )
    if asked.power is not None:
        lines.append(
            f"An output token takes {joules_per_token(asked.power, devices, tokens):.3g} J at {asked.power:g} W"
        )
    return lines


def _object(
    asked: ServePlanQuestion, dtype: str, cluster: str, layouts: Sequence[ServeLayout], loads: Sequence[SimulatedLoad]
) -> dict[str, Any]:
    best = layouts[0]
    tokens = min(asked.rate, best.most_requests_per_s) * asked.output
    world = best.tp * best.replicas
    return {
        "model": asked.model, "cluster": cluster, "dtype": dtype, "rate": asked.rate, "prompt": asked.prompt,
        "output": asked.output, "tp": best.tp, "replicas": best.replicas, "batch": best.running,
        "kv_bytes_per_token": best.token_bytes, "weight_bytes": best.weight_bytes, "pages": best.pages,
        "page_tokens": PAGE_TOKENS, "largest_batch": best.fits, "serves_the_rate": best.needed is not None,
        "most_requests_per_s": best.most_requests_per_s,
        "cost_per_million_tokens": None if asked.price is None else cost_per_million(asked.price, world, tokens),
        "joules_per_token": None if asked.power is None else joules_per_token(asked.power, world, tokens),
        "layouts": [
            {
                "tp": layout.tp, "replicas": layout.replicas, "pages": layout.pages, "fits": layout.fits,
                "batch": layout.running,
                "step_s": (layout.needed or layout.largest).step_s, "requests_per_s": layout.most_requests_per_s,
                "serves": layout.needed is not None,
            }
            for layout in layouts
        ],
        "loads": [
            {"rate": load.rate, "share": load.share, "little": load.little, **load.figures.to_dict()} for load in loads
        ],
        "version": tilemesh.__version__,
    }  # fmt: skip
