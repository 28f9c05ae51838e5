"""A step's plan as numbers: which tokens stand where, which places of the pool they fill, who attends to what.

The one idea: all sequences lie one after the other in a single row of tokens, so every product of the model sees one
large matrix and no padding. Only attention tells sequences apart. In plain torch those with as many new tokens and
about as many old ones are attended to together, padded to the longest of their group; our kernels are given tiles, a
few tokens of one sequence each, and a table of every sequence's pages.

R: sequences of a group; T: new tokens of each; S: tokens attended to; P: pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilemesh.kernels.paged_attention.reference import EVEN_SPLIT
from tilemesh.serve.scheduler import Scheduled

# A group's call costs about as much as attending to this many more tokens.
_WORTH_A_CALL = 32
_PADDING = 1.25
_MOST_KEYS = 65_536  # of a group: what is gathered for one call stays small beside the pool

SPLIT, FEW_SPLIT = 256, 64
"""Keys of a part in our kernels, where several programs share a sequence; and where only a few sequences decode."""
_FEW, _SHORT = 4, 16_384
"""Sequences, and tokens of the longest, up to which parts are small: adding many of them up takes time too."""
_ENOUGH, _EVEN = 256, 8192
"""Programs from which a GPU is full without parts, and tokens up to which no sequence keeps the others waiting."""


@dataclass(frozen=True)
class AttentionGroup:
    """Sequences that are attended to in one call: tokens `begin` to `begin + rows * tokens` of the pass."""

    begin: int
    rows: int
    tokens: int
    pages_RP: Tensor
    """The pages of each sequence; what is missing at the end of a shorter one is any page."""
    keys: int
    """S: tokens attended to by the longest."""
    mask_RTS: Tensor | None
    """Who may attend to what; None: everyone to everything, or the triangle where `causal`."""
    causal: bool
    local_RP: Tensor | None = None
    """As `pages_RP`, of layers with a window where these have pages of their own."""


@dataclass(frozen=True)
class TileSet:
    """Tokens `begin` to `end` of the pass in tiles, as `kernels.paged_attention` takes them."""

    begin: int
    end: int
    tiles_B4: Tensor
    """First tokens are counted from `begin`."""
    tile: int
    split: int
    longest: int


@dataclass(frozen=True)
class PageLayout:
    """Who attends to which pages, for our kernels."""

    tables_RM: Tensor
    sets: tuple[TileSet, ...]
    local_RM: Tensor | None = None
    """As `AttentionGroup.local_RP`."""


@dataclass(frozen=True)
class TileSizes:
    """Tokens of a tile and keys of a part: of sequences that decode, and of prompts (whose keys are in one part)."""

    decode: int
    prompt: int
    heads: int
    """Of keys: programs that a decoding sequence has in every part."""
    even: bool = False
    """As `paged_attention` takes it: a token's bits do not follow from the batch."""

    @property
    def prompt_split(self) -> int:
        """Keys of a part of prompts; 0: all in one."""
        return EVEN_SPLIT if self.even else 0

    def split(self, sequences: int, longest: int) -> int:
        """Keys of a part where so many sequences decode, none longer than `longest`; 0: all in one.

        Parts fill a GPU that has few sequences, and take a second kernel that adds them up.
        """
        if self.even:
            return EVEN_SPLIT
        if sequences * self.heads >= _ENOUGH and longest <= _EVEN:
            return 0
        return FEW_SPLIT if sequences <= _FEW and longest <= _SHORT else SPLIT


class TokenSpan(NamedTuple):
    """New tokens of one sequence: those of an entry, or a part of them."""

    entry: Scheduled
    begin: int
    end: int
    """Positions in the sequence."""
    wanted: range
    """Positions whose logits are wanted."""

    @property
    def tokens(self) -> Sequence[int]:
        known = self.entry.request.tokens
        if not self.entry.drafts:
            return known[self.begin : self.end]
        first_draft = self.entry.start + self.entry.count
        drafts = self.entry.drafts[max(0, self.begin - first_draft) : max(0, self.end - first_draft)]
        return [*known[self.begin : min(self.end, first_draft)], *drafts]


@dataclass(frozen=True)
class Batch:
    """The tokens of one pass of the model."""

    tokens_1T: Tensor
    positions_1T: Tensor
    places_T: Tensor
    """Where each token's keys and values go: page times the tokens of a page, plus its place in the page."""
    groups: tuple[AttentionGroup, ...]
    wanted: Tensor | None
    """Tokens of the pass whose logits are wanted; None: all."""
    pieces: tuple[TokenSpan, ...]
    """In the order of the tokens; `wanted` lists theirs one after the other."""
    layout: PageLayout | None = None
    """For our kernels; `groups` is empty then."""
    adapters: Sequence[int] = ()
    """The number of each token's adapter, 0 for none; empty: nobody has one."""
    local_places_T: Tensor | None = None
    """As `places_T`, of layers with a window where these have pages of their own."""


def token_span(entry: Scheduled, all_logits: bool) -> TokenSpan:
    """All of an entry. Logits are wanted of the tokens that something is drawn after, or of all."""
    known = entry.start + entry.count
    end = known + len(entry.drafts)
    first = entry.start if all_logits else known - 1 if entry.samples else end
    return TokenSpan(entry, entry.start, end, range(first, end))


def make_batch(
    pieces: Sequence[TokenSpan],
    page_tokens: int,
    device: torch.device,
    tile_sizes: TileSizes | None = None,
    padded: bool = True,
) -> Batch:
    """One pass over these. `tile_sizes`: for our kernels; without, for plain torch. `padded`: whether sequences that
    decode together are padded to the longest of them."""
    ordered = sorted(pieces, key=lambda piece: (piece.end - piece.begin, piece.end))
    tokens: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    local: list[int] = []
    wanted: list[int] = []
    begins: list[int] = []
    for piece in ordered:
        begins.append(len(tokens))
        if piece.end - piece.begin == 1 and piece.wanted and not piece.entry.local:  # most of the time
            at, pages = piece.begin, piece.entry.pages
            wanted.append(len(tokens))
            tokens += piece.tokens
            positions.append(at)
            places.append(pages[at // page_tokens] * page_tokens + at % page_tokens)
            continue
        wanted += [len(tokens) + position - piece.begin for position in piece.wanted]
        tokens += piece.tokens
        positions += range(piece.begin, piece.end)
        for pages, into in ((piece.entry.pages, places), (piece.entry.local, local)):
            if pages:
                into += [
                    pages[at // page_tokens] * page_tokens + at % page_tokens for at in range(piece.begin, piece.end)
                ]
    made = torch.tensor([tokens, positions, places, *([local] if local else [])], dtype=torch.int64)
    made = made.to(device, non_blocking=True)  # or the host would wait for the step before
    groups: tuple[AttentionGroup, ...] = ()
    layout = None
    if tile_sizes is None:
        groups = tuple(
            _group(ordered[a:b], begins[a], page_tokens, device, padded) for a, b in _together(ordered, padded)
        )
    else:
        layout = _layout(ordered, begins, page_tokens, device, tile_sizes)
    wanted_N = torch.tensor(wanted, dtype=torch.int64).to(device, non_blocking=True)
    return Batch(
        made[0:1],
        made[1:2],
        made[2],
        groups,
        wanted_N,
        tuple(ordered),
        layout,
        _adapters(ordered),
        made[3] if local else None,
    )


def local_batch(batch: Batch) -> Batch:
    """The same for layers with a window, where these have pages of their own."""
    assert batch.local_places_T is not None
    groups, layout = [], batch.layout
    for group in batch.groups:
        assert group.local_RP is not None
        groups.append(replace(group, pages_RP=group.local_RP))
    if layout is not None:
        assert layout.local_RM is not None
        layout = replace(layout, tables_RM=layout.local_RM)
    return replace(batch, places_T=batch.local_places_T, groups=tuple(groups), layout=layout)


def _adapters(ordered: Sequence[TokenSpan]) -> list[int]:
    if not any(piece.entry.request.adapter for piece in ordered):
        return []
    return [piece.entry.request.adapter for piece in ordered for _ in range(piece.begin, piece.end)]


def _layout(
    ordered: Sequence[TokenSpan], begins: Sequence[int], page_tokens: int, device: torch.device, sizes: TileSizes
) -> PageLayout:
    """Sequences that decode come first: they have one token each."""
    decoding = sum(piece.end - piece.begin == 1 for piece in ordered)
    sets = []
    for first, last, tile in ((0, decoding, sizes.decode), (decoding, len(ordered), sizes.prompt)):
        if first == last:
            continue
        begin = begins[first]
        tiles = [
            (row, begins[row] - begin + at - piece.begin, min(tile, piece.end - at), at)
            for row, piece in enumerate(ordered[first:last], first)
            for at in range(piece.begin, piece.end, tile)
        ]
        end = begins[last - 1] + ordered[last - 1].end - ordered[last - 1].begin
        longest = rounded(max(piece.end for piece in ordered[first:last]))
        made = torch.tensor(tiles, dtype=torch.int32, device=device)
        split = sizes.split(last - first, longest) if first < decoding else sizes.prompt_split
        sets.append(TileSet(begin, end, made, tile, split, longest))
    each, local = ([getattr(piece.entry, kind) for piece in ordered] for kind in ("pages", "local"))
    local_RM = _tables(ordered, local, page_tokens, device) if any(local) else None
    return PageLayout(_tables(ordered, each, page_tokens, device), tuple(sets), local_RM)


def _tables(
    ordered: Sequence[TokenSpan], each: Sequence[tuple[int, ...]], page_tokens: int, device: torch.device
) -> Tensor:
    """The pages of each sequence."""
    columns = rounded(max(-(-piece.end // page_tokens) for piece in ordered))
    tables = torch.zeros(len(ordered), columns, dtype=torch.int32)
    for row, piece in enumerate(ordered):
        pages = each[row][: -(-piece.end // page_tokens)]
        tables[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return tables.to(device, non_blocking=True)


def rounded(size: int) -> int:
    """To the next power of two, at least 64: what differs little from step to step is launched with the same sizes."""
    return max(64, 1 << (size - 1).bit_length())


def _together(ordered: Sequence[TokenSpan], padded: bool) -> Iterator[tuple[int, int]]:
    """Which of these, sorted by new tokens and length, share a call: where padding costs less than another call."""
    first = 0
    for index, piece in enumerate(ordered):
        head = ordered[first]
        same = piece.end - piece.begin == head.end - head.begin
        if same and not padded and piece.end - piece.begin == 1:
            continue
        large = (index + 1 - first) * piece.end > _MOST_KEYS and index > first
        if not same or large or piece.end > _PADDING * head.end + _WORTH_A_CALL:
            yield first, index
            first = index
    if ordered:
        yield first, len(ordered)


def _group(
    pieces: Sequence[TokenSpan], begin: int, page_tokens: int, device: torch.device, padded: bool
) -> AttentionGroup:
    tokens, keys = pieces[0].end - pieces[0].begin, pieces[-1].end
    count = -(-keys // page_tokens)
    tables: dict[str, Tensor] = {}
    for kind in ("pages", "local"):
        some = [getattr(piece.entry, kind)[: -(-piece.end // page_tokens)] for piece in pieces]
        if any(some):
            filled = [[*pages, *[pages[0]] * (count - len(pages))] for pages in some]
            tables[kind] = torch.tensor(filled, dtype=torch.int64).to(device)
    even = pieces[0].end == keys
    mask_RTS = None
    causal = even and tokens == keys and tokens > 1
    if not causal and not ((even or not padded) and tokens == 1):
        last_RT = torch.tensor([piece.begin for piece in pieces])[:, None] + torch.arange(tokens)
        mask_RTS = (torch.arange(keys) <= last_RT[:, :, None]).to(device)
    return AttentionGroup(begin, len(pieces), tokens, tables["pages"], keys, mask_RTS, causal, tables.get("local"))
