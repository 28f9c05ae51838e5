"""Exercises of chapter 5, with the wrong answers that have a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilemesh.comm import Communicator, run_threads
from tilemesh.guide.apart import PATIENCE_S
from tilemesh.guide.exercise import choice, code, numeric

BATCH = numeric(
    "global_batch",
    "Every rank computes microbatches of 4 sequences and accumulates 8 of them before it updates. There are 16 "
    "data-parallel ranks. How many sequences does one update see?",
    512,
    wrong={
        32: "32 = 4 · 8 is what one rank sees. The gradients of all 16 ranks are added up before the update.",
        64: "64 = 4 · 16 leaves the accumulation out: each rank adds up the gradients of 8 microbatches first.",
        28: "28 = 4 + 8 + 16. Every rank does 8 microbatches of 4: these multiply.",
        128: "128 = 8 · 16 is the number of microbatches in all ranks. Each holds 4 sequences.",
    },
    otherwise="Sequences per microbatch, times microbatches per rank, times ranks.",
    explanation="global batch = microbatch · accumulation · dp. Turned round: a rank's number of microbatches is its "
    "batch divided by the microbatch size.",
)

MEMORY = numeric(
    "zero_memory",
    "A model of 7.5 billion parameters is trained with mixed-precision Adam and ZeRO stage 2 on 64 GPUs. How many GB "
    "(10^9 bytes) of weights, gradients and optimizer states does a GPU keep?",
    (2 + 14 / 64) * 7.5,
    counted_in="GB",
    wrong={
        120.0: "120 GB is stage 0: 16 bytes for each parameter, nothing cut.",
        (4 + 12 / 64)
        * 7.5: "31.4 GB is stage 1: only the 12 bytes of the optimizer are cut. Stage 2 cuts the gradients too.",
        16 / 64 * 7.5: "1.9 GB is stage 3, where the weights are cut as well.",
        15.0: "15 GB are the 2-byte weights alone. A 64th of gradients and optimizer states comes on top.",
    },
    otherwise="Bytes per parameter: 2 for weights, 2 for gradients, 12 for the optimizer. Which of them does stage 2 "
    "divide by 64?",
    explanation="2 + 14/64 bytes per parameter. The weights are what is left, and stage 3 cuts those too.",
)

TYPES = choice(
    "types",
    "The samples of a batch are dealt out over ranks. Which products of the MLP's backward pass need communication?",
    {
        "The two that make weight gradients: hᵀ·dz and xᵀ·da.": None,
        "All three.": "dh = dz·W2ᵀ needs none: row b of dh follows from row b of dz alone, and the rank that has the "
        "sample has both.",
        "Only dh = dz·W2ᵀ.": "It is the other way round: there every row needs only its own sample. A weight gradient "
        "sums over samples, and those are on different ranks.",
        "None: gradients are computed where the samples are.": "Each rank gets the sum over *its* samples. The "
        "gradient of the loss is the sum over all of them, so these sums must be added up across ranks.",
    },
    explanation="A product that sums over a dimension that is cut (type 2) needs an all-reduce; one that keeps it "
    "(type 1) does not. Chapter 6 cuts other dimensions, and the same rule tells what must be sent.",
)


def mean_gradient(comm: Communicator, gradient_sum: Any, samples: int) -> Any:
    """The solution: add up gradients and counts, then divide once."""
    total = comm.all_reduce(gradient_sum)
    count = comm.all_reduce(np.array([samples]))[0]
    return total / count


COUNTS, OTHER_COUNTS = (5, 3, 3), (4, 3, 1)
"""Samples of each rank; the last step of an epoch has fewer."""
SUMS = tuple(np.array([10.0, -6.0]) * (rank + 1) for rank in range(len(COUNTS)))


def why_not_mean(function: Callable[[Communicator, Any, int], Any]) -> str | None:
    """What is wrong with a mean over uneven shards."""
    results, others = _results(function, COUNTS), _results(function, OTHER_COUNTS)
    total = np.sum(SUMS, axis=0)
    expected, of_others = total / sum(COUNTS), total / sum(OTHER_COUNTS)
    if _are_all(results, expected):
        return None if _are_all(others, of_others) else (
            f"With 5, 3 and 3 samples it is right, with 4, 3 and 1 rank 0 got {others[0].tolist()} instead of "
            f"{of_others.tolist()}: add up the numbers of samples of all ranks instead of writing their sum down."
        )  # fmt: skip
    means = [total / count for total, count in zip(SUMS, COUNTS, strict=True)]
    wrongs = {
        "This is the mean of the ranks' means. With 5, 3 and 3 samples a sample of rank 0 would count less than one of "
        "rank 1: add up sums and counts, and divide once.": np.mean(means, axis=0),
        "This divides by the number of ranks. The loss is a mean over samples: divide by their number over all "
        "ranks.": total / len(COUNTS),
        "This is the sum over all samples, not yet divided by their number.": total,
        "This is rank 0's own mean: nothing was added up across ranks.": means[0],
        "The sum is right, but it was divided by this rank's own number of samples, so every rank gets another "
        "result.": total / COUNTS[0],
    }
    for why, value in wrongs.items():
        if _are_all(results[:1], value):
            return why
    return (
        f"Rank 0 got {results[0].tolist()}, expected {expected.tolist()}: the sum over all samples, divided by their "
        "number."
    )


def _results(function: Callable[[Communicator, Any, int], Any], counts: Sequence[int]) -> list[Any]:
    def of_rank(comm: Communicator) -> Any:
        return np.array(function(comm, SUMS[comm.rank].copy(), counts[comm.rank]))

    return run_threads(len(counts), of_rank, timeout_s=PATIENCE_S)


def _are_all(results: Sequence[Any], value: Any) -> bool:
    return all(result.shape == value.shape and np.allclose(result, value) for result in results)


MEAN = code(
    "mean_gradient",
    "Three ranks have 5, 3 and 3 samples. Each has the *sum* of the gradients of its samples. Write a function that "
    "returns the mean over all samples, on every rank.",
    '''import numpy as np

def mean_gradient(comm, gradient_sum, samples):
    """gradient_sum: an array; samples: how many samples it sums over."""
    ...''',
    returns="the mean gradient, an array",
    solution=mean_gradient,
    correct=why_not_mean,
    explanation="In language models `samples` are tokens that count in the loss, and their number differs from rank to "
    "rank and microbatch to microbatch: this mistake is made in real systems.",
)

EXERCISES = (TYPES, BATCH, MEMORY, MEAN)
