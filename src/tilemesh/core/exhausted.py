"""Whether an error says that memory ran out, whoever noticed: Python, numpy, torch, its GPU, or the system.

torch's CPU allocator raises a plain RuntimeError, so its words decide. No torch is needed to tell.
"""

from __future__ import annotations

import errno
import re
import resource

from tilemesh.core.units import format_bytes

_WORDS = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|unable to mmap|can't start new thread"
    r"|failed to map segment|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
)
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
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    allowed = "" if limit == resource.RLIM_INFINITY or is_gpu else f" (`ulimit -v` allows {format_bytes(limit)} in all)"
    return f"out of {'GPU ' * is_gpu}memory: {needed} could not be allocated{allowed}"
