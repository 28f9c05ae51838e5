"""Weights laid out once for a CPU's products, beside plain ones: single products, and an engine with and without.

    python benchmarks/serve_packed_cpu.py [--dtype fp32] [--models llama-27m,llama-110m] [--threads 2] [--turns 4]
        [--json FILE]

Products: the four of a layer and the output projection of the first model, µs by rows, plain and packed in turn, the
best of several. Engines: 16 requests of 16 to 128 prompt and 32 output tokens, prompts new in every turn, one engine
after the other; tokens per second, the median step in which 16 requests decode, and the seconds of steps with prompts.
Rows are written as they come.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from tilemesh.bench.serve.load import Lengths, make_load
from tilemesh.bench.serve.models import SHAPES, random_served
from tilemesh.bench.serve.ours import run_load
from tilemesh.measure.machine import stamp
from tilemesh.model.config import ModelConfig
from tilemesh.model.packed import packs
from tilemesh.serve import Engine
from tilemesh.serve.load import read_dtype

ROWS = (1, 2, 4, 16, 64, 512)
REQUESTS = 16


def best_s(calls: list[Callable[[], Any]], turns: int = 6) -> list[float]:
    """Of each call, one after the other in every turn."""
    best = [float("inf")] * len(calls)
    repeats = 1
    for _ in range(turns):
        for at, call in enumerate(calls):
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            took = (time.perf_counter() - began) / repeats
            best[at] = min(best[at], took)
        repeats = max(1, min(50, int(0.002 / max(best))))
    return best


def products(config: ModelConfig, dtype: torch.dtype) -> list[dict[str, Any]]:
    width, hidden = config.width, config.mlp_width
    shapes = {
        "qkv": (config.query_width + 2 * config.kv_width, width),
        "output": (width, config.query_width),
        "gate and first": (2 * hidden, width),
        "last": (width, hidden),
        "logits": (config.vocabulary, width),
    }
    found = []
    for name, (outputs, inputs) in shapes.items():
        weight = torch.randn(outputs, inputs).to(dtype)
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        for rows in ROWS:
            x = torch.randn(rows, inputs).to(dtype)
            plain_s, packed_s = best_s(
                [
                    lambda x=x, weight=weight: functional.linear(x, weight),
                    lambda x=x, packed=packed: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
                ]
            )
            found.append({"product": name, "rows": rows, "plain_us": plain_s * 1e6, "packed_us": packed_s * 1e6})
            print(
                f"{name:>14} {rows:4d} rows: plain {plain_s * 1e6:8.1f} us, packed {packed_s * 1e6:8.1f} us", flush=True
            )
    return found


class Steps:
    """Seconds of an engine's steps, with and without prompts."""

    def __init__(self, engine: Engine) -> None:
        self.decode: list[float] = []
        self.prompts_s = 0.0
        runner = engine._core.runner
        run = runner.run

        def timed(plan: Any, *given: Any) -> Any:
            began = time.perf_counter()
            made = run(plan, *given)
            took = time.perf_counter() - began
            if plan.tokens == len(plan.entries) == REQUESTS:
                self.decode.append(took)
            elif plan.tokens > len(plan.entries):
                self.prompts_s += took
            return made

        runner.run = timed  # type: ignore[method-assign]


def engines(name: str, dtype: torch.dtype, turns: int) -> dict[str, Any]:
    config = SHAPES[name]
    lengths = Lengths(16, 128), Lengths(32, 32)
    sizes: dict[str, Any] = {"pages": 400, "running": REQUESTS, "step_tokens": 512}
    made = {
        way: Engine(random_served(name, config, dtype), packed=way == "packed", **sizes) for way in ("plain", "packed")
    }
    taken: dict[str, list[float]] = {way: [] for way in made}
    for engine in made.values():
        run_load(engine, make_load(REQUESTS, lengths[0], Lengths(2, 2), config.vocabulary), watched=False)
    steps = {way: Steps(engine) for way, engine in made.items()}
    for turn in range(turns):
        for way, engine in made.items():
            load = make_load(REQUESTS, *lengths, config.vocabulary, seed=10 + turn)
            began = time.perf_counter()
            run_load(engine, load, watched=False)
            taken[way].append(time.perf_counter() - began)
    row: dict[str, Any] = {}
    for way in made:
        made[way].close()
        row[f"{way}_tokens_per_s"] = REQUESTS * 32 / statistics.median(taken[way])
        row[f"{way}_decode_ms"] = statistics.median(steps[way].decode) * 1e3
        row[f"{way}_prompts_s"] = steps[way].prompts_s / turns
    row["speedup"] = row["packed_tokens_per_s"] / row["plain_tokens_per_s"]
    print(name, " | ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    return {"turns": turns, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--models", default="llama-27m,llama-110m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--json")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    dtype = read_dtype(asked.dtype)
    assert dtype is not None
    print(f"{asked.dtype}, {asked.threads} threads: packed by itself: {packs(dtype)}", flush=True)
    told = {"dtype": asked.dtype, "threads": asked.threads, **stamp()}
    names = asked.models.split(",")

    def keep(row: dict[str, Any]) -> None:
        if asked.json:
            with open(asked.json, "a") as out:
                out.write(json.dumps({**row, **told}) + "\n")

    for name in names:
        keep({"name": "serve, packed weights", "model": name, **engines(name, dtype, asked.turns)})
    with torch.inference_mode():
        for row in products(SHAPES[names[0]], dtype):
            keep({"name": "serve, packed product", "model": names[0], **row})


if __name__ == "__main__":
    main()
