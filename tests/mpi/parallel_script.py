"""All parts of `parallel_cases.py` and a small gate, as a rank. A part that is wrong is said, and ends the job."""

from __future__ import annotations

import parallel_cases
import torch

from tilemesh.comm import connect
from tilemesh.parallel.gate.cases import Case, Layout
from tilemesh.parallel.gate.compare import Gate

torch.set_num_threads(1)
comm = connect(timeout_s=100.0)
for name, part in parallel_cases.PARTS.items():
    part(comm)
    print(f"{name} right over {comm.backend}", flush=True)
layouts = (
    Layout(1, 4, True),
    Layout(2, 2, False, 2),
    Layout(2, 2, True),
    Layout(4, 1, False, 2),
    Layout(1, 2, True, 2),
)
fit = [layout for layout in layouts if layout.ranks <= comm.size]
for result in Gate(comm).run([Case(model, layout) for layout in fit for model in ("gpt", "llama")]):
    if not result.passed:
        raise AssertionError(f"{result}")
print(f"gate right over {comm.backend}", flush=True)
