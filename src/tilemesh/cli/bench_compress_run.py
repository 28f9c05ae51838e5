"""What `tilemesh bench compress` does: compresses by every recipe, prints rows, writes the run and its page."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console

from tilemesh.bench.compress.peers import PEERS
from tilemesh.bench.compress.run import DEFAULT, bench_recipes, write_compress_run
from tilemesh.bench.compress.text import open_source
from tilemesh.cli.report_run import make
from tilemesh.compress.recipe import read_recipe
from tilemesh.core.errors import unknown
from tilemesh.core.ranges import SEED, Range
from tilemesh.measure.row import CaseValue, write_rows
from tilemesh.measure.table import print_rows


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
    run: str | None
    json: str | None


def answer(asked: CompressBenchQuestion) -> None:
    console = Console(stderr=asked.json == "-", highlight=False, markup=False)
    recipes = [name.strip() for name in asked.recipes.split(",") if name.strip()] or list(DEFAULT)
    for name in recipes:
        read_recipe(name)
    peers = [name.strip() for name in asked.peers.split(",") if name.strip() not in ("", "none")]
    for name in peers:
        if name not in PEERS:
            raise unknown("peer", name, (*PEERS, "none"))
    for option, value in (("--calibrate", asked.calibrate), ("--sequences", asked.sequences)):
        Range(1, 100_000).check(option, value, whole=True)
    Range(0, 1e4, above=True).check("--seconds", asked.seconds)
    SEED.check("--seed", asked.seed, whole=True)

    def say(text: str) -> None:
        print(f"tilemesh: {text}", file=sys.stderr, flush=True)

    with open_source(asked.model, asked.data, None, say) as source:
        text = source.text(asked.calibrate, asked.sequences, asked.seed)
        case: dict[str, CaseValue] = {"model": source.name, "sequences": len(text[1]), "calibrated": asked.calibrate}
        found = bench_recipes(source.model, recipes, text, case, peers, asked.seconds, say)
    print_rows(found.rows, console)
    if asked.run is not None:
        folder = write_compress_run(asked.run, {**case, "recipes": recipes, "seed": asked.seed}, found)
        (page,) = make([str(folder)], None)
        console.print(f"page: {page}", soft_wrap=True)
    if asked.json is not None:
        write_rows(found.rows, asked.json)
