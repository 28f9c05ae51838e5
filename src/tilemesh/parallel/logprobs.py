"""Log-probabilities of targets where ranks cut the vocabulary: parts are not joined, a token costs its maximum, its
sums and its target's logit; unless the bits are to be those of an engine, which has whole rows.

N: tokens; V: vocabulary, or this rank's part of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.core.shard import share
from tilemesh.parallel.tensor import Seams


def logprobs(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature: float,
    seams: Seams,
    vocabulary: int,
    entropy_has_gradient: bool = False,
    joins: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target as it is drawn at this temperature, and the entropy there; at least float32.
    `joins`: compute them of whole rows, bit for bit as an engine does."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    logits_NV = logits_NV.to(wide) if temperature == 1 else logits_NV.to(wide) / temperature
    if joins and seams.comm.size > 1:
        logits_NV = seams.join_features(logits_NV, vocabulary)
    if joins or seams.comm.size == 1:
        all_NV = logits_NV.log_softmax(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_has_gradient):
            entropy_N = -(all_NV.exp() * all_NV).sum(-1)
        return all_NV.gather(-1, targets_N[:, None])[:, 0], entropy_N
    first, count = share(vocabulary, seams.comm.size, seams.comm.rank)
    here_N = (targets_N >= first) & (targets_N < first + count)
    index_N = (targets_N - first).masked_fill(~here_N, 0)
    shifted_NV = logits_NV - seams.largest(logits_NV.amax(-1))[:, None]
    own_N = shifted_NV.gather(-1, index_N[:, None])[:, 0].masked_fill(~here_N, 0)
    each_NV = shifted_NV.exp()
    sum_N = seams.add(each_NV.sum(-1))
    logprob_N = seams.add(own_N) - sum_N.log()
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_has_gradient):
        mean_N = seams.add((each_NV * shifted_NV).sum(-1)) / sum_N
        return logprob_N, sum_N.log() - mean_N
