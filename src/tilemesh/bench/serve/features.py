"""What parts of the engine bring: prefix sharing, chunks, pages, guessing ahead, packed weights, adapters; its start.

Each feature is a case with and without it on one model, in turns. What is expected of it follows from the tokens that
are computed and the time of the engine without it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tilemesh.bench.harness import NO_PEERS, Estimate, exactly, make_row
from tilemesh.bench.serve.load import Lengths, make_load
from tilemesh.bench.serve.models import random_served
from tilemesh.bench.serve.ours import run_load
from tilemesh.bench.serve.peers import write_folder
from tilemesh.core.errors import RunError
from tilemesh.measure.row import CaseValue, Row
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import in_turns
from tilemesh.model.adapter import A, B, LoraConfig, adapted_modules, adapter_parameters, matrix_shapes
from tilemesh.model.config import ModelConfig
from tilemesh.model.lora import save_adapter
from tilemesh.model.packed import packs
from tilemesh.model.transformer import Transformer
from tilemesh.serve.engine import Engine
from tilemesh.serve.jobs import AnswerPart
from tilemesh.serve.load import ServedModel
from tilemesh.serve.request import Sampling

PAGE = 16
_NO_LIMIT = Estimate(None, "with and without are compared")


@dataclass(frozen=True)
class FeatureBench:
    """One model to serve on a device, and what rows say of it. `make` opens an engine over a model."""

    served: ServedModel
    device: str
    case: Mapping[str, CaseValue]
    make: Callable[..., Engine]

    @property
    def length(self) -> int:
        """Tokens of a prompt: half of the context, at most 1,024."""
        return min(1024, self.served.model.config.context // 2)

    def prompt(self, source: random.Random, length: int, shared: Sequence[int] = ()) -> list[int]:
        vocabulary = self.served.model.config.vocabulary
        return [*shared, *(source.randrange(vocabulary) for _ in range(length - len(shared)))]

    def random(self) -> ServedModel:
        """The same shape with weights of its own."""
        model = self.served.model
        return random_served(self.served.name, model.config, next(model.parameters()).dtype, self.device)

    def row(
        self, name: str, case: Mapping[str, CaseValue], measured: Sample, guess: Estimate, unit: str = "s",
        **peers: Sample,
    ) -> Row:  # fmt: skip
        return make_row(
            f"serve, {name}", {**self.case, **case}, measured, unit=unit, predicted=guess, limit=_NO_LIMIT,
            peers={peer.replace("_", " "): sample for peer, sample in peers.items()}, no_peers=NO_PEERS,
        )  # fmt: skip


def feature_rows(bench: FeatureBench, names: Sequence[str]) -> Iterator[list[Row]]:
    """The rows of each feature as it is measured."""
    for name in FEATURES if "all" in names else names:
        yield FEATURES[name](bench)


def _in_turns(calls: Mapping[str, Callable[[], float]], turns: int, warmup: int = 1) -> dict[str, Sample]:
    return {name: Sample.of(figures) for name, figures in in_turns(calls, turns, warmup).items()}


def _first_token_s(engine: Engine, prompt: Sequence[int]) -> float:
    began = time.perf_counter()
    list(engine.generate([list(prompt)], Sampling(max_tokens=1, temperature=0, ignore_eos=True)))
    return time.perf_counter() - began


def prefix_rows(bench: FeatureBench) -> list[Row]:
    """The first token of a prompt of which 90 % were seen before, and of one that shares nothing."""
    draw, length = random.Random(1), bench.length
    shared, options = bench.prompt(draw, length * 9 // 10), {"pages": 8 * length // PAGE, "step_tokens": 2 * length}
    with (
        bench.make(bench.served, **options) as sharing,
        bench.make(bench.served, share_prefixes=False, **options) as plain,
    ):
        engines = {"sharing": sharing, "plain": plain}
        calls: dict[str, Callable[[], float]] = {}
        for (name, engine), (kind, beginning) in itertools.product(
            engines.items(), {"shared": shared, "apart": []}.items()
        ):

            def first_s(engine: Engine = engine, beginning: list[int] = beginning) -> float:
                return _first_token_s(engine, bench.prompt(draw, length, beginning))

            calls[f"{name}, {kind}"] = first_s
        taken = _in_turns(calls, 8, warmup=2)
    rows = []
    for kind, tokens in (("shared", length - len(shared) // PAGE * PAGE), ("apart", length)):
        without = taken[f"plain, {kind}"]
        guess, case = Estimate(without.median * tokens / length), {"prompt": length, "shared": length - tokens}
        rows.append(bench.row("prefix sharing", case, taken[f"sharing, {kind}"], guess, without=without))
    return rows


def chunk_rows(bench: FeatureBench) -> list[Row]:
    """p99 of the time between tokens of a request that decodes while prompts come, in chunks of 64 tokens and whole."""
    draw, length, chunk = random.Random(2), bench.length, 64

    def p99_s(engine: Engine) -> float:
        times: list[float] = []
        done = threading.Event()

        def hear(part: AnswerPart) -> None:
            times.append(time.perf_counter())
            if part.finish is not None:
                done.set()

        engine.submit([3], Sampling(max_tokens=120, temperature=0, ignore_eos=True), hear)
        for _ in range(4):
            _first_token_s(engine, bench.prompt(draw, length))
        done.wait()
        gaps = sorted(after - before for before, after in itertools.pairwise(times))
        return gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]

    options = {"pages": 8 * length // PAGE, "step_tokens": 2 * length + chunk, "share_prefixes": False}
    with (
        bench.make(bench.served, chunk_tokens=chunk, **options) as chunked,
        bench.make(bench.served, chunk_tokens=2 * length, **options) as unchunked,
    ):
        taken = _in_turns({"chunks": lambda: p99_s(chunked), "whole": lambda: p99_s(unchunked)}, 3)
    guess = Estimate(taken["whole"].median * (chunk + 1) / (length + 1))
    case = {"prompt": length, "chunk": chunk}
    return [bench.row("chunks, p99 between tokens", case, taken["chunks"], guess, prompts_at_once=taken["whole"])]


def page_rows(bench: FeatureBench) -> list[Row]:
    """The share of places in pages that hold a token, while 32 requests of different lengths decode."""
    config = bench.served.model.config
    least, most, output = bench.length // 10, bench.length, 60
    load = make_load(64, Lengths(least, most), Lengths(output, output), config.vocabulary, seed=3)
    with bench.make(bench.served, pages=40 * (most + output) // PAGE, running=32) as engine:
        steps = [step for step in run_load(engine, load).steps if not step.prefill_tokens and step.held_pages]
    used = sum(step.held_tokens for step in steps) / sum(step.held_pages * PAGE for step in steps)
    mean = (least + most + output) / 2
    guess, one_block = Estimate(mean / (mean + (PAGE - 1) / 2)), exactly(mean / config.context)
    case = {"requests": len(load)}
    return [bench.row("places used", case, exactly(used), guess, "fraction", one_block_per_context=one_block)]


def guess_rows(bench: FeatureBench) -> list[Row]:
    """Tokens per second of one request: tokens guessed from the text, and by a draft model of one layer.

    What the layers but the first add is scaled down, so that the two agree about as often as a real pair does.
    """
    draw, config = random.Random(4), bench.served.model.config
    target = _agreeing(bench, 0.02)
    small = Transformer(config.replace(layers=1), device="meta")
    kept = target.model.state_dict()
    small.load_state_dict({name: kept[name].clone() for name in small.state_dict()}, assign=True)
    draft = replace(target, model=small.eval().requires_grad_(False))
    repeating, other = [11, 12, 13, 14, 15, 16, 17] * 12, bench.prompt(draw, 40)

    def rate(engine: Engine, prompt: list[int]) -> Callable[[], float]:
        def tokens_per_s() -> float:
            began = time.perf_counter()
            count = min(96, config.context - len(prompt) - 1)
            (request,) = engine.generate([prompt], Sampling(max_tokens=count, temperature=0, ignore_eos=True))
            return len(request.answers[0].tokens) / (time.perf_counter() - began)

        return tokens_per_s

    rows = []
    for how, prompt, options in (
        ("from the text", repeating, {"speculate": 8}), ("by a draft model", other, {"draft": draft, "speculate": 4})
    ):  # fmt: skip
        with bench.make(target, pages=300) as plain, bench.make(target, pages=300, **options) as guessing:
            taken = _in_turns({"plain": rate(plain, prompt), "guessing": rate(guessing, prompt)}, 3)
            status = guessing.status
        case: dict[str, CaseValue] = {"how": how, "guessed": status.guessed, "right": status.guessed_right}
        guess = Estimate(None, "how often guesses are right is measured")
        rows.append(bench.row("guessing ahead", case, taken["guessing"], guess, "tokens/s", without=taken["plain"]))
    return rows


def _agreeing(bench: FeatureBench, scale: float) -> ServedModel:
    """Random weights with which all layers but the first add little."""
    served = bench.random()
    with torch.no_grad():
        for layer in list(served.model.layers)[1:]:
            for name, parameter in layer.named_parameters():
                if name.endswith(("fc_o.weight", "fc_out.weight")):
                    parameter.mul_(scale)
    return served


_SIXTEEN, _ANSWER = 16, 32
"""Requests of a batch that is timed whole, and tokens of each answer."""


def _batch_rates(bench: FeatureBench, first: Engine, second: Engine) -> list[Sample]:
    """Tokens per second of 16 requests by two engines in turns, prompts new in every turn. An engine with adapters has
    them take turns in the batch."""
    config = bench.served.model.config
    prompts = Lengths(16, min(128, config.context - _ANSWER))

    def rate(engine: Engine) -> Callable[[], float]:
        seeds = itertools.count()
        names: list[str | None] = [*sorted(engine.adapters)] or [None]
        plain = Sampling(max_tokens=_ANSWER, temperature=0, ignore_eos=True)
        each = [replace(plain, adapter=names[at % len(names)]) for at in range(_SIXTEEN)]

        def tokens_per_s() -> float:
            answer = Lengths(_ANSWER, _ANSWER)
            load = make_load(_SIXTEEN, prompts, answer, config.vocabulary, seed=next(seeds))
            began = time.perf_counter()
            list(engine.generate([list(request.prompt) for request in load], each))
            return _SIXTEEN * _ANSWER / (time.perf_counter() - began)

        return tokens_per_s

    taken = _in_turns({"first": rate(first), "second": rate(second)}, 4)
    return [taken["first"], taken["second"]]


def packed_rows(bench: FeatureBench) -> list[Row]:
    """Weights laid out once for a CPU's products, beside plain ones."""
    options = {"pages": 400, "running": _SIXTEEN}
    with (
        bench.make(bench.random(), packed=False, **options) as plain,
        bench.make(bench.random(), packed=True, **options) as packed,
    ):
        without, measured = _batch_rates(bench, plain, packed)
    dtype = next(bench.served.model.parameters()).dtype
    case: dict[str, CaseValue] = {"requests": _SIXTEEN, "by default": packs(dtype)}
    guess = Estimate(None, "what a layout is worth to a CPU is measured")
    return [bench.row("packed weights", case, measured, guess, "tokens/s", plain=without)]


def adapter_rows(bench: FeatureBench) -> list[Row]:
    """Eight adapters in one batch beside none."""
    config, adapters, lora = bench.served.model.config, 8, LoraConfig(rank=8)
    options = {"pages": 400, "running": _SIXTEEN}
    with (
        tempfile.TemporaryDirectory(prefix="tilemesh-adapters-") as folder,
        bench.make(bench.random(), **options) as plain,
        bench.make(bench.random(), adapters=adapters, adapter_rank=lora.rank, **options) as adapted,
    ):
        for number in range(adapters):
            _write_adapter(Path(folder, str(number)), config, lora, number)
            adapted.load_adapter(str(number), Path(folder, str(number)))
        without, measured = _batch_rates(bench, plain, adapted)
    case: dict[str, CaseValue] = {"requests": _SIXTEEN, "adapters": adapters, "rank": lora.rank}
    parameters = sum(outputs * inputs for outputs, inputs in matrix_shapes(config).values())
    expected = without.median / (1 + adapters * adapter_parameters(config, lora) / parameters)
    guess = Estimate(expected, "products of all adapters' columns with every token")
    return [bench.row("adapters", case, measured, guess, "tokens/s", without=without)]


def _write_adapter(folder: Path, config: ModelConfig, lora: LoraConfig, seed: int) -> None:
    """Random weights."""
    draw, shapes, tensors = torch.Generator().manual_seed(seed), matrix_shapes(config), {}
    for name in adapted_modules(config, lora):
        outputs, inputs = shapes[name]
        tensors[f"{name}.{A}"] = torch.randn(lora.rank, inputs, generator=draw) * 0.01
        tensors[f"{name}.{B}"] = torch.randn(outputs, lora.rank, generator=draw) * 0.01
    save_adapter(tensors, config, lora, folder)


def start_rows(bench: FeatureBench) -> list[Row]:
    """From `tilemesh serve` to the first token over HTTP, kernels compiled anew and graphs captured on the way."""
    with tempfile.TemporaryDirectory(prefix="tilemesh-start-") as folder:
        write_folder(bench.served.model, Path(folder))
        seconds = [_start_s(folder, bench.device) for _ in range(2)]
    guess = Estimate(None, "imports, weights from the disk and kernels to compile are not predicted")
    return [bench.row("start", {}, Sample.of(seconds), guess)]


def _start_s(folder: str, device: str) -> float:
    began = time.perf_counter()
    words = [sys.executable, "-m", "tilemesh", "serve", folder, "--device", device, "--port", "0"]
    environment = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton-{time.monotonic_ns()}"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if port := re.search(r":(\d+)/v1", line):
                break
        else:
            raise RunError(f"`tilemesh serve` did not start: {lines[-1].strip() if lines else 'it printed nothing'}")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/v1/completions", body, timeout=120) as reply:
            reply.read()
        seconds = time.perf_counter() - began
        process.terminate()
    return seconds


FEATURES: Mapping[str, Callable[[FeatureBench], list[Row]]] = {
    "prefix": prefix_rows,
    "chunks": chunk_rows,
    "pages": page_rows,
    "guesses": guess_rows,
    "packed": packed_rows,
    "adapters": adapter_rows,
    "start": start_rows,
}
