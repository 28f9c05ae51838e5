"""Commands that measure refuse what cannot be before anything starts, in one line; and say what they assumed."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilemesh.bench.collective.table import fit_lines, table
from tilemesh.cli.main import explain, main, one_line
from tilemesh.cli.targets import check_apart, check_targets
from tilemesh.comm.runtime.fit import Curve, Fit
from tilemesh.comm.schedules.book import ALGORITHMS
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.units import format_bytes, format_rate
from tilemesh.launch import start
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.model.sampling import sample


@pytest.fixture(autouse=True)
def no_rank_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(start, "processes", refuse)
    monkeypatch.chdir(tmp_path)


DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "kernel", "--shapes", "²x2x2"], "shape '²x2x2' is not understood"),
        (["tune", "²x1x1"], "shape '²x1x1' is not understood"),
        (["bench", "kernel", "--shapes", f"1x1x{DIGITS}"], "is not understood"),
        (["bench", "kernel", "--repeats", DIGITS], "invalid value for '--repeats'"),
        (["bench", "collective", "--ranks", DIGITS], "expected whole numbers"),
        (["bench", "collective", "--sizes", DIGITS], "is too large: write one below 2**63"),
        (["bench", "collective", "--ranks", "1000000"], "expected at most"),
        (["bench", "collective", "--simulate", "flat", "--ranks", "1000000"], "expected at most 65,536 ranks"),
        (["bench", "collective", "--simulate", "flat", "--ranks", str(2**64)], "expected at most 65,536 ranks"),
        (
            ["bench", "collective", "--simulate", "two-level", "--node-size", "0"],
            "--node-size is 0: expected a whole number, at least 1",
        ),
        (["bench", "collective", "--simulate", "flat", "--json", "x.jsonl"], "--json with --simulate"),
        (["bench", "collective", "--svg", "x.svg"], "--svg with a measurement: it belongs to --draw"),
        (["bench", "exchange", "--rows", "-1"], "--rows is -1: expected a whole number, between 1 and"),
        (["bench", "exchange", "--rows", "0"], "--rows is 0: expected a whole number, between 1 and"),
        (["bench", "exchange", "--rows", "1000000"], "tokens per rank"),
        (["bench", "exchange", "--tokens", "0"], "--tokens is 0: expected a whole number, between 1 and 256"),
        (["bench", "exchange", "--tokens", "257"], "--tokens is 257: expected a whole number, between 1 and 256"),
        (["bench", "exchange", "--bucket-bytes", "0"], "--bucket-bytes is 0: expected a whole number, between 1 and"),
        (["bench", "exchange", "--repeats", "0"], "--repeats is 0: expected a whole number, between 1 and"),
        (["bench", "exchange", "--algorithm", "rings"], "did you mean 'ring'?"),
        (["bench", "exchange", "--transport", "x"], "unknown transport 'x'"),
        (["bench", "train", "--transport", "x"], "unknown transport 'x'"),
        (["bench", "train", "--json", "/proc/x"], "--json /proc/x cannot be written"),
        (["bench", "exchange", "--json", "/proc/x"], "--json /proc/x cannot be written"),
        (["bench", "collective", "--json", "."], "it is a folder"),
        (["train", "--json", "/proc/x"], "--json /proc/x cannot be written"),
        (["verify", "--json", "/proc/x"], "--json /proc/x cannot be written"),
        (["verify", "--device", "cuda", "--transport", "threads"], "give --transport torch or mpi"),
        (["verify", "--ranks", "1", "--models", "dropped"], "nothing would be shown; give --ranks 2"),
        (["doctor", "--json", "/proc/x"], "--json /proc/x cannot be written"),
        (["calibrate", "--json", "/proc/x"], "--json /proc/x cannot be written"),
        (["launch", "--ranks", "1000000", "--", "true"], "--ranks is 1000000: expected at most"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tilemesh: ")
    assert said in line
    assert len(line) < 1000


def test_verify_on_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["verify", "--device", "cuda"]) == 2
    assert "--device is 'cuda': torch sees 0 GPUs here; use cpu" in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["", "0", "-1", "²", "wide", "9" * 5000])
def test_a_width_that_is_no_number_is_passed_over(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, columns)
    assert main(["plan", "tiny"]) == 0


@pytest.mark.parametrize("path", ["", "folder", "/proc/x", "file/below", "n" * 300, "loop", "nul\0byte"])
def test_where_nothing_can_be_written(path: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match=r"--json .*cannot be written"):
        check_targets([("--json", path)])


def test_what_can_be_written_is_neither_made_nor_changed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    paths = (kept, tmp_path / "new", tmp_path / "folders" / "on the way" / "new", "-")
    check_targets([("--json", str(path)) for path in paths])
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "as it was"


def test_errors_of_the_machine_name_the_file() -> None:
    found = explain(IsADirectoryError(errno.EISDIR, "Is a directory", "7"), [])
    assert found == ("file 7 cannot be read or written: Is a directory", 1)
    assert explain(OSError(errno.ENOSPC, "No space left on device"), []) == (
        "standard output cannot be read or written: No space left on device",
        1,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "folder.toml"], "configuration file 'folder.toml' cannot be read: Is a directory"),
        (["train", "--plan", "7"], "plan file '7' cannot be read: Is a directory"),
        (["plan", "folder.toml", "--cluster", "8xh100"], "folder.toml has neither config.json nor config.toml"),
        (["plan", "tiny", "--cluster", "8xh100", "--batch", "8", "--json", "7"], "--json 7 cannot be written"),
        (["report", "7"], "7 is no run"),
        (["data", "prepare", "7", "out"], "SOURCE '7' has no text file named like '*': set --pattern"),
        (["data", "prepare", "stdlib", "file"], "the folder file is a file: expected a new folder"),
        (["data", "prepare", "file", "file"], "FOLDER 'file' would write over what SOURCE names: give another path"),
    ],
)
def test_a_folder_in_the_place_of_a_file_is_named(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("7", "folder.toml"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("some text\n" * 100)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tilemesh: {said}")


_PLAN = ["plan", "tiny", "--cluster", "8xh100", "--batch", "8"]
_DRAWING = ["bench", "collective", "all_reduce", "--draw", "ring", "--ranks", "4"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "words",
    [[*_PLAN, "--out"], [*_PLAN, "--json"], [*_PLAN, "--html"], [*_DRAWING, "--svg"], [*_DRAWING, "--html"]],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_full_disk_is_reported_with_its_file(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "/dev/full"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("tilemesh: ")
    assert "/dev/full" in line
    assert line.endswith("No space left on device")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])  # found by the last flush, or by the first line
def test_a_full_disk_below_standard_output_is_one_line(unbuffered: str) -> None:
    command = [sys.executable, "-m", "tilemesh", "plan", "tiny"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment)
    assert ended.returncode == 1
    assert ended.stderr == b"tilemesh: standard output cannot be read or written: No space left on device\n"


def test_a_message_is_one_line_of_bearable_length() -> None:
    assert one_line("two\nlines") == "two lines"
    assert one_line(f"count {DIGITS} is") == f"count {'9' * 60}… (5000 characters) is"


def test_a_simulation_takes_the_ranks_it_was_given_and_says_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collective", "--simulate", "two-level", "--ranks", "2,4,8", "--sizes", "1KiB"]) == 0
    out = capsys.readouterr().out
    for count in (2, 4, 8):
        assert f"all_reduce, {count} ranks" in out
    assumed = (
        "assumed, not measured: inside nodes of 8 α 1 µs, β 450 GB/s; between nodes α 3 µs, β 50 GB/s; "
        "γ 1 TB/s reduced, 1.5 TB/s copied, 2 µs per barrier"
    )
    assert " ".join(out.split()).startswith(assumed)


def test_the_table_of_a_bench_explains_what_is_missing_in_it() -> None:
    def made(algorithm: str, missing: dict[str, str]) -> Row:
        case = {
            "algorithm": algorithm, "bytes": 4, "ranks": 2, "cores": 2, "transport": "mpi", "buffers": "ordinary",
            "oversubscribed": False, "picked": "flat", "sent_bytes": 4, "algorithm_bytes_per_s": 1.0,
            "bus_bytes_per_s": 1.0,
        }  # fmt: skip
        return Row(
            name="all_reduce", case=case, unit="s", predicted=None, measured=Sample(1.0, 1.0, 1.0, 1), limit=None,
            missing={"peers": "none", "limit": "not calibrated", **missing}, machine="", versions={}, commit=None,
            command="",
        )  # fmt: skip

    lines = table([made("auto", {"predicted": "not fitted"}), made("native", {"predicted": "never predicted"})])
    assert [line for line in lines if "missing" in line] == [
        "limit is missing: not calibrated",
        "predicted is missing: not fitted",
    ]
    assert any(line.strip().startswith("4 B") for line in lines)


def test_the_table_of_a_bench_fits_100_columns_and_cuts_no_figure() -> None:
    names = ("auto", *ALGORITHMS, "native_by_us", "native")
    native = Sample(9.99e-4, 9.99e-4, 9.99e-4, 1)
    rows = []
    for buffers in ("ordinary", "empty"):
        for at, name in enumerate(names):
            case = {
                "algorithm": name, "bytes": 1023 << 10, "ranks": 128, "cores": 16, "transport": "mpi",
                "buffers": buffers, "oversubscribed": True, "picked": "recursive_doubling", "sent_bytes": 1023 << 10,
                "algorithm_bytes_per_s": 1.23e8, "bus_bytes_per_s": 4.56e8, "in_set-up": 0.11, "in_copy": 0.12,
                "in_wire": 0.13, "in_reduce": 0.14, "in_wait": 0.5,
            }  # fmt: skip
            seconds = (101 + at) * 1e-6
            rows.append(
                Row(
                    name="reduce_scatter",
                    case=case,
                    unit="s",
                    predicted=7.77e-4,
                    limit=6.66e-4,
                    measured=Sample(seconds, seconds, seconds, 1),
                    peers={} if name == "native" else {"native": native},
                    missing={"peers": "none"} if name == "native" else {},
                    machine="",
                    versions={},
                    commit=None,
                    command="",
                )
            )
    lines = table(rows)
    assert max(map(len, lines)) <= 100
    titles = [line for line in lines if line.startswith("reduce_scatter, ")]
    assert [title.rpartition(", ")[2] for title in titles] == ["ordinary arrays", "arrays from comm.empty"]
    # Each figure stands behind its name with its unit, on one line.
    others = [f"{name} {101 + at} µs" for at, name in enumerate(names) if name not in ("auto", "native")]
    shares = ["set-up 0.11", "copy 0.12", "wire 0.13", "reduce 0.14", "wait 0.50"]
    for figure in (*others, *shares, "algorithm 123 MB/s", "bus 456 MB/s"):
        found = [line for line in lines if re.search(rf"(?<![\w-]){figure}(,|$)", line)]
        assert len(found) == 2, figure
    first = "1023 KiB recursive_doubling 777 µs 101 µs 666 µs 999 µs 9.89 1023 KiB"
    assert [" ".join(line.split()) for line in lines].count(first) == 2


def test_a_fit_in_words_fits_100_columns() -> None:
    points = tuple((float(1 << (4 * at)), 1e-6 * 3**at) for at in range(9))
    lines = fit_lines(Fit("mpi", 2, 2, 1e-6, {"reduce_scatter/recursive_halving": Curve(points)}))
    assert max(map(len, lines)) <= 100
    pieces = [f"{format_rate(rate, 'B/s')} to {format_bytes(high)}" for _, high, rate in Curve(points).bytes_per_s()]
    assert len(pieces) > 4
    assert all(any(piece in line for line in lines) for piece in pieces)


def test_a_model_whose_logits_are_nan_writes_nothing() -> None:
    with pytest.raises(RunError, match="NaN or infinite"):
        sample(lambda tokens, cache: torch.full((1, 1, 4), float("nan")), [1], 1, context=4)


def test_a_runs_configuration_that_is_no_text_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_bytes(b"\xff")
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert "config.toml is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "m.toml", "--cluster", "2xh100", "--out", "m.toml"], "--out 'm.toml' would write over what MODEL"),
        (["plan", "m.toml", "--cluster", "2xh100", "--out", "link"], "--out 'link' would write over what MODEL"),
        (["train", "tiny", "--set", "data.source=m.toml,train.steps=1", "--json", "m.toml"], "--json 'm.toml' would"),
        (["graph", "explain", "m.toml:make", "--html", "./m.toml"], "--html './m.toml' would write over what FILE.py"),
        (
            ["tune", "16x16x16", "--json", "new", "--html", "folder/../new"],
            "--json and --html are both 'folder/../new'",
        ),
        (["export", "folder", "folder"], "FOLDER 'folder' would write over what RUN names: give another path"),
        (
            ["report", "folder", "--html", "folder/config.toml"],
            "--html 'folder/config.toml' would write over a file of",
        ),
        (
            ["train", "--resume", "folder", "--json", "folder/metrics.jsonl", "--dry-run"],
            "--json 'folder/metrics.jsonl' would write over a file of what --resume names",
        ),
        (
            ["compress", "folder", "--recipe", "int8", "--out", "new", "--json", "new/config.json"],
            "--json 'new/config.json' would write over a file of what --out names",
        ),
    ],
)
def test_nothing_is_written_twice_or_over_what_is_read(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "m.toml").write_text("text")
    (tmp_path / "link").symlink_to("m.toml")
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tilemesh: {said}")
    assert (tmp_path / "m.toml").read_text() == "text"


def test_standard_output_and_devices_may_be_named_twice() -> None:
    check_apart([("--json", "-"), ("--html", "-")], [("MODEL", "-")])
    check_apart([("--json", "/dev/null"), ("--html", "/dev/null")], [("MODEL", "/dev/null")])
