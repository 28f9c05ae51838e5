"""Compare compression recipes beside peers. Held-out loss, bytes, a forward pass and a decoded token."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tilemesh.cli.next_command import after_recipes
from tilemesh.cli.output import Output, interrupt, on_signals, show, tell
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.options import ROWS, Commas, Count, Known, OutFile, OutFolder, Seconds, Seed, Words, argument, option
from tilemesh.runs.names import CONFIG

if TYPE_CHECKING:
    from tilemesh.bench.compress.run import CompressFindings
    from tilemesh.measure.row import CaseValue, Row
    from tilemesh.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class CompressBenchOptions:
    model: str = argument(..., "A run, a Hugging Face folder, or a shape with random weights.", "RUN|FOLDER")
    recipes: Words = option((), "Names or TOML files; by default fifteen.", "A,B,...")
    peers: Annotated[tuple[str, ...], Commas("none"), Known("peer", "tilemesh.bench.compress.peers:PEERS")] = option(
        ("torchao", "bitsandbytes"), "torchao, bitsandbytes; or none.", "A,B"
    )
    calibrate: Count = option(64, "Sequences of text that recipes look at.", "N")
    sequences: Count = option(32, "Held-out sequences that models are judged by.", "N")
    seconds: Seconds = option(3.0, "For the times of each recipe.", "S")
    data: str | None = option(None, "The text, where not the run's own.", "SOURCE")
    seed: Seed = option(0, "Of the choice of calibration text.")
    device: str = option("cpu", "cpu, or cuda.")
    dtype: str | None = option(None, "What is timed and counted in bytes: fp32 or bf16; losses are fp32's.")
    run: OutFolder | None = option(None, "Write a run with its page there.", "FOLDER")
    json: OutFile | None = option(None, ROWS, "FILE")


def compress(options: CompressBenchOptions) -> Output:
    import torch

    from tilemesh.bench.compress.run import (
        DEFAULT,
        CompressFindings,
        begin_compress_run,
        bench_recipes,
        keep_compress_run,
    )
    from tilemesh.bench.compress.text import open_source, random_source
    from tilemesh.compress.recipe import read_recipe
    from tilemesh.kernels.launch.tensors import read_device
    from tilemesh.measure.row import write_rows
    from tilemesh.model.config import PRESETS
    from tilemesh.serve.load import read_dtype

    recipes = list(options.recipes or DEFAULT)
    for name in recipes:
        read_recipe(name)
        if recipes.count(name) > 1:
            raise UsageError(f"--recipes has {name} twice: name it once")
    if options.run is not None and (Path(options.run) / CONFIG).exists():
        raise UsageError(f"--run {options.run} has a run already: name another folder")
    device, dtype = read_device(options.device), read_dtype(options.dtype) or torch.float32
    findings = CompressFindings()
    run: Path | None = None

    def keep(rows: Sequence[Row]) -> None:
        """A long run that is ended early leaves what it has."""
        if options.json not in (None, "-"):
            write_rows(rows, options.json)
        if run is not None:
            keep_compress_run(run, settings, findings)

    is_shape = options.model in PRESETS and not Path(options.model).exists()
    opened = random_source(options.model, options.data, device) if is_shape else None
    with opened or open_source(options.model, options.data, None, tell) as source:
        model = source.model.to(device)
        recipes = _that_fit(model, recipes, not options.recipes, tell)
        text = source.text(options.calibrate, options.sequences, options.seed, tell)
        case: dict[str, CaseValue] = {"model": source.name, "sequences": len(text[1]), "calibrated": options.calibrate}
        if options.dtype is not None:
            case["dtype"] = options.dtype
        settings = {**case, "recipes": recipes, "seed": options.seed}
        if options.run is not None:
            run = begin_compress_run(options.run, settings)
            tell(f"rows are kept in {run} after each recipe")
        try:
            with on_signals(interrupt, signal.SIGTERM):
                bench_recipes(model, recipes, text, case, options.peers, options.seconds, tell, dtype, keep, findings)
        except KeyboardInterrupt:
            show(_output(options.model, findings, run), options)
            raise KeyboardInterrupt(f"after {len(findings.points)} of {len(recipes)} recipes") from None
    if run is not None:
        keep_compress_run(run, settings, findings)
    if failed := findings.failed:
        show(_output(options.model, findings, run), options)
        raise RunError(f"{len(failed)} of {len(recipes)} recipes failed: {', '.join(failed)}; see the lines above")
    return _output(options.model, findings, run)


def _that_fit(model: Transformer, recipes: list[str], are_default: bool, say: Callable[[str], None]) -> list[str]:
    """All recipes that were asked for, each checked against the model's shapes before the first is measured; of the
    default ones those that fit."""
    from tilemesh.compress.shrink import check_recipe

    kept = []
    for name in recipes:
        try:
            check_recipe(model, name)
            kept.append(name)
        except UsageError as error:
            if not are_default:
                raise UsageError(f"{name}: {error}") from None
            say(f"{name} is left out: {error}")
    if not kept:
        raise UsageError("none of the default recipes fits this model: name some with --recipes, such as int8")
    return kept


def _output(model: str, findings: CompressFindings, run: Path | None) -> Output:
    """The rows, and the page of the run."""
    from tilemesh.cli.pages import write_pages

    pages = write_pages([str(run)], None) if findings.rows and run is not None else []
    after = after_recipes(model, findings.points) if findings.points else None
    return Output([findings.rows, *(f"page: {page}" for page in pages)], findings.rows, next=after)
