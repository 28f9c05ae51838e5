"""Both passes of `fused_matmul` beside eager and torch.compile on rows that start anywhere, kernel time and call time.

    PYTHONPATH=src python benchmarks/backward_matmul.py ROWS.jsonl [MxNxK ...]

The backward pass is two products with a turned operand each, of unaligned rows as the forward's are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tilemesh.bench.kernel.matmul import BENCH
from tilemesh.kernels.operator_bench import EAGER, OURS, both_ways
from tilemesh.measure.gpu import KernelTimer, call_timer, rotating_sets
from tilemesh.measure.machine import stamp
from tilemesh.measure.row import Row, write_rows
from tilemesh.measure.table import print_rows
from tilemesh.measure.timing import compare

SHAPES = ("2049x2047x2051", "777x1333x2049", "4097x4095x4099")


def main() -> None:
    device, rows = torch.device("cuda", torch.cuda.current_device()), []
    for shape in sys.argv[2:] or SHAPES:
        problem = BENCH.form.problem(shape, {"dtype": "bfloat16"})
        sets = rotating_sets(lambda seed, p=problem: BENCH.arguments(p, device, seed), BENCH.bytes_held(problem))
        calls = BENCH.calls(problem)
        torch._dynamo.reset()
        chosen = {OURS: calls[OURS], EAGER: calls[EAGER], "compile": torch.compile(calls[EAGER], dynamic=False)}
        timed = {name: over(both_ways(function, ()), sets) for name, function in chosen.items()}
        for figure, timer in {"kernel": KernelTimer(), "call": call_timer()}.items():
            result = compare(timed, timer=timer, repeats=10, sets=len(sets), seconds=3.0)
            peers = {name: sample for name, sample in result.items() if name != OURS}
            case = {**BENCH.form.case(shape, {"dtype": "bfloat16"}), "passes": "both", "time": figure}
            without = dict.fromkeys(("predicted", "limit"), "computed for the forward pass alone")
            rows.append(
                Row(name="fused_matmul", case=case, unit="s", predicted=None, measured=result[OURS], limit=None,
                    peers=peers, missing={**without, **result.missing}, **stamp())
            )  # fmt: skip
            write_rows(rows, sys.argv[1])
    print_rows(rows)


def over(function: Callable[..., Any], sets: list[tuple[Any, ...]]) -> Callable[[int], Any]:
    return lambda index: function(*sets[index])


if __name__ == "__main__":
    main()
