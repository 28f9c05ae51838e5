"""Logits to tokens: bias, penalties, temperature, min-p, top-k, top-p, and a draw with a random number per token.

The one idea: a row of logits is drawn from by itself. Whatever its request asked for is applied to that row, and its
random number follows from (seed, answer, place in the answer), so neither the batch nor a preemption nor a guess that
was checked along the way can change a token.

Filters are thresholds on shares, not positions in a sorted list: equal tokens are kept or dropped together.

N: rows; V: vocabulary.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilemesh.kernels.likeliest.reference import likeliest
from tilemesh.model.sampling import keep_likeliest, keyed_uniform, pick, shares
from tilemesh.serve.request import Sampling

_EVEN_ROWS = 16
_COLDEST = 1e-30
"""A temperature by which logits can still be divided in float32."""


class TokenDraw(NamedTuple):
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


class DrawKind(enum.IntEnum):
    """What the rows of a step ask for at most: what nobody asks for is not computed."""

    GREEDY = 0
    SAMPLED = 1
    FILTERED = 2


@dataclass(frozen=True)
class RowDraws:
    """How each row of a step is drawn from, as tensors on its device: nothing waits for them."""

    temperature_N: Tensor
    uniform_N: Tensor
    """The random numbers, from 0 to below 1, of the tokens."""
    top_k_N: Tensor
    top_p_N: Tensor
    min_p_N: Tensor


class TokenLogprobs(NamedTuple):
    """Log-probabilities in the model's own distribution (before bias, penalties, temperature and filters), and in the
    one that the token was drawn from (after all of these)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest, first first."""
    sampled: float | None = None
    """As it was drawn; None for a prompt's token, which nobody drew."""
    sampled_top: tuple[tuple[int, float], ...] = ()
    """The likeliest of those that could be drawn: fewer where filters left fewer."""


class DrawnScores(Sequence[TokenLogprobs]):
    """The same of tokens that were drawn, without the likeliest: two numbers for each token, and an object only for one
    that is looked at. A batch of answers has millions."""

    def __init__(self, tokens: Sequence[int], scores: Sequence[float]) -> None:
        """`scores`: of each token its own, then as sampled."""
        self._tokens, self._scores = tokens, scores

    @property
    def sampled(self) -> Sequence[float]:
        return self._scores[1::2]

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, place: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, place: slice) -> DrawnScores: ...
    def __getitem__(self, place: int | slice) -> TokenLogprobs | DrawnScores:
        if isinstance(place, slice):
            pairs = zip(self._scores[::2][place], self.sampled[place], strict=True)
            return DrawnScores(self._tokens[place], [*chain.from_iterable(pairs)])
        return TokenLogprobs(self._tokens[place], self._scores[::2][place], (), self.sampled[place])

    def __iter__(self) -> Iterator[TokenLogprobs]:
        for token, own, drawn in zip(self._tokens, self._scores[::2], self.sampled, strict=True):
            yield TokenLogprobs(token, own, (), drawn)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def sampled_logprobs(logprobs: Sequence[TokenLogprobs]) -> NDArray[np.float64]:
    """Of tokens that were drawn, as they were."""
    known = logprobs.sampled if isinstance(logprobs, DrawnScores) else [each.sampled or 0.0 for each in logprobs]
    return np.array(known, np.float64)


def unsound_rows(logits_NV: Tensor) -> list[int]:
    """Rows with logits that are NaN or infinite."""
    # A sum is infinite or NaN if a term is; in float32 at least, so that only absurd logits could overflow it.
    sound_N = torch.isfinite(logits_NV.sum(-1, dtype=torch.promote_types(logits_NV.dtype, torch.float32)))
    return [] if bool(sound_N.all()) else [row for row, sound in enumerate(sound_N.tolist()) if not sound]


def draw_tokens(logits_NV: Tensor, drawings: Sequence[TokenDraw]) -> list[int]:
    """One token for each row, whose logits are finite."""
    if all(drawing.sampling.is_plain and drawing.allowed_V is None for drawing in drawings):
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        tokens: list[int] = pick(torch.softmax(logits_NV.to(wide), -1), _uniform(drawings, logits_NV.device)).tolist()
        return tokens
    rows_NV = _changed_rows(logits_NV, drawings)
    drawn = [index for index, drawing in enumerate(drawings) if drawing.sampling.temperature > 0]
    tokens_N = rows_NV.argmax(-1)
    if drawn:
        some = slice(None) if len(drawn) == len(drawings) else torch.tensor(drawn, device=rows_NV.device)
        tokens_N[some] = _draw(rows_NV[some], [drawings[index] for index in drawn])
    return list(map(int, tokens_N.tolist()))


def draw_evenly(logits_NV: Tensor, drawings: Sequence[TokenDraw]) -> list[int]:
    """The same by kernels of which a row's bits never follow from how many there are: on a GPU the one that steps
    launched ahead draw with, where it can; else those of torch, which always see as many rows."""
    by_kernel = [
        index for index, drawing in enumerate(drawings)
        if logits_NV.is_cuda and not _changes(drawing) and not filters(drawing.sampling, logits_NV.shape[1])
    ]  # fmt: skip
    if not by_kernel or logits_NV.dtype is torch.float64:
        return _draw_in_blocks(logits_NV, drawings)
    some = [drawings[index] for index in by_kernel]
    numbers = [(drawing.sampling.temperature, 0.0, 0.0, 0.0) for drawing in some]
    temperature, *unused = torch.tensor(numbers, dtype=torch.float64).to(logits_NV.device).unbind(1)
    draws = RowDraws(temperature, _uniform(some, logits_NV.device), *unused)
    drawn_N, _ = draw_on_device(_rows_of(logits_NV, by_kernel), draws, DrawKind.SAMPLED)
    tokens = dict(zip(by_kernel, drawn_N.tolist(), strict=True))
    others = [index for index in range(len(drawings)) if index not in tokens]
    if others:
        made = _draw_in_blocks(_rows_of(logits_NV, others), [drawings[index] for index in others])
        tokens |= zip(others, made, strict=True)
    return [tokens[index] for index in range(len(drawings))]


def _rows_of(logits_NV: Tensor, rows: list[int]) -> Tensor:
    return logits_NV if len(rows) == len(logits_NV) else logits_NV[torch.tensor(rows, device=logits_NV.device)]


def _draw_in_blocks(logits_NV: Tensor, drawings: Sequence[TokenDraw]) -> list[int]:
    tokens: list[int] = []
    for first in range(0, len(drawings), _EVEN_ROWS):
        rows, some = logits_NV[first : first + _EVEN_ROWS], drawings[first : first + _EVEN_ROWS]
        padding = _EVEN_ROWS - len(some)
        if padding:
            rows, some = torch.cat((rows, rows[-1:].expand(padding, -1))), [*some, *[some[-1]] * padding]
        tokens += draw_tokens(rows, some)
    return tokens[: len(drawings)]


def _changed_rows(logits_NV: Tensor, drawings: Sequence[TokenDraw]) -> Tensor:
    """With what constraints, bias and penalties make of them."""
    changed = [index for index, drawing in enumerate(drawings) if _changes(drawing)]
    if not changed:
        return logits_NV
    rows_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32), copy=True)
    for index in changed:
        _change_logits(rows_NV[index], drawings[index])
    return rows_NV


def _changes(drawing: TokenDraw) -> bool:
    return drawing.sampling.changes_logits or drawing.allowed_V is not None


def _is_changed(drawing: TokenDraw, vocabulary: int) -> bool:
    """Whether its token is drawn from something else than the model's own distribution."""
    if drawing.sampling.is_plain:
        return drawing.allowed_V is not None
    return drawing.sampling.temperature != 1 or _changes(drawing) or filters(drawing.sampling, vocabulary)


def kind_of(sampling: Sampling, vocabulary: int) -> DrawKind:
    if sampling.temperature == 0:
        return DrawKind.GREEDY
    return DrawKind.FILTERED if filters(sampling, vocabulary) else DrawKind.SAMPLED


def draw_on_device(
    logits_NV: Tensor, draws: RowDraws, kind: DrawKind, scored: bool = False, even: bool = False
) -> tuple[Tensor, Tensor | None]:
    """One token for each row, without a look at any value: it can be captured in a CUDA graph.

    -1 where logits are NaN or infinite. Bias, penalties and constraints are `draw_tokens`'s: they need the tokens.
    `scored`: also the log-probabilities of these tokens, the model's own and those as sampled; `even`: bit for bit as
    `logprobs_of` gives them.
    """
    if kind is DrawKind.SAMPLED and logits_NV.is_cuda and logits_NV.dtype is not torch.float64:
        from tilemesh.kernels.likeliest.draw import draw_rows  # late: Triton

        drawn_N, scores_2N = draw_rows(logits_NV, draws.temperature_N, draws.uniform_N)
        if scored and even:
            scores_2N = _even_scores(logits_NV, drawn_N, draws.temperature_N)
        return drawn_N, scores_2N if scored else None
    tokens_N: Tensor = likeliest(logits_NV)
    shares_NV: Tensor | None = None
    if kind is not DrawKind.GREEDY:
        shares_NV = shares(logits_NV, draws.temperature_N)
        if kind is DrawKind.FILTERED:
            shares_NV = _filter_rows(shares_NV, draws)
        is_drawn_N = (draws.temperature_N > 0) & (tokens_N >= 0)
        tokens_N = torch.where(is_drawn_N, pick(shares_NV, draws.uniform_N), tokens_N)
    if scored and even:
        return tokens_N, _even_scores(logits_NV, tokens_N, None if shares_NV is None else draws.temperature_N)
    return tokens_N, _scores(logits_NV, shares_NV, tokens_N, draws, kind) if scored else None


def _scores(logits_NV: Tensor, shares_NV: Tensor | None, tokens_N: Tensor, draws: RowDraws, kind: DrawKind) -> Tensor:
    """(2, N): of the drawn tokens, as `TokenLogprobs` has them."""
    # One pass: it reads 16-bit logits and writes wide ones; apart, these two and a `logsumexp` take four times as long.
    wide, place_N1 = torch.promote_types(logits_NV.dtype, torch.float32), tokens_N.clamp(min=0)[:, None]
    own_N = torch.log_softmax(logits_NV, -1, dtype=wide).gather(1, place_N1)[:, 0]
    if shares_NV is None:
        return torch.stack((own_N, torch.zeros_like(own_N)))
    sampled_N = (shares_NV.gather(1, place_N1)[:, 0] / shares_NV.sum(-1)).log()
    if kind is DrawKind.SAMPLED:
        sampled_N = torch.where(draws.temperature_N == 1, own_N, sampled_N)
    return torch.stack((own_N, torch.where(draws.temperature_N > 0, sampled_N, 0)))


def _even_scores(logits_NV: Tensor, tokens_N: Tensor, temperature_N: Tensor | None) -> Tensor:
    """(2, N): as `logprobs_of` computes them of rows without filters. No temperatures: all are 0."""
    wide_NV, place_N1 = logits_NV.to(_wide(logits_NV)), tokens_N.clamp(min=0)[:, None]
    own_N = torch.log_softmax(wide_NV, -1).gather(1, place_N1)[:, 0]
    if temperature_N is None:
        return torch.stack((own_N, torch.zeros_like(own_N)))
    drawn_N = torch.log_softmax(_at_temperatures(wide_NV, temperature_N), -1).gather(1, place_N1)[:, 0]
    return torch.stack((own_N, torch.where(temperature_N > 0, drawn_N, 0)))


def _at_temperatures(wide_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """Rows divided by their temperatures, rounded as a division of all by one number is: on a GPU torch multiplies."""
    divisor_N1 = temperature_N.to(wide_NV).clamp(min=_COLDEST)[:, None]
    return wide_NV * divisor_N1.reciprocal() if wide_NV.is_cuda else wide_NV / divisor_N1


def _wide(logits_NV: Tensor) -> torch.dtype:
    return torch.promote_types(logits_NV.dtype, torch.float32)


def _filter_rows(shares_NV: Tensor, draws: RowDraws) -> Tensor:
    """As `_filter`, for all rows at once."""
    least_N1 = (draws.min_p_N * shares_NV.amax(-1))[:, None].to(shares_NV.dtype)
    shares_NV = shares_NV.masked_fill(shares_NV < least_N1, 0)
    ordered_NV = shares_NV.sort(-1, descending=True).values
    last = shares_NV.shape[1] - 1
    kth_N1 = ordered_NV.gather(1, (draws.top_k_N - 1).clamp(0, last)[:, None])
    kth_N1 = torch.where(draws.top_k_N[:, None] > 0, kth_N1, 0)
    reached_NV = ordered_NV.masked_fill(ordered_NV < kth_N1, 0).cumsum(-1, dtype=torch.float64)
    wanted_N1 = (draws.top_p_N * reached_NV[:, -1])[:, None]
    # The first token that reaches the share is kept as well, and with it all that are as likely.
    end_N1 = (reached_NV < wanted_N1).sum(-1, keepdim=True).clamp(max=last)
    pth_N1 = torch.where(draws.top_p_N[:, None] < 1, ordered_NV.gather(1, end_N1), 0)
    return shares_NV.masked_fill((shares_NV < kth_N1) | (shares_NV < pth_N1), 0)


def logprobs_of(
    logits_NV: Tensor, tokens: Sequence[int], top: int, drawings: Sequence[TokenDraw] = ()
) -> list[TokenLogprobs]:
    """For each row, of its token and of so many likeliest; `drawings`: how the tokens were drawn, where they were."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    own_NV = torch.log_softmax(logits_NV.to(wide), dim=-1)
    owns, tops = _picked(own_NV, tokens, top)
    if not drawings:
        return [TokenLogprobs(*entry) for entry in zip(tokens, owns, tops, strict=True)]
    if not any(_is_changed(drawing, own_NV.shape[1]) for drawing in drawings):
        return list(map(TokenLogprobs, tokens, owns, tops, owns, tops))
    sampled_NV, others, warm = own_NV.clone(), list[int](), list[int]()
    for index, drawing in enumerate(drawings):
        sampling = drawing.sampling
        if sampling.temperature == 0:
            sampled_NV[index] = -torch.inf
            sampled_NV[index, tokens[index]] = 0
        elif _changes(drawing) or filters(sampling, own_NV.shape[1]):
            others.append(index)
        elif sampling.temperature != 1:
            warm.append(index)
    if warm:
        heat = torch.tensor([drawings[index].sampling.temperature for index in warm], dtype=torch.float64)
        rows_NV = _at_temperatures(logits_NV[warm].to(wide), heat.to(logits_NV.device))
        sampled_NV[warm] = torch.log_softmax(rows_NV, -1)
    if others:
        some = [drawings[index] for index in others]
        rows_NV = _changed_rows(logits_NV[others], some)
        shares_NV = _drawn_shares(rows_NV, [drawing.sampling for drawing in some])
        sampled_NV[others] = (shares_NV / shares_NV.sum(-1, keepdim=True, dtype=torch.float64)).log().to(wide)
    sampled, sampled_tops = _picked(sampled_NV, tokens, top)
    possible = [tuple(pair for pair in pairs if pair[1] > -torch.inf) for pairs in sampled_tops]
    return [TokenLogprobs(*entry) for entry in zip(tokens, owns, tops, sampled, possible, strict=True)]


def _picked(
    logprobs_NV: Tensor, tokens: Sequence[int], top: int
) -> tuple[list[float], list[tuple[tuple[int, float], ...]]]:
    """Of each row its token's, and the largest with their tokens."""
    own = logprobs_NV.gather(1, torch.tensor(tokens, device=logprobs_NV.device)[:, None])[:, 0].tolist()
    if top == 0:
        return own, [()] * len(own)
    values, ids = (kept.tolist() for kept in logprobs_NV.topk(min(top, logprobs_NV.shape[1])))
    return own, [tuple(zip(row_ids, row, strict=True)) for row_ids, row in zip(ids, values, strict=True)]


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
        logits = row_V[seen]
        row_V[seen] = torch.where(
            logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
        )
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(drawing.tokens[drawing.prompt :])
        if counts:
            ids, times = _columns(counts, row_V)
            row_V[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times


def _columns(by_token: Mapping[int, float], row_V: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.tensor(list(by_token), dtype=torch.int64, device=row_V.device)
    return ids, torch.tensor(list(by_token.values()), dtype=row_V.dtype, device=row_V.device)


def _draw(rows_NV: Tensor, drawings: Sequence[TokenDraw]) -> Tensor:
    shares_NV = _drawn_shares(rows_NV, [drawing.sampling for drawing in drawings])
    return pick(shares_NV, _uniform(drawings, rows_NV.device))


def _uniform(drawings: Sequence[TokenDraw], device: torch.device) -> Tensor:
    each = [keyed_uniform(drawing.seed, drawing.answer, drawing.number) for drawing in drawings]
    return torch.tensor(each, dtype=torch.float64).to(device)


def _drawn_shares(rows_NV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """What tokens are drawn by: rows at their temperatures above 0, with 0 for tokens that filters drop."""
    temperature_N = torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float64)
    shares_NV = shares(rows_NV, temperature_N.to(rows_NV.device))
    filtered = [index for index, sampling in enumerate(samplings) if filters(sampling, rows_NV.shape[1])]
    for index in filtered:
        sampling = samplings[index]
        keep_likeliest(shares_NV[index], sampling.top_k, sampling.top_p, sampling.min_p)
    return shares_NV


def filters(sampling: Sampling, vocabulary: int) -> bool:
    """Whether some of the tokens may not be drawn for being too unlikely."""
    return sampling.min_p > 0 or 0 < sampling.top_k < vocabulary or sampling.top_p < 1
