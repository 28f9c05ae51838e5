"""What all tests share: hypothesis without a clock and the same each time, and a word on what will be skipped."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

if find_spec("hypothesis") is not None:  # a GPU machine may lack it, and tests/gpu does not need it
    from hypothesis import settings

    # No deadline: a test asserts, it does not time. The same examples in every run: a red one is red again.
    settings.register_profile("tilemesh", deadline=None, derandomize=os.environ.get("CI") is not None)
    settings.load_profile("tilemesh")


def pytest_report_header() -> str:
    gpu = shutil.which("nvidia-smi") is not None
    return f"tests/gpu: {'run' if gpu else 'skipped, no NVIDIA GPU here'}; slow tests: make test-all"
