"""Quantise, prune or factorise a model. Judge it on held-out text, and write it as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilemesh.cli.next_command import after_run
from tilemesh.cli.output import Output, tell
from tilemesh.cli.targets import check_folder
from tilemesh.core.files import filling
from tilemesh.core.options import ROWS, Count, OutFile, OutFolder, Seed, argument, option
from tilemesh.core.units import format_bytes

if TYPE_CHECKING:
    from tilemesh.compress.quantize import Moved
    from tilemesh.measure.row import CaseValue


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    source: str = argument(..., "A run's folder, or a Hugging Face folder.", "RUN|FOLDER")
    recipe: str = option(..., "Such as int8, int4-g128, int4-g64-gptq, 2:4, mlp-25; or a TOML file.", "NAME|FILE")
    out: OutFolder = option(..., "Where to write the compressed model.", "FOLDER")
    calibrate: Count = option(64, "Sequences of text that recipes look at.", "N")
    sequences: Count = option(32, "Held-out sequences that both models are judged by.", "N")
    data: str | None = option(None, "The text; by default the run's own, or the standard library.", "SOURCE")
    step: int | None = option(None, "Which checkpoint of a run; the newest, if not given.", "N")
    seed: Seed = option(0, "Of the choice of calibration text.")
    json: OutFile | None = option(None, ROWS, "FILE")


def compress(options: CompressOptions) -> Output:
    import torch

    from tilemesh.bench.compress.measure import PLAIN, clocks_of, judge, rows_of
    from tilemesh.bench.compress.run import CompressFindings, begin_compress_run, keep_compress_run, point_of
    from tilemesh.bench.compress.text import open_source
    from tilemesh.compress.prune import check_writable
    from tilemesh.compress.recipe import read_recipe
    from tilemesh.compress.shrink import shrink
    from tilemesh.model import huggingface
    from tilemesh.report.run import read

    recipe, target = read_recipe(options.recipe), Path(options.out)
    check_folder("--out", target)
    with filling(target), open_source(options.source, options.data, options.step, tell) as source:
        check_writable(source.model.config, recipe.prune)
        train, tokens, targets = source.text(options.calibrate, options.sequences, options.seed, tell)
        moved: dict[str, Moved] = {}
        small = shrink(source.model, recipe, train, tell, moved)
        guess = clocks_of(source.model, tokens, torch.float32).expected(small)
        judged = judge({PLAIN: source.model, "small": small}, tokens, targets)
        huggingface.save(small, target, like=source.folder)
        point = point_of(options.recipe, guess, judged, {}, source.model, small, moved)
    case: dict[str, CaseValue] = {"model": source.name, "sequences": len(tokens), "calibrated": options.calibrate}
    rows = rows_of(options.recipe, case, guess, judged["small"], judged[PLAIN])
    settings = {**case, "recipes": [options.recipe], "seed": options.seed}
    keep_compress_run(begin_compress_run(str(target), settings), settings, CompressFindings(rows, [point]))
    before, after = judged[PLAIN], judged["small"]
    words = (
        f"{options.recipe}: {format_bytes(before.nbytes)} to {format_bytes(after.nbytes)}, held-out loss "
        f"{before.loss:.4f} to {after.loss:.4f}; written to {target}, which `tilemesh report` makes a page of"
    )
    return Output([rows, words], rows, next=after_run(read(str(target))))
