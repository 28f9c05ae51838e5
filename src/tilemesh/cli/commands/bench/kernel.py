"""Time operators beside PyTorch's and others'. Eager, torch.compile, Liger-Kernel; kernel time and call time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tilemesh.cli.next_command import again
from tilemesh.cli.operators import problem_settings
from tilemesh.cli.output import Block, Output, console_beside, table_of
from tilemesh.core.advice import NextCommand
from tilemesh.core.errors import UsageError
from tilemesh.core.options import ROWS, TURN, Commas, Count, OutFile, OutPicture, Words, argument, option
from tilemesh.core.ranges import Range
from tilemesh.core.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from tilemesh.measure.row import Row


@dataclass(frozen=True, kw_only=True)
class KernelBenchOptions:
    operators: tuple[str, ...] = argument((), "As in matmul or softmax; `all` for all.", "[OPERATOR]...", show="matmul")
    shapes: Annotated[tuple[str, ...], Commas("suite")] = option(
        (), "As in 2048x2048x2048; `suite` for all.", "A,B,..."
    )
    drawn: Count | None = option(None, "So many random problems of each operator that nobody tuned.", "N")
    skip: Annotated[int, Range(0)] = option(0, "The first of the drawn problems: to go on after them.", "N")
    on: str | None = option(None, "Time nothing: check by the interpreter, count and predict for this GPU.", "GPU")
    dtype: str | None = option(None, "float16, bfloat16, float32.", "A,B,...")
    c: str | None = option(None, "What a matmul's C is: full, row, column or none.")
    activation: str | None = option(None, "none, relu, gelu, gelu_tanh, silu, squared_relu.")
    layout: str | None = option(None, "Of a matmul: nn, nt, tn or tt, A and B as written or transposed.")
    settings: tuple[str, ...] = option((), "Any setting of the operator's problems.", "NAME=VALUE", flag="--set")
    compiled: bool = option(True, "Also time torch.compile (minutes).", flag="--compile/--no-compile")
    peers: Annotated[tuple[str, ...], Commas("all")] = option(
        (), "Which to time: eager, compile, liger, cuDNN, …; or all.", "A,B,..."
    )
    times: Words = option(("kernel", "call"), "kernel, call, or both.", "A,B")
    repeats: Annotated[int, Range(1)] = option(30, "Interleaved rounds.")
    seconds: float | None = option(None, "Begin no further shape after so many.", "N")
    turn: OutFile | None = option(None, TURN, "FILE")
    json: OutFile | None = option(None, ROWS, "FILE")
    chart: OutPicture | None = option(None, "Draw rates by shape, and the roofline: .svg or .png.", "FILE")
    html: OutFile | None = option(None, "Charts, peers and rows as a page.", "FILE")
    tried: str | None = option(None, "What `tune --json` wrote: a heat map for --html.", "FILE")


def kernel(options: KernelBenchOptions) -> Output:
    from tilemesh.bench.kernel.cases import KernelCase, cases_of, drawn_cases

    console = console_beside(options.json)
    settings = problem_settings(options, "c", "activation", "layout")
    if options.drawn is None:
        cases = cases_of(options.operators or ["matmul"], options.shapes, settings, options.dtype or "")
    elif settings or options.dtype or options.shapes:
        raise UsageError("--drawn draws shapes, layouts and dtypes: leave settings out")
    else:
        cases = drawn_cases(options.operators or ["matmul"], options.drawn, options.skip)
    from tilemesh.bench.harness import KeptRows, TimingTurn
    from tilemesh.bench.kernel.run import measure_cases
    from tilemesh.cli.pages import bench_drawings, bench_page, read_trials
    from tilemesh.measure.machine import usable_gpus

    if options.tried is not None:  # what cannot be read is told before minutes of measuring
        read_trials(options.tried)
    with console.status("") as status:

        def show(done: int, case: KernelCase) -> None:
            status.update(f"[{done + 1}/{len(cases)}] {case.words}")

        if options.on is not None:
            from tilemesh.bench.kernel.counted import counted_rows

            rows, without = counted_rows(cases, options.on, progress=show, rows=KeptRows(options.json))
            return Output([*_counted(rows), *(f"wrong: {words}: {why}" for words, why in without.items())], rows)
        rows, without = measure_cases(
            cases, compiled=options.compiled, peers=options.peers or None, times=options.times,
            repeats=options.repeats, seconds=options.seconds, progress=show, rows=KeptRows(options.json),
            turn=None if options.turn is None else TimingTurn(options.turn),
        )  # fmt: skip
    text: list[Block] = [rows, *(f"not measured: {words}: {why}" for words, why in without.items())]
    files: dict[str, Any] = {"chart": lambda: bench_drawings(rows), "html": lambda: bench_page(rows, options.tried)}
    shapes = [str(row.case["shape"]) for row in rows if row.name == "matmul"]
    after = NextCommand(f"tune {shapes[0]}") if shapes and usable_gpus() else again("--html kernels.html")
    return Output(text, rows, files, next=after)


def _counted(rows: Sequence[Row]) -> Iterator[Block]:
    """Rows of a GPU that is not here, with what was counted."""
    from tilemesh.bench.kernel.counted import COUNTED

    lines = [
        {
            "what": row.name, "case": " ".join(str(value) for name, value in row.case.items() if name not in COUNTED),
            "right at": str(row.case["checked"]), "bytes": format_bytes(float(row.case["bytes"] or 0)),
            "FLOPs": format_count(float(row.case["flops"] or 0)), "predicted": format_seconds(row.predicted or 0.0),
            "limit": format_seconds(row.limit or 0.0),
        }
        for row in rows
    ]  # fmt: skip
    yield table_of(lines, left=("what", "case"))
    yield f"for {rows[0].case['on']} by its datasheet; right at: checked by Triton's interpreter; nothing was timed"
