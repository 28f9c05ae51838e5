"""Freed memory stays with the process, where torch takes its tensors from glibc."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tilemesh.core.heap import keep_freed_memory

# Blocks of 4 MiB that are written and freed, as tensors are. What counts is that glibc is there, so the machine is said
# to be an x86-64 one.
FAULTS = """
import ctypes, platform, resource, sys
from tilemesh.core.heap import keep_freed_memory
platform.machine = lambda: "x86_64"
print(sys.argv[1] == "yes" and keep_freed_memory())
libc = ctypes.CDLL(None)
libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault per 2 MiB would be too few to tell the two apart
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def use():
    blocks = [libc.malloc(4 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 4 << 20)
    for block in blocks:
        libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: str) -> tuple[str, int]:
    environ = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", FAULTS, keep], capture_output=True, text=True, check=True, env=environ)
    said, count = done.stdout.split()
    return said, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_blocks_that_come_and_go_are_not_faulted_in_again() -> None:
    said, kept = faults("yes")
    assert said == "True"
    assert kept < 200 < faults("no")[1]  # 32 MiB four times: hundreds of faults even with pages of 64 KiB


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_who_has_set_malloc_has_decided(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()


def test_torch_has_its_own_allocator_on_other_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not keep_freed_memory()
