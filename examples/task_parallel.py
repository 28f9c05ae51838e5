"""Task against data parallelism: the features of pictures, extracted in both ways.

    python examples/task_parallel.py
    tilemesh launch --ranks 4 -- examples/task_parallel.py

Four extractors of unequal cost make the features of every picture. *Task parallelism*: a rank runs some of the
extractors on all pictures. *Data parallelism*: a rank runs all extractors on some of the pictures. The features are the
same. Tasks cannot be cut finer than they are, so the dearest one bounds the speed-up, by Amdahl's arithmetic: the sum
of all costs over the largest. Rows can be cut anywhere, as long as each is a picture of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tilemesh.comm import Communicator, connect, run_threads
from tilemesh.data.digits import load_digits

Array = NDArray[np.float64]
PICTURES: Array = load_digits().images.astype(np.float64)


def brightness(images: Array) -> Array:
    """Sums of lines and columns."""
    return np.concatenate([images.sum(1), images.sum(2)], axis=1)


def edges(images: Array) -> Array:
    """Histogram of the directions of gradients in the four quarters, weighed by their size."""
    down, right = np.gradient(images, axis=(1, 2))
    size, direction = np.hypot(down, right), ((np.arctan2(down, right) + np.pi) / (2 * np.pi) * 8).astype(int) % 8
    features = np.zeros((len(images), 2, 2, 8))
    for line in range(8):
        for column in range(8):
            place = features[np.arange(len(images)), line // 4, column // 4]
            place[np.arange(len(images)), direction[:, line, column]] += size[:, line, column]
            features[:, line // 4, column // 4] = place
    return features.reshape(len(images), -1)


def waves(images: Array) -> Array:
    """How much of each frequency."""
    return np.abs(np.fft.rfft2(images)).reshape(len(images), -1)


def nearest(images: Array) -> Array:
    """Distances to twenty pictures, moved to both sides by up to one pixel: the dearest."""
    moved = [np.roll(PICTURES[:20], right, axis=2) for right in (-1, 0, 1)]
    return np.min([((images[:, None] - one) ** 2).sum((2, 3)) for one in moved], axis=0)


EXTRACTORS: tuple[Callable[[Array], Array], ...] = (brightness, edges, waves, nearest)
WIDTHS = (16, 32, 40, 20)


def costs(images: Array) -> list[float]:
    """Seconds of each extractor on these pictures, the better of two."""
    seconds = []
    for extract in EXTRACTORS:
        readings = []
        for _ in range(2):
            began = time.perf_counter()
            extract(images)
            readings.append(time.perf_counter() - began)
        seconds.append(min(readings))
    return seconds


def assigned(seconds: list[float], ranks: int) -> list[list[int]]:
    """Which extractors each rank runs: the dearest first, each to the rank that has least to do."""
    tasks: list[list[int]] = [[] for _ in range(ranks)]
    for task in sorted(range(len(seconds)), key=lambda task: -seconds[task]):
        min(tasks, key=lambda own: sum(seconds[other] for other in own)).append(task)
    return tasks


def by_tasks(comm: Communicator, images: Array, tasks: list[list[int]]) -> Array:
    """All features of all pictures: this rank's columns, the others' by a sum with zeros."""
    features, ends = np.zeros((len(images), sum(WIDTHS))), np.cumsum(WIDTHS)
    for task in tasks[comm.rank]:
        features[:, ends[task] - WIDTHS[task] : ends[task]] = EXTRACTORS[task](images)
    result: Array = comm.all_reduce(features)
    return result


def by_rows(comm: Communicator, images: Array) -> Array:
    """The same: this rank's pictures, the others' rows by a sum with zeros."""
    features = np.zeros((len(images), sum(WIDTHS)))
    rows = np.array_split(np.arange(len(images)), comm.size)[comm.rank]
    features[rows] = np.concatenate([extract(images[rows]) for extract in EXTRACTORS], axis=1)
    result: Array = comm.all_reduce(features)
    return result


def main(comm: Communicator) -> dict[str, float]:
    """Predicted and measured seconds of both ways, and how far their features are apart."""
    images = PICTURES
    comm.barrier()
    # Every rank must deal out the tasks alike: by the costs that rank 0 measured.
    seconds = [float(value) for value in comm.broadcast(np.array(costs(images)))]
    tasks = assigned(seconds, comm.size)
    found: dict[str, float] = {
        "alone": sum(seconds),
        "tasks, predicted": max(sum(seconds[task] for task in own) for own in tasks),
        "rows, predicted": sum(seconds) / comm.size,
    }
    features = {}
    for name, run in (("tasks", lambda: by_tasks(comm, images, tasks)), ("rows", lambda: by_rows(comm, images))):
        comm.barrier()
        began = time.perf_counter()
        features[name] = run()
        comm.barrier()
        found[f"{name}, measured"] = time.perf_counter() - began
    whole = np.concatenate([extract(images) for extract in EXTRACTORS], axis=1)
    found["apart"] = max(float(np.abs(made - whole).max()) for made in features.values())
    if comm.rank == 0:
        names = [[EXTRACTORS[task].__name__ for task in own] for own in tasks]
        print(f"{comm.size} ranks; tasks {names}; at most {sum(seconds) / max(seconds):.2f} times as fast by tasks")
        for name, value in found.items():
            print(f"{name:<18} {value:.0e}" if name == "apart" else f"{name:<18} {value * 1e3:6.1f} ms")
    return found


if __name__ == "__main__":
    world = connect()
    if world.size > 1:
        main(world)
    else:
        run_threads(2, main)
