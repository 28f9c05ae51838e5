"""What a model with fewer or narrower layers should take, before it is timed.

The one idea: such a model is an ordinary one of another shape, and its layers are all alike. So a pass takes what the
plain model's layers take, times the ratio of a small layer's time to a plain one's and of their numbers, and what is
around the layers stays. A layer's time is the difference of random models of three layers and of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tilemesh.bench.compress.passes import pass_timer, passes_of
from tilemesh.measure.timing import compare
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer

_SECONDS = 0.8
"""For the random models of one comparison, in each pass."""
_FEW, _SOME = 1, 3  # layers of them


@dataclass(frozen=True)
class LayerChange:
    """Seconds around the plain model's layers, and what its layers' time is multiplied by."""

    around_s: float
    factor: float

    def after(self, plain_s: float) -> float:
        """Of the pruned model, where the plain one takes so long."""
        around_s = min(self.around_s, plain_s)
        return around_s + (plain_s - around_s) * self.factor


class LayerClock:
    """How long one layer of a shape takes in a forward pass of (sequences, tokens) and in decoding a token."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device

    def change(self, plain: ModelConfig, small: ModelConfig) -> tuple[LayerChange, LayerChange]:
        """Of a forward pass, and of a decoded token."""
        forward, decode = (
            LayerChange(around, small.layers * narrow / (plain.layers * wide))
            for around, wide, narrow in self._seconds(plain, small)
        )
        return forward, decode

    @torch.inference_mode()
    def _seconds(self, plain: ModelConfig, small: ModelConfig) -> list[tuple[float, float, float]]:
        """Around the plain layers, of a plain layer and of a small one, for each pass. All are timed in turns: a ratio
        of times from different minutes is one of the machine's load as well."""
        tokens = torch.randint(plain.vocabulary, self.shape, device=self.device)
        kinds = {"plain": plain, "small": small} if plain != small.replace(layers=plain.layers) else {"plain": plain}
        passes_by_model = {
            (kind, count): passes_of(self._random(config.replace(layers=count)), tokens)
            for kind, config in kinds.items()
            for count in (_FEW, _SOME)
        }
        seconds = []
        for which in range(2):
            calls = {f"{kind} {count}": passes[which] for (kind, count), passes in passes_by_model.items()}
            timed = compare(
                calls, timer=pass_timer(self.device), repeats=25, warmup=2, seconds=_SECONDS, on_error="raise"
            )
            layer = {
                kind: max((timed[f"{kind} {_SOME}"].median - timed[f"{kind} {_FEW}"].median) / (_SOME - _FEW), 1e-9)
                for kind in kinds
            }
            around = max(timed[f"plain {_FEW}"].median - _FEW * layer["plain"], 0.0)
            seconds.append((around, layer["plain"], layer.get("small", layer["plain"])))
        return seconds

    def _random(self, config: ModelConfig) -> Transformer:
        model = Transformer(config, device="meta", dtype=self.dtype)
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                drawn = torch.empty(parameter.shape, dtype=self.dtype, device=self.device).normal_(0, 0.02)
                module.register_parameter(name, nn.Parameter(drawn, requires_grad=False))
        return model.eval()
