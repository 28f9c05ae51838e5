"""Hostile arguments for tilemesh's public Python functions, which it finds in the packages' own lists of names.

One argument at a time is replaced in an otherwise sound call, by a value of the kind that its annotation names (or, for
arrays, of a kind that cannot be computed with). Allowed: to return, or to raise what the design promises: an error
derived from ValueError (bad arguments) or RuntimeError (a failure), a TypeError, or an OSError that names a file.
Anything else is a bug's own exception. A class is called like a function; one that holds what others
have made (no sound call) is left out.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hostile
from fuzz_cases import Case

VALUES_OF_AN_ARGUMENT = 4
ALLOWED = (ValueError, RuntimeError, TypeError, OSError)
# Modules that users call besides the packages that `tilemesh` itself lists.
MODULES = ("comm.minimal", "comm.schedules.book", "core.units", "model.config", "runs.reader")
COMMUNICATOR = "communicator"

_NUMBERS: Mapping[str, Any] = {
    "zero": 0,
    "minus one": -1,
    "a half": 0.5,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "2^31": 2**31,
    "2^63": 2**63,
    "10^400": 10**400,
    "text": "x",
    "none": None,
    "a list": [],
}
_TEXTS: Mapping[str, Any] = {
    "nothing": "",
    "superscript two": "²",
    "5,000 digits": "9" * 5000,
    "a missing file": "nowhere/nothing.toml",
    "a folder": "folder",
    "nobody's home": "~nosuchuser/x",
    "a very long word": "w" * 20_000,
    "an equals sign": "=",
    "bytes that are no UTF-8": "\udcff",
    "deeply nested TOML": "deep.toml",
    "a NUL": "\0",
    "binary TOML": "binary.toml",
}


def _arrays() -> Mapping[str, Any]:
    import numpy as np
    import torch

    return {
        "an array of no elements": np.zeros(0),
        "an array of no dimension": np.array(1.0),
        "complex": np.ones(4, complex),
        "an array of objects": np.array([{}, []], dtype=object),
        "an array of texts": np.array(["a", "b"]),
        "booleans": np.ones(4, bool),
        "a strided array": np.ones(8)[::2],
        "read-only": np.broadcast_to(np.ones(1), 4),
        "a tensor": torch.ones(4),
        "a bfloat16 tensor": torch.ones(4, dtype=torch.bfloat16),
        "a number": 3,
        "none": None,
        "a sparse tensor": torch.ones(2, 2).to_sparse(),
        "a meta tensor": torch.ones(4, device="meta"),
        "text": "x",
        "33 dimensions": np.ones((1,) * 33),
        "other byte order": np.ones(4, ">f4"),
        "a list": [1, 2],
        "dates": np.zeros(2, "M8[s]"),
    }


def functions() -> dict[str, Callable[..., Any]]:
    """`package.name` of every public function and class."""
    import tilemesh

    found: dict[str, Callable[..., Any]] = {}
    for package in [*tilemesh._SUBPACKAGES, *MODULES]:
        module = importlib.import_module(f"tilemesh.{package}")
        for name in _public(module):
            member = getattr(module, name)
            if callable(member) and not (inspect.isclass(member) and issubclass(member, BaseException)):
                found[f"{package}.{name}"] = member
    return found


def _public(module: Any) -> list[str]:
    """What a module lists; without a list, the functions that are its own."""
    if "__all__" in vars(module):
        return list(module.__all__)
    if "__dir__" in vars(module):
        return list(dir(module))
    own = [(name, member) for name, member in vars(module).items() if name[0] != "_" and inspect.isfunction(member)]
    return sorted(name for name, member in own if member.__module__ == module.__name__)


def cases() -> Iterator[Case]:
    from tilemesh.comm import Communicator

    methods = inspect.getmembers(Communicator, inspect.isfunction)
    everything = {**functions(), **{f"{COMMUNICATOR}.{name}": member for name, member in methods if name[0] != "_"}}
    for name, function in everything.items():
        if name in _HOLD_OTHERS:
            continue
        for argument, annotation in _arguments(function):
            for label in hostile.some([*_values(annotation)], VALUES_OF_AN_ARGUMENT, name + argument):
                yield Case(f"python: {name} where {argument} is {label}", function=f"{name}|{argument}|{label}")


# Classes whose instances users get from functions, and what ends this process by design.
_HOLD_OTHERS = (
    "comm.Communicator",
    "comm.Handle",
    "parallel.Axis",
    "parallel.Laid",
    "plan.Prediction",
    "plan.Result",
    "serve.Answer",
    "serve.Completion",
    "serve.Engine",
    "train.Result",
    "train.Shown",
    "train.TrainConfig",
    "communicator.abort",
    "launch.Ranks",
)


def _arguments(function: Callable[..., Any]) -> list[tuple[str, str]]:
    found = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [(one.name, str(one.annotation)) for one in found if one.name != "self" and one.kind not in variable]


def _values(annotation: str) -> Mapping[str, Any]:
    """Hostile values of the kind that an annotation names; nothing for what only other functions can make."""
    if "ndarray" in annotation:
        return {label: value for label, value in _arrays().items() if type(value).__module__ == "numpy"}
    if any(word in annotation for word in ("Any", "Tensor")):
        return _arrays()
    if any(word in annotation for word in ("str", "Path", "Function")):
        return {**_TEXTS, **({"none": None} if "None" in annotation else {})}
    if any(word in annotation for word in ("int", "float")):
        return _NUMBERS
    return {}


# ---- calling ---------------------------------------------------------------------------------------------------


def call(text: str) -> str:
    """Make the call that a case names; returns the one line of what it came to, or raises what is not allowed."""
    name, argument, label = text.split("|")
    if name.startswith(COMMUNICATOR):
        from tilemesh.comm import connect

        function: Any = getattr(connect("alone"), name.partition(".")[2])
    else:
        function = functions()[name]
    annotation = dict(_arguments(function))[argument]
    value = _values(annotation)[label]
    given = {**_sound(name, function), argument: Path(value) if annotation == "Path" else value}
    try:
        result = function(**given)
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
        takes_it = "Tensor" in str(one.annotation) or not name.startswith("kernels.")
        if one.name in known and takes_it:
            made[one.name] = known[one.name]
        elif one.default is one.empty:
            made[one.name] = _by_annotation(str(one.annotation))
    return made


def _known(name: str) -> dict[str, Any]:
    """By the first word of the function's name, what its arguments are called and could be."""
    import numpy as np

    if name.startswith((COMMUNICATOR, "comm.minimal")):
        from tilemesh.comm import connect

        here = {
            "comm": connect("alone"),
            "x": np.ones(4),
            "out": np.ones(4),
            "to": 0,
            "source": 0,
            "color": 0,
            "shape": 4,
            "from_rank": [np.ones(4)],
            "to_rank": [np.ones(4)],
        }
        named = {
            "collective": "all_reduce",
            "nbytes": 64,
            "call": lambda: None,
            "observer": lambda call: None,
            "values": [1.0],
        }
        if not name.endswith(("recv", ".irecv")):
            here.pop("out")
        return here | named
    if name == "train.fit":
        return {"config": _config(), "run": "new"}
    if name == "serve.generate":
        return {"source": "run", "prompt": "a", "tokens": 2}
    if name.startswith("plan."):
        from tilemesh.core.hardware import parse_cluster

        return {
            "model": _config().model,
            "cluster": parse_cluster("2xh100"),
            "plan": _config().plan,
            "context": 16,
            **({"batch": 4} if name == "plan.search" else {}),
        }
    if name == "comm.run_threads":
        return {"ranks": 2, "main": lambda comm: comm.rank}
    if name == "launch.call":
        return {"function": "os:getpid", "ranks": 1}
    if name.startswith("kernels."):
        import torch

        if name == "kernels.attention":
            return {word: torch.ones(1, 2, 4, 64) for word in "qkv"}
        square = {word: torch.ones(4, 4) for word in ("a", "b", "x", "residual", "gate", "logits", "table")}
        line = {word: torch.ones(4) for word in ("scale", "shift", "weight", "bias")}
        if name in ("kernels.linear_cross_entropy", "kernels.embedding"):
            line["weight"] = torch.ones(4, 4)
        half = {word: torch.ones(4, 2) for word in ("cos", "sin")}
        return square | line | half | {word: torch.zeros(4, dtype=torch.long) for word in ("target", "tokens")}
    if name.startswith("graph."):
        from tilemesh.graph import Graph, build

        x = build.argument("x", [2])
        return {"graph": Graph((x,), (build.relu(x),))}
    if name.startswith("model."):
        return {"model": _config().model, "config": _config().model}
    if name.startswith("runs."):
        return {"run": "run", "folder": "run", "path": "run"}
    if name == "parallel.split_data":
        return {"x": np.ones(4), "y": np.ones(4), "dp_size": 2, "dp_index": 0}
    return {}


def _config() -> Any:
    from tilemesh.train import load_config

    return load_config("tiny.toml", mesh="dp=1", sets=["train.steps=1"])


def _by_annotation(annotation: str) -> Any:
    sound = (
        ("int", 1),
        ("float", 1.0),
        ("bool", True),
        ("str", "x"),
        ("Path", "run"),
        ("Mapping", {}),
        ("Sequence", []),
    )
    return next((made for word, made in sound if word in annotation), None)
