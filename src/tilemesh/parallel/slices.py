"""Attention of a sequence that passes through a chunk in slices (TeraPipe), forward and backward.

The one idea: a slice's keys and values are results of its own graph and inputs of the graphs of later slices. Later
slices are given them detached, so that autograd adds up their gradients there; and when the slice's own turn comes in
backward, after all later ones, its keys and values are further roots, with the gradients that were added up.

B: rows; T: tokens of the slice; S: tokens up to its end; H: query heads; K: key and value heads; E: head width.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemesh.model.documents import DocumentPlaces
from tilemesh.model.soft_cap import attend_masked
from tilemesh.parallel.context import ContextAxis, attended_runs


class _Pair(NamedTuple):
    """Keys and values of one slice in one layer: as its graph made them, and as later slices are given them."""

    own: tuple[Tensor, Tensor]
    detached: tuple[Tensor, Tensor]


class SliceCache:
    """One slice's view of its microbatch, as `model/cache.py` asks for it."""

    def __init__(
        self,
        earlier: list[SliceCache],
        begin: int,
        tokens_BT: Tensor,
        capacity: int,
        documents: DocumentPlaces | None = None,
        axis: ContextAxis | None = None,
    ) -> None:
        """`documents`: of the sequences up to the slice's end, where several are packed into one. `axis`: the ranks
        that share its tokens."""
        self.earlier, self.begin, self.capacity, self.axis = earlier, begin, capacity, axis
        rows, tokens = tokens_BT.shape
        positions_T = torch.arange(begin, begin + tokens, device=tokens_BT.device)
        positions_BT = positions_T.expand(rows, tokens) if documents is None else documents.positions_BT[:, begin:]
        self.positions_BT = positions_BT if axis is None else axis.own(positions_BT)
        self.number_BS = None if documents is None else documents.number_BT
        self.lengths: tuple[int, ...] = (*(earlier[-1].lengths if earlier else ()), tokens)
        self.runs = None if axis is None else attended_runs(axis, self.lengths, documents)
        self.pairs: dict[int, _Pair] = {}

    def attend(
        self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, window: int = 0, cap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if self.axis is None or self.runs is None:
            return self._over_slices(layer, q_BTHE, k_BTKE, v_BTKE, window, cap, sinks_H)
        sinks_H = self.axis.of_heads(sinks_H)
        q, k, v = self.axis.to_heads((q_BTHE, k_BTKE, v_BTKE), self.runs.shares)
        if self.axis.exchange == "heads":
            y_BTHE = self._over_slices(layer, q, k, v, window, cap, sinks_H)
        else:
            pairs = self._with_earlier(layer, k, v)
            y_BTHE = self.axis.go_round(q, *pairs, self.runs, window, cap=cap, sinks_H=sinks_H)
        return self.axis.to_tokens(y_BTHE, self.runs.shares)

    def _with_earlier(self, layer: int, k_BTKE: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all slices so far."""
        keys, values = (own.detach().requires_grad_(own.requires_grad) for own in (k_BTKE, v_BTKE))
        self.pairs[layer] = _Pair((k_BTKE, v_BTKE), (keys, values))
        before = [slice_.pairs[layer].detached for slice_ in self.earlier]
        keys_BSKE = torch.cat([*(keys for keys, _ in before), k_BTKE], dim=1)
        return keys_BSKE, torch.cat([*(values for _, values in before), v_BTKE], dim=1)

    def _over_slices(
        self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: int, cap: float,
        sinks_H: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Attention to the slices so far, all tokens of which are here."""
        keys_BSKE, values_BSKE = self._with_earlier(layer, k_BTKE, v_BTKE)
        seen, tokens = keys_BSKE.shape[1], q_BTHE.shape[1]
        mask_TS = None
        if seen > tokens or 0 < window < seen or self.number_BS is not None:
            positions_S = torch.arange(seen, device=q_BTHE.device)
            last_T1 = torch.arange(self.begin, self.begin + tokens, device=q_BTHE.device)[:, None]
            mask_TS = positions_S <= last_T1
            if window:
                mask_TS &= positions_S > last_T1 - window
        if mask_TS is not None and self.number_BS is not None:  # (B, 1, T, S)
            mask_TS = mask_TS & (self.number_BS[:, None, self.begin :, None] == self.number_BS[:, None, None])
        q, k, v = (x.transpose(1, 2) for x in (q_BTHE, keys_BSKE, values_BSKE))
        y = attend_masked(q, k, v, mask_TS, is_causal=mask_TS is None, cap=cap, sinks_H=sinks_H)
        return y.transpose(1, 2)

    def roots(self) -> tuple[list[Tensor], list[Tensor]]:
        """Where backward begins beside the slice's output, and with which gradients: what later slices attended to."""
        own, gradients = [], []
        for pair in self.pairs.values():
            for tensor, detached in zip(pair.own, pair.detached, strict=True):
                if detached.grad is not None:
                    own.append(tensor)
                    gradients.append(detached.grad)
        return own, gradients


@functools.cache
def outside_of_graphs() -> type[SliceCache]:
    """The same for compiled layers, which call it as it is: what later slices are given are leaves of their graphs."""
    apart: Any = torch.compiler.disable

    class CalledCache(SliceCache):
        attend = apart(SliceCache.attend)

    return CalledCache
