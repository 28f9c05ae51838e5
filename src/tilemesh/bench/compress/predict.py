"""What a compressed model should take, before it is timed.

The one idea: compression changes the products with matrices and nothing else. So a pass takes what the plain model's
takes, less the plain products, plus the small model's. What a product takes is a line over the number of weights,
found by timing random matrices of the model's smallest and largest shape, in the same form: plain, or codes of a
scheme. A model that lost heads, channels or layers is another plain model: `layers.py`. Bytes follow from shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilemesh.bench.compress.layers import LayerChange, LayerClock
from tilemesh.bench.compress.passes import pass_timer
from tilemesh.bench.harness import calling
from tilemesh.core import calibration
from tilemesh.core.cost import Ceiling, Cost, limit_s, short_dtype
from tilemesh.core.errors import RunError, UsageError
from tilemesh.kernels.lowbit.codes import quantize
from tilemesh.measure.machine import this_machine
from tilemesh.measure.timing import compare
from tilemesh.model.kinds import Factored, FewBits, compressed, few_bits, model_bytes, projections
from tilemesh.model.linear import Linear
from tilemesh.model.transformer import Transformer

_SECONDS = 0.2
"""For one form of matrix."""


@dataclass(frozen=True)
class PassChange:
    """Seconds of products that a pass has no more, and of those that take their place."""

    gone_s: float
    new_s: float

    def after(self, plain_s: float) -> float:
        """Of the compressed model, where the plain one takes so long."""
        return max(plain_s - self.gone_s, 0.0) + self.new_s


@dataclass(frozen=True)
class Expected:
    """Of one compressed model, before it is measured."""

    nbytes: int
    forward: PassChange | LayerChange
    decode: PassChange | LayerChange
    limits: tuple[float, float] | None = None
    """Seconds that a forward pass and a decoded token take at least."""
    why_no_limit: str = ""


def least_seconds(model: Transformer, tokens: int, dtype: torch.dtype, ceiling: Ceiling) -> float:
    """Every matrix read once, and its products at the peak of the dtype."""
    flops = read = 0
    for _, module in projections(model):
        numbers = module.in_features * module.out_features
        if isinstance(module.kind, Factored):
            numbers = module.kind.rank * (module.in_features + module.out_features)
        flops += 2 * numbers * tokens
        read += module.kind.nbytes(module.out_features, module.in_features, dtype.itemsize)
    short, _ = short_dtype(str(dtype).removeprefix("torch."))
    return limit_s(Cost(flops, read, 0, launches=1, dtype=short), ceiling)


class ProductClock:
    """How long the products of a model take with so many tokens at a time."""

    def __init__(self, plain: Transformer, tokens: int, dtype: torch.dtype = torch.float32) -> None:
        self.tokens, self.dtype, self.device = tokens, dtype, next(plain.parameters()).device
        shapes = {(module.out_features, module.in_features) for _, module in projections(plain)}
        ordered = sorted(shapes, key=lambda shape: shape[0] * shape[1])
        self._shapes = (ordered[0], ordered[-1])
        self._lines: dict[str, tuple[float, float]] = {}  # form: seconds of a call, and per weight

    def seconds(self, model: Transformer) -> float:
        """Of all products of the model, one after the other; projections of the same activations that have the same
        form are one."""
        total, calls = 0.0, set()
        for name, module in projections(model):
            fixed, each = self._line(*_form(module))
            layer, _, last = name.rpartition(".")
            call = (layer, _SITES.get(last, last), _form(module)[0])
            if isinstance(module.kind, Factored):
                total += 2 * fixed + each * module.kind.rank * (module.in_features + module.out_features)
                continue
            total += each * module.in_features * module.out_features + (fixed if call not in calls else 0.0)
            calls.add(call)
        return total

    def _line(self, form: str, make: Callable[[Tensor], Linear]) -> tuple[float, float]:
        if form not in self._lines:
            weights = [torch.randn(shape, device=self.device) * 0.02 for shape in self._shapes]
            modules = [make(weight).to(self.dtype) for weight in weights]
            inputs = [torch.randn(self.tokens, shape[1]).to(self.device, self.dtype) for shape in self._shapes]
            calls = {str(place): calling(modules[place], inputs[place]) for place in range(2)}
            timer = pass_timer(self.device)
            with torch.inference_mode():
                timed = compare(calls, timer=timer, repeats=9, warmup=1, seconds=_SECONDS, on_error="raise")
            (small, large), sizes = (timed[name].median for name in calls), [a * b for a, b in self._shapes]
            each = (large - small) / (sizes[1] - sizes[0]) if sizes[1] > sizes[0] else large / sizes[1]
            each = max(each, 0.0)
            self._lines[form] = (max(large - each * sizes[1], 0.0), each)
        return self._lines[form]


_SITES = {"fc_q": "heads", "fc_k": "heads", "fc_v": "heads", "fc_gate": "gated", "fc_in": "gated"}
"""Projections that are given the same activations."""


def _form(layer: Linear) -> tuple[str, Callable[[Tensor], Linear]]:
    """A name for the form that a projection's matrix has, and what makes another matrix in that form."""
    if isinstance(layer.kind, FewBits):
        return str(layer.kind), lambda weight: _coded(weight, layer)
    return "plain", _plain


def _plain(weight: Tensor) -> Linear:
    layer = Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _coded(weight: Tensor, like: Linear) -> Linear:
    kind = like.kind
    assert isinstance(kind, FewBits)
    scale = like.input_scale.detach() if kind.static else None
    return few_bits(_plain(weight), kind.scheme, quantize(weight, kind.scheme), kind.inputs, scale)


def _ceiling(device: torch.device) -> tuple[Ceiling | None, str]:
    try:
        known = calibration.find(this_machine().id)
        part = "gpu" if device.type == "cuda" else "all_cores"
        if known is not None:
            return Ceiling.of_calibration(known, part), ""
    except (RunError, UsageError) as error:
        return None, str(error)
    return None, "this machine has no calibration: run `tilemesh calibrate` once"


class CompressClocks:
    """For a forward pass of some sequences and for one decoded token."""

    def __init__(self, plain: Transformer, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> None:
        """`shape`: sequences of a forward pass, and tokens of each."""
        self.forward, self.decode = ProductClock(plain, shape[0] * shape[1], dtype), ProductClock(plain, 1, dtype)
        self.layers = LayerClock(shape, dtype, self.forward.device)
        self.plain, self.dtype = plain, dtype

    def expected(self, small: Transformer) -> Expected:
        """From shapes, schemes and the times of single products; of single layers where these changed their shape."""
        forward: PassChange | LayerChange
        decode: PassChange | LayerChange
        if small.config != self.plain.config and not compressed(small):
            forward, decode = self.layers.change(self.plain.config, small.config)
        else:
            forward, decode = (
                PassChange(clock.seconds(self.plain), clock.seconds(small)) for clock in (self.forward, self.decode)
            )
        nbytes = model_bytes(copy.deepcopy(small).to(self.dtype))
        ceiling, why = _ceiling(self.forward.device)
        if any(isinstance(layer.kind, FewBits) and layer.kind.inputs is not None for _, layer in projections(small)):
            ceiling, why = None, "the peak of products of codes with codes is not calibrated"
        if ceiling is None:
            return Expected(nbytes, forward, decode, None, why)
        counts = (self.forward.tokens, self.decode.tokens)
        least = [least_seconds(small, tokens, self.dtype, ceiling) for tokens in counts]
        return Expected(nbytes, forward, decode, (least[0], least[1]))
