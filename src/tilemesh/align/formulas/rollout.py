"""What a model wrote and what it was paid: packed arrays, made from token ids alone.

The one idea: sequences lie one after the other, nothing is padded, and text is never decoded and encoded again. Which
tokens are trained on is a mask of its own: an end token that the model drew is, a turn of the conversation's history is
not, whatever their ids.

N: all tokens of all sequences; S: sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import UsageError

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
Mask = NDArray[np.bool_]

LENGTH = "length"
"""Why a sequence ended that had no room for more."""


class Segment(NamedTuple):
    """A stretch of a sequence: given to the model, or drawn by it."""

    tokens: Sequence[int]
    logprobs: Sequence[float] | Floats | None = None
    """Of each token as it was sampled, after temperature and filters; None: the model was given it."""
    versions: Sequence[int] = ()
    """Of the weights that drew each token."""


@dataclass(frozen=True)
class Rollout:
    """Answers with their rewards."""

    tokens: Whole
    """(N)."""
    starts: Whole
    """(S + 1): where each sequence begins, and the end of the last."""
    trainable: Mask
    """(N): drawn by the model."""
    logprobs: Floats
    """(N): as sampled; 0 where not trainable."""
    versions: Whole
    """(N): of the weights that drew a token; -1 where not trainable."""
    temperature: Floats
    """(S)."""
    reward: Floats
    """(S)."""
    group: Whole
    """(S): answers to the same prompt have the same number."""
    finish: tuple[str, ...]
    """(S): why each ended."""

    def __post_init__(self) -> None:
        count, total = len(self.starts) - 1, len(self.tokens)
        for name in ("trainable", "logprobs", "versions"):
            if len(getattr(self, name)) != total:
                raise UsageError(f"{name} has {len(getattr(self, name))} values: expected one per token, {total}")
        for name in ("temperature", "reward", "group", "finish"):
            if len(getattr(self, name)) != count:
                raise UsageError(f"{name} has {len(getattr(self, name))} values: expected one per sequence, {count}")
        if count < 0 or self.starts[0] != 0 or self.starts[-1] != total or (np.diff(self.starts) < 1).any():
            raise UsageError("starts: expected 0, where each further sequence begins, and how many tokens there are")
        if not np.isfinite(self.logprobs).all() or (self.logprobs > 0).any():
            raise UsageError("logprobs: expected log-probabilities, which are finite and not above 0")

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def sequence(self) -> Whole:
        """(N): the sequence that each token is of."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    @property
    def trained(self) -> Whole:
        """(S): how many tokens of each sequence are trained on."""
        return np.add.reduceat(self.trainable.astype(np.int64), self.starts[:-1])

    @property
    def first_version(self) -> Whole:
        """(S): of the weights that drew the first token; -1 where none was drawn."""
        drawn = np.where(self.trainable, self.versions, np.iinfo(np.int64).max)
        least = np.minimum.reduceat(drawn, self.starts[:-1])
        return np.where(self.trained > 0, least, -1)

    def row(self, number: int) -> slice:
        """Where the tokens of a sequence lie."""
        return slice(int(self.starts[number]), int(self.starts[number + 1]))

    def with_reward(self, reward: Floats) -> Rollout:
        return replace(self, reward=np.asarray(reward, np.float64))


def pack(
    sequences: Sequence[Sequence[Segment]],
    group: Sequence[int],
    finish: Sequence[str],
    temperature: float | Sequence[float] = 1.0,
    reward: Sequence[float] | None = None,
) -> Rollout:
    """Sequences of segments, one after the other: a prompt and an answer, or the turns of a conversation."""
    every = [segment for segments in sequences for segment in segments]
    for tokens, logprobs, versions in every:
        if logprobs is not None and not len(tokens) == len(logprobs) == len(versions):
            raise UsageError(
                f"a segment of {len(tokens)} tokens with {len(logprobs)} log-probabilities and {len(versions)} "
                "versions: expected one of each per token that was drawn"
            )
    counts = [len(segment.tokens) for segment in every]
    starts = np.cumsum([0, *(sum(len(segment.tokens) for segment in segments) for segments in sequences)])
    drawn = np.repeat(np.array([segment.logprobs is not None for segment in every], np.bool_), counts)
    logprobs_N, versions_N = np.zeros(len(drawn)), np.full(len(drawn), -1, np.int64)
    logprobs_N[drawn] = _joined([segment.logprobs for segment in every if segment.logprobs is not None], np.float64)
    versions_N[drawn] = _joined([segment.versions for segment in every if segment.logprobs is not None], np.int64)
    return Rollout(
        _joined([segment.tokens for segment in every], np.int64), starts.astype(np.int64), drawn, logprobs_N,
        versions_N, np.broadcast_to(np.asarray(temperature, np.float64), (len(sequences),)).copy(),
        np.zeros(len(sequences)) if reward is None else np.array(reward, np.float64), np.array(group, np.int64),
        tuple(finish),
    )  # fmt: skip


def _joined(parts: Sequence[Any], dtype: type) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def join(parts: Sequence[Rollout]) -> Rollout:
    """Several after one another; groups keep their numbers."""
    joined: dict[str, Any] = {}
    for field in fields(Rollout):
        values = [getattr(part, field.name) for part in parts]
        joined[field.name] = np.concatenate(values) if field.name not in ("starts", "finish") else values
    lengths = np.concatenate([np.diff(starts) for starts in joined["starts"]])
    joined["starts"] = np.cumsum(np.concatenate([[0], lengths])).astype(np.int64)
    joined["finish"] = tuple(reason for reasons in joined["finish"] for reason in reasons)
    return Rollout(**joined)
