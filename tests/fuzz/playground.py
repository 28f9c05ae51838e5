"""The folder that every case works in a copy of: small sound files, a finished run, token shards, and damaged files.

It is made once for a server, by tilemesh itself, so that a later version's files are damaged and not today's.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MODEL = """
[model]
layers = 1
width = 16
heads = 2
mlp_width = 16
context = 16
vocabulary = 256
"""

TINY = (
    MODEL
    + """
[data]
source = "text.txt"

[train]
steps = 2
batch = 2
trace_steps = 1
device = "cpu"

[optimizer]
warmup = 1

[checkpoint]
every = 1

[evaluate]
sequences = 2

[sample]
tokens = 2
"""
)


WORK = "prompts=2,answers=2,prompt=8,tokens=8"
RUNS = """
name = "mine"
source = "nobody"
code = "compiled"

[[runs]]
name = "one"
model = "llama-3-8b"
cluster = "8xh100"
tokens_per_s_per_gpu = 6667
plan = { dp = 8, zero = 3, precision = "bf16-master", microbatch = 2 }

[[runs]]
name = "another"
model = "llama-3-8b"
cluster = "128xh100"
tokens_per_s_per_gpu = 6514
plan = { dp = 128, zero = 3, precision = "bf16-master", microbatch = 2 }
"""


def make(folder: Path) -> None:
    """Fill `folder`, which is the working directory."""
    from tilemesh.cli.main import main

    (folder / "folder").mkdir()
    (folder / "class" / "ada" / "1").mkdir(parents=True)
    (folder / "class" / "ada" / "1" / "world_sum.txt").write_text("28")
    (folder / "tiny.toml").write_text(TINY)
    (folder / "model.toml").write_text(MODEL)
    (folder / "runs.toml").write_text(RUNS)
    (folder / "text.txt").write_text("".join(f"line {number}: a quick brown fox\n" for number in range(200)))
    (folder / "empty.toml").write_text("")
    (folder / "binary.toml").write_bytes(bytes(range(256)))
    (folder / "deep.toml").write_text("x = " + "[" * 20_000 + "\n")
    (folder / "deep.jsonl").write_text('{"name": ' + "[" * 100_000 + "\n")
    (folder / "types.toml").write_text('model = 1\ntrain = "x"\ndp = []\nlayers = {}\n')
    (folder / "types.jsonl").write_text('{"problem": [], "config": {"x": {}}, "seconds": "x"}\n[1]\nnull\n')
    (folder / "script.py").write_text("print('here')\n")
    program = "import torch\ndef make():\n    return torch.nn.Linear(2, 2), [torch.ones(1, 2)]\n"
    (folder / "program.py").write_text(program)
    (folder / "loop").symlink_to("loop")
    for words in (
        ["train", "tiny.toml", "--mesh", "dp=1", "--out", "run"],
        ["data", "prepare", "text.txt", "shards"],
        ["export", "run", "exported"],
        ["plan", "model.toml", "--cluster", "2xh100", "--batch", "4", "--out", "plan.toml"],
        ["plan", "align", "model.toml", "--align", WORK, "--cluster", "1xcpu", "--runnable", "--out", "align.toml"],
    ):
        if (code := main(words)) != 0:
            raise RuntimeError(f"the playground could not be made: tilemesh {' '.join(words)} ended with {code}")
    shutil.copy(folder / "run" / "rows.jsonl", folder / "rows.jsonl")
    for page in folder.glob("run/*.html"):
        page.unlink()  # as long as all the rest together, and nothing reads it


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder with what would show a change."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            stat = os.lstat(os.path.join(place, name))
            is_folder = name in folders
            found[os.path.relpath(os.path.join(place, name), folder)] = (
                (0, 0) if is_folder else (stat.st_size, stat.st_mtime_ns)
            )
    return found
