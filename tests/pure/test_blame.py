"""Which rank is named when a job ends: the cause, not its consequences."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from tilemesh.launch.blame import Death, blame, death_reason, last_words, mpi_deaths
from tilemesh.launch.board import BECAME, DONE, FAILED, INTERRUPTED, RUNNING, Record


def record(state: int = RUNNING, *, ended_ns: int = 0, reason: str = "", at: str = "step 3") -> Record:
    return Record(pid=100, state=state, since_ns=1_000_000_000, ended_ns=ended_ns, at=at, reason=reason)


def named(records: Sequence[Record], deaths: Sequence[Death] = ()) -> tuple[int | None, str] | None:
    failure = blame(records, deaths)
    return None if failure is None else (failure.rank, failure.reason)


def test_nothing_failed() -> None:
    assert named([record(DONE), record(DONE)], [Death(0, 0), Death(1, 0)]) is None
    assert named([record(BECAME), record(BECAME)], [Death(0, 0), Death(1, 0)]) is None


def test_the_earliest_report_counts() -> None:
    records = [record(FAILED, ended_ns=9, reason="raised B"), record(FAILED, ended_ns=5, reason="raised A"), record()]
    assert named(records) == (1, "raised A")


def test_a_killed_rank_comes_before_those_that_raised_because_it_was_gone() -> None:
    records = [record(FAILED, ended_ns=5, reason="raised RuntimeError: connection closed"), record()]
    rank, reason = named(records, [Death(0, 1), Death(1, -signal.SIGKILL)]) or (None, "")
    assert rank == 1
    assert "SIGKILL" in reason
    assert "memory" in reason


def test_any_silent_death_comes_before_reports_and_the_first_seen_before_others() -> None:
    records = [record(FAILED, ended_ns=5, reason="raised RuntimeError: connection closed"), record(), record()]
    assert named(records, [Death(2, 5), Death(1, -signal.SIGABRT)]) == (2, "exited with code 5")
    assert named(records, [Death(0, 1), Death(1, -signal.SIGABRT)]) == (1, "was killed by SIGABRT")


def test_leaving_silently_counts_only_where_something_failed() -> None:
    failed = record(FAILED, ended_ns=5, reason="raised A")
    assert named([failed, record(RUNNING)], [Death(1, 0)]) == (1, "left in the middle of the job without failing")
    assert named([failed, record(DONE, ended_ns=3)], [Death(1, 0)]) == (0, "raised A")
    assert named([failed, record(BECAME)], [Death(1, 0)]) == (0, "raised A")
    assert named([record(RUNNING), record(DONE, ended_ns=3)], [Death(0, 0), Death(1, 0)]) is None


def test_an_exit_code_of_a_program_without_records() -> None:
    assert named([record(BECAME), record(BECAME)], [Death(0, 0), Death(1, 3)]) == (1, "exited with code 3")


def test_a_rank_that_was_interrupted_by_hand() -> None:
    interrupted = record(INTERRUPTED, ended_ns=2, reason="was interrupted")
    assert named([record(DONE, ended_ns=1), interrupted]) == (1, "was interrupted")
    assert named([record(FAILED, ended_ns=3, reason="raised A"), interrupted]) == (1, "was interrupted")


def test_the_sentence_says_who_why_at_what_and_for_how_long() -> None:
    records = [record(FAILED, ended_ns=3_500_000_000, reason="raised ValueError: no", at="step 12: all_reduce")]
    failure = blame(records, [])
    assert failure is not None
    assert failure.sentence() == "rank 0 raised ValueError: no, at: step 12: all_reduce (for 2.5 s)"


def test_words_for_codes() -> None:
    assert death_reason(7) == "exited with code 7"
    assert death_reason(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert death_reason(-250) == "was killed by signal 250"


KILLED = """
prterun noticed that process rank 1 with PID 4279 on node vm exited on
signal 9 (Killed).
"""
EXITED = """
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-4289@1,2]
   Exit code:    3
"""
LEFT = """
prterun has exited due to process rank 1 with PID 4307 on node vm exiting
improperly. There are three reasons this could occur:
"""


def test_what_mpiexec_says_is_understood() -> None:
    assert mpi_deaths(KILLED, 137, [0, 1]) == [Death(1, -9)]
    assert mpi_deaths(EXITED, 3, [0]) == [Death(2, 3)]
    [left] = mpi_deaths(LEFT, 1, [])
    assert (left.rank, death_reason(left.code)) == (1, "left in the middle of the job without failing")


def test_where_mpiexec_names_nobody_the_first_to_vanish_is_named() -> None:
    assert mpi_deaths("BAD TERMINATION", 137, [2, 0]) == [Death(2, -9)]
    assert mpi_deaths("BAD TERMINATION", 3, [2, 0]) == [Death(2, 3)]
    assert mpi_deaths("", 0, []) == []
    assert mpi_deaths("cannot start", 1, []) == []


NO_MAPPER = """
--------------------------------------------------------------------------
Your job failed to map. Either no mapper was available, or none
was able to.

  Application:         hostname
--------------------------------------------------------------------------
 \0"""


def test_last_words_are_the_first_paragraph_of_a_complaint_or_the_last_line() -> None:
    assert last_words(NO_MAPPER) == "Your job failed to map. Either no mapper was available, or none was able to."
    assert last_words("starting\nno such host\n\n \0") == "no such host"
    assert last_words("----------\n") == last_words("") == "it said nothing"
