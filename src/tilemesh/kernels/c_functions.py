"""C functions of operators, compiled for this CPU when they are first asked for, on the threads that torch has already.

A library is linked without OpenMP's own: two pools of threads would take turns on the same cores.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from tilemesh.core.c_library import NATIVE, build_library
from tilemesh.core.errors import RunError

_FAST = ("-O3", "-fno-math-errno", "-fno-trapping-math", NATIVE, "-fopenmp")
_SHARED = Path(__file__).with_name("exponential.h")


def c_functions(
    name: str, sources: Sequence[Path], arguments: Mapping[str, Sequence[type]], stored: object = "float32"
) -> ctypes.CDLL | None:
    """The functions of these files, each with the types of its arguments; None without Linux and a C compiler.
    `stored`: the dtype of weights, keys and values, float32 or bfloat16; there are none for another."""
    dtype = str(stored).removeprefix("torch.")
    if platform.system() != "Linux" or dtype not in ("float32", "bfloat16"):
        return None
    try:
        text = f"#define STORED_{dtype.upper()}\n" + "".join(path.read_text() for path in (_SHARED, *sources))
        built = build_library(name, text, _FAST, ("-lm",))
        for path in loaded_openmp():
            ctypes.CDLL(path, mode=os.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(built), mode=os.RTLD_NOW)
        for function, types in arguments.items():
            getattr(loaded, function).argtypes, getattr(loaded, function).restype = list(types), None
        return loaded
    except (OSError, RunError, AttributeError):
        return None


def loaded_openmp() -> list[str]:
    """OpenMP's library that this process has loaded with torch."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(maxsplit=5)[5] for line in lines if "libgomp" in line or "libiomp5" in line})
