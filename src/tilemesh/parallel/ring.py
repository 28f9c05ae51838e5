"""Attention of a sequence whose tokens several ranks share: keys and values come to the queries, with autograd.

The one idea: each rank keeps its queries, sees the keys and values of all ranks in one or several visits, and weighs
what they gave by their sums of exponentials (`kernels/attention/blocks.py`). Backward they visit again, and each rank's
part of their gradients goes home. How they travel is one of two values. Around a ring (`KeyRing`): one rank's after the
other's, the next on their way while those that are here are computed with, gradients behind them; each rank adds its
part, and the last one sends them home. A rank sends (c-1) times its keys and values forward, and backward the same and
(c-1) times their gradients, which travel as wide as they are summed. Or gathered (`KeyGather`): all at once, gradients
scatter-summed; as many bytes, in one collective that nothing hides, and few large blocks to compute.

B: rows; T: queries here; S: keys of a visit; H: query heads; K: key and value heads; E: head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.sequence import BlockPair, Runs, TokenRun, block_pairs, runs_around, tokens_of
from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.attention.blocks import SeenKeys, attend_block, attend_block_back

_KEYS, _GRADIENTS = 0, 1  # tags


class DocumentEnds(NamedTuple):
    """Of every token of the sequences, which all ranks know: where its document begins and ends."""

    begin_BS: Tensor
    end_BS: Tensor


@dataclass(frozen=True)
class AttendedRuns:
    """What a pass attends to: of every rank, or of neighbours that share out heads together, the tokens that ask and
    those that are asked."""

    queries: tuple[Runs, ...]
    keys: tuple[Runs, ...]
    documents: DocumentEnds | None = None
    """Where none may see another."""
    shares: tuple[Runs, ...] = ()
    """Of the tokens that ask, what each rank has itself."""


class PackedKeys(NamedTuple):
    """Keys and values (B, K, S, E), which may differ in width, or their gradients, as one flat buffer."""

    rows: int
    heads: int
    widths: list[int]

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> PackedKeys:
        return cls(k.shape[0], k.shape[1], [k.shape[3], v.shape[3]])

    def numel(self, tokens: int) -> int:
        return self.rows * self.heads * sum(self.widths) * tokens

    def flat(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat((k.reshape(-1), v.reshape(-1)))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Keys and values in it."""
        share = flat.numel() // sum(self.widths)
        parts = torch.split(flat, [share * width for width in self.widths])
        tokens = share // (self.rows * self.heads)
        return [part.view(self.rows, self.heads, tokens, width) for part, width in zip(parts, self.widths, strict=True)]


class Visit(NamedTuple):
    """Keys and values that are here, and which tokens they are."""

    runs: Runs
    flat: Tensor


class KeyTravel(Protocol):
    """How keys and values get to the queries of all ranks, and gradients back."""

    def visits(self, packed: PackedKeys, flat: Tensor) -> Iterator[Visit]:
        """All of the sequence in turn, given this rank's."""

    def take_home(self, packed: PackedKeys, parts: Iterable[Tensor]) -> Tensor:
        """Gradients of this rank's keys and values, given its parts of those of every visit, as they are made."""


class _Hop(NamedTuple):
    """A tensor on its way to the next rank, and another from the one before."""

    sent: Any
    come: Any
    held: Tensor
    landing: Tensor

    def wait(self) -> Tensor:
        self.come.wait()
        self.sent.wait()
        return self.landing


@dataclass(frozen=True)
class KeyRing:
    """Around a ring: `keys` of every stop of it, which are `every` ranks apart."""

    comm: Communicator
    keys: tuple[Runs, ...]
    every: int = 1

    def visits(self, packed: PackedKeys, flat: Tensor) -> Iterator[Visit]:
        with self.comm.moving():
            for turn in range(len(self.keys)):
                is_last = turn == len(self.keys) - 1
                coming = None if is_last else self._pass_on(packed, flat, turn, _KEYS)
                yield Visit(self.keys[self._of(turn)], flat)
                if coming is not None:
                    flat = coming.wait()

    def take_home(self, packed: PackedKeys, parts: Iterable[Tensor]) -> Tensor:
        own = coming = None
        for turn, part in enumerate(parts):
            if turn == 0:
                own = part
                continue
            # What the ranks before this one have added for these keys, and on to the next.
            if coming is not None:
                part += coming.wait()
            coming = self._pass_on(packed, part, turn, _GRADIENTS)
        assert own is not None
        return own if coming is None else own.add_(coming.wait())

    def _of(self, turn: int) -> int:
        """The stop whose keys are here then."""
        return (self.comm.rank // self.every - turn) % len(self.keys)

    def _pass_on(self, packed: PackedKeys, flat: Tensor, turn: int, tag: int) -> _Hop:
        """Send on what is here and ask for what is next."""
        size, rank, every = self.comm.size, self.comm.rank, self.every
        landing = flat.new_empty(packed.numel(tokens_of(self.keys[self._of(turn + 1)])))
        before, after = (rank - every) % size, (rank + every) % size
        if rank // every % 2:  # nccl begins messages in order: were all to send first, all would wait
            come = self.comm.irecv(landing, before, tag, sized=False)
            return _Hop(self.comm.isend(flat, after, tag, sized=False), come, flat, landing)
        sent = self.comm.isend(flat, after, tag, sized=False)
        return _Hop(sent, self.comm.irecv(landing, before, tag, sized=False), flat, landing)


@dataclass(frozen=True)
class KeyGather:
    """All of them at once: `keys` of every rank."""

    comm: Communicator
    keys: tuple[Runs, ...]
    queries: Runs
    algorithm: str = "auto"

    def visits(self, packed: PackedKeys, flat: Tensor) -> Iterator[Visit]:
        own_SBKE = torch.cat(packed.views(flat), dim=3).permute(2, 0, 1, 3).contiguous()
        every = self.comm.all_gather(own_SBKE, counts=self._counts, algorithm=self.algorithm)
        k, v = torch.split(in_order(every, self.keys).permute(1, 2, 0, 3), packed.widths, dim=3)
        yield Visit(runs_around(self.queries), packed.flat(k, v))

    def take_home(self, packed: PackedKeys, parts: Iterable[Tensor]) -> Tensor:
        (part,) = parts
        part_SBKE = torch.cat(packed.views(part), dim=3).permute(2, 0, 1, 3)
        sent = by_rank(part_SBKE, self.keys).contiguous()
        own: Tensor = self.comm.reduce_scatter(sent, counts=self._counts, algorithm=self.algorithm)
        return packed.flat(*torch.split(own.permute(1, 2, 0, 3), packed.widths, dim=3))

    @property
    def _counts(self) -> list[int]:
        return [tokens_of(runs) for runs in self.keys]


@dataclass(frozen=True)
class SharedAttention:
    """One layer's attention as a rank computes it: `queries` of its own over the keys that visit it."""

    travel: KeyTravel
    queries: Runs
    documents: DocumentEnds | None = None
    window: int = 0
    implementation: str = "auto"
    cap: float = 0.0
    """Of scores; 0: none."""

    def __call__(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        """`sinks_H`: of each head a logit more in the softmax, which takes no value."""
        if not len(q_BHTE):  # on no rank of the sequence: nothing is exchanged, and gradients are of nothing
            nothing = q_BHTE.sum() + k_BKSE.sum() + v_BKSE.sum()
            return nothing.expand(*q_BHTE.shape[:3], v_BKSE.shape[3])
        function: Any = _AttentionGraph
        y_BHTE: Tensor = function.apply(q_BHTE, k_BKSE, v_BKSE, sinks_H, self)
        return y_BHTE

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The result, and the logarithm of each query's sum, as wide as they are summed."""
        wide, packed = accumulator(q.dtype), PackedKeys.of(k, v)
        y, sums = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide), q.new_full(q.shape[:3], -math.inf, dtype=wide)
        for runs, flat in self.travel.visits(packed, packed.flat(k, v)):
            for pair, seen in self._pairs(runs, q):
                query, key, value = _part(q, pair.queries), *(_part(x, pair.keys) for x in packed.views(flat))
                here = slice(pair.queries.begin, pair.queries.end)
                part, part_sums = attend_block(
                    query, key, value, causal=pair.causal, seen=seen, implementation=self.implementation, cap=self.cap
                )
                _merge(y[:, :, here], sums[:, :, here], part, part_sums)
        return y, sums

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor) -> list[Tensor]:
        wide, packed = accumulator(q.dtype), PackedKeys.of(k, v)
        dq = q.new_zeros(q.shape, dtype=wide)

        def parts() -> Iterator[Tensor]:
            for runs, flat in self.travel.visits(packed, packed.flat(k, v)):
                part = torch.zeros_like(flat, dtype=wide)
                for pair, seen in self._pairs(runs, q):
                    key, value, of_key, of_value = (
                        _part(x, pair.keys) for x in (*packed.views(flat), *packed.views(part))
                    )
                    slope, query, result, log = (_part(x, pair.queries) for x in (grad, q, y, sums))
                    made = attend_block_back(
                        slope, query, key, value, result, log, causal=pair.causal, seen=seen,
                        implementation=self.implementation, cap=self.cap,
                    )  # fmt: skip
                    dq[:, :, pair.queries.begin : pair.queries.end] += made.q
                    of_key += made.k
                    of_value += made.v
                yield part

        return [dq, *packed.views(self.travel.take_home(packed, parts()))]

    def _pairs(self, keys: Runs, q: Tensor) -> list[tuple[BlockPair, SeenKeys | None]]:
        """What there is to compute with the keys that are here."""
        is_plain = not self.window and self.documents is None
        pairs = block_pairs(self.queries, keys, self.window, joined=is_plain)
        return [(pair, None if is_plain else self._seen(pair, q)) for pair in pairs]

    def _seen(self, pair: BlockPair, q: Tensor) -> SeenKeys:
        """Positions in the sequence as bounds within the pair."""
        of_queries, of_keys = (
            TokenRun(pair.first_query, pair.queries.length),
            TokenRun(pair.first_key, pair.keys.length),
        )
        query_T, key_S = (torch.arange(run.begin, run.end, device=q.device)[None] for run in (of_queries, of_keys))
        low_BT, last_BS = torch.zeros_like(query_T), torch.full_like(key_S, of_queries.end)
        if self.window:
            low_BT, last_BS = query_T - self.window + 1, key_S + self.window
        if self.documents is not None:
            begin_BS, end_BS = self.documents
            low_BT = torch.maximum(low_BT, begin_BS[:, of_queries.begin : of_queries.end])
            last_BS = torch.minimum(last_BS, end_BS[:, of_keys.begin : of_keys.end])
        bounds = ((low_BT, of_keys), (query_T + 1, of_keys), (key_S, of_queries), (last_BS, of_queries))
        return SeenKeys(*((x.clamp(run.begin, run.end) - run.begin).expand(q.shape[0], -1) for x, run in bounds))


class _AttentionGraph(torch.autograd.Function):
    """Keeps q, k, v, the result and its sums: what attention in one process keeps, of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, attention: SharedAttention) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            wide, sums = attention.forward(q, k, v)
            if sinks is not None:  # once, when all keys have been here: as a key of its own would, with a value of 0
                none = wide.new_zeros(()).expand_as(wide)
                _merge(wide, sums, none, sinks.to(sums.dtype)[:, None].expand_as(sums))
        y = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, y, sums)
        ctx.attention = attention
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, y, sums = ctx.saved_tensors
        of_sinks = None
        with torch.autocast(q.device.type, enabled=False):
            made = ctx.attention.backward(grad, q, k, v, y, sums)
            if sinks is not None:
                weight = (sinks.to(sums.dtype)[:, None] - sums).exp()
                of_sinks = -(weight * (grad * y).sum(-1, dtype=sums.dtype)).sum((0, 2)).to(sinks.dtype)
        return (*(gradient.to(like.dtype) for gradient, like in zip(made, (q, k, v), strict=True)), of_sinks, None)


def in_order(x_S: Tensor, runs: Sequence[Runs]) -> Tensor:
    """Tokens (dim 0) that lie rank by rank, in the order of the sequence."""
    every = [run for each in runs for run in each]
    pieces = torch.split(x_S, [run.length for run in every]) if every else ()
    return torch.cat([x_S[:0], *(pieces[at] for at in sorted(range(len(every)), key=every.__getitem__))])


def by_rank(x_S: Tensor, runs: Sequence[Runs]) -> Tensor:
    """The inverse."""
    every = sorted(run for each in runs for run in each)
    pieces = dict(zip(every, torch.split(x_S, [run.length for run in every]), strict=True))
    return torch.cat([x_S[:0], *(pieces[run] for each in runs for run in each)])


def _part(x: Tensor, run: TokenRun) -> Tensor:
    """Some of the tokens of (B, heads, T, E), of sums (B, H, T)."""
    return x.narrow(2, run.begin, run.length)


def _merge(y: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Add, in place, what other keys gave the same queries. Of a query that has seen no key, the sum is -inf."""
    total = torch.logaddexp(sums, part_sums)
    least = total.clamp_min(torch.finfo(total.dtype).min)  # -inf less -inf is NaN
    y.mul_((sums - least).exp()[..., None]).add_(part * (part_sums - least).exp()[..., None])
    sums.copy_(total)
