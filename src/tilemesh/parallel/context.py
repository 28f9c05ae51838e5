"""Context parallelism: ranks that share each sequence, and how attention gets at the tokens of the others.

The one idea: all but attention treats each token by itself, so a rank that has some of a sequence's tokens computes as
ever, and the tokens bring their places along: positions for rotary and learned embeddings, rows of dropout's masks,
documents. Attention alone exchanges: keys and values go round or are gathered (`ring.py`), or every rank gets all
tokens of some heads and gives their results back (two all_to_alls); or neighbours do this among them, and keys and
values go round from neighbours to neighbours. Which tokens a rank has is `core/sequence.py`.

B: rows; T: tokens; H: query heads; K: key and value heads; E: head width.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.sequence import Runs, joined_runs, tokens_of, zigzag
from tilemesh.core.tensor_placement import Crossing, P, R
from tilemesh.model.attend import attend
from tilemesh.model.deferral import product_dtype
from tilemesh.model.documents import DocumentPlaces, document_places
from tilemesh.model.dropout import DropoutPlace
from tilemesh.model.kernels import TORCH
from tilemesh.parallel.ring import (
    AttendedRuns,
    DocumentEnds,
    KeyGather,
    KeyRing,
    KeyTravel,
    SharedAttention,
    by_rank,
    in_order,
)


@dataclass
class ContextAxis:
    """The ranks that share each sequence."""

    comm: Communicator
    exchange: str = "ring"
    """As a plan's `cp_exchange`."""
    algorithm: str = "auto"
    together: int = 1
    """Neighbours that share out heads (`ranks_sharing_heads`)."""

    def runs(self, tokens: int, begin: int = 0) -> tuple[Runs, ...]:
        """What each rank has of so many tokens."""
        return tuple(zigzag(tokens, self.comm.size, rank, begin) for rank in range(self.comm.size))

    def count(self, tokens: int) -> int:
        """How many of them this rank has."""
        return tokens_of(zigzag(tokens, self.comm.size, self.comm.rank))

    def own(self, x_BT: Tensor) -> Tensor:
        """Of something that all ranks have of every token (dim 1), what belongs to this one's."""
        runs = zigzag(x_BT.shape[1], self.comm.size, self.comm.rank)
        return torch.cat([x_BT[:, :0], *(x_BT[:, run.begin : run.end] for run in runs)], dim=1)

    def placed(self, place: DropoutPlace, tokens: int, device: torch.device) -> DropoutPlace:
        """Of this rank's tokens, where those of all ranks begin at a place."""
        assert isinstance(place.token, int)
        positions_1T = torch.arange(place.token, place.token + tokens, dtype=torch.int32, device=device)[None]
        return dataclasses.replace(place, token=self.own(positions_1T)[0])

    def stay_out_of_graphs(self) -> None:
        """Under torch.compile: what lies before and behind attention is compiled, the exchange is called as it is."""
        apart: Any = torch.compiler.disable
        self.attend = apart(self.attend)  # type: ignore[method-assign]

    def attend(
        self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, pass_: ContextCache, window: int, cap: float,
        sinks_H: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Of this rank's tokens over those of all ranks."""
        sinks_H = self.of_heads(sinks_H)
        q, k, v = self.to_heads((q_BTHE, k_BTKE, v_BTKE), pass_.runs.shares)
        if self.exchange == "heads":
            y_BTHE = attend(q, k, v, None, pass_.documents, window, pass_.implementation, cap, sinks_H)
        else:
            y_BTHE = self.go_round(q, k, v, pass_.runs, window, pass_.implementation, cap, sinks_H)
        return self.to_tokens(y_BTHE, pass_.runs.shares)

    def go_round(
        self,
        q_BTHE: Tensor,
        k_BSKE: Tensor,
        v_BSKE: Tensor,
        runs: AttendedRuns,
        window: int,
        kernels: str = TORCH,
        cap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attention to keys and values that go round, or are gathered."""
        how = "auto" if kernels == TORCH else kernels  # of torch's own none gives the sums
        q, k, v = (x.to(product_dtype(x)).transpose(1, 2) for x in (q_BTHE, k_BSKE, v_BSKE))
        queries = runs.queries[self.comm.rank // self.together]
        travel: KeyTravel = KeyRing(self.comm, runs.keys, self.together)
        if self.exchange == "gather":
            travel = KeyGather(self.comm, runs.keys, queries, self.algorithm)
        attention = SharedAttention(travel, queries, runs.documents, window, how, cap)
        return attention(q, k, v, sinks_H).transpose(1, 2)

    def of_heads(self, sinks_H: Tensor | None) -> Tensor | None:
        """Of all heads that this rank has of its tokens, those of the heads that it has of the neighbours' tokens."""
        return sinks_H if sinks_H is None else sinks_H.chunk(self.together)[self.comm.rank % self.together]

    def to_heads(self, tensors: Sequence[Tensor], shares: Sequence[Runs]) -> Sequence[Tensor]:
        """From all heads of this rank's tokens to this rank's part of the heads of all neighbours' tokens, in their
        order."""
        size = self.together
        if size == 1:
            return tensors
        near, own = self._neighbours(shares), shares[self.comm.rank]
        counts = [tokens_of(each) for each in near]
        shapes = [(x.shape[2] // size, x.shape[3]) for x in tensors]
        widths = [heads * width for heads, width in shapes]
        parts = [
            x.to(product_dtype(x)).reshape(*x.shape[:2], size, width) for x, width in zip(tensors, widths, strict=True)
        ]
        sent = torch.cat(parts, dim=3).permute(2, 1, 0, 3).flatten(0, 1)  # (ranks x T, B, heads x E)
        got_TBF = self._swapped(sent, [tokens_of(own)] * size, counts)
        pieces = torch.split(in_order(got_TBF, near).transpose(0, 1), widths, dim=2)
        return [piece.reshape(*piece.shape[:2], *shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def to_tokens(self, y_BTHE: Tensor, shares: Sequence[Runs]) -> Tensor:
        """The other way, of attention's result."""
        size = self.together
        if size == 1:
            return y_BTHE
        near, own = self._neighbours(shares), shares[self.comm.rank]
        sent = by_rank(y_BTHE.transpose(0, 1), near)
        got = self._swapped(sent, [tokens_of(each) for each in near], [tokens_of(own)] * size)
        return got.view(size, tokens_of(own), *got.shape[1:]).permute(2, 1, 0, 3, 4).flatten(2, 3)

    def _neighbours(self, shares: Sequence[Runs]) -> Sequence[Runs]:
        first = self.comm.rank // self.together * self.together
        return shares[first : first + self.together]

    def _swapped(self, x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """Exchanged with the neighbours along dim 0, nothing with others, and its gradient the other way."""
        function: Any = _Swap
        before = self.comm.rank // self.together * self.together
        after = self.comm.size - before - self.together
        of_all = ([0] * before + counts + [0] * after for counts in (sends, receives))
        y: Tensor = function.apply(x, self, *of_all)
        return y

    def swap(self, x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        y: Tensor = self.comm.all_to_all(
            x.contiguous(), send_counts=sends, recv_counts=receives, algorithm=self.algorithm
        )
        return y


COUNTED = Crossing("cp", (P, R), (R, R), has_gradient=False)


@dataclass(frozen=True)
class SequenceCounts:
    """What a router calls to count the tokens of whole sequences."""

    comm: Communicator
    """Of the ranks that share them."""
    algorithm: str = "auto"
    crossing: Crossing = COUNTED

    def __call__(self, counts: Tensor) -> Tensor:
        """What each rank has counted of its tokens, of all tokens; without a gradient."""
        total: Tensor = self.comm.all_reduce(counts.detach(), algorithm=self.algorithm)
        return total


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: ContextAxis, sends: list[int], receives: list[int]) -> Tensor:
        ctx.back = (axis, receives, sends)
        return axis.swap(x, sends, receives)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        axis, sends, receives = ctx.back
        return axis.swap(grad, sends, receives), None, None, None


class ContextCache:
    """One pass's tokens of this rank, as `model/cache.py` asks for it: nothing is kept, others are asked."""

    def __init__(self, axis: ContextAxis, tokens_BT: Tensor, marked: bool, implementation: str = TORCH) -> None:
        """`tokens_BT`: of all ranks. `marked`: as `Transformer.prepare` takes it."""
        rows, tokens = tokens_BT.shape
        self.axis, self.implementation, self.capacity = axis, implementation, tokens
        self.documents = document_places(tokens_BT) if marked else None
        self.runs = attended_runs(axis, (tokens,), self.documents)
        positions_BT = torch.arange(tokens, device=tokens_BT.device).expand(rows, tokens)
        self.positions_BT = axis.own(positions_BT if self.documents is None else self.documents.positions_BT)

    def attend(
        self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, window: int = 0, cap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self.axis.attend(q_BTHE, k_BTKE, v_BTKE, self, window, cap, sinks_H)


def stretch_of(cache: Any, first: int, tokens: int) -> Any:
    """The same pass where some of its tokens stand alone, outside of attention: so many of them from `first`."""
    part = copy.copy(cache)
    part.positions_BT = cache.positions_BT[:, first : first + tokens]
    return part


def attended_runs(axis: ContextAxis, lengths: Sequence[int], documents: DocumentPlaces | None) -> AttendedRuns:
    """Of the last of some slices of the sequences, over all of them; each slice is shared out by itself."""
    begins = [sum(lengths[:number]) for number in range(len(lengths))]
    by_slice = [axis.runs(length, begin) for length, begin in zip(lengths, begins, strict=True)]
    near = range(0, axis.comm.size, axis.together)
    grouped = [tuple(joined_runs(runs[at : at + axis.together]) for at in near) for runs in by_slice]
    keys = tuple(tuple(run for runs in grouped for run in runs[stop]) for stop in range(len(near)))
    return AttendedRuns(grouped[-1], keys, None if documents is None else _ends(documents), by_slice[-1])


def _ends(documents: DocumentPlaces) -> DocumentEnds:
    positions_BS = documents.positions_BT
    tokens = positions_BS.shape[1]
    place_S = torch.arange(tokens, device=positions_BS.device)
    begins_BS = torch.where(positions_BS == 0, place_S, tokens)
    after_BS = torch.cat([begins_BS[:, 1:], begins_BS.new_full((len(begins_BS), 1), tokens)], dim=1)
    return DocumentEnds(place_S - positions_BS, after_BS.flip(1).cummin(dim=1).values.flip(1))
