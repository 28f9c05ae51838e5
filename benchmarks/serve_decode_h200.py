"""Decoding on one GPU, with random weights: seconds of a step against the bytes it must read, as graphs and eagerly.

    python benchmarks/serve_decode_h200.py [--shapes tinyllama-1.1b,llama-3-8b] [--check] [--one]
        [--profile] [--serve] [--online] [--prefix] [--prepare] [--json FILE]

Three times per case. *step*: of an engine that decodes, planning and launching ahead. *busy*: of that, between the
beginning and the end of the captured step on the GPU, by CUDA events; `waits` is the share of the pauses between.
*eager*: the same engine with every kernel launched by itself and every token waited for. The limit is the weights and
the keys and values that a step reads, at the rate of a large copy, which is measured first. *predicted*: by
`plan/serving_clock.py`, before.
`--check`: runs the tests of the kernels first. `--one`: also a single sequence. `--profile`: of the captured step of 64
rows every kernel, and when it ran in a layer.
`--serve` also times 256 requests of 100 to 1,024 tokens each way against the larger of bytes and FLOPs (at 800 TFLOP/s,
what a large product reaches), step by step. `--online`: requests at random times, predicted before by the simulator
with the step times of `plan/serving_clock.py`. `--prefix`: the first token of prompts of 8,192 tokens of
which 90 % are shared, beside prompts that share nothing, and beside an engine that looks for nothing. `--prepare`: how
long all graphs of a server take.
Rows are written as they come.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from tilemesh.bench.serve.load import Lengths, make_load
from tilemesh.bench.serve.ours import run_load
from tilemesh.bench.serve.run import ServeBench
from tilemesh.core.hardware import parse_cluster
from tilemesh.data.tokenizer import Unknown
from tilemesh.measure.row import Row, write_rows
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.decoding import SequencePart, key_value_bytes
from tilemesh.plan.serving_clock import StepClock
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.device_steps import DeviceSteps, StepShape
from tilemesh.serve.figures import ServeGoal
from tilemesh.serve.load import ServedModel
from tilemesh.serve.sampling import DrawKind
from tilemesh.serve.scheduler import StepPlan

PRODUCT_FLOPS_PER_S = 800e12
RATES = {"tinyllama-1.1b": (25.0, 60.0, 100.0), "llama-3-8b": (20.0, 50.0)}
"""Requests per second, up to about 0.8 of what the engine can serve."""
STEPS = 96


def random_model(config: ModelConfig) -> Transformer:
    """Weights drawn on the GPU: what they are changes no time."""
    model = Transformer(config, device="meta", dtype=torch.bfloat16)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            made = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
            module.register_parameter(name, nn.Parameter(made, requires_grad=False))
    return model.eval()


def with_context(model: Transformer, context: int) -> Transformer:
    """The same weights for longer sequences."""
    longer = Transformer(model.config.replace(context=context), device="meta", dtype=torch.bfloat16)
    longer.load_state_dict(model.state_dict(), assign=True)
    return longer.eval().requires_grad_(False)


def copy_bytes_per_s() -> float:
    """Read and written, by copies of 2 GiB; the first ones raise the clocks."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(120):
        if turn == 20:
            began.record()
        target.copy_(source)
    ended.record()
    ended.synchronize()
    return 100 * 2 * source.nbytes / (float(began.elapsed_time(ended)) / 1e3)


def predicted_ms(config: ModelConfig, rows: int, context: int) -> float:
    return StepClock(config, parse_cluster("1xh200"))([SequencePart(1, context, 1)] * rows) * 1e3


def weight_bytes(model: Transformer) -> int:
    """Read in every step: all weights but the rows of the embedding that no token has."""
    table = 0 if model.config.tied or model.token_embedding is None else model.token_embedding.weight.nbytes
    return sum(parameter.nbytes for parameter in model.parameters()) - table


class Watched:
    """When each step ended, and what it had to do at least."""

    def __init__(self, engine: Engine, model: Transformer, rate: float) -> None:
        self._rate = rate
        self.ended: list[float] = []
        self.tokens: list[int] = []
        self.limits: list[float] = []
        self._weights, self._config = weight_bytes(model), model.config
        core = engine._core
        commit = core.scheduler.commit

        def watched(plan: StepPlan, sampled: Any) -> Any:
            self.ended.append(time.perf_counter())
            self.tokens.append(plan.tokens)
            self.limits.append(self.limit_s(plan))
            return commit(plan, sampled)

        core.scheduler.commit = watched  # type: ignore[method-assign]
        self._events: list[tuple[int, Any, Any]] = []
        self.prompts: list[tuple[int, float, Any, Any]] = []
        ahead = core.runner.ahead
        if ahead is not None:
            replay = ahead._replay

            def timed(rows: int, kind: DrawKind) -> None:
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                replay(rows, kind)
                ended.record()
                self._events.append((rows, began, ended))

            ahead._replay = timed  # type: ignore[method-assign]
            self._watch_prompts(ahead)

    def _watch_prompts(self, ahead: DeviceSteps) -> None:
        """Of steps with prompts: the host's time for launching, and the GPU's between the first and the last kernel."""
        mixed = ahead._mixed

        def timed(entries: Any, drawings: Any) -> Any:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun = time.perf_counter()
            began.record()
            left = mixed(entries, drawings)
            ended.record()
            took = time.perf_counter() - begun
            self.prompts.append((sum(entry.count for entry in entries), took, began, ended))
            return left

        ahead._mixed = timed  # type: ignore[method-assign]

    def where_time_went(self) -> dict[str, float]:
        """Seconds: of captured steps on the GPU, of the pauses before them, of steps with prompts (host, and GPU)."""
        torch.cuda.synchronize()
        pairs = list(zip(self._events, self._events[1:], strict=False))
        by_rows: dict[int, list[float]] = {}
        for rows, began, ended in self._events:
            by_rows.setdefault(rows, []).append(began.elapsed_time(ended))
        for rows, found in sorted(by_rows.items()):
            print(f"  captured step of {rows} rows: {statistics.median(found):.3f} ms, {len(found)} times")
        for tokens, host_s, began, ended in self.prompts:
            print(f"  step of {tokens} tokens: host {host_s * 1e3:.2f} ms, GPU {began.elapsed_time(ended):.2f} ms")
        return {
            "captured_s": sum(map(sum, by_rows.values())) / 1e3,
            "pauses_s": sum(one[2].elapsed_time(other[1]) for one, other in pairs) / 1e3,
            "prompts_host_s": sum(host_s for _, host_s, _, _ in self.prompts),
            "prompts_gpu_s": sum(began.elapsed_time(ended) for _, _, began, ended in self.prompts) / 1e3,
        }

    def gpu_s(self, rows: int) -> tuple[float, float]:
        """Medians of a captured step on the GPU while serving, and of the pause before it."""
        torch.cuda.synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        both = [(one, other) for one, other in pairs if one[0] == other[0] == rows]
        both = both[len(both) // 4 :]
        busy = [other[1].elapsed_time(other[2]) / 1e3 for _, other in both]
        pause = [one[2].elapsed_time(other[1]) / 1e3 for one, other in both]
        return statistics.median(busy), statistics.median(pause)

    def limit_s(self, plan: StepPlan) -> float:
        stored = sum(entry.start + entry.count for entry in plan.entries)
        moved = self._weights + stored * key_value_bytes(self._config, 2)
        products = self._weights // 2 * 2 * plan.tokens
        width = self._config.query_width * self._config.layers
        attention = sum(4 * entry.count * (entry.start + entry.count / 2) * width for entry in plan.entries)
        return max(moved / self._rate, (products + attention) / PRODUCT_FLOPS_PER_S)

    def decode_s(self, rows: int) -> float:
        """The median step in which so many requests decode."""
        pairs = zip(self.ended, self.ended[1:], self.tokens, self.tokens[1:], strict=False)
        found = [end - begin for begin, end, before, now in pairs if before == now == rows]
        return statistics.median(found[len(found) // 4 :])


def generate(engine: Engine, rows: int, prompt: int, output: int) -> float:
    draw = random.Random(0)
    prompts = [[draw.randrange(engine.config.vocabulary) for _ in range(prompt)] for _ in range(rows)]
    began = time.perf_counter()
    for _ in engine.generate(prompts, Sampling(max_tokens=output, temperature=0, ignore_eos=True)):
        pass
    return time.perf_counter() - began


def engine_of(model: Transformer, rows: int, ahead: bool, **options: Any) -> Engine:
    served = ServedModel("random", model, Unknown(model.config.vocabulary), frozenset())
    sizes = {"pages": rows * 72 + 200, "running": rows, "step_tokens": 4096, "share_prefixes": False, **options}
    return Engine(served, device="cuda", launch_ahead=ahead, say=print, **sizes)


def profile(engine: Engine, rows: int, turns: int = 4) -> None:
    """The kernels of the captured step of so many rows: time by name, and when each ran in a layer in the middle."""
    ahead = engine._core.runner.ahead
    assert ahead is not None
    graph = ahead._captured[StepShape("rows", rows, DrawKind.GREEDY)]
    replay, seen, profiled = ahead._replay, [0], []

    def watched(given: int, kind: DrawKind) -> None:
        replay(given, kind)
        seen[0] += given == rows
        if seen[0] != 4 or profiled:
            return
        # Again and again over the numbers of this step: those of a later one may be of another size.
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(turns):
                graph.replay()
                torch.cuda.synchronize()
        profiled.append(found)

    ahead._replay = watched  # type: ignore[method-assign]
    generate(engine, rows, 976, 8 + rows // 4)  # prompts come four at a time: until all decode, some steps go by
    ahead._replay = replay  # type: ignore[method-assign]
    (found,) = profiled
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.end > event.time_range.start
    )
    steps = [spans[at : at + len(spans) // turns] for at in range(0, len(spans), len(spans) // turns)][1:turns]
    by_name: dict[str, list[float]] = {}
    for begin, end, name in chain.from_iterable(steps):
        by_name.setdefault(name[:60], []).append(end - begin)
    for name, took in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        count = len(took) / len(steps)
        print(f"  {sum(took) / len(steps):8.1f} us per step, {count:5.0f} of {statistics.median(took):6.2f} us: {name}")
    last = steps[-1]
    whole, at = last[-1][1] - last[0][0], [number for number, span in enumerate(last) if "attend_" in span[2]]
    print(f"  a step of {rows} rows: {whole:.1f} us in {len(last)} kernels; before the first layer's attention:")
    shown_spans = [*last[: at[0] + 1], *last[at[len(at) // 2] : at[len(at) // 2 + 1] + 1], *last[at[-1] :]]
    for begin, end, name in shown_spans:
        print(f"    {begin - last[0][0]:8.2f} + {end - begin:6.2f} us {name[:60]}")


def one_case(
    model: Transformer, rows: int, prompt: int, told: dict[str, Any], with_profile: bool, rate: float, eager: bool
) -> dict[str, Any]:
    config = model.config
    moved = weight_bytes(model) + rows * (prompt + STEPS // 2) * key_value_bytes(config, 2)
    context = prompt + STEPS // 2
    row: dict[str, Any] = {**told, "rows": rows, "context": context, "limit_ms": moved / rate * 1e3}
    row["predicted_ms"] = predicted_ms(config, rows, context)
    for ahead in (True, False) if eager else (True,):
        with engine_of(model, rows, ahead) as engine:
            generate(engine, rows, 16, 4)  # compiles and captures
            watched = Watched(engine, model, rate)
            whole_s = generate(engine, rows, prompt, STEPS)
            row["step_ms" if ahead else "eager_ms"] = watched.decode_s(rows) * 1e3
            if ahead:
                first = next(at for at, tokens in enumerate(watched.tokens) if tokens == rows)
                row["prompt_s"] = whole_s - (watched.ended[-1] - watched.ended[first])
                busy, pause = watched.gpu_s(rows)
                row["busy_ms"], row["pause_ms"] = busy * 1e3, pause * 1e3
                if with_profile:
                    try:
                        profile(engine, rows)
                    except Exception as error:  # what was timed is worth more than where it went
                        print(f"no profile: {type(error).__name__}: {error}")
        torch.cuda.empty_cache()
    best = row["step_ms"]
    row["share"] = row["limit_ms"] / best
    if "eager_ms" in row:
        row["graphs_speedup"] = row["eager_ms"] / best
    row["busy_share"] = row["limit_ms"] / row["busy_ms"]
    row["waits"] = row["pause_ms"] / (row["busy_ms"] + row["pause_ms"])
    return shown(row)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    words = (f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    print(" | ".join(words), flush=True)
    return row


def serve_many(
    model: Transformer,
    told: dict[str, Any],
    rate: float,
    count: int,
    prompts: tuple[int, int],
    outputs: tuple[int, int],
) -> dict[str, Any]:
    """So many requests at once, of random lengths within these bounds."""
    draw = random.Random(1)
    vocabulary = model.config.vocabulary
    with engine_of(model, count, True, pages=count * 130, context=2048) as engine:
        generate(engine, count, 16, 4)
        ahead = engine._core.runner.ahead
        assert ahead is not None
        for tokens in ahead._sizes.all_tokens():  # compiles and captures before anything is timed
            ahead.prepare_prompts(tokens)
        for rows in (1, 2, 4, 8, *range(16, count + 1, 16)):
            ahead.prepare(rows)
        watched = Watched(engine, model, rate)
        sizes = [(draw.randint(*prompts), draw.randint(*outputs)) for _ in range(count)]
        asked = [[draw.randrange(vocabulary) for _ in range(prompt)] for prompt, _ in sizes]
        samplings = [Sampling(max_tokens=output, temperature=0, ignore_eos=True) for _, output in sizes]
        began = time.perf_counter()
        for _ in engine.generate(asked, samplings):
            pass
        took = time.perf_counter() - began
        where = watched.where_time_went()
    produced, limit = sum(output for _, output in sizes), sum(watched.limits)
    row = {**told, "requests": count, "prompts": prompts, "outputs": outputs, "seconds": took}
    row |= {"limit_s": limit, "share": limit / took}
    row["tokens_per_s"] = produced / took
    row |= where
    return shown(row)


def serve_online(model: Transformer, shape: str, rates: Sequence[float]) -> list[Row]:
    """TTFT and ITL of requests at random times, predicted before; 100 requests of 100 to 512 tokens and 64 to 128."""
    clock = StepClock(model.config, parse_cluster("1xh200"))
    lengths = Lengths(100, 512), Lengths(64, 128)
    case = {"model": shape, "dtype": "bf16", "prompt": str(lengths[0]), "output": str(lengths[1]), "running": 64}
    with engine_of(model, 64, True, pages=64 * 48, context=1024, prepare=True) as engine:
        bench = ServeBench(engine, case, clock, "", ServeGoal(), print, watched=False)
        warm = make_load(64, *lengths, model.config.vocabulary, rate=rates[-1], seed=99)
        run_load(engine, warm, watched=False)  # compiles
        seen = Watched(engine, model, 1.0)
        for number, rate in enumerate(rates):
            load = make_load(100, *lengths, model.config.vocabulary, rate=rate, seed=number)
            bench.online(load, rate)
            told = bench.found.points[-1].predicted
            print(f"predicted: first token {told.ttft_p50:.4f} s, between tokens {told.itl_p50:.5f} s", flush=True)
        seen.where_time_went()
    return bench.found.rows


def first_token_s(engine: Engine, prompt: Sequence[int]) -> float:
    began = time.perf_counter()
    list(engine.generate([list(prompt)], Sampling(max_tokens=1, temperature=0, ignore_eos=True)))
    return time.perf_counter() - began


def serve_prefix(
    model: Transformer, told: dict[str, Any], rate: float, length: int = 8192, turns: int = 8
) -> dict[str, Any]:
    """Medians of the time to the first token: 90 % shared, nothing shared, and without a prefix cache."""
    draw = random.Random(2)

    def fresh(count: int) -> list[int]:
        return [draw.randrange(model.config.vocabulary) for _ in range(count)]

    options = {"pages": 8 * length // 16, "context": length + 16}
    found: dict[str, list[float]] = {"shared": [], "not_shared": [], "without_cache": []}
    common = fresh(length * 9 // 10)
    with (
        engine_of(model, 1, True, share_prefixes=True, **options) as engine,
        engine_of(model, 1, True, **options) as plain,
    ):
        watched = Watched(engine, model, rate)
        for turn in range(turns + 2):
            times = {
                "shared": first_token_s(engine, common + fresh(length - len(common))),
                "not_shared": first_token_s(engine, fresh(length)),
                "without_cache": first_token_s(plain, fresh(length)),
            }
            for name, seconds in times.items():
                if turn >= 2:  # the first ones compile, and fill the cache
                    found[name].append(seconds)
        watched.where_time_went()
    medians = {f"{name}_ms": statistics.median(seconds) * 1e3 for name, seconds in found.items()}
    row = {**told, "prompt": length, "shared": len(common), **medians}
    row["share_of_time"] = medians["shared_ms"] / medians["not_shared_ms"]
    row["cost_without_hits"] = medians["not_shared_ms"] / medians["without_cache_ms"]
    return shown(row)


def serve_prepare(model: Transformer, told: dict[str, Any]) -> dict[str, Any]:
    """Seconds until an engine with the server's own sizes has captured all its steps and answered once."""
    began = time.perf_counter()
    with engine_of(model, 64, True, step_tokens=512, prepare=True) as engine:
        generate(engine, 1, 16, 1)
        captured = 0 if engine._core.runner.ahead is None else len(engine._core.runner.ahead._captured)
    return shown({**told, "prepare_s": time.perf_counter() - began, "graphs": captured})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="tinyllama-1.1b,llama-3-8b")
    for name in ("check", "one", "profile", "serve", "online", "prefix", "prepare"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--json")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    if asked.check:
        import pytest

        failed = pytest.main(
            ["-q", "-x", "-p", "no:cacheprovider", "tests/gpu/test_serve.py", "-k", "few_rows or pages_is_within"]
        )
        print(f"tests: code {int(failed)}; {time.perf_counter() - began:.0f} s", flush=True)

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
        if asked.json:
            with open(asked.json, "w") as out:
                out.writelines(json.dumps(row) + "\n" for row in rows)

    rate = copy_bytes_per_s()
    print(f"a copy moves {rate / 1e12:.3f} TB/s; {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for shape in asked.shapes.split(","):
        model = random_model(preset(shape))
        told = {"shape": shape, "copy_TB_per_s": rate / 1e12}
        print(f"{shape}: weights {weight_bytes(model) / 1e9:.2f} GB per step; {time.perf_counter() - began:.0f} s")
        case = partial(one_case, model, prompt=976, rate=rate)
        if asked.one:
            keep(case(1, told=told, with_profile=False, eager=True))
        keep(case(64, told=told, with_profile=asked.profile, eager=False))
        loads(model, shape, told, rate, asked, keep)
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
        del model, case
        torch.cuda.empty_cache()


def loads(
    model: Transformer, shape: str, told: dict[str, Any], rate: float, asked: argparse.Namespace,
    keep: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    if asked.prefix:
        keep(serve_prefix(with_context(model, 16_384), told, rate))
    if asked.serve:
        keep(serve_many(model, told, rate, 256, (100, 1024), (100, 1024)))
        if shape == "tinyllama-1.1b":  # the load of a known figure of transformers
            keep(serve_many(model, told, rate, 128, (128, 128), (512, 512)))
    if asked.online:
        online = serve_online(model, shape, RATES[shape])
        if asked.json:
            write_rows(online, asked.json.replace(".jsonl", f"-{shape}-online.jsonl"))
    if asked.prepare:
        keep(serve_prepare(model, told))


if __name__ == "__main__":
    main()
