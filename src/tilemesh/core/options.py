"""Options as annotated fields of a frozen dataclass: what a value may be, how it is spelled, and what it means.

The one idea: a field is the only place where an option is written. Its annotation says what values there are (a type, a
`Range`, a `Literal`, names of a `Known` table, a file that is `WRITTEN`); `option` or `argument` say how it is spelled
and what it means. A field without them is for Python alone. `cli/typed.py` makes a command line of such a class.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tilemesh.core.errors import Argument, UsageError, unknown
from tilemesh.core.ranges import SEED, Range, shown


@dataclass(frozen=True)
class Commas:
    """Marks a tuple that is one word, with commas between: `--peers eager,compile`. `none`: the word for no element."""

    none: str = ""

    def text(self, elements: tuple[Any, ...]) -> str:
        return ",".join(map(str, elements)) or self.none

    def split(self, flag: str, text: str, kind: type) -> tuple[Any, ...]:
        check_commas(flag, text)
        words = [word.strip() for word in text.split(",")]
        elements = []
        for word in words if words != [self.none] else ():
            try:
                elements.append(kind(word))
            except ValueError:
                numbers = "whole numbers, such as 1,64" if kind is int else "numbers, such as 0.5,2"
                raise UsageError(f"{flag} has {shown(word)}: expected {numbers}") from None
        return tuple(elements)


@dataclass(frozen=True)
class Known:
    """Marks names of a table, `module:NAME`, which is imported where one has to be looked up; or the word `also`."""

    kind: str
    table: str
    also: str = ""

    def check(self, name: str) -> None:
        module, _, table = self.table.partition(":")
        names = getattr(import_module(module), table)
        if name not in names and name != self.also:
            raise unknown(self.kind, name, (*names, self.also) if self.also else names)


WRITTEN, FILLED, PICTURE = "a file that the command writes", "a folder that it writes into", "an .svg or .png"
MAY_BE_EMPTY = "text, or words of a user's own script"
"""Elsewhere an empty word is refused: `export RUN ""` would write where the user stands."""
OutFile = Annotated[str, WRITTEN]
OutPicture = Annotated[str, WRITTEN, PICTURE]
OutFolder = Annotated[str, FILLED]
"""No two of a command's are the same, and none is what it reads. A file is tried before the work begins; `-` is
standard output."""
Count = Annotated[int, Range(1, 100_000)]
Seed = Annotated[int, SEED]
Seconds = Annotated[float, Range(0, 1e4, above=True)]
Words = Annotated[tuple[str, ...], Commas()]
ROWS = "The rows, one object per line; - for stdout."
TURN = "Compile beside others, be timed alone: all lock this file."


def option(default: Any, meaning: str, metavar: str | None = None, *, flag: str = "", show: bool | str = True) -> Any:
    """`--name METAVAR`; `flag` where it is not called like the field: "--set", or "--out --run" for two names.

    A bool is `--name`, and one that is on by default `--name/--no-name`. `...` as the default: it has to be given.
    `show`: whether the help shows the default, or what it shows instead.
    """
    return _field(default, meaning=meaning, metavar=metavar, flag=flag, show=show, is_argument=False)


def argument(default: Any, meaning: str, metavar: str | None = None, *, show: bool | str = True) -> Any:
    """A word without a name before it; of a tuple all that are left."""
    return _field(default, meaning=meaning, metavar=metavar, flag="", show=show, is_argument=True)


def _field(default: Any, **metadata: Any) -> Any:
    return dataclasses.field(default=dataclasses.MISSING if default is ... else default, metadata=metadata)


def option_fields(cls: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    """The options of a class with their annotations: its own first, then those of the classes that it extends."""
    hints = get_type_hints(cls, include_extras=True)
    fields = [field for field in dataclasses.fields(cls) if "meaning" in field.metadata]
    own = inspect.get_annotations(cls)
    return [(field, hints[field.name]) for field in sorted(fields, key=lambda field: field.name not in own)]


def flag_of(field: dataclasses.Field[Any]) -> str:
    """What a user calls it: `--set`, or `MODEL` for an argument."""
    if field.metadata["is_argument"]:
        return str(field.metadata["metavar"] or field.name.upper()).strip("[].")
    return str(field.metadata["flag"] or f"--{field.name.replace('_', '-')}").split()[0].partition("/")[0]


def check_options(options: Any) -> None:
    """Refuse numbers outside of their range, words that are none of the choices, and lists with nothing between two
    commas: a text whose metavar has a comma is a list."""
    for field, hint in option_fields(type(options)):
        value = getattr(options, field.name)
        if value is None:
            continue
        name, choices = Argument(field.name, flag_of(field)), choices_of(hint)
        if isinstance(value, str) and "," in (field.metadata["metavar"] or "") and value != field.default:
            check_commas(name, value)
        for element in value if isinstance(value, tuple) else (value,):
            for mark in marks(hint):
                if isinstance(mark, Range):
                    mark.check(name, element, whole=is_whole(hint))
                if isinstance(mark, Known):
                    mark.check(element)
            if choices and element not in choices:
                raise unknown(field.name, element, [choice for choice in choices if choice])


def check_commas(name: str, text: str) -> None:
    """Refuse a list with nothing between two commas."""
    if not all(word.strip() for word in text.split(",")):
        raise UsageError(name, f" is {shown(text)}: a value beside a comma is empty; leave that comma out")


def changed_flags(options: Any, *names: str) -> list[str]:
    """The flags of those of these fields, or of all, whose value is not their default."""
    fields = [field for field, _ in option_fields(type(options)) if not names or field.name in names]
    return [flag_of(field) for field in fields if getattr(options, field.name) != field.default]


def refuse(options: Any, why: str, *names: str) -> None:
    """Refuse options that mean nothing here; `why` has {} for the first of them."""
    if flags := changed_flags(options, *names):
        raise UsageError(why.format(flags[0]))


def choices_of(hint: Any) -> tuple[str, ...]:
    """The words of a `Literal`, also where there may be none."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return next((choices for inner in get_args(hint) if (choices := choices_of(inner))), ())


def commas_of(hint: Any) -> Commas | None:
    """How a tuple is written, where it is one word."""
    return next((mark for mark in marks(hint) if isinstance(mark, Commas)), None)


def marks(hint: Any) -> Iterator[Any]:
    """What is annotated anywhere in a type: ranges, tables of names, that a file is written."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    for inner in get_args(hint):
        yield from marks(inner)


def is_whole(hint: Any) -> bool:
    """Whether numbers of a type are whole ones."""
    return hint is int or any(is_whole(inner) for inner in get_args(hint))
