"""Capturing CUDA graphs, with stand-ins for CUDA: what must not happen while something is captured."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilemesh.core.errors import RunError
from tilemesh.measure import gpu


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> gpu.CudaGraphs:
    @contextmanager
    def capture(*given: Any, **options: Any) -> Any:
        yield

    stream = SimpleNamespace(device=None, device_index=0, synchronize=lambda: None)
    monkeypatch.setattr(gpu, "_capture_stream", lambda index: stream)
    fakes = {"is_available": lambda: True, "current_device": lambda: 0, "CUDAGraph": object, "graph": capture}
    fakes |= {
        "graph_pool_handle": lambda: (0, 0),
        "current_stream": lambda device: stream,
        "Event": lambda **given: None,
    }
    fakes |= {"set_stream": lambda stream: None}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    made = gpu.CudaGraphs()
    monkeypatch.setattr(made, "_recover", lambda *given: None)
    return made


def test_nothing_is_collected_during_a_capture(graphs: gpu.CudaGraphs) -> None:
    """A graph of an engine that was closed, ended by the collector in the middle of a capture, breaks the capture."""
    seen = []
    assert gc.isenabled()
    graphs.capture(lambda: seen.append(gc.isenabled()))
    assert seen == [False]
    assert gc.isenabled()

    def fails() -> None:
        seen.append(gc.isenabled())
        raise ValueError("no")

    with pytest.raises(RunError, match="no"):
        graphs.capture(fails)
    assert seen == [False, False]
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off(graphs: gpu.CudaGraphs) -> None:
    gc.disable()
    try:
        graphs.capture(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()
