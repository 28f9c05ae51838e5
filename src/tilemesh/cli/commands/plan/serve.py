"""Plan for serving: memory, layouts, and latency against load. By simulating the real scheduler."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import tilemesh
from tilemesh.cli.commands.plan.train import OUT, ModelOnCluster, Money, named_cluster, origin, plan_note
from tilemesh.cli.models import load_model
from tilemesh.cli.next_command import again
from tilemesh.cli.output import Block, Output, table_of
from tilemesh.cli.targets import check_targets
from tilemesh.core.advice import NextCommand
from tilemesh.core.errors import UsageError
from tilemesh.core.options import OutFile, OutFolder, option
from tilemesh.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tilemesh.core.hardware import Cluster
    from tilemesh.core.plan import Precision
    from tilemesh.model.config import ModelConfig
    from tilemesh.plan.serving import ServeLayout
    from tilemesh.serve.planned import SimulatedLoad


@dataclass(frozen=True, kw_only=True)
class ServePlanOptions(ModelOnCluster):
    rate: float = option(1.0, "Requests per second.", "N")
    prompt: int | None = option(None, "Prompt tokens; 512, or what the context leaves.", "N")
    output: int | None = option(None, "Output tokens; 128, or a quarter of the context.", "N")
    goal: str | None = option(None, "What is promised, in seconds.", "ttft=1,itl=0.05")
    dtype: str | None = option(None, "bf16, fp32. [default: bf16, on a CPU fp32]")
    step_tokens: int = option(512, "Most tokens in a step.", "N")
    price: Money | None = option(None, "A device's price per hour.", "N")
    power: Money | None = option(None, "A device's power.", "W")
    engine: Literal["vllm"] | None = option(None, "The layout in another engine's terms.", "NAME", flag="--for")
    out: OutFolder | None = option(None, OUT, "PLAN.toml|FOLDER")
    json: OutFile | None = option(None, "Every figure by name; - for stdout.", "FILE")


def serve(options: ServePlanOptions) -> Output:
    from tilemesh.model.work.weights import count_parameters
    from tilemesh.plan.serving import PAGE_TOKENS, ServeDemand, serve_layouts, serving_reasons
    from tilemesh.serve.figures import ServeGoal
    from tilemesh.serve.planned import load_shares, simulate_share

    if options.model is None or options.cluster is None:
        raise UsageError("serving needs a model and a cluster: tilemesh plan serve llama-3-8b --cluster 1xh200")
    if options.out is not None and options.engine is None:
        check_targets([("--out", options.out)])
    goal = ServeGoal.parse(options.goal)
    model = load_model(options.model, options.sets)
    cluster, rates = named_cluster(options.cluster, options.gpu)
    dtype = options.dtype or ("bf16" if cluster.device.kind == "gpu" else "fp32")
    prompt, output = _lengths(options, model.context)
    options = replace(options, prompt=prompt, output=output)
    demand = ServeDemand(options.rate, prompt, output, goal.between_tokens_s)
    layouts, refused = serve_layouts(model, cluster, demand, dtype, rates, options.headroom_share, options.step_tokens)
    best = layouts[0]
    shares = load_shares(best, options.rate)
    loads = [simulate_share(best, demand, options.step_tokens, share, goal) for share in shares]
    text: list[Block] = [
        f"{options.model}: {count_parameters(model).total:,} parameters in {dtype} on {cluster.name}; {options.rate:g} "
        f"requests/s of {demand.prompt:,} prompt and {demand.output:,} output tokens",
        f"Keys and values: {format_bytes(best.token_bytes)} per token, {format_bytes(best.token_bytes * PAGE_TOKENS)} "
        f"per page of {PAGE_TOKENS}; weights {format_bytes(best.weight_bytes)}; {best.pages:,} pages fit on each "
        f"device, enough for {best.fits:,} such requests",
        table_of([_layout_line(layout) for layout in layouts]),
        "first: to the first token; limit: what of a step the hardware needs; serves: the rate asked for",
        f"{best.words}, batches of up to {best.largest.batch:,} per replica, the most that fit and keep the goal, "
        f"simulated with the engine's scheduler once it has filled; a load is a share of what these serve:",
        table_of([_load_line(load) for load in loads]),
        "Why",
        *(
            f"  - {line}"
            for line in [*serving_reasons(layouts, refused, demand), *_money(options, best, cluster.world)]
        ),
    ]
    if options.engine:  # how it shares out experts is not known here
        alone = next((layout for layout in layouts if layout.ep == 1), best)
        text += _for_vllm(options, model, cluster, dtype, alone, prompt + output)
    is_plan = options.out is not None and options.engine is None
    files = {"out": lambda: _plan_file(options, model, cluster, dtype, best)} if is_plan else {}
    return Output(
        text, [_object(options, dtype, cluster.name, layouts, loads)], files,
        next=None if options.engine else _after(options, cluster, best, dtype),
    )  # fmt: skip


def _lengths(options: ServePlanOptions, context: int) -> tuple[int, int]:
    """Tokens of a prompt and of an answer; what nobody says fits the context."""
    prompt, output = options.prompt, options.output
    if output is None:
        output = max(1, min(128, context // 4 if prompt is None else context - prompt))
    return max(1, min(512, context - output)) if prompt is None else prompt, output


def _after(options: ServePlanOptions, cluster: Cluster, best: ServeLayout, dtype: str) -> NextCommand:
    """Of weights that are here, to serve them; of a preset, to time random ones; of another shape, to train some."""
    from tilemesh.model.config import PRESETS

    if options.out is None:
        return again("--out plan.toml")
    model, sizes = Path(str(options.model)), {"dp": best.replicas, "tp": best.tp, "ep": best.ep}
    if str(model) in PRESETS:
        mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        words = f"bench serve {model} --rates {options.rate:g} --prompt {options.prompt} --output {options.output}"
        words += f" --dtype {dtype} --device {_device(cluster)}" + f" --mesh {mesh}" * bool(mesh)
    elif model.suffix == ".toml":
        return NextCommand(f"train {shlex.quote(str(model))}")
    else:
        folder = model if model.is_dir() else model.parent
        words = f"serve {shlex.quote(str(folder))} --plan {shlex.quote(options.out)}"
    return NextCommand(words, f"{best.most_requests_per_s:.4g} requests/s at most")


def _device(cluster: Cluster) -> str:
    return "cuda" if cluster.device.kind == "gpu" else "cpu"


def _plan_file(options: ServePlanOptions, model: ModelConfig, cluster: Cluster, dtype: str, best: ServeLayout) -> str:
    """What `tilemesh serve --plan` reads."""
    from tilemesh.core.config import to_dict
    from tilemesh.core.plan_file import SERVE, plan_text

    running = best.largest.batch
    engine = {
        "dtype": dtype, "device": _device(cluster), "running": running,
        "step_tokens": max(options.step_tokens, running),
    }  # fmt: skip
    demand = {"rate": options.rate, "prompt": options.prompt, "output": options.output}
    note = plan_note(f"at most {best.most_requests_per_s:.4g} requests/s, {best.largest.step_s:.4g} s per token then")
    layout = {"dp": best.replicas, "tp": best.tp} | ({"ep": best.ep} if best.ep > 1 else {})
    return plan_text(SERVE, note, layout, serve=engine, demand=demand, model=to_dict(model))


def _for_vllm(
    options: ServePlanOptions, model: ModelConfig, cluster: Cluster, dtype: str, best: ServeLayout, length: int
) -> list[Block]:
    from tilemesh.cli.engines import written_for
    from tilemesh.core.plan import ParallelPlan
    from tilemesh.plan.engines.engine import EngineJob
    from tilemesh.plan.engines.tables import VLLM

    if dtype not in ("bf16", "fp16", "fp32"):
        raise UsageError(f"--for vllm with --dtype {dtype}: expected bf16, fp16 or fp32")
    plan = ParallelPlan(dp=best.replicas, tp=best.tp, ep=best.ep, precision=cast("Precision", dtype))
    job = EngineJob(
        model, plan, cluster, length, str(options.model), running=best.largest.batch, step_tokens=options.step_tokens
    )
    for refusal in VLLM.why_not(job):
        raise UsageError(f"vllm cannot run tp {best.tp}: {refusal.why}; plan for one node")
    return written_for(VLLM, job, options.out, origin()["command"])


def _layout_line(layout: ServeLayout) -> dict[str, str]:
    has_experts = layout.clock.model.experts > 0
    state = layout.needed or layout.largest
    return {
        "tp": str(layout.tp), **({"ep": str(layout.ep)} if has_experts else {}),
        "replicas": str(layout.replicas), "weights": format_bytes(layout.weight_bytes),
        "KV/token": format_bytes(layout.token_bytes), "pages": f"{layout.pages:,}", "fits": f"{layout.fits:,}",
        "batch": str(state.batch), "ms/token": f"{state.step_s * 1e3:.2f}",
        "first": format_seconds(state.first_token_s), "tok/s": f"{state.tokens_per_s * layout.replicas:,.0f}",
        "req/s": f"{state.requests_per_s * layout.replicas:.2f}", "limit": f"{state.limit_s / state.step_s:.0%}",
        "serves": "no" if layout.needed is None else "yes",
    }  # fmt: skip


def _load_line(load: SimulatedLoad) -> dict[str, str]:
    figures = load.figures
    return {
        "load": f"{load.share:.0%}", "requests/s": f"{load.rate:.2f}",
        "first token p50": format_seconds(figures.ttft_p50), "p99": format_seconds(figures.ttft_p99),
        "ms/token p50": f"{figures.itl_p50 * 1e3:.2f}", "p99 ": f"{figures.itl_p99 * 1e3:.2f}",
        "tokens/s": f"{figures.tokens_per_s:,.0f}", "inside": f"{figures.inside:.1f}", "Little": f"{load.little:.1f}",
        "goal kept": f"{figures.goodput:.0%}",
    }  # fmt: skip


def _served_tokens_per_s(options: ServePlanOptions, best: ServeLayout) -> float:
    """At the rate asked for, where it is served; else at the most."""
    return min(options.rate, best.most_requests_per_s) * (options.output or 0)


def _money(options: ServePlanOptions, best: ServeLayout, devices: int) -> Iterator[str]:
    from tilemesh.plan.serving import cost_per_million, joules_per_token

    tokens = _served_tokens_per_s(options, best)
    if options.price is not None:
        now, full = (cost_per_million(options.price, devices, rate) for rate in (tokens, best.tokens_per_s))
        yield (
            f"A million output tokens cost {now:.3g} at this rate and {full:.3g}"
            f" at most load, at {options.price:g} per device and hour"
        )
    if options.power is not None:
        joules = joules_per_token(options.power, devices, tokens)
        yield f"An output token takes {joules:.3g} J at {options.power:g} W"


def _object(
    options: ServePlanOptions, dtype: str, cluster: str, layouts: Sequence[ServeLayout], loads: Sequence[SimulatedLoad]
) -> dict[str, Any]:
    from tilemesh.plan.serving import PAGE_TOKENS, cost_per_million, joules_per_token

    best = layouts[0]
    tokens = _served_tokens_per_s(options, best)
    world = best.tp * best.replicas
    return {
        "model": options.model, "cluster": cluster, "dtype": dtype, "rate": options.rate, "prompt": options.prompt,
        "output": options.output, "tp": best.tp, "ep": best.ep, "replicas": best.replicas, "batch": best.running,
        "kv_bytes_per_token": best.token_bytes, "weight_bytes": best.weight_bytes, "pages": best.pages,
        "page_tokens": PAGE_TOKENS, "largest_batch": best.fits, "serves_the_rate": best.needed is not None,
        "most_requests_per_s": best.most_requests_per_s,
        "cost_per_million_tokens": None if options.price is None else cost_per_million(options.price, world, tokens),
        "joules_per_token": None if options.power is None else joules_per_token(options.power, world, tokens),
        "layouts": [
            {
                "tp": layout.tp, "ep": layout.ep, "replicas": layout.replicas, "pages": layout.pages,
                "fits": layout.fits, "batch": layout.running,
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
