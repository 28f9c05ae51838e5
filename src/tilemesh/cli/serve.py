"""`tilemesh serve`: what can be asked; `serve_run.py` answers when asked."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def serve(
    source: Annotated[str, typer.Argument(metavar="RUN|FOLDER", help="A run's folder, or a Hugging Face folder.")],
    port: Annotated[int, typer.Option(metavar="N", help="Where to listen; 0 takes any that is free.")] = 8000,
    host: Annotated[str, typer.Option(help="By default only this machine can connect.")] = "127.0.0.1",
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY|@FILE", help="Answer only who sends one of these; also from TILEMESH_API_KEYS."),
    ] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Let other machines ask without a key.")] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another name that this server is asked for under.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Pages that may ask from a browser, or *; else none.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Serve HTTPS with this certificate.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="The certificate's private key.")] = None,
    name: Annotated[str | None, typer.Option(help="What the model is called; by default as its folder.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp64; by default that of the weights.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    mesh: Annotated[str | None, typer.Option(metavar="tp=2,dp=2", help="Processes per matrix, and replicas.")] = None,
    pages: Annotated[int | None, typer.Option(metavar="N", help="Pages for keys and values.")] = None,
    memory: Annotated[float | None, typer.Option(metavar="0.9", help="Instead: the share of the free memory.")] = None,
    page_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens per page.")] = 16,
    context: Annotated[int | None, typer.Option(metavar="N", help="Longest sequence; by default the model's.")] = None,
    step_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens computed in one step.")] = 512,
    chunk_tokens: Annotated[int | None, typer.Option(metavar="N", help="Most tokens of one prompt in a step.")] = None,
    running: Annotated[int, typer.Option(metavar="N", help="Most requests at a time.")] = 64,
    waiting: Annotated[int, typer.Option(metavar="N", help="Most requests beside; more get status 429.")] = 1024,
    swap_pages: Annotated[int, typer.Option(metavar="N", help="Pages in CPU memory for preempted requests.")] = 0,
    speculate: Annotated[
        int, typer.Option(metavar="N", help="Guess up to N tokens per step from text that repeats.")
    ] = 0,
    draft: Annotated[
        str | None,
        typer.Option(metavar="RUN|FOLDER", help="A smaller model that guesses, up to --speculate tokens (4)."),
    ] = None,
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Answers do not depend on the batch, bit for bit.")
    ] = False,
    kv_cache: Annotated[
        str, typer.Option(metavar="int8|fp8", help="Keep keys and values in 8 bits: twice as many tokens as in 16.")
    ] = "",
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Compute every prompt anew.")] = False,
    generation_config: Annotated[
        bool, typer.Option("--generation-config", help="Take the folder's generation_config.json as defaults.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of requests that bring none.")] = 0,
    step: Annotated[int | None, typer.Option(metavar="N", help="Which checkpoint; the newest, if not given.")] = None,
) -> None:
    """Serve a model over HTTP to OpenAI's clients. Paths: /v1/completions, /v1/chat/completions, /metrics."""
    from tilemesh.cli.serve_run import ListenOptions, run

    listen = ListenOptions(
        host, port, tuple(api_key or ()), no_key, tuple(allow_host or ()), tuple(allow_origin or ()), tls_cert, tls_key
    )
    options = {
        "dtype": dtype, "device": device, "pages": pages, "memory": memory, "page_tokens": page_tokens,
        "context": context, "step_tokens": step_tokens, "chunk_tokens": chunk_tokens, "running": running,
        "waiting": waiting, "swap_pages": swap_pages, "share_prefixes": not no_prefix_cache,
        "invariant": invariant, "speculate": speculate, "draft": draft, "kv_cache": kv_cache,
        "seed": seed, "step": step, "prepare": True,
    }  # fmt: skip
    raise typer.Exit(run(source, listen, name, mesh, options, _tell, generation_config))


def _tell(text: str) -> None:
    print(f"tilemesh: {text}", file=sys.stderr, flush=True)
