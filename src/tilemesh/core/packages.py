"""What packages offer: values to tilemesh by entry points, and names that load when they are first used, functions that
are called like the module they are in among them, such as `tilemesh.compress.prune`.

Python sets a module that was imported as an attribute of its package, over the function or in its place; whether
`package.name` is one or the other would depend on what else was imported before.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

from tilemesh.core.errors import UsageError

T = TypeVar("T")


def entry_points_of(group: str, kind: type[T]) -> Iterator[T]:
    """The values of a kind that installed packages offer in a group of entry points."""
    from importlib.metadata import entry_points

    for point in entry_points(group=group):
        try:
            value = point.load()
        except Exception as error:
            raise UsageError(f"'{point.name}' ({group}) of another package cannot be loaded: {error}") from error
        if not isinstance(value, kind):
            raise UsageError(f"{point.value} is {type(value).__name__}: expected {kind.__name__} ({group})")
        yield value


def names_on_use(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names load when they are first used.

    `where`: the module of each name, in the package or with its whole path; "MODULE:NAME" where it is called otherwise
    there. A function that is called like its module stays what the package has under that name.
    """
    functions = frozenset(name for name, home in where.items() if name == home)
    if functions:
        _keep_functions(package, functions)

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module, _, own = where[name].partition(":")
        path = module if module.startswith("tilemesh.") else f"{package}.{module}"
        value = getattr(importlib.import_module(path), own or name)
        setattr(sys.modules[package], name, value)  # so that the next use does not come here
        return value

    return load


def _keep_functions(package: str, names: frozenset[str]) -> None:
    """From now on modules of these names do not become attributes of the package; `from package.name import …` works
    as before."""

    class OfferingPackage(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            if not (isinstance(value, ModuleType) and name in names):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = OfferingPackage
