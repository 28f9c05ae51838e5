"""Whether a rank will find `package.module:function`, told without running anything of it.

Finders are asked for a module as an import would ask them, from its outermost package on, but no module is executed:
what it does when it is imported is for the ranks, who may have GPUs or a communicator that the caller has not. Of a
module written in Python the names that it binds are read from its source; whatever cannot be judged so (an extension, a
module that makes names at run time) is left to the ranks.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from tilemesh.core.errors import UsageError, nearest


def require_function(name: str) -> None:
    """Refuse a function that surely is not there."""
    module, _, function = name.partition(":")
    known = sys.modules.get(module)
    if known is not None:
        if not callable(getattr(known, function, None)):
            raise UsageError(f"{module} has no function '{function}'")
        return
    spec = _spec(module)
    if spec is None:
        raise UsageError(f"{name}: there is no module {module} on Python's path (sys.path)")
    if spec.origin is not None and spec.origin.endswith(".py"):
        _require_bound(Path(spec.origin), module, function)


def _spec(module: str) -> ModuleSpec | None:
    """Where a module is; None: nowhere. Packages on the way are found, not imported."""
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        if name in sys.modules:
            path = getattr(sys.modules[name], "__path__", None)
            continue
        specs = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((candidate for candidate in specs if candidate is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and depth < len(parts):
            return None  # a module is not a package
    return spec


def _require_bound(path: Path, module: str, function: str) -> None:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # the import will say so, on the ranks
    bound = set(_bound(tree))
    if function not in bound and not bound & {"*", "__getattr__", "globals", "setattr", "exec"}:
        close = nearest(function, sorted(bound))
        raise UsageError(f"{module} has no function '{function}'{f': did you mean {close}?' if close else ''} ({path})")


def _bound(tree: ast.Module) -> Iterator[str]:
    """Names that a module binds outside of its functions and classes, and signs that it makes others at run time."""
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.Name):
            yield node.id  # read or bound: `globals()` and `setattr` are read
        nodes += ast.iter_child_nodes(node)
