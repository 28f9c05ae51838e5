"""What docs/extending.md tells a newcomer to paste passes the checks of this repository as it is."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(encoding="utf-8"), re.S)


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="needs ruff: pip install -e '.[dev]'")
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_every_block_of_code_is_clean(command: list[str], tmp_path: Path) -> None:
    assert len(BLOCKS) > 6
    for number, code in enumerate(BLOCKS):
        (tmp_path / f"block_{number}.py").write_text(code, encoding="utf-8")
    line = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(ROOT / "pyproject.toml"), "."]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
