"""A program of the user's as commands take it: FILE.py:FUNCTION, which returns a module and its inputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from tilemesh.core.errors import RunError, UsageError, unknown


def load_program(program: str) -> tuple[Any, list[Any]]:
    """What the user's function returned: a model and its inputs."""
    path, _, name = program.rpartition(":")
    if not path or not name:
        raise UsageError(f"the program is {program!r}; give FILE.py:FUNCTION, such as model.py:make")
    if not Path(path).is_file():
        raise UsageError(f"there is no file {path}; give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location("explained", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file; give FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RunError(f"{path} fails when it is loaded: {type(error).__name__}: {error}") from error
    make = getattr(module, name, None)
    if not callable(make):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown("function", name, functions)
    try:
        returned = make()
    except (Exception, SystemExit) as error:
        raise RunError(f"{name} of {path} fails: {type(error).__name__}: {error}") from error
    if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[0]):
        kind = type(returned).__name__
        raise UsageError(f"{name} of {path} returned {kind}; return a model and a list of its inputs")
    model, inputs = returned
    if not isinstance(inputs, list | tuple):
        raise UsageError(f"the inputs from {name} of {path} are {type(inputs).__name__}; return a list of tensors")
    return model, list(inputs)
