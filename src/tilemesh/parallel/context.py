"""Context parallelism: ranks that share each sequence, and how attention gets at the tokens of the others.

The one idea: all but attention treats each token by itself, so a rank that has some of a sequence's tokens computes as
ever, and the tokens bring their places along: positions for rotary and learned embeddings, rows of dropout's masks,
documents. Attention alone exchanges, one of two ways: keys and values go round (`ring.py`), or every rank gets all
tokens of some heads and gives their results back (two all_to_alls). Which tokens a rank has is `core/sequence.py`.

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
from tilemesh.core.sequence import Runs, tokens_of, zigzag
from tilemesh.core.tensor_placement import Crossing, P, R
from tilemesh.model.attend import attend
from tilemesh.model.deferral import product_dtype
from tilemesh.model.documents import DocumentPlaces, document_places
from tilemesh.model.dropout import DropoutPlace
from tilemesh.model.kernels import TORCH
from tilemesh.parallel.ring import AttendedRuns, DocumentEnds, RingAttention


@dataclass
class ContextAxis:
    """The ranks that share each sequence."""

    comm: Communicator
    exchange: str = "ring"
    """`ring` or `heads`, as a plan's `cp_exchange`."""
    algorithm: str = "auto"

    def runs(self, tokens: int, begin: int = 0) -> tuple[Runs, ...]:
        """What each rank has of so many tokens."""
        return tuple(zigzag(tokens, self.comm.size, rank, begin) for rank in range(self.comm.size))

    def count(self, tokens: int) -> int:
        """How many of them this rank has."""
        return tokens_of(zigzag(tokens, self.comm.size, self.comm.rank))

    def own(self, x_BT: Tensor) -> Tensor:
        """Of something that all ranks have of every token (dim 1), what belongs to this one's."""
        runs = zigzag(x_BT.shape[1], self.comm.size, self.comm.rank)
        return torch.cat([x_BT[:, run.begin : run.end] for run in runs], dim=1)

    def placed(self, place: DropoutPlace, tokens: int, device: torch.device) -> DropoutPlace:
        """Of this rank's tokens, where those of all ranks begin at a place."""
        assert isinstance(place.token, int)
        positions_1T = torch.arange(place.token, place.token + tokens, dtype=torch.int32, device=device)[None]
        return dataclasses.replace(place, token=self.own(positions_1T)[0])

    def add(self, counts: Tensor) -> Tensor:
        """What each rank has counted of its tokens, of all tokens; without a gradient."""
        total: Tensor = self.comm.all_reduce(counts.detach(), algorithm=self.algorithm)
        return total

    def stay_out_of_graphs(self) -> None:
        """Under torch.compile: what lies before and behind attention is compiled, the exchange is called as it is."""
        apart: Any = torch.compiler.disable
        self.attend = apart(self.attend)  # type: ignore[method-assign]

    def attend(
        self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, pass_: ContextCache, window: int, cap: float
    ) -> Tensor:
        """Of this rank's tokens over those of all ranks."""
        if self.exchange == "ring":
            return self.go_round(q_BTHE, k_BTKE, v_BTKE, pass_.runs, window, pass_.implementation, cap)
        q, k, v = self.to_heads((q_BTHE, k_BTKE, v_BTKE), pass_.runs.queries)
        y_BTHE = attend(q, k, v, None, pass_.documents, window, pass_.implementation, cap)
        return self.to_tokens(y_BTHE, pass_.runs.queries)

    def go_round(
        self,
        q_BTHE: Tensor,
        k_BSKE: Tensor,
        v_BSKE: Tensor,
        runs: AttendedRuns,
        window: int,
        kernels: str = TORCH,
        cap: float = 0.0,
    ) -> Tensor:
        """Attention by the ring."""
        how = "auto" if kernels == TORCH else kernels  # of torch's own none gives the sums
        q, k, v = (x.to(product_dtype(x)).transpose(1, 2) for x in (q_BTHE, k_BSKE, v_BSKE))
        return RingAttention(self.comm, runs, window, how, cap)(q, k, v).transpose(1, 2)

    def to_heads(self, tensors: Sequence[Tensor], runs: Sequence[Runs]) -> Sequence[Tensor]:
        """From all heads of this rank's tokens to this rank's part of the heads of all tokens, in their order."""
        size, counts = self.comm.size, [tokens_of(each) for each in runs]
        heads = [x.shape[2] // size for x in tensors]
        parts = [x.to(product_dtype(x)).reshape(*x.shape[:2], size, -1, x.shape[3]) for x in tensors]
        sent = torch.cat(parts, dim=3).permute(2, 1, 0, 3, 4).flatten(0, 1)  # (ranks x T, B, heads, E)
        got_TBHE = self._swapped(sent, [counts[self.comm.rank]] * size, counts)
        pieces = torch.split(got_TBHE, [run.length for each in runs for run in each])
        begins = [run.begin for each in runs for run in each]
        ordered = torch.cat([pieces[at] for at in sorted(range(len(begins)), key=begins.__getitem__)])
        return torch.split(ordered.transpose(0, 1), heads, dim=2)

    def to_tokens(self, y_BTHE: Tensor, runs: Sequence[Runs]) -> Tensor:
        """The other way, of attention's result."""
        size, counts = self.comm.size, [tokens_of(each) for each in runs]
        first = min(run.begin for each in runs for run in each)
        y_TBHE = y_BTHE.transpose(0, 1)
        sent = torch.cat([y_TBHE[run.begin - first : run.end - first] for each in runs for run in each])
        got = self._swapped(sent, counts, [counts[self.comm.rank]] * size)
        return got.view(size, -1, *got.shape[1:]).permute(2, 1, 0, 3, 4).flatten(2, 3)

    def _swapped(self, x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """Exchanged along dim 0, and its gradient the other way."""
        function: Any = _Swap
        y: Tensor = function.apply(x, self, sends, receives)
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

    axis: ContextAxis
    crossing: Crossing = COUNTED

    def __call__(self, counts: Tensor) -> Tensor:
        return self.axis.add(counts)


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
        self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, window: int = 0, cap: float = 0.0
    ) -> Tensor:
        return self.axis.attend(q_BTHE, k_BTKE, v_BTKE, self, window, cap)


def stretch_of(cache: Any, first: int, tokens: int) -> Any:
    """The same pass where some of its tokens stand alone, outside of attention: so many of them from `first`."""
    part = copy.copy(cache)
    part.positions_BT = cache.positions_BT[:, first : first + tokens]
    return part


def attended_runs(axis: ContextAxis, lengths: Sequence[int], documents: DocumentPlaces | None) -> AttendedRuns:
    """Of the last of some slices of the sequences, over all of them; each slice is shared out by itself."""
    begins = [sum(lengths[:number]) for number in range(len(lengths))]
    by_slice = [axis.runs(length, begin) for length, begin in zip(lengths, begins, strict=True)]
    keys = tuple(tuple(run for runs in by_slice for run in runs[rank]) for rank in range(axis.comm.size))
    return AttendedRuns(by_slice[-1], keys, None if documents is None else _ends(documents))


def _ends(documents: DocumentPlaces) -> DocumentEnds:
    positions_BS = documents.positions_BT
    tokens = positions_BS.shape[1]
    place_S = torch.arange(tokens, device=positions_BS.device)
    begins_BS = torch.where(positions_BS == 0, place_S, tokens)
    after_BS = torch.cat([begins_BS[:, 1:], begins_BS.new_full((len(begins_BS), 1), tokens)], dim=1)
    return DocumentEnds(place_S - positions_BS, after_BS.flip(1).cummin(dim=1).values.flip(1))
