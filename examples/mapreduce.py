"""MapReduce: the words of this folder counted, also as a stream, and points put into clusters, by all ranks together.

tilemesh launch --ranks 4 -- examples/mapreduce.py
python examples/mapreduce.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tilemesh.comm import Communicator, connect, mapreduce, run_threads
from tilemesh.comm.map_reduce import gathered, mapreduce_stream
from tilemesh.methods.programs import k_means


def lines_of(comm: Communicator) -> list[str]:
    """This rank's part of the text: every rank takes other lines."""
    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
    return text.splitlines()[comm.rank :: comm.size]


def words(line: str) -> list[tuple[str, int]]:
    return [(word, 1) for word in line.split()]


def lengths(line: str) -> list[tuple[str, tuple[int, int]]]:
    """By its first letter: how long a word is, and 1."""
    return [(word[0], (len(word), 1)) for word in line.split()]


def longest(rows: np.ndarray) -> np.ndarray:
    """Another combination than a sum: the largest of the first column, the sum of the second."""
    return np.array([rows[:, 0].max(), rows[:, 1].sum()])


def main(comm: Communicator) -> dict[str, int]:
    mine = lines_of(comm)
    counts = mapreduce(comm, mine, words)  # each rank has other keys: those that a hash gives it
    by_letter = mapreduce(comm, mine, lengths, longest)
    batches = [mine[begin : begin + 50] for begin in range(0, 200, 50)]  # as many on every rank
    *_, streamed = mapreduce_stream(comm, batches, words)
    assert streamed == mapreduce(comm, [line for batch in batches for line in batch], words)
    whole = gathered(comm, counts)  # small enough for everybody to have all of it
    around = np.repeat([[5.0, 0.0], [0.0, 5.0]], 500, axis=0)
    points = around + np.random.default_rng(comm.rank).normal(size=around.shape)
    clusters = k_means(comm, points, np.array([[1.0, 0.0], [0.0, 1.0]]), iterations=10)
    if comm.rank == 0:
        most = sorted(whole, key=lambda word: -whole[word])[:5]
        print(f"{comm.size} ranks: {len(whole)} words, {len(counts)} of them on rank 0; most often {' '.join(most)}")
        print(f"rank 0 has {len(by_letter)} first letters; the stream came to {len(streamed)} words there")
        print(f"centres {np.round(clusters.centres, 1).tolist()} after {clusters.iterations} iterations")
    return whole


if __name__ == "__main__":
    ranks = connect()
    if ranks.size > 1:
        main(ranks)
    else:
        run_threads(3, main)
