"""A command of one value, its options (`core/options.py`), as typer takes commands: a function of many parameters."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from tilemesh.cli.targets import check_apart, check_targets
from tilemesh.core.options import FILLED, WRITTEN, check_options, flag_of, marks, option_fields

_REQUIRED = inspect.Parameter.empty


def typed(command: Callable[[Any], int | None]) -> Callable[..., int | None]:
    """The function whose parameters are the options; it refuses bad ones before the command begins its work."""
    (cls,) = (hint for name, hint in get_type_hints(command).items() if name != "return")
    fields = option_fields(cls)

    def called(**values: Any) -> int | None:
        options = cls(**{name: tuple(value or ()) if name in lists else value for name, value in values.items()})
        check_options(options)
        given = [(field, hint) for field, hint in fields if getattr(options, field.name) != field.default]
        outputs = [pair for pair in given if {WRITTEN, FILLED} & {*marks(pair[1])}]
        check_apart(_words(options, outputs), _words(options, [pair for pair in given if pair not in outputs]))
        written = [field for field, hint in fields if WRITTEN in marks(hint)]
        check_targets(**{flag_of(field).removeprefix("--"): getattr(options, field.name) for field in written})
        return command(options)

    lists = {field.name for field, hint in fields if get_origin(hint) is tuple}
    parameters = [_parameter(field, hint) for field, hint in fields]
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _words(options: Any, fields: Sequence[tuple[dataclasses.Field[Any], Any]]) -> list[tuple[str, str]]:
    """Texts and paths with their flags."""
    values = [(flag_of(field), getattr(options, field.name)) for field, _ in fields]
    several = [(flag, value if isinstance(value, tuple) else (value,)) for flag, value in values]
    return [(flag, str(word)) for flag, words in several for word in words if isinstance(word, str | Path)]


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    kind, meta = _plain(hint), field.metadata
    default = _REQUIRED if field.default is dataclasses.MISSING else field.default
    if kind == list[str] and default is not _REQUIRED:
        kind, default = list[str] | None, None
    said = {"help": meta["meaning"], "metavar": meta["metavar"], "show_default": meta["show"]}
    if meta["is_argument"]:
        info: Any = typer.Argument(**said)
    else:
        flag = flag_of(field)
        is_switch = kind is bool and default and not meta["flag"]
        info = typer.Option(*([f"{flag}/--no-{flag[2:]}"] if is_switch else meta["flag"].split() or [flag]), **said)
    kind = Annotated[kind, info]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _plain(hint: Any) -> Any:
    """The type as typer knows it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _plain(inner[0])
    if origin is Literal:
        return str
    if origin is tuple:
        return list[str]
    if origin in (Union, types.UnionType):
        (kind,) = {_plain(member) for member in inner if member is not types.NoneType}
        return kind | None
    assert hint in (int, float, bool, str, Path), hint
    return hint
