"""Every case of the fuzzer, found by looking at what there is: commands, options, configuration keys, run folders.

A case is one hostile value (or a pair of them) in an otherwise sound and cheap call. Commands and their options come
from the tree that typer makes, keys from the dataclasses, files from a finished run: what is added later is covered
without a change here. A command whose sound call `BASES` does not know gets its values all the same.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import hostile

VALUES_OF_AN_OPTION = 8
VALUES_OF_A_KEY = 7
PAIRS_OF_A_COMMAND = 6
# What goes on for as long as it was asked to is sent a Ctrl-C: cases by how their names begin.
UNTIL_INTERRUPTED = (
    "watch: ",
    "serve: ",
    "generate: --tokens is ",
    "train: train.steps is ",
    "train: sample.tokens is ",
    "python: serve.generate where tokens is ",
)


@dataclass(frozen=True)
class Case:
    """`name` says what is done, and repeats it: `python tests/fuzz/fuzz_run.py NAME`."""

    name: str
    words: tuple[str, ...] = ()  # of a command line
    function: str = ""  # or of a Python function, as in fuzz_functions.py
    edit: tuple[str, str] = ("", "")  # a file of the playground and what is done to it first
    environ: Mapping[str, str] = field(default_factory=dict)
    must_refuse: bool = False  # whether it may neither begin its work nor end with exit code 0
    starts_ranks: bool = False  # whether ranks are really started, instead of stopping there
    kill: Any = None  # of fuzz_kills.py: what was killed in the playground before

    @property
    def group(self) -> str:
        """What a sample takes its share of."""
        return self.name.partition(":")[0]


@dataclass(frozen=True)
class Base:
    """A sound, cheap call of a command: options with their values, then the arguments."""

    options: Mapping[str, str | None] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    def words(self, command: str, changed: Mapping[str, str | None], arguments: tuple[str, ...] | None = None) -> Any:
        said: list[str] = []
        for name, value in {**self.options, **changed}.items():
            said += [name] if value is None else [name, value]
        given = self.arguments if arguments is None else arguments
        return (*command.split(), *said, *(("--",) if given else ()), *given)


_STEP = "train.steps=1,checkpoint.every=0,evaluate.every=0"
BASES: Mapping[str, tuple[Base, ...]] = {
    "calibrate": (Base({"--quick": None, "--no-save": None}),),
    "launch": (Base({"--ranks": "2", "--transport": "torch"}, ("script.py",)),),
    "plan train": (Base({"--cluster": "2xh100", "--batch": "4"}, ("model.toml",)),),
    "plan serve": (Base({"--cluster": "1xh100", "--prompt": "8", "--output": "4"}, ("model.toml",)),),
    "plan align": (Base({"--align": "prompts=2,answers=2,prompt=8,tokens=8", "--cluster": "2xh100"}, ("model.toml",)),),
    "plan draw": (Base({"--stages": "2", "--microbatches": "2"}, ("1f1b",)),),
    "plan grade": (Base({}, ("run",)),),
    "plan fit": (Base({}, ("runs.toml",)),),
    "tune": (Base({"--dtype": "float16"}, ("16x16x16",)),),
    "train": (
        Base({"--set": _STEP, "--mesh": "dp=1", "--out": "new"}, ("tiny.toml",)),
        Base({"--resume": "run", "--set": "train.steps=3"}),
    ),
    "align": (
        Base(
            {
                "--task": "bandit",
                "--set": f"{_STEP},align.prompts=1,align.answers=2,align.held_out=0,align.max_tokens=1",
                "--out": "new",
            },
            ("exported",),
        ),
    ),
    "generate": (Base({"--prompt": "a", "--tokens": "2"}, ("run",)),),
    "export": (Base({}, ("run", "written")),),
    "data prepare": (Base({}, ("text.txt", "written")),),
    "config": (Base({}, ("tiny",)),),
    "verify": (Base({"--ranks": "1", "--transport": "threads", "--models": "gpt"}),),
    "report": (Base({"--html": "page.html"}, ("run",)), Base({"--html": "page.html"}, ("rows.jsonl",))),
    "watch": (Base({}, ("run",)),),
    "serve": (Base({"--port": "0", "--pages": "8"}, ("run",)),),
    "bench kernel": (Base({"--shapes": "16x16x16", "--no-compile": None, "--repeats": "1"}),),
    "bench collective": (
        Base({"--ranks": "2", "--sizes": "4B", "--quick": None, "--algorithms": "none"}, ("all_reduce",)),
        Base({"--simulate": "flat", "--ranks": "4", "--sizes": "1KiB"}, ("all_reduce",)),
        Base({"--draw": "ring", "--ranks": "4"}, ("all_reduce",)),
    ),
    "bench all": (Base({"--out": "all", "--seconds": "1", "--jobs": "train_gpt2", "--list": None}),),
    "bench pipeline": (
        Base({"--ranks": "2", "--microbatches": "2", "--repeats": "1", "--transport": "torch"}, ("gpipe",)),
    ),
    "bench exchange": (
        Base({"--model": "tiny", "--rows": "1", "--tokens": "8", "--repeats": "1", "--transport": "torch"}),
    ),
    "bench train": (
        Base({"--set": _STEP, "--mesh": "dp=1", "--peers": "eager", "--blocks": "1", "--steps": "1"}, ("tiny.toml",)),
    ),
    "compress": (
        Base(
            {"--recipe": "int8", "--out": "written", "--calibrate": "32", "--sequences": "2", "--data": "text.txt"},
            ("run",),
        ),
    ),
    "guide": (Base({"--exercise": "world_sum", "--answer": "28"}, ("1",)), Base({"--grade": "class"})),
    "bench methods": (Base({"--steps": "8", "--blocks": "1", "--html": "page.html"}),),
    "bench compress": (
        Base(
            {"--recipes": "int8", "--peers": "none", "--calibrate": "32", "--sequences": "2", "--data": "text.txt"},
            ("run",),
        ),
    ),
    "bench graph": (Base({"--size": "tiny", "--peers": "eager", "--repeats": "1", "--seconds": "0.1"}, ("lstm",)),),
    "graph breaks": (Base({}, ("program.py:make",)),),
    "graph explain": (Base({"--device": "t4"}, ("program.py:make",)),),
    "bench serve": (
        Base(
            {
                "--requests": "1",
                "--prompt": "4",
                "--output": "2",
                "--blocks": "1",
                "--running": "1",
                "--predict": "machine",
            },
            ("tiny",),
        ),
    ),
}


def all_cases(playground: Path) -> dict[str, Case]:
    """By name; `playground` holds the run whose files are damaged."""
    import fuzz_functions
    import fuzz_kills

    found: dict[str, Case] = {}
    for cases in (
        command_cases(),
        pair_cases(),
        share_cases(),
        key_cases(),
        file_cases(playground),
        environment_cases(),
        rank_cases(),
        fuzz_kills.kill_cases(),
        fuzz_functions.cases(),
    ):
        for case in cases:
            found.setdefault(case.name, case)
    return found


# ---- commands and options --------------------------------------------------------------------------------------


@functools.cache
def commands() -> Mapping[str, Any]:
    """Every command that typer knows, by the words that call it."""
    import typer

    from tilemesh.cli.main import make_app

    def below(command: Any, words: str) -> Iterator[tuple[str, Any]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from below(inner, f"{words} {name}".strip())
        if not hasattr(command, "commands"):
            yield words, command

    return dict(below(typer.main.get_command(make_app()), ""))


def values_for(command: Any, parameter: Any) -> Mapping[str, str]:
    """Hostile values for an option or argument, by what it should be."""
    kind = str(get_type_hints(command.callback)[parameter.name])
    if "int" in kind or "float" in kind:
        return hostile.NUMBERS
    metavar = str(parameter.metavar or "")
    is_path = (
        "Path" in kind
        or _called(parameter) in hostile.WRITTEN
        or any(word in metavar for word in ("FILE", "FOLDER", "RUN", ".toml", ".jsonl", "SOURCE"))
    )
    return hostile.PATHS if is_path else hostile.WORDS


def parameters(command: Any) -> list[Any]:
    """Those that take a value."""
    return [one for one in command.params if not getattr(one, "is_flag", False) and one.name != "help"]


def command_cases() -> Iterator[Case]:
    for name, command in commands().items():
        for number, base in enumerate(BASES.get(name, (Base(),))):
            suffix = f" ({number + 1})" if number else ""
            yield Case(f"{name}: sound{suffix}", base.words(name, {}))
            for parameter in parameters(command):
                values = values_for(command, parameter)
                called = _called(parameter)
                always = hostile.UNWRITABLE if called in hostile.WRITTEN else (hostile.NOTHING,)
                always = () if called in hostile.MAY_BE_EMPTY else always
                chosen = hostile.some([*values], VALUES_OF_AN_OPTION, f"{name}{called}{number}")
                for label in dict.fromkeys((*always, *chosen)):
                    words = _with(base, name, parameter, values[label])
                    yield Case(f"{name}: {called} is {label}{suffix}", words, must_refuse=label in always)


def pair_cases() -> Iterator[Case]:
    for name, command in commands().items():
        choose = random.Random(f"{hostile.SEED}{name}")
        options = [one for one in parameters(command) if _is_option(one)]
        base = BASES.get(name, (Base(),))[0]
        for _ in range(PAIRS_OF_A_COMMAND if len(options) > 1 else 0):
            pair = choose.sample(options, 2)
            labels = [choose.choice([*values_for(command, one)]) for one in pair]
            changed = {_called(one): values_for(command, one)[label] for one, label in zip(pair, labels, strict=True)}
            said = " and ".join(f"{_called(one)} is {label}" for one, label in zip(pair, labels, strict=True))
            yield Case(f"{name}: {said}", base.words(name, changed))


def share_cases() -> Iterator[Case]:
    """Every option that names what is written, with the file that another names: nothing is written twice, or over
    what is read."""
    for name, command in commands().items():
        base = BASES.get(name, (Base(),))[0]
        named = [(one, values_for(command, one) is hostile.PATHS) for one in parameters(command)]
        of_paths = [one for one, is_path in named if is_path or _named(one) in hostile.READ]
        for pair in itertools.combinations(of_paths, 2):
            read, *written = sorted(pair, key=lambda one: hostile.is_written(_named(one)))
            if hostile.is_written(_named(written[0])):
                word = "shared" if hostile.is_written(_named(read)) else _sound(name, base, read)
                words = _with(_with_base(base, name, read, word), name, written[0], word)
                yield Case(f"{name}: {_called(written[0])} is what {_called(read)} is", words, must_refuse=True)


def _sound(name: str, base: Base, parameter: Any) -> str:
    """The file that a sound call says there; else one that is there."""
    place = _place(name, parameter)
    said = base.options.get(_called(parameter)) if place is None else dict(enumerate(base.arguments)).get(place)
    return said if said is not None and said.endswith((".toml", ".jsonl", ".txt", "run")) else "text.txt"


def _is_option(parameter: Any) -> bool:
    return any(name.startswith("-") for name in parameter.opts)


def _called(parameter: Any) -> str:
    long = [name for name in parameter.opts if name.startswith("--")]
    return str(long[0] if long else parameter.name.upper())


def _place(command: str, parameter: Any) -> int | None:
    """Which of the arguments it is; None for an option."""
    arguments = [one.name for one in commands()[command].params if not _is_option(one)]
    return None if _is_option(parameter) else arguments.index(parameter.name)


def _with(base: Base, command: str, parameter: Any, value: str) -> tuple[str, ...]:
    return tuple(_with_base(base, command, parameter, value).words(command, {}))


def _with_base(base: Base, command: str, parameter: Any, value: str) -> Base:
    """A call with another value of an option, or of an argument, the others as they are."""
    place = _place(command, parameter)
    if place is None:
        return Base({**base.options, _called(parameter): value}, base.arguments)
    given = [*base.arguments, *[""] * (place + 1)][: max(len(base.arguments), place + 1)]
    given[place] = value
    return Base(base.options, tuple(given))


def _named(parameter: Any) -> str:
    """As a user reads it: an option, or what stands for an argument."""
    return _called(parameter) if _is_option(parameter) else str(parameter.metavar or parameter.name.upper())


# ---- configuration keys ----------------------------------------------------------------------------------------


def key_cases() -> Iterator[Case]:
    """Every key of a training run, as `--set`; those of the model that are numbers with `plan` too."""
    from tilemesh.core import config as reading
    from tilemesh.train.config import TrainConfig

    hints = dict(_keys(TrainConfig, reading))
    for key, hint in hints.items():
        numeric = any(kind in str(hint) for kind in ("int", "float"))
        values = hostile.NUMBERS if numeric else hostile.WORDS
        base = BASES["train"][0]
        for label in hostile.some([*values], VALUES_OF_A_KEY, key):
            changed = {"--set": f"{base.options['--set']},{key}={values[label]}"}
            yield Case(f"train: {key} is {label}", base.words("train", changed))
    for key in (name for name, hint in hints.items() if name.startswith("model.") and "int" in str(hint)):
        for label in hostile.some([*hostile.NUMBERS], VALUES_OF_A_KEY, f"plan{key}"):
            changed = {"--set": f"{key}={hostile.NUMBERS[label]}"}
            yield Case(f"plan: {key} is {label}", BASES["plan train"][0].words("plan", changed))


def _keys(cls: Any, reading: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    import dataclasses

    for name, hint in get_type_hints(cls).items():
        section = hint if dataclasses.is_dataclass(hint) else None
        if section is not None:
            yield from _keys(section, reading, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint


# ---- files -----------------------------------------------------------------------------------------------------

READERS = {
    "run/": (
        ("generate", "run", "--prompt", "a", "--tokens", "2"),
        ("export", "run", "written"),
        ("report", "run", "--html", "page.html"),
        ("plan", "grade", "run"),
        ("train", "--resume", "run", "--set", "train.steps=3"),
    ),
    "shards/": (("train", "tiny.toml", "--mesh", "dp=1", "--set", f"{_STEP},data.source=shards", "--out", "new"),),
    "exported/": (
        ("train", "tiny.toml", "--mesh", "dp=1", "--set", _STEP, "--init", "exported", "--out", "new"),
        ("generate", "exported", "--prompt", "a", "--tokens", "2"),
    ),
    "plan.toml": (("train", "tiny.toml", "--plan", "plan.toml", "--set", _STEP, "--out", "new"),),
    "align.toml": (("align", "run", "--task", "bandit", "--plan", "align.toml", "--dry-run"),),
    "rows.jsonl": (("report", "rows.jsonl", "--html", "page.html"),),
    "tiny.toml": (("train", "tiny.toml", "--mesh", "dp=1", "--set", _STEP, "--out", "new"),),
}
WHOLE_FILE = (
    "is gone",
    "is empty",
    "is cut in half",
    "has flipped bits",
    "is a folder",
    "is no text",
    "is nested deeply",
)
LEAF_VALUES: Mapping[str, Any] = {
    "is null": None,
    "is a list": [1],
    "is an object": {"x": 1},
    "is text": "x",
    "is minus one": -1,
    "is NaN": float("nan"),
    "is huge": 10**30,
    "is true": True,
    "is not there": ...,
}


def file_cases(playground: Path) -> Iterator[Case]:
    """Every file that tilemesh wrote, damaged as a whole and, where it is JSON, leaf by leaf; then what reads it."""
    for place, readers in READERS.items():
        files = [playground / place] if not place.endswith("/") else sorted((playground / place).rglob("*"))
        for file in files:
            if not file.is_file():
                continue
            name = str(file.relative_to(playground))
            edits = [*WHOLE_FILE, *_leaf_edits(file)]
            for edit in edits:
                for reader in hostile.some([*map(" ".join, readers)], 2 if edit in WHOLE_FILE else 1, name + edit):
                    words = next(one for one in readers if " ".join(one) == reader)
                    yield Case(f"files: {words[0]} where {name} {edit}", words, edit=(name, edit))


def _leaf_edits(file: Path) -> list[str]:
    """`KEY.KEY is null`, …: every leaf of a JSON file gets one of the values."""
    if file.suffix not in (".json", ".jsonl"):
        return []
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    paths = [path for path in _leaves(json.loads(lines[0])) if path][:40] if lines else []
    return [f"{'/'.join(path)} {edit}" for path in paths for edit in hostile.some([*LEAF_VALUES], 1, "/".join(path))]


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, below in inner:
        if len(path) < 5:
            yield from _leaves(below, (*path, str(key)))


def do_edit(playground: Path, name: str, edit: str) -> None:
    """Damage a file of the playground as a case says."""
    import shutil

    file = playground / name
    content = file.read_bytes()
    if edit == "is gone":
        file.unlink()
    elif edit == "is empty":
        file.write_bytes(b"")
    elif edit == "is cut in half":
        file.write_bytes(content[: len(content) // 2])
    elif edit == "has flipped bits":
        choose, changed = random.Random(f"{hostile.SEED}{name}"), bytearray(content)
        for _ in range(8):
            changed[choose.randrange(len(changed))] ^= 1 << choose.randrange(8)
        file.write_bytes(bytes(changed))
    elif edit == "is a folder":
        file.unlink()
        file.mkdir()
    elif edit == "is no text":
        file.write_bytes(b"\xff\xfe" + content)
    elif edit == "is nested deeply":
        shutil.copy(playground / ("deep.toml" if file.suffix == ".toml" else "deep.jsonl"), file)
    else:
        _edit_leaf(file, edit)


def _edit_leaf(file: Path, edit: str) -> None:
    path, words = edit.split(" ", 1)
    lines = file.read_text().split("\n") if file.suffix == ".jsonl" else [file.read_text()]
    body = json.loads(lines[0])
    at = body
    *way, last = path.split("/")
    for key in way:
        at = at[int(key)] if isinstance(at, list) else at[key]
    where: Any = int(last) if isinstance(at, list) else last
    if LEAF_VALUES[words] is ...:
        del at[where]
    else:
        at[where] = LEAF_VALUES[words]
    lines[0] = json.dumps(body)
    file.write_text("\n".join(lines))


# ---- the environment, and ranks --------------------------------------------------------------------------------


SHELL_VARIABLES = ("COLUMNS", "LINES", "XDG_CACHE_HOME", "HOME", "LANG", "RANK", "WORLD_SIZE", "TMPDIR", "NO_COLOR")
HOSTILE_VARIABLES = ("nothing", "minus one", "superscript two", "a missing file")


def environment_cases() -> Iterator[Case]:
    """Variables that every shell may have, those that tilemesh reads, and each launcher's with one of them wrong."""
    for variable in SHELL_VARIABLES:
        for label in HOSTILE_VARIABLES:
            for name in ("plan train", "report"):
                yield _with_environment(name, {variable: hostile.ALL[label]}, f"{variable} is {label}")
    for variable in variables_read():
        for name in ("launch", "train"):
            for label in hostile.some(HOSTILE_VARIABLES, 2, variable + name):
                yield _with_environment(name, {variable: hostile.ALL[label]}, f"{variable} is {label}")
    from tilemesh.core.context import _DIALECTS

    for number, (starter, names) in enumerate(_DIALECTS):
        sound = dict(zip(names, ("0", "2", "0", "2"), strict=False))
        for variable in names:
            for label in hostile.some(HOSTILE_VARIABLES, 2, f"{starter}{variable}"):
                said = f"{starter} ({number}) with {variable} {label}"
                yield _with_environment("launch", sound | {variable: hostile.ALL[label]}, said)


def _with_environment(name: str, environ: Mapping[str, str], said: str) -> Case:
    changed = {"--transport": "mpi"} if name == "launch" else {}  # which looks at more of it than torch does
    return Case(f"environment: {said} for {name}", BASES[name][0].words(name, changed), environ=environ)


@functools.cache
def variables_read() -> list[str]:
    """The names of environment variables in tilemesh's own source, but those that every shell has."""
    import re

    import tilemesh
    from tilemesh.launch.start import _HOSTS_VARIABLES

    reads = re.compile(r'environ(?:\.get\(|\[)"([A-Z][A-Z_0-9]+)"|^[A-Z_]*VARIABLE = "([A-Z_]+)"', re.MULTILINE)
    texts = [path.read_text(encoding="utf-8") for path in Path(tilemesh.__file__).parent.rglob("*.py")]
    found = {name for text in texts for match in reads.findall(text) for name in match if name}
    return sorted((found | {*_HOSTS_VARIABLES}) - {*SHELL_VARIABLES, "PYTHONPATH", "PATH"})


def rank_cases() -> Iterator[Case]:
    """A few that really start ranks, each sound or with a value that only a rank could refuse."""
    exchange = BASES["bench exchange"][0]
    for said, changed in {
        "sound": {},
        "an algorithm that does not exist": {"--algorithm": "nonsense"},
        "one byte a bucket": {"--bucket-bytes": "1"},
    }.items():
        yield Case(f"ranks: bench exchange, {said}", exchange.words("bench exchange", changed), starts_ranks=True)
    launch = BASES["launch"][0]
    yield Case("ranks: launch, sound", launch.words("launch", {}), starts_ranks=True)
    yield Case("ranks: launch, a script that fails", launch.words("launch", {}, ("binary.toml.py",)), starts_ranks=True)
    collective = BASES["bench collective"][0]
    for size in ("1B", "3B", "4B,4B"):
        words = collective.words("bench collective", {"--sizes": size, "--transport": "gloo"})
        yield Case(f"ranks: bench collective of {size}", words, starts_ranks=True)
