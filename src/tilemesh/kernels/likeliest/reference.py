"""The likeliest token of each row of logits in plain torch, and whether the row can be believed.

N: rows; V: vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.launch.operator import operator


def check(logits: Tensor) -> None:
    if logits.dim() != 2 or not logits.shape[1]:
        raise UsageError(f"logits have shape {tuple(logits.shape)}: expected (N, V) with V at least 1")


def served(logits: Tensor) -> bool:
    return logits.dtype is not torch.float64 or logits.device.type == "cpu"


@operator(kernel="tilemesh.kernels.likeliest.kernel", check=check, served=served)
def likeliest(logits: Tensor) -> Tensor:
    """The place of the largest of each row's logits (N, V), the first of equals: (N,) int64. -1: some are NaN or
    infinite."""
    # NaN is the largest and the least of all that it is among.
    least_N, most_N = logits.aminmax(dim=-1)
    return torch.where(least_N.isfinite() & most_N.isfinite(), logits.argmax(-1), -1)
