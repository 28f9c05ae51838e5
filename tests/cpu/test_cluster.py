"""Ranks that look at one another: all come to the same readings, and a job is asked for where there is none."""

from __future__ import annotations

import dataclasses

import pytest

from tilemesh.bench.cluster import run
from tilemesh.bench.cluster.run import cluster_rows, read_cluster
from tilemesh.cli.commands.doctor import DoctorOptions, doctor
from tilemesh.comm import run_threads
from tilemesh.core.errors import UsageError


def test_every_rank_has_all_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MOST_BYTES", 1 << 20)
    first, *others = run_threads(3, read_cluster)
    assert all(other == first for other in others)
    assert sorted((link.a, link.b) for link in first.links) == [(0, 1), (0, 2), (1, 2)]
    assert all(0 < link.latency_s <= link.slowest_s and link.bytes_per_s > 0 for link in first.links)
    assert len({seat.host for seat in first.seats}) == 1
    names = [row.name for row in cluster_rows(first)]
    assert names == ["bandwidth inside a host", "latency inside a host", "matrix product of a rank"]
    (*_, product) = cluster_rows(dataclasses.replace(first, gpu="Tesla T4"))  # which has no unit for bf16
    assert (product.limit, product.missing["limit"]) == (None, "not calibrated")


def test_one_of_a_thing_is_said_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MOST_BYTES", 1 << 20)
    lines: list[str] = []
    run_threads(2, lambda comm: read_cluster(comm, lines.append))
    assert any(line.startswith("2 ranks on 1 host, over") for line in lines)
    assert "1 link in 1 round" in lines


def test_a_rank_with_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MOST_BYTES", 1 << 20)
    reading = run_threads(3, read_cluster)[0]
    older = [dict(facts) for facts in reading.facts]
    older[1]["torch"] = "1.0"
    (fault,) = [fault for fault in dataclasses.replace(reading, facts=older).faults() if "torch" in fault.what]
    assert fault.who.startswith("rank 1 ")
    assert fault.what.startswith("torch 1.0, where the others have ")


def test_without_a_job_the_command_says_how_to_start_one() -> None:
    with pytest.raises(UsageError, match="start it with mpiexec, srun or torchrun"):
        doctor(DoctorOptions(cluster=True))
    with pytest.raises(UsageError, match="belong to --cluster"):
        doctor(DoctorOptions(html="page.html"))
