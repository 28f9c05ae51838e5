"""`make lock` writes `locks/`: all that `make` installs, by version and hash, for x86-64 and arm64.

`pyproject.toml` says what the package needs, `constraints.txt` which versions we chose by hand, and a lock what follows
from both. A version in a lock stays until one of the two asks for another, or `make lock UPGRADE=1` takes the newest.
Torch and its CUDA libraries have a lock of their own: the CPU build is another file at every index, so it is taken by
its version (`scripts/setup.py`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "locks"
EXTRAS = {
    "all": ("choose", "dev", "graph", "hf", "mpi", "serve"),
    "serve": ("hf", "mpi", "serve"),
    "train": ("hf", "mpi"),
    "docs": ("docs",),
    "lock": ("lock",),
}
"""By lock, the extras of pyproject.toml in it; the first is made first, and the others take its versions."""
WITH_CUDA = re.compile(r"(torch|nvidia-[\w-]+|cuda-[\w-]+)==")
EDITABLE = "editables"  # what hatchling needs for `pip install -e`, and says only when asked
HEAD = "# Made by `make lock` from pyproject.toml and constraints.txt.\n"


def compiled(name: str, extras: tuple[str, ...]) -> list[str]:
    """The entries of a lock, each with its hashes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [need for extra in extras for need in project["project"]["optional-dependencies"][extra]]
    if name in ("all", "serve", "train"):
        wanted += [*project["project"]["dependencies"], *project["build-system"]["requires"], EDITABLE]
    chosen = ["constraints.txt", *([] if name == "all" else ["locks/all.txt"])]
    line = ["uv", "pip", "compile", "-", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes"]
    line += ["--no-header", "--no-annotate", "--output-file", f"locks/{name}.txt"]
    line += [word for file in chosen for word in ("--constraint", file)]
    line += ["--upgrade"] if os.environ.get("UPGRADE") else []
    done = subprocess.run(line, cwd=ROOT, input="\n".join(wanted), text=True, check=False, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"lock: no versions fit what locks/{name}.txt needs (uv says why above)")
    return re.split(r"\n(?=\S)", (LOCKS / f"{name}.txt").read_text(encoding="utf-8").strip())


def main() -> None:
    LOCKS.mkdir(exist_ok=True)
    with_cuda = (LOCKS / "cuda.txt").read_text(encoding="utf-8") if (LOCKS / "cuda.txt").exists() else ""
    for name, extras in EXTRAS.items():
        file = LOCKS / f"{name}.txt"
        if name == "all" and file.exists():  # whole again while it is made, so that all of its versions stay
            file.write_text(file.read_text(encoding="utf-8") + with_cuda, encoding="utf-8")
        entries = compiled(name, extras)
        if name == "all":
            cuda = [entry for entry in entries if WITH_CUDA.match(entry)]
            (LOCKS / "cuda.txt").write_text(HEAD + "\n".join(cuda) + "\n", encoding="utf-8")
        entries = [entry for entry in entries if not WITH_CUDA.match(entry) and not entry.startswith("#")]
        file.write_text(HEAD + "\n".join(entries) + "\n", encoding="utf-8")
        print(f"locks/{name}.txt: {len(entries)} distributions")


if __name__ == "__main__":
    main()
