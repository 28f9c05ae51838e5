"""What flows into a model's matrices on some text: layer by layer, so that a layer sees what the ones before it,
already changed, make of the text.

The one idea: all that methods need of activations is a few sums per input (their products with one another, their means
and their largest magnitudes), so no activation is kept but the residual stream between two layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.core.errors import UsageError
from tilemesh.model.transformer import Layer, ResidualStream, Transformer, added

ROWS = 4
"""Sequences of a pass."""
LEAST_TOKENS = 512
"""Of calibration text; with fewer, products of inputs say more about the text than about the model."""
SITES: Mapping[str, tuple[str, ...]] = {
    "attention.fc_q": ("attention.fc_q", "attention.fc_k", "attention.fc_v"),
    "attention.fc_o": ("attention.fc_o",),
    "mlp.fc_in": ("mlp.fc_in", "mlp.fc_gate"),
    "mlp.fc_out": ("mlp.fc_out",),
}
"""Matrices of a layer that are given the same activations: the first is looked at for all."""


@dataclass
class InputStatistics:
    """Of the activations (tokens, K) that enter a matrix."""

    gram: Tensor
    """Mean over tokens of x x^T, (K, K)."""
    mean: Tensor
    magnitude: Tensor
    """Mean of |x|, per input."""
    largest: Tensor
    """Of |x|, per input."""
    tokens: int

    @classmethod
    def empty(cls, inputs: int, device: torch.device) -> InputStatistics:
        mean, magnitude, largest = torch.zeros(3, inputs, device=device).unbind()
        return cls(torch.zeros(inputs, inputs, device=device), mean, magnitude, largest, 0)

    def add(self, x: Tensor) -> None:
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        total = self.tokens + len(rows)
        old, new = self.tokens / total, 1 / total
        self.gram.mul_(old).addmm_(rows.t(), rows, alpha=new)
        self.mean.mul_(old).add_(rows.sum(0), alpha=new)
        self.magnitude.mul_(old).add_(rows.abs().sum(0), alpha=new)
        torch.maximum(self.largest, rows.abs().amax(0), out=self.largest)
        self.tokens = total

    def divide(self, factors: Tensor) -> None:
        """As if the activations had been divided by these."""
        self.gram.div_(factors[:, None]).div_(factors[None, :])
        for part in (self.mean, self.magnitude, self.largest):
            part.div_(factors)


Statistics = Mapping[str, InputStatistics]
"""Of every matrix of a layer, by its name in the layer."""
Trial = Callable[[Layer], float]
"""The mean square by which a layer in the place of the plain one moves the residual stream, on text held back."""


def check_tokens(tokens_BT: Tensor | None, model: Transformer, what: str) -> Tensor:
    """Refuse calibration text that is missing or too short."""
    if tokens_BT is None:
        raise UsageError(f"{what} looks at activations: give tokens, some sequences of text (rows, tokens)")
    if not isinstance(tokens_BT, Tensor) or tokens_BT.is_floating_point():
        kind = tokens_BT.dtype if isinstance(tokens_BT, Tensor) else f"a {type(tokens_BT).__name__}"
        raise UsageError(f"tokens are {kind}: expected a tensor of whole numbers (rows, tokens), as a tokenizer gives")
    if tokens_BT.dim() != 2 or tokens_BT.numel() < LEAST_TOKENS:
        raise UsageError(
            f"{tokens_BT.numel()} tokens to calibrate with: expected at least {LEAST_TOKENS}, in sequences of up to "
            f"{model.config.context}"
        )
    low, high = int(tokens_BT.min()), int(tokens_BT.max())
    if low < 0 or high >= model.config.vocabulary:
        raise UsageError(
            f"token {low if low < 0 else high} in the text to calibrate with: the model has {model.config.vocabulary}, "
            "from 0 on; give the tokens of its own tokenizer"
        )
    return tokens_BT


def held_back(tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences to find something by, and a quarter of them to judge it by; a single one is for both."""
    back = max(1, len(tokens_BT) // 4)
    return (tokens_BT[:-back], tokens_BT[-back:]) if len(tokens_BT) > 1 else (tokens_BT, tokens_BT)


@torch.no_grad()
def layer_by_layer(
    model: Transformer,
    tokens_BT: Tensor,
    change: Callable[[str, Layer, Statistics, Trial], None],
    judged_BT: Tensor | None = None,
    change_output: Callable[[InputStatistics, InputStatistics | None], None] | None = None,
) -> None:
    """Call `change(prefix, layer, statistics, trial)` for each layer in turn, with what enters its matrices now; the
    next layer is given what this one, or what was put into its place, then makes of the text.

    `judged_BT`: the text of trials. `change_output` is called at the end with what enters the output projection, on the
    text and on that of trials.
    """
    streams, judged = _Streams(model, tokens_BT), _Streams(model, judged_BT)
    for number, layer in model.layers.named_children():
        assert isinstance(layer, Layer)
        with _watching(layer) as statistics:
            streams.after(layer)
        plain = judged.after(layer)

        def trial(tried: Layer, plain: list[Tensor] = plain) -> float:
            moved = zip(judged.after(tried), plain, strict=True)
            return sum(float((now - was).square().sum()) for now, was in moved) / sum(was.numel() for was in plain)

        change(f"layers.{number}.", layer, statistics, trial)
        chosen = model.layers.get_submodule(number)
        for each in (streams, judged):
            each.between = each.after(chosen)
    if change_output is not None:
        change_output(streams.into_output(), judged.into_output() if judged_BT is not None else None)


class _Streams:
    """The residual stream of some text between two layers."""

    def __init__(self, model: Transformer, tokens_BT: Tensor | None) -> None:
        self.model = model
        pieces = [] if tokens_BT is None else list(_pieces(tokens_BT))
        self.passes = [model.prepare(piece) for piece in pieces]
        entered = (model.enter(piece, None, now) for piece, now in zip(pieces, self.passes, strict=True))
        self.between = [added(ResidualStream(stream)) for stream in entered]

    def after(self, layer: nn.Module) -> list[Tensor]:
        pairs = zip(self.between, self.passes, strict=True)
        return [added(layer(ResidualStream(stream), now)) for stream, now in pairs]

    def into_output(self) -> InputStatistics:
        """Of what the output projection is given, after the last layer: sums over inputs, and no logits."""
        statistics = InputStatistics.empty(self.model.config.width, self.between[0].device)
        for stream in self.between:
            statistics.add(self.model.normalize(ResidualStream(stream)))
        return statistics


class _watching:  # noqa: N801  (used like a function)
    """Collects what enters the matrices of a layer, as long as it lasts."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> dict[str, InputStatistics]:
        statistics: dict[str, InputStatistics] = {}
        for first, members in SITES.items():
            module = self.layer.get_submodule(first)
            assert isinstance(module, nn.Linear)
            device = next(self.layer.parameters()).device
            mine = InputStatistics.empty(module.in_features, device)
            for member in members:
                parent, _, last = member.rpartition(".")
                if getattr(self.layer.get_submodule(parent), last) is not None:
                    statistics[member] = mine

            def hook(module: nn.Module, args: tuple[Tensor, ...], mine: InputStatistics = mine) -> None:
                mine.add(args[0])

            self.hooks.append(module.register_forward_pre_hook(hook))
        return statistics

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


def _pieces(tokens_BT: Tensor) -> Iterator[Tensor]:
    yield from torch.split(tokens_BT, ROWS)


@torch.no_grad()
def mean_divergence(model: Transformer, plain: Transformer, tokens_BT: Tensor) -> float:
    """Of the model's predictions from those of the plain one, in nats per token."""
    total = 0.0
    for piece in _pieces(tokens_BT):
        expected, changed = (functional.log_softmax(each(piece).float(), -1) for each in (plain, model))
        total += float((expected.exp() * (expected - changed)).sum())
    return total / tokens_BT.numel()


@torch.no_grad()
def mean_loss(model: Transformer, tokens_BT: Tensor, targets_BT: Tensor, rows: int = 8) -> float:
    """Cross-entropy in nats per token of held-out text."""
    from tilemesh.model.loss import loss_sum

    total, count = 0.0, 0
    for tokens, targets in zip(torch.split(tokens_BT, rows), torch.split(targets_BT, rows), strict=True):
        summed, counted = loss_sum(model(tokens), targets)
        total, count = total + float(summed), count + int(counted)
    return total / max(1, count)


@torch.enable_grad()
def weight_gradients(
    model: Transformer, tokens_BT: Tensor, targets_BT: Tensor, names: Sequence[str]
) -> dict[str, Tensor]:
    """The loss's gradient by some matrices' weights, over some text: what first-order scores are made of."""
    from tilemesh.model.loss import loss

    parameters = [model.get_parameter(f"{name}.weight") for name in names]
    flags = [parameter.requires_grad for parameter in parameters]
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for tokens, targets in zip(torch.split(tokens_BT, ROWS), torch.split(targets_BT, ROWS), strict=True):
            for total, part in zip(sums, torch.autograd.grad(loss(model(tokens), targets), parameters), strict=True):
                total += part
    finally:
        for parameter, was in zip(parameters, flags, strict=True):
            parameter.requires_grad_(was)
    return dict(zip(names, sums, strict=True))


def require_mlps(model: object, what: str) -> None:
    """A Transformer whose layers have one MLP each."""
    require_transformer(model, what)
    assert isinstance(model, Transformer)
    if model.config.experts:
        raise UsageError(
            f"cannot {what} a model with experts by a recipe that looks at text: what each expert is given is not "
            "calibrated yet; take one that rounds alone, such as int8 or int4-g64, or train with compress.recipe"
        )


def require_calibration(model: object, what: str) -> None:
    """A Transformer of which it is known what enters every matrix of its layers: `SITES`."""
    require_mlps(model, what)
    assert isinstance(model, Transformer)
    if model.config.latent_width:
        raise UsageError(
            f"cannot {what} a model with latent attention by a recipe that looks at text: what its latents are given "
            "is not calibrated yet; take a recipe that does not, such as int8 or int4-g64, or rank.aware = false"
        )


def require_transformer(model: object, what: str) -> None:
    if not isinstance(model, Transformer):
        raise UsageError(
            f"cannot {what} a {type(model).__name__}: expected a tilemesh Transformer; `tilemesh compress FOLDER` "
            "reads a Hugging Face folder into one"
        )
