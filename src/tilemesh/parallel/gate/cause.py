"""What a difference looks like: the mistakes that layouts are made with leave gradients, norms and activations that can
be told apart.

Each is compared with what it would be after such a mistake: scaled by a count of the layout, made of one replica's or
one microbatch's rows, a part of the norm counted twice, microbatches that changed places. What fits to the tolerance is
said; nothing is said where none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tilemesh.core.plan import ParallelPlan
from tilemesh.core.sequence import zigzag
from tilemesh.model.loss import loss_sum
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.gate import alone
from tilemesh.parallel.gate.cases import TOKENS, microbatches

_CLOSE = 10
"""Times the tolerance for the place of a difference: what explains one is compared with all of it."""

_SHARP = 0.01
"""Where values are compared more loosely, in bf16, anything would look like something."""
_SWAPPED, _LATER, _TURNS = 1, 2, 1000


def gradient_cause(
    layout: ParallelPlan,
    whole: Transformer,
    name: str,
    gradient: Tensor,
    wanted: Tensor,
    tolerance: float,
    scale: float = 1.0,
    packed: bool = False,
) -> str:
    """What the wrong gradient of a parameter is, beside the right one; empty where it is nothing known. `scale`: of the
    loss. `packed`: as a case has it."""
    size = float(wanted.double().norm())
    if tolerance > _SHARP or not size or not bool(torch.isfinite(gradient).all()):
        return ""
    ratio = float((gradient.double() * wanted.double()).sum()) / size**2
    if _is_close(gradient, ratio * wanted.double(), tolerance):
        return f": {ratio:.4g} times what it should be{_scaled(layout, ratio, tolerance)}"
    for words, value in _partial(layout, whole, name, scale, packed):
        if _is_close(gradient, value, tolerance):
            return f": as if {words}"
    return ""


def norm_cause(norm: float, gradients: Mapping[str, Tensor], tolerance: float, scale: float = 1.0) -> str:
    """What counts wrongly in a norm of gradients that are right."""
    if tolerance > _SHARP or not math.isfinite(norm):
        return "a part counts wrongly"
    squares = {name: float(gradient.double().square().sum()) for name, gradient in gradients.items()}
    whole = sum(squares.values())
    ratio = norm**2 / whole
    if scale != 1 and abs(ratio / scale**2 - 1) < _CLOSE * tolerance:
        return f"as if the loss scale of {scale:g} were not taken out of it"
    if ratio > 1.5 and abs(ratio - round(ratio)) < _CLOSE * tolerance * ratio:
        return f"as if every part were counted {_times(round(ratio))}"
    for name, square in squares.items():
        times = 1 + (norm**2 - whole) / square if square else math.nan
        # The square of one small parameter says little beside rounding of the whole.
        is_whole = times > -0.5 and abs(times - round(times)) < math.sqrt(tolerance)
        if square > math.sqrt(tolerance) * whole and is_whole:
            return f"as if {name} were counted {_times(round(times))}"
    return "a part counts wrongly"


def order_cause(seen: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> int:
    """Which microbatches differ at a place in the forward pass, for `order_words`: a number, so that ranks can tell
    one another; 0: nothing that is known."""
    if tolerance > _SHARP or len(seen) < 2 or len(seen) != len(wanted):
        return 0
    off = [turn for turn in range(len(seen)) if not _same(seen[turn], wanted[turn], tolerance)]
    if off and off[0] > 0 and off == list(range(off[0], len(seen))):
        return _TURNS**2 * _LATER + off[0]
    if len(off) == 2 < len(seen):
        return _TURNS**2 * _SWAPPED + _TURNS * off[0] + off[1]
    return 0


def order_words(code: int) -> str:
    """To go after a place."""
    kind, turns = divmod(code, _TURNS**2)
    if kind == _SWAPPED:
        first, second = divmod(turns, _TURNS)
        return f", in microbatches {first} and {second} alone: as if their order were wrong"
    if kind == _LATER:
        return f", from microbatch {turns} on: as if the weights changed within the step"
    return ""


def _scaled(layout: ParallelPlan, ratio: float, tolerance: float) -> str:
    """Which counts of the layout a factor is; several may be the same."""
    causes = (
        (layout.accumulation, f"it were not divided by the {layout.accumulation} microbatches"),
        (layout.dp, f"it were not divided by the {layout.dp} replicas"),
        (layout.tp, f"each of {layout.tp} tensor-parallel ranks counted all of it"),
        (layout.cp, f"each of {layout.cp} ranks that share a sequence counted all of it"),
        (layout.pp, f"each of {layout.pp} stages counted all of it"),
        (2, "it were counted twice"),
    )
    words = [words for count, words in causes if count > 1 and abs(ratio - count) < _CLOSE * tolerance * count]
    if not words and any(count > 1 and abs(ratio * count - 1) < _CLOSE * tolerance for count, _ in causes):
        count = round(1 / ratio)
        axes = [axis for axis, size in layout.axes.items() if size == count]
        words = [
            f"it were divided by {count} once too often" + f", as many as ranks of {' or '.join(axes)}" * bool(axes)
        ]
    return f", as if {' or '.join(words)}" if words else ""


def _partial(
    layout: ParallelPlan, whole: Transformer, name: str, scale: float, packed: bool
) -> Iterator[tuple[str, Tensor]]:
    """Gradients that lack some rows or tokens of the batch, and what is missing then."""
    of_part = _parts_of(whole, name, packed)
    parts = [
        [of_part(slice(row, row + rows), [*range(TOKENS)]) for row, rows in microbatches(layout, replica)]
        for replica in range(layout.dp)
    ]
    replicas = [torch.stack(of_replica).sum(0) for of_replica in parts]
    if layout.zero_group:
        for first in range(0, layout.dp, layout.zero_group):
            last = first + layout.zero_group - 1
            value = torch.stack(replicas[first : last + 1]).sum(0)
            yield f"only replicas {first} to {last} counted: a sum between groups of replicas is missing", value
    for rank in range(layout.cp if layout.cp > 1 else 0):
        tokens = [at for run in zigzag(TOKENS, layout.cp, rank) for at in range(run.begin, run.end)]
        value = of_part(slice(None), tokens)
        yield f"only the tokens of rank {rank} of cp counted: a sum along cp is missing", value
    if layout.dp > 1:
        for replica, value in enumerate(replicas):
            yield f"only replica {replica} counted: a sum along dp is missing", value
    if layout.accumulation > 1:
        turns = [torch.stack(turn).sum(0) for turn in zip(*parts, strict=True)]
        for turn, value in enumerate(turns):
            yield f"only microbatch {turn} of {layout.accumulation} counted", value
        for turn, value in enumerate(turns):
            yield f"microbatch {turn} of {layout.accumulation} were left out", torch.stack(turns).sum(0) - value
        if scale != 1:
            rest = torch.stack(turns[1:]).sum(0)
            yield f"the loss scale of {scale:g} were applied to microbatch 0 alone", turns[0] + rest / scale


def _parts_of(whole: Transformer, name: str, packed: bool) -> Callable[[slice, list[int]], Tensor]:
    """What some rows and tokens of the batch add to the gradient of the mean over all of it."""
    parameter = whole.get_parameter(name)
    tokens_BT, targets_BT = (x.to(parameter.device) for x in alone.batch(whole.config, 0, packed))
    logits_BTV = whole(tokens_BT, dropout_seed=alone.dropout_seed(0), marked=packed)
    _, count = loss_sum(logits_BTV, targets_BT)

    def of_part(rows: slice, tokens: list[int]) -> Tensor:
        total, _ = loss_sum(logits_BTV[rows, tokens], targets_BT[rows, tokens])
        [gradient] = torch.autograd.grad(total / count, [parameter], retain_graph=True)
        return gradient.double().cpu()

    return of_part


def _is_close(value: Tensor, wanted: Tensor, tolerance: float) -> bool:
    size = float(wanted.norm())
    return bool(size) and float((value.double() - wanted.double()).norm()) <= _CLOSE * tolerance * size


def _same(value: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return value.shape == wanted.shape and _is_close(value.double(), wanted.double(), tolerance)


def _times(count: int) -> str:
    return {0: "not at all", 2: "twice"}.get(count, f"{count} times")
