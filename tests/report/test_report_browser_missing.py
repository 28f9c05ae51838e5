"""Where no browser is installed: CI gets one if it can and goes on if it cannot, and the tests say what they skip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def installing(tmp_path: Path, *, answer: int, has_browser: bool = False) -> subprocess.CompletedProcess[str]:
    """The part of .ci/run that gets the browser, where programs are stand-ins; apt-get answers with this code."""
    text = (ROOT / ".ci" / "run").read_text()
    block = text[text.index("if ! command -v chromium") : text.index("make check")]
    programs = {
        "apt-get": f'echo "apt-get $* ($DEBIAN_FRONTEND)" >&2; exit {answer}',
        "id": "echo 0",
        "timeout": 'shift; exec "$@"',
    }
    programs |= {"chromium": "exit 0"} if has_browser else {}
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    script = f"set -euo pipefail\n{block}\necho went on"
    return subprocess.run(
        [bash, "-c", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_missing_browser_is_installed_without_questions(tmp_path: Path) -> None:
    done = installing(tmp_path, answer=0)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "apt-get update -qq (noninteractive)",
        "apt-get install -y -qq --no-install-recommends chromium (noninteractive)",
    ]
    assert done.stdout == "went on\n"


def test_where_it_cannot_be_had_the_tests_run_without_it(tmp_path: Path) -> None:
    done = installing(tmp_path, answer=100)
    assert done.stdout == "went on\n"
    assert ".ci/run: chromium could not be installed, pages will not be opened" in done.stderr


def test_a_browser_that_is_there_is_left_alone(tmp_path: Path) -> None:
    done = installing(tmp_path, answer=100, has_browser=True)
    assert (done.stdout, done.stderr) == ("went on\n", "")


def test_tests_that_need_it_say_that_they_are_skipped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/report/test_report_pages.py"]
    done = subprocess.run(
        [*command, "-k", "kernels_page"], cwd=ROOT, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pages are not opened: no Chromium here (Debian: apt-get install chromium)" in done.stdout
    assert "1 skipped" in done.stdout
