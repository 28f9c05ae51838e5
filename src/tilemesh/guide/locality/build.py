"""Compiles the small C programs of the guide with the system's compiler, and loads them with ctypes.

A library is kept in the user's cache folder under the hash of its text, compiler and options, so it is built once.
Where there is no compiler, `library` returns None and a study falls back to numpy or to the interpreter.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from tilemesh.core.errors import RunError

OPTIONS = ("-O3", "-march=native", "-std=gnu11")


def compiler() -> str | None:
    """The C compiler that `CC` names, or cc, gcc or clang; None if there is none."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    return None


def source(name: str) -> str:
    """The text of a program in `guide/locality/c/`."""
    return (resources.files("tilemesh.guide.locality") / "c" / name).read_text()


def library(
    program: Path | str, constants: Mapping[str, int] | None = None, options: Sequence[str] = ()
) -> ctypes.CDLL | None:
    """The program (a path, or the text itself), compiled with constants that it sees as an `enum`.

    None without a compiler.
    Raises RunError with the compiler's words if the text does not compile.
    """
    cc = compiler()
    if cc is None:
        return None
    text = program.read_text() if isinstance(program, Path) else program
    given = ", ".join(f"{name} = {value}" for name, value in (constants or {}).items())
    whole = f"#define __shared__ static\n{f'enum {{ {given} }};' if given else ''}\n{text}"
    words = [*OPTIONS, *options]
    key = hashlib.sha256("\0".join([cc, *words, whole]).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilemesh" / "guide"
    built = folder / f"{key}.so"
    if not built.exists():
        _build(cc, words, whole, built)
    return ctypes.CDLL(str(built))


def _build(cc: str, words: Sequence[str], text: str, target: Path) -> None:
    """Written beside its name and moved there, so that two processes that build at once do not disturb each other."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        text_file, made = Path(folder) / "program.c", Path(folder) / "program.so"
        text_file.write_text(text)
        line = [cc, *words, "-shared", "-fPIC", "-o", str(made), str(text_file), "-lm", "-lpthread"]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"{cc} could not compile a program of the guide: {done.stderr.strip()[:600]}")
        made.replace(target)
