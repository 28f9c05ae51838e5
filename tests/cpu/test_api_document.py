"""docs/api.md names everything that the packages offer, and nothing that is not there."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tilemesh

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
DESCRIBED = re.findall(r"^::: (\S+)$", TEXT, re.MULTILINE)
PACKAGES = [name for name in tilemesh.__all__ if name not in ("Mesh", "__version__")]


def offered(package: str) -> list[str]:
    """What a package says that it offers; nothing of one whose modules are what one names."""
    module = importlib.import_module(f"tilemesh.{package}")
    return list(getattr(module, "__all__", [])) or (dir(module) if "__dir__" in vars(module) else [])


@pytest.mark.parametrize("path", DESCRIBED)
def test_what_is_described_is_there_and_says_what_it_is(path: str) -> None:
    module, _, name = path.rpartition(".")
    target = getattr(importlib.import_module(module), name)
    assert target.__module__ == module, "the site finds a name only where it is defined"
    assert inspect.getdoc(target)


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_a_package_offers_is_described(package: str) -> None:
    described = {
        getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in DESCRIBED
    }
    module = importlib.import_module(f"tilemesh.{package}")
    assert re.search(rf"^## .*`(tm|tilemesh)\.{package}`", TEXT, re.MULTILINE), "no section of its own"
    assert [name for name in offered(package) if getattr(module, name) not in described] == []


def test_every_name_is_described_once() -> None:
    assert sorted(set(DESCRIBED)) == sorted(DESCRIBED)


def test_a_function_with_its_modules_name_stays_a_function() -> None:
    """Python sets a module that is imported as an attribute of its package: the function must not be lost to it."""
    lines, packages = ["import importlib"], ("compress", "kernels", "train")
    for package in packages:
        home = f"tilemesh.{package}"
        names = [name for name in offered(package) if find_spec(f"{home}.{name}") is not None]
        assert names
        lines += [f"package = importlib.import_module('{home}')"]
        lines += [f"importlib.import_module('{home}.{name}')" for name in names]
        if package == "kernels":
            lines += ["from tilemesh.kernels.scale_shift import cost; assert callable(cost.cost)"]
        lines += [f"print([name for name in {names} if not callable(getattr(package, name))])"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" * len(packages)
