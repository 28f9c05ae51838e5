"""`tilemesh bench kernel`: the fused matmul beside its peers on this GPU, as rows."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status

from tilemesh.cli.targets import check_targets


def bench_kernel(
    operator: Annotated[str, typer.Argument(help="Which operator, as in matmul.")] = "matmul",
    shapes: Annotated[
        str, typer.Option("--shapes", help="MxNxK, several separated by commas; `suite` for all.")
    ] = "suite",
    dtype: Annotated[str, typer.Option("--dtype", help="float16, bfloat16 or float32; several by commas.")] = "float16",
    c: Annotated[str, typer.Option("--c", help="What C is: full, row, column or none.")] = "full",
    activation: Annotated[
        str, typer.Option("--activation", help="none, relu, gelu, gelu_tanh, silu, squared_relu.")
    ] = "relu",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Also time torch.compile (minutes).")] = True,
    repeats: Annotated[int, typer.Option("--repeats", help="Interleaved rounds.")] = 30,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the rows; - for stdout.")] = None,
    chart: Annotated[
        str | None, typer.Option("--chart", metavar="FILE", help="Draw the roofline: .svg or .png.")
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Roofline, peers and rows as a page.")
    ] = None,
    tried: Annotated[
        str | None, typer.Option("--tried", metavar="FILE", help="What `tune --json` wrote: a heat map for --html.")
    ] = None,
) -> None:
    """Time the fused matmul against eager, addmm, torch.compile and cuBLASLt: kernel time and call time."""
    console = Console(stderr=json == "-", highlight=False)
    from tilemesh.core.errors import UsageError, unknown
    from tilemesh.kernels import registry
    from tilemesh.kernels.activations.names import ACTIVATIONS
    from tilemesh.kernels.matmul.bench import SUITE, parse_shape
    from tilemesh.kernels.matmul.problem import C_KINDS, DTYPE_BYTES

    bench = registry.find(operator).load("bench")
    wanted = list(SUITE) if shapes == "suite" else [shape.strip() for shape in shapes.split(",")]
    dtypes = [name.strip() for name in dtype.split(",")]
    known_values = [
        ("C kind", c, C_KINDS),
        ("activation", activation, ACTIVATIONS),
    ]
    for kind, given, known in [*known_values, *(("dtype", name, tuple(DTYPE_BYTES)) for name in dtypes)]:
        if given not in known:
            raise unknown(kind, given, known)
    for shape in wanted:
        parse_shape(shape)
    if repeats < 1:
        raise UsageError(f"--repeats {repeats}: expected at least 1")
    check_targets(json=json, chart=chart, html=html)
    if chart is not None:  # what cannot be written or read is told before minutes of measuring
        from tilemesh.kernels.matmul.chart import check_path

        check_path(chart)
    if tried is not None:
        from tilemesh.cli.bench_page import read_trials

        read_trials(tried)
    from tilemesh.measure.row import write_rows
    from tilemesh.measure.table import print_rows

    rows = []
    for name in dtypes:
        with console.status("") as status:

            def show(done: int, total: int, words: str, status: Status = status) -> None:
                status.update(f"[{done + 1}/{total}] {words}")

            rows += bench(
                wanted, dtype=name, c_kind=c, activation=activation, compiled=compiled, repeats=repeats, progress=show
            )
    print_rows(rows, console)
    if json is not None:
        write_rows(rows, json)
    if chart is not None:
        from tilemesh.kernels.matmul.chart import draw

        draw(rows, chart)
        console.print(f"roofline: {chart}", soft_wrap=True)
    if html is not None:
        from tilemesh.cli.bench_page import write_bench_page

        write_bench_page(rows, html, tried=tried)
        console.print(f"page: {html}", soft_wrap=True)
