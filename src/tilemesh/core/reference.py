"""A configuration class as a reference: every key with its meaning, its default and what it may be.

The one idea: the dataclass stays the only description. The meaning of a key is the text under its field, read from the
source file; its default, its type and the range of its numbers are the field's. So a key that is added to the class is
in the reference at once, in the commented TOML file and in the Markdown page.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from tilemesh.core import config
from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import Range
from tilemesh.core.toml import toml_value

_COLUMNS = 100
"""Of a comment in a TOML file."""
REQUIRED = "required"


@dataclass(frozen=True)
class KeyDescription:
    """One key of a section."""

    path: str
    """With its section: "train.steps"."""
    meaning: str
    default: Any
    """The plain value that it has where nobody sets it; `dataclasses.MISSING` where somebody has to."""
    allowed: str

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def default_words(self) -> str:
        return REQUIRED if self.default is dataclasses.MISSING else toml_value(self.default)


@dataclass(frozen=True)
class SectionDescription:
    """One section of a configuration file, such as [train]."""

    name: str
    meaning: str
    keys: tuple[KeyDescription, ...]


def describe(cls: type[Any]) -> list[SectionDescription]:
    """The sections of a configuration class."""
    sections = []
    types, ranges = config.field_types(cls), config.field_ranges(cls)
    for field in config.settable_fields(cls):
        inner = config.section_type(types[field.name])
        if inner is None:
            raise UsageError(f"{cls.__name__}.{field.name} is a value: a reference has one level of sections")
        sections.append(_section(inner, field.name, config.field_default(field), ranges))
    return sections


def _section(cls: type[Any], name: str, base: Any, ranges: Mapping[str, Range]) -> SectionDescription:
    meanings, types = field_meanings(cls), config.field_types(cls)
    keys = []
    for field in config.settable_fields(cls):
        value = config.field_default(field) if base is dataclasses.MISSING else getattr(base, field.name)
        default = value if value is dataclasses.MISSING else config.plain_value(value)
        path = f"{name}.{field.name}"
        numbers = ranges.get(path)
        allowed = allowed_words(types[field.name], numbers)
        if numbers is not None and isinstance(default, (int, float)) and default not in numbers:
            allowed = f"{toml_value(default)}, or {allowed}"  # a number that stands for something else
        keys.append(KeyDescription(path, meanings.get(field.name, ""), default, allowed))
    return SectionDescription(name, _joined(inspect.getdoc(cls) or ""), tuple(keys))


def field_meanings(cls: type[Any]) -> dict[str, str]:
    """The text under each field of a dataclass and of those it inherits from."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            meanings |= _written_meanings(base)
    return meanings


def _written_meanings(cls: type[Any]) -> dict[str, str]:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except OSError:  # installed without its source files
        return {}
    assert isinstance(tree, ast.ClassDef)
    meanings = {}
    for statement, after in zip(tree.body, tree.body[1:], strict=False):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                meanings[name] = _joined(text)
    return meanings


def allowed_words(hint: Any, numbers: Range | None) -> str:
    """What a key may be: its type in words, with the range of its numbers."""
    words = config.type_words(hint)
    if numbers is None:
        return words
    members = get_args(hint)
    of_list = get_origin(hint) is tuple
    number = next((member for member in (hint, *members) if member in (int, float)), None)
    if number is None:
        raise UsageError(f"{words}: a range was given for a field that is no number")
    kind = config.type_words(number)
    ranged = numbers.words.removeprefix("a number ")
    joint = " " if ranged.split()[0] in ("between", "above") else ", "
    if of_list:
        count = "a list" if members[-1] is Ellipsis else f"a list of {len(members)}"
        return f"{count}, each {kind}{joint}{ranged}"
    return words.replace(kind, f"{kind}{joint}{ranged}", 1)


# ---- as text ---------------------------------------------------------------------------------------------------


def commented_toml(instance: Any, sections: Sequence[SectionDescription]) -> str:
    """A TOML file with every key and its explanation. A key that has its default is a comment, ready to be changed."""
    lines: list[str] = []
    for section in sections:
        section_value = getattr(instance, section.name)
        lines += ["", f"[{section.name}]", *_comment(section.meaning)]
        for key in section.keys:
            value = config.plain_value(getattr(section_value, key.name))
            follows = value != key.default and _follows(section_value, key)
            is_default = value == key.default or follows
            default = "" if value == key.default else f" Default: {key.default_words}."
            if follows:
                default = f" Default: {key.default_words}, which here means {toml_value(value)}."
            if key.default is dataclasses.MISSING:
                default = " Required."
            lines += ["", *_comment(f"{key.meaning} Allowed: {key.allowed}.{default}")]
            lines.append(f"{'#' * is_default}{key.name} = {toml_value(value)}")
    return "\n".join(lines).strip("\n") + "\n"


def _follows(section_value: Any, key: KeyDescription) -> bool:
    """Whether a section is the same without this key: its value follows from the others."""
    try:
        return bool(dataclasses.replace(section_value, **{key.name: key.default}) == section_value)
    except UsageError:
        return False


def markdown(sections: Sequence[SectionDescription]) -> str:
    """One table per section."""
    lines: list[str] = []
    for section in sections:
        lines += ["", f"## [{section.name}]", "", section.meaning, ""]
        lines += ["| key | meaning | default | allowed |", "|---|---|---|---|"]
        for key in section.keys:
            shown = REQUIRED if key.default is dataclasses.MISSING else f"`{key.default_words}`"
            cells = (f"`{key.path}`", key.meaning, shown, key.allowed)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines).strip("\n") + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _COLUMNS - 2, break_long_words=False, break_on_hyphens=False)]


def _joined(text: str) -> str:
    """A docstring as one line."""
    return " ".join(text.split())
