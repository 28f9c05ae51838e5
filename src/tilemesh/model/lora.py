"""Low-rank adapters on a model, and weights with adapters merged into them. `adapter.py` says what they are.

The one idea: an adapted module keeps its name and its weight, which no gradient is computed for, and has two more
parameters. So whatever trains, checkpoints or exchanges "the parameters that require gradients" trains adapters and
nothing else, and a checkpoint of such a run is as small as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.core.files import check_finished, ensure_folder, read_json_object, replacing
from tilemesh.core.ranges import shown
from tilemesh.model import huggingface
from tilemesh.model.adapter import (
    A,
    B,
    LoraConfig,
    adapted_modules,
    matrix_shapes,
    peft_config,
    peft_forms,
    peft_names,
    peft_rows,
)
from tilemesh.model.config import ModelConfig
from tilemesh.model.families.book import FAMILIES, family_of
from tilemesh.model.fresh import draw
from tilemesh.model.kinds import Adapted, AdapterRows, projections, put
from tilemesh.model.linear import Linear, as_kind
from tilemesh.model.read import Weights
from tilemesh.model.transformer import Transformer

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def attach(model: Transformer, lora: LoraConfig, seed: int) -> None:
    """Give a model adapters that change nothing yet (B is 0), and freeze everything else."""
    model.requires_grad_(False)
    like = next(model.parameters())
    for name in adapted_modules(model.config, lora):
        layer = model.get_submodule(name)
        assert isinstance(layer, Linear)
        low = draw(f"{name}.{A}", (lora.rank, layer.in_features), seed, model.config.layers)
        values = {A: low.to(like), B: like.new_zeros(layer.out_features, lora.rank)}
        put(model, name, as_kind(layer, Adapted(layer.kind, lora.rank, lora.scale), **values))


class MergedWeights:
    """Whole weights of a model, adapters added: `Weights` for whoever reads, serves or exports a model."""

    def __init__(self, lora: LoraConfig, adapters: Weights, modules: list[str]) -> None:
        """`adapters`: where A and B of the modules are found."""
        if lora.base is None or not (lora.base / "config.json").is_file():
            if lora.base is not None:
                check_finished(lora.base)
            raise UsageError(
                f"lora.base {lora.base} has no config.json: the adapters are additions to the weights of that folder; "
                "put it back, or set lora.base in the run's configuration to where it is now"
            )
        self.lora, self.adapters, self.modules = lora, adapters, set(modules)
        self.base = dict(huggingface.read_parameters(lora.base))

    def weight(self, name: str) -> Tensor:
        whole = self.base[name]
        module = name.removesuffix(".weight")
        if module not in self.modules or module == name:
            return whole
        low, high = (self.adapters.weight(f"{module}.{part}").float() for part in (A, B))
        return (whole.float() + self.lora.scale * (high @ low)).to(whole.dtype)


class PeftAdapter(NamedTuple):
    """An adapter that was read: of each module A (r, K), and B (N, r), which has the scale."""

    rank: int
    tensors: Mapping[str, tuple[Tensor, Tensor]]


_PLAIN_FIELDS: Mapping[str, Any] = {
    "bias": "none",
    "modules_to_save": None,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Of PEFT's adapter_config.json: what the others mean is more than two thin matrices under one scale."""


def read_adapter(folder: str | Path, model: ModelConfig) -> PeftAdapter:
    """What PEFT's `save_pretrained` or `save_adapter` wrote for a model of this shape."""
    path = Path(folder)
    for name in (PEFT_CONFIG, PEFT_WEIGHTS):
        if not (path / name).is_file():
            raise UsageError(f"{path} has no {name}: expected a folder that PEFT wrote, with safetensors")
    told = read_json_object(path / PEFT_CONFIG)
    if told.get("peft_type") != "LORA":
        raise UsageError(f"{path / PEFT_CONFIG}: peft_type is {shown(told.get('peft_type'))}: only LORA is served")
    for name, plain in _PLAIN_FIELDS.items():
        if (value := told.get(name, plain)) and value != plain:
            raise UsageError(f"{path / PEFT_CONFIG}: {name} is {shown(value)}: only {shown(plain)} is served")
    rank, alpha = told.get("r"), told.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise UsageError(f"{path / PEFT_CONFIG}: r is {shown(rank)} and lora_alpha {shown(alpha)}: expected numbers")
    scale = alpha / (rank**0.5 if told.get("use_rslora") else rank)
    family, shapes, forms = FAMILIES[family_of(model)], matrix_shapes(model), peft_forms(model)
    theirs = {}
    for module in shapes:
        _, layer, inner = module.split(".", 2)
        if inner in forms and ".experts." not in module:
            theirs[f"base_model.model.{family.prefix}{family.layer.format(layer)}{forms[inner]}"] = module
    read, rows = load_file(path / PEFT_WEIGHTS), peft_rows(model)
    tensors: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted(read):
        base = name.removesuffix(".lora_A.weight")
        if base == name and name.removesuffix(".lora_B.weight").join(("", ".lora_A.weight")) in read:
            continue  # with its A
        high = read.get(f"{base}.lora_B.weight")
        if base not in theirs or high is None:
            raise UsageError(
                f"{path / PEFT_WEIGHTS} has {name}, which is no adapter of a matrix that is served: expected A and B "
                f"of {', '.join(sorted({known.rpartition('.')[2] for known in theirs}))}"
            )
        (outputs, inputs), low = shapes[theirs[base]], read[name]
        if low.shape != (rank, inputs) or high.shape != (outputs, rank):
            raise UsageError(
                f"{path / PEFT_WEIGHTS}: {base} has A {tuple(low.shape)} and B {tuple(high.shape)}, expected "
                f"{(rank, inputs)} and {(outputs, rank)}: it was made for another model"
            )
        if order := rows.get(theirs[base].split(".", 2)[2]):
            high = torch.empty_like(high).index_copy_(0, torch.tensor(order), high)
        tensors[theirs[base]] = (low.float(), high.float() * scale)
    return PeftAdapter(rank, tensors)


def give_slots(model: Transformer, slots: int, rank: int) -> AdapterRows:
    """Let a model that serves hold so many adapters of so high a rank beside each other; none changes anything yet.

    Not in experts: which tokens one of them sees is known to its router alone.
    """
    rows = AdapterRows(slots, rank)
    like = next(model.parameters())
    for name, layer in list(projections(model)):
        if name.startswith("layers.") and ".experts." not in name:
            zeros = {
                A: like.new_zeros(slots * rank, layer.in_features),
                B: like.new_zeros(layer.out_features, slots * rank),
            }
            kind = layer.kind.base if isinstance(layer.kind, Adapted) and layer.kind.rows is not None else layer.kind
            put(model, name, as_kind(layer, Adapted(kind, slots * rank, 1.0, rows), **zeros))
    return rows


def save_adapter(adapters: Mapping[str, Tensor], model: ModelConfig, lora: LoraConfig, folder: str | Path) -> None:
    """Write adapters by our names as a folder that `peft.PeftModel.from_pretrained(base, folder)` reads."""
    target, tensors, rows = Path(folder), {}, peft_rows(model)
    for ours, theirs in peft_names(model, lora).items():
        low, high = (adapters[f"{ours}.{part}"] for part in (A, B))
        if order := rows.get(ours.split(".", 2)[2]):
            high = high[list(order)]
        for called, part in (("lora_A", low), ("lora_B", high)):
            tensors[f"base_model.model.{theirs}.{called}.weight"] = part.contiguous()
    ensure_folder(target)
    text = json.dumps(peft_config(model, lora), indent=2, sort_keys=True)
    with replacing(target / PEFT_CONFIG) as config_part, replacing(target / PEFT_WEIGHTS) as weights_part:
        save_file(tensors, weights_part, metadata={"format": "pt"})
        config_part.write_text(text + "\n", encoding="utf-8")
