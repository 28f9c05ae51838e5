"""The `tilemesh` command: which commands there are, and how errors reach the user.

Whatever goes wrong is one line on standard error: exit code 2 for wrong use, 1 for a failure. The
traceback is for bugs, and for `--debug`. Commands import what they need when they run, so that
`tilemesh --help` is quick and needs neither torch nor MPI.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import tilemesh
from tilemesh.cli import (
    bench_collective,
    bench_compress,
    bench_exchange,
    bench_graph,
    bench_kernel,
    bench_methods,
    bench_serve,
    bench_train,
    calibrate,
    compress,
    config,
    doctor,
    graph,
    guide,
    launch,
    plan,
    report,
    serve,
    train,
    tune,
    verify,
)
from tilemesh.cli.targets import check_apart
from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.exhausted import out_of_memory


class _Command(TyperCommand):
    """A command that refuses empty words wherever it takes one (`export RUN ""` would write where the user stands), and
    to write one file twice, or over what it reads (`plan model.toml --save model.toml`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        typed = list(args)
        rest = super().parse_args(ctx, args)
        given: list[tuple[str, str]] = []
        for parameter in self.params:
            if ctx.get_parameter_source(parameter.name).name != "COMMANDLINE" or parameter.name in _PASSED_ON:
                continue
            value = ctx.params.get(parameter.name)
            words = [str(word) for word in _as_list(value) if isinstance(word, str | os.PathLike)]
            option = next((name for name in parameter.opts if name.startswith("--")), "")
            called = option or str(parameter.metavar or parameter.name.upper()).strip("[]")
            if not all(word.strip() for word in words):
                instead = ", or leave it out" if option and not parameter.required else ""
                raise UsageError(f"{called} is empty: give a value{instead}")
            given += [(called, word) for word in words]
        for option, word in itertools.pairwise(typed):
            if option.startswith("--") and option != "--" and not word.strip() and option[2:] not in _PASSED_ON:
                raise UsageError(f"{option} is empty: give a value")  # of an option that is no text: a path, say
        written = [pair for pair in given if pair[0] in _WRITTEN]
        check_apart(written, [pair for pair in given if pair[0] not in _WRITTEN])
        return rest


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


_WRITTEN = (
    "--json", "--html", "--svg", "--csv", "--chart", "--save", "--out", "--run", "--profile", "--notebook",
    "--fallback-dir", "FOLDER",
)  # fmt: skip
"""What names a file or a folder that a command writes; FOLDER as an argument."""


_PASSED_ON = ("command", "prompt")
"""Words of a user's own script, and text: those may be empty."""


def _empty_app() -> typer.Typer:
    return typer.Typer(
        name="tilemesh",
        help="Plan, run, measure and explain Transformer training, from one GPU tile to a mesh of ranks.",
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich takes as long to import as all of our commands together
    )


app = _empty_app()
app.command()(doctor.doctor)
app.command()(calibrate.calibrate)
app.command()(config.config)
app.command()(launch.launch)
app.command()(plan.plan)
app.command()(tune.tune)
app.command()(train.train)
app.command()(train.generate)
app.command()(train.export)
app.command()(serve.serve)
app.command()(compress.compress)
app.add_typer(train.data, name="data")
app.command()(verify.verify)
app.command()(report.report)
app.command()(report.watch)

bench = typer.Typer(help="Measure ours beside what you would use instead.")
bench.command("kernel")(bench_kernel.bench_kernel)
bench.command("collective")(bench_collective.bench_collective)
bench.command("exchange")(bench_exchange.bench_exchange)
bench.command("train")(bench_train.bench_train)
bench.command("serve")(bench_serve.bench_serve)
bench.command("graph")(bench_graph.bench_graph)
bench.command("methods")(bench_methods.bench_methods)
bench.command("compress")(bench_compress.bench_compress)
app.add_typer(bench, name="bench")
app.add_typer(graph.graph, name="graph")
app.command()(guide.guide)
for _commands in (app, bench, graph.graph, train.data):
    for _command in _commands.registered_commands:
        _command.cls = _Command

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


@app.callback(invoke_without_command=True)
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


def app_for(first: str) -> typer.Typer:
    """The app with the command of this name as it is, and of the others the name and the sentence that they are for:
    reading the options of all commands takes longer than everything else that `tilemesh --help` does."""
    made = _empty_app()
    made.callback(invoke_without_command=True)(_options)
    for command in app.registered_commands:
        assert command.callback is not None
        is_asked = first == (command.name or command.callback.__name__)
        made.command(command.name, cls=_Command)(command.callback if is_asked else _without_options(command.callback))
    for group in app.registered_groups:
        assert group.typer_instance is not None
        if group.name == first:
            made.add_typer(group.typer_instance, name=group.name)
            continue
        short = typer.Typer(help=group.typer_instance.info.help)
        short.command("options")(_without_options(_options))
        made.add_typer(short, name=group.name)
    return made


def _without_options(function: Callable[..., Any]) -> Callable[[], None]:
    def short() -> None:
        raise AssertionError(f"{function.__name__} was not asked for")

    short.__name__, short.__doc__ = function.__name__, function.__doc__
    return short


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. A command that is interrupted may say what it leaves behind:
    `raise KeyboardInterrupt("...")`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show µ gets a ?, not a traceback
    for name in ("COLUMNS", "LINES"):  # rich, typer and Python each stumble over another value that is no number
        if not re.fullmatch("[1-9][0-9]{0,4}", os.environ.get(name, "80")):
            del os.environ[name]
    arguments, debug = take_debug(list(sys.argv[1:] if argv is None else argv))
    try:
        completes = "_TILEMESH_COMPLETE" in os.environ  # a shell asks for the words that may follow
        first = next((word for word in arguments if not word.startswith("-")), "")
        command = typer.main.get_command(app if completes else app_for(first))
        if completes:
            command(arguments, prog_name="tilemesh")
        # Not by calling the command: that makes an exit code of an interrupt, without a word.
        with command.make_context("tilemesh", arguments) as context:
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
        known = sorted({name for parameter in context.command.params for name in parameter.opts if name[:2] == "--"})
        return str(unknown(f"option for {where}", option, known))
    commands = getattr(context.command, "commands", None)
    if message.startswith("No such command") and commands:
        return str(unknown(f"command for {where}", message.split("'")[1], sorted(commands)))
    # A value that does not fit: typer names the option but not what was given.
    names = getattr(getattr(error, "param", None), "opts", [])
    given = next((f" (given: {value})" for name, value in itertools.pairwise(arguments) if name in names), "")
    return f"{where}: {message[:1].lower()}{message[1:]}{given}; see {where} --help"
