"""`tilemesh bench kernel NAME`: any operator beside its peers on this GPU, as rows."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status

from tilemesh.cli.targets import check_targets


def bench_kernel(
    operator: Annotated[str, typer.Argument(help="Which operator, as in matmul or scale_shift.")] = "matmul",
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
    repeats: Annotated[int, typer.Option("--repeats", help="Interleaved rounds.")] = 30,
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
    """Time an operator against eager, torch.compile, Liger-Kernel and its own peers: kernel time and call time."""
    console = Console(stderr=json == "-", highlight=False)
    from tilemesh.cli.operators import given_settings
    from tilemesh.core.errors import UsageError
    from tilemesh.kernels import registry

    entry = registry.find(operator)
    form = entry.load("form")
    wanted = list(form.suite) if shapes == "suite" else [shape.strip() for shape in shapes.split(",")]
    asked = given_settings(settings, c=c, activation=activation, layout=layout)
    dtypes = [form.settings["dtype"].default] if dtype is None else [name.strip() for name in dtype.split(",")]
    each = [{**asked, "dtype": name} for name in dtypes] if dtype or "dtype" not in asked else [asked]
    for settled in each:
        for shape in wanted:
            form.problem(shape, settled)
    if repeats < 1:
        raise UsageError(f"--repeats {repeats}: expected at least 1")
    check_targets(json=json, chart=chart, html=html)
    if chart is not None:  # what cannot be written or read is told before minutes of measuring
        from tilemesh.report.picture import check_picture

        check_picture(chart)
    if tried is not None:
        from tilemesh.cli.bench_page import read_trials

        read_trials(tried)
    from tilemesh.bench.kernel.book import bench_of
    from tilemesh.bench.kernel.measure import bench_rows
    from tilemesh.measure.row import write_rows
    from tilemesh.measure.table import print_rows

    named = None if peers == "all" else [name.strip() for name in peers.split(",")]
    bench, rows = bench_of(entry), []
    for settled in each:
        with console.status("") as status:

            def show(done: int, total: int, words: str, status: Status = status) -> None:
                status.update(f"[{done + 1}/{total}] {words}")

            rows += bench_rows(bench, wanted, settled, compiled=compiled, peers=named, repeats=repeats, progress=show)
    print_rows(rows, console)
    if json is not None:
        write_rows(rows, json)
    if chart is not None:
        from tilemesh.cli.bench_page import bench_drawings
        from tilemesh.report.picture import write_picture

        write_picture(bench_drawings(rows), chart)
        console.print(f"chart: {chart}", soft_wrap=True)
    if html is not None:
        from tilemesh.cli.bench_page import write_bench_page

        write_bench_page(rows, html, tried=tried)
        console.print(f"page: {html}", soft_wrap=True)
