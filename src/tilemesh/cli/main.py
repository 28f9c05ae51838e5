"""The `tilemesh` command: which commands there are, and how errors reach the user.

Whatever goes wrong is one line on standard error: exit code 2 for wrong use, 1 for a failure. The
traceback is for bugs, and for `--debug`. Commands import what they need when they run, so that
`tilemesh --help` is quick and needs neither torch nor MPI.
"""

from __future__ import annotations

import inspect
import io
import itertools
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import tilemesh
from tilemesh.cli import commands
from tilemesh.cli.typed import typed
from tilemesh.core.advice import TYPED
from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.exhausted import out_of_memory, try_imports

_LESS_MEMORY = {
    "serve": "set --pages, --memory, --context or --step-tokens lower, or --dtype bf16",
    "compress": "set --calibrate and --sequences lower, or use a machine with more memory",
    "verify": "give fewer --ranks",
    "bench": "measure fewer or smaller sizes",
}
"""What to change where a command runs out of memory. Training says so itself: it knows what its run needs."""

# typer's own errors: it carries them, but exports only the most special one by name.
_LibraryUsageError: Any = typer.BadParameter.__mro__[1]
_LibraryError: Any = typer.BadParameter.__mro__[2]


def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may also stand at the end.")] = False,
) -> None:
    if version:
        print(f"tilemesh {tilemesh.__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(0)


def make_app(words: Sequence[str] | None = None) -> typer.Typer:
    """The app: whole, or with the options of the command that these words name and of the others the name and the
    sentence that they are for. Those are read from the files, as importing all commands takes longer than the rest."""
    app = typer.Typer(
        name="tilemesh",
        help="Plan, run, measure and explain Transformer training and serving, from one GPU tile to a mesh of ranks.",
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich takes as long to import as all of our commands together
    )
    app.callback(invoke_without_command=True)(_options)
    _add_commands(app, commands.__name__, commands.__path__, words)
    return app


def _add_commands(app: typer.Typer, package: str, folders: Sequence[str], words: Sequence[str] | None) -> None:
    """Every file of a folder is a command, every folder in it a group; what each is for is its docstring."""
    order = {name: place for place, name in enumerate(commands.ORDER)}
    for module in sorted(pkgutil.iter_modules(folders), key=lambda module: order.get(module.name, len(order))):
        name, path = module.name, Path(getattr(module.module_finder, "path", ""), module.name)
        file = path / "__init__.py" if module.ispkg else path.with_suffix(".py")
        text = inspect.cleandoc(file.read_text(encoding="utf-8").split('"""', 2)[1])
        is_named = words is None or words[:1] == [name]
        if module.ispkg:
            group = typer.Typer(help=text)
            _add_commands(group, f"{package}.{name}", [str(path)], words and words[1:] if is_named else ())
            app.add_typer(group, name=name)
        else:
            command = typed(getattr(import_module(f"{package}.{name}"), name)) if is_named else _not_called
            app.command(name, help=text)(command)


def redirected(arguments: Sequence[str]) -> list[str]:
    """The line with the command of a group that its words mean: `plan MODEL` is `plan train MODEL`."""
    line = list(arguments)
    for place, word in enumerate(line):
        if not word.startswith("-"):
            is_group = any(module.name == word and module.ispkg for module in pkgutil.iter_modules(commands.__path__))
            redirect = getattr(import_module(f"{commands.__name__}.{word}"), "redirect", list) if is_group else list
            return [*line[: place + 1], *redirect(line[place + 1 :])]
    return line


def _not_called() -> None:
    raise AssertionError("a command without its options was called")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. A command that is interrupted may say what it leaves behind:
    `raise KeyboardInterrupt("...")`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show µ gets a ?, not a traceback
    for name in ("COLUMNS", "LINES"):  # rich, typer and Python each stumble over another value that is not a number
        if not re.fullmatch("[1-9][0-9]{0,4}", os.environ.get(name, "80")):
            del os.environ[name]
    try_imports()
    arguments, debug = take_debug(list(sys.argv[1:] if argv is None else argv))
    TYPED.set(arguments)
    try:
        completes = "_TILEMESH_COMPLETE" in os.environ  # a shell asks for the words that may follow
        line = redirected(arguments)
        command = typer.main.get_command(make_app(None if completes else [word for word in line if word[:1] != "-"]))
        if completes:
            command(line, prog_name="tilemesh")
        # Not by calling the command: that makes an exit code of an interrupt, without a word.
        with command.make_context("tilemesh", line) as context:
            code = command.invoke(context)
        sys.stdout.flush()  # what is still buffered may not find room either, and then this did not go well
    except typer.Exit as leave:
        return int(leave.exit_code)
    except (KeyboardInterrupt, typer.Abort) as interrupt:
        print(f"tilemesh: {': '.join(['interrupted', *map(str, interrupt.args)])}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_what_cannot_be_written()  # whoever read our output has gone (`tilemesh … | head`)
        return 1
    except Exception as error:
        known = explain(error, arguments)
        if known is None or debug:
            raise
        print(f"tilemesh: {one_line(known[0])}", file=sys.stderr)
        _drop_what_cannot_be_written()
        return known[1]
    return code if isinstance(code, int) else 0


def _drop_what_cannot_be_written() -> None:
    """Python flushes once more at exit: it must not complain again, nor change the exit code to 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(message: str) -> str:
    """A message as it is printed: one line, in which a word that fills a screen (5,000 digits, say) is cut."""
    return re.sub(r"\S{300,}", lambda word: f"{word[0][:60]}… ({len(word[0])} characters)", " ".join(message.split()))


def take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """`--debug` counts wherever it stands before a `--`: people add it at the end of the line that failed."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    ours = [word for word in arguments[:end] if word != "--debug"]
    return ours + arguments[end:], len(ours) < end


def explain(error: Exception, arguments: Sequence[str]) -> tuple[str, int] | None:
    """The line for a user and the exit code; None for what is a bug and keeps its traceback."""
    if isinstance(error, UsageError):
        return error.typed, 2
    if isinstance(error, RunError):
        return str(error), 1
    exhausted = out_of_memory(error)
    if exhausted is not None:
        command = next((word for word in arguments if word in _LESS_MEMORY), "")
        return f"{exhausted}; {_LESS_MEMORY.get(command, 'ask for less, or use a machine with more memory')}", 1
    if isinstance(error, OSError):  # a full disk, a missing right: the machine's state, no bug of ours
        # A failed write does not know its file, or only a descriptor: commands name it, so what is left is the output.
        is_named = isinstance(error.filename, (str, bytes))
        where = f"file {os.fsdecode(error.filename)}" if is_named else "standard output"
        return f"{where} cannot be read or written: {error.strerror or error}", 1
    if isinstance(error, _LibraryUsageError):
        return _usage_sentence(error, arguments), 2
    if isinstance(error, _LibraryError):
        return str(error.format_message()), 1
    return None


def _usage_sentence(error: Any, arguments: Sequence[str]) -> str:
    """typer's complaint, with what is known and the nearest match, on one line."""
    message = str(error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    where = context.command_path
    option = getattr(error, "option_name", None)
    if message.startswith("No such option") and option is not None:
        if owners := _owners(option, where.split()[1:-1]):
            return f"{option} is an option of {' and '.join(owners)}, not of {where}: leave it out"
        return str(unknown(f"option for {where}", option, sorted(_flags(context.command))))
    commands = getattr(context.command, "commands", None)
    if message.startswith("No such command") and commands:
        return str(unknown(f"command for {where}", message.split("'")[1], sorted(commands)))
    # A value that does not fit: typer names the option but not the value.
    names = getattr(getattr(error, "param", None), "opts", [])
    flag, value = next(((name, value) for name, value in itertools.pairwise(arguments) if name in names), ("", ""))
    if flag and not value.strip():
        return f"{flag} is empty: give a value"
    typed_value = f" (given: {value})" if flag else ""
    return f"{where}: {message[:1].lower()}{message[1:]}{typed_value}; see {where} --help"


def _owners(option: str, group: Sequence[str]) -> list[str]:
    """The commands of a group that do have an option."""
    if not group:
        return []
    package, app = import_module(".".join([commands.__name__, *group])), typer.Typer()
    _add_commands(app, package.__name__, package.__path__, None)
    commands_of: Any = typer.main.get_command(app)
    owners = [name for name, command in commands_of.commands.items() if option in _flags(command)]
    return [" ".join(["tilemesh", *group, name]) for name in owners]


def _flags(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts if name[:2] == "--"}
