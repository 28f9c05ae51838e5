"""Sums with a scratchpad, from nothing: a model is shown some, then learns from what its results are worth.

    python scripts/align_sums.py FOLDER [MODEL] [--seconds 60] [--steps 60] [--set ...]

Both halves are the commands that a user has: `tilemesh train` on lines of the task `sums`, and `tilemesh align` on the
weights that it leaves. Ends with the share of held-out sums that are right, before and after.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from tilemesh.align.tasks import TASKS
from tilemesh.runs.metrics import latest

LINES, SEED = 400_000, 1_000_003  # of the text; a seed that no run draws its prompts with


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="?", default="gpt2-124m")
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--seconds", type=int, default=60, help="of the first half at most")
    parser.add_argument("--steps", type=int, default=60, help="of the second half")
    parser.add_argument("--set", action="append", default=[], help="of both halves")
    parser.add_argument("--train", default="", help="settings of the first half")
    parser.add_argument("--align", default="", help="settings of the second half")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True)
    begun = time.perf_counter()
    text, task = asked.folder / "sums.jsonl", TASKS["sums"]
    with text.open("w") as file:
        for number in range(asked.lines):
            case = task.case(SEED, number)
            file.write(json.dumps({"text": f"{case['prompt']}{task.example(case)}\n"}) + "\n")
    shown, taught = asked.folder / "shown", asked.folder / "taught"
    settings = [f"data.source={text}", "data.packing=documents", "model.context=128", "sample.tokens=0", *asked.set]
    tilemesh("train", asked.model, "--out", shown, "--max-time", f"{asked.seconds}s", *sets(*settings, asked.train))
    settings = ["align.held_out=256", "align.pass_k=1", f"train.steps={asked.steps}", "checkpoint.every=0", *asked.set]
    tilemesh("align", shown, "--task", "sums", "--out", taught, *sets(*settings, asked.align))
    right = [line["pass_at_1"] for line in latest(taught) if "pass_at_1" in line]
    print(f"held-out sums that are right: {right}; {time.perf_counter() - begun:.0f} s in all")


def sets(*settings: str) -> list[str]:
    return [word for each in settings if each for word in ("--set", each)]


def tilemesh(*words: object) -> None:
    print("tilemesh", *words, flush=True)
    subprocess.run([sys.executable, "-m", "tilemesh", *map(str, words)], check=True)


if __name__ == "__main__":
    main()
