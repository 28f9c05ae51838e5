"""Writing a result file: whole, or nothing of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import check_new_folder, filling, replacing, write_text


def write_half(target: Path, error: BaseException) -> None:
    with replacing(target) as part:
        part.write_text("half")
        raise error


def test_a_file_that_could_not_be_written_to_its_end_is_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    for before in (None, "old"):
        if before is not None:
            target.write_text(before)
        for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
            with pytest.raises(type(error)):
                write_half(target, error)
            assert (target.read_text() if target.exists() else None) == before
            assert [path.name for path in tmp_path.iterdir()] == ([] if before is None else ["page.html"])


def test_an_error_names_the_file_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as failed, replacing(tmp_path / "no" / "page") as part:
        part.write_text("text")
    assert failed.value.filename == str(tmp_path / "no" / "page")
    (tmp_path / "name").mkdir()
    with pytest.raises(RunError, match="name' cannot be written: Is a directory"):
        write_text("text", tmp_path / "name")


def test_text_without_an_encoding_leaves_no_empty_file(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_text("a half of a pair: \udc80", tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_links_pipes_and_devices_are_written_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text("new", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    write_text("gone", "/dev/null")
    assert not Path("/dev/null").is_file()
    if Path("/dev/full").exists():
        with pytest.raises(RunError, match="'/dev/full' cannot be written: No space left on device"):
            write_text("text", "/dev/full")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text("through", tmp_path / "pipe")
    assert os.read(reader, 100) == b"through"
    os.close(reader)


@pytest.mark.parametrize("writes", [False, True])
def test_a_folder_that_a_killed_command_left_is_known_for_one(tmp_path: Path, writes: bool) -> None:
    folder = tmp_path / "new/model"
    code = (
        "import os; from pathlib import Path; from tilemesh.core.files import filling\n"
        f"folder = Path({str(folder)!r})\n"
        "with filling(folder):\n"
        f"    {writes} and (folder / 'tokenizer.json').write_text('{{}}')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL
    if writes:
        with pytest.raises(UsageError, match="is what a command left that was killed: remove it, or name a new folder"):
            check_new_folder(folder)
    else:
        check_new_folder(folder)
        with filling(folder):
            (folder / "tokenizer.json").write_text("{}")
        assert [path.name for path in folder.iterdir()] == ["tokenizer.json"]


def test_what_fails_leaves_no_folder_on_the_way(tmp_path: Path) -> None:
    with pytest.raises(RunError), filling(tmp_path / "a/b/c"):
        write_text("text", tmp_path / "a/b/c")
    assert list(tmp_path.iterdir()) == []
