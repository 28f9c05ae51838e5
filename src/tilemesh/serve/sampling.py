"""Logits to tokens: bias, penalties, temperature, min-p, top-k, top-p, and a draw with a random number per token.

The one idea: a row of logits is drawn from by itself. Whatever its request asked for is applied to that row, and its
random number follows from (seed, answer, place in the answer), so neither the batch nor a preemption nor a guess that
was checked along the way can change a token.

Filters are thresholds on shares, not positions in a sorted list: equal tokens are kept or dropped together.

N: rows; V: vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilemesh.core.errors import RunError
from tilemesh.model.sampling import keep_likeliest, keyed_uniform, pick, shares
from tilemesh.serve.request import Sampling


@dataclass(frozen=True)
class TokenDraw:
    """What the token after one row of logits is drawn with."""

    sampling: Sampling
    seed: int
    answer: int
    number: int
    """The token's place in the answer, from 0."""
    tokens: Sequence[int]
    """Prompt and output before it."""
    prompt: int
    """How many of them are the prompt."""
    allowed_V: Tensor | None = None
    """The tokens that a constraint lets through."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities in the model's own distribution: before bias, penalties, temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest, first first."""


def draw_tokens(logits_NV: Tensor, drawings: Sequence[TokenDraw]) -> list[int]:
    """One token for each row."""
    if not bool(torch.isfinite(logits_NV).all()):
        raise RunError("the model's logits are NaN or infinite, so there is no token to draw: are its weights sound?")
    rows_NV = logits_NV
    changed = [index for index, drawing in enumerate(drawings) if _changes_logits(drawing)]
    if changed:
        rows_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32), copy=True)
        for index in changed:
            _change_logits(rows_NV[index], drawings[index])
    drawn = [index for index, drawing in enumerate(drawings) if drawing.sampling.temperature > 0]
    tokens_N = rows_NV.argmax(-1)
    if drawn:
        some = slice(None) if len(drawn) == len(drawings) else torch.tensor(drawn, device=rows_NV.device)
        tokens_N[some] = _draw(rows_NV[some], [drawings[index] for index in drawn])
    return [int(token) for token in tokens_N.tolist()]


def logprobs_of(logits_NV: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """For each row, of its token and of so many likeliest."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    logprobs_NV = torch.log_softmax(logits_NV.to(wide), dim=-1)
    own = logprobs_NV.gather(1, torch.tensor(tokens, device=logits_NV.device)[:, None])[:, 0].tolist()
    values, ids = (found.tolist() for found in logprobs_NV.topk(min(top, logprobs_NV.shape[1])))
    return [
        TokenLogprobs(token, logprob, tuple(zip(row_ids, row_values, strict=True)))
        for token, logprob, row_ids, row_values in zip(tokens, own, ids, values, strict=True)
    ]


def _changes_logits(drawing: TokenDraw) -> bool:
    sampling = drawing.sampling
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return bool(sampling.logit_bias) or penalties != (1, 0, 0) or drawing.allowed_V is not None


def _change_logits(row_V: Tensor, drawing: TokenDraw) -> None:
    """Bias and penalties, from the tokens alone: nothing is kept between steps that a preemption could lose."""
    sampling = drawing.sampling
    if drawing.allowed_V is not None:
        row_V.masked_fill_(~drawing.allowed_V.to(row_V.device), -torch.inf)
    if sampling.logit_bias:
        ids, values = _columns(sampling.logit_bias, row_V)
        row_V[ids] += values
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(drawing.tokens)), dtype=torch.int64, device=row_V.device)
        found = row_V[seen]
        row_V[seen] = torch.where(found > 0, found / sampling.repetition_penalty, found * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(drawing.tokens[drawing.prompt :])
        if counts:
            ids, times = _columns(counts, row_V)
            row_V[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times


def _columns(by_token: Mapping[int, float], row_V: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.tensor(list(by_token), dtype=torch.int64, device=row_V.device)
    return ids, torch.tensor(list(by_token.values()), dtype=row_V.dtype, device=row_V.device)


def _draw(rows_NV: Tensor, drawings: Sequence[TokenDraw]) -> Tensor:
    samplings = [drawing.sampling for drawing in drawings]
    temperature_N = torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float64)
    uniform_N = torch.tensor(
        [keyed_uniform(drawing.seed, drawing.answer, drawing.number) for drawing in drawings], dtype=torch.float64
    )
    shares_NV = shares(rows_NV, temperature_N.to(rows_NV.device))
    filtered = [index for index, sampling in enumerate(samplings) if _filters(sampling, rows_NV.shape[1])]
    for index in filtered:
        sampling = samplings[index]
        keep_likeliest(shares_NV[index], sampling.top_k, sampling.top_p, sampling.min_p)
    return pick(shares_NV, uniform_N.to(rows_NV.device))


def _filters(sampling: Sampling, vocabulary: int) -> bool:
    return sampling.min_p > 0 or 0 < sampling.top_k < vocabulary or sampling.top_p < 1
