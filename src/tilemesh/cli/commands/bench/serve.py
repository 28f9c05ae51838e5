"""Time answers to random requests beside other engines. All at once, or at random times; predicted before, with
limits.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tilemesh.cli.commands.serve import read_mesh
from tilemesh.cli.next_command import again
from tilemesh.cli.output import Block, Output, console_beside
from tilemesh.cli.planned import bench_planned, check_bench_planned
from tilemesh.core.advice import NextCommand
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.options import ROWS, Commas, Count, Known, OutFile, OutFolder, Seed, Words, argument, option
from tilemesh.core.ranges import Range

if TYPE_CHECKING:
    from tilemesh.bench.serve.load import Lengths, LoadRequest
    from tilemesh.measure.row import CaseValue
    from tilemesh.serve.engine import Engine
    from tilemesh.serve.figures import ServeGoal
    from tilemesh.serve.load import ServedModel
    from tilemesh.serve.replicas import Replicas

_MOST_TOKENS = 1 << 26  # of all requests: a benchmark that would take hours says so at once
_CPU_SECONDS = 100
_PREDICT = "fitted: to a few steps of this engine (CPU); machine: from its calibration or datasheet."
_PROMPT = "16-128"
_Tokens = Annotated[int, Range(1, _MOST_TOKENS)]


@dataclass(frozen=True, kw_only=True)
class ServeBenchOptions:
    model: str = argument("llama-27m", "A run, a Hugging Face folder, or a shape with random weights.", "MODEL")
    plan: str | None = option(None, "What `plan serve --out` wrote: its load and engine.", "PLAN.toml")
    mesh: str | None = option(None, "Processes per matrix, replicas, and how many share experts.", "tp=2,dp=2,ep=2")
    requests: Count = option(16, "How many, in each load.", "N")
    prompt: str = option(_PROMPT, "Tokens of a prompt; fewer by default where the context is short.", "N[-M]")
    output: str = option("32", "Tokens of an answer.", "N[-M]")
    rates: Annotated[tuple[float, ...], Commas(), Range(0, 1e6, above=True, below=True)] = option(
        (), "Online: requests per second, one load each.", "A,B,..."
    )
    loads: Annotated[tuple[float, ...], Commas(), Range(0, 2, above=True)] = option(
        (), "Online: rates as shares of what was served offline.", "0.5,0.8"
    )
    trace: str | None = option(None, "Online: requests of a file instead.", "FILE")
    url: str | None = option(None, "Load this OpenAI-compatible server on loopback instead.", "ADDRESS")
    goal: str | None = option(None, "What a request is promised, in seconds.", "ttft=1,itl=0.1")
    steps: Annotated[tuple[int, ...], Commas(), Range(1, 100_000)] = option(
        (), "Also a decode step of so many sequences.", "A,B,..."
    )
    step_length: _Tokens = option(1024, "Tokens of each of these.", "N")
    profile: OutFolder | None = option(None, "Then write the kernels of these steps.", "FOLDER")
    features: Annotated[Words, Known("feature", "tilemesh.bench.serve.features:FEATURES", "all")] = option(
        (), "Also with and without prefix, chunks, pages, guesses, packed, adapters, start; or all.", "A,B,..."
    )
    peers: Annotated[tuple[str, ...], Commas("none"), Known("peer", "tilemesh.bench.serve.peers:PEERS")] = option(
        (), "transformers-static, transformers-continuous, openvino-genai, ctranslate2, llama.cpp; or none.", "A,B"
    )
    blocks: Annotated[int, Range(0, 1000)] = option(3, "Offline: how many turns each gets; 0: no offline.", "N")
    running: Count = option(64, "Most requests at a time.", "N")
    step_tokens: _Tokens = option(512, "Most tokens computed in one step.", "N")
    dtype: str = option("fp32", "fp32 or bf16.")
    device: str = option("cpu", "cpu, or cuda.")
    predict: Literal["fitted", "machine"] = option("fitted", _PREDICT)
    seconds: Count | None = option(None, "About how long: a slow machine measures less; 100 on a CPU.", "S")
    seed: Seed = option(0, "Of the load and of random weights.")
    run: OutFolder | None = option(None, "Write a run with its page there.", "FOLDER")
    json: OutFile | None = option(None, ROWS, "FILE")


def serve(options: ServeBenchOptions) -> Output:
    from tilemesh.bench.harness import KeptRows
    from tilemesh.bench.serve.features import FeatureBench, feature_rows
    from tilemesh.bench.serve.load import make_load
    from tilemesh.bench.serve.record import write_serve_run
    from tilemesh.bench.serve.run import ServeBench, machine_clock, open_peers
    from tilemesh.cli.pages import write_pages
    from tilemesh.serve.engine import Engine

    options = bench_planned(options)
    goal, prompt, output = _promised(options)
    if options.loads and (not options.blocks or options.trace is not None or options.url is not None):
        raise UsageError("--loads are shares of what is served offline: leave --blocks 0, --trace and --url out")
    if options.url is not None:
        return _load_server(options, options.url)
    if (most := max(options.steps, default=0)) > options.running:
        raise UsageError(
            f"--steps {most} and --running {options.running}: no more decode together; set --running {most}"
        )
    console = console_beside(options.json)
    sizes = _sizes(options)
    served = _served(options)
    config = served.model.config
    check_bench_planned(options, config)
    if options.prompt == _PROMPT:
        most = max(1, min(128, config.context - output.most))
        options = replace(options, prompt=f"{min(16, most)}-{most}")
        prompt = _promised(options)[1]
    loads = _loads(options, options.rates, config.vocabulary)
    traced = max((len(request.prompt) + request.output for _, load in loads for request in load), default=0)
    longest = max(prompt.most + output.most, options.step_length + 64 if options.steps else 0, traced)
    if longest > config.context + 1:
        raise UsageError(
            f"a request may have {longest} tokens and the context of {options.model} is {config.context}: give "
            "--prompt, --output, --step-length or the requests of --trace fewer"
        )

    clock, why = machine_clock(config, options.dtype, options.device, sizes["tp"], sizes["dp"], sizes["ep"])
    case: dict[str, CaseValue] = {"model": options.model, "dtype": options.dtype, "prompt": str(prompt)}
    case |= {"output": str(output), "running": options.running, "prediction": options.predict}
    if options.mesh is not None:
        case["mesh"] = options.mesh
    with ExitStack() as closing:
        replicas = None
        if max(sizes.values()) == 1:
            engine = closing.enter_context(_engine(options, served, longest))
        else:
            replicas = closing.enter_context(_replicas(options, served, longest, sizes, closing))
            engine = replicas.engines[0]
        on_cpu = options.device == "cpu"
        seconds = options.seconds or (_CPU_SECONDS if on_cpu else math.inf)
        bench = ServeBench(
            engine, case, clock, why, goal, console.print, watched=on_cpu, seconds=seconds, replicas=replicas,
            on_gpus=not on_cpu,
        )  # fmt: skip
        bench.findings.rows = KeptRows(options.json)
        peers = open_peers(options.peers, engine, options.dtype, options.device, closing) if options.blocks else []
        if options.predict == "fitted" and options.device == "cpu" and not replicas and (options.blocks or loads):
            bench.fit(max([options.requests, *(len(load) for _, load in loads)]))
        if options.steps:
            plain = None if options.device == "cpu" else closing.enter_context(
                _engine(options, served, longest, launch_ahead=False)
            )  # fmt: skip
            profile = None if options.profile is None else Path(options.profile)
            bench.steps(options.steps, options.step_length, plain, profile)
        if options.blocks:
            offline = make_load(options.requests, prompt, output, config.vocabulary, seed=options.seed)
            per_s = bench.offline(offline, options.blocks, peers)
            loads = [*_loads(options, [share * per_s for share in options.loads], config.vocabulary), *loads]
        for rate, load in loads:
            span = load[-1].at_s - load[0].at_s
            bench.online(load, rate or len(load) / (span or 1.0), _lengths(load) if rate is None else {})
    if options.features:
        make = partial(Engine, device=options.device, dtype=options.dtype)
        for rows in feature_rows(FeatureBench(served, options.device, case, make), options.features):
            bench.findings.rows.add(rows)
    text: list[Block] = [bench.findings.rows]
    if options.run is not None:
        limits = engine.limits
        settings = {**case, "device": options.device, "pages": limits.pages, "page_tokens": limits.page_tokens}
        settings |= {"step_tokens": limits.step_tokens, "goal": options.goal, "seed": options.seed}
        folder = write_serve_run(options.run, settings, bench.findings, limits.page_tokens)
        text += [f"page: {page}" for page in write_pages([str(folder)], None)]
    after = again("--rates 1,4,16") if not loads else NextCommand(
        f"plan serve {options.model} --cluster local --rate {max(rate or 1.0 for rate, _ in loads):g} --out plan.toml"
    )  # fmt: skip
    return Output(text, bench.findings.rows, next=after)


def _load_server(options: ServeBenchOptions, url: str) -> Output:
    """A server that is already there: the same loads over HTTP."""
    from tilemesh.bench.serve.run import server_rows
    from tilemesh.bench.serve.url import URL_VOCABULARY, load_url, read_url

    if options.run is not None or options.peers or options.steps or options.features:
        raise UsageError("--url loads a server: leave --run, --peers, --steps and --features out")
    read_url(url)
    goal, _, _ = _promised(options)
    rows = []
    for rate, load in _loads(options, (*((None,) if options.blocks else ()), *options.rates), URL_VOCABULARY):
        case: dict[str, CaseValue] = {"requests": len(load), **_lengths(load)}
        rows += server_rows(load_url(url, load), goal, {**case, "rate": rate})
    return Output([rows], rows)


def _lengths(load: Sequence[LoadRequest]) -> dict[str, CaseValue]:
    """From the shortest to the longest prompt and answer: what a trace has, the options do not say."""
    from tilemesh.bench.serve.load import Lengths

    prompts, outputs = [len(request.prompt) for request in load], [request.output for request in load]
    return {"prompt": str(Lengths(min(prompts), max(prompts))), "output": str(Lengths(min(outputs), max(outputs)))}


def _loads(
    options: ServeBenchOptions, rates: Sequence[float | None], vocabulary: int
) -> list[tuple[float | None, list[LoadRequest]]]:
    """Requests at each rate, None being all at once, and those of a trace; prompts that no other load has."""
    from tilemesh.bench.serve.load import make_load, other_prompts, read_trace

    _, prompt, output = _promised(options)
    loads: list[tuple[float | None, list[LoadRequest]]] = []
    for number, rate in enumerate(rates):
        load = make_load(options.requests, prompt, output, vocabulary, rate=rate, seed=options.seed)
        loads.append((rate, other_prompts(load, vocabulary, -1 - number)))
    if options.trace is not None:
        loads.append((None, read_trace(options.trace, vocabulary, options.seed)))
    return loads


def _sizes(options: ServeBenchOptions) -> dict[str, int]:
    """Of the mesh."""
    sizes = read_mesh(options.mesh)
    if max(sizes.values()) > 1 and (options.steps or options.features or options.peers):
        raise UsageError("--mesh starts processes, whose loads are timed: leave --steps, --features and --peers out")
    return sizes


def _settings(options: ServeBenchOptions, longest: int) -> dict[str, Any]:
    # Pages for as many requests as run: what is measured is the engine, not a pool that is too small.
    return {
        "pages": -(-longest // 16) * options.running + options.running, "running": options.running,
        "step_tokens": max(options.step_tokens, options.running), "device": options.device, "dtype": options.dtype,
        "seed": options.seed, "waiting": max(1024, options.requests),
    }  # fmt: skip


def _engine(options: ServeBenchOptions, served: ServedModel, longest: int, launch_ahead: bool | None = None) -> Engine:
    from tilemesh.serve.engine import Engine

    prepares = options.device != "cpu" and launch_ahead is None
    return Engine(served, **_settings(options, longest), prepare=prepares, launch_ahead=launch_ahead)


def _replicas(
    options: ServeBenchOptions, served: ServedModel, longest: int, sizes: Mapping[str, int], closing: ExitStack
) -> Replicas:
    """Processes that read the model's folder, which random weights are written to."""
    from tilemesh.bench.serve.peers import write_folder
    from tilemesh.serve.replicas import Replicas

    source: str | Path = options.model
    if not Path(source).exists():
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="tilemesh-serve-")))
        source = write_folder(served.model, folder)
    settings = _settings(options, longest)
    return Replicas(source, sizes["dp"], ranks=sizes["tp"], ep=sizes["ep"], **settings)


def _served(options: ServeBenchOptions) -> ServedModel:
    """The model of a folder, or random weights of a shape."""
    from tilemesh.bench.serve.models import SHAPES, random_served
    from tilemesh.kernels.launch.tensors import read_device
    from tilemesh.model.config import PRESETS, preset
    from tilemesh.serve.load import load_served, read_dtype

    dtype, device = read_dtype(options.dtype), read_device(options.device)
    assert dtype is not None
    known = {**dict.fromkeys(PRESETS), **SHAPES}
    if options.model in known:
        config = SHAPES.get(options.model) or preset(options.model)
        return random_served(options.model, config.replace(dropout=0.0), dtype, device, options.seed)
    if not Path(options.model).exists():
        raise unknown("model, and no folder", options.model, known)
    return load_served(options.model, dtype=dtype, device=device)


def _promised(options: ServeBenchOptions) -> tuple[ServeGoal, Lengths, Lengths]:
    """The goal, and how long prompts and answers are."""
    from tilemesh.bench.serve.load import Lengths
    from tilemesh.serve.figures import ServeGoal

    prompt, output = Lengths.parse("--prompt", options.prompt), Lengths.parse("--output", options.output)
    each = prompt.most + output.most
    if options.requests * each > _MOST_TOKENS:
        raise UsageError(
            f"--requests {options.requests:,} of up to {each:,} tokens: expected at most {_MOST_TOKENS:,} tokens in all"
        )
    return ServeGoal.parse(options.goal), prompt, output
