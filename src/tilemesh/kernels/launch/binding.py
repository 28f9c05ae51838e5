"""What a public operator makes of a caller's arguments: values in order, or an error that says what does not fit.

A reference's signature says all there is to know: names, defaults, which arguments are tensors, what the others may be.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.ranges import LARGEST_WHOLE
from tilemesh.kernels.launch.tensors import check_tensors

SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", int: "SymInt", float: "float", bool: "bool"}
# What an argument of a type may be; torch.compile traces with the symbolic ones.
_ACCEPTED: dict[type, tuple[type, ...]] = {
    str: (str,),
    bool: (bool, torch.SymBool),
    int: (int, torch.SymInt),
    float: (float, int, torch.SymFloat, torch.SymInt),
}


class Binding:
    """The arguments of one operator, read off its reference."""

    def __init__(self, reference: Callable[..., Any]) -> None:
        self.name = reference.__name__
        self.parameters = list(inspect.signature(reference).parameters.values())
        hints = typing.get_type_hints(reference)
        self.results = _count_results(self.name, hints.pop("return", None))
        _check_hints(self.name, self.parameters, hints)
        self.names = [parameter.name for parameter in self.parameters]
        self.positional = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in self.parameters)
        self.defaults = {p.name: p.default for p in self.parameters if p.default is not p.empty}
        self.tensors = [at for at, name in enumerate(self.names) if hints[name] in (Tensor, Tensor | None)]
        self.required = [name for name in self.names if hints[name] is Tensor]
        self.others = [(at, name, hints[name]) for at, name in enumerate(self.names) if hints[name] in _ACCEPTED]
        self.places = {name: at for at, name in enumerate(self.names)}
        self.schema = [f"{SCHEMA_TYPES[hints[name]]} {name}" for name in self.names]
        self._filled_in = [self.defaults.get(name) for name in self.names]  # what is not given
        self._least = max((at + 1 for at, name in enumerate(self.names) if name not in self.defaults), default=0)
        # What follows the arguments of a call that names none, by how many these are.
        self._rests = {count: self._filled_in[count:] for count in range(self._least, self.positional + 1)}

    def bind(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        """All values, in order."""
        count = len(arguments)
        if not named and count in self._rests:
            return [*arguments, *self._rests[count]]
        if not self._least <= count <= self.positional:
            return self._bind_by_name(arguments, named)
        values = [*arguments, *self._filled_in[count:]]
        for name, value in named.items():
            at = self.places.get(name, -1)
            if at < count:
                return self._bind_by_name(arguments, named)  # refuses it
            values[at] = value
        return values

    def _bind_by_name(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        given = {**self.defaults, **dict(zip(self.names, arguments, strict=False)), **named}
        twice = [name for name in self.names[: len(arguments)] if name in named] if named else ()
        if len(arguments) > self.positional or len(given) != len(self.names) or twice:
            raise self._misfit(arguments, named, given, twice)
        return [given[name] for name in self.names]

    def _misfit(
        self, arguments: tuple[Any, ...], named: Mapping[str, Any], given: Mapping[str, Any], twice: Sequence[str]
    ) -> UsageError:
        for name in named:
            if name not in self.names:
                return unknown(f"argument of {self.name}", name, self.names)
        if len(arguments) > self.positional:
            by_name = ", ".join(self.names[self.positional :])
            then = f"; give {by_name} by name" if by_name else ""
            takes = ", ".join(self.names[: self.positional])
            return UsageError(f"{self.name} takes {takes} by position, got {len(arguments)} arguments{then}")
        if twice:
            return UsageError(f"{self.name} was given {', '.join(twice)} twice: by position and by name")
        missing = ", ".join(name for name in self.names if name not in given)
        return UsageError(f"{self.name} takes {', '.join(self.names)}; missing: {missing}")

    def check_kinds(self, values: Sequence[Any]) -> None:
        """Tensors where tensors belong, and every other argument of its type."""
        given = {self.names[at]: values[at] for at in self.tensors}
        for name in self.required:
            if given[name] is None:
                raise UsageError(f"{name} is None: expected a torch.Tensor")
        check_tensors(given)
        for at, name, kind in self.others:
            value = values[at]
            if not isinstance(value, _ACCEPTED[kind]) or (kind is not bool and isinstance(value, bool)):
                hint = "; .item() makes a number of it" if isinstance(value, Tensor) and kind is not str else ""
                shown = "" if isinstance(value, Tensor) else f"{value!r}, "
                raise UsageError(f"{name} is {shown}a {type(value).__name__}: expected a {kind.__name__}{hint}")
            if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
                raise UsageError(f"{name} is a whole number of {value.bit_length()} bits: expected one below 2**63")

    def options(self, values: Sequence[Any]) -> list[object]:
        """The arguments that are no tensors, as parts of a key: 1, 1.0 and True are equal, but not accepted alike."""
        return [part for at, _, _ in self.others for part in (values[at], type(values[at]))]

    def with_tensors(self, values: Sequence[Any], tensors: Sequence[Tensor | None]) -> list[Any]:
        """These values with other tensors."""
        made = list(values)
        for at, tensor in zip(self.tensors, tensors, strict=True):
            made[at] = tensor
        return made


def _count_results(name: str, hint: Any) -> int:
    if hint is Tensor:
        return 1
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is not tuple or any(part is not Tensor for part in parts):
        raise UsageError(f"{name} returns {_words(hint)}: expected -> Tensor, or -> tuple[Tensor, Tensor] and the like")
    return len(parts)


def _check_hints(name: str, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]) -> None:
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UsageError(f"{name} takes {parameter}: expected arguments with names of their own")
        hint = hints.get(parameter.name)
        if hint not in SCHEMA_TYPES:
            known = "Tensor, Tensor | None, str, int, float or bool"
            raise UsageError(f"{parameter.name} of {name} is annotated with {_words(hint)}: expected {known}")
    if Tensor not in hints.values():
        raise UsageError(f"{name} takes no tensor: expected at least one argument annotated with Tensor")


def _words(hint: Any) -> str:
    return "nothing" if hint is None else getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint)
