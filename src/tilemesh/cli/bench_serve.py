"""`tilemesh bench serve`: throughput and latency of our engine beside peers; what can be asked."""

from __future__ import annotations

from typing import Annotated

import typer

from tilemesh.cli.targets import check_targets


def bench_serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run, a Hugging Face folder, or a shape with random weights.")
    ] = "llama-27m",
    requests: Annotated[int, typer.Option(metavar="N", help="How many, in each load.")] = 16,
    prompt: Annotated[str, typer.Option(metavar="N[-M]", help="Tokens of a prompt.")] = "16-128",
    output: Annotated[str, typer.Option(metavar="N[-M]", help="Tokens of an answer.")] = "32",
    rates: Annotated[str, typer.Option(metavar="A,B,...", help="Online: requests per second, one load each.")] = "",
    trace: Annotated[str | None, typer.Option(metavar="FILE", help="Online: requests of a file instead.")] = None,
    url: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Load this OpenAI-compatible server on loopback instead.")
    ] = None,
    goal: Annotated[
        str | None, typer.Option(metavar="ttft=1,itl=0.1", help="What a request is promised, in seconds.")
    ] = None,
    steps: Annotated[str, typer.Option(metavar="A,B,...", help="Also a decode step of so many sequences.")] = "",
    step_length: Annotated[int, typer.Option(metavar="N", help="Tokens of each of these.")] = 1024,
    peers: Annotated[
        str, typer.Option(help="transformers-static, transformers-continuous, openvino-genai, ctranslate2; or none.")
    ] = "",
    blocks: Annotated[int, typer.Option(metavar="N", help="Offline: how many turns each gets; 0: no offline.")] = 3,
    running: Annotated[int, typer.Option(metavar="N", help="Most requests at a time.")] = 64,
    step_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens computed in one step.")] = 512,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    predict: Annotated[
        str,
        typer.Option(help="fitted: to a few steps of this engine (CPU); machine: from its calibration or datasheet."),
    ] = "fitted",
    seed: Annotated[int, typer.Option(help="Of the load and of random weights.")] = 0,
    run: Annotated[str | None, typer.Option(metavar="FOLDER", help="Write a run with its page there.")] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="The rows, one object per line; - for stdout.")
    ] = None,
) -> None:
    """Time answers to random requests beside other engines. All at once, or at random times; predicted before, with
    limits."""
    from tilemesh.cli.bench_serve_run import ServeQuestion, answer

    check_targets(json=json)
    answer(
        ServeQuestion(
            model=model,
            requests=requests,
            prompt=prompt,
            output=output,
            rates=rates,
            trace=trace,
            goal=goal,
            steps=steps,
            step_length=step_length,
            peers=peers,
            blocks=blocks,
            running=running,
            step_tokens=step_tokens,
            dtype=dtype,
            device=device,
            predict=predict,
            seed=seed,
            run=run,
            url=url,
            json=json,
        )
    )
