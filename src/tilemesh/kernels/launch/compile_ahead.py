"""Compiling Triton kernels side by side, in processes that know nothing of the GPU.

Triton compiles one kernel at a time in a process (its functions are not safe to compile in threads). Each worker here
is `python -m tilemesh.kernels.launch.compile_ahead`: it reads one job per line of its input as JSON, compiles it for a
named target into Triton's cache on disk, and answers with a line. The process that launches kernels then finds them
there. Workers of a graph start before torch traces the backward pass; jobs are handed over as soon as a program's
kernels are written, and nobody waits for them until all programs of a piece are. A model that torch cuts into many
pieces finds the workers of the last piece: they end when they had nothing to do for a while.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilemesh.kernels.launch.program import Operand
    from tilemesh.kernels.launch.steps import Step

MOST_WORKERS = 8
IDLE_S = 20.0  # after which a worker that was given nothing ends
JOB_S = 300.0  # after which a worker that does not answer is ended: whoever waits compiles that kernel itself


def worker_count() -> int:
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, free // 2)


def start_workers(count: int | None = None) -> None:
    """For kernels written by hand, whose modules import torch: before this process imports that itself."""
    _WORKERS.at_least(worker_count() if count is None else count, ("torch",))


class AheadCompilers:
    """Worker processes. Use as a context; what they could not compile is compiled by the caller, who sees why."""

    def __init__(self, count: int | None = None) -> None:
        self.count = worker_count() if count is None else count
        self.open = False  # takes jobs
        self.wanted = True
        self.given = 0
        self.answered = threading.Semaphore(0)
        self.done = 0
        self.own: dict[Hashable, Callable[[], None]] = {}
        self.warming: threading.Thread | None = None

    def __enter__(self) -> AheadCompilers:
        self.open = self.count > 0
        if self.open:
            _WORKERS.at_least(self.count)
            import tilemesh.kernels.launch.program  # noqa: F401  here and not in the thread: torch imports Triton as well

            self.warming = threading.Thread(target=_warm, daemon=True)
            self.warming.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Waits for what was handed over; after an error nobody needs it."""
        self.open = False
        self.wanted = kind is None
        if self.wanted:
            for make in self.own.values():
                make()
            for _ in range(self.given):
                self.answered.acquire()
        self.warmed()

    def warmed(self) -> None:
        """Waits until this process has what Triton makes once."""
        if self.warming is not None:
            self.warming.join()
            self.warming = None

    def hand_over(self, jobs: Sequence[dict[str, Any]]) -> None:
        """Gives jobs to whoever is free."""
        self.given += len(jobs)
        _WORKERS.give(jobs, self)

    def meanwhile(self, made: Mapping[Hashable, Callable[[], None]]) -> None:
        """What this process makes itself, once for each key, while it waits for the others: hand-written kernels."""
        self.own |= made

    def answer(self, done: bool) -> None:
        self.done += done
        self.answered.release()


class CompilingProcesses:
    """The workers of this process, for all that compile in it. The longest texts are likely the slowest: they begin."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.imports: tuple[str, ...] = ()  # what workers import before their first job
        self.alive: list[CompilingProcess] = []
        self.jobs: queue.PriorityQueue[tuple[int, int, dict[str, Any], AheadCompilers]] = queue.PriorityQueue()
        self.numbers = itertools.count()

    def at_least(self, count: int, imports: tuple[str, ...] = ()) -> None:
        with self.lock:
            self.imports = imports
            self._at_least(count)

    def _at_least(self, count: int) -> None:
        for _ in range(count - len(self.alive)):
            self.alive.append(CompilingProcess(self))
            self.alive[-1].start()

    def give(self, jobs: Sequence[dict[str, Any]], giver: AheadCompilers) -> None:
        cache = os.environ.get("TRITON_CACHE_DIR", "")  # a worker may be older than this setting
        with self.lock:
            for job in jobs:
                self.jobs.put((-job["length"], next(self.numbers), {**job, "cache": cache}, giver))
            self._at_least(giver.count)

    def may_end(self, worker: CompilingProcess) -> bool:
        """Whether an idle worker may end. What is given meanwhile is seen by it, or by another that starts."""
        with self.lock:
            if not self.jobs.empty():
                return False
            self.alive.remove(worker)
            return True


class CompilingProcess(threading.Thread):
    """Hands jobs to a process of its own, one at a time."""

    def __init__(self, workers: CompilingProcesses) -> None:
        super().__init__(daemon=True)
        self.workers = workers
        self.process = self._begin()

    def _begin(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tilemesh.kernels.launch.compile_ahead", *self.workers.imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    def run(self) -> None:
        while True:
            try:
                _, _, job, giver = self.workers.jobs.get(timeout=IDLE_S)
            except queue.Empty:
                if self.workers.may_end(self):
                    break
                continue
            giver.answer(giver.wanted and self._compiled(job))
        self.process.communicate()  # with no more input it ends

    def _compiled(self, job: dict[str, Any]) -> bool:
        with suppress(OSError):  # it ends meanwhile, or there are no more processes
            if self.process.poll() is not None:  # it was ended from outside, or hung
                self.process.communicate()
                self.process = self._begin()
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            patience = threading.Timer(JOB_S, self.process.kill)
            patience.start()
            try:
                print(json.dumps(job), file=self.process.stdin, flush=True)
                return self.process.stdout.readline().strip() == "done"
            finally:
                patience.cancel()
        return False


_WORKERS = CompilingProcesses()
if hasattr(os, "register_at_fork"):  # threads do not live on in a process that was forked, and the pipes are another's
    os.register_at_fork(after_in_child=_WORKERS.__init__)  # type: ignore[misc]


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
    os.environ.pop("TRITON_CACHE_DIR", None)
    if job.get("cache"):
        os.environ["TRITON_CACHE_DIR"] = job["cache"]
    from triton.backends.compiler import GPUTarget

    from tilemesh.kernels.launch.program import compile_step

    step, operands = _own_step(job) if "step" in job else _step_of(job)
    compiled = compile_step(step, operands, GPUTarget(*job["target"]))
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if hasattr(driver, "make_launcher"):  # until Triton 3.6 a C compiler makes a launcher for each list of arguments
        driver.CudaLauncher(compiled.src, compiled.metadata)


def step_job(step: Step, operands: Mapping[str, Operand], length: int, target: Sequence[Any]) -> dict[str, Any]:
    """A launch of a kernel that is in this package; `length`: of its text."""
    places = {name: argument if _is_plain(argument) else vars(argument) for name, argument in step.arguments.items()}
    own = {**vars(step), "arguments": places, "constants": dict(step.constants)}
    read = {name: vars(operand) for name, operand in operands.items()}
    return {"step": own, "operands": read, "length": length, "target": list(target)}


def _is_plain(argument: object) -> bool:
    return argument is None or isinstance(argument, int | float)


def _own_step(job: dict[str, Any]) -> tuple[Step, dict[str, Operand]]:
    from tilemesh.kernels.launch.program import Operand
    from tilemesh.kernels.launch.steps import Descriptor, Pointer, Step

    own: dict[str, Any] = _with_tuples(job["step"])
    for name, argument in own["arguments"].items():
        if not _is_plain(argument):
            own["arguments"][name] = Descriptor(**argument) if "shape" in argument else Pointer(**argument)
    return Step(**own), {name: Operand(**operand) for name, operand in job["operands"].items()}


def _with_tuples(value: Any) -> Any:
    """What JSON has made lists of."""
    if isinstance(value, dict):
        return {name: _with_tuples(inner) for name, inner in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _step_of(job: dict[str, Any]) -> tuple[Step, dict[str, Operand]]:
    """Of a kernel that was written for a graph."""
    from tilemesh.kernels.launch.program import Operand
    from tilemesh.kernels.launch.steps import Pointer, Step

    if job["module"] not in sys.modules:
        spec = importlib.util.spec_from_file_location(job["module"], job["path"])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[job["module"]] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[job["module"]])
    operands = {name: Operand(dtype) for name, dtype in job["dtypes"].items()}
    arguments = {name: Pointer(name) for name in job["dtypes"]}
    return Step(job["kernel"], tuple(job["grid"]), arguments, job["constants"], warps=job["warps"]), operands


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
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
