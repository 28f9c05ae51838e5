"""Shares of a step and the sentence made of them; the learning rate; boxes of a checkpoint."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.core.advice import improvement, savings, step_shares
from tilemesh.runs.manifest import (
    DamagedError,
    Manifest,
    Piece,
    StoredFile,
    checkpoints,
    damage,
    digest,
)
from tilemesh.train.config import OptimizerConfig
from tilemesh.train.schedule import rate


@given(step=st.floats(1e-6, 1e3), parts=st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e3)))
def test_shares_are_fractions_of_a_whole(step: float, parts: tuple[float, float, float]) -> None:
    values = step_shares(step, *parts).values()
    assert all(0 <= value <= 1 + 1e-9 for value in values)
    assert sum(values) == pytest.approx(1)


def shares(*parts: float) -> dict[str, float]:
    return dict(zip(("compute", "exchange", "data", "idle"), parts, strict=True))


EXCHANGES = {"tp all_reduce": 2.0, "dp all_reduce": 1.0}
MOVED = {"tp": {"all_reduce": 2 << 20}, "dp": {"all_reduce": 9 << 20}}


@pytest.mark.parametrize(
    ("of", "of_limit", "words"),
    [
        (
            shares(0.6, 0.4, 0.0, 0.0),
            0.43,
            "exchanges take 40 % of a step, most of it all_reduce over tp, 2 MiB per step",
        ),
        (shares(0.6, 0.1, 0.3, 0.0), 0.43, "waiting for data takes 30 %"),
        (shares(0.6, 0.1, 0.0, 0.3), 0.43, "waiting for the slowest rank takes 30 %"),
        (
            shares(0.76, 0.23, 0.0, 0.01),
            0.08,
            "compute takes 76 % of a step, and at the calibrated peak would take 8 %",
        ),
        (shares(0.76, 0.23, 0.0, 0.01), None, "exchanges take 23 %"),
        (shares(0.95, 0.05, 0.0, 0.0), None, "compute takes 95 % of a step: larger matrices"),
        (shares(0.999, 0.001, 0.0, 0.0), 0.998, "nothing measured leaves more"),
    ],
)
def test_the_largest_thing_is_named(of: dict[str, float], of_limit: float | None, words: str) -> None:
    assert words in improvement(of, EXCHANGES, MOVED, ranks=4, cores=2, of_limit=of_limit)


def test_crowded_ranks_are_told_of_it() -> None:
    of = shares(0.6, 0.4, 0.0, 0.0)
    assert "4 ranks share 2 cores" in improvement(of, EXCHANGES, MOVED, ranks=4, cores=2)
    assert "4 ranks share 2 cores" in improvement(of, EXCHANGES, MOVED, ranks=4, cores=2, of_limit=0.1)
    assert "share" not in improvement(of, EXCHANGES, MOVED, ranks=2, cores=2)


@given(parts=st.tuples(*[st.floats(0, 1)] * 4), of_limit=st.floats(0, 1))
def test_the_advice_is_about_the_largest_saving(parts: tuple[float, ...], of_limit: float) -> None:
    of = shares(*parts)
    openings = {
        "compute": "compute takes", "exchange": "exchanges take", "data": "waiting for data", "idle": "waiting for the"
    }  # fmt: skip
    first = next(iter(savings(of, of_limit)), None)
    assert improvement(of, {}, {}, ranks=1, cores=1, of_limit=of_limit).startswith(openings.get(first or "", "nothing"))


@given(steps=st.integers(1, 300), warmup=st.integers(0, 400), end=st.floats(0, 1))
def test_the_rate_rises_then_falls_and_stays_within_its_bounds(steps: int, warmup: int, end: float) -> None:
    optimizer = OptimizerConfig(lr=2.0, warmup=warmup, lr_end=end)
    rates = [rate(step, steps, optimizer) for step in range(steps)]
    top = min(warmup, steps)
    assert all(earlier < later for earlier, later in pairwise(rates[:top]))
    assert all(earlier >= later for earlier, later in pairwise(rates[top:]))
    assert all(0 < value <= 2.0 or (value == 0 and end == 0) for value in rates)
    if steps > warmup + 1:
        assert rates[-1] == pytest.approx(2.0 * end)
        assert max(rates) == 2.0


def test_a_manifest_is_read_back_and_damage_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    (folder / "shard-00000.safetensors").write_bytes(b"abc")
    stored = StoredFile("shard-00000.safetensors", 3, digest(folder / "shard-00000.safetensors"))
    pieces = [Piece("weight:w", stored.file, f"w{start}", (0, start), (3, 4), (3, 8), "F32") for start in (0, 4)]
    manifest = Manifest(7, {"position": 56}, [stored], pieces, {"plan": {}})
    (folder / "manifest.json").write_text(manifest.to_json())
    again = Manifest.read(folder)
    assert again == manifest
    assert list(damage(folder, again.files)) == []
    (folder / "shard-00000.safetensors").write_bytes(b"abd")
    assert "SHA-256 differs" in next(damage(folder, again.files))
    (folder / "shard-00000.safetensors").write_bytes(b"ab")
    assert "has 2 bytes, 3 were written" in next(damage(folder, again.files))
    (folder / "shard-00000.safetensors").unlink()
    assert "cannot be read" in next(damage(folder, again.files))
    for text in ("", "[]", '{"schema": 9}', '{"schema": 1, "files": 3}'):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(DamagedError):
            Manifest.read(folder)
    (tmp_path / ".writing-step-00000009").mkdir()
    (tmp_path / "damaged-step-00000008").mkdir()
    assert checkpoints(tmp_path) == [(7, folder)]
