"""A model's matrices into numbers of few bits, by a recipe: which, how, and what moves into the norms before them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tilemesh.compress.calibrate import (
    InputStatistics,
    Statistics,
    Trial,
    check_tokens,
    held_back,
    layer_by_layer,
    mean_divergence,
    mean_loss,
    require_calibration,
    require_transformer,
)
from tilemesh.compress.methods import awq_scales, find_codes, output_error, smooth_factors
from tilemesh.compress.mixed import mixed_schemes
from tilemesh.compress.recipe import Recipe, chosen_schemes, default_choices, read_recipe
from tilemesh.core.errors import UsageError
from tilemesh.kernels.lowbit.codes import Quantized
from tilemesh.kernels.lowbit.formats import Scheme, parse_scheme
from tilemesh.model.kinds import FewBits, few_bits, matrix_shapes, put, require_plain
from tilemesh.model.linear import Linear
from tilemesh.model.norm import ResidualNorm
from tilemesh.model.transformer import Layer, Mlp, Transformer

Say = Callable[[str], None]
Moved = tuple[Tensor | None, Tensor | None]
"""Factors of a matrix's columns (inputs) and of its rows (outputs), by which it was multiplied before it was rounded;
None: by nothing. What comes before and after has the inverse, so that the model computes the same."""
OUTPUT = "output"
"""The output projection: no layer's, and quantised where the recipe's `weights.layers` name it."""
JUDGED = ("awq", "clip")
"""Methods that make each matrix's output error small on the text, which need not do good to a layer's output or to the
predictions: they are taken where, on text held back, they do more good than rounding to nearest. There the
predictions have to be closer to the plain model's, and the loss not larger by more than its noise: the first is less
noisy, and the second is what counts (rounding can make a model that knows its text by heart better on other text)."""


def quantize(
    model: Transformer,
    recipe: str | Path | Recipe,
    tokens: Tensor | None = None,
    *,
    in_place: bool = False,
    say: Say = lambda text: None,
    moved: dict[str, Moved] | None = None,
) -> Transformer:
    """The model with its matrices quantised as the recipe's `weights` and `activations` say; a copy, unless in place.

    `tokens`: (sequences, tokens) of text, for recipes that look at activations. `say` hears what could not be done.
    `moved`: gets what AWQ and SmoothQuant have multiplied inputs and outputs of matrices by, by name.
    """
    recipe = read_recipe(recipe)
    require_transformer(model, "quantise")
    if recipe.needs_text:
        require_calibration(model, "quantise")
    require_plain(model, "quantisation")
    shapes = matrix_shapes(model)
    schemes = chosen_schemes(recipe, shapes)
    if not schemes:
        raise UsageError("the recipe has no weights.scheme: name one, such as int4-g128")
    rounded = model if in_place else copy.deepcopy(model)
    rounded.eval().requires_grad_(False)
    judged = recipe.weights.method in JUDGED
    plain = copy.deepcopy(rounded) if judged and (in_place or model.training) else model
    if not recipe.needs_text:
        for name, scheme in schemes.items():
            _put(rounded, name, scheme, find_codes(_weight(rounded, name), scheme, "nearest", None), recipe, None)
        return rounded
    text = check_tokens(tokens, rounded, "this recipe")
    if recipe.weights.bits:
        named = [parse_scheme(choice) for choice in recipe.weights.choices]
        choices = {name: list(named or default_choices(scheme)) for name, scheme in schemes.items()}
        for name, each in choices.items():
            for scheme in each:
                scheme.groups(shapes[name][1])
        schemes = mixed_schemes(rounded, text, choices, recipe.weights.bits)
    worker = _LayerQuantizer(rounded, recipe, schemes, say)
    known, other = held_back(text) if judged else (text, None)
    layer_by_layer(rounded, known, worker.change, other, worker.change_output if OUTPUT in schemes else None)
    worker.tell()
    moves = worker.moved
    if other is not None and worker.taken:
        of_nearest: dict[str, Moved] = {}
        nearest = quantize(plain, _rounding_of(recipe), text, moved=of_nearest)
        is_closer = mean_divergence(rounded, plain, other) <= mean_divergence(nearest, plain, other)
        if not is_closer or _has_more_loss(rounded, nearest, other):
            say(f"{recipe.weights.method} does worse than rounding on text held back: rounded instead")
            for name, part in nearest.named_children():
                setattr(rounded, name, part)
            moves = of_nearest
    if moved is not None:
        moved |= moves
    return rounded


def _has_more_loss(model: Transformer, than: Transformer, tokens: Tensor) -> bool:
    """By more than the standard error of the sequences' differences."""
    losses = [
        [mean_loss(each, row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in torch.split(tokens, 1)]
        for each in (model, than)
    ]
    more = torch.tensor(losses[0]) - torch.tensor(losses[1])
    noise = float(more.std()) / len(more) ** 0.5 if len(more) > 1 else 0.0
    return float(more.mean()) > noise


def _rounding_of(recipe: Recipe) -> Recipe:
    return replace(recipe, weights=replace(recipe.weights, method="nearest"))


class _LayerQuantizer:
    """Quantises a layer with what enters its matrices."""

    def __init__(self, model: Transformer, recipe: Recipe, schemes: dict[str, Scheme], say: Say) -> None:
        self.model, self.recipe, self.schemes, self.say = model, recipe, schemes, say
        self.without_bias: set[str] = set()
        self.not_moved: set[str] = set()
        self.moved: dict[str, Moved] = {}
        self.taken = 0
        """Layers, and output projections, that a judged method has changed."""

    def change(self, prefix: str, layer: Layer, statistics: Statistics, trial: Trial) -> None:
        """By the recipe's method; where that moves the layer's output more than rounding does, by rounding."""
        if self.recipe.weights.method not in JUDGED:
            self.moved |= self._quantize(prefix, layer, statistics, self.recipe)
            return
        other, known = copy.deepcopy(layer), copy.deepcopy(statistics)
        moved = self._quantize(prefix, layer, statistics, self.recipe)
        by_method = trial(layer)
        put(self.model, prefix[:-1], other)
        moved_by_rounding = self._quantize(prefix, other, known, _rounding_of(self.recipe))
        if by_method < trial(other):
            put(self.model, prefix[:-1], layer)
            self.taken += 1
        else:
            moved = moved_by_rounding
        self.moved |= moved

    def change_output(self, inputs: InputStatistics, judged: InputStatistics | None) -> None:
        """The output projection, with what enters it, as a layer's matrix: under AWQ the last norm takes up its scales,
        and `judged`, of the text held back, says whether rounding would move the logits less.

        Its activations are never rounded, so what is done to the logits is known from the Gram matrix alone.
        """
        scheme, method, norm = self.schemes[OUTPUT], self.recipe.weights.method, self.model.final_norm
        plain, weight = self.model.get_submodule(OUTPUT), _weight(self.model, OUTPUT)
        factors = torch.ones_like(inputs.mean)
        if method == "awq" and norm is not None:
            factors = awq_scales([weight], [scheme], inputs).factors
            inputs.divide(factors)
        codes = find_codes(weight * factors.to(weight.dtype), scheme, method, inputs)
        _put(self.model, OUTPUT, scheme, codes, self.recipe, None)
        if judged is not None:
            by_method, moved = self.model.get_submodule(OUTPUT), self._decoded(OUTPUT) / factors - weight
            put(self.model, OUTPUT, plain)
            _put(self.model, OUTPUT, scheme, find_codes(weight, scheme, "nearest", None), self.recipe, None)
            if output_error(moved, judged.gram) < output_error(self._decoded(OUTPUT) - weight, judged.gram):
                put(self.model, OUTPUT, by_method)
                self.taken += 1
            else:
                factors = torch.ones_like(factors)
        if norm is not None:
            _divide_norm(norm, factors)
            self.moved[OUTPUT] = (factors, None)
        if self.recipe.weights.correct_bias:
            self.without_bias.add(OUTPUT)

    def _decoded(self, name: str) -> Tensor:
        module = self.model.get_submodule(name)
        assert isinstance(module, Linear)
        return module.kind.dense(module).float()

    def _quantize(self, prefix: str, layer: Layer, statistics: Statistics, recipe: Recipe) -> dict[str, Moved]:
        """The layer in its place in the model; what was moved."""
        moved: dict[str, Moved] = {}
        if recipe.weights.method == "awq" or recipe.activations.smooth > 0:
            moved = self._move(prefix, layer, statistics, recipe)
        for name, inputs in statistics.items():
            full = prefix + name
            if full not in self.schemes:
                continue
            weight, scheme = _weight(self.model, full), self.schemes[full]
            codes = find_codes(weight, scheme, recipe.weights.method, inputs)
            static = inputs.largest.max() if recipe.activations.static else None
            _put(self.model, full, scheme, codes, recipe, static)
            if recipe.weights.correct_bias:
                self._correct(full, weight, inputs)
        return moved

    def _move(self, prefix: str, layer: Layer, statistics: Statistics, recipe: Recipe) -> dict[str, Moved]:
        """Scale columns of matrices that share their input, and divide what makes the input."""
        columns: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        for members, divide in _sources(layer):
            here = [name for name in members if name in statistics and prefix + name in self.schemes]
            if not here or len(here) < sum(name in statistics for name in members):
                continue  # one that is left alone would be scaled too
            inputs = statistics[here[0]]
            weights = [_weight(self.model, prefix + name) for name in here]
            if recipe.weights.method == "awq":
                factors = awq_scales(weights, [self.schemes[prefix + name] for name in here], inputs).factors
            else:
                factors = smooth_factors(weights, inputs, recipe.activations.smooth)
            if not divide(factors):
                self.not_moved.add(prefix + here[0])
                continue
            for weight in weights:
                weight.mul_(factors.to(weight.dtype))
            inputs.divide(factors)
            columns |= dict.fromkeys(here, factors)
            if here[0] in _MADE_BY:
                rows[_MADE_BY[here[0]]] = 1 / factors
        return {prefix + name: (columns.get(name), rows.get(name)) for name in {**columns, **rows}}

    def _correct(self, name: str, weight: Tensor, inputs: InputStatistics) -> None:
        module = self.model.get_submodule(name)
        assert isinstance(module, Linear)
        if module.bias is None:
            self.without_bias.add(name)
            return
        lost = (weight.float() - module.weight.float()) @ inputs.mean
        module.bias.data = module.bias.data + lost.to(module.bias.dtype)

    def tell(self) -> None:
        if self.without_bias:
            self.say(f"{len(self.without_bias)} matrices have no bias to correct, and stay as they are")
        if self.not_moved:
            self.say(
                f"{len(self.not_moved)} matrices follow nothing that could take up their scales, and are not scaled"
            )


Divide = Callable[[Tensor], bool]
_MADE_BY = {"attention.fc_o": "attention.fc_v", "mlp.fc_out": "mlp.fc_in"}
"""Matrices whose input is divided by dividing the rows of another."""


def _sources(layer: Layer) -> list[tuple[Sequence[str], Divide]]:
    """Groups of matrices that share an input, and what divides that input by factors; False where nothing can."""
    attention, mlp, place = layer.attention, layer.mlp, layer.config.norm_place

    def by_norm(norm: ResidualNorm) -> Divide:
        def divide(factors: Tensor) -> bool:
            if place not in ("pre", "sandwich"):
                return False  # there a norm's result is the residual stream, or comes after the matrix
            _divide_norm(norm, factors)
            return True

        return divide

    def by_matrix(module: Linear, allowed: bool) -> Divide:
        def divide(factors: Tensor) -> bool:
            if not allowed or isinstance(module.kind, FewBits):
                return False
            module.weight.data = module.weight.data / factors[:, None].to(module.weight.dtype)
            if module.bias is not None:
                module.bias.data = module.bias.data / factors.to(module.bias.dtype)
            return True

        return divide

    assert isinstance(mlp, Mlp)
    is_linear = mlp.fc_gate is not None and mlp.fc_in.activation == "none"  # a clipped gate's other side is cut too
    same_heads = attention.config.heads == attention.config.kv_heads
    return [  # what is divided comes before what divides is itself quantised
        (("attention.fc_o",), by_matrix(attention.fc_v, same_heads)),
        (("mlp.fc_out",), by_matrix(mlp.fc_in, is_linear)),
        (("attention.fc_q", "attention.fc_k", "attention.fc_v"), by_norm(layer.attention_norm)),
        (("mlp.fc_in", "mlp.fc_gate"), by_norm(layer.mlp_norm)),
    ]


def _divide_norm(norm: ResidualNorm, factors: Tensor) -> None:
    """What the norm gives, divided by factors."""
    weight, less = (norm.weight, 0.0) if norm.offset is None else (norm.offset, 1.0)
    assert weight is not None
    weight.data = (weight.data + less) / factors.to(weight.dtype) - less
    if norm.bias is not None:
        norm.bias.data = norm.bias.data / factors.to(norm.bias.dtype)


def _put(
    model: Transformer, name: str, scheme: Scheme, codes: Quantized, recipe: Recipe, largest: Tensor | None
) -> None:
    plain = model.get_submodule(name)
    assert isinstance(plain, nn.Linear)
    inputs = recipe.inputs_of(name)
    input_scale = None
    if inputs is not None and largest is not None:
        input_scale = (largest / inputs.number.half_range).reshape(1, 1).clamp(min=torch.finfo(torch.float32).tiny)
    put(model, name, few_bits(plain, scheme, codes, inputs, input_scale))


def _weight(model: Transformer, name: str) -> Tensor:
    return model.get_parameter(f"{name}.weight").data
