"""Sequences that begin with a common prompt, in one row with one copy of it: what its tokens attend through.

The one idea: products and norms see each token once, without padding. For attention alone are keys and values laid out
by sequence: prompts over themselves, then what follows them over prompt and itself.

S: sequences; P: tokens of the longest prompt; A: of the longest own part; K = P + A; T: tokens of the row; N: tokens of
some sequences; H: query heads; E: head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemesh.model.soft_cap import attend_masked


class SharedPrompts:
    """A `KeyValueCache` that keeps nothing."""

    def __init__(self, places_S4: Tensor, device: torch.device) -> None:
        """`places_S4`, on the host and in the order of the row: begin and length of the prompt before a part, and of
        the part itself. Prompts, which have none before them, come first."""
        alone = int((places_S4[:, 1] == 0).cumprod(0).sum())
        pieces = [piece for piece in (places_S4[:alone], places_S4[alone:]) if len(piece)]
        self._calls = [_Call.of(piece, device) for piece in pieces]
        self.positions_BT = torch.cat([call.positions_N for call in self._calls])[None]
        self.capacity = int((places_S4[:, 1] + places_S4[:, 3]).max())

    def attend(
        self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, window: int = 0, cap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        tensors, options = (q_BTHE[0], k_BTKE[0], v_BTKE[0]), {"cap": cap, "sinks_H": sinks_H}
        return torch.cat([call.attend(*tensors, window, options) for call in self._calls])[None]


class _Call(NamedTuple):
    """Sequences that are attended to together."""

    own_SA: Tensor
    keys_SK: Tensor
    mask_SAK: Tensor
    away_SAK: Tensor
    """How far behind a token each key stands."""
    kept_N: Tensor
    """What of S x A is no padding."""
    positions_N: Tensor

    @staticmethod
    def of(places_S4: Tensor, device: torch.device) -> _Call:
        before_S1, shared_S1, begin_S1, count_S1 = places_S4[:, :, None].unbind(1)
        at_A, at_P = torch.arange(int(count_S1.max())), torch.arange(int(shared_S1.max()))
        is_own_SA, is_before_SP = at_A < count_S1, at_P < shared_S1
        own_SA, position_SA = (begin_S1 + at_A).where(is_own_SA, begin_S1), shared_S1 + at_A
        keys_SK = torch.cat(((before_S1 + at_P).where(is_before_SP, begin_S1), own_SA), 1)
        away_SAK = position_SA[:, :, None] - torch.cat((at_P.expand(len(places_S4), -1), position_SA), 1)[:, None]
        mask_SAK = torch.cat((is_before_SP, is_own_SA), 1)[:, None] & (away_SAK >= 0)
        kept_N = torch.nonzero(is_own_SA.flatten())[:, 0]
        tensors = (own_SA, keys_SK, mask_SAK, away_SAK, kept_N, position_SA.flatten()[kept_N])
        return _Call(*(tensor.to(device, non_blocking=True) for tensor in tensors))

    def attend(self, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, window: int, options: Mapping[str, Any]) -> Tensor:
        pairs = ((q_THE, self.own_SA), (k_TKE, self.keys_SK), (v_TKE, self.keys_SK))  # gradients add whole rows
        q, k, v = (x.index_select(0, at.flatten()).view(*at.shape, *x.shape[1:]).transpose(1, 2) for x, at in pairs)
        if q.is_cuda and q.shape[1] != k.shape[1]:  # the kernel that takes a mask takes no groups of heads
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        mask_SAK = self.mask_SAK & (self.away_SAK < window) if window else self.mask_SAK
        y = attend_masked(q, k, v, mask_SAK[:, None], **options)
        return y.transpose(1, 2).flatten(0, 1).index_select(0, self.kept_N)
