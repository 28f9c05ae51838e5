"""What users of tilemesh meet, as text to compare before and after a change: `python scripts/surface.py > FILE`.

The help of every command, the keys that quick cases write with `--json`, the public names with their signatures, and a
digest of the page of each file of stored rows. The cases run in a temporary folder and start no ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tilemesh.cli.main import main, make_app
from tilemesh.cli.reference import commands

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), [torch.ones(2, 4)]
"""
CASES = (
    "plan train gpt2-124m --cluster 2xh100",
    "plan serve llama-3-8b --cluster 1xh200",
    "plan draw zb-v --stages 2 --microbatches 4",
    "plan grade run",
    "train --set train.steps=2,model.layers=1,model.width=32,train.context=16 --mesh dp=1 --out run",
    "train --dry-run --mesh dp=1",
    "verify --ranks 1 --transport threads --models gpt --no-pairs",
    "compress run --recipe int8 --out small --calibrate 32 --sequences 2",
    "graph explain program.py:make",
    "bench graph lstm --size tiny --peers eager --repeats 1 --seconds 0.1",
    "bench serve tiny --requests 1 --prompt 4 --output 2 --blocks 1 --running 1 --predict machine",
)


def main_text() -> Iterator[str]:
    for name, command in commands(typer.main.get_command(make_app()), "tilemesh"):
        context = typer.Context(command, info_name=name)
        yield f"## {name} --help\n{command.get_help(context)}\n"
    for case in sorted(CASES, key=lambda case: not case.startswith("train --set")):
        yield f"## tilemesh {case} --json\n" + "\n".join(_json_keys(case)) + "\n"
    for name in re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        yield "\n".join(_signatures(name, getattr(importlib.import_module(module), attribute)))
    yield "## tilemesh report of stored rows"
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")):
        yield f"{path.name} {_digest_of_page(path)}"


def _digest_of_page(rows: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(["report", str(rows), "--html", "page.html"])
    page = errors.getvalue() if code else Path("page.html").read_text(encoding="utf-8")
    return hashlib.sha256(page.replace(str(ROOT), "").encode()).hexdigest()[:16]


def _json_keys(case: str) -> list[str]:
    """The keys of all objects that a case writes, those of inner objects with a dot."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main([*case.split(), "--json", "surface.jsonl"])
    if code:
        return [f"exit code {code}: {errors.getvalue().strip()}"]
    lines = Path("surface.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted({key for line in lines for key in _keys(json.loads(line))})


def _keys(value: Any, before: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield before + key
            yield from _keys(inner, f"{before}{key}.")
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, before)


def _signatures(name: str, target: Any) -> Iterator[str]:
    """Of a function, or of a class with its public methods."""
    try:
        yield f"{name}{inspect.signature(target)}" if callable(target) else name
    except ValueError:
        yield name
    for attribute, member in sorted(vars(target).items()) if inspect.isclass(target) else ():
        if inspect.isfunction(member) and not attribute.startswith("_"):
            yield f"{name}.{attribute}{inspect.signature(member)}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("program.py").write_text(PROGRAM, encoding="utf-8")
        pieces = [re.sub(r" at 0x[0-9a-f]+", "", piece) for piece in main_text()]
        os.chdir(ROOT)
    print("\n".join(pieces))
