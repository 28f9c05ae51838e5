"""What all tests share: hypothesis without a clock and the same each time, a backend of torch.compile that says what it
was given, and a word on what will be skipped."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("hypothesis") is not None:  # a GPU machine may lack it, and tests/gpu does not need it
    from hypothesis import settings

    # No deadline: a test asserts, it does not time. The same examples in every run: a red one is red again.
    settings.register_profile("tilemesh", deadline=None, derandomize=os.environ.get("CI") is not None)
    settings.load_profile("tilemesh")

# Text is as wide as in a pipe: pytest's processes hand on 80 columns, which readline says of no terminal.
for width in ("COLUMNS", "LINES"):
    os.environ.pop(width, None)

gc.disable()  # until everything is imported: what is imported stays


@pytest.fixture
def recording() -> tuple[Any, list[str]]:
    """A backend of torch.compile, and the names of what its graphs call, forward and backward, as they are made."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    recorded: list[str] = []

    def record(graph: Any, example: Any) -> Any:
        recorded.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=record, bw_compiler=record), recorded


@pytest.fixture
def warm() -> Iterator[None]:
    """What a test starts by `sys.executable` has torch imported already: see mpi/warm.py."""
    from warm import warm_start

    with warm_start():
        yield


def pytest_collection_finish() -> None:
    """What was imported stays: a collection (one before each measurement, for example) need not look at it again.

    Nor need one begin with every 700 new objects: a test makes thousands, and a file ends with a collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What lives beyond a file stays, too: modules that its tests imported, and what torch keeps of their graphs."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_report_header() -> str:
    gpu = shutil.which("nvidia-smi") is not None
    return f"tests/gpu: {'run' if gpu else 'skipped, no NVIDIA GPU here'}; slow tests: make test-all"
