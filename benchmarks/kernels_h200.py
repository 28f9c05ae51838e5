"""Operators beside their peers on this GPU, in one file of rows: `tilemesh bench kernel`, one line after the other.

    PYTHONPATH=src:FOLDER_OF_LIGER python benchmarks/kernels_h200.py FOLDER [--seconds 260] [--parts named,norms]

The lines run in one process, which loads torch and its compiler once; each row names its own line. Where that process
ends early (a failure of the GPU leaves it without one), another goes on with the next line. Rows are gathered in
FOLDER/kernels.jsonl every few seconds, so a run that is cut off keeps them.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

NAMED = "128x14336x4096,1x4096x4096,100000x64x64,1536x1536x1536,777x1333x2049"
NORMS = "rms_norm layer_norm --shapes 32768x768,16384x4096,8192x8192 --repeats 8"
ATTENTION = "attention --shapes 2x8192x8x4x64,2x8192x8x4x128"
CALLS = "--times call --peers eager --repeats 8"
ROWS = "softmax rms_norm layer_norm add_rms_norm add_layer_norm cross_entropy swiglu geglu scale_shift"
WITH_GRADIENT = ROWS.removesuffix(" scale_shift")

# In the order of their worth: what comes last is what a run without time leaves out.
PARTS: dict[str, tuple[str, ...]] = {
    "named": (f"matmul --shapes {NAMED} --repeats 10",),
    "norms": (f"{NORMS} --set passes=both", NORMS),
    "softmax": ("softmax --shapes 16384x1024,8192x8192,4096x32768,512x262144 --repeats 8",),
    "loss": ("cross_entropy --shapes 8192x50304,8192x128256 --set passes=both --repeats 8",),
    "calls": (
        f"{ROWS} --shapes 16384x1024,32x64 {CALLS}",
        f"{WITH_GRADIENT} --shapes 16384x1024,32x64 --set passes=both {CALLS}",
        f"rotary --shapes 8x2048x16x64,1x64x4x64 {CALLS}",
        f"embedding --shapes 16384x1024x32000,32x64x100 {CALLS}",
        f"embedding --shapes 16384x1024x32000,32x64x100 --set passes=both {CALLS}",
        f"mlp --shapes 16384x1024x4096,32x64x256 {CALLS}",
        f"mlp --shapes 16384x1024x4096,32x64x256 --set passes=both {CALLS}",
        f"linear_cross_entropy --shapes 16384x1024x32000,32x64x128 {CALLS}",
        "attention --shapes 8x2048x16x1x64,1x32x1x1x64 --times call --peers eager,cuDNN --repeats 8",
        f"adamw --shapes 16x1048576,16x65536 {CALLS}",
    ),
    "mlp": (
        "mlp --shapes 32768x768x3072,8192x2048x8192 --set passes=both --repeats 8",
        "mlp --shapes 32768x768x3072 --repeats 8",
    ),
    "adamw": ("adamw --shapes 148x838656,16x65536 --times kernel --repeats 8",),
    "attention": (
        f"{ATTENTION} --times kernel --peers cuDNN,flash --repeats 8",
        f"{ATTENTION} --set passes=both --times kernel --peers cuDNN,flash --repeats 8",
    ),
    "linear": ("linear_cross_entropy --shapes 8192x768x50304,8192x4096x128256 --repeats 8",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=260, help="end what is running after so many")
    parser.add_argument("--parts", default=",".join(PARTS), help="names with commas between, in their order")
    parser.add_argument("--lines-to", type=Path, help=argparse.SUPPRESS)  # the process that measures: its files
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    unknown = [name for name in given.parts.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"no part is called {unknown[0]}: {', '.join(PARTS)}")
    lines = [line for name in given.parts.split(",") for line in PARTS[name]]
    if given.lines_to is not None:
        measure(lines, given.first, given.lines_to)
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as parts:
        gather_while_measuring(lines, given, Path(parts))


def gather_while_measuring(lines: list[str], given: argparse.Namespace, parts: Path) -> None:
    rows, end, first = given.folder / "kernels.jsonl", time.monotonic() + given.seconds, 0
    while first < len(lines) and time.monotonic() < end:
        child = [sys.executable, __file__, str(given.folder), "--parts", given.parts]
        process = subprocess.Popen([*child, "--lines-to", str(parts), "--first", str(first)])
        while process.poll() is None and time.monotonic() < end:
            time.sleep(2)
            gather(parts, rows)
        if process.poll() is None:
            print("the time was up", flush=True)
            process.kill()
        process.wait()
        gather(parts, rows)
        first = max([int(begun.stem) for begun in parts.glob("*.begun")], default=first) + 1
    print(f"{len(rows.read_text(encoding='utf-8').splitlines()) if rows.exists() else 0} rows in {rows}", flush=True)


def gather(parts: Path, rows: Path) -> None:
    text = "".join(part.read_text(encoding="utf-8") for part in sorted(parts.glob("*.jsonl")))
    if text:
        rows.write_text(text, encoding="utf-8")


def measure(lines: list[str], first: int, parts: Path) -> None:
    """The lines from `first` on, as the command `tilemesh` would run them; a line that fails is named."""
    from tilemesh.cli.main import main as tilemesh

    begun_s = time.monotonic()
    for number, line in list(enumerate(lines))[first:]:
        (parts / f"{number:02}.begun").touch()
        words = ["bench", "kernel", *shlex.split(line)]
        sys.argv = ["tilemesh", *words, "--json", "rows.jsonl"]  # what the rows name; below, where they go
        try:
            code = tilemesh([*words, "--json", str(parts / f"{number:02}.jsonl")])
            print(f"exit {code}: {line}" if code else "", flush=True)
        except Exception:  # the other lines are worth having
            traceback.print_exc()
        print(f"== {time.monotonic() - begun_s:.0f} s: {line}", flush=True)
        if gpu_is_lost():
            sys.exit(3)


def gpu_is_lost() -> bool:
    import torch

    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            print(f"this process cannot use the GPU any more: {str(error).splitlines()[0]}", flush=True)
            return True
    return False


if __name__ == "__main__":
    main()
