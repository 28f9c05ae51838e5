"""`tilemesh bench kernel NAME`: any operator beside its peers on this GPU, as rows."""

from __future__ import annotations

from typing import Annotated

import typer

from tilemesh.cli.targets import check_targets


def bench_kernel(
    operators: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPERATOR]...", help="As in matmul or softmax; `all` for all.", show_default="matmul"),
    ] = None,
    shapes: Annotated[
        str, typer.Option("--shapes", help="As in 2048x2048x2048, several separated by commas; `suite` for all.")
    ] = "suite",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float16, bfloat16 or float32; several by commas.")
    ] = None,
    c: Annotated[str | None, typer.Option("--c", help="What a matmul's C is: full, row, column or none.")] = None,
    activation: Annotated[
        str | None, typer.Option("--activation", help="none, relu, gelu, gelu_tanh, silu, squared_relu.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help="Of a matmul: nn, nt, tn or tt, A and B as written or transposed.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any setting of the operator's problems.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Also time torch.compile (minutes).")] = True,
    peers: Annotated[
        str, typer.Option("--peers", metavar="NAMES", help="Which to time: eager, compile, liger, cuDNN, …; or all.")
    ] = "all",
    times: Annotated[str, typer.Option("--times", metavar="KINDS", help="kernel, call, or both.")] = "kernel,call",
    repeats: Annotated[int, typer.Option("--repeats", help="Interleaved rounds.")] = 30,
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="N", help="Begin no further shape after so many.")
    ] = None,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the rows; - for stdout.")] = None,
    chart: Annotated[
        str | None, typer.Option("--chart", metavar="FILE", help="Draw rates by shape, and the roofline: .svg or .png.")
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Charts, peers and rows as a page.")
    ] = None,
    tried: Annotated[
        str | None, typer.Option("--tried", metavar="FILE", help="What `tune --json` wrote: a heat map for --html.")
    ] = None,
) -> None:
    """Time operators beside PyTorch's and others'. Eager, torch.compile, Liger-Kernel; kernel time and call time."""
    from rich.console import Console

    from tilemesh.bench.kernel.cases import KernelCase, cases_of
    from tilemesh.cli.operators import given_settings
    from tilemesh.core.errors import UsageError

    console = Console(stderr=json == "-", highlight=False)
    wanted = [] if shapes == "suite" else [shape.strip() for shape in shapes.split(",")]
    asked = given_settings(settings, c=c, activation=activation, layout=layout)
    cases = cases_of(operators or ["matmul"], wanted, asked, dtype or "")
    if repeats < 1:
        raise UsageError(f"--repeats {repeats}: expected at least 1")
    check_targets(json=json, chart=chart, html=html)
    if chart is not None:  # what cannot be written or read is told before minutes of measuring
        from tilemesh.report.picture import check_picture

        check_picture(chart)
    if tried is not None:
        from tilemesh.cli.bench_page import read_trials

        read_trials(tried)
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
            cases, compiled=compiled, peers=None if peers == "all" else _named(peers), times=_named(times),
            repeats=repeats, seconds=seconds, progress=show, keep=keep,
        )  # fmt: skip
    print_rows(rows, console)
    for words, why in without.items():
        console.print(f"not measured: {words}: {why}", soft_wrap=True, markup=False)
    write_found(rows, console, json=json, chart=chart, html=html, tried=tried)


def _named(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]
