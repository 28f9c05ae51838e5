"""Compiling many configurations ahead, in parallel processes: what follows finds them in Triton's cache on disk."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.tuning.operator import Tunable
from tilemesh.kernels.tuning.values import ConfigurationT, ProblemT


class Compiler:
    """Compiles configurations into Triton's cache on disk, in parallel processes, or not at all with `workers=0`.

    Processes are started afresh and import the main module again, so a script that uses them needs the usual
    `if __name__ == "__main__"`; called from inside somebody else's program, use none.
    """

    def __init__(self, device: torch.device, workers: int | None = None) -> None:
        self.gpu = gpu_of(device_index(device))
        count = max(1, (os.cpu_count() or 2) - 1) if workers is None else workers
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(count, mp_context=context) if count else None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def ahead(
        self, operator: Tunable[ProblemT, ConfigurationT], jobs: Sequence[tuple[ProblemT, ConfigurationT]]
    ) -> dict[tuple[str, ConfigurationT], str]:
        """Compile these; what failed, and why, by key. Without processes each is compiled when it is first timed."""
        if self.pool is None:
            return {}
        futures = {}
        for problem, config in jobs:
            if (job := operator.compiling(problem, config, self.gpu)) is not None:
                futures[problem.key, config] = self.pool.submit(*job)
        failures = {name: future.result() for name, future in futures.items()}
        return {name: failure for name, failure in failures.items() if failure}
