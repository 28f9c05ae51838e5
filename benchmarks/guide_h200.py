"""Runs the guide's chapters that have GPU rows, as a reader does, and keeps those rows.

python benchmarks/guide_h200.py FOLDER [KEY ...]   writes FOLDER/guide_h200.jsonl, and FOLDER/chapter_KEY.txt: what
each chapter printed. With `--stand-in` the CPU takes the GPU's place, with small arrays: a rehearsal without a GPU.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from rich.console import Console

from tilemesh.guide import on_gpu
from tilemesh.guide.book import part_of
from tilemesh.guide.data_parallel import work as data_parallel
from tilemesh.guide.pipelines import work as pipelines
from tilemesh.guide.runner import run_part
from tilemesh.guide.tensor_parallel import work as tensor_parallel
from tilemesh.measure.row import Row, read_rows, write_rows
from tilemesh.measure.table import print_rows

CHAPTERS = ("5", "6", "7", "3", "4")
LIMIT_S = 40


def by_command(key: str, folder: Path) -> list[Row]:
    """`tilemesh guide KEY` in a process of its own."""
    rows = folder / f"chapter_{key}.jsonl"
    with (folder / f"chapter_{key}.txt").open("w") as printed:
        command = [sys.executable, "-m", "tilemesh", "guide", key, "--json", str(rows)]
        ended = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False)
    print(f"chapter {key}: exit code {ended.returncode}", flush=True)
    return [] if ended.returncode else read_rows(rows)


def by_stand_in(key: str, folder: Path) -> list[Row]:
    """The same chapter in this process, with the CPU as its GPU."""
    on_gpu.gpu = lambda: "cpu"
    data_parallel.gpu_row = partial(data_parallel.gpu_row, samples=24, width=16)
    tensor_parallel.gpu_row = partial(tensor_parallel.gpu_row, tokens=8, width=16, hidden=32)
    pipelines.gpu_row = partial(pipelines.gpu_row, width=8)
    with (folder / f"chapter_{key}.txt").open("w") as printed, contextlib.redirect_stdout(printed):
        return run_part(part_of(key), Console(width=160))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("keys", nargs="*", default=CHAPTERS)
    parser.add_argument("--stand-in", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    kept: list[Row] = []
    for key in given.keys:
        began = time.perf_counter()
        try:
            rows = (by_stand_in if given.stand_in else by_command)(key, given.folder)
        except subprocess.TimeoutExpired:
            print(f"chapter {key}: not done after {LIMIT_S} s", flush=True)
            continue
        kept += [row for row in rows if "gpu" in row.case]
        write_rows(kept, given.folder / "guide_h200.jsonl")
        print(f"chapter {key}: {time.perf_counter() - began:.1f} s, {len(kept)} GPU rows so far", flush=True)
    print_rows(kept)


if __name__ == "__main__":
    main()
