"""How the codes of one matrix are found: round to nearest, clipping by error, GPTQ; and scales that move between a
matrix and what comes before it (AWQ, SmoothQuant).

The one idea: on text whose activations have the Gram matrix H = E[x x^T], replacing W by Q changes the output by a mean
square of trace((W - Q) H (W - Q)^T). Every method here makes that, or a part of it, small; none needs the text again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilemesh.compress.calibrate import InputStatistics
from tilemesh.kernels.lowbit.codes import Quantized, by_group, decode, encode, quantize, rounded
from tilemesh.kernels.lowbit.formats import Scheme

SHRINKS = tuple(1 - 0.025 * step for step in range(25))
"""Shares of the largest magnitude that clipping tries."""
POWERS = tuple(step / 20 for step in range(21))
"""Of the activations' magnitudes, that AWQ's scales try."""
DAMPING = 0.01
"""What GPTQ adds to H's diagonal, as a share of its mean (Frantar et al. 2022)."""
_LEAST = 1e-30  # an error taken for none
_AT_ONCE = 1 << 26  # numbers that clipping tries at a time
COLUMNS = 128
"""That GPTQ corrects at a time."""


def output_error(difference: Tensor, gram: Tensor) -> float:
    """Mean square, summed over outputs, of what a change of the weight does to the output."""
    return float(((difference.float() @ gram) * difference.float()).sum())


def clipped(weight: Tensor, scheme: Scheme, gram: Tensor | None = None) -> Quantized:
    """Each group's range shrunk by what changes the output least; without a Gram matrix, by the squared error.

    With one, groups take turns, beginning with all of them rounded to nearest, and each is chosen beside what the
    others do to the output: clipping makes weights smaller, all in the same sense, and inputs that vary together add
    that up, over the groups of a row as within one. So the output error is at most that of rounding.
    """
    wide = weight.detach().float()
    if gram is not None and scheme.granularity != "tensor":
        alone = replace(scheme, levels=1)  # a second level looks at all groups: it is put on what was chosen
        shrink = torch.cat([_shrinks_in_turns(rows, alone, gram.float()) for rows in _few_rows(wide, scheme)])
        return quantize(wide, scheme, shrink)
    best = shrink = torch.empty(0)
    for place, factor in enumerate(SHRINKS):
        change = rounded(wide, scheme, factor) - wide
        off = change.square() if gram is None else (change @ gram) * change
        if scheme.granularity == "tensor":
            off = off.sum().reshape(1, 1)
        else:
            off = by_group(off, scheme.groups(wide.shape[1])).sum(-1)
        if place == 0:
            best, shrink = off, torch.ones_like(off)
        better = off < best
        best, shrink = torch.where(better, off, best), torch.where(better, factor, shrink)
    return quantize(wide, scheme, shrink)


def _few_rows(wide: Tensor, scheme: Scheme) -> Iterator[Tensor]:
    """Rows of which all shrinks of a group fit into some memory at once."""
    size = wide.shape[1] // scheme.groups(wide.shape[1])
    yield from torch.split(wide, max(1, _AT_ONCE // (len(SHRINKS) * size)))


def _shrinks_in_turns(wide: Tensor, scheme: Scheme, gram: Tensor) -> Tensor:
    """(rows, groups): the error of a row is d H d^T with its change d in all groups."""
    rows, groups = len(wide), scheme.groups(wide.shape[1])
    factors = torch.tensor(SHRINKS, device=wide.device)
    each_row = torch.arange(rows, device=wide.device)
    change = rounded(wide, scheme) - wide
    moved = change @ gram
    shrinks = []
    for part in torch.arange(wide.shape[1]).chunk(groups):
        own = slice(int(part[0]), int(part[-1]) + 1)
        block = gram[own, own]
        tried = wide[:, own].repeat(len(factors), 1)
        tried = rounded(tried, scheme, factors.repeat_interleave(rows)[:, None]) - tried
        tried = tried.view(len(factors), rows, -1)
        of_others = moved[:, own] - change[:, own] @ block
        best = ((tried @ block + 2 * of_others) * tried).sum(-1).argmin(0)
        best_change = tried[best, each_row]
        moved += (best_change - change[:, own]) @ gram[own]
        change[:, own] = best_change
        shrinks.append(factors[best])
    return torch.stack(shrinks, 1)


def gptq(weight: Tensor, scheme: Scheme, inputs: InputStatistics) -> Quantized:
    """Columns in turn are rounded, and those after take up what that did to the output (Frantar et al. 2022).

    Scales are those of round-to-nearest, of the weights as they are given: a column's correction does not move them,
    and under clipped ones corrected weights fall outside of the range (docs/compress/LOG.md). Inputs with the largest
    squares come first, while there are others left to correct them.
    """
    wide = weight.detach().float()
    start = quantize(wide, scheme)
    scales, zeros = start.scales, start.zeros
    order = inputs.gram.diagonal().argsort(descending=True, stable=True)
    work, factor = wide[:, order].clone(), _inverse_factor(inputs.gram[order][:, order])
    columns = wide.shape[1]
    group_of = order // (columns // scales.shape[1])
    codes = torch.empty(wide.shape, dtype=start.codes.dtype, device=wide.device)
    for begin in range(0, columns, COLUMNS):
        end = min(begin + COLUMNS, columns)
        errors = torch.zeros(len(work), end - begin, device=work.device)
        for place in range(begin, end):
            column, group = work[:, place : place + 1], group_of[place]
            scale = scales[:, group : group + 1].expand(len(work), 1)
            zero = None if zeros is None else zeros[:, group : group + 1].expand(len(work), 1)
            kept = wide[:, order[place], None] != 0  # what pruning took stays 0: the columns after make that good too
            code = encode(column * kept, scheme, scale, zero)
            codes[:, order[place]] = code[:, 0]
            off = (column - decode(code, scheme, scale, zero, torch.float32)) / factor[place, place]
            errors[:, place - begin] = off[:, 0]
            work[:, place + 1 : end] -= off @ factor[place : place + 1, place + 1 : end]
        work[:, end:] -= errors @ factor[begin:end, end:]
    return Quantized(codes, scales, zeros)


def _inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of H^-1: row i says how the error of column i is spread over those after it."""
    wide = gram.double()
    mean = float(wide.diagonal().mean())
    damped = wide + (DAMPING * mean if mean > 0 else 1.0) * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True).float()
    return factor


METHODS: dict[str, Callable[[Tensor, Scheme, InputStatistics | None], Quantized]] = {
    "nearest": lambda weight, scheme, inputs: quantize(weight, scheme),
    "clip": lambda weight, scheme, inputs: clipped(weight, scheme, None if inputs is None else inputs.gram),
    # As its authors' programs do: scales first, then ranges that are clipped.
    "awq": lambda weight, scheme, inputs: clipped(weight, scheme, None if inputs is None else inputs.gram),
}


def find_codes(weight: Tensor, scheme: Scheme, method: str, inputs: InputStatistics | None) -> Quantized:
    if method == "gptq" and inputs is not None and scheme.number.kind != "fixed":
        return gptq(weight, scheme, inputs)
    return METHODS.get(method, METHODS["nearest"])(weight, scheme, inputs)


# ---- scales that move ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MovedScales:
    """What the inputs of some matrices are divided by, and their columns multiplied."""

    factors: Tensor
    share: float
    """Of the output error without them, the mean over the matrices."""


def awq_scales(weights: Sequence[Tensor], schemes: Sequence[Scheme], inputs: InputStatistics) -> MovedScales:
    """Inputs with large activations get finer steps: s = magnitude^a, with the a of 0 to 1 that loses least.

    a = 0 changes nothing, so what is found is never worse on this text (Lin et al. 2023, "AWQ"). Of matrices that share
    their inputs each one's error counts as a share of what it was: queries and keys are many times larger than values,
    whose error would count for nothing beside theirs.
    """
    size = inputs.magnitude.clamp(min=1e-5)
    best: MovedScales | None = None
    before: list[float] = []
    for power in POWERS:
        factors = size**power
        factors = factors / (factors.max() * factors.min()).sqrt()
        errors = []
        for weight, scheme in zip(weights, schemes, strict=True):
            wide = weight.detach().float()
            errors.append(output_error(rounded(wide * factors, scheme) / factors - wide, inputs.gram))
        before = before or errors
        share = sum(now / max(was, _LEAST) for now, was in zip(errors, before, strict=True)) / len(weights)
        if best is None or share < best.share:
            best = MovedScales(factors, share)
    assert best is not None
    return best


def smooth_factors(weights: Sequence[Tensor], inputs: InputStatistics, power: float) -> Tensor:
    """s = max|x|^power / max|w|^(1 - power) per input (Xiao et al. 2022, "SmoothQuant")."""
    most = torch.stack([weight.detach().float().abs().amax(0) for weight in weights]).amax(0).clamp(min=1e-5)
    factors = inputs.largest.clamp(min=1e-5) ** power / most ** (1 - power)
    return factors / factors.log().mean().exp()  # the mean size stays
