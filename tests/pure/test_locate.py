"""A function that is to be called on ranks is found, or missed, without running its module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilemesh.core.errors import UsageError
from tilemesh.launch.locate import require_function

SOURCE = """
raise SystemExit("this module was run")
import os as system
from pathlib import Path

if system.name == "posix":
    def total(x): ...
else:
    total = Path

try:
    with open("x") as handle:
        first, *rest = 1, 2
except OSError:
    pass

class Sum:
    def method(self): ...

def outer():
    def inner(): ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "located" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "located" / "__init__.py").write_text("raise SystemExit('this package was run')")
    (folder / "__init__.py").write_text("")
    (folder / "sums.py").write_text(SOURCE)
    (folder / "any.py").write_text("def __getattr__(name): ...")
    (folder / "stars.py").write_text("from os import *")
    (folder / "made.py").write_text("for name in 'ab': globals()[name] = print")
    (folder / "broken.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


@pytest.mark.parametrize("name", ["total", "Sum", "outer", "Path", "system", "first", "rest", "handle"])
def test_what_a_module_binds_is_found(package: Path, name: str) -> None:
    require_function(f"located.inner.sums:{name}")
    assert not [module for module in sys.modules if module.startswith("located")]


@pytest.mark.parametrize("name", ["inner", "method", "x", "nothing"])
def test_what_it_does_not_bind_is_refused(package: Path, name: str) -> None:
    with pytest.raises(UsageError, match=rf"located.inner.sums has no function '{name}'.* \(.*sums.py\)"):
        require_function(f"located.inner.sums:{name}")
    with pytest.raises(UsageError, match="did you mean total"):
        require_function("located.inner.sums:totl")


@pytest.mark.parametrize("module", ["located.nowhere", "nowhere.at.all", "located.inner.sums.deeper"])
def test_a_module_that_is_nowhere_is_refused(package: Path, module: str) -> None:
    with pytest.raises(UsageError, match=f"there is no module {module} on Python's path"):
        require_function(f"{module}:total")


@pytest.mark.parametrize("module", ["any", "stars", "made", "broken"])
def test_what_cannot_be_judged_is_left_to_the_ranks(package: Path, module: str) -> None:
    require_function(f"located.inner.{module}:anything")


def test_modules_that_are_loaded_or_built_in_are_asked() -> None:
    require_function("os:getpid")
    require_function("posix:getpid")
    require_function("math:sqrt")
    with pytest.raises(UsageError, match="os has no function 'nothing'"):
        require_function("os:nothing")
    with pytest.raises(UsageError, match="os has no function 'sep'"):
        require_function("os:sep")  # no function
