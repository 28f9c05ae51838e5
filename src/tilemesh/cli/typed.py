"""A command of one value, its options (`core/options.py`), as typer takes commands: a function of many parameters."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from tilemesh.cli.output import Output, show
from tilemesh.cli.targets import check_apart, check_targets
from tilemesh.core.errors import UsageError
from tilemesh.core.options import (
    FILLED,
    MAY_BE_EMPTY,
    PICTURE,
    WRITTEN,
    check_options,
    commas_of,
    flag_of,
    marks,
    option_fields,
)

_REQUIRED = inspect.Parameter.empty


def typed(command: Callable[[Any], Output | int | None]) -> Callable[..., int | None]:
    """The function whose parameters are the options; it calls `run`."""
    (cls,) = (hint for name, hint in get_type_hints(command).items() if name != "return")
    fields = option_fields(cls)

    def called(**values: Any) -> int | None:
        return run(command, cls(**{field.name: _value(field, hint, values[field.name]) for field, hint in fields}))

    parameters = [_parameter(field, hint) for field, hint in fields]
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def run(command: Callable[[Any], Output | int | None], options: Any) -> int | None:
    """Refuse bad options, call the command and show what it returns; the exit code."""
    check_options(options)
    fields = option_fields(type(options))
    changed = [(field, hint) for field, hint in fields if getattr(options, field.name) != field.default]
    outputs = [pair for pair in changed if {WRITTEN, FILLED} & {*marks(pair[1])}]
    check_apart(_words(options, outputs), _words(options, [pair for pair in changed if pair not in outputs]))
    written = [(field, hint) for field, hint in fields if WRITTEN in marks(hint)]
    check_targets(_words(options, written))
    for _, path in _words(options, [pair for pair in written if PICTURE in marks(pair[1])]):
        from tilemesh.report.picture import check_picture

        check_picture(path)
    output = command(options)
    return show(output, options) if isinstance(output, Output) else output


def _value(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """What typer read, as the field has it."""
    if value is None:
        return field.default
    for word in value if isinstance(value, list) else [value]:
        if isinstance(word, str) and not word.strip() and MAY_BE_EMPTY not in marks(hint):
            is_optional = not field.metadata["is_argument"] and field.default is not dataclasses.MISSING
            instead = ", or leave it out" if is_optional else ""
            raise UsageError(f"{flag_of(field)} is empty: give a value{instead}")
    if (commas := commas_of(hint)) is not None:
        return commas.split(flag_of(field), value, _plain(get_args(get_args(hint)[0])[0]))
    return tuple(value) if isinstance(value, list) else value


def _words(options: Any, fields: Sequence[tuple[dataclasses.Field[Any], Any]]) -> list[tuple[str, str]]:
    """Texts with their flags."""
    values = [(flag_of(field), getattr(options, field.name)) for field, _ in fields]
    several = [(flag, value if isinstance(value, tuple) else (value,)) for flag, value in values]
    return [(flag, word) for flag, words in several for word in words if isinstance(word, str)]


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    kind, meta, commas = _plain(hint), field.metadata, commas_of(hint)
    default = _REQUIRED if field.default is dataclasses.MISSING else field.default
    if commas is not None and isinstance(default, tuple):
        kind, default = str, commas.text(default)
    if default in ("", ()):  # None, so that an empty word is one that was typed
        kind, default = kind | None, None
    words = {"help": meta["meaning"], "metavar": meta["metavar"], "show_default": meta["show"]}
    if meta["is_argument"]:
        info: Any = typer.Argument(**words)
    else:
        flag = flag_of(field)
        is_switch = kind is bool and default and not meta["flag"]
        info = typer.Option(*([f"{flag}/--no-{flag[2:]}"] if is_switch else meta["flag"].split() or [flag]), **words)
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
    assert hint in (int, float, bool, str), hint
    return hint
