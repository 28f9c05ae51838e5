"""The code in docs/kernels/triton.md runs as it stands there, in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PAGE = Path(__file__).parents[2] / "docs" / "kernels" / "triton.md"


def test_the_first_kernels_run_as_written(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code) == 3
    (tmp_path / "page.py").write_text("".join(code), encoding="utf-8")  # Triton reads a kernel's source from its file
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
