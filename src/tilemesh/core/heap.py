"""Freed memory that stays with the process, where torch takes its tensors from glibc.

A step frees what the next one asks for again. glibc gives large blocks back to the system at once, and every page of
the next one is a fault: half of a norm's time on a Xeon. On other processors torch has its own allocator.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MAPPED_FROM_BYTES = 32 << 20
"""Larger blocks go back when they are freed: the most that glibc itself raises this to."""
KEPT_BYTES = 1 << 30
"""So much at the end of the heap stays before any of it goes back."""


def torch_heap() -> str:
    """Who gives torch's tensors their memory here: "glibc", or nothing where torch has its own."""
    return "glibc" if sys.platform == "linux" and platform.machine() == "x86_64" else ""


def keep_freed_memory() -> bool:
    """Whether this process does so from now on. Who has set glibc's malloc in the environment has decided."""
    if not torch_heap():
        return False
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # not glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
