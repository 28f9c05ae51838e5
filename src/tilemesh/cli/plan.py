"""`tilemesh plan`: what can be asked. The answer is `plan_run.py`'s, loaded when it is asked for."""

from __future__ import annotations

from typing import Annotated

import typer


def plan(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A preset (llama-3-70b, ...) or a TOML file.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NxGPU", help="64xh100; 4x8xa100: 4 nodes of 8; local, 4xlocal: this machine, measured."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="FILE.toml", help="A GPU of your own, which --cluster then calls by its name.")
    ] = None,
    batch_tokens: Annotated[str | None, typer.Option(metavar="N", help="Tokens in a step, about: 4M.")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", help="Sequences in a step, exactly.")] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens in a sequence; the model's, if not given.")
    ] = None,
    fix: Annotated[list[str] | None, typer.Option(metavar="A=B,...", help="Pin: tp=8,pp=4,recompute=none,...")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="A=B,...", help="model.layers=105,...")] = None,
    code: Annotated[
        str | None,
        typer.Option("--code", metavar="NAME", help="What runs it: fused (Megatron's), compiled or eager (torch)."),
    ] = None,
    headroom: Annotated[
        str | None, typer.Option(metavar="N%", help="Memory of each device to leave free; 5% if not given.")
    ] = None,
    save: Annotated[str | None, typer.Option(metavar="PLAN.toml", help="Write the best plan.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the arithmetic: formulas and numbers.")] = False,
    grade: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="Compare a finished run with its prediction; may repeat.")
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Every figure by name; - for stdout.")] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the trade-off and the pipeline.")] = None,
    draw: Annotated[
        str | None,
        typer.Option(metavar="SCHEDULE", help="Draw a pipeline schedule: zb-v, 1f1b, ..., search, or a CSV file."),
    ] = None,
    stages: Annotated[int | None, typer.Option(metavar="N", help="Of the drawing: ranks. [default: 4]")] = None,
    microbatches: Annotated[int | None, typer.Option(metavar="N", help="Of the drawing. [default: 8]")] = None,
    chunks: Annotated[
        int | None, typer.Option(metavar="N", help="Of the drawing: chunks per rank, where it is open.")
    ] = None,
    slices: Annotated[
        int | None, typer.Option(metavar="N", help="Of terapipe: slices of a sequence, their lengths found for it.")
    ] = None,
    times: Annotated[
        str | None,
        typer.Option(metavar="F,I,W[,T]", help="Seconds of the passes and of a transfer. [default: 1,1,1,0]"),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Of search: the most activations a rank keeps, in microbatches of its part of the model. "
            "[default: stages]",
        ),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Plan for serving instead of training.")] = False,
    rate: Annotated[
        float | None, typer.Option(metavar="N", help="Of serving: requests per second. [default: 1]")
    ] = None,
    prompt: Annotated[int | None, typer.Option(metavar="N", help="Of serving: prompt tokens. [default: 512]")] = None,
    output: Annotated[int | None, typer.Option(metavar="N", help="Of serving: output tokens. [default: 128]")] = None,
    goal: Annotated[
        str | None, typer.Option(metavar="ttft=1,itl=0.05", help="Of serving: what is promised, in seconds.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of serving: bf16, fp32. [default: bf16, on a CPU fp32]")] = None,
    step_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Of serving: most tokens in a step. [default: 512]")
    ] = None,
    price: Annotated[float | None, typer.Option(metavar="N", help="Of serving: a device's price per hour.")] = None,
    power: Annotated[float | None, typer.Option(metavar="W", help="Of serving: a device's power.")] = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Write the drawing as an SVG.")] = None,
    csv: Annotated[str | None, typer.Option(metavar="FILE", help="Write its actions in torch's format.")] = None,
) -> None:
    """Predict step time and memory; choose a layout for a cluster. `--explain` says why."""
    # Late: `tilemesh --help` needs none of it.
    from tilemesh.cli.plan_draw import DrawQuestion, draw_step, require_draw
    from tilemesh.cli.plan_run import PlanQuestion, run
    from tilemesh.cli.plan_serve import ServePlanQuestion, refuse
    from tilemesh.cli.plan_serve import run as run_serving
    from tilemesh.core.errors import UsageError

    drawn = DrawQuestion(draw or "", stages, microbatches, chunks, slices, times, memory, svg, csv, json, html)
    others: dict[str, object] = {"MODEL": model, "--cluster": cluster, "--batch": batch, "--batch-tokens": batch_tokens}
    others |= {"--context": context, "--fix": fix, "--set": sets, "--code": code, "--save": save, "--grade": grade}
    others |= {"--gpu": gpu}
    if draw is not None:
        draw_step(drawn, [name for name, value in (others | {"--explain": explain or None}).items() if value])
        return
    require_draw(drawn)
    serving = {"--rate": rate, "--prompt": prompt, "--output": output, "--goal": goal, "--dtype": dtype}
    serving |= {"--step-tokens": step_tokens, "--price": price, "--power": power}
    if serve:
        others |= {"--explain": explain or None, "--html": html}
        refuse(
            [name for name, value in others.items() if value and name not in ("MODEL", "--cluster", "--gpu", "--set")]
        )
        asked_serving = ServePlanQuestion(
            model, cluster, gpu, tuple(sets or ()), 1.0 if rate is None else rate, 512 if prompt is None else prompt,
            128 if output is None else output, goal, dtype, 512 if step_tokens is None else step_tokens, headroom,
            price, power, json,
        )  # fmt: skip
        run_serving(asked_serving)
        return
    if given := [name for name, value in serving.items() if value is not None]:
        raise UsageError(f"{given[0]} is about serving: add --serve")

    asked = PlanQuestion(
        model=model,
        cluster=cluster,
        gpu=gpu,
        batch_tokens=batch_tokens,
        batch=batch,
        context=context,
        fix=tuple(fix or ()),
        sets=tuple(sets or ()),
        code=code,
        headroom=headroom,
        save=save,
        explain=explain,
        grade=tuple(grade or ()),
        json=json,
        html=html,
    )
    run(asked)
