"""What chapter 10 runs: a step of small operators, a recorder of such steps, a host and a device side by side."""

from __future__ import annotations

import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilemesh.core.errors import UsageError
from tilemesh.guide.clock import repeated
from tilemesh.guide.requests.work import Load, continuous
from tilemesh.measure.sample import Sample
from tilemesh.serve.scheduler import ServeLimits

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch.profiler prints when it begins and ends
LAYERS, WIDTH = 12, 64


class SmallModel(torch.nn.Module):
    """So small that arithmetic takes no time: what is left is the host."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.clamp(layer(x), 0)
        return x


def seconds_of(function: Callable[[], object], repeats: int = 30, calls: int = 20) -> Sample:
    """Of one call, from several rounds of some calls."""

    def round_of_calls() -> None:
        for _ in range(calls):
            function()

    return Sample.of(seconds / calls for seconds in repeated(round_of_calls, repeats))


def call_seconds() -> float:
    """What an operator costs before it computes anything: an addition of two numbers."""
    one = torch.ones(1)
    return seconds_of(lambda: torch.add(one, one), calls=200).median


def layer_seconds() -> float:
    """The three operators of a layer alone, into memory that is there already."""
    x, weight, out = torch.ones(1, WIDTH), torch.ones(WIDTH, WIDTH), torch.empty(1, WIDTH)

    def operators() -> None:
        torch.addmm(x, x, weight, out=out)
        torch.clamp(x, 0, out=out)
        torch.add(x, x, out=out)

    with torch.no_grad():
        return seconds_of(operators, calls=100).median


# A recorder -----------------------------------------------------------------------------------------------------------


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches a function once and can run its operators again: nothing of the function's own Python runs then.

    As a CUDA graph does: every operator reads and writes the same memory as before, so that a new input must be
    *copied into* the old one's place, and what Python decided while recording stays decided.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], example: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.input, self.calls = example.clone(), list[Callable[[], Any]]()
        with torch.no_grad(), self:
            self.output = function(self.input)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:  # a view is made once: it keeps looking at the same memory
            return result
        operator = getattr(torch, func.overloadpacket.__name__, None)
        if kwargs or operator is None or not hasattr(func.overloadpacket, "out"):
            raise UsageError(f"{func} cannot be recorded here: it does not write into memory that it is given")
        # The very tensors that it read and wrote: both are kept.
        self.calls.append(partial(operator, *args, out=result))
        return result

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape != self.input.shape:
            raise UsageError(f"recorded for {tuple(self.input.shape)}, called with {tuple(x.shape)}: record it again")
        with torch.no_grad():
            self.input.copy_(x)
            for call in self.calls:
                call()
        return self.output


def doubles_if_positive(x: torch.Tensor) -> torch.Tensor:
    """Python decides from a value: a recording keeps the decision of its first run."""
    return x * 2.0 if float(x.detach().numpy().sum()) > 0 else x * 3.0


# A host and a device --------------------------------------------------------------------------------------------------


def timeline(host: Sequence[float], device: Sequence[float], waits: Sequence[bool]) -> list[tuple[float, float]]:
    """When each kernel begins and ends. The host needs host[i] to launch kernel i, the device runs one at a time, and
    where waits[i] the host goes on only when kernel i has ended (it reads its result)."""
    at, free, spans = 0.0, 0.0, []
    for launch, run, wait in zip(host, device, waits, strict=True):
        at += launch
        begin = max(at, free)
        free = begin + run
        spans.append((begin, free))
        if wait:
            at = free
    return spans


def stepped(steps: int, device_s: float, host_s: float, ahead: bool) -> float:
    """Seconds of steps with a thread as the device. `ahead`: the host prepares the next while the device runs."""
    work: queue.Queue[bool] = queue.Queue(maxsize=1)
    done: queue.Queue[bool] = queue.Queue()

    def device() -> None:
        while work.get():
            time.sleep(device_s)
            done.put(True)

    thread = threading.Thread(target=device)
    thread.start()
    began = time.perf_counter()
    for step in range(steps):
        time.sleep(host_s)
        if ahead and step:
            done.get()  # of the step before: it ran while this one was prepared
        work.put(True)
        if not ahead:
            done.get()
    if ahead:
        done.get()
    seconds = time.perf_counter() - began
    work.put(False)
    thread.join()
    return seconds


def scheduler_seconds(batch: int, output: int = 64) -> float:
    """What tilemesh's scheduler takes of the host for a step of so many requests: planned and booked, not computed."""
    limits = ServeLimits(pages=batch * 8, context=128, running=batch, step_tokens=max(512, batch))
    loads = [Load(0.0, 16, output) for _ in range(batch)]
    rounds = []
    for _ in range(3):
        began = time.perf_counter()
        history = continuous(loads, limits, lambda tokens: 1e-3)
        rounds.append((time.perf_counter() - began) / len(history.steps))
    return statistics.median(rounds)


def padded(sizes: Sequence[int], buckets: Sequence[int]) -> float:
    """The share of rows that are computed for nothing where each batch takes the next larger recording."""
    taken = [min(bucket for bucket in buckets if bucket >= size) for size in sizes]
    return 1 - sum(sizes) / sum(taken)
