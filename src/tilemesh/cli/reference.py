"""The reference of every command and flag as a Markdown page, made from the commands themselves.

`python -m tilemesh.cli.reference > docs/commands.md` writes it; a test compares.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import typer

from tilemesh.cli.main import make_app

_PAGE = """# Commands

Every command of `tilemesh` with its arguments and options. `tilemesh COMMAND --help` prints the same in a terminal.
Exit codes: 0 done, 1 failed, 2 wrong use. `--debug`, anywhere in a command, adds the traceback of an error.

This page is generated: `python -m tilemesh.cli.reference > docs/commands.md`.
"""


def reference_page() -> str:
    """The Markdown page."""
    root: Any = typer.main.get_command(make_app())
    sections = [section for name, command in commands(root, "tilemesh") for section in _section(name, command)]
    return "\n".join([_PAGE, *sections]).rstrip() + "\n"


def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(full name, command) of every command, those of groups under their group's name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _section(name: str, command: Any) -> Iterator[str]:
    text = inspect.cleandoc(command.help or "")
    yield f"## {name}\n\n{_paragraphs(text, name)}\n"
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    shown = " ".join(_metavar(parameter) for parameter in arguments)
    yield f"```text\n{name} {shown + ' ' if shown else ''}[OPTIONS]\n```\n"
    rows = [(f"`{_metavar(parameter)}`", parameter.help or "", "") for parameter in arguments]
    rows += [(_flags(parameter), parameter.help or "", _default(parameter)) for parameter in options]
    if rows:
        yield "| | meaning | default |\n|---|---|---|"
        for row in rows:
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        yield ""


def _paragraphs(text: str, name: str) -> str:
    """The command's own words; an example in them is shown as one."""
    parts = []
    for part in text.split("\n\n"):
        line = " ".join(part.split())
        parts.append(f"```bash\n{line}\n```" if line.startswith(name) else line)
    return "\n\n".join(parts)


def _metavar(parameter: Any) -> str:
    return parameter.metavar or str(parameter.name).upper()


def _flags(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    takes = "" if parameter.is_flag else f" `{parameter.metavar or _kind(parameter)}`"
    return f"{names}{takes}"


def _kind(parameter: Any) -> str:
    return {int: "N", float: "X"}.get(type(parameter.default), "TEXT")


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value == "" or (parameter.is_flag and not value):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
