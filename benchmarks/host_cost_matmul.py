"""Host cost and call time of one eager call at small shapes: ours against three ops and `a @ b` alone.

    python benchmarks/host_cost_matmul.py [MxNxK …]

Host cost: the loop's time with a queue that never fills (few calls, then a synchronise outside the clock). The first
line says machine, versions and command.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

import tilemesh as tm
from tilemesh.measure.machine import stamp


def host_costs_us(named: dict[str, Callable[[], object]], count: int = 200, repeats: int = 25) -> dict[str, float]:
    """Medians; the candidates take turns, because a host's speed changes from second to second."""
    found: dict[str, list[float]] = {name: [] for name in named}
    for call in named.values():
        for _ in range(20):
            call()
    for _ in range(repeats):
        for name, call in named.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                call()
            found[name].append((time.perf_counter() - began) / count * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in found.items()}


def calls(shape: str) -> dict[str, Callable[[], object]]:
    fused = tm.kernels.fused_matmul
    m, n, k = (int(side) for side in shape.split("x"))
    a, b, c = (torch.randn(s, device="cuda", dtype=torch.float16) for s in ((m, k), (k, n), (m, n)))
    out = torch.empty_like(c)
    kinds = ("auto", "pointer", "tma", "persistent", "pingpong", "split", "library")
    return {
        "eager three ops": lambda: torch.relu(a @ b + c),
        "addmm + relu_": lambda: torch.addmm(c, a, b).relu_(),
        "a @ b": lambda: a @ b,
        "empty": lambda: torch.empty_like(c),
        **{kind: lambda kind=kind: fused(a, b, c, implementation=kind) for kind in kinds},
        "auto, out=": lambda: fused(a, b, c, out=out),
    }


def main() -> None:
    print("# " + json.dumps(stamp()), flush=True)
    for shape in sys.argv[1:] or ["64x64x64", "512x512x512"]:
        for name, cost in host_costs_us(calls(shape)).items():
            print(f"{shape:16s} {name:18s} {cost:7.2f} us", flush=True)


if __name__ == "__main__":
    main()
