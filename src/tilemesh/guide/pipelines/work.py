"""What chapter 7 runs: a software pipeline on threads, and training steps carried out from lists of actions.

`run_schedule` is a small executor of the schedules that the planner draws: every rank walks down its list and does what
stands there. Layers are tanh(x·W) in float64, so that the gradients can be held to those of one process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilemesh.comm import Communicator
from tilemesh.comm.runtime.engine import Handle
from tilemesh.core.step.action import StepProgram
from tilemesh.core.step.book import build
from tilemesh.guide import on_gpu
from tilemesh.measure.row import Row

Array = np.ndarray[Any, Any]

STAGES = {"load": 0.010, "preprocess": 0.005, "infer": 0.015, "postprocess": 0.005}
"""Seconds of each stage of the software pipeline."""


# A software pipeline ------------------------------------------------------------------------------------------------


def one_by_one(items: int) -> tuple[list[int], float]:
    """Every item through all stages before the next one begins; the items as they came out, and the seconds."""
    began, done = time.perf_counter(), []
    for item in range(items):
        for seconds in STAGES.values():
            time.sleep(seconds)
        done.append(item)
    return done, time.perf_counter() - began


def pipelined(items: int) -> tuple[list[int], float, float]:
    """A thread per stage, with queues between them: (items as they came out, seconds, an item's seconds inside)."""
    queues: list[queue.Queue[tuple[int, float] | None]] = [queue.Queue(maxsize=1) for _ in range(len(STAGES) + 1)]

    def stage(place: int, seconds: float) -> None:
        while (got := queues[place].get()) is not None:
            time.sleep(seconds)
            queues[place + 1].put(got)
        queues[place + 1].put(None)

    threads = [threading.Thread(target=stage, args=pair) for pair in enumerate(STAGES.values())]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    feeder = threading.Thread(target=_feed, args=(queues[0], items))
    feeder.start()
    done, inside = [], []
    while (got := queues[-1].get()) is not None:
        done.append(got[0])
        inside.append(time.perf_counter() - got[1])
    seconds = time.perf_counter() - began
    for thread in [*threads, feeder]:
        thread.join()
    return done, seconds, float(np.median(inside))


def _feed(first: queue.Queue[tuple[int, float] | None], items: int) -> None:
    for item in range(items):
        first.put((item, time.perf_counter()))
    first.put(None)


# A training step from a list ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PipelineProblem:
    """One matrix per chunk, the microbatches, and the gradients of their outputs."""

    weights: Sequence[Array]
    inputs: Sequence[Array]
    output_gradients: Sequence[Array]


def make(chunks: int, microbatches: int, width: int = 6, samples: int = 3) -> PipelineProblem:
    random = np.random.default_rng(7)
    shapes = (width, width), (samples, width), (samples, width)
    counts = chunks, microbatches, microbatches
    arrays = [[random.normal(size=shape) for _ in range(count)] for shape, count in zip(shapes, counts, strict=True)]
    return PipelineProblem(*arrays)


def gradients_alone(problem: PipelineProblem) -> list[Array]:
    """The gradient of every chunk's matrix, summed over the microbatches, in one process."""
    sums: list[Any] = [0.0 for _ in problem.weights]
    for x, gradient in zip(problem.inputs, problem.output_gradients, strict=True):
        inputs = [x]
        for weight in problem.weights:
            inputs.append(_tanh(inputs[-1] @ weight))
        for chunk in reversed(range(len(sums))):
            through = gradient * (1 - inputs[chunk + 1] ** 2)
            sums[chunk] = sums[chunk] + inputs[chunk].T @ through
            gradient = through @ problem.weights[chunk].T
    return sums


def run_schedule(comm: Communicator, program: StepProgram, problem: PipelineProblem) -> tuple[dict[int, Array], int]:
    """Walk down this rank's list; the gradients of its chunks, and the most activations it kept at once.

    A forward pass receives its input from the rank of the chunk before and sends its output on; a backward pass does
    the same with gradients, the other way. Sends are begun and waited for at the end: nobody waits before a receive.
    """
    sums: dict[int, Array] = {}
    kept: dict[tuple[int, int], tuple[Array, Array]] = {}
    sending: list[Handle] = []
    most, top = 0, program.chunks - 1
    local: dict[tuple[str, int, int], Array] = {}  # from one chunk to another on the same rank

    def give(kind: str, chunk: int, microbatch: int, value: Array) -> None:
        to = program.placement.rank(chunk, microbatch)
        if to == comm.rank:
            local[kind, chunk, microbatch] = value
        else:
            sending.append(comm.isend(value, to=to, tag=_tag(kind, chunk, microbatch, program)))

    def take(kind: str, chunk: int, microbatch: int, from_chunk: int) -> Array:
        source = program.placement.rank(from_chunk, microbatch)
        if source == comm.rank:
            return local.pop((kind, chunk, microbatch))
        box = problem.inputs[0] * 0  # of the shape and kind of what will come
        comm.recv(box, source=source, tag=_tag(kind, chunk, microbatch, program))
        return box

    for kind, chunk, microbatch, *_ in program.actions[comm.rank]:
        if kind == "F":
            x = problem.inputs[microbatch] if chunk == 0 else take("F", chunk, microbatch, chunk - 1)
            y = _tanh(x @ problem.weights[chunk])
            kept[chunk, microbatch] = x, y
            most = max(most, len(kept))
            if chunk < top:
                give("F", chunk + 1, microbatch, y)
        elif kind == "B":
            last = chunk == top
            dy = problem.output_gradients[microbatch] if last else take("B", chunk, microbatch, chunk + 1)
            x, y = kept.pop((chunk, microbatch))
            through = dy * (1 - y**2)
            sums[chunk] = sums.get(chunk, 0.0) + x.T @ through
            if chunk:
                give("B", chunk - 1, microbatch, through @ problem.weights[chunk].T)
    for handle in sending:
        handle.wait()
    return sums, most


def _tanh(x: Array) -> Array:
    return np.tanh(x) if isinstance(x, np.ndarray) else x.tanh()  # a torch tensor has its own


def _tag(kind: str, chunk: int, microbatch: int, program: StepProgram) -> int:
    """A number for each message, so that messages between the same two ranks cannot be taken for one another."""
    return (2 * chunk + (kind == "B")) * program.microbatches + microbatch


# On a GPU -----------------------------------------------------------------------------------------------------------


def gpu_row(device: str, stages: int = 4, microbatches: int = 8, width: int = 512) -> tuple[Row, float]:
    """`run_schedule` with 1F1B by stages that share a GPU; the row, and how far gradients are from one process's."""
    program = build("1f1b", stages, microbatches)
    host = make(program.chunks, microbatches, width, samples=width)
    scaled = [weight / width**0.5 for weight in host.weights]  # so that tanh does not saturate
    lists = (scaled, host.inputs, host.output_gradients)
    problem = PipelineProblem(*([on_gpu.moved(device, array) for array in arrays] for arrays in lists))
    messages = 2 * (stages - 1) * microbatches
    row, expected, results = on_gpu.shared_row(
        "1F1B step on the GPU",
        device,
        stages,
        lambda: gradients_alone(problem),
        lambda comm: run_schedule(comm, program, problem),
        sizes={"microbatches": microbatches, "width": width},
        flops=3 * 2.0 * width**3 * stages * microbatches,
        added_s=messages * on_gpu.message_seconds(device, width * width * 8),
    )
    apart = [float(abs(value - expected[chunk]).max()) for sums, _ in results for chunk, value in sums.items()]
    return row, max(apart)
