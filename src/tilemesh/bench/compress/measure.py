"""Rows of compressed models beside the plain one: held-out loss, bytes, a forward pass, a token of decoding. What a
recipe should cost is said before it is measured, by `predict.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilemesh.bench.compress.passes import ROWS, pass_timer, passes_of
from tilemesh.bench.compress.predict import CompressClocks, Expected
from tilemesh.bench.harness import Estimate, exactly, make_row
from tilemesh.compress.calibrate import mean_loss
from tilemesh.compress.quantize import Moved
from tilemesh.measure.machine import stamp
from tilemesh.measure.row import CaseValue, Row
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import compare
from tilemesh.model.kinds import model_bytes, projections
from tilemesh.model.transformer import Transformer

PLAIN = "plain"


@dataclass(frozen=True)
class Judged:
    """What one model came to."""

    loss: float
    nbytes: int
    forward: Sample
    decode: Sample


@torch.inference_mode()
def time_models(models: Mapping[str, Transformer], tokens: Tensor, seconds: float) -> dict[str, tuple[Sample, Sample]]:
    """A forward pass of some sequences, and one decoded token after a short prompt; models take turns.

    They compute as in an engine: projections of the same activations by one product, and on a GPU the kernels of a pass
    from one recorded graph. The models given are changed: they belong to the caller no more.
    """
    forwards: dict[str, Callable[[int], object]] = {}
    steps: dict[str, Callable[[int], object]] = {}
    for name, model in models.items():
        forwards[name], steps[name] = passes_of(model, tokens[:ROWS])
    timer = pass_timer(tokens.device)
    forward = compare(forwards, timer=timer, repeats=12, warmup=1, seconds=seconds / 2, on_error="raise")
    decode = compare(steps, timer=timer, repeats=30, warmup=2, seconds=seconds / 2, on_error="raise")
    return {name: (forward[name], decode[name]) for name in models}


def clocks_of(plain: Transformer, tokens: Tensor, dtype: torch.dtype) -> CompressClocks:
    """What predicts the passes that `time_models` times."""
    rows, length = tokens[:ROWS].shape
    return CompressClocks(plain, (rows, length), dtype)


def judge(
    models: Mapping[str, Transformer],
    tokens: Tensor,
    targets: Tensor,
    seconds: float = 20.0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Judged]:
    """All models on the same held-out text, timed in turns. Bytes and times are those of the dtype; losses are those of
    the models as they are given, so that a dtype's own rounding is in none of the changes."""
    copies = {name: copy.deepcopy(model).to(dtype) for name, model in models.items()}
    sizes = {name: model_bytes(model) for name, model in copies.items()}
    times = time_models(copies, tokens, seconds)
    return {
        name: Judged(mean_loss(model, tokens, targets), sizes[name], *times[name]) for name, model in models.items()
    }


def rows_of(
    recipe: str,
    case: Mapping[str, CaseValue],
    guess: Expected,
    judged: Judged,
    plain: Judged,
    peer_losses: Mapping[str, float] | None = None,
    why_no_peer: Mapping[str, str] | None = None,
) -> list[Row]:
    """Loss, size, forward pass and decoded token of one recipe; the plain model's stand beside them as a peer."""
    labels: dict[str, CaseValue] = {**case, "recipe": recipe}
    change = round(judged.loss - plain.loss, 5) + 0.0  # no -0.0
    least_s = guess.limits or (None, None)
    marks = stamp()
    rows = [
        make_row(
            "held-out loss", {**labels, "change": change}, exactly(judged.loss), unit="nats",
            predicted=Estimate(None, "a compressed model's loss is measured"),
            limit=Estimate(None, "the plain model's loss is no bound: a smaller model can be better"),
            peers={name: exactly(loss) for name, loss in {PLAIN: plain.loss, **(peer_losses or {})}.items()},
            missing=why_no_peer, marks=marks,
        ),
        make_row(
            "size", labels, exactly(float(judged.nbytes)), unit="B", predicted=Estimate(float(guess.nbytes)),
            limit=Estimate(None, "no fewer bytes are known to keep the loss"),
            peers={PLAIN: exactly(float(plain.nbytes))}, marks=marks,
        ),
    ]  # fmt: skip
    for name, change_of, ours, theirs, least in (
        ("forward pass", guess.forward, judged.forward, plain.forward, least_s[0]),
        ("decoded token", guess.decode, judged.decode, plain.decode, least_s[1]),
    ):
        predicted, limit = Estimate(change_of.after(theirs.median)), Estimate(least, guess.why_no_limit)
        rows.append(make_row(name, labels, ours, predicted=predicted, limit=limit, peers={PLAIN: theirs}, marks=marks))
    return rows


def layer_errors(plain: Transformer, small: Transformer, moved: Mapping[str, Moved] | None = None) -> dict[str, float]:
    """Relative change of each matrix that has a counterpart: |W' - W| / |W|, without the factors that were moved."""
    before = dict(projections(plain))
    errors = {}
    for name, module in projections(small):
        weight = before[name].weight.detach().float() if name in before else None
        if weight is None or tuple(weight.shape) != (module.out_features, module.in_features):
            continue
        now = module.weight.detach().float()
        columns, rows = (moved or {}).get(name, (None, None))
        now = now if columns is None else now / columns
        now = now if rows is None else now / rows[:, None]
        errors[name] = float((now - weight).norm() / weight.norm().clamp(min=1e-12))
    return errors


def histogram(model: Transformer, name: str, bins: int = 61) -> dict[str, Sequence[float]]:
    """How a matrix's weights are distributed: counts between edges."""
    module = dict(projections(model))[name]
    weight = module.weight.detach().float()
    most = float(weight.abs().max())
    counts = torch.histc(weight, bins=bins, min=-most, max=most)
    step = 2 * most / bins
    return {"centre": [-most + (place + 0.5) * step for place in range(bins)], "count": counts.tolist()}
