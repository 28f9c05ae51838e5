"""A calibration survives the disk, refuses what is damaged, and never answers for another machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core import calibration as module
from tilemesh.core.calibration import SCHEMA, Calibration, Rates, default_folder, find, load, path_for
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import cache_folder

CORE = Rates({"fp32": 48e9}, copy_bytes_per_s=6.3e9, read_bytes_per_s=9e9, write_bytes_per_s=5e9, launch_s=2e-6)
HERE = Calibration("box-1", "2 cores of a test", "2025-01-01T00:00:00+00:00", {"torch": "2.13.0"}, one_core=CORE)

rates = st.floats(min_value=1e-9, max_value=1e16)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    words=st.text(),
    flops=st.dictionaries(st.sampled_from(["fp32", "bf16", "fp8"]), rates),
    copy=st.none() | rates,
    extra=st.dictionaries(st.text().map(lambda s: "later_" + s), json_values, max_size=3),
)
def test_round_trip_through_json(
    words: str, flops: dict[str, float], copy: float | None, extra: dict[str, Any]
) -> None:
    value = Calibration("id", words, "now", gpu=Rates(flops, copy_bytes_per_s=copy), extra=extra)
    assert Calibration.from_dict(json.loads(json.dumps(value.to_dict()))) == value


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "box.json"
    assert HERE.save(path) == path
    assert load(path) == HERE
    assert [p.name for p in path.parent.iterdir()] == ["box.json"]


def test_sections_of_a_later_version_survive(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    later = HERE.to_dict() | {"collectives": {"mpi": {"8": {"alpha_s": 2e-6}}}}
    path.write_text(json.dumps(later))
    load(path).with_section("notes", ["warm"]).save(path)
    assert json.loads(path.read_text()) == later | {"notes": ["warm"]}


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "box.json"
    HERE.save(path)

    def broken(*_: object) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk gone"):
        HERE.with_section("new", 1).save(path)
    assert load(path) == HERE
    assert [p.name for p in tmp_path.iterdir()] == ["box.json"]


def test_what_is_not_json_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        HERE.with_section("bad", object()).save(tmp_path / "box.json")
    assert list(tmp_path.iterdir()) == []


def test_find_by_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find("box-1") is None
    path = HERE.save()
    assert path == tmp_path / "tilemesh" / "calibration" / "box-1.json"
    assert find("box-1") == HERE
    assert find("box-2") is None


def test_find_refuses_a_file_of_another_machine(tmp_path: Path) -> None:
    path = path_for("box-2", tmp_path)
    HERE.save(path)
    with pytest.raises(RunError) as caught:
        find("box-2", tmp_path)
    again = "remove it and calibrate this machine again"
    assert str(caught.value) == f"calibration '{path}' is of 'box-1', not of 'box-2': {again}"


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert default_folder() == cache_folder() / "calibration" == tmp_path / ".cache" / "tilemesh" / "calibration"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == tmp_path / ".cache" / "tilemesh" / "calibration"


@settings(deadline=None)
@given(st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
def test_two_machines_never_share_a_file_and_never_leave_the_folder(ids: list[str]) -> None:
    folder = Path("folder")
    paths = [path_for(identity, folder) for identity in ids]
    assert paths[0] != paths[1]
    assert all(path.parent == folder and path.suffix == ".json" for path in paths)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        ("[]", "is damaged (not a JSON object)"),
        ('{"schema": 2}', f"cannot be used (has schema 2, this version reads {SCHEMA})"),
        ("{}", f"cannot be used (has schema None, this version reads {SCHEMA})"),
        ('{"schema": 1}', "cannot be used ('identity' is None, expected text)"),
    ],
)
def test_load_refuses_a_damaged_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "box.json"
    path.write_text(text)
    with pytest.raises(RunError) as caught:
        load(path)
    assert str(caught.value) == f"calibration '{path}' {message}: remove it and calibrate this machine again"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": 3}, "'versions' is 3, expected an object"),
        ({"gpu": {"launch_s": "fast"}}, "'gpu.launch_s' is 'fast', expected a number"),
        ({"gpu": {"matmul_flops_per_s": {"fp32": True}}}, "'gpu.fp32' is True, expected a number"),
        ({"gpu": {"launch_s": -1}}, "calibrated launch_s is -1: expected a number above 0"),
        (
            {"gpu": {"lunch_s": 1}},
            "unknown rate in 'gpu' 'lunch_s': did you mean 'launch_s'? known are matmul_flops_per_s, "
            "copy_bytes_per_s, read_bytes_per_s, write_bytes_per_s, launch_s, attention_flops_per_s, "
            "elementwise_bytes_per_s, exponentials_per_s, projection_flops_per_s, rows_bytes_per_s, "
            "halves_bytes_per_s, operation_s, host_s, host_link_bytes_per_s, times_as_long",
        ),
    ],
)
def test_from_dict_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError) as caught:
        Calibration.from_dict(HERE.to_dict() | change)
    assert str(caught.value) == message


def test_load_of_a_missing_or_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as usage:
        load(tmp_path / "none.json")
    assert str(usage.value) == f"no calibration at '{tmp_path / 'none.json'}': calibrate this machine first"
    with pytest.raises(RunError) as run:
        load(tmp_path)
    assert str(run.value) == f"calibration '{tmp_path}' cannot be read: Is a directory"
    for text in (b"[" * 100_000, b"\xff", b"{", b"[]"):
        (tmp_path / "damaged.json").write_bytes(text)
        with pytest.raises(RunError, match=r"damaged\.json' is damaged"):
            load(tmp_path / "damaged.json")


def test_rates_by_part() -> None:
    assert HERE.rates("one_core") is CORE
    with pytest.raises(UsageError) as caught:
        HERE.rates("gpu")
    assert str(caught.value) == "'gpu' was not measured on 2 cores of a test: this calibration has one_core"
    with pytest.raises(UsageError) as caught:
        HERE.rates("core")
    message = "unknown part of a machine 'core': did you mean 'one_core'? known are one_core, all_cores, gpu"
    assert str(caught.value) == message


def test_wrong_values_are_refused_when_made() -> None:
    with pytest.raises(UsageError) as caught:
        Rates({"fp32": 0.0})
    assert str(caught.value) == "calibrated matmul_flops_per_s.fp32 is 0.0: expected a number above 0"
    with pytest.raises(UsageError) as caught:
        Rates(copy_bytes_per_s=float("nan"))
    assert str(caught.value) == "calibrated copy_bytes_per_s is nan: expected a number above 0"
    with pytest.raises(UsageError) as caught:
        Calibration("", "words", "now")
    assert str(caught.value) == "a calibration needs the identity of its machine"
    with pytest.raises(UsageError) as caught:
        HERE.with_section("gpu", {})
    assert str(caught.value) == "section 'gpu' of a calibration is a field of its own: set the field"


def test_every_field_is_stored() -> None:
    full = Calibration("id", "w", "t", {"a": "1"}, CORE, CORE, CORE, {"x": 1})
    assert set(full.to_dict()) == module._KNOWN | {"x"}
