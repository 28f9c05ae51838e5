"""Models to compile in a benchmark or a test: a dozen of transformers' with random weights, and an LSTM of torch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilemesh.core.errors import RunError, unknown


@dataclass(frozen=True)
class ModelSize:
    """How large a model is, and its batch. Pictures are `side` x `side`."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int
    side: int


SIZES: Mapping[str, ModelSize] = {
    "tiny": ModelSize(64, 2, 4, 128, 2, 16, 32),
    "small": ModelSize(256, 4, 4, 2048, 4, 128, 64),
    "gpt2": ModelSize(768, 12, 12, 50304, 8, 1024, 224),
}
"""`gpt2` has the width, layers and context of GPT-2 124M: for a GPU."""


@dataclass(frozen=True)
class Trained:
    """A model and what a training step gives it; `loss` calls a (compiled) form of it."""

    module: nn.Module
    inputs: Mapping[str, torch.Tensor]

    def loss(self, call: Callable[..., Any]) -> torch.Tensor:
        result = call(**self.inputs)
        return result if isinstance(result, torch.Tensor) else result.loss

    def step(self, call: Callable[..., Any]) -> torch.Tensor:
        """Forward and backward; gradients begin anew."""
        self.module.zero_grad(set_to_none=True)
        loss = self.loss(call)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


class LongShortTermMemory(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.table = nn.Embedding(size.vocabulary, size.width)
        self.cell = nn.LSTM(size.width, size.width, size.layers, batch_first=True)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.cell(self.table(input_ids))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _transformers() -> Any:
    return importlib.import_module("transformers")


def _text(kind: str, size: ModelSize, **more: Any) -> Any:
    transformers = _transformers()

    given = {
        "hidden_size": size.width, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "vocab_size": size.vocabulary, "intermediate_size": 2 * size.width, "max_position_embeddings": 2 * size.tokens,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**given | more)
    head = "ForMaskedLM" if kind == "Bert" else "ForCausalLM"
    return getattr(transformers, f"{kind}{head}")(config)


def _gpt2(size: ModelSize) -> Any:
    transformers = _transformers()

    config = transformers.GPT2Config(
        n_embd=size.width, n_layer=size.layers, n_head=size.heads, vocab_size=size.vocabulary, n_positions=size.tokens,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _t5(size: ModelSize) -> Any:
    transformers = _transformers()

    config = transformers.T5Config(
        d_model=size.width, d_kv=size.width // size.heads, d_ff=2 * size.width, num_layers=size.layers,
        num_heads=size.heads, vocab_size=size.vocabulary, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _vit(size: ModelSize) -> Any:
    transformers = _transformers()

    config = transformers.ViTConfig(
        hidden_size=size.width, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        intermediate_size=2 * size.width, image_size=size.side, patch_size=8,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def _resnet(size: ModelSize) -> Any:
    transformers = _transformers()

    widths = [size.width // 4, size.width // 2, size.width, size.width]
    config = transformers.ResNetConfig(
        embedding_size=size.width // 4, hidden_sizes=widths, depths=[2, 2, 2, 2], layer_type="basic"
    )
    return transformers.ResNetForImageClassification(config)


def _grouped(size: ModelSize) -> dict[str, Any]:
    return {"num_key_value_heads": size.heads // 2}


MODELS: Mapping[str, Callable[[ModelSize], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": lambda size: _text("Llama", size, **_grouped(size)),
    "bert": lambda size: _text("Bert", size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "t5": _t5,
    "mistral": lambda size: _text("Mistral", size, **_grouped(size)),
    "qwen2": lambda size: _text("Qwen2", size, **_grouped(size)),
    "gemma2": lambda size: _text("Gemma2", size, head_dim=size.width // size.heads, **_grouped(size)),
    "mixtral": lambda size: _text(
        "Mixtral", size, num_local_experts=4, experts_implementation="eager", **_grouped(size)
    ),
    "opt": lambda size: _text("OPT", size, ffn_dim=2 * size.width, word_embed_proj_dim=size.width, dropout=0.0),
    "gpt-neox": lambda size: _text("GPTNeoX", size),
    "vit": _vit,
    "resnet": _resnet,
    "lstm": LongShortTermMemory,
}


def make_trained(name: str, size: ModelSize, dtype: torch.dtype, device: torch.device | str = "cpu") -> Trained:
    """A model by name, with random weights and inputs that a seed decides."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    if name != "lstm" and importlib.util.find_spec("transformers") is None:
        raise RunError(f"{name} is a model of transformers, which is not installed: pip install transformers")
    torch.manual_seed(0)
    module = MODELS[name](size).to(device=device, dtype=dtype).train()
    if name in ("vit", "resnet"):
        picture = torch.randn(size.batch, 3, size.side, size.side, dtype=dtype, device=device)
        labels = torch.arange(size.batch, device=device) % 2
        return Trained(module, {"pixel_values": picture, "labels": labels})
    ids = torch.randint(3, size.vocabulary, (size.batch, size.tokens), device=device)
    return Trained(module, {"input_ids": ids, "labels": ids})
