"""Documents packed into one sequence, none of which sees another.

B: rows; T: tokens; H: query heads; K: key and value heads; E: head width; S: tokens seen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilemesh.kernels.attention.reference import attention as windowed_attention
from tilemesh.model.soft_cap import attend_masked


class DocumentPlaces(NamedTuple):
    """Of tokens in sequences that several documents are packed into."""

    positions_BT: Tensor
    """Counted from the beginning of each token's document."""
    number_BT: Tensor
    """Of the token's document in its sequence."""
    starts: Tensor
    """Of all sequences laid end to end: where each document begins, and the end of the last."""


def document_places(tokens_BT: Tensor) -> DocumentPlaces:
    """Where documents begin: with each sequence, and with each token t that is given as -1 - t."""
    rows, tokens = tokens_BT.shape
    begins_BT = tokens_BT < 0
    begins_BT[:, 0] = True
    place_T = torch.arange(tokens, device=tokens_BT.device)
    first_BT = torch.where(begins_BT, place_T, 0).cummax(dim=1).values
    starts = torch.cat([begins_BT.flatten().nonzero()[:, 0], torch.tensor([rows * tokens], device=tokens_BT.device)])
    return DocumentPlaces(place_T - first_BT, begins_BT.cumsum(dim=1), starts)


def unmarked(tokens_BT: Tensor) -> Tensor:
    """Tokens as the vocabulary has them, those that begin a document too."""
    return torch.where(tokens_BT < 0, -1 - tokens_BT, tokens_BT)


def attend_within(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    documents: DocumentPlaces,
    window: int = 0,
    end_to_end: bool | None = None,
    cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention in which no token sees another document.

    `end_to_end`: by the operator for packed sequences, all rows as one, which on a GPU has a kernel; otherwise by a
    mask over each row. None: whichever is quicker on this device. `cap`: as `model.soft_cap`, by a mask; `sinks_H`.
    """
    rows, _, tokens, _ = q_BHTE.shape
    y_BHTE: Tensor
    if end_to_end is None:
        end_to_end = q_BHTE.is_cuda and q_BHTE.dtype != torch.float64 and not cap
    if end_to_end:
        laid = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q_BHTE, k_BKTE, v_BKTE))
        y_BHTE = windowed_attention(*laid, documents.starts, sinks_H, causal=True, window=window)
        return y_BHTE[0].reshape(-1, rows, tokens, y_BHTE.shape[-1]).transpose(0, 1)
    number_BT = documents.number_BT
    seen_BTS = number_BT[:, :, None] == number_BT[:, None, :]
    place = torch.arange(tokens, device=number_BT.device)
    distance = place[:, None] - place
    seen_BTS = seen_BTS & (distance >= 0)
    if window:
        seen_BTS = seen_BTS & (distance < window)
    return attend_masked(q_BHTE, k_BKTE, v_BKTE, seen_BTS[:, None], cap=cap, sinks_H=sinks_H)
