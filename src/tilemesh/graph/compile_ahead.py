"""Compiling a program's Triton kernels side by side, in processes that know neither torch nor the GPU.

Triton compiles one kernel at a time in a process (its functions are not safe to compile in threads). Each worker here
is `python -m tilemesh.graph.compile_ahead`: it reads one job per line of its input as JSON, compiles it for a named
target into Triton's cache on disk, and answers with a line. The process that launches kernels then finds them there.
Workers start before torch traces the backward pass; jobs are handed over as soon as a program's kernels are written,
and nobody waits for them until all programs of a model are.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

MOST_WORKERS = 8


class AheadCompilers:
    """Worker processes. Use as a context; what they could not compile is compiled by the caller, who sees why."""

    def __init__(self, count: int | None = None) -> None:
        free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.count = min(MOST_WORKERS, free // 2) if count is None else count
        self.workers: list[subprocess.Popen[str]] = []
        self.given: list[int] = []  # to each worker, the length of its jobs' texts
        self.done = 0
        self.warming: threading.Thread | None = None

    def __enter__(self) -> AheadCompilers:
        for _ in range(self.count):
            self.workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tilemesh.graph.compile_ahead"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                )
            )
            self.given.append(0)
        if self.workers:
            import tilemesh.kernels.launch.program  # noqa: F401  here and not in the thread: torch imports Triton as well

            self.warming = threading.Thread(target=_warm, daemon=True)
            self.warming.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Waits for what was handed over; after an error nobody needs it."""
        for worker in self.workers:
            if kind is not None:
                worker.kill()
            assert worker.stdin is not None
            with suppress(BrokenPipeError):
                worker.stdin.close()
        for worker in self.workers:
            assert worker.stdout is not None
            self.done += worker.stdout.read().split().count("done")
            worker.stdout.close()
            worker.wait()
        self.workers.clear()
        self.warmed()

    def warmed(self) -> None:
        """Waits until this process has what Triton makes once."""
        if self.warming is not None:
            self.warming.join()
            self.warming = None

    def hand_over(self, jobs: Sequence[dict[str, Any]]) -> None:
        """Gives jobs to the workers that have least to do. The longest texts are likely the slowest: they begin."""
        for job in sorted(jobs, key=lambda job: -job["length"]):
            place = self.given.index(min(self.given))
            self.given[place] += job["length"]
            stdin = self.workers[place].stdin
            assert stdin is not None
            with suppress(BrokenPipeError):  # a worker that is gone: its share is compiled by the caller
                stdin.write(json.dumps(job) + "\n")
                stdin.flush()


def _warm() -> None:
    """What Triton makes once in a process: the hash of its own files, and the library that speaks with the driver."""
    import triton

    _key_of_triton()
    with suppress(Exception):  # without a GPU; whoever needs it is told why
        triton.runtime.driver.active.get_current_target()


def _key_of_triton() -> None:
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):
        key = getattr(importlib.import_module(name), "triton_key", None)
        if key is not None:
            key()
            return


def _compile(job: dict[str, Any]) -> None:
    from triton.backends.compiler import GPUTarget

    from tilemesh.kernels.launch.program import Operand, compile_step
    from tilemesh.kernels.launch.steps import Pointer, Step

    if job["module"] not in sys.modules:
        spec = importlib.util.spec_from_file_location(job["module"], job["path"])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[job["module"]] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[job["module"]])
    operands = {name: Operand(dtype) for name, dtype in job["dtypes"].items()}
    arguments = {name: Pointer(name) for name in job["dtypes"]}
    step = Step(job["kernel"], tuple(job["grid"]), arguments, job["constants"], warps=job["warps"])
    compiled = compile_step(step, operands, GPUTarget(*job["target"]))
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if hasattr(driver, "make_launcher"):  # until Triton 3.6 a C compiler makes a launcher for each list of arguments
        driver.CudaLauncher(compiled.src, compiled.metadata)


def main() -> None:
    import tilemesh.kernels.launch.program  # noqa: F401  loads Triton while the first job is still being written

    _key_of_triton()
    for line in sys.stdin:
        try:
            _compile(json.loads(line))
            print("done", flush=True)
        except Exception as error:  # the caller compiles it again and reports what is wrong
            print(f"failed: {type(error).__name__}", flush=True)


if __name__ == "__main__":
    main()
