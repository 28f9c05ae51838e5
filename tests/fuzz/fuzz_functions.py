"""Hostile arguments for tilemesh's public Python functions, which it finds in the packages' own lists of names.

One argument at a time is replaced in an otherwise sound call. Where no sound call is known the other arguments are
taken from their annotations. Allowed: to return, or to raise an error derived from ValueError (bad arguments),
RuntimeError (a failure) or, for a value of a wrong type, TypeError; anything else is a bug's own exception.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import hostile
from fuzz_cases import Case

VALUES_OF_AN_ARGUMENT = 9
ALLOWED = (ValueError, RuntimeError, TypeError)

_NUMBERS: Mapping[str, Any] = {
    "zero": 0, "minus one": -1, "a half": 0.5, "NaN": float("nan"), "infinity": float("inf"), "2^31": 2**31, "2^63": 2**63,
    "10^400": 10**400, "true": True, "none": None, "text": "x", "nothing": "", "superscript two": "²", "a list": [],
    "an object": {}, "bytes": b"\xff", "nobody's home": "~nosuchuser/x", "a missing file": "nowhere/nothing.toml",
    "a folder": "folder", "a very long word": "w" * 20_000, "nested lists": [[[1], [2]], [[3]]], "an exception": Exception,
}  # fmt: skip


def _arrays() -> Mapping[str, Any]:
    import numpy as np
    import torch

    return {
        "no elements": np.zeros(0), "no dimension": np.array(1.0), "complex numbers": np.ones(4, complex),
        "objects": np.array([{}, []], dtype=object), "text elements": np.array(["a", "b"]), "booleans": np.ones(4, bool),
        "strided": np.ones(8)[::2], "read-only": np.broadcast_to(np.ones(1), 4), "a tensor": torch.ones(4),
        "a half tensor": torch.ones(4, dtype=torch.bfloat16), "a sparse tensor": torch.ones(2, 2).to_sparse(),
        "a meta tensor": torch.ones(4, device="meta"), "33 dimensions": np.ones((1,) * 33), "other byte order": np.ones(4, ">f4"),
    }  # fmt: skip


def value(label: str) -> Any:
    return _NUMBERS[label] if label in _NUMBERS else _arrays()[label]


def functions() -> dict[str, Callable[..., Any]]:
    """`package.name` of every public function and class, and `communicator.method` of a communicator's methods."""
    import tilemesh

    found: dict[str, Callable[..., Any]] = {}
    for package in [*tilemesh._SUBPACKAGES, "comm.minimal", "comm.schedules.book", "runs.folder", "runs.reader", "core.units"]:
        module = importlib.import_module(f"tilemesh.{package}")
        for name in _public(module):
            member = getattr(module, name)
            if callable(member) and not (inspect.isclass(member) and issubclass(member, BaseException)):
                found[f"{package}.{name}"] = member
    return found


def _public(module: Any) -> list[str]:
    """What a module lists; without a list, the functions that are its own."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    if hasattr(module, "__dir__"):
        return list(dir(module))
    own = [(name, member) for name, member in vars(module).items() if name[0] != "_" and callable(member)]
    return sorted(name for name, member in own if getattr(member, "__module__", "") == module.__name__)


COMMUNICATOR = "communicator"
_THREADS = "comm.run_threads"


def cases() -> Iterator[Case]:
    for name, function in functions().items():
        yield from _cases_of(name, function)
    from tilemesh.comm import Communicator

    for name, member in inspect.getmembers(Communicator, inspect.isfunction):
        if name[0] != "_":
            yield from _cases_of(f"{COMMUNICATOR}.{name}", member)


def _cases_of(name: str, function: Callable[..., Any]) -> Iterator[Case]:
    for argument in _arguments(function):
        labels = [*_NUMBERS, *(_arrays() if name.startswith((COMMUNICATOR, "kernels.", "comm.minimal")) else ())]
        for label in hostile.some(labels, VALUES_OF_AN_ARGUMENT, name + argument):
            yield Case(f"python: {name} where {argument} is {label}", function=f"{name}|{argument}|{label}")


def _arguments(function: Callable[..., Any]) -> list[str]:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one.name for one in found if one.name != "self" and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


# ---- calling ---------------------------------------------------------------------------------------------------


def call(text: str) -> str:
    """Make the call that a case names; returns the one line of what it came to, or raises what is not allowed."""
    name, argument, label = text.split("|")
    if name.startswith(COMMUNICATOR):
        from tilemesh.comm import connect

        with_comm = connect("alone")
        function: Any = getattr(with_comm, name.partition(".")[2])
    else:
        function = functions()[name]
    given = {**_sound(name, function), argument: value(label)}
    positional = [one.name for one in inspect.signature(function).parameters.values() if one.kind is one.POSITIONAL_ONLY]
    try:
        result = function(*[given.pop(one) for one in positional if one in given], **given)
        if inspect.isgenerator(result):
            next(result, None)
    except ALLOWED as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return f"returned {type(result).__name__}"


def _sound(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Arguments that are right, for those without a default."""
    known = _known(name)
    made = {}
    for one in inspect.signature(function).parameters.values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) or one.name == "self":
            continue
        if one.name in known:
            made[one.name] = known[one.name]
        elif one.default is one.empty:
            made[one.name] = _by_annotation(str(one.annotation))
    return made


def _known(name: str) -> dict[str, Any]:
    import numpy as np

    if name.startswith((COMMUNICATOR, "comm.minimal")):
        from tilemesh.comm import connect

        return {"comm": connect("alone"), "x": np.ones(4), "counts": [4], "dest": 0, "source": 0, "root": 0, "to": 0}
    if name == "train.fit":
        return {"config": _config(), "run": "new"}
    if name == "train.generate":
        return {"run": "run", "prompt": "a", "tokens": 2}
    if name.startswith("plan."):
        from tilemesh.core.hardware import parse_cluster

        return {"model": _config().model, "cluster": parse_cluster("2xh100"), "plan": _config().plan, "batch": 4, "context": 16}
    if name == _THREADS:
        return {"ranks": 2, "main": lambda comm: comm.rank}
    if name == "launch.call":
        return {"function": "os:getpid", "ranks": 1}
    if name.startswith("kernels."):
        import torch

        return {name: torch.ones(4, 4) for name in ("a", "b", "x", "y", "scale", "shift", "weight")}
    return {}


def _config() -> Any:
    from tilemesh.train import load_config

    return load_config("tiny.toml", mesh="dp=1", sets=["train.steps=1"])


def _by_annotation(annotation: str) -> Any:
    for word, made in (("int", 1), ("float", 1.0), ("bool", True), ("str", "x"), ("Path", "run"), ("Mapping", {}), ("Sequence", [])):
        if word in annotation:
            return made
    return None
