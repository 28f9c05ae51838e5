"""Keys and values in pages, and attention over them: the cache that a model is given when it serves.

The one idea: the pool of a layer is one tensor of places, a page being `page_tokens` of them in a row. New keys and
values are written to their places. On a GPU our kernel then reads the pages where they lie, and so does a CPU's for
float32 and bfloat16. Otherwise, in plain torch, the pages of a group of sequences are gathered into one
padded tensor: that reads and writes every byte once more (docs/serve/LOG.md).
In 8 bits, keys and values are codes with a scale for each token and head; torch's path decodes what it gathers.

R: sequences of a group; T: new tokens of each; S: tokens attended to; H: query heads; K: key and value heads;
G: query heads per key head; E: head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.errors import UsageError
from tilemesh.kernels.paged_attention.codes import CODES, put_pages, take_pages
from tilemesh.kernels.paged_attention.cpu import attend_chunks, attend_decoding, library, serves_pages, turn_and_store
from tilemesh.kernels.paged_attention.reference import paged_attention, prompt_tile
from tilemesh.kernels.paged_attention.store import store_pages
from tilemesh.model.attend_alone import attend_in_blocks
from tilemesh.model.soft_cap import attend_masked
from tilemesh.serve.batch import AttentionGroup, Batch, PageLayout, TileSizes, local_batch
from tilemesh.serve.memory import GivenBack, untouched_zeros


class StoredPages(NamedTuple):
    """Keys and values of a layer."""

    held: Tensor
    """(2, pages, page_tokens, K, E): numbers, or codes."""
    scales: Tensor | None
    """(2, pages, page_tokens, K), of codes."""

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, code: str) -> StoredPages:
        # Zeros: a weight of 0 times NaN in unused memory would be NaN.
        held = untouched_zeros(shape, CODES[code] if code else dtype, device)
        return cls(held, untouched_zeros(shape[:-1], torch.float32, device) if code else None)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.held,) if self.scales is None else (self.held, self.scales)

    def scales_of(self, which: int) -> Tensor | None:
        """0: of the keys; 1: of the values."""
        return None if self.scales is None else self.scales[which]

    def put(self, places_T: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> None:
        for which, x_TKE in enumerate((k_TKE, v_TKE)):
            put_pages(self.held[which], self.scales_of(which), places_T, x_TKE)

    def take(self, which: int, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """(pages, page_tokens, K, E) as numbers."""
        return take_pages(self.held[which], self.scales_of(which), pages, dtype)


class DecodingPages(NamedTuple):
    """Where sequences that decode have a layer's keys and values."""

    keys: Tensor
    values: Tensor
    tables_RM: Tensor
    places_R: Tensor
    positions_R: Tensor
    longest: int


class PagedKeyValues:
    """A `KeyValueCache` over a pool of pages. Call `prepare` before each pass of the model.

    With `invariant` keys are reduced as in `model.attend_alone`: a token's bits depend on its own sequence alone.
    """

    def __init__(
        self,
        pages: int,
        page_tokens: int,
        context: int,
        device: torch.device | str = "cpu",
        swap_pages: int = 0,
        invariant: bool = False,
        implementation: str = "auto",
        code: str = "",
        local_pages: int = 0,
    ) -> None:
        """`implementation`: of our kernels, as `tilemesh.kernels` takes it. `auto`: they compute on a GPU, and on a CPU
        plain torch does, with pages gathered. `code`: int8 or fp8, where keys and values are kept in 8 bits.
        `local_pages`: of layers with a window, where these have pages of their own."""
        self.pages, self.page_tokens, self.capacity = pages, page_tokens, context
        self.local_pages = local_pages
        self.device = torch.device(device)
        self.swap_pages, self.invariant = swap_pages, invariant
        self.implementation, self.code = implementation, code
        self.by_kernel = self.device.type == "cuda" or implementation != "auto"
        """Whether attention is our kernels': batches then need a layout."""
        self._swapped: dict[int, StoredPages] = {}  # the same with the CPU's pages
        self._stored: dict[int, StoredPages] = {}  # by layer
        self._batch: Batch | None = None
        self._local_batch: Batch | None = None  # the same with the pages of layers with a window
        self._given_back: GivenBack | None = None

    def sleep(self) -> None:
        """Give the memory of all pages back, with what they hold."""
        self._swapped.clear()
        if self._given_back is None:
            self._given_back = GivenBack(part for stored in self._stored.values() for part in stored.parts)

    def wake(self) -> None:
        if self._given_back is not None:
            self._given_back.take()
            self._given_back = None

    @property
    def positions_BT(self) -> Tensor:
        return self._prepared.positions_1T

    @property
    def _prepared(self) -> Batch:
        if self._batch is None:
            raise UsageError("a pass over pages that nobody prepared: call prepare first")
        return self._batch

    def _seen_by(self, window: int) -> Batch:
        """The batch as a layer has it: one with a window may have pages of its own."""
        batch = self._prepared
        return batch if self._local_batch is None or not window else self._local_batch

    def prepare(self, batch: Batch) -> PagedKeyValues:
        self._batch = batch
        self._local_batch = local_batch(batch) if self.local_pages else None
        return self

    def joins(self, dtype: torch.dtype) -> bool:
        """Whether there is `attend_joined`, for what one product of query, key and value gives."""
        in_c = self.device.type == "cpu" and not self.invariant and not self.code
        return self.by_kernel or (in_c and library(dtype) is not None)

    def decoding(self, layer: int, dtype: torch.dtype, kv_heads: int, width: int, window: int) -> DecodingPages | None:
        """Of a pass in which every sequence decodes one token and nothing is padded; None: it is another."""
        batch = self._seen_by(window)
        if len(batch.groups) != 1 or batch.groups[0].tokens > 1 or batch.groups[0].mask_RTS is not None:
            return None
        keys, values = self._pool(layer, dtype, kv_heads, width, batch is not self._batch).held
        group = batch.groups[0]
        return DecodingPages(keys, values, group.pages_RP, batch.places_T, batch.positions_1T[0], group.keys)

    def tile_sizes(self, heads: int, kv_heads: int, width: int, itemsize: int) -> TileSizes | None:
        """How our kernels want the tokens of a pass."""
        if not self.by_kernel:
            return None
        tile = prompt_tile(heads // kv_heads, width, itemsize, self.invariant)
        return TileSizes(1, tile, kv_heads, self.invariant)

    def _pool(self, layer: int, dtype: torch.dtype, kv_heads: int, width: int, is_local: bool) -> StoredPages:
        """Keys and values of a layer; its memory is taken when it first comes."""
        if layer not in self._stored:
            # One page more takes what padding writes.
            shape = (2, (self.local_pages if is_local else self.pages) + 1, self.page_tokens, kv_heads, width)
            self._stored[layer] = StoredPages.empty(shape, dtype, self.device, self.code)
        return self._stored[layer]

    def attend_joined(
        self,
        layer: int,
        qkv_BTF: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        *,
        heads: int,
        kv_heads: int,
        window: int = 0,
        dtype: torch.dtype | None = None,
        **scores: Any,
    ) -> Tensor:
        batch = self._seen_by(window)
        width = qkv_BTF.shape[2] // (heads + 2 * kv_heads)
        wanted = dtype or qkv_BTF.dtype
        stored = self._pool(layer, wanted, kv_heads, width, batch is not self._batch)
        scales = None if stored.scales is None else (stored.scales[0], stored.scales[1])
        tables = None if rotary is None else (rotary[0][0, :, 0], rotary[1][0, :, 0])
        if batch.layout is None:
            q_THE = turn_and_store(qkv_BTF[0], tables, batch.places_T, stored.held[0], stored.held[1], heads)
            return self._attend_groups(batch, q_THE, stored, window, scores).to(qkv_BTF.dtype)[None]
        q_THE = store_pages(
            qkv_BTF, tables, batch.places_T, *stored.held, heads=heads, scales=scales, dtype=wanted,
            implementation=self.implementation,
        )  # fmt: skip
        return self._attend_tiles(batch.layout, q_THE, stored, window, scores)[None]

    def _attend_tiles(
        self, layout: PageLayout, q_THE: Tensor, stored: StoredPages, window: int, scores: Mapping[str, Any]
    ) -> Tensor:
        results = [
            paged_attention(
                q_THE[tokens.begin : tokens.end],
                stored.held[0],
                stored.held[1],
                layout.tables_RM,
                tokens.tiles_B4,
                stored.scales_of(0),
                stored.scales_of(1),
                scores.get("sinks_H"),
                tile=tokens.tile,
                split=tokens.split,
                longest=tokens.longest,
                window=window,
                cap=scores.get("cap", 0.0),
                even=self.invariant,
                settled=True,  # between the batch's numbers and here there is at least the product of queries and keys
                implementation=self.implementation,
            )
            for tokens in layout.sets
        ]
        if results and layout.sets[-1].end < len(q_THE):  # what follows is padding
            results.append(q_THE[layout.sets[-1].end :])
        return results[0] if len(results) == 1 else torch.cat(results)

    def attend(
        self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, window: int = 0, **scores: Any
    ) -> Tensor:
        batch = self._seen_by(window)
        kv_heads, width = k_BTKE.shape[2:]
        stored = self._pool(layer, k_BTKE.dtype, kv_heads, width, batch is not self._batch)
        # Padding writes to place -1: the last one of the page that no sequence has.
        stored.put(batch.places_T, k_BTKE[0], v_BTKE[0])
        if batch.layout is not None:
            return self._attend_tiles(batch.layout, q_BTHE[0], stored, window, scores)[None]
        return self._attend_groups(batch, q_BTHE[0], stored, window, scores)[None]

    def _attend_groups(
        self, batch: Batch, q_THE: Tensor, stored: StoredPages, window: int, scores: Mapping[str, Any]
    ) -> Tensor:
        y_THE = torch.empty_like(q_THE)
        for group in batch.groups:
            rows = slice(group.begin, group.begin + group.rows * group.tokens)
            q_RTHE = q_THE[rows].view(group.rows, group.tokens, *q_THE.shape[1:])
            if not self.invariant and not self.code and serves_pages(stored.held):
                (keys, values), positions_T = stored.held, batch.positions_1T[0, rows]
                if group.tokens == 1:
                    y_THE[rows] = attend_decoding(
                        q_RTHE[:, 0], keys, values, group.pages_RP, positions_T, group.keys, window, **scores
                    )
                else:
                    positions_RT = positions_T.view(group.rows, group.tokens)
                    y_RTHE = attend_chunks(q_RTHE, keys, values, group.pages_RP, positions_RT, window, **scores)
                    y_THE[rows] = y_RTHE.flatten(0, 1)
                continue
            attend = self._attend_in_blocks if self.invariant else _attend_together
            y_THE[rows] = attend(group, q_RTHE, stored, window, scores).flatten(0, 1)
        return y_THE

    def _attend_in_blocks(
        self, group: AttentionGroup, q_RTHE: Tensor, stored: StoredPages, window: int, scores: Mapping[str, Any]
    ) -> Tensor:
        """One sequence after the other, in the blocks of `model.attend_alone`."""
        results = []
        for row in range(group.rows):
            block = partial(self._key_block, stored, group.pages_RP[row], q_RTHE.dtype)
            last = group.keys - 1 if group.mask_RTS is None else int(group.mask_RTS[row, -1].sum()) - 1
            results.append(attend_in_blocks(q_RTHE[row], last + 1 - group.tokens, block, window, **scores))
        return torch.stack(results)

    def _key_block(
        self, stored: StoredPages, pages: Tensor, dtype: torch.dtype, begin: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """As `KeyBlock` says: of one sequence's pages; behind its last one, any of page 0."""
        first, last = begin // self.page_tokens, -(-(begin + count) // self.page_tokens)
        some = functional.pad(pages[first:last], (0, max(0, last - len(pages))))
        skipped = begin - first * self.page_tokens
        k_SKE, v_SKE = (stored.take(which, some, dtype).flatten(0, 1)[skipped : skipped + count] for which in range(2))
        return k_SKE, v_SKE

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages to the CPU's pool: (page, page there)."""
        if pairs:
            source, target = torch.tensor(pairs, dtype=torch.int64).t()
            for layer, stored in self._stored.items():
                if layer not in self._swapped:
                    shape = (2, self.swap_pages, *stored.held.shape[2:])
                    self._swapped[layer] = StoredPages.empty(shape, stored.held.dtype, torch.device("cpu"), self.code)
                for into, part in zip(self._swapped[layer].parts, stored.parts, strict=True):
                    into[:, target] = part[:, source.to(self.device)].cpu()

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages back from the CPU's pool: (page there, page)."""
        if pairs:
            source, target = torch.tensor(pairs, dtype=torch.int64).t()
            for layer, swapped in self._swapped.items():
                for into, part in zip(self._stored[layer].parts, swapped.parts, strict=True):
                    into[:, target.to(self.device)] = part[:, source].to(self.device)


def _seen(group: AttentionGroup, window: int) -> Tensor | None:
    """Who may attend to what where a token attends to the last `window` tokens, its own included; 0: to all."""
    if not 0 < window < group.keys:
        return group.mask_RTS
    device = group.pages_RP.device
    key_S = torch.arange(group.keys, device=device)
    if group.mask_RTS is not None:
        last_RT = group.mask_RTS.sum(-1) - 1
        return group.mask_RTS & (key_S > last_RT[..., None] - window)
    last_T = torch.arange(group.keys - group.tokens, group.keys, device=device)[:, None]
    return ((key_S <= last_T) & (key_S > last_T - window)).expand(group.rows, -1, -1)


def _attend_together(
    group: AttentionGroup, q_RTHE: Tensor, stored: StoredPages, window: int, scores: Mapping[str, Any]
) -> Tensor:
    mask_RTS = _seen(group, window)
    kv_heads, width = stored.held.shape[3:]
    shared = q_RTHE.shape[2] // kv_heads
    k_RKSE, v_RKSE = (
        stored.take(which, group.pages_RP.flatten(), q_RTHE.dtype)
        .view(group.rows, -1, kv_heads, width)[:, : group.keys]
        .transpose(1, 2)
        for which in range(2)
    )
    if group.tokens == 1:
        # The query heads that share a key head stand as queries of one head: no key is read twice.
        q_RKGE = q_RTHE[:, 0].view(group.rows, kv_heads, shared, -1)
        mask = None if mask_RTS is None else mask_RTS[:, None]
        return attend_masked(q_RKGE, k_RKSE, v_RKSE, mask, **scores).flatten(1, 2)[:, None]
    y_RHTE = attend_masked(
        q_RTHE.transpose(1, 2),
        k_RKSE,
        v_RKSE,
        None if mask_RTS is None else mask_RTS[:, None],
        is_causal=group.causal and mask_RTS is None,
        **scores,
    )
    return y_RHTE.transpose(1, 2)
