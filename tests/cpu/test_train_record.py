"""The recorder observes a mesh: bytes and seconds by axis, groups and messages included, and the trace's spans."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tilemesh.comm import Communicator, run_threads
from tilemesh.comm.runtime import observe
from tilemesh.comm.runtime.choose import Choices
from tilemesh.measure.trace import Trace, merge
from tilemesh.parallel.mesh import Mesh
from tilemesh.train.rank import keep_collectives
from tilemesh.train.record import Recorder, observe_mesh

TIMEOUT_S = 20.0


def test_what_a_mesh_exchanges_is_recorded_by_axis() -> None:
    def main(comm: Communicator) -> None:
        mesh, recorder, x = Mesh(comm, dp=2, tp=2), Recorder(Trace(None)), np.ones(8, np.float32)
        observe_mesh(mesh, recorder)
        for _ in range(3):  # the second and third are kept ready
            mesh.axes["tp"].comm.all_reduce(x)
        group = mesh.axes["tp"].comm.split(0)
        assert group is not None
        group.all_reduce(x)
        mesh.axes["dp"].comm.all_gather(x, wait=False).wait()
        mesh.comm.barrier()
        if comm.rank < 2:
            mesh.comm.send(x, 1) if comm.rank == 0 else mesh.comm.recv(x, 0)
        moved = {key: (one.calls, one.nbytes) for key, one in recorder.moved.items()}
        messages = {} if comm.rank > 1 else {("control", ("send", "recv")[comm.rank]): (1, 32)}
        assert moved == {
            ("tp", "all_reduce"): (4, 4 * 32),
            ("dp", "all_gather"): (1, 64),
            ("control", "barrier"): (1, 1),
            **messages,
        }
        assert recorder.exchange_s() > 0

    run_threads(4, main, timeout_s=TIMEOUT_S)


def test_groups_over_several_axes_count_for_these_together() -> None:
    def main(comm: Communicator) -> None:
        mesh, recorder, x = Mesh(comm, dp=2, cp=2, tp=2), Recorder(Trace(None)), np.ones(8, np.float32)
        early = mesh.group("dp", "tp")
        observe_mesh(mesh, recorder)
        late = mesh.group("cp", "dp")
        for group, calls in ((early, 1), (late, 2), (mesh.group("dp"), 3)):
            for _ in range(calls):
                group.all_reduce(x)
        inner, outside = late.split(comm.rank % 2), mesh.comm.split(0)
        assert inner is not None
        assert outside is not None
        inner.all_gather(x)
        outside.barrier()
        assert {key: one.calls for key, one in recorder.moved.items()} == {
            ("dp+tp", "all_reduce"): 1,
            ("dp+cp", "all_reduce"): 2,
            ("dp+cp", "all_gather"): 1,
            ("dp", "all_reduce"): 3,
            ("control", "barrier"): 1,
        }

    run_threads(8, main, timeout_s=TIMEOUT_S)


def test_a_part_of_an_axis_counts_for_the_axis() -> None:
    def main(comm: Communicator) -> None:
        mesh, recorder = Mesh(comm, tp=4), Recorder(Trace(None))
        observe_mesh(mesh, recorder)
        pair = mesh.among((("tp", 2),))
        assert pair.size == 2
        pair.all_reduce(np.ones(2))
        assert [*recorder.moved] == [("tp", "all_reduce")]

    run_threads(4, main, timeout_s=TIMEOUT_S)


def test_seconds_count_for_steps_only_within_them() -> None:
    def main(comm: Communicator) -> None:
        mesh, recorder, x = Mesh(comm, dp=2), Recorder(Trace(None)), np.ones(4)
        observe_mesh(mesh, recorder)
        mesh.axes["dp"].comm.all_reduce(x)
        assert recorder.moved["dp", "all_reduce"].step_seconds == 0.0
        with recorder.in_step():
            mesh.axes["dp"].comm.all_reduce(x)
        assert 0.0 < recorder.moved["dp", "all_reduce"].step_seconds < recorder.moved["dp", "all_reduce"].seconds

    run_threads(2, main, timeout_s=TIMEOUT_S)


def test_calls_and_bytes_are_exact_where_only_one_in_several_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "SHORT_S", TIMEOUT_S)  # calls of ranks that are threads take longer

    def main(comm: Communicator) -> None:
        mesh, recorder, x = Mesh(comm, dp=2), Recorder(Trace(None)), np.ones(4)
        observe_mesh(mesh, recorder)
        late = mesh.axes["dp"].comm.duplicate()
        for group in (mesh.axes["dp"].comm, late):
            for _ in range(200):
                group.all_reduce(x)
        moved = recorder.moved["dp", "all_reduce"]
        assert moved.calls < 400, "all were timed"
        assert recorder.bytes_by_axis() == {"dp": {"all_reduce": 400 * x.nbytes}}
        assert (moved.calls, moved.step_seconds) == (400, 0.0)
        before = moved.seconds
        with recorder.in_step():
            for _ in range(3):
                late.all_reduce(x)
        assert moved.calls == 403
        assert moved.step_seconds == pytest.approx(moved.seconds - before) != 0

    run_threads(2, main, timeout_s=TIMEOUT_S)


def test_picks_are_kept_under_the_names_of_axes() -> None:
    def main(comm: Communicator) -> dict[str, str]:
        mesh, choices = Mesh(comm, dp=2), Choices({"dp all_reduce 32 float64 sum": "ring"})
        keep_collectives(mesh, choices)
        mesh.axes["dp"].comm.all_reduce(np.ones(4))
        mesh.comm.all_reduce(np.ones(1), "max")
        return choices.table

    tables = run_threads(2, main, timeout_s=TIMEOUT_S)
    assert tables[0] == tables[1]
    assert tables[0]["dp all_reduce 32 float64 sum"] == "ring"
    assert list(tables[0]) == ["dp all_reduce 32 float64 sum", "control all_reduce 8 float64 max"]


def test_picks_of_groups_within_a_pipeline_stage_are_kept() -> None:
    def main(comm: Communicator) -> list[str]:
        mesh, choices = Mesh(comm, cp=2, dp=2, pp=2), Choices()
        keep_collectives(mesh, choices)
        mesh.group("dp", "cp").all_reduce(np.ones(4))
        return list(choices.table)

    assert run_threads(8, main, timeout_s=TIMEOUT_S) == [["stage all_reduce 32 float64 sum"]] * 8


def test_exchanges_are_drawn_in_the_trace(tmp_path: Path) -> None:
    def main(comm: Communicator) -> None:
        with Trace(tmp_path, rank=comm.rank) as trace:
            mesh = Mesh(comm, dp=2)
            observe_mesh(mesh, Recorder(trace))
            mesh.axes["dp"].comm.all_reduce(np.ones(4))
            for _ in range(200):
                mesh.axes["dp"].comm.all_reduce(np.ones(2))
            mesh.axes["dp"].comm.all_reduce(np.ones(4), algorithm="ring", wait=False).wait()

    run_threads(2, main, timeout_s=TIMEOUT_S)
    events = json.loads(merge(tmp_path).read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert {span["cat"] for span in spans} == {"exchange"}
    assert sum(span["args"]["bytes"] == 16 for span in spans) == 200, "while steps are traced every call is drawn"
    spans = [span for span in spans if span["args"]["bytes"] == 32]
    assert [span["name"] for span in spans] == ["all_reduce", "all_reduce", "wait all_reduce"]
    assert spans[1]["args"]["algorithm"] == "ring"
    assert all(span["dur"] >= 0 and span["ts"] >= 0 for span in spans)
