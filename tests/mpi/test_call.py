"""`launch.call` and `Ranks`: results in rank order, ranks that serve many calls, and what a failing one leaves."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import call_functions
from started import is_running, wait_until
from warm import warm_start

from tilemesh.core.context import outside_any_job
from tilemesh.core.errors import RunError, UsageError
from tilemesh.launch import RankError, Ranks, call, this_rank, values
from tilemesh.launch.calls import name_of
from tilemesh.launch.folder import base_folder
from tilemesh.launch.start import find_mpiexec

NEEDS_MPI = pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")
TRANSPORTS = [pytest.param("mpi", marks=NEEDS_MPI), "torch"]
pytestmark = pytest.mark.usefixtures("warm")  # fresh ranks: test_launch.py


@pytest.fixture(scope="module", params=TRANSPORTS)
def pool(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with warm_start():
        ranks = Ranks(3, transport=request.param)
    with ranks:
        yield ranks


def test_results_come_in_rank_order_and_the_ranks_stay(pool: Ranks) -> None:
    array = np.arange(12.0).reshape(3, 4)
    first = pool.call("call_functions:given", array, {"a": [None, b"xy"]}, word="é")
    second = pool.call(call_functions.given)
    assert [result["rank"] for result in first] == [0, 1, 2]
    for result in first:
        assert np.array_equal(result["arguments"][0], array)
        assert result["arguments"][1] == {"a": [None, b"xy"]}
        assert result["options"] == {"word": "é"}
    assert [result["pid"] for result in first] == [result["pid"] for result in second], "the same processes"


def test_what_is_no_text_on_the_path_is_passed_over_as_python_does(
    pool: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path(__file__)])
    assert len(pool.call("call_functions:given")) == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system pins no process")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", [2, 3])  # Open MPI 4 binds two ranks to cores of its own choice, three to a socket
def test_ranks_stay_on_the_cores_that_were_given(transport: str, ranks: int) -> None:
    """`taskset -c 0,1 tilemesh train` leaves the other cores alone, also where ranks outnumber those that are left."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        assert call("call_functions:my_cores", ranks, transport=transport) == [[max(before)]] * ranks
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_outlive_the_thread_that_started_them(transport: str) -> None:
    started: list[Ranks] = []
    thread = threading.Thread(target=lambda: started.append(Ranks(2, transport=transport)))
    thread.start()
    thread.join()
    with started[0] as ranks:
        pids = [result["pid"] for result in ranks.call("call_functions:given")]
        time.sleep(0.2)
        assert [result["pid"] for result in ranks.call("call_functions:given")] == pids
    wait_until(lambda: all(thread.name != "tilemesh-job" for thread in threading.enumerate()))


def test_ranks_connect_as_often_as_they_like(pool: Ranks) -> None:
    for length in (3, 50_000):
        for result in pool.call("call_functions:total", length):
            assert np.array_equal(result, np.full(length, 6.0))


def test_what_a_function_yields_comes_as_it_is_made(pool: Ranks) -> None:
    heard: list[tuple[int, Any]] = []
    results = pool.call("call_functions:counted", 3, hear=lambda rank, value: heard.append((rank, value)))
    assert results == [[100 * rank + number for number in range(3)] for rank in range(3)]
    assert [value for rank, value in heard if rank == 1] == [100, 101, 102]


def test_two_groups_of_ranks_work_at_the_same_time(pool: Ranks) -> None:
    with Ranks(1, transport="torch") as other:
        other.begin("call_functions:given", 1)
        pool.begin("call_functions:given", 2)
        with pytest.raises(UsageError, match="the call of call_functions:given is under way: take its results first"):
            pool.call("call_functions:given", 3)
        assert [result["arguments"] for result in pool.results()] == [(2,)] * 3
        assert [result["arguments"] for result in other.results(60.0)] == [(1,)]
        with pytest.raises(UsageError, match="no call is under way: begin one first"):
            other.results()


def test_what_a_call_prints_is_there_when_it_returns(pool: Ranks) -> None:
    lines: list[tuple[int, str, bytes]] = []
    before, pool.sink = pool.sink, lambda *line: lines.append(line)
    pool.call("call_functions:said", "hello")
    pool.sink = before
    assert sorted(lines) == [(rank, "out", b"hello") for rank in range(3)]


def test_ranks_that_raise_are_named_and_stay_usable(pool: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?m)^rank 1 raised ValueError: the widget is bent$") as caught:
        pool.call("call_functions:misbehave", "raise")
    assert caught.value.rank == 1
    assert "in misbehave" in caught.value.traceback
    assert "serve.py" not in caught.value.traceback, "the launcher's own frames are noise"
    assert "and more" in caught.value.__notes__[0]
    with pytest.raises(
        RankError, match=r"(?m)^rank \d raised ValueError: the widget is bent \(ranks \d, \d raised, too\)$"
    ):
        pool.call("call_functions:misbehave", "all raise")
    with pytest.raises(
        RankError, match=r"^rank 1 raised SystemExit: sys.exit\(0\); a called function returns its result"
    ):
        pool.call("call_functions:misbehave", "exit")
    with pytest.raises(RankError, match=r'raised UsageError: result\["a"\]\[3\]: a set'):
        pool.call("call_functions:unsendable")
    with pytest.raises(UsageError, match="call_functions has no function 'nothing'"):
        pool.call("call_functions:nothing")
    with pytest.raises(UsageError, match=r"there is no module no_such.module on Python's path"):
        pool.call("no_such.module:function")
    with pytest.raises(UsageError, match=r'call\["arguments"\]\[0\]\["x"\]: a set'):
        pool.call("call_functions:given", {"x": {1}})
    assert pool.call("call_functions:misbehave", "well") == ["well"] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", r"^rank 1 (was killed by SIGKILL|ended without a word: it was killed).*at: calling call_functions:m"),
        ("leave", r"^rank 1 (left|ended without a word: it was killed, or it exited) in the middle of the job"),
        ("raise alone", r"^rank 1 raised ValueError: the widget is bent; rank 0 did not return after it, at: calling"),
        ("hang", r"^rank 1 was not done within 2.0 s, at: calling call_functions:misbehave"),
    ],
)
def test_a_rank_that_is_gone_or_stuck_ends_them_all(transport: str, how: str, words: str) -> None:
    ranks = Ranks(2, transport=transport, grace_s=0.5)
    pids = [result["pid"] for result in ranks.call("call_functions:given")]
    start = time.monotonic()
    with pytest.raises(RunError, match=words):
        ranks.call("call_functions:misbehave", how, timeout_s=2.0 if how == "hang" else 60.0)
    assert time.monotonic() - start < 30
    with pytest.raises(RunError, match=r"these ranks have ended: .*; start others"):
        ranks.call("call_functions:given")
    wait_until(lambda: not any(is_running(pid) for pid in pids))
    ranks.close()  # nothing more to do


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_raises_with_a_communicator_waits_for_nobody(transport: str) -> None:
    """It is the others that wait, where the `with` closes the communicator, until they are ended."""
    ranks = Ranks(2, transport=transport, grace_s=0.5)
    start = time.monotonic()
    words = r"^rank 1 raised ValueError: the widget is bent; rank 0 did not return after it.*, so all were ended"
    with pytest.raises(RankError, match=words):
        ranks.call("call_functions:raise_while_connected", timeout_s=60.0)
    assert time.monotonic() - start < 25, "not the watchdog's 30 s"


def test_a_process_that_is_no_rank_has_no_place() -> None:
    with pytest.raises(UsageError, match="this process is no rank: start it by"):
        this_rank()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_call_starts_and_ends_its_ranks(transport: str) -> None:
    before = set(base_folder().iterdir())
    results = call("call_functions:given", 2, 5, transport=transport, word="é", timeout_s=100.0)
    assert [(result["rank"], result["arguments"], result["options"]) for result in results] == [
        (rank, (5,), {"word": "é"}) for rank in range(2)
    ]
    wait_until(lambda: not any(is_running(result["pid"]) for result in results))
    left = [path for path in set(base_folder().iterdir()) - before if path.name.startswith("tilemesh-job-")]
    assert [path for path in left if not (path / "lock").exists()] == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_results_of_ranks_that_end_late_are_kept(
    transport: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tilemesh.launch.calls._CLOSE_S", 0.5)
    assert call("call_functions:linger", 2, 200.0, transport=transport, timeout_s=100.0) == [0, 1]
    assert "after the last call, which all ranks had answered: they were ended" in capsys.readouterr().err


def test_an_error_of_the_caller_ends_the_ranks() -> None:
    def fail(rank: int, value: Any) -> None:
        raise LookupError("not what was wanted")

    with Ranks(2, transport="torch") as ranks, pytest.raises(LookupError):
        ranks.call("call_functions:counted", 2, hear=fail)
    assert ranks.ended == "LookupError in a call of call_functions:counted"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ctrl_c_ends_the_ranks_and_is_raised(transport: str, tmp_path: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[2]); from tilemesh.launch import call;"
    code += "call('call_functions:sleep', 2, sys.argv[3], transport=sys.argv[1])"
    line = [sys.executable, "-c", code, transport, str(Path(__file__).parent), str(tmp_path)]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert not any(is_running(int(path.stem)) for path in tmp_path.glob("*.pid"))


def test_inside_a_job_it_is_refused() -> None:
    inside = os.environ | {"RANK": "0", "WORLD_SIZE": "4"}
    with pytest.raises(UsageError, match="inside a job of 4 ranks that torchrun started: call the function itself"):
        call("call_functions:given", 2, transport="torch", environ=inside)
    assert len(call("call_functions:given", 1, transport="torch", environ=outside_any_job(inside))) == 1


class Holder:
    def method(self) -> None: ...

    @staticmethod
    def static() -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: None, r"<lambda> is a lambda, which a rank cannot import: put it into a module"),
        (Holder().method, r"Holder.method is a method, which a rank cannot import"),
        (Holder.static, r"has no Holder.static of its own that a rank could import"),
        (functools.partial(print, 1), r"is a partial, which a rank cannot import"),
        ("module.function", r"function 'module.function': expected 'package.module:function'"),
        ("a b:c", r"expected 'package.module:function'"),
        ("module:Class.method", r"expected 'package.module:function'"),
        ("__main__:main", r"a rank has another __main__"),
        ("no_such.module:function", r"there is no module no_such.module on Python's path"),
        ("tilemesh.launch.serve:this_rnk", r"has no function 'this_rnk'"),
    ],
)
def test_what_a_rank_could_not_import_is_refused_with_a_reason(function: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call(function, 2)


def test_a_closure_is_refused_and_a_function_of_main_too() -> None:
    def closure() -> None: ...

    with pytest.raises(UsageError, match=r"closure is defined inside another function, which a rank cannot import"):
        name_of(closure)
    function = type(closure)(closure.__code__, {"__name__": "__main__"}, "shown")
    function.__qualname__, function.__module__ = "shown", "__main__"
    with pytest.raises(UsageError, match="shown is of __main__, and a rank has another one"):
        name_of(function)
    assert name_of(os.getpid) == "posix:getpid"


def through_a_file(value: object, folder: Path) -> Any:
    values.write(folder / "value", value, "result")
    return values.read(folder / "value")


def test_tensors_of_every_dtype(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64):
        for shape in ((), (0, 3), (2, 3)):
            tensor = torch.arange(6)[: max(1, int(np.prod(shape)))].to(dtype)[: int(np.prod(shape))].reshape(shape)
            (back,) = through_a_file([tensor.requires_grad_(dtype.is_floating_point)], tmp_path)
            assert back.dtype == dtype
            assert back.equal(tensor.detach())


def test_a_tensor_that_is_conjugated_or_negated_when_it_is_read_is_sent_as_it_reads(tmp_path: Path) -> None:
    turned = torch.tensor([1 + 2j, 3 - 4j]).conj()
    back = through_a_file([turned, turned.imag], tmp_path)
    assert [one.tolist() for one in back] == [[1 - 2j, 3 + 4j], [-2.0, 4.0]]


def test_a_tensor_that_is_not_dense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="send a dense one"):
        through_a_file(torch.eye(3).to_sparse(), tmp_path)
