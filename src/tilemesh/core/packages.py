"""What packages offer: values to tilemesh by entry points, and functions of the same name as the module they are in,
such as `tilemesh.compress.prune`.

Python sets a module that was imported as an attribute of its package, over the function or in its place; whether
`package.name` is one or the other would depend on what else was imported before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TypeVar

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


def offer_functions(package: str, names: frozenset[str]) -> None:
    """From now on modules of these names do not become attributes of the package; `from package.name import …` works
    as before."""

    class OfferingPackage(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            if not (isinstance(value, ModuleType) and name in names):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = OfferingPackage
