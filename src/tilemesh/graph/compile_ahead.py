"""Compiling a program's Triton kernels side by side, in processes that know neither torch nor the GPU.

Triton compiles one kernel at a time in a process (its functions are not safe to compile in threads). Each worker here
is `python -m tilemesh.graph.compile_ahead`: it reads one job per line of its input as JSON, compiles it for a named
target into Triton's cache on disk, and answers with a line. The process that launches kernels then finds them there.
Workers start when a program begins to be rewritten, and are ready when its kernels are written.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

MOST_WORKERS = 8


class AheadCompilers:
    """Worker processes. Use as a context; what they could not compile is compiled by the caller, who sees why."""

    def __init__(self, count: int | None = None) -> None:
        free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.count = min(MOST_WORKERS, free // 2) if count is None else count
        self.workers: list[subprocess.Popen[str]] = []

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
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.close()
            worker.stdout.close()
        for worker in self.workers:
            worker.wait()
        self.workers.clear()

    def compile(self, jobs: Sequence[dict[str, Any]]) -> int:
        """Compiles these; how many did. The longest texts are likely the slowest: they begin."""
        order = sorted(jobs, key=lambda job: -job["length"])
        shares = [order[place :: len(self.workers)] for place in range(len(self.workers))]
        done = 0
        for worker, share in zip(self.workers, shares, strict=True):
            assert worker.stdin is not None
            try:
                worker.stdin.writelines(json.dumps(job) + "\n" for job in share)
                worker.stdin.flush()
            except BrokenPipeError:  # a worker that is gone: its share is compiled by the caller
                continue
        for worker, share in zip(self.workers, shares, strict=True):
            assert worker.stdout is not None
            for _ in share:
                answer = worker.stdout.readline()
                if not answer:
                    break
                done += answer.strip() == "done"
        return done


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
    compile_step(step, operands, GPUTarget(*job["target"]))


def main() -> None:
    import tilemesh.kernels.launch.program  # noqa: F401  loads Triton while the first job is still being written

    for line in sys.stdin:
        try:
            _compile(json.loads(line))
            print("done", flush=True)
        except Exception as error:  # the caller compiles it again and reports what is wrong
            print(f"failed: {type(error).__name__}", flush=True)


if __name__ == "__main__":
    main()
