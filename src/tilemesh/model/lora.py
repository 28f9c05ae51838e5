"""Low-rank adapters on a model, and weights with adapters merged into them. `adapter.py` says what they are.

The one idea: an adapted module keeps its name and its weight, which no gradient is computed for, and has two more
parameters. So whatever trains, checkpoints or exchanges "the parameters that require gradients" trains adapters and
nothing else, and a checkpoint of such a run is as small as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.core.files import check_finished, ensure_folder, replacing
from tilemesh.model import huggingface
from tilemesh.model.adapter import A, B, LoraConfig, adapted_modules, peft_config, peft_names
from tilemesh.model.config import ModelConfig
from tilemesh.model.fresh import draw
from tilemesh.model.kinds import Adapted, put
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


def save_adapter(adapters: Mapping[str, Tensor], model: ModelConfig, lora: LoraConfig, folder: str | Path) -> None:
    """Write adapters by our names as a folder that `peft.PeftModel.from_pretrained(base, folder)` reads."""
    target, tensors = Path(folder), {}
    for ours, theirs in peft_names(model, lora).items():
        for part, called in ((A, "lora_A"), (B, "lora_B")):
            tensors[f"base_model.model.{theirs}.{called}.weight"] = adapters[f"{ours}.{part}"].contiguous()
    ensure_folder(target)
    text = json.dumps(peft_config(model, lora), indent=2, sort_keys=True)
    with replacing(target / PEFT_CONFIG) as config_part, replacing(target / PEFT_WEIGHTS) as weights_part:
        save_file(tensors, weights_part, metadata={"format": "pt"})
        config_part.write_text(text + "\n", encoding="utf-8")
