"""Keys and values of earlier tokens: what a model asks of a cache, and a cache in contiguous memory.

The one idea: the model computes query, key and value of a pass's new tokens and hands them to `attend`. Where keys and
values are kept, and which of them a token attends to, is the cache's business; where each token stands in its own
sequence, the cache says by `positions_BT`. So sequences of different lengths may share a pass, one per row and padded,
or all of them packed into a single row; and under tensor parallelism a rank's cache simply sees its own heads.
It is not a scheduler: which tokens come next, and when a sequence ends, is decided by whoever calls the model.

B: rows; T: tokens of this pass; S: tokens attended to; H: query heads; K: key and value heads; E: head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.model.soft_cap import attend_masked


class KeyValueCache(Protocol):
    """What `Transformer.forward(tokens_BT, cache=...)` asks for. Its caller prepares it before each pass."""

    @property
    def capacity(self) -> int:
        """The most tokens that a sequence may have; at most the model's context. Positions are below it."""

    @property
    def positions_BT(self) -> Tensor:
        """Where each token of this pass stands in its own sequence: whole numbers, shaped and placed as the tokens."""

    def attend(
        self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, window: int = 0, cap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Keep this layer's keys and values and return the attention's output (B, T, H, E).

        A token attends to its own sequence, up to and including its own position, with softmax(q k / sqrt(E)); query
        heads H/K at a time share a key head. Rotary embeddings are already applied. `window`: to the last so many
        tokens only, its own included; 0: to all. `cap`, `sinks_H`: as `model.soft_cap`. Each layer calls once per pass.
        """


def check_cache(cache: KeyValueCache, tokens_BT: Tensor, context: int) -> None:
    """Nothing is read off a device here: positions stay below the capacity, which is a number of the host."""
    if cache.positions_BT.shape != tokens_BT.shape:
        raise UsageError(
            f"tokens are {tuple(tokens_BT.shape)} and the cache is prepared for {tuple(cache.positions_BT.shape)}: "
            "expected a position per token; prepare the cache before each pass"
        )
    if cache.capacity > context:
        raise UsageError(
            f"a cache for {cache.capacity} tokens per sequence: the model's context is {context}; "
            "make it with a smaller capacity"
        )


class DenseCache:
    """One sequence per row, each with memory for `capacity` tokens, which is taken when a layer first comes.

    `extend` prepares a pass: `model(prompt_BT, cache=cache.extend(5))`, then `model(next_BT, cache=cache.extend(1))`.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.lengths = [0] * rows
        """Tokens of each row, those of the pass that is prepared included."""
        self.positions_BT = torch.empty(rows, 0, dtype=torch.int64, device=device)
        self._even = True  # whether all rows had and get the same number of tokens
        self._slots_BT = self.positions_BT
        self._mask_BTS: Tensor | None = None
        self._window_masks: dict[int, Tensor] = {}
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._attended: set[int] = set()  # layers that this pass has come through

    def extend(self, counts: int | Sequence[int]) -> DenseCache:
        """Make room for the tokens of one pass: as many in every row, or each row's number.

        Rows that get fewer tokens than the longest are padded at their end, with any token; the logits there mean
        nothing. A row may get none.
        """
        rows = len(self.lengths)
        each = [counts] * rows if isinstance(counts, int) else list(counts)
        if len(each) != rows or min(each, default=0) < 0:
            raise UsageError(f"extend by {counts}: expected a number of at least 0 for each of the cache's {rows} rows")
        starts, ends = self.lengths, [start + more for start, more in zip(self.lengths, each, strict=True)]
        seen, tokens = max(ends, default=0), max(each, default=0)
        if seen > self.capacity:
            raise UsageError(f"{seen} tokens: the cache has room for {self.capacity}; make it with a larger capacity")
        device = self.positions_BT.device
        step_T = torch.arange(tokens, device=device)
        positions_BT = torch.tensor(starts, device=device)[:, None] + step_T
        self._even = len(set(starts)) <= 1 and len(set(each)) <= 1
        self._mask_BTS = None
        if self._even:
            # With nothing before them torch's own triangle serves, and a single token attends to all there is.
            if 1 < tokens < seen:
                self._mask_BTS = torch.arange(seen, device=device) <= positions_BT[:, :, None]
        else:
            padding_BT = step_T >= torch.tensor(each, device=device)[:, None]
            self._slots_BT = positions_BT.masked_fill(padding_BT, self.capacity)
            positions_BT = positions_BT.masked_fill(padding_BT, 0)  # one that every table of positions has
            self._mask_BTS = torch.arange(seen, device=device) <= positions_BT[:, :, None]
        self.lengths, self.positions_BT = ends, positions_BT
        self._attended.clear()
        self._window_masks.clear()
        return self

    def again(self) -> DenseCache:
        """Prepare the last pass once more: its keys and values are written over. For timing one pass many times."""
        self._attended.clear()
        return self

    def _mask(self, window: int) -> Tensor | None:
        """Which keys each token attends to; None: those up to its own position, by torch's own triangle."""
        seen = max(self.lengths, default=0)
        if not 0 < window < seen:
            return self._mask_BTS
        if window not in self._window_masks:
            key_S = torch.arange(seen, device=self.positions_BT.device)
            last_BT1 = self.positions_BT[:, :, None]
            self._window_masks[window] = (key_S <= last_BT1) & (key_S > last_BT1 - window)
        return self._window_masks[window]

    def attend(
        self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, window: int = 0, cap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if layer in self._attended:
            raise UsageError(f"layer {layer} came twice for the same tokens: call extend before each pass")
        self._attended.add(layer)
        rows, tokens, kv_heads, width = k_BTKE.shape
        if layer not in self._stored:
            # One slot more takes what padding writes. Zeros: a weight of 0 times NaN in unused memory would be NaN.
            shape = (rows, kv_heads, self.capacity + 1, width)
            self._stored[layer] = (k_BTKE.new_zeros(shape), v_BTKE.new_zeros(shape))
        keys, values = self._stored[layer]
        seen = max(self.lengths, default=0)
        if self._even:
            keys[:, :, seen - tokens : seen] = k_BTKE.transpose(1, 2)
            values[:, :, seen - tokens : seen] = v_BTKE.transpose(1, 2)
        else:
            row_B1 = torch.arange(rows, device=keys.device)[:, None]
            keys[row_B1, :, self._slots_BT] = k_BTKE
            values[row_B1, :, self._slots_BT] = v_BTKE
        mask_BTS = self._mask(window)
        y_BHTE = attend_masked(
            q_BTHE.transpose(1, 2),
            keys[:, :, :seen],
            values[:, :, :seen],
            None if mask_BTS is None else mask_BTS[:, None],
            is_causal=mask_BTS is None and tokens == seen,
            cap=cap,
            sinks_H=sinks_H,
        )
        return y_BHTE.transpose(1, 2)
