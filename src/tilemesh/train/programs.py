"""A program of the user's as commands take it: FILE.py:FUNCTION, which returns a module and what it is called with."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilemesh.core.errors import RunError, UsageError, unknown


@dataclass(frozen=True)
class UserProgram:
    """What the user's function returned."""

    module: Any
    calls: Any
    """What the module is called with: a list of arguments, a dict of named ones, or a function that makes these from a
    step's number, which counts from 1."""
    held_out: Sequence[Any] = ()
    """Such calls to evaluate on."""

    def call(self, step: int) -> Any:
        """What the module is called with in a step."""
        return self.calls(step) if callable(self.calls) else self.calls


def read_program(program: str) -> UserProgram:
    """The module, its calls, and perhaps calls to evaluate on."""
    path, name, make = _function(program)
    try:
        returned = make()
    except (Exception, SystemExit) as error:
        raise RunError(f"{name} of {path} fails: {type(error).__name__}: {error}") from error
    if not isinstance(returned, tuple) or len(returned) not in (2, 3) or not _is_module(returned[0]):
        kind = type(returned).__name__
        raise UsageError(f"{name} of {path} returned {kind}; return a model and a list of its inputs")
    read = UserProgram(_in_a_row(returned[0]), *returned[1:])
    if not (callable(read.calls) or isinstance(read.calls, list | tuple | Mapping)):
        raise UsageError(f"the inputs from {name} of {path} are {type(read.calls).__name__}; return a list of tensors")
    return read


def _is_module(module: Any) -> bool:
    return all(map(callable, module)) and len(module) > 0 if isinstance(module, list) else callable(module)


def _in_a_row(module: Any) -> Any:
    """A list of modules as one that calls them in turn."""
    if not isinstance(module, list):
        return module
    from tilemesh.parallel.staged import Chained

    return Chained({str(number): each for number, each in enumerate(module)})


def load_program(program: str) -> tuple[Any, list[Any]]:
    """A model and the inputs of its first call, to look at."""
    read = read_program(program)
    try:
        first = read.call(1)
    except Exception as error:
        raise RunError(f"the inputs of step 1 from {program} fail: {type(error).__name__}: {error}") from error
    if isinstance(first, Mapping):
        return _Named(read.module, tuple(first)).model, list(first.values())
    return read.module, list(first)


class _Named:
    """A model that is called with named arguments, called by their places."""

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        import torch

        class ByPlace(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers

            def forward(self, *values: Any) -> Any:
                returned = model(**dict(zip(names, values, strict=True)))
                loss = getattr(returned, "loss", None)
                return returned if loss is None else loss

        self.model = ByPlace()


def _function(program: str) -> tuple[str, str, Callable[[], Any]]:
    path, _, name = program.rpartition(":")
    if not path or not name:
        raise UsageError(f"the program is {program!r}; give FILE.py:FUNCTION, such as model.py:make")
    if not Path(path).is_file():
        raise UsageError(f"there is no file {path}; give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location("explained", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file; give FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:  # what lies beside it can be imported, as when it is run
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RunError(f"{path} fails when it is loaded: {type(error).__name__}: {error}") from error
    make = getattr(module, name, None)
    if not callable(make):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown("function", name, functions)
    return path, name, make
