"""Low-rank adapters (LoRA) as values: what is configured, which modules get one, and what PEFT calls them. No torch.

An adapter of rank r adds (alpha / r) B A to a frozen matrix W (out x in): A is r x in, B is out x r (Hu et al. 2021).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tilemesh.core.config import check_fields
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.ranges import Range
from tilemesh.model.config import ModelConfig
from tilemesh.model.families.book import FAMILIES, family_of
from tilemesh.model.work.weights import layer_matrices

A, B = "lora_a", "lora_b"
"""The parameters that an adapted module has besides its weight and bias."""


@dataclass(frozen=True)
class LoraConfig:
    """Fine-tuning by low-rank adapters (LoRA): the weights of `--init` stay frozen, and small matrices beside them are
    trained, checkpointed and, with `tilemesh export --adapter`, written for PEFT."""

    rank: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Rank of the adapters; 0: no adapters, all weights are trained."""
    alpha: Annotated[float, Range(0, above=True)] = 16.0
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ("fc_q", "fc_k", "fc_v", "fc_o")
    """The matrices of a layer that get an adapter: some of fc_q, fc_k, fc_v, fc_o (attention), fc_in, fc_gate, fc_out
    (MLP)."""
    base: Path | None = None
    """The Hugging Face folder with the frozen weights; `--init` sets it."""

    def __post_init__(self) -> None:
        check_fields(self, "lora.")
        if self.rank and not self.targets:
            raise UsageError("lora.targets is empty: name some of the matrices, such as fc_q,fc_v")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adapted_modules(model: ModelConfig, lora: LoraConfig) -> list[str]:
    """Full names of the modules that get an adapter."""
    shapes = matrix_shapes(model)
    known = {name.rpartition(".")[2] for name in shapes}
    for target in lora.targets:
        if target not in known:
            raise unknown("lora.targets entry", target, sorted(known))
    return [name for name in shapes if name.rpartition(".")[2] in lora.targets]


def matrix_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Full names of the layers' matrices, and (outputs, inputs) of each."""
    return {
        f"layers.{layer}.{weight.name}": (weight.outputs, weight.inputs)
        for layer in range(model.layers)
        for weight in layer_matrices(model.of_layer(layer))
    }


def adapter_parameters(model: ModelConfig, lora: LoraConfig) -> int:
    """How many numbers are trained."""
    shapes = matrix_shapes(model)
    return sum(lora.rank * sum(shapes[name]) for name in adapted_modules(model, lora))


def peft_forms(model: ModelConfig) -> dict[str, str]:
    """What PEFT calls a layer's matrices, by our names inside of it: those that are one matrix on both sides."""
    family = FAMILIES[family_of(model)]
    renamed = {theirs: name.removesuffix(".weight") for theirs, name in family.renamed(model).items()}
    return {
        ours.format(expert): renamed.get(f"{name}.weight", name).format(expert)
        for name, (ours, *others) in family.modules.items()
        for expert in (range(model.experts) if "{}" in name else (0,))
        if not others and ("{}" in name or "{}" not in ours)
    }


def peft_rows(model: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Of matrices whose rows have another order on their side, that order, by our names inside of a layer."""
    family = FAMILIES[family_of(model)]
    return {family.modules[theirs][0]: rows for theirs, rows in family.orders(model).items()}


def peft_names(model: ModelConfig, lora: LoraConfig) -> dict[str, str]:
    """Our module: what PEFT calls it, for every adapted module; refused where theirs is several of ours in one."""
    family, theirs = FAMILIES[family_of(model)], peft_forms(model)
    names = {}
    for module in adapted_modules(model, lora):
        _, layer, inner = module.split(".", 2)
        if inner not in theirs:
            known = {inner, re.sub(r"\d+", "{}", inner)}  # an expert's number
            (whole,) = [name for name, parts in family.modules.items() if known & {*parts}]
            raise UsageError(
                f"an adapter of {inner} has no PEFT form: {family.architecture} has it inside {whole}, one matrix of "
                f"several; leave --adapter out, which writes the merged model, or leave it out of lora.targets"
            )
        names[module] = f"{family.prefix}{family.layer.format(layer)}{theirs[inner]}"
    return names


def peft_config(model: ModelConfig, lora: LoraConfig) -> Mapping[str, Any]:
    """The content of PEFT's adapter_config.json; refused for experts, to which PEFT would not apply it."""
    for module in adapted_modules(model, lora):
        if ".experts." in module:
            raise UsageError(
                f"an adapter of {module} has no PEFT form: transformers keeps a layer's experts in one tensor, not in "
                "modules; leave --adapter out, which writes the merged model, or leave their matrices out of "
                "lora.targets"
            )
    family = FAMILIES[family_of(model)]
    layer = family.prefix + family.layer.format(0)
    modules = sorted(name.removeprefix(layer) for name in peft_names(model, lora).values() if name.startswith(layer))
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0,
        "target_modules": modules, "bias": "none", "inference_mode": True, "init_lora_weights": True,
        "fan_in_fan_out": any(name in family.transposed for name in modules),
        "base_model_name_or_path": None if lora.base is None else str(lora.base),
    }  # fmt: skip
