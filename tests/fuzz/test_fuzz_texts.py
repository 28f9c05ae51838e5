"""Whatever text is given to what reads text by itself: a value, or an error of one line that says what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tilemesh.bench.collective.cells import parse_ranks, parse_sizes
from tilemesh.cli.main import one_line
from tilemesh.core.config import parse_toml, split_sets
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.units import format_bytes, format_count, format_rate, format_seconds, parse_bytes, parse_count
from tilemesh.measure.row import Row
from tilemesh.train import load_config


def _mesh(text: str) -> Any:
    return load_config(mesh=text)


def _setting(text: str) -> Any:
    return load_config(sets=[text])


READERS: tuple[Callable[[str], Any], ...] = (
    parse_bytes, parse_count, parse_sizes, parse_ranks, parse_cluster, Row.from_json, _mesh, _setting,
    lambda text: split_sets([text]), lambda text: parse_toml(text, "a file"),
)  # fmt: skip
# Pieces of what is meant, and of what breaks readers: digits that int() refuses, signs, separators, brackets.
PIECES = st.sampled_from(
    ["dp", "tp", "=", ",", "x", "h100", "local", "..", "4", "0", "-1", "²", "١", "9" * 4400, "nan", "[", "{", '"',
     "MiB", "k", ".", "_", "\n", "\0", " ", "model.layers", "train.steps", "null", "\ud800"]
)  # fmt: skip
TEXTS = st.one_of(st.text(max_size=30), st.lists(PIECES, max_size=6).map("".join))


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
@given(text=TEXTS)
@example(text="²")
@example(text="9" * 5000)
@example(text="dp=" + "9" * 5000)
@example(text="[" * 5000)
@example(text="train.steps=" + "9" * 5000)
def test_text_is_read_or_refused_in_one_line(read: Callable[[str], Any], text: str) -> None:
    try:
        read(text)
    except UsageError as error:
        said = one_line(str(error))
        assert said
        assert "\n" not in said


@given(number=st.one_of(st.floats(), st.integers(), st.integers(min_value=10**300)))
def test_any_number_can_be_shown(number: float) -> None:
    for shown in (format_bytes(number), format_count(number), format_rate(number, "B/s"), format_seconds(number)):
        assert len(shown) < 400
