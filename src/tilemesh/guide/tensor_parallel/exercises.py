"""Exercises of chapter 6, with the wrong answers that have a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilemesh.comm import Communicator, run_threads
from tilemesh.guide.apart import PATIENCE_S
from tilemesh.guide.exercise import choice, code, numeric

TOKENS, WIDTH, TP = 8192, 4096, 8
ARRAY = TOKENS * WIDTH * 2.0

TRAFFIC = numeric(
    "tp_traffic",
    "A Transformer layer has two column-then-row pairs (attention and MLP). 8,192 tokens, width 4,096, 2 bytes per "
    "number, tp = 8, ring all-reduces. How many bytes does each rank send in the forward pass of one layer? (You may "
    "write MB.)",
    4 * 7 / 8 * ARRAY,
    unit="B",
    wrong={
        2 * 7 / 8 * ARRAY: "That is one all-reduce. A layer has two pairs, each of which ends with one.",
        ARRAY: "67 MB is the size of the activations. A ring all-reduce sends 2·(n-1)/n of it, and there are two.",
        4 * ARRAY: "That is 2 · 2 arrays: almost. A ring sends (n-1)/n of the array in each half, 7/8 here.",
        8 * 7 / 8 * ARRAY: "That is forward and backward together: two sums each. The question is about forward.",
    },
    otherwise="Activations are tokens · width · 2 bytes. A ring all-reduce sends 2·7/8 of that. How many are there?",
    explanation="235 MB per layer, 80 layers: 19 GB per pass. Over NVLink (450 GB/s) that is 42 ms, over InfiniBand "
    "(50 GB/s) 376 ms. This is why tensor parallelism stays inside a node.",
)

ROW = choice(
    "after_rows",
    "B is cut by rows and h by columns over two ranks. What does rank 0 hold after h_part · B_part?",
    {
        "A part of the sum for all of z: the parts of both ranks must be added.": None,
        "The left half of the columns of z.": "That would be so if B were cut by *columns*. With rows of B every rank "
        "gets an array of z's full shape.",
        "The upper half of the rows of z.": "Rows of z are tokens, and both ranks have all tokens here.",
        "All of z, finished.": "z sums over the hidden dimension, and rank 0 has only half of it: half of the sum is "
        "missing.",
    },
    explanation="A cut dimension that is summed over leaves partial sums: type 2 of chapter 5, and an all_reduce.",
)

COLUMN = choice(
    "why_columns_first",
    "Why is the *first* matrix cut by columns, and not by rows?",
    {
        "So that relu can be applied to each part before anything is sent.": None,
        "Because columns are contiguous in memory.": "In row-major arrays rows are contiguous. The reason is not "
        "layout but what relu needs.",
        "Because it halves the size of x on every rank.": "x is whole on every rank in both cases of Megatron's way; "
        "its columns would be cut if A were cut by rows.",
        "Because the gradient of A would otherwise need an all_reduce.": "The gradient of a part of A stays on its "
        "rank either way. What costs is an extra sum in the middle.",
    },
    explanation="With rows each rank would have a partial sum of x·A, and relu(a + b) is not relu(a) + relu(b): an "
    "all_reduce would be needed before relu, and another one at the end.",
)


def row_linear(comm: Communicator, h_part: Any, b_part: Any, bias: Any) -> Any:
    """The solution: sum, then the bias once."""
    return comm.all_reduce(h_part @ b_part) + bias


def why_not_row(function: Callable[[Communicator, Any, Any, Any], Any]) -> str | None:
    """What is wrong with a row-cut product, found on two ranks."""
    random = np.random.default_rng(1)
    h, b, bias = random.normal(size=(3, 4)), random.normal(size=(4, 2)), random.normal(size=2)
    cuts = (slice(0, 2), slice(2, 4))

    def body(comm: Communicator) -> Any:
        part = cuts[comm.rank]
        return np.array(function(comm, h[:, part].copy(), b[part].copy(), bias.copy()))

    results = run_threads(2, body, timeout_s=PATIENCE_S)
    z = h @ b
    if all(result.shape == z.shape and np.allclose(result, z + bias) for result in results):
        return None
    first = results[0]
    if first.shape != z.shape and first.size != z.size * len(cuts):
        return f"Rank 0 returned {first.tolist()!r:.60}: expected an array of the shape {z.shape}."
    if first.shape != z.shape:
        return f"The shape is {first.shape}, expected {z.shape}: partial sums are added, not put beside each other."
    wrongs = {
        "The bias was added on every rank before the sum, so it counts twice. Add it once, after the sum.": z
        + 2 * bias,
        "This is rank 0's part of the sum: nothing was added up across ranks.": h[:, cuts[0]] @ b[cuts[0]] + bias,
        "This is half of the sum: partial products are added, not averaged.": z / 2 + bias,
        "The sum is right, but the bias is missing.": z,
    }
    for why, value in wrongs.items():
        if np.allclose(first, value):
            return why
    return f"Rank 0 got {first.round(3).tolist()}, expected {(z + bias).round(3).tolist()}."


LINEAR = code(
    "row_linear",
    "Write the second product of a pair. Every rank has some columns of h and the matching rows of B; all have the "
    "same bias. Return h·B + bias, whole, on every rank.",
    '''def row_linear(comm, h_part, b_part, bias):
    """h·B + bias from this rank's columns of h and rows of B."""
    ...''',
    returns="h·B + bias, an array",
    solution=row_linear,
    correct=why_not_row,
    explanation="fc_o of attention and the last projection of an MLP are cut like this, and each adds its bias once.",
)

EXERCISES = (ROW, COLUMN, TRAFFIC, LINEAR)
