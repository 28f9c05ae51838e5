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
    losses = {name: _exact(loss) for name, loss in (peer_losses or {}).items()}
    missing = dict(why_no_peer or {})
    told: dict[str, CaseValue] = {**case, "recipe": recipe}
    no_guess, no_size = "a compressed model's loss is measured", "no fewer bytes are known to keep the loss"
    no_limit = "the plain model's loss is no bound: a smaller model can be better"
    no_time = {} if guess.limits else {"limit": guess.why_no_limit}
    least = guess.limits or (None, None)
    loss_case: dict[str, CaseValue] = {**told, "change": round(judged.loss - plain.loss, 5) + 0.0}  # no -0.0
    common = stamp()

    def row(
        name: str,
        unit: str,
        guessed: float | None,
        value: Callable[[Judged], Sample],
        limit: float | None,
        why: Mapping[str, str],
    ) -> Row:
        return Row(
            name=name,
            case=loss_case if unit == "nats" else told,
            unit=unit,
            predicted=guessed,
            measured=value(judged),
            limit=limit,
            peers={PLAIN: value(plain), **(losses if unit == "nats" else {})},
            missing={**why, **(missing if unit == "nats" else {})},
            **common,
        )

    forward, decode = (
        change.after(of.median) for change, of in ((guess.forward, plain.forward), (guess.decode, plain.decode))
    )
    whys = {"predicted": no_guess, "limit": no_limit}
    return [
        row("held-out loss", "nats", None, lambda judged: _exact(judged.loss), None, whys),
        row("size", "B", float(guess.nbytes), lambda judged: _exact(float(judged.nbytes)), None, {"limit": no_size}),
        row("forward pass", "s", forward, lambda judged: judged.forward, least[0], no_time),
        row("decoded token", "s", decode, lambda judged: judged.decode, least[1], no_time),
    ]


def _exact(value: float) -> Sample:
    return Sample(value, value, value, 1)


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
