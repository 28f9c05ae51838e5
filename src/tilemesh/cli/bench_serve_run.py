"""What `tilemesh bench serve` does: opens the engine and the peers, runs the loads, prints rows, writes the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tilemesh.bench.serve.load import Lengths, LoadRequest, make_load, other_prompts, read_trace
from tilemesh.bench.serve.models import SHAPES, random_served
from tilemesh.bench.serve.peers import PEERS
from tilemesh.bench.serve.record import write_serve_run
from tilemesh.bench.serve.run import ServeBench, machine_clock, open_peers, server_rows
from tilemesh.bench.serve.url import URL_VOCABULARY, load_url, read_url
from tilemesh.cli.report_run import make
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.ranges import SEED, Range
from tilemesh.kernels.launch.tensors import read_device
from tilemesh.measure.row import CaseValue, write_rows
from tilemesh.measure.table import print_rows
from tilemesh.model.config import PRESETS, ModelConfig, preset
from tilemesh.serve.engine import Engine
from tilemesh.serve.figures import ServeGoal
from tilemesh.serve.load import ServedModel, load_served, read_dtype

_WHOLE = Range(1, 100_000)
_MOST_TOKENS = 1 << 26  # of all requests: a benchmark that would take hours says so at once


@dataclass(frozen=True)
class ServeQuestion:
    """What the command line said, as it was said."""

    model: str
    requests: int
    prompt: str
    output: str
    rates: str
    trace: str | None
    goal: str | None
    steps: str
    step_length: int
    peers: str
    blocks: int
    running: int
    step_tokens: int
    dtype: str
    device: str
    predict: str
    seed: int
    json: str | None
    run: str | None
    url: str | None


def answer(asked: ServeQuestion) -> None:
    console = Console(stderr=asked.json == "-", highlight=False, markup=False)
    rates, batches, names = _rates(asked.rates), _whole_list("--steps", asked.steps), _peers(asked.peers)
    goal, prompt, output = ServeGoal.parse(asked.goal), *_lengths(asked)
    for option, value in (("--requests", asked.requests), ("--running", asked.running)):
        _WHOLE.check(option, value, whole=True)
    SEED.check("--seed", asked.seed, whole=True)
    each = prompt.most + output.most
    if asked.requests * each > _MOST_TOKENS:
        raise UsageError(
            f"--requests {asked.requests:,} of up to {each:,} tokens: expected at most {_MOST_TOKENS:,} tokens in all"
        )
    Range(0, 1000).check("--blocks", asked.blocks, whole=True)
    Range(1, _MOST_TOKENS).check("--step-tokens", asked.step_tokens, whole=True)
    Range(1, _MOST_TOKENS).check("--step-length", asked.step_length, whole=True)
    if asked.predict not in ("fitted", "machine"):
        raise unknown("--predict", asked.predict, ("fitted", "machine"))
    if asked.url is not None:
        _answer_url(asked, rates, goal, console)
        return
    served = _served(asked)
    config = served.model.config
    longest = max(prompt.most + output.most, asked.step_length + 64 if batches else 0)
    if longest > config.context + 1:
        raise UsageError(
            f"a request may have {longest} tokens and the context of {asked.model} is {config.context}: give --prompt, "
            "--output or --step-length fewer"
        )
    loads = [
        (rate, other_prompts(_load(asked, config, rate), config.vocabulary, -1 - number))
        for number, rate in enumerate(rates)
    ]
    if asked.trace is not None:
        traced = read_trace(asked.trace, config.vocabulary, asked.seed)
        span = traced[-1].at_s - traced[0].at_s
        loads.append((len(traced) / span if span else float(len(traced)), traced))
    clock, why = machine_clock(config, asked.dtype, asked.device)
    with ExitStack() as closing:
        engine = closing.enter_context(_engine(asked, served, longest))
        case: dict[str, CaseValue] = {
            "model": asked.model,
            "dtype": asked.dtype,
            "prompt": str(prompt),
            "output": str(output),
        }
        case |= {"running": asked.running, "prediction": asked.predict}
        bench = ServeBench(engine, case, clock, why, goal, console.print, watched=asked.device == "cpu")
        peers = open_peers(names, engine, asked.dtype, asked.device, closing) if asked.blocks else []
        if asked.predict == "fitted" and asked.device == "cpu" and (asked.blocks or loads):
            bench.fit()
        if batches:
            bench.steps(batches, asked.step_length)
        if asked.blocks:
            bench.offline(_load(asked, config, None), asked.blocks, peers)
        for rate, load in loads:
            bench.online(load, rate)
    print_rows(bench.found.rows, console)
    if asked.run is not None:
        settings = {
            **case,
            "device": asked.device,
            "pages": engine.limits.pages,
            "page_tokens": engine.limits.page_tokens,
        }
        settings |= {"step_tokens": engine.limits.step_tokens, "goal": asked.goal, "seed": asked.seed}
        folder = write_serve_run(asked.run, settings, bench.found, engine.limits.page_tokens)
        (page,) = make([str(folder)], None)
        console.print(f"page: {page}", soft_wrap=True)
    if asked.json is not None:
        write_rows(bench.found.rows, asked.json)


def _answer_url(asked: ServeQuestion, rates: Sequence[float], goal: ServeGoal, console: Console) -> None:
    """A server that is already there: the same loads over HTTP."""
    assert asked.url is not None
    if asked.run is not None or asked.peers or asked.steps:
        raise UsageError("--url loads a server: leave --run, --peers and --steps out")
    read_url(asked.url)
    loads: list[tuple[float | None, list[LoadRequest]]] = [
        (rate, make_load(asked.requests, *_lengths(asked), URL_VOCABULARY, rate=rate, seed=asked.seed))
        for rate in ((None,) if asked.blocks else ()) + tuple(rates)
    ]
    loads = [(rate, other_prompts(load, URL_VOCABULARY, number)) for number, (rate, load) in enumerate(loads)]
    if asked.trace is not None:
        loads.append((None, read_trace(asked.trace, URL_VOCABULARY, asked.seed)))
    rows = []
    for rate, load in loads:
        records = load_url(asked.url, load)
        case: dict[str, CaseValue] = {"requests": len(load), "prompt": asked.prompt, "output": asked.output}
        rows += server_rows(records, goal, {**case, "rate": rate})
    print_rows(rows, console)
    if asked.json is not None:
        write_rows(rows, asked.json)


def _engine(asked: ServeQuestion, served: ServedModel, longest: int) -> Engine:
    # Pages for as many requests as run: what is measured is the engine, not a pool that is too small.
    pages = -(-longest // 16) * asked.running + asked.running
    return Engine(
        served, pages=pages, running=asked.running, step_tokens=max(asked.step_tokens, asked.running),
        device=asked.device, dtype=asked.dtype, seed=asked.seed, waiting=max(1024, asked.requests),
        prepare=asked.device != "cpu",
    )  # fmt: skip


def _served(asked: ServeQuestion) -> ServedModel:
    """The model of a folder, or random weights of a shape."""
    dtype, device = read_dtype(asked.dtype), read_device(asked.device)
    assert dtype is not None
    known = {**dict.fromkeys(PRESETS), **SHAPES}
    if asked.model in known:
        config = SHAPES.get(asked.model) or preset(asked.model)
        return random_served(asked.model, config.replace(dropout=0.0), dtype, device, asked.seed)
    if not Path(asked.model).exists():
        raise unknown("model, and no folder", asked.model, known)
    return load_served(asked.model, dtype=dtype, device=device)


def _load(asked: ServeQuestion, config: ModelConfig, rate: float | None) -> list[LoadRequest]:
    return make_load(asked.requests, *_lengths(asked), config.vocabulary, rate=rate, seed=asked.seed)


def _lengths(asked: ServeQuestion) -> tuple[Lengths, Lengths]:
    return Lengths.parse("--prompt", asked.prompt), Lengths.parse("--output", asked.output)


def _rates(text: str) -> list[float]:
    collected = []
    for piece in text.split(","):
        if piece.strip():
            try:
                rate = float(piece)
            except ValueError:
                rate = 0.0
            if not 0 < rate < 1e6:
                raise UsageError(f"--rates has '{piece.strip()}': expected requests per second, above 0")
            collected.append(rate)
    return collected


def _whole_list(option: str, text: str) -> list[int]:
    collected = []
    for piece in text.split(","):
        if piece.strip():
            if not piece.strip().isascii() or not piece.strip().isdigit():
                raise UsageError(f"{option} has '{piece.strip()}': expected whole numbers, such as 1,64")
            _WHOLE.check(option, int(piece), whole=True)
            collected.append(int(piece))
    return collected


def _peers(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip() and name.strip() != "none"]
    for name in names:
        if name not in PEERS:
            raise unknown("peer", name, PEERS)
    return names
