"""Loads the small C programs of the guide, compiled by the system's compiler, with ctypes.

Where there is no compiler, `library` returns None and a study falls back to numpy or to the interpreter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from tilemesh.core.c_library import NATIVE, build_library, compiler

OPTIONS = ("-O3", NATIVE, "-std=gnu11")


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
    if compiler() is None:
        return None
    text = program.read_text() if isinstance(program, Path) else program
    constant_words = ", ".join(f"{name} = {value}" for name, value in (constants or {}).items())
    full_text = f"#define __shared__ static\n{f'enum {{ {constant_words} }};' if constant_words else ''}\n{text}"
    return ctypes.CDLL(str(build_library("guide", full_text, [*OPTIONS, *options], ["-lm", "-lpthread"])))
