"""What `tilemesh compress` does: reads, compresses, judges, writes, prints rows."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from tilemesh.bench.compress.measure import PLAIN, clocks_of, judge, rows_of
from tilemesh.bench.compress.run import CompressFindings, begin_compress_run, keep_compress_run, point_of
from tilemesh.bench.compress.text import open_source
from tilemesh.cli.targets import check_folder
from tilemesh.compress.prune import check_writable
from tilemesh.compress.quantize import Moved
from tilemesh.compress.recipe import read_recipe
from tilemesh.compress.shrink import shrink
from tilemesh.core.files import filling
from tilemesh.core.ranges import SEED, Range
from tilemesh.core.units import format_bytes
from tilemesh.measure.row import CaseValue, write_rows
from tilemesh.measure.table import print_rows, print_words
from tilemesh.model import huggingface

_COUNT = Range(1, 100_000)


@dataclass(frozen=True)
class CompressQuestion:
    """What the command line said, as it was said."""

    source: str
    recipe: str
    out: str
    calibrate: int
    sequences: int
    data: str | None
    step: int | None
    seed: int
    json: str | None


def answer(asked: CompressQuestion) -> None:
    console = Console(stderr=asked.json == "-", highlight=False, markup=False)
    recipe = read_recipe(asked.recipe)
    _COUNT.check("--calibrate", asked.calibrate, whole=True)
    _COUNT.check("--sequences", asked.sequences, whole=True)
    SEED.check("--seed", asked.seed, whole=True)
    target = Path(asked.out)
    check_folder("out", target)

    def say(text: str) -> None:
        print(f"tilemesh: {text}", file=sys.stderr)

    with filling(target), open_source(asked.source, asked.data, asked.step, say) as source:
        check_writable(source.model.config, recipe.prune)
        train, tokens, targets = source.text(asked.calibrate, asked.sequences, asked.seed, say)
        moved: dict[str, Moved] = {}
        small = shrink(source.model, recipe, train, say, moved)
        guess = clocks_of(source.model, tokens, torch.float32).expected(small)
        judged = judge({PLAIN: source.model, "small": small}, tokens, targets)
        huggingface.save(small, target, like=source.folder)
        point = point_of(asked.recipe, guess, judged, {}, source.model, small, moved)
    case: dict[str, CaseValue] = {"model": source.name, "sequences": len(tokens), "calibrated": asked.calibrate}
    rows = rows_of(asked.recipe, case, guess, judged["small"], judged[PLAIN])
    settings = {**case, "recipes": [asked.recipe], "seed": asked.seed}
    keep_compress_run(begin_compress_run(str(target), settings), settings, CompressFindings(rows, [point]))
    print_rows(rows, console)
    before, after = judged[PLAIN], judged["small"]
    print_words(
        f"{asked.recipe}: {format_bytes(before.nbytes)} to {format_bytes(after.nbytes)}, held-out loss "
        f"{before.loss:.4f} to {after.loss:.4f}; written to {target}, which `tilemesh report` makes a page of",
        console,
    )
    if asked.json is not None:
        write_rows(rows, asked.json)
