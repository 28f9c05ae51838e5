"""All parts of `parallel_cases.py` and a small gate, as a rank. A part that is wrong is said, and ends the job."""

from __future__ import annotations

import parallel_cases
import torch

from tilemesh.comm import connect
from tilemesh.parallel.gate.cases import cases
from tilemesh.parallel.gate.compare import Gate

torch.set_num_threads(1)
comm = connect(timeout_s=100.0)
for name, part in parallel_cases.PARTS.items():
    part(comm)
    print(f"{name} right over {comm.backend}", flush=True)
for result in Gate(comm).run(cases(comm.size, ("llama",))):
    if not result.passed:
        raise AssertionError(f"{result}")
print(f"gate right over {comm.backend}", flush=True)
