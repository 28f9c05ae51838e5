"""The status board: what a rank writes is what the launcher reads, whatever the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.core.errors import RunError
from tilemesh.launch.board import BECAME, DONE, EMPTY, FAILED, RUNNING, Board, Status


def test_a_record_holds_what_the_rank_said(tmp_path: Path) -> None:
    board = Board(tmp_path, 3, create=True)
    status = Status(Board(tmp_path, 3), 1)
    assert (board.read(1).state, board.read(1).at) == (RUNNING, "")
    status.at("step 3: backward")
    record = board.read(1)
    assert record.at == "step 3: backward"
    assert record.ended_ns == 0
    status.end(FAILED, "raised ValueError: no")
    record = board.read(1)
    assert (record.state, record.at, record.reason) == (FAILED, "step 3: backward", "raised ValueError: no")
    assert record.ended_ns >= record.since_ns > 0
    assert board.read(0).state == board.read(2).state == EMPTY


def test_a_later_reason_leaves_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    board = Board(tmp_path, 1, create=True)
    status = Status(board, 0)
    status.end(FAILED, "x" * 900)
    status.end(FAILED, "short")
    assert board.read(0).reason == "short"
    status.end(DONE)
    assert board.read(0).reason == ""


@given(at=st.text(max_size=400), reason=st.text(min_size=1, max_size=900))
def test_any_text_survives_or_is_cut_between_characters(
    tmp_path_factory: pytest.TempPathFactory, at: str, reason: str
) -> None:
    board = Board(tmp_path_factory.mktemp("board"), 2, create=True)
    try:
        neighbour = Status(board, 1)
        neighbour.at("untouched")
        status = Status(board, 0)
        status.at(at)
        status.end(FAILED, reason)
        record = board.read(0)
        for given_text, seen in ((at, record.at), (reason, record.reason)):
            assert seen == given_text or (seen.endswith("…") and given_text.startswith(seen[:-1]))
        assert board.read(1).at == "untouched"
    finally:
        board.close()


def test_a_process_that_becomes_another_program_says_so(tmp_path: Path) -> None:
    board = Board(tmp_path, 1, create=True)
    Status(board, 0).became("hostname")
    assert (board.read(0).state, board.read(0).at) == (BECAME, "hostname")


def test_without_a_launcher_the_status_is_silent() -> None:
    status = Status()
    status.at("anything")
    status.became("anything")
    status.end(DONE)


def test_a_board_of_another_size_is_refused(tmp_path: Path) -> None:
    Board(tmp_path, 2, create=True)
    with pytest.raises(RunError, match="2048 bytes, expected 3 records of 1024"):
        Board(tmp_path, 3)
