"""Call time of every registered operator on a GPU beside eager: tiny and at 16384x1024, forward and both passes.

    PYTHONPATH=src python benchmarks/operator_calls.py [--seconds 45] [operator …]

One JSON row per line. Call time is what a user's loop sees: the larger of host cost and kernel time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from tilemesh.bench.kernel.book import bench_of
from tilemesh.kernels import registry
from tilemesh.measure.gpu import call_timer
from tilemesh.measure.machine import stamp
from tilemesh.measure.row import Row
from tilemesh.measure.timing import compare

# By the number of sizes that a problem has.
SHAPES = {2: ("8x64", "16384x1024"), 3: ("8x64x64", "16384x1024x1024")}


def cases(names: list[str]) -> list[tuple[str, str, dict[str, str]]]:
    """Operator, shape and settings of each row."""
    found = []
    for name in names:
        form = registry.find(name).load("form")
        shapes = SHAPES.get(form.sizes.count("x") + 1, form.suite[:1])
        passes = [{"passes": "forward"}, {"passes": "both"}] if "passes" in form.settings else [{}]
        found += [(name, shape, settings) for shape in shapes for settings in passes]
    return found


def row(name: str, shape: str, settings: dict[str, str], seconds: float) -> Row:
    bench = bench_of(registry.find(name))
    problem = bench.form.problem(shape, settings)
    given = bench.arguments(problem, torch.device("cuda"), 0)

    def on_arguments(function: Callable[..., object]) -> Callable[[int], object]:
        timed = bench.timed(problem, function)
        return lambda _: timed(*given)

    candidates = {who: on_arguments(call) for who, call in bench.calls(problem).items() if who in ("ours", "eager")}
    result = compare(candidates, timer=call_timer(), repeats=30, seconds=seconds, on_error="raise")
    missing = {"predicted": "the cost model is of kernel time", "limit": "a limit is of kernel time"}
    return Row(
        name=bench.name, case={**bench.form.case(shape, settings), "time": "call"}, unit="s", predicted=None,
        measured=result["ours"], limit=None, peers={"eager": result["eager"]}, missing=missing, **stamp(),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", default=registry.names())
    parser.add_argument("--seconds", type=float, default=45.0, help="of readings, over all rows")
    given = parser.parse_args()
    wanted = cases(given.operators)
    for name, shape, settings in wanted:
        print(row(name, shape, settings, given.seconds / len(wanted)).to_json(), flush=True)


if __name__ == "__main__":
    main()
