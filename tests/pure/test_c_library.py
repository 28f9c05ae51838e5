"""The one builder of C: which compiler, and for which CPU."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from tilemesh.core import c_library
from tilemesh.core.c_library import build_library, compiler, cpu_of
from tilemesh.core.errors import RunError
from tilemesh.guide.locality import build

SOURCES = Path(c_library.__file__).parents[1]
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler")
XEON = "processor : 0\nvendor_id : GenuineIntel\nmodel name : Xeon\ncpu MHz : 2400.0\nflags : fpu sse2 avx512f\n"
ARM = "processor : 0\nBogoMIPS : 50.0\nFeatures : fp asimd sve\nCPU implementer : 0x41\nCPU part : 0xd40\n"


@pytest.mark.parametrize(("cpuinfo", "other"), [(XEON, ("avx512f", "avx2")), (ARM, ("sve", "")), (ARM, ("40", "0c"))])
def test_a_cpu_is_its_instructions_and_not_its_clock(cpuinfo: str, other: tuple[str, str]) -> None:
    again = cpuinfo.replace("2400.0", "1800.0").replace("50.0", "48.0").replace("processor : 0", "processor : 1")
    assert cpu_of(cpuinfo + again) == cpu_of(cpuinfo)
    assert cpu_of(cpuinfo.replace(*other)) != cpu_of(cpuinfo)


@needs_compiler
def test_each_cpu_that_shares_a_home_has_a_library_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's programs were compiled for one CPU and run on any."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        for cpu in ("one", "other"):
            monkeypatch.setattr(c_library, "host_cpu", lambda cpu=cpu: cpu)
            loaded = build.library("int answer(void) { return 42; }")
            assert loaded is not None
            assert loaded.answer() == 42
    assert len(list((tmp_path / "tilemesh" / "guide").iterdir())) == 2


@needs_compiler
def test_the_compiler_is_the_one_that_cc_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its options; where there is none of that name, the usual ones are tried."""
    usual = compiler()
    assert usual is not None
    mine = tmp_path / "mine"
    mine.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\nexec {shutil.which(usual.split()[0])} "$@"\n')
    mine.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", f"{mine} -DANSWER=41")
    path = build_library("tests", "int answer(void) { return ANSWER; }", ["-O1"])
    assert ctypes.CDLL(str(path)).answer() == 41
    assert len((tmp_path / "calls").read_text().splitlines()) == 2  # compiled and linked
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert compiler() in ("cc", "gcc", "clang")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RunError, match="no C compiler here: install gcc or clang, or name one in CC"):
        build_library("tests", "int answer(void) { return 0; }", [])


def test_nobody_else_calls_a_compiler_of_c() -> None:
    words = ('"-shared"', "march=native", "mcpu=native", 'which("cc")', 'which("gcc")', 'environ.get("CC"')
    found = {path for path in SOURCES.rglob("*.py") if any(word in path.read_text() for word in words)}
    assert found == {Path(c_library.__file__)}
