"""Time operators beside PyTorch's and others'. Eager, torch.compile, Liger-Kernel; kernel time and call time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tilemesh.cli.operators import given_settings
from tilemesh.cli.output import console_beside, words_of
from tilemesh.core.options import ROWS, OutFile, argument, option
from tilemesh.core.ranges import Range


@dataclass(frozen=True, kw_only=True)
class KernelBenchOptions:
    operators: tuple[str, ...] = argument((), "As in matmul or softmax; `all` for all.", "[OPERATOR]...", show="matmul")
    shapes: str = option("suite", "As in 2048x2048x2048; `suite` for all.", "A,B,...")
    dtype: str | None = option(None, "float16, bfloat16, float32.", "A,B,...")
    c: str | None = option(None, "What a matmul's C is: full, row, column or none.")
    activation: str | None = option(None, "none, relu, gelu, gelu_tanh, silu, squared_relu.")
    layout: str | None = option(None, "Of a matmul: nn, nt, tn or tt, A and B as written or transposed.")
    settings: tuple[str, ...] = option((), "Any setting of the operator's problems.", "NAME=VALUE", flag="--set")
    compiled: bool = option(True, "Also time torch.compile (minutes).", flag="--compile/--no-compile")
    peers: str = option("all", "Which to time: eager, compile, liger, cuDNN, …; or all.", "A,B,...")
    times: str = option("kernel,call", "kernel, call, or both.", "A,B")
    repeats: Annotated[int, Range(1)] = option(30, "Interleaved rounds.")
    seconds: float | None = option(None, "Begin no further shape after so many.", "N")
    json: OutFile | None = option(None, ROWS, "FILE")
    chart: OutFile | None = option(None, "Draw rates by shape, and the roofline: .svg or .png.", "FILE")
    html: OutFile | None = option(None, "Charts, peers and rows as a page.", "FILE")
    tried: str | None = option(None, "What `tune --json` wrote: a heat map for --html.", "FILE")


def kernel(options: KernelBenchOptions) -> None:
    from tilemesh.bench.kernel.cases import KernelCase, cases_of

    console, json = console_beside(options.json, markup=True), options.json
    shapes = [] if options.shapes == "suite" else [shape.strip() for shape in options.shapes.split(",")]
    settings = given_settings(options, "c", "activation", "layout")
    cases = cases_of(options.operators or ["matmul"], shapes, settings, options.dtype or "")
    if options.chart is not None:  # what cannot be written or read is told before minutes of measuring
        from tilemesh.report.picture import check_picture

        check_picture(options.chart)
    if options.tried is not None:
        from tilemesh.cli.bench_page import read_trials

        read_trials(options.tried)
    from tilemesh.bench.kernel.run import measure_cases
    from tilemesh.cli.bench_page import write_found
    from tilemesh.measure.row import Row, write_rows
    from tilemesh.measure.table import print_rows

    with console.status("") as status:

        def show(done: int, case: KernelCase) -> None:
            status.update(f"[{done + 1}/{len(cases)}] {case.words}")

        def keep(rows: list[Row]) -> None:
            if json not in (None, "-"):  # an interrupted run keeps what it has
                write_rows(rows, json)

        rows, without = measure_cases(
            cases,
            compiled=options.compiled,
            peers=None if options.peers == "all" else words_of(options.peers),
            times=words_of(options.times),
            repeats=options.repeats,
            seconds=options.seconds,
            progress=show,
            keep=keep,
        )
    print_rows(rows, console)
    for words, why in without.items():
        console.print(f"not measured: {words}: {why}", soft_wrap=True, markup=False)
    write_found(rows, console, json=json, chart=options.chart, html=options.html, tried=options.tried)
