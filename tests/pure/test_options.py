"""A command is one file, an option one annotated field: parser, help and refusals follow; old lines keep working."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from tilemesh.cli import commands
from tilemesh.cli.commands.plan import redirect
from tilemesh.cli.main import main
from tilemesh.core.errors import UsageError
from tilemesh.core.options import Commas, Count, Known, argument, changed_flags, check_options, option
from tilemesh.core.ranges import Range

DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """For commands and for Python."""

    size: Count = option(3, "How large.", "N")
    secret: int = 7


@dataclass(frozen=True, kw_only=True)
class SomeOptions(BaseOptions):
    """Options of a command."""

    model: str = argument(..., "Which.", "MODEL")
    kind: Literal["a", "b"] | None = option(None, "Which kind.")
    share: Annotated[float, Range(0, 1, above=True)] | None = option(None, "How much.", flag="--part")
    sets: tuple[str, ...] = option((), "Settings.", flag="--set")
    rates: Annotated[tuple[float, ...], Commas("none"), Range(0, 9, above=True)] = option((), "How often.")
    device: Annotated[str, Known("device", "tilemesh.core.hardware:DEVICES", "any")] | None = option(None, "A table.")


@pytest.mark.parametrize(
    ("options", "python", "typed"),
    [
        (SomeOptions(model="x", size=0), "size is 0: expected a whole number", "--size is 0: expected a whole number"),
        (SomeOptions(model="x", kind="c"), "unknown kind 'c': known are a, b", "unknown kind 'c'"),  # type: ignore[arg-type]
        (SomeOptions(model="x", share=float("nan")), "share is nan: expected above 0", "--part is nan: expected above"),
        (SomeOptions(model="x", share=0), "share is 0: expected above 0 and at most 1", "--part is 0: expected"),
        (SomeOptions(model="x", rates=(1.0, 10.0)), "rates is 10.0: expected above 0", "--rates is 10.0: expected"),
        (SomeOptions(model="x", device="h20"), "unknown device 'h20': did you mean 'h200'?", "unknown device"),
    ],
)
def test_a_value_outside_is_refused_as_python_or_a_user_calls_it(options: SomeOptions, python: str, typed: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_options(options)
    assert str(refused.value).startswith(python)
    assert refused.value.typed.startswith(typed)


def test_what_was_given_is_told_by_its_flag() -> None:
    check_options(SomeOptions(model="x", kind="a", share=1, secret=-5))
    assert changed_flags(SomeOptions(model="x", sets=("a=1",), size=4)) == ["MODEL", "--set", "--size"]
    assert changed_flags(SomeOptions(model="x", share=1.0), "share", "size") == ["--part"]


def test_a_list_with_commas_is_one_word() -> None:
    rates = Commas("none")
    assert rates.split("--rates", "1, 0.5,2", float) == (1.0, 0.5, 2.0)
    assert rates.split("--rates", "none", float) == ()
    assert [rates.text(elements) for elements in ((), (1, 2))] == ["none", "1,2"]
    with pytest.raises(UsageError, match="--rates has 'x': expected whole numbers"):
        rates.split("--rates", "1,x", int)
    with pytest.raises(UsageError, match="a value beside a comma is empty"):
        rates.split("--rates", "1,,2", float)
    check_options(SomeOptions(model="x", rates=(1.0, 9.0), device="any"))


@pytest.fixture
def dice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command that docs/extending.md adds, in a folder of its own: nothing else is told of it."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.S)
    (code,) = (block for block in blocks if "class DiceOptions" in block)
    (tmp_path / "dice.py").write_text(code)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_command_is_one_file(dice: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert re.search(r"\n  dice +Roll dice\.\n", capsys.readouterr().out)
    assert main(["dice", "--help"]) == 0
    said = capsys.readouterr().out
    assert "This docstring is the command's help" in said
    assert all(word in said for word in ("NAME", "--rolls N", "--no-fair", "--out FILE", "[default: 6]"))
    assert main(["dice", "me", "--rolls", "2", "--out", "sides.txt"]) == 0
    sides = (dice / "sides.txt").read_text()
    assert capsys.readouterr().out == f"me: {sides}\nwritten: sides.txt\n"
    assert main(["dice", "me", "--rolls", "2", "--json", "-"]) == 0
    said = capsys.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == [{"roll": int(side)} for side in sides.split()]
    assert said.err == f"me: {sides}\n"  # text beside what a program reads


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "missing argument 'NAME'"),
        ([""], "NAME is empty: give a value"),
        (["me", "--rolls", "0"], "--rolls is 0: expected a whole number, between 1 and 1,000"),
        (["me", "--shape", "cubes"], "unknown shape 'cubes': did you mean 'cube'? known are cube, coin"),
        (["me", "--seed", "-1"], "--seed is -1: expected"),
        (["me", "--out", "/proc/x"], "--out /proc/x cannot be written"),
        (["me", "--roll", "3"], "unknown option for tilemesh dice '--roll': did you mean '--rolls'?"),
        (["me", "--rolls", "two"], "invalid value for '--rolls'"),
    ],
)
@pytest.mark.usefixtures("dice")
def test_its_refusals_follow_from_the_fields(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dice", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert reason in said.err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", "train"),
        ("--help", "--help"),
        ("llama-3-8b --cluster 8xh100", "train llama-3-8b --cluster 8xh100"),
        ("--cluster 8xh100 llama-3-8b", "train --cluster 8xh100 llama-3-8b"),
        ("train m.toml", "train m.toml"),
        ("serve m.toml --rate 2", "serve m.toml --rate 2"),
        ("llama-3-8b --serve --cluster 1xh200 --rate 10", "serve llama-3-8b --cluster 1xh200 --rate 10"),
        ("--draw zb-v --stages 4", "draw zb-v --stages 4"),
        ("--stages 4 --draw=zb-v --svg x.svg", "draw zb-v --stages 4 --svg x.svg"),
        ("--grade RUN --grade OTHER --json -", "grade RUN OTHER --json -"),
        ("--draw", "draw"),
        ("--draw zb-v --serve", "draw zb-v --serve"),
    ],
)
def test_lines_from_before_plan_had_commands_mean_what_they_did(old: str, new: str) -> None:
    assert redirect(old.split()) == new.split()
