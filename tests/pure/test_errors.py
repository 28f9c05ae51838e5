"""Refusing an unknown name: what was given, the nearest, all that are known."""

from __future__ import annotations

import pytest

from tilemesh.core.errors import Argument, RunError, UsageError, nearest, unknown


def test_unknown_names_given_nearest_and_known() -> None:
    error = unknown("device", "h10", ["h100", "t4"])
    assert isinstance(error, UsageError)
    assert str(error) == "unknown device 'h10': did you mean 'h100'? known are h100, t4"


def test_unknown_makes_no_suggestion_when_nothing_is_close() -> None:
    assert str(unknown("device", "zzz", ["h100", "t4"])) == "unknown device 'zzz': known are h100, t4"


def test_unknown_with_nothing_known() -> None:
    assert str(unknown("preset", "tiny", [])) == "unknown preset 'tiny': known are none"


def test_unknown_may_search_more_names_than_it_lists() -> None:
    error = unknown("key", "layers", ["model", "train"], near=["model", "train", "model.layers"])
    assert str(error) == "unknown key 'layers': did you mean 'model.layers'? known are model, train"


@pytest.mark.parametrize(
    ("given", "known", "expected"),
    [
        ("H100", ["h100"], "h100"),
        ("gpt2", ["GPT2-124m", "llama"], "GPT2-124m"),
        ("lr", ["train.lr", "train.steps"], "train.lr"),
        ("model.lr", ["train.lr", "model.layers"], "train.lr"),
        ("dpp", ["tp", "pp", "dp"], "dp"),
        ("xyzzy", ["h100"], None),
        ("a", [], None),
    ],
)
def test_nearest(given: str, known: list[str], expected: str | None) -> None:
    assert nearest(given, known) == expected


def test_errors_are_what_callers_outside_expect() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(RunError, RuntimeError)


def test_an_argument_is_named_as_python_spells_it_or_as_a_command_takes_it() -> None:
    error = UsageError(Argument("stop_after"), " is -1: leave ", Argument("run", "--out"), " out")
    assert str(error) == "stop_after is -1: leave run out"
    assert error.typed == "--stop-after is -1: leave --out out"
    assert UsageError("ranks do not agree").typed == "ranks do not agree"
