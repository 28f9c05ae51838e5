"""The GPU rows of the chapters: the same code as on the CPU, given tensors that lie on a GPU.

Ranks that share a GPU cannot use its own library of collectives: what they send goes through page-locked memory of
the host. So a row's prediction is what one process takes, plus what sending adds: for a collective, the way to the host
and back and the same collective there; for messages, as many as there are. All of it is measured before. Every function
takes the device as an argument: tests give "cpu".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from tilemesh.bench.harness import Estimate, make_row
from tilemesh.comm import Communicator, run_threads
from tilemesh.core.hardware import device_for, host_link
from tilemesh.core.units import format_bytes
from tilemesh.guide.clock import repeated
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.messages.work import bounce
from tilemesh.measure.row import CaseValue, Row
from tilemesh.measure.sample import Sample


def gpu() -> str | None:
    """The device of GPU rows; None where there is no GPU, and then a chapter has no such row."""
    import torch

    return "cuda" if torch.cuda.is_available() else None


def add_row(lesson: Lesson, measure: Callable[[str], tuple[Row, float]]) -> None:
    """A chapter's row of ranks that share a GPU, which compute what one process computes."""
    device = gpu()
    if device is not None:
        row, apart = measure(device)
        lesson.add(row)
        print(f"{row.case['gpu']}: at most {apart:.1e} from one process")
        assert apart < 1e-10  # sums of thousands of products, taken in another order


def name_of(device: str) -> str:
    """What the driver calls it."""
    import torch

    return str(torch.cuda.get_device_name()) if device.startswith("cuda") else device


def moved(device: str, array: Any) -> Any:
    """A numpy array as a tensor on the device."""
    import torch

    return torch.from_numpy(array).to(device)


def finish(device: str) -> None:
    """Wait until the GPU has done what it was given; a CPU has, already."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(device: str, work: Callable[[], Any]) -> Sample:
    """Seconds of `work`, from a device that is idle until it is idle again."""
    wait = partial(finish, device)
    return Sample.of(repeated(work, before=wait, after=wait))


def staging_seconds(device: str, nbytes: int) -> float:
    """Seconds for bytes from the device to page-locked memory of its host and back."""
    import torch

    here = torch.ones(nbytes, dtype=torch.uint8, device=device)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.startswith("cuda"))

    def there_and_back() -> None:
        host.copy_(here)
        here.copy_(host)

    return timed(device, there_and_back).median


def message_seconds(device: str, nbytes: int) -> float:
    """Seconds that one message of so many bytes takes between two ranks that share the device."""

    def there_and_back(comm: Communicator) -> float:
        import torch

        box = torch.ones(nbytes // 8, dtype=torch.float64, device=device)
        times = repeated(lambda: bounce(comm, box), before=comm.barrier, after=partial(finish, device))
        return float(np.median(times)) / 2

    return run_threads(2, there_and_back)[0]


def summing_seconds(ranks: int, nbytes: int) -> float:
    """Seconds of an all-reduce of so many bytes in the host's memory, on threads, by a ring."""

    def add_up(comm: Communicator) -> float:
        x = np.ones(nbytes // 8)
        return float(np.median(repeated(lambda: comm.all_reduce(x, algorithm="ring"), before=comm.barrier)))

    return max(run_threads(ranks, add_up))


def shared_row(
    name: str,
    device: str,
    ranks: int,
    alone: Callable[[], Any],
    on_rank: Callable[[Communicator], Any],
    *,
    sizes: Mapping[str, CaseValue],
    flops: float,
    added_s: float,
) -> tuple[Row, Any, list[Any]]:
    """A step of ranks that share a GPU beside one process that has it to itself: the row, and both results.

    `added_s`: what sending adds to one process's time, computed by the caller.
    """
    by_itself = timed(device, alone)
    ran = run_threads(ranks, partial(_on_rank, device=device, work=on_rank))
    # A step is done when its slowest rank is: of each repetition the longest time counts.
    together = Sample.of([max(times) for times in zip(*(times for times, _ in ran), strict=True)])
    gpu_name = name_of(device)
    known = device_for(gpu_name)
    peak = None if known is None else known.peak_flops_per_s.get("fp64")
    limit = Estimate(flops / peak if peak else None, f"no fp64 peak of '{gpu_name}' is known here")
    row = make_row(
        name, {"gpu": gpu_name, "ranks": ranks, "dtype": "fp64", **sizes}, together,
        predicted=Estimate(by_itself.median + added_s), limit=limit, peers={"one process": by_itself},
    )  # fmt: skip
    return row, alone(), [result for _, result in ran]


def _on_rank(comm: Communicator, device: str, work: Callable[[Communicator], Any]) -> tuple[list[float], Any]:
    """Seconds of each repetition on this rank, after one that does not count, and the last one's result."""
    results: list[Any] = []

    def keep_last() -> None:
        results[:] = [work(comm)]

    times = repeated(keep_last, before=comm.barrier, after=partial(finish, device))
    return times, results[0]


def all_reduce_row(device: str, ranks: int, nbytes: int, on_host: Sample, measure: Callable[[], Sample]) -> Row:
    """A ring all-reduce of GPU tensors; `on_host`: the same from the host's memory, measured before."""
    import torch

    gpus = torch.cuda.device_count() if device.startswith("cuda") else 1
    sharing = -(-ranks // gpus)  # ranks on one GPU share its link
    predicted = on_host.median + sharing * staging_seconds(device, nbytes)
    gpu_name = name_of(device)
    known = device_for(gpu_name)
    # Both directions of the link can work at once, so the least is one way for all ranks that share it.
    least_s = None if known is None else sharing * nbytes / host_link(known).bytes_per_s
    return make_row(
        "all-reduce of GPU tensors", {"gpu": gpu_name, "ranks": ranks, "array": format_bytes(nbytes)}, measure(),
        predicted=Estimate(predicted), limit=Estimate(least_s, f"no datasheet of '{gpu_name}' is known here"),
        peers={"from host memory": on_host},
    )  # fmt: skip
