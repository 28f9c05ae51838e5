"""64 rows times the matrices of a decoding layer on one GPU: microseconds of each way to cut the weights up.

    python benchmarks/serve_products_h200.py [--rows 64] [--json FILE]

Each product stands in a captured chain of launches, every one begun before the one ahead has ended, as in a step; the
weights rotate past the L2. The limit is the weights at the rate of a large copy. `tiles`: 64 rows of weights per
program (with a gate, of each half). `even`: as many rows as give every multiprocessor the same, with so many columns
on their way at a time in so many stages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.kernels.few_linear import kernel
from tilemesh.kernels.few_linear.cost import parts_of, pieces_of
from tilemesh.kernels.launch import call

PRODUCTS = {
    "1.1 B, gate and first": (5632, 2048, True),
    "1.1 B, query, key and value": (2560, 2048, False),
    "8 B, gate and first": (14336, 4096, True),
    "8 B, query, key and value": (6144, 4096, False),
}
STAGES = {True: ((64, 4), (64, 0), (128, 0)), False: ((64, 0), (128, 0))}
"""Columns of a load and stages, by whether there is a gate; 0: as many stages as there is room for."""
REPLAYS = 30


def copy_bytes_per_s() -> float:
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes * 20 / replayed_s(lambda: [target.copy_(source) for _ in range(20)])


def replayed_s(body: Callable[[], object]) -> float:
    """Seconds of what is captured, the median of some replays."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    took = []
    for _ in range(REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        took.append(began.elapsed_time(ended) / 1e3)
    return sorted(took)[len(took) // 2]


def product_s(plan: Callable[..., Any], x: Tensor, weights: list[Tensor], y: Tensor, gated: bool) -> float:
    def chained() -> None:
        for weight in weights:
            call.compiled(plan, {"x": x, "w": weight, "y": y}, written=("y",), gated=gated, early=True)

    return replayed_s(chained) / len(weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json")
    asked = parser.parse_args()
    rate = copy_bytes_per_s()
    print(f"a copy moves {rate / 1e12:.3f} TB/s", flush=True)
    rows = []
    for name, (outputs, inputs, gated) in PRODUCTS.items():
        high, parts = outputs * (2 if gated else 1), parts_of(outputs, inputs, "silu" if gated else "none")
        x = torch.randn(asked.rows, inputs, device="cuda").to(torch.bfloat16)
        weights = [
            torch.empty(high, inputs, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
            for _ in range(2 + 400 * 2**20 // (high * inputs * 2))
        ]
        y = torch.empty(
            (parts, asked.rows, outputs), device="cuda", dtype=torch.bfloat16 if parts == 1 else torch.float32
        )
        found = {"limit": weights[0].nbytes / rate * 1e6}
        found["torch"] = replayed_s(lambda x=x, weights=weights: [functional.linear(x, w) for w in weights]) * 1e6
        found["torch"] /= len(weights)
        ways: dict[str, Callable[..., Any]] = {"tiles": kernel.tile_plan}
        for columns, stages in STAGES[gated]:
            even = partial(kernel.even_plan, pieces=pieces_of(outputs, parts), columns=columns, stages=stages)
            ways[f"even {columns}x{stages or 'all'}"] = even
        for way, plan in ways.items():
            try:
                found[way] = product_s(plan, x, weights, y, gated) * 1e6
            except Exception as error:  # too much shared memory, say
                print(f"{name}, {way}: {type(error).__name__}: {error}"[:300], flush=True)
        row = {"name": name, "rows": asked.rows, "us": found, "gpu": torch.cuda.get_device_name()}
        rows.append(row)
        print(f"{name}: " + ", ".join(f"{way} {us:.2f}" for way, us in found.items()), flush=True)
        if asked.json:
            with open(asked.json, "w") as out:
                out.writelines(json.dumps(row) + "\n" for row in rows)
        del weights


if __name__ == "__main__":
    main()
