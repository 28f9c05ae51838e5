"""Cores granted, and how ranks share them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.core.cores import available_cores, cgroup_quota, cores_for, cores_here, cores_together, threads_for


@given(ranks=st.integers(1, 40), cores=st.integers(1, 40))
def test_blocks_of_cores_cover_all_of_them_once_and_evenly(ranks: int, cores: int) -> None:
    numbers = list(range(100, 100 + cores))
    blocks = [cores_for(index, ranks, numbers) for index in range(ranks)]
    if ranks > cores:
        assert blocks == [None] * ranks
        return
    shares = [block for block in blocks if block is not None]
    assert [core for block in shares for core in block] == numbers
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(ranks=st.integers(1, 300), cores=st.integers(1, 300))
def test_threads_fit_the_cores_unless_ranks_alone_outnumber_them(ranks: int, cores: int) -> None:
    threads = threads_for(ranks, cores)
    assert threads >= 1
    assert threads * ranks <= cores or threads == 1


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
        ({"cpu.max": "nonsense"}, None),
    ],
)
def test_quota_of_the_control_group(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup_quota(tmp_path) == quota


def test_this_process_has_a_core() -> None:
    assert available_cores() >= 1


@pytest.mark.parametrize(
    ("masks", "cores"),
    [
        (["a inf 0,1", "a inf 0,1", "a inf 0,1"], 2),  # four ranks under `taskset -c 0,1` of sixteen share two
        (["a inf 0", "a inf 1", "a inf 2"], 3),  # a launcher gave each its own
        (["a 2.0 0,1,2,3", "a 2.0 0,1,2,3"], 2),  # a quota bounds them together
        (["a 0.4 0,1"], 1),
        (["a inf 0,1", "b inf 0,1"], 4),  # the same numbers on another machine
    ],
)
def test_cores_of_several_processes_together(masks: list[str], cores: int) -> None:
    assert cores_together(masks) == cores


def test_one_process_together_has_what_it_has_alone() -> None:
    assert cores_together([cores_here()]) == cores_together([cores_here(), cores_here()]) == available_cores()
