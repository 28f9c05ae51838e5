"""Typed configuration: frozen dataclasses filled from a preset, a TOML file and `a.b=c` settings.

The one idea: the dataclass is the only description. Its annotations convert and check every value, its field
names are the only keys, and its defaults are the lowest layer (defaults < preset < file < settings). A key that
does not exist, anywhere, is an error that names the nearest one. Fields may be int, float, bool, str, Path,
Literal, tuple[...], any of these `| None`, and nested dataclasses. Nothing is read from the environment.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from tilemesh.core.errors import UsageError, nearest, unknown
from tilemesh.core.options import is_whole, marks
from tilemesh.core.ranges import LARGEST_WHOLE, Range, shown
from tilemesh.core.toml import toml_value

T = TypeVar("T")

_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
_MOST_BYTES = 16 << 20
_BOOLS = {"true": True, "yes": True, "false": False, "no": False}
_TOO_LARGE = "a whole number below 2**63"
_DIGITS = 40  # with signs and underscores; Python refuses to read numbers of thousands of digits
MOST_NAMES = 24  # of a section that an error lists
_NEXT_KEY = re.compile(r"\s*[A-Za-z_][\w.-]*\s*=")


class _Text(str):
    """A value typed on the command line: text whatever it means. A string in a file is only ever a string."""


class _MismatchError(Exception):
    """A value that the annotation does not admit; with what was expected, where the annotation does not say it."""


def load(
    cls: type[T],
    *,
    file: str | Path | None = None,
    preset: str | None = None,
    presets: Mapping[str, Any] | None = None,
    sets: Iterable[str] = (),
) -> T:
    """An instance of `cls` from the layers given; `presets` maps names to instances of `cls` or (partial) dicts.

    Each of `sets` is "a.b=c" or a comma list of such: "model.layers=105,model.width=20480".
    """
    merged: dict[str, Any] = {}
    layer: Mapping[str, Any]
    if preset is not None:
        known = presets or {}
        if preset not in known:
            raise unknown("preset", preset, known)
        chosen = known[preset]
        layer = chosen if isinstance(chosen, Mapping) else to_dict(chosen)
        _merge(merged, _check(cls, layer, f"preset {preset}"))
    if file is not None:
        _merge(merged, _check(cls, read_toml(file), str(file)))
    for key, text in split_sets(sets):
        *sections, last = key.split(".")
        layer = {last: _Text(text)}
        for section in reversed(sections):
            layer = {section: layer}
        _merge(merged, _check(cls, layer, "--set"))
    return _build(cls, merged)


def from_dict(cls: type[T], data: Mapping[str, Any], source: str = "") -> T:
    """An instance from plain data, as `to_dict` or a TOML file gives it; `source` names it in errors."""
    return _build(cls, _check(cls, data, source), source=source)


def section(cls: type[T], name: str, text: str, source: str) -> T:
    """One section of a TOML text, whatever else the text says: what a reader needs that does not know all of it."""
    values = parse_toml(text, source).get(name, {})
    if not isinstance(values, Mapping):
        raise UsageError(f"{source}: {name} is {values!r}: expected a section [{name}]")
    return from_dict(cls, values, source)


def to_dict(instance: Any) -> dict[str, Any]:
    """Plain nested data, ready for JSON: paths become text and tuples lists."""
    return {f.name: plain_value(getattr(instance, f.name)) for f in settable_fields(type(instance))}


def dump_toml(instance: Any) -> str:
    """TOML text that `load` turns back into an equal instance. None, which TOML lacks, is written "none"."""
    return "\n".join(_toml_lines(instance, "")).strip("\n") + "\n"


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The data in a TOML text; a syntax error is one line that begins with the source and line."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{source}: not valid TOML: nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError is one; so is what Python says of a number with thousands of digits
        message = str(error).partition(";")[0]
        place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
        line = int(place[1]) if place else text.count("\n") + 1
        what = re.sub(r" \(at [^()]*\)$", "", message)
        raise UsageError(f"{source}:{line}: not valid TOML: {what[:1].lower()}{what[1:]}") from None


def read_toml(file: str | Path, holds: str = "configuration") -> dict[str, Any]:
    """The data in a TOML file; `holds` says for an error what the file was to hold."""
    path = Path(file)
    try:
        with path.open("rb") as opened:  # a device such as /dev/zero has no end
            content = opened.read(_MOST_BYTES)
        if len(content) == _MOST_BYTES:
            raise UsageError(f"{holds} file '{path}' is larger than any {holds}: {_MOST_BYTES >> 20} MiB")
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise UsageError(f"{holds} file '{path}' does not exist") from None
    except UnicodeDecodeError:
        raise UsageError(f"{holds} file '{path}' is not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"{holds} file '{path}' cannot be read: {error.strerror}") from None
    return parse_toml(text, str(path))


def split_sets(texts: Iterable[str]) -> list[tuple[str, str]]:
    """(key, text) pairs of settings. A comma ends a setting only where another `key=` follows it."""
    pairs = []
    for text in texts:
        for item in _split_commas(text, only_before_key=True):
            key, equals, value = item.partition("=")
            if not equals or not key.strip():
                raise UsageError(f"'{item.strip()}' sets nothing: write key=value, such as train.steps=200")
            if value.rstrip().endswith(","):
                raise UsageError(f"'{item.strip()}' ends with a comma and nothing after it: leave that comma out")
            pairs.append((key.strip(), value.strip()))
    return pairs


# ---- reading ---------------------------------------------------------------------------------------------------


def _check(cls: type[Any], data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """One layer with every key known and every value converted; keys that are not given stay absent."""
    try:
        return _check_section(cls, data, "", cls)
    except UsageError as error:
        raise UsageError(f"{source}: {error}" if source else str(error)) from None


def _check_section(cls: type[Any], data: Mapping[str, Any], prefix: str, root: type[Any]) -> dict[str, Any]:
    hints = field_types(cls)
    checked: dict[str, Any] = {}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if key not in hints:
            raise unknown("key", path, [prefix + name for name in hints], near=_near_keys(path, prefix, hints, root))
        section = section_type(hints[key])
        if section is not None and isinstance(value, section):
            value = to_dict(value)
        if isinstance(value, Mapping):
            if section is None:
                below = ".".join([path, *map(str, list(value)[:1])])
                raise UsageError(f"unknown key '{below}': '{path}' is a value, not a section")
            checked[key] = _check_section(section, value, f"{path}.", root)
            continue
        try:
            checked[key] = _convert(hints[key], value)
        except _MismatchError as error:
            close = nearest(_shown(value).strip("'"), _options(hints[key]))
            hint = f"; did you mean '{close}'?" if close else ""
            expected = str(error) or type_words(hints[key])
            raise UsageError(f"{path} is {_shown(value)}, expected {expected}{hint}") from None
    return checked


def _convert(hint: Any, value: Any) -> Any:
    """The value as the annotation wants it, or `_MismatchError`."""
    origin: Any = get_origin(hint)
    args = get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value)
    if origin is Literal:
        for option in args:
            if (type(option) is type(value) and option == value) or (isinstance(value, _Text) and str(option) == value):
                return option
        raise _MismatchError
    if origin is tuple:
        return _convert_tuple(args, value)
    if dataclasses.is_dataclass(hint):  # a section that was given something else than a table
        raise _MismatchError
    if hint not in _WORDS:
        raise TypeError(f"a configuration field cannot be {hint!r}")
    if isinstance(value, (str, Path)) and not _is_utf8(str(value)):
        raise _MismatchError("UTF-8 text")
    if isinstance(value, _Text):
        return _convert_text(hint, value)
    if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
        raise _MismatchError(_TOO_LARGE)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise _MismatchError


def _convert_text(hint: Any, text: _Text) -> Any:
    if hint is bool and text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    if hint is int and re.fullmatch(r"[+-]?\d+(_\d+)*", text, re.ASCII):
        if len(text) > _DIGITS or abs(int(text)) > LARGEST_WHOLE:
            raise _MismatchError(_TOO_LARGE)
        return int(text)
    if hint is float:
        try:
            return float(text)
        except ValueError:
            raise _MismatchError from None
    if hint in (str, Path):
        return hint(_unquoted(text))
    raise _MismatchError


def _is_utf8(text: str) -> bool:
    """Whether a text can be written to a file; the command line hands on other bytes as half characters."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _convert_union(hint: Any, value: Any) -> Any:
    members = get_args(hint)
    # The word "none" means None, unless it is itself one of the choices.
    says_none = isinstance(value, str) and value.lower() == "none" and "none" not in _options(hint)
    if types.NoneType in members and (value is None or says_none):
        return None
    reason = ""
    for member in members:
        if member is not types.NoneType:
            try:
                return _convert(member, value)
            except _MismatchError as error:
                reason = reason or str(error)
    raise _MismatchError(reason)


def _convert_tuple(args: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if isinstance(value, _Text):
        inner = value[1:-1] if value[:1] + value[-1:] in ("[]", "()") else str(value)
        value = [_Text(item.strip()) for item in _split_commas(inner)] if inner.strip() else []
    if not isinstance(value, (list, tuple)):
        raise _MismatchError
    members = (args[0],) * len(value) if len(args) == 2 and args[1] is Ellipsis else args
    if len(members) != len(value):
        raise _MismatchError
    return tuple(_convert(member, item) for member, item in zip(members, value, strict=True))


def _unquoted(text: str) -> str:
    if len(text) < 2 or text[0] not in "\"'" or text[0] != text[-1]:
        return str(text)
    try:
        return str(tomllib.loads(f"value = {text}")["value"])
    except (ValueError, RecursionError):
        raise _MismatchError from None


def _split_commas(text: str, only_before_key: bool = False) -> list[str]:
    """The parts between commas that lie outside brackets and quotes."""
    parts, start, depth, quote, at, before = [], 0, 0, "", 0, "="
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\" and quote == '"':
                at += 1
            elif char == quote:
                quote = ""
        elif char in "\"'" and before in "=,[(":  # an apostrophe inside a word opens nothing
            quote = char
        elif char in "[(":
            depth += 1
        elif char in "])":
            depth -= 1
        elif char == "," and depth == 0 and (not only_before_key or _NEXT_KEY.match(text, at + 1)):
            parts.append(text[start:at])
            start = at + 1
        before = before if char.isspace() else char
        at += 1
    return [*parts, text[start:]]


# ---- building --------------------------------------------------------------------------------------------------


def _merge(base: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _build(cls: type[T], entries: Mapping[str, Any], base: T | None = None, prefix: str = "", source: str = "") -> T:
    """The instance; a section that is partly given keeps the rest from its default."""
    hints = field_types(cls)
    values: dict[str, Any] = {}
    for f in settable_fields(cls):
        default = field_default(f) if base is None else getattr(base, f.name)
        section = section_type(hints[f.name])
        value = entries.get(f.name, default)
        if section is not None and (isinstance(value, dict) or value is dataclasses.MISSING):
            below = value if isinstance(value, dict) else {}
            known = default if isinstance(default, section) else None
            value = _build(section, below, known, f"{prefix}{f.name}.", source)
        if value is dataclasses.MISSING:
            where = f"{source}: " if source else ""
            raise UsageError(f"{where}missing key '{prefix}{f.name}': expected {type_words(hints[f.name])}")
        values[f.name] = value
    try:
        return cls(**values)
    except UsageError as error:  # of the class itself, which knows its fields and not the section that it stands in
        if prefix and str(error).partition(" ")[0] in values:
            raise UsageError(f"{prefix}{error}") from None
        raise


def field_default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


# ---- what a class says -----------------------------------------------------------------------------------------


def settable_fields(cls: type[Any]) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(cls) if f.init]


def field_types(cls: type[Any]) -> Mapping[str, Any]:
    return _resolved_types(cls)  # type: ignore[arg-type]  # a class is hashable; mypy asks its instances


@functools.cache
def _resolved_types(cls: type[Any]) -> Mapping[str, Any]:
    resolved = get_type_hints(cls)
    return {f.name: resolved[f.name] for f in settable_fields(cls)}


def field_ranges(cls: type[Any], prefix: str = "") -> dict[str, Range]:
    """What the numbers of a class and of its sections may be, by path: the `Range` that a field is annotated with."""
    ranges: dict[str, Range] = {}
    for name, rule in _field_rules(cls).items():
        if rule.numbers is not None:
            ranges[f"{prefix}{name}"] = rule.numbers
        if rule.section is not None:
            ranges |= field_ranges(rule.section, f"{prefix}{name}.")
    return ranges


def check_fields(instance: Any, prefix: str = "") -> None:
    """Refuse numbers outside of their range, words that are not among the choices, and what is neither true nor false:
    a dataclass takes anything. `prefix`: what the fields are called by, such as "model."."""
    for name, rule in _field_rules(type(instance)).items():
        value, path = getattr(instance, name), f"{prefix}{name}"
        if rule.section is not None:
            check_fields(value, f"{path}.")
        elif not rule.admits(value):
            if rule.numbers is not None:
                for number in value if rule.is_list else (value,):
                    rule.numbers.check(path, number, whole=rule.is_whole)
            elif rule.choices:
                raise unknown(name, str(value), ["true", "false"] * rule.takes_bool + [*rule.choices])
            else:
                raise UsageError(f"{path} is {shown(value)}: expected true or false")


class _FieldRule(NamedTuple):
    """What an annotation says of a field's values, beside their type."""

    section: type[Any] | None
    numbers: Range | None
    is_whole: bool
    is_list: bool
    choices: tuple[str, ...]
    takes_bool: bool
    takes_none: bool

    def admits(self, value: Any) -> bool:
        """Whether this is one of the choices, true or false, or None where the field takes these: no range applies."""
        is_choice = isinstance(value, str) and value in self.choices
        return is_choice or (self.takes_bool and isinstance(value, bool)) or (self.takes_none and value is None)


def _field_rules(cls: type[Any]) -> Mapping[str, _FieldRule]:
    return _resolved_rules(cls)  # type: ignore[arg-type]  # as in `field_types`


@functools.cache
def _resolved_rules(cls: type[Any]) -> Mapping[str, _FieldRule]:
    """Of the fields of which there is more to say than a type."""
    annotated, rules = get_type_hints(cls, include_extras=True), {}
    for name, hint in field_types(cls).items():
        numbers = next((mark for mark in marks(annotated[name]) if isinstance(mark, Range)), None)
        members = (hint, *get_args(hint))
        rule = _FieldRule(
            section_type(hint), numbers, is_whole(hint), get_origin(hint) is tuple, tuple(_options(hint)),
            takes_bool=bool in members, takes_none=types.NoneType in members,
        )  # fmt: skip
        # Beside a mapping or a text, true and false are two values of many.
        others = [each for each in get_args(hint) if each not in (bool, types.NoneType) and get_origin(each) != Literal]
        if rule.section is not None or numbers is not None or rule.choices or (rule.takes_bool and not others):
            rules[name] = rule
    return rules


def section_type(hint: Any) -> type[Any] | None:
    """The dataclass of a nested section, also when it may be None."""
    for member in (hint, *get_args(hint)):
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return member
    return None


def _near_keys(path: str, prefix: str, names: Iterable[str], root: type[Any]) -> list[str]:
    """What an unknown key may stand for: the key of that name in another table, else one of its own table that is
    spelt like it. The table's own name, which the path begins with, makes none of them any closer."""
    paths = list(_paths(root))
    if not prefix:
        return paths
    last = path.removeprefix(prefix)
    close = nearest(last, names)
    elsewhere = [known for known in paths if known.rpartition(".")[2] == last.lower()]
    return elsewhere if len(elsewhere) == 1 else [prefix + close] if close else []


def _paths(cls: type[Any], prefix: str = "") -> Iterator[str]:
    for name, hint in field_types(cls).items():
        yield prefix + name
        section = section_type(hint)
        if section is not None:
            yield from _paths(section, f"{prefix}{name}.")


def _options(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(option) for option in get_args(hint)]
    return [option for member in get_args(hint) for option in _options(member)]


def type_words(hint: Any) -> str:
    """What an annotation admits, for people."""
    origin: Any = get_origin(hint)
    args = get_args(hint)
    if origin is Literal:
        return str(args[0]) if len(args) == 1 else f"one of {', '.join(map(str, args))}"
    if origin in (Union, types.UnionType):
        kinds = [member for member in args if member is not types.NoneType]
        may_say_none = len(kinds) < len(args) and "none" not in _options(hint)
        return " or ".join([*map(type_words, kinds), *(["none"] if may_say_none else [])])
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list, each {type_words(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}: {', '.join(map(type_words, args))}"
    section = section_type(hint)
    if section is None:
        return _WORDS[hint]
    names = list(field_types(section))
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"a section with {', '.join(names[:MOST_NAMES])}{more}"


# ---- writing ---------------------------------------------------------------------------------------------------


def _toml_lines(instance: Any, prefix: str) -> list[str]:
    cls = type(instance)
    lines, sections = [], []
    for f in settable_fields(cls):
        value = getattr(instance, f.name)
        if dataclasses.is_dataclass(value):
            sections += ["", f"[{prefix}{f.name}]", *_toml_lines(value, f"{prefix}{f.name}.")]
            continue
        plain = plain_value(value)
        _check_readable(field_types(cls)[f.name], f"{prefix}{f.name}", value, plain)
        lines.append(f"{f.name} = {toml_value(plain)}")
    return lines + sections


def _check_readable(hint: Any, path: str, value: Any, plain: Any) -> None:
    """Refuses what would come back as something else: the text "none" in a field that may be None, a wrong type."""
    try:
        back = _convert(hint, tomllib.loads(f"value = {toml_value(plain)}")["value"])
    except _MismatchError:
        raise UsageError(f"{path} is {_shown(value)}, expected {type_words(hint)}") from None
    if back != value and repr(back) != repr(value):  # repr, as nan is not equal to itself
        raise UsageError(f"{path} is {_shown(value)}, which would be read back as {_shown(back)}")


def plain_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _shown(value: Any) -> str:
    return shown(str(value) if isinstance(value, Path) else value)
