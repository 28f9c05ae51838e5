"""Fewer weights: single ones set to 0, two of every four, or whole heads, MLP channels and layers taken out.

The one idea: with a structure the result is an ordinary, smaller model, whose configuration says so; every layer
loses as many heads or channels as the others, which ones being decided in each layer. Without one, the model keeps
its shape and has zeros, which no dense product is quicker for.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor

from tilemesh.compress.calibrate import check_tokens, require_mlps, weight_gradients
from tilemesh.compress.recipe import PruneRecipe, Recipe, read_recipe
from tilemesh.core.errors import UsageError
from tilemesh.model.config import ModelConfig
from tilemesh.model.families.book import family_of
from tilemesh.model.kinds import magnitude_mask, projections, require_plain
from tilemesh.model.transformer import Transformer

BLOCK = (2, 4)
_HEAD_ROWS = ("fc_q", "fc_k", "fc_v")


def prune(model: Transformer, recipe: str | Path | Recipe, tokens: Tensor | None = None) -> Transformer:
    """A pruned copy. `tokens`: (sequences, tokens + 1) of text, for first-order scores."""
    wanted = read_recipe(recipe).prune
    require_mlps(model, "prune")
    require_plain(model, "pruning")
    if wanted.structure == "none":
        raise UsageError("the recipe prunes nothing: set prune.structure to unstructured, 2:4, heads, mlp or layers")
    scores = _scores(model, wanted, tokens)
    with torch.no_grad():
        if wanted.structure in ("unstructured", "2:4"):
            pruned = copy.deepcopy(model)
            block = BLOCK if wanted.structure == "2:4" else None
            for name, score in scores.items():
                pruned.get_parameter(f"{name}.weight").mul_(magnitude_mask(score, wanted.amount, block))
            return pruned
        if wanted.structure == "layers":
            return _without_layers(model, wanted, scores)
        return _narrower(model, wanted, scores)


def _scores(model: Transformer, wanted: PruneRecipe, tokens: Tensor | None) -> dict[str, Tensor]:
    """How much each weight of the layers' matrices counts."""
    names = [name for name, _ in projections(model) if name.startswith("layers.")]
    weights = {name: model.get_parameter(f"{name}.weight").detach() for name in names}
    if wanted.score == "magnitude":
        return {name: weight.abs().float() for name, weight in weights.items()}
    text = check_tokens(tokens, model, "a first-order score")
    gradients = weight_gradients(model, text[:, :-1].contiguous(), text[:, 1:].contiguous(), names)
    return {name: (weights[name] * gradients[name]).abs().float() for name in names}


def check_writable(config: ModelConfig, wanted: PruneRecipe) -> None:
    """Refuse what would be pruned and then found to have no place in a folder of the model's family."""
    if wanted.structure != "heads":
        return
    smaller, _ = smaller_config(config, wanted)
    try:
        family_of(smaller)
    except UsageError as error:
        raise UsageError(
            f"fewer heads of a {family_of(config)} model: folders of that family do not say how wide a head is, so "
            "what is left cannot be written: prune mlp or layers (mlp-25, layers-25), or a model of another family; "
            "tm.compress.prune gives the smaller model in Python"
        ) from error


def kept_units(score: Tensor, gone: int) -> Tensor:
    """Numbers of the units that stay, in their order; the lowest scores go, of equal ones the first."""
    order = score.argsort(stable=True)
    return order[gone:].sort().values


def smaller_config(config: ModelConfig, wanted: PruneRecipe) -> tuple[ModelConfig, int]:
    """The configuration after structured pruning, and how many units of each layer (or layers) go."""
    units = {"heads": config.kv_heads, "mlp": config.mlp_width, "layers": config.layers}[wanted.structure]
    gone = round(wanted.amount * units)
    if not 0 < gone < units:
        raise _takes_too_little_or_all(wanted, units, gone)
    if wanted.structure == "mlp":
        return config.replace(mlp_width=units - gone), gone
    if wanted.structure == "heads":
        each = config.heads // config.kv_heads
        if config.qk_norm == "full":
            raise UsageError("pruning heads under a norm over all heads (OLMo 2) changes the norm: prune mlp or layers")
        if config.latent_width:
            raise UsageError("pruning heads of latent attention: keys and values have no rows of their own in the "
                             "latent; prune mlp or layers")  # fmt: skip
        kept = units - gone
        return config.replace(heads=kept * each, kv_heads=kept, head_width=config.head_width), gone
    full = tuple(range(config.layers - gone)) if config.window else ()
    if full and config.full_layers:
        raise UsageError("layers of this model differ (sliding windows): prune heads or mlp")
    return config.replace(layers=units - gone), gone


def _takes_too_little_or_all(wanted: PruneRecipe, units: int, gone: int) -> UsageError:
    """Which whole percentages take something of so few units out, and leave something."""
    what = {"heads": "group of heads", "mlp": "channel", "layers": "layer"}[wanted.structure]
    if units == 1:
        others = " or ".join(name for name in ("heads", "mlp", "layers") if name != wanted.structure)
        return UsageError(
            f"prune.structure is {wanted.structure}, and the model's only {what} cannot go: set it to {others}"
        )
    some = [percent for percent in range(1, 100) if 0 < round(percent / 100 * units) < units]
    many = "groups of heads" if wanted.structure == "heads" else f"{what}s"
    taken = "none" if gone == 0 else "all"
    return UsageError(
        f"prune.amount {wanted.amount:g} takes {taken} of this model's {units} {many}: set it from "
        f"{some[0] / 100:g} to {some[-1] / 100:g} ({wanted.structure}-{some[0]} to {wanted.structure}-{some[-1]}), "
        f"which takes {'1' if units == 2 else f'1 to {units - 1}'}"
    )


def _narrower(model: Transformer, wanted: PruneRecipe, scores: dict[str, Tensor]) -> Transformer:
    """Without the heads or channels that count least in each layer."""
    config, gone = smaller_config(model.config, wanted)
    smaller = _empty(model, config)
    target = dict(smaller.named_parameters())
    keep: dict[str, Tensor] = {}
    for number, _ in model.layers.named_children():
        keep[number] = _kept_in_layer(model.config, wanted, scores, f"layers.{number}.", gone)
    for name, value in model.named_parameters():
        parts = name.split(".")
        cut = value.detach()
        if parts[0] == "layers":
            cut = _cut(cut, parts[-2], parts[-1], keep[parts[1]], model.config, wanted.structure)
        target[name].copy_(cut)
    return smaller


def _kept_in_layer(
    config: ModelConfig, wanted: PruneRecipe, scores: dict[str, Tensor], prefix: str, gone: int
) -> Tensor:
    if wanted.structure == "mlp":
        rows = [
            scores[f"{prefix}mlp.{name}"].square().sum(1)
            for name in ("fc_in", "fc_gate")
            if f"{prefix}mlp.{name}" in scores
        ]
        return kept_units(torch.stack([*rows, scores[f"{prefix}mlp.fc_out"].square().sum(0)]).sum(0), gone)
    # A group of query heads goes with its head of keys and values.
    group = [
        scores[f"{prefix}attention.{name}"].square().sum(1).view(config.kv_heads, -1).sum(1) for name in _HEAD_ROWS
    ]
    group.append(scores[f"{prefix}attention.fc_o"].square().sum(0).view(config.kv_heads, -1).sum(1))
    return kept_units(torch.stack(group).sum(0), gone)


def _cut(value: Tensor, module: str, last: str, keep: Tensor, config: ModelConfig, structure: str) -> Tensor:
    """What stays of a parameter of a layer."""
    dim = None
    if structure == "mlp" and module in ("fc_in", "fc_gate", "fc_out"):
        dim = 1 if module == "fc_out" else 0
    elif structure == "heads" and module in (*_HEAD_ROWS, "sinks", "fc_o"):
        dim = 1 if module == "fc_o" else 0
    if dim is None or (dim == 1 and last == "bias"):
        return value
    if structure == "mlp":
        return value.index_select(dim, keep)
    by_group = torch.unflatten(value, dim, (config.kv_heads, -1))
    return by_group.index_select(dim, keep).flatten(dim, dim + 1)


def _without_layers(model: Transformer, wanted: PruneRecipe, scores: dict[str, Tensor]) -> Transformer:
    """Without the layers whose matrices count least; the first and the last stay where others can go."""
    config, gone = smaller_config(model.config, wanted)
    sums = torch.zeros(model.config.layers)
    for name, score in scores.items():
        sums[int(name.split(".")[1])] += float(score.square().sum())
    if gone <= model.config.layers - 2:
        sums[0] = sums[-1] = torch.inf
    keep = kept_units(sums, gone).tolist()
    smaller = _empty(model, config)
    target = dict(smaller.named_parameters())
    for name, value in model.named_parameters():
        parts = name.split(".")
        if parts[0] == "layers":
            if int(parts[1]) not in keep:
                continue
            parts[1] = str(keep.index(int(parts[1])))
        target[".".join(parts)].copy_(value)
    return smaller


def _empty(model: Transformer, config: ModelConfig) -> Transformer:
    parameter = next(model.parameters())
    empty = Transformer(config, device="meta", dtype=parameter.dtype, kernels=model.kernels)
    empty.to_empty(device=parameter.device)
    return empty.train(model.training).requires_grad_(parameter.requires_grad)


def sparsity_at(wanted: PruneRecipe, progress: float) -> float:
    """The share of weights that is pruned after this share of the steps: a cubic rise (Zhu and Gupta 2017)."""
    if progress >= wanted.end:
        return wanted.amount
    if progress <= wanted.begin:
        return 0.0
    left = 1 - (progress - wanted.begin) / (wanted.end - wanted.begin)
    return wanted.amount * (1 - left**3)
