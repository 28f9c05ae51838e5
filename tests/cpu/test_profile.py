"""A trace of `torch.profiler` as it is written today: its steps are found, and what they did."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tilemesh.plan.engines.logs import COMPUTE, EXCHANGE, WAITING, read_profile


def test_a_trace_of_this_torch_is_read(tmp_path: Path) -> None:
    layer = torch.nn.Linear(256, 256)
    steps, path = schedule(wait=0, warmup=1, active=3, repeat=1), str(tmp_path / "trace.json")
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=steps,
        on_trace_ready=lambda ended: ended.export_chrome_trace(path),
    ) as profiler:
        for _ in range(4):
            layer(torch.ones(64, 256)).sum().backward()
            profiler.step()
    measured = read_profile(Path(path))
    parts = measured.parts_s
    assert parts is not None
    assert len(measured.steps_s) == 3
    assert parts[EXCHANGE] == 0
    assert parts[COMPUTE] > 0
    middle = sorted(measured.steps_s)[1]
    assert abs(parts[COMPUTE] + parts[WAITING] - middle) < 1e-9 + 1e-6 * middle
