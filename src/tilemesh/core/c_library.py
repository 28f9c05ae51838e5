"""C that the system's compiler makes into a library for this CPU, once: the one builder of everything compiled from C
and C++.

A library lies in the user's cache folder under the hash of its text, compiler, options and CPU. Code for this CPU is of
no use to another that shares the folder, as on a cluster's home directories: it may end in an illegal instruction.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tilemesh.core.errors import RunError
from tilemesh.core.files import cache_folder

NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
_TIMEOUT_S = 120
# What of /proc/cpuinfo says which instructions there are; clocks and the numbers of cores do not.
_CPU_LINES = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU ")


_C = ("CC", "cc", "gcc", "clang")
_CPP = ("CXX", "c++", "g++", "clang++")


def compiler(names: Sequence[str] = _C) -> str | None:
    """The C compiler that `CC` names, options included, or cc, gcc or clang; None if there is none."""
    for words in (os.environ.get(names[0], ""), *names[1:]):
        if words.strip() and shutil.which(words.split()[0]):
            return words
    return None


def cpu_of(cpuinfo: str) -> str:
    """What decides which instructions may be used, of the lines that Linux has for every core."""
    return "\n".join(sorted({line for line in cpuinfo.splitlines() if line.startswith(_CPU_LINES)}))


@functools.cache
def host_cpu() -> str:
    """The CPU that is compiled for here."""
    try:
        cpu = cpu_of(Path("/proc/cpuinfo").read_text())
    except OSError:
        cpu = platform.processor()
    return f"{platform.machine()}\n{cpu}"


def build_library(
    name: str, text: str, options: Sequence[str], libraries: Sequence[str] = (), language: str = "c"
) -> Path:
    """The library of a text, in the cache folder of this name. `libraries`: what else is linked. `language`: c or cpp.

    RunError without a compiler, and with its words where the text does not compile.
    """
    names, said = (_C, "C") if language == "c" else (_CPP, "C++")
    program = compiler(names)
    if program is None:
        raise RunError(f"no {said} compiler here: install gcc or clang, or name one in {names[0]}")
    key = hashlib.sha256("\0".join([text, program, *options, "", *libraries, host_cpu()]).encode()).hexdigest()[:32]
    built = cache_folder() / name / f"{key}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        # Made beside its name and moved there, so that processes that build at once do not disturb each other.
        with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
            source, middle, shared_object = (Path(scratch, f"{name}.{end}") for end in (language, "o", "so"))
            source.write_text(text)
            _run([*shlex.split(program), *options, "-fPIC", "-c", str(source), "-o", str(middle)], name)
            _run([*shlex.split(program), "-shared", str(middle), "-o", str(shared_object), *libraries], name)
            os.replace(shared_object, built)
    return built


def _run(line: Sequence[str], name: str) -> None:
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise RunError(f"{line[0]} could not compile a program of {name}: {error}") from None
    if done.returncode:
        raise RunError(f"{line[0]} could not compile a program of {name}: {done.stderr.strip()[:600]}")
