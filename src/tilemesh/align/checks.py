"""What must be true of every batch of answers, and what is wrong where it is not: found before the next step.

Each check names the fault. They cost a few operations over arrays, so they are always on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tilemesh.align.config import AlignConfig
from tilemesh.align.formulas.advantages import last_tokens
from tilemesh.align.formulas.rollout import Floats, Rollout, Whole
from tilemesh.core.errors import RunError
from tilemesh.kernels.matmul.arguments import allows_tf32


def check_position(steps: int, position: int, rows: int) -> None:
    """A run that goes on has taken as many prompts as its steps needed."""
    if position != steps * rows:
        raise RunError(
            f"the checkpoint of step {steps} says that {position} answers were trained on, and its steps took "
            f"{steps * rows}: prompts would be skipped or repeated; go on with the batch that the run had"
        )


def check_rollout(rollout: Rollout, versions: range, answers: int) -> None:
    """Of a batch that was to be drawn by weights of these versions."""
    _, size = np.unique(rollout.group, return_counts=True)
    if (size != answers).any():
        raise RunError(f"a group has {int(size[size != answers][0])} of its {answers} answers: groups were split")
    drawn = rollout.versions[rollout.trainable]
    if (drawn < 0).any():
        raise RunError("tokens are trained that the model did not draw: a prompt, or a turn of the history")
    outside = drawn[(drawn < versions.start) | (drawn >= versions.stop)]
    if outside.size:
        expected = f"{versions.start}" if len(versions) == 1 else f"{versions.start} to {versions.stop - 1}"
        raise RunError(
            f"answers were drawn by weights of version {outside[0]}, and {expected} train: the engine is behind"
        )
    if (rollout.trained == 0).any():
        raise RunError("an answer has no trained token: its end was masked with padding")
    last = rollout.starts[1:] - 1
    if not rollout.trainable[last].all():
        raise RunError("the last token of an answer is not trained: its end was masked with padding")
    trained = np.flatnonzero(rollout.trainable)
    first = trained[np.searchsorted(trained, rollout.starts[:-1])]
    stretches = zip(rollout.group.tolist(), rollout.starts, first, strict=False)
    if len({(group, rollout.tokens[begin:end].tobytes()) for group, begin, end in stretches}) > len(size):
        raise RunError("a group has answers to different prompts: answers were exchanged between groups")


def check_order(places: Sequence[int], name: str) -> None:
    """Which answer each score says that it is of."""
    if list(places) != list(range(len(places))):
        raise RunError(f"scores by {name} are in another order than the answers: the order of completion counts")


def check_rewards(
    reward_S: Floats, parts: Mapping[str, Floats], weights: Mapping[str, float], failures: Sequence[str] = ()
) -> None:
    """Each answer is paid for its own parts, and one that could not be scored not at all. `failures`: why, of each
    such answer, after who could not."""
    for name in weights:
        failed, missing = sum(each.startswith(f"{name}: ") for each in failures), int(np.isnan(parts[name]).sum())
        if failed > missing:
            raise RunError(f"{failed} answers could not be scored by {name} and {missing} of these have no score")
    counted = (weight * parts[name] for name, weight in weights.items() if weight)  # the others may be missing
    worth_S = sum(counted, np.zeros(len(reward_S)))
    scored = np.isfinite(worth_S)
    least = min(0.0, float(worth_S[scored].min(initial=0.0)))
    for place in np.flatnonzero(~scored & (reward_S > least)):
        raise RunError(f"answer {place} could not be scored and was paid {reward_S[place]:g}: it must not be")
    for place in np.flatnonzero(scored & ~np.isclose(reward_S, worth_S)):
        is_shifted = any(np.allclose(np.roll(worth_S, by), reward_S, equal_nan=True) for by in (1, -1))
        why = "rewards are shifted by one" if is_shifted else "it was paid for another answer"
        raise RunError(f"answer {place} was paid {reward_S[place]:g} and is worth {worth_S[place]:g}: {why}")


def check_token_rewards(paid_N: Floats, penalty_N: Floats, reward_S: Floats, sequence_N: Whole) -> None:
    """The reward is paid at the last token of an answer, and elsewhere nothing but the penalty."""
    expected_N, last = np.negative(penalty_N), last_tokens(sequence_N)
    expected_N[last] += reward_S[sequence_N[last]]  # not taken away from what is paid: a penalty may be far larger
    if not np.allclose(paid_N, expected_N, equal_nan=True):
        raise RunError("a reward is not paid at the last token of its answer: rewards are shifted by one token")


def check_weighting(weight_N: Floats, rollout: Rollout, rows: slice, weighting: str) -> None:
    """What the trained tokens of a step's rows count for, by the definition: answers to a prompt do, or do not."""
    total_S = np.bincount(rollout.sequence[rollout.trainable], weight_N, minlength=len(rollout))
    counts_S, group_S = total_S[rows] > 0, rollout.group[rows]
    if np.intersect1d(group_S[counts_S], group_S[~counts_S]).size:
        raise RunError("some answers to a prompt count and others do not: a filter leaves whole groups out")
    if counts_S.any() and weighting in ("token", "sequence") and not np.isclose(total_S.sum(), 1):
        raise RunError(f"the weights of a batch's tokens add up to {total_S.sum():g}, expected 1")


def check_weights(found: Floats, expected: Floats, microbatches: int, planned: int) -> None:
    """What the tokens of a step count for, over all its microbatches and replicas, as the sum and that of squares, and
    how many microbatches there are."""
    if microbatches != planned:
        raise RunError(
            f"replicas have {microbatches} microbatches together, and the plan {planned}: their batches are unequal, "
            "and one would wait for another for ever; leave tokens out by a weight of 0, not by fewer rows"
        )
    if not np.allclose(found, expected, rtol=1e-6):
        raise RunError(
            f"the weights of the step's tokens add up to {found[0]:g} and their squares to {found[1]:g}, expected "
            f"{expected[0]:g} and {expected[1]:g}: they were made per microbatch or per rank, and not over the global "
            "batch"
        )


def check_loss(loss: float, expected: float, factors: Sequence[float]) -> None:
    """What the step's gradients are of, and what its microbatches added up to: which may be 0 whatever divides it, so
    the factors by which they reach the gradients, weights apart, are looked at too."""
    words = "it was divided once more, or once less, by how many there are"
    if abs(loss - expected) > 1e-3 * max(1e-2, abs(expected)):
        raise RunError(f"the step's loss is {loss:g} and its microbatches add up to {expected:g}: {words}")
    if wrong := [factor for factor in factors if factor != 1]:
        raise RunError(f"a microbatch's loss counts {wrong[0]:g} times in the gradients, expected once: {words}")


def check_mismatch(mean: float, spread: float, like: Tensor, config: AlignConfig) -> None:
    """The engine's and the training program's log-probabilities of the same tokens by the same weights: the mean of
    their differences, and the root of their mean square, which a few other tokens raise.

    Clean runs on CPUs and an H200, of 41 thousand to 1.1 billion parameters, 2 to 48 layers, random and trained, with
    experts too: in bf16 at most 1.7 and 3.2 eps (random models of three times the usual weights 5 and 6, of ten times 9
    and 13), in fp16 0.7 and 0.8, in fp32 10 and 13 (34 and 44). Planted in bf16: log-probabilities before a temperature
    of 0.9 give 6 to 23 and 10 to 30 eps, of 0.7 2 to 54 and 12 to 71, and least where a policy is all but certain of
    its tokens: there 0.9 gives 1.5 and 7. One token in 40 encoded otherwise: 6 and 28; a token of the prompt trained:
    60 and 170."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
    eps = max(torch.finfo(dtypes.get(name, like.dtype)).eps for name in (config.align.dtype, config.plan.precision))
    exact = torch.finfo(torch.float32).eps
    if like.is_cuda and allows_tf32():
        eps = max(eps, 2**-10)
    most = 128 * exact if eps <= exact else 6 * eps
    if config.align.invariant and config.align.temperature == 1:
        most = exact
    if mean > most or spread > 2 * most:
        raise RunError(
            f"log-probabilities of the engine and of training differ by {mean:.3g} nats on average (root mean square "
            f"{spread:.3g}), and rounding explains {most:.2g} ({2 * most:.2g}): they are of other weights (stale "
            "pages, none after a sleep), at another temperature, or of other tokens"
        )
