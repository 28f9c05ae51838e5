"""Packages that offer a function of the same name as the module it is in, such as `tilemesh.compress.prune`.

Python sets a module that was imported as an attribute of its package, over the function or in its place; whether
`package.name` is one or the other would depend on what else was imported before.
"""

from __future__ import annotations

import sys
from types import ModuleType


def offer_functions(package: str, names: frozenset[str]) -> None:
    """From now on modules of these names do not become attributes of the package; `from package.name import …` works
    as before."""

    class OfferingPackage(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            if not (isinstance(value, ModuleType) and name in names):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = OfferingPackage
