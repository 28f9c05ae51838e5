"""scripts/test.py: totals over several pytest processes, ids that pytest takes again, failures without a report."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

class TestInside:
    @pytest.mark.parametrize("word", ["a-b", "c.d"])
    def test_word(self, word): assert word == "a-b", "the widget\\nis bent"

def test_passes(): pass

@pytest.mark.skip(reason="no widget here")
def test_skipped(): pass

@pytest.fixture
def broken(): raise ValueError("no fixture")

def test_error(broken): pass
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a project of its own around it."""
    (tmp_path / "tests" / "mpi").mkdir(parents=True)
    (tmp_path / "tests" / "test_here.py").write_text(TESTS)
    (tmp_path / "tests" / "mpi" / "test_ranks.py").write_text("def test_of_ranks(): pass\n")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntestpaths = ['tests']\nmarkers = ['slow']\n")
    spec = importlib.util.spec_from_file_location("test_script", ROOT / "scripts" / "test.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "test_script", module)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "has_gpu", lambda: False)  # these projects have no tests for one
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they cost more than these tests
    return module


@pytest.mark.parametrize("how", [["-n", "1"], ["--by-file", "-n", "2"]])
def test_both_parts_run_and_one_line_closes_them(
    script: ModuleType, how: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert script.main([*how, "--logs", str(tmp_path / "logs")]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "3 passed, 2 failed, 1 skipped"
    failed = [line for line in lines if line.startswith("FAILED tests/test_here.py")][-2:]
    assert failed[0].startswith("FAILED tests/test_here.py::TestInside::test_word[c.d] - AssertionError: the widget")
    assert "FAILED tests/test_here.py::test_error - " in failed[1]
    again = [sys.executable, "-m", "pytest", "-q", "tests/test_here.py::TestInside::test_word[c.d]"]
    assert subprocess.run(again, cwd=tmp_path, capture_output=True, check=False).returncode == 1, "no such test"


def test_what_passes_alone_counts_as_passed_and_is_named(
    script: ModuleType, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    flaky = f"from pathlib import Path\ndef test_flaky():\n    m = Path({str(mark)!r})\n"
    flaky += "    was = m.exists(); m.touch(); assert was\n"
    (tmp_path / "tests" / "test_here.py").write_text(flaky)
    assert script.main(["-n", "1", "--again"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "2 passed, 0 failed, 0 skipped"
    assert any(line.startswith("PASSED ALONE tests/test_here.py::test_flaky") for line in lines)


def test_what_failed_is_run_again_and_nothing_else(
    script: ModuleType, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "tests" / "mpi" / "test_ranks.py").write_text("def test_of_ranks(): assert False\n")
    assert script.main(["-n", "1"]) == 1
    for expected, code in (("0 passed, 3 failed, 0 skipped", 1), ("3 passed, 0 failed, 0 skipped", 0)):
        assert script.main(["failed"]) == code
        assert capfd.readouterr().out.splitlines()[-1] == expected
        for file in ("tests/test_here.py", "tests/mpi/test_ranks.py"):
            text = (tmp_path / file).read_text().replace("assert False", "pass").replace('== "a-b"', "")
            (tmp_path / file).write_text(text.replace('raise ValueError("no fixture")', "pass"))
    assert script.main(["failed"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "0 passed, 0 failed, 0 skipped"


def test_a_part_that_cannot_even_begin_has_failed(
    script: ModuleType, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--no-such-option'\n")
    assert script.main(["ranks", "-n", "1"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"
    assert "FAILED ranks - pytest ended with code 4" in lines


def test_the_longest_files_are_there_and_begin_first(script: ModuleType, tmp_path: Path) -> None:
    assert [name for name in script.LONGEST if not (ROOT / name).is_file()] == []
    longest = tmp_path / script.LONGEST[0]
    longest.write_text("")
    units, gpu, ranks = script.files_of_parts()
    assert (units, gpu, ranks[0]) == ([tmp_path / "tests" / "test_here.py"], [], longest)
