"""Whether an error says that memory ran out, whoever noticed: Python, numpy, torch, its GPU, or the system.

torch's CPU allocator raises a plain RuntimeError, so its words decide. No torch is needed to tell. OpenBLAS tells
nobody: where it finds no room it ends the process, so under a limit its libraries are imported by a child first.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from tilemesh.core.units import format_bytes

_WORDS = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|unable to mmap|can't start new thread"
    r"|failed to map segment|std::bad_alloc|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
)
_MAY_END = ("numpy", "torch")
_PLENTY = 8 << 30  # more than any import needs
_SIZE = re.compile(r"(?:allocate|mmap) (?:([0-9]+) bytes|([0-9.]+ [KMGTPE]?i?B))")


def out_of_memory(error: BaseException) -> str | None:
    """What could not be allocated, as the beginning of a sentence; None where this is another error."""
    words = str(error)
    is_gpu = "CUDA" in words or "CUBLAS" in words
    is_typed = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    is_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    is_worded = isinstance(error, RuntimeError | ImportError) and _WORDS.search(words) is not None
    if not (is_typed or is_system or is_worded):
        return None
    size = _SIZE.search(words)
    needed = "what is needed next" if size is None else format_bytes(int(size[1])) if size[1] else size[2]
    allowed = "" if is_gpu else limit_words()
    return f"out of {'GPU ' * is_gpu}memory: {needed} could not be allocated{allowed}"


def limit_words() -> str:
    """What the system allows a process, where that is limited, and what to do."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if limit == resource.RLIM_INFINITY else f" (`ulimit -v` allows {format_bytes(limit)} in all: raise it)"


def try_imports() -> None:
    """From now on, where little memory is allowed, a MemoryError instead of an end in the middle of an import."""
    is_little = 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < _PLENTY  # RLIM_INFINITY is -1
    if is_little and not any(type(one) is _Tried for one in sys.meta_path):
        sys.meta_path.insert(0, _Tried())


class _Tried:
    """Finds no module: it forks a child that imports those of which an import may end the process."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name not in _MAY_END:
            return
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.meta_path.remove(self)
            try:
                import_module(name)
            finally:  # an error that Python knows of comes again in the parent
                os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise MemoryError
