"""Attention of a sequence whose tokens several ranks share: keys and values go round a ring, with autograd.

The one idea: each rank keeps its queries and sees the keys and values of every rank once, one rank's after the other's,
and weighs what they gave by their sums of exponentials (`kernels/attention/blocks.py`). The next are on their way
while those that are here are computed with. In backward they go round again, and the gradients of keys and values go
round behind them: each rank adds its part, and the last one sends them home. A rank sends (c-1) times its keys and
values forward, and backward the same and (c-1) times their gradients, which travel as wide as they are summed.

B: rows; T: queries here; S: keys of a rank; H: query heads; K: key and value heads; E: head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.sequence import BlockPair, Runs, TokenRun, block_pairs, tokens_of
from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.attention.blocks import SeenKeys, attend_block, attend_block_back

_KEYS, _GRADIENTS = 0, 1  # tags


class DocumentEnds(NamedTuple):
    """Of every token of the sequences, which all ranks know: where its document begins and ends."""

    begin_BS: Tensor
    end_BS: Tensor


@dataclass(frozen=True)
class AttendedRuns:
    """What a pass attends to: of every rank, its tokens that ask and those that are asked."""

    queries: tuple[Runs, ...]
    keys: tuple[Runs, ...]
    documents: DocumentEnds | None = None
    """Where none may see another."""


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
class RingAttention:
    """One layer's attention as a rank computes it."""

    comm: Communicator
    runs: AttendedRuns
    window: int = 0
    implementation: str = "auto"
    cap: float = 0.0
    """Of scores; 0: none."""

    def __call__(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
        function: Any = _RingGraph
        y_BHTE: Tensor = function.apply(q_BHTE, k_BKSE, v_BKSE, self)
        return y_BHTE

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The result, and the logarithm of each query's sum, as wide as they are summed."""
        wide = accumulator(q.dtype)
        y, sums = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        visiting = torch.stack((k, v))
        with self.comm.moving():
            for turn in range(self.comm.size):
                coming = self._next_keys(visiting, turn)
                for pair, seen in self._pairs(turn, q):
                    query, (key, value) = _part(q, pair.queries), _part(visiting, pair.keys)
                    here = slice(pair.queries.begin, pair.queries.end)
                    part, part_sums = attend_block(
                        query, key, value, causal=pair.causal, seen=seen, implementation=self.implementation,
                        cap=self.cap,
                    )  # fmt: skip
                    _merge(y[:, :, here], sums[:, :, here], part, part_sums)
                if coming is not None:
                    visiting = coming.wait()
        return y, sums

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor) -> list[Tensor]:
        wide, size = accumulator(q.dtype), self.comm.size
        dq = q.new_zeros(q.shape, dtype=wide)
        visiting, own, coming_home = torch.stack((k, v)), None, None
        with self.comm.moving():
            for turn in range(size):
                coming = self._next_keys(visiting, turn)
                part = visiting.new_zeros(visiting.shape, dtype=wide)
                for pair, seen in self._pairs(turn, q):
                    here = slice(pair.queries.begin, pair.queries.end)
                    key, value = _part(visiting, pair.keys)
                    slope, query, result, log = (_part(x, pair.queries) for x in (grad, q, y, sums))
                    made = attend_block_back(
                        slope, query, key, value, result, log, causal=pair.causal, seen=seen,
                        implementation=self.implementation, cap=self.cap,
                    )  # fmt: skip
                    dq[:, :, here] += made.q
                    of_key, of_value = _part(part, pair.keys)
                    of_key += made.k
                    of_value += made.v
                if turn == 0:
                    own = part
                else:  # what the ranks before this one have added for these keys, and on to the next
                    if coming_home is not None:
                        part += coming_home.wait()
                    after = self._of(turn + 1)
                    coming_home = self._pass_on(part, self._landing(part, after), _GRADIENTS)
                if coming is not None:
                    visiting = coming.wait()
            assert own is not None
            if coming_home is not None:
                own += coming_home.wait()
        return [dq, *own]

    def _of(self, turn: int) -> int:
        """The rank whose keys are here then."""
        return (self.comm.rank - turn) % self.comm.size

    def _pairs(self, turn: int, q: Tensor) -> list[tuple[BlockPair, SeenKeys | None]]:
        """What there is to compute with the keys that are here."""
        queries, keys = self.runs.queries[self.comm.rank], self.runs.keys[self._of(turn)]
        is_plain = not self.window and self.runs.documents is None
        pairs = block_pairs(queries, keys, self.window, joined=is_plain)
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
        if self.runs.documents is not None:
            begin_BS, end_BS = self.runs.documents
            low_BT = torch.maximum(low_BT, begin_BS[:, of_queries.begin : of_queries.end])
            last_BS = torch.minimum(last_BS, end_BS[:, of_keys.begin : of_keys.end])
        bounds = ((low_BT, of_keys), (query_T + 1, of_keys), (key_S, of_queries), (last_BS, of_queries))
        return SeenKeys(*((x.clamp(run.begin, run.end) - run.begin).expand(q.shape[0], -1) for x, run in bounds))

    # Messages -----------------------------------------------------------------------------------------------------

    def _next_keys(self, visiting: Tensor, turn: int) -> _Hop | None:
        """Send on what is here and ask for what is next; nothing where all have been here."""
        if turn == self.comm.size - 1:
            return None
        return self._pass_on(visiting, self._landing(visiting, self._of(turn + 1)), _KEYS)

    def _landing(self, like: Tensor, rank: int) -> Tensor:
        """Memory for keys and values of a rank, or their gradients."""
        return like.new_empty((*like.shape[:3], tokens_of(self.runs.keys[rank]), like.shape[4]))

    def _pass_on(self, tensor: Tensor, landing: Tensor, tag: int) -> _Hop:
        size, rank = self.comm.size, self.comm.rank
        if rank % 2:  # nccl begins messages in order: were all to send first, all would wait
            come = self.comm.irecv(landing, (rank - 1) % size, tag, sized=False)
            return _Hop(self.comm.isend(tensor, (rank + 1) % size, tag, sized=False), come, tensor, landing)
        sent = self.comm.isend(tensor, (rank + 1) % size, tag, sized=False)
        return _Hop(sent, self.comm.irecv(landing, (rank - 1) % size, tag, sized=False), tensor, landing)


class _RingGraph(torch.autograd.Function):
    """Keeps q, k, v, the result and its sums: what attention in one process keeps, of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: RingAttention) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            wide, sums = ring.forward(q, k, v)
        y = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, sums)
        ctx.ring = ring
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, sums = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            made = ctx.ring.backward(grad, q, k, v, y, sums)
        return (*(gradient.to(like.dtype) for gradient, like in zip(made, (q, k, v), strict=True)), None)


def _part(x: Tensor, run: TokenRun) -> Tensor:
    """Some of the tokens: (B, heads, T, E) with or without dims before it; of sums (B, H, T)."""
    return x.narrow(2 if x.dim() < 5 else 3, run.begin, run.length)


def _merge(y: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Add, in place, what other keys gave the same queries. Of a query that has seen no key, the sum is -inf."""
    total = torch.logaddexp(sums, part_sums)
    least = total.clamp_min(torch.finfo(total.dtype).min)  # -inf less -inf is NaN
    y.mul_((sums - least).exp()[..., None]).add_(part * (part_sums - least).exp()[..., None])
    sums.copy_(total)
