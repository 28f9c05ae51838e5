"""What `tilemesh bench compress` does: compresses by every recipe, prints rows, writes the run and its page."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from tilemesh.bench.compress.peers import PEERS
from tilemesh.bench.compress.run import (
    DEFAULT,
    CompressFindings,
    begin_compress_run,
    bench_recipes,
    keep_compress_run,
)
from tilemesh.bench.compress.text import open_source
from tilemesh.cli.report_run import make
from tilemesh.compress.recipe import read_recipe
from tilemesh.compress.shrink import check_recipe
from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.ranges import SEED, Range
from tilemesh.kernels.launch.tensors import read_device
from tilemesh.measure.row import CaseValue, Row, write_rows
from tilemesh.measure.table import print_rows
from tilemesh.model.transformer import Transformer
from tilemesh.runs.names import CONFIG
from tilemesh.serve.load import read_dtype


@dataclass(frozen=True)
class CompressBenchQuestion:
    """What the command line said, as it was said."""

    model: str
    recipes: str
    peers: str
    calibrate: int
    sequences: int
    seconds: float
    data: str | None
    seed: int
    device: str
    dtype: str | None
    run: str | None
    json: str | None


def _that_fit(model: Transformer, recipes: list[str], are_default: bool, say: Callable[[str], None]) -> list[str]:
    """All recipes that were asked for, each checked against the model's shapes before the first is measured; of the
    default ones those that fit."""
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


def answer(asked: CompressBenchQuestion) -> None:
    console = Console(stderr=asked.json == "-", highlight=False, markup=False)
    recipes = [name.strip() for name in asked.recipes.split(",") if name.strip()] or list(DEFAULT)
    for name in recipes:
        read_recipe(name)
        if recipes.count(name) > 1:
            raise UsageError(f"--recipes has {name} twice: name it once")
    peers = [name.strip() for name in asked.peers.split(",") if name.strip() not in ("", "none")]
    for name in peers:
        if name not in PEERS:
            raise unknown("peer", name, (*PEERS, "none"))
    for option, value in (("--calibrate", asked.calibrate), ("--sequences", asked.sequences)):
        Range(1, 100_000).check(option, value, whole=True)
    Range(0, 1e4, above=True).check("--seconds", asked.seconds)
    SEED.check("--seed", asked.seed, whole=True)
    if asked.run is not None and (Path(asked.run) / CONFIG).exists():
        raise UsageError(f"--run {asked.run} has a run already: name another folder")
    device, dtype = read_device(asked.device), read_dtype(asked.dtype) or torch.float32

    def say(text: str) -> None:
        print(f"tilemesh: {text}", file=sys.stderr, flush=True)

    findings = CompressFindings()
    run: Path | None = None

    def keep(rows: Sequence[Row]) -> None:
        """A long run that is ended early leaves what it has."""
        if asked.json not in (None, "-"):
            write_rows(rows, asked.json)
        if run is not None:
            keep_compress_run(run, settings, findings)

    with open_source(asked.model, asked.data, None, say) as source:
        model = source.model.to(device)
        recipes = _that_fit(model, recipes, asked.recipes.strip(" ,") == "", say)
        text = source.text(asked.calibrate, asked.sequences, asked.seed, say)
        case: dict[str, CaseValue] = {"model": source.name, "sequences": len(text[1]), "calibrated": asked.calibrate}
        if asked.dtype is not None:
            case["dtype"] = asked.dtype
        settings = {**case, "recipes": recipes, "seed": asked.seed}
        if asked.run is not None:
            run = begin_compress_run(asked.run, settings)
            say(f"rows are kept in {run} after each recipe")
        try:
            with _terminated_like_interrupted():
                bench_recipes(model, recipes, text, case, peers, asked.seconds, say, dtype, keep, findings)
        except KeyboardInterrupt:
            _show(findings, run, asked.json, console)
            raise KeyboardInterrupt(f"after {len(findings.points)} of {len(recipes)} recipes") from None
    told = f"{len(findings.failed)} of {len(recipes)} recipes failed: {', '.join(findings.failed)}; see the lines above"
    if run is not None:
        keep_compress_run(run, settings, findings)
    _show(findings, run, asked.json, console)
    if findings.failed:
        raise RunError(told)


def _show(findings: CompressFindings, run: Path | None, json: str | None, console: Console) -> None:
    """The rows, and the page of the run."""
    if findings.rows:
        print_rows(findings.rows, console)
        if run is not None:
            (page,) = make([str(run)], None)
            console.print(f"page: {page}", soft_wrap=True)
        if json == "-":
            write_rows(findings.rows, json)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """A scheduler's or `timeout`'s SIGTERM ends the bench as Ctrl-C does: with what there is."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
