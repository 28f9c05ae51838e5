"""What passes between a caller and its ranks: every nested value comes back as it went, and what cannot is named."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tilemesh.core.errors import RunError, UsageError
from tilemesh.launch import values

DTYPES = ["?", "i1", "u2", "<i4", ">i8", "f2", "f4", "f8", "c16", "S3", "U2", "M8[ns]"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0))
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | ARRAYS
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.just("$"), inner, max_size=4)
    ),
    max_leaves=12,
)


def through_a_file(value: object) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        values.write(Path(folder, "value"), value, "result")
        assert [path.name for path in Path(folder).iterdir()] == ["value"]
        return values.read(Path(folder, "value"))


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or (one != one and other != other))


@given(NESTED)
def test_any_nested_value_comes_back_as_it_went(value: Any) -> None:
    assert same(through_a_file(value), value)


def test_arrays_that_come_back_can_be_written_to() -> None:
    whole = np.arange(24.0).reshape(4, 6)
    back = through_a_file([whole[:, ::2], whole.T, np.float32(3), bytearray(b"ab")])
    back[0][:] = 7
    assert np.array_equal(back[1], whole.T)
    assert back[2].dtype == np.float32
    assert back[3] == bytearray(b"ab")


@dataclass
class Place:
    row: int


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, 2, 3, {4}]}, r'^result\["a"\]\[3\]: a set: expected JSON values'),
        ([(1, object())], r"^result\[0\]\[1\]: an object: "),
        ({"x": {5: 1}}, r'^result\["x"\]: a dict with the key 5: expected keys that are strings'),
        ([Place(1)], r"^result\[0\]: a Place; send dataclasses.asdict\(...\) of it"),
        (np.array([object()]), "^result: a ndarray of dtype object"),
        (np.zeros(2, [("a", "i4")]), "^result: a ndarray of dtype"),
        (OrderedDict(a=1), "^result: an OrderedDict"),
        (Path("x"), "^result: a PosixPath"),
        (len, "^result: a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_path(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        through_a_file(value)


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = [1]
    value.append({"again": value})
    with pytest.raises(UsageError, match=r'^result\[1\]\["again"\]: a list that contains itself'):
        through_a_file(value)


def test_a_file_that_is_cut_is_said_to_be(tmp_path: Path) -> None:
    values.write(tmp_path / "value", np.arange(100), "result")
    whole = (tmp_path / "value").read_bytes()
    (tmp_path / "value").write_bytes(whole[:-8])
    with pytest.raises(RunError, match="it is damaged"):
        values.read(tmp_path / "value")
