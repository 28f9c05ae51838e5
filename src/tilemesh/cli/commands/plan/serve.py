"""Plan for serving: memory, layouts, and latency against load. By simulating the real scheduler."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tilemesh
from tilemesh.cli.commands.plan.train import ModelOnCluster, load_model, named_cluster
from tilemesh.core.errors import UsageError
from tilemesh.core.files import write_output
from tilemesh.core.options import OutFile, option
from tilemesh.core.ranges import Range
from tilemesh.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from tilemesh.plan.serving import ServeDemand, ServeLayout
    from tilemesh.serve.planned import SimulatedLoad

_Above = Annotated[float, Range(0, 1e9, above=True, below=True)]


@dataclass(frozen=True, kw_only=True)
class ServePlanOptions(ModelOnCluster):
    rate: float = option(1.0, "Requests per second.", "N")
    prompt: int = option(512, "Prompt tokens.", "N")
    output: int = option(128, "Output tokens.", "N")
    goal: str | None = option(None, "What is promised, in seconds.", "ttft=1,itl=0.05")
    dtype: str | None = option(None, "bf16, fp32. [default: bf16, on a CPU fp32]")
    step_tokens: int = option(512, "Most tokens in a step.", "N")
    price: _Above | None = option(None, "A device's price per hour.", "N")
    power: _Above | None = option(None, "A device's power.", "W")
    json: OutFile | None = option(None, "Every figure by name; - for stdout.", "FILE")


def serve(options: ServePlanOptions) -> None:
    from tilemesh.cli.layouts import plan_console, print_whole
    from tilemesh.model.work.weights import count_parameters
    from tilemesh.plan.serving import PAGE_TOKENS, ServeDemand, serve_layouts, serving_reasons
    from tilemesh.serve.figures import ServeGoal
    from tilemesh.serve.planned import load_shares, simulate_share

    console = plan_console(stderr=options.json == "-")
    if options.model is None or options.cluster is None:
        raise UsageError("serving needs a model and a cluster: tilemesh plan serve llama-3-8b --cluster 1xh200")
    goal = ServeGoal.parse(options.goal)
    model = load_model(options.model, options.sets)
    cluster, rates = named_cluster(options.cluster, options.gpu)
    dtype = options.dtype or ("bf16" if cluster.device.kind == "gpu" else "fp32")
    demand = ServeDemand(options.rate, options.prompt, options.output, goal.between_tokens_s)
    layouts, refused = serve_layouts(model, cluster, demand, dtype, rates, options.headroom_share, options.step_tokens)
    best = layouts[0]
    loads = [
        simulate_share(best, demand, options.step_tokens, share, goal) for share in load_shares(best, options.rate)
    ]
    if options.json is not None:  # before the text, which a reader may not take whole
        write_output(jsonlib.dumps(_object(options, dtype, cluster.name, layouts, loads)) + "\n", options.json)
    console.print(
        f"{options.model}: {count_parameters(model).total:,} parameters in {dtype} on {cluster.name}; {options.rate:g} "
        f"requests/s of {options.prompt:,} prompt and {options.output:,} output tokens"
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
    for line in [*serving_reasons(layouts, refused, demand), *_money(options, best, cluster.world, loads)]:
        console.print(f"  - {line}")


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
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _money(options: ServePlanOptions, best: ServeLayout, devices: int, loads: Sequence[SimulatedLoad]) -> list[str]:
    """At the rate asked for, where it is served; else at the most."""
    from tilemesh.plan.serving import cost_per_million, joules_per_token

    tokens = min(options.rate, best.most_requests_per_s) * options.output
    lines = []
    if options.price is not None:
        full = cost_per_million(options.price, devices, best.tokens_per_s)
        now = cost_per_million(options.price, devices, tokens)
        lines.append(
            f"A million output tokens cost {now:.3g} at this rate and {full:.3g}"
            f" at most load, at {options.price:g} per device and hour"
        )
    if options.power is not None:
        lines.append(
            f"An output token takes {joules_per_token(options.power, devices, tokens):.3g} J at {options.power:g} W"
        )
    return lines


def _object(
    options: ServePlanOptions, dtype: str, cluster: str, layouts: Sequence[ServeLayout], loads: Sequence[SimulatedLoad]
) -> dict[str, Any]:
    from tilemesh.plan.serving import PAGE_TOKENS, cost_per_million, joules_per_token

    best = layouts[0]
    tokens = min(options.rate, best.most_requests_per_s) * options.output
    world = best.tp * best.replicas
    return {
        "model": options.model, "cluster": cluster, "dtype": dtype, "rate": options.rate, "prompt": options.prompt,
        "output": options.output, "tp": best.tp, "replicas": best.replicas, "batch": best.running,
        "kv_bytes_per_token": best.token_bytes, "weight_bytes": best.weight_bytes, "pages": best.pages,
        "page_tokens": PAGE_TOKENS, "largest_batch": best.fits, "serves_the_rate": best.needed is not None,
        "most_requests_per_s": best.most_requests_per_s,
        "cost_per_million_tokens": None if options.price is None else cost_per_million(options.price, world, tokens),
        "joules_per_token": None if options.power is None else joules_per_token(options.power, world, tokens),
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
