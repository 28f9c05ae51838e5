"""Models to compile in a benchmark or a test: a dozen of transformers' with random weights, an LSTM of torch, and
blocks of GPT-2 and Llama in plain torch."""

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
    "gpt2-blocks": ModelSize(768, 4, 12, 50304, 32, 1024, 224),
    "llama-blocks": ModelSize(2048, 2, 32, 32000, 8, 2048, 224),
    "pictures": ModelSize(256, 4, 4, 2048, 64, 128, 224),
}
"""`gpt2` has the width, layers and context of GPT-2 124M: for a GPU. `gpt2-blocks` and `llama-blocks` are some blocks
of GPT-2 124M and of TinyLlama 1.1B with batches of 32 x 1024 and 8 x 2048 tokens; `pictures` fills a GPU with 64
pictures of 224 x 224."""


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


class GptBlock(nn.Module):
    """A block of GPT-2 as one writes it in plain torch: layer norms, biases, one product for q, k and v, GELU."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        hidden = nn.functional.gelu(self.up(self.second(x)), approximate="tanh")
        return x + self.down(hidden)  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """A block of Llama: RMS norms, q, k and v by products of their own, rotary positions, a gated MLP."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        width, self.heads, self.narrow = size.width, size.heads, max(1, size.heads // 4)
        self.wide = width // size.heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, self.narrow * self.wide, bias=False) for _ in range(2))
        inner = 11 * width // 4
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        angles = torch.arange(size.tokens)[:, None] / 10_000 ** (torch.arange(0, self.wide, 2) / self.wide)
        self.register_buffer("cosine", angles.cos().repeat(1, 2))
        self.register_buffer("sine", angles.sin().repeat(1, 2))
        self.cosine: torch.Tensor
        self.sine: torch.Tensor

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return x * self.cosine + torch.cat([-right, left], -1) * self.sine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first(x)
        q, k, v = (each(normed).unflatten(-1, (-1, self.wide)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(
            self._turned(q), self._turned(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        normed = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))  # type: ignore[no-any-return]


class BlockStack(nn.Module):
    """Embedding, blocks, a last norm, the head and the loss: a language model in plain torch."""

    def __init__(self, size: ModelSize, block: Callable[[ModelSize], nn.Module]) -> None:
        super().__init__()
        self.table = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width) if block is GptBlock else nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def _of_transformers(config: str, model: str, **settings: Any) -> Any:
    """A model of transformers, by the names of its two classes."""
    transformers = importlib.import_module("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def _text(kind: str, size: ModelSize, **more: Any) -> Any:
    sizes = {
        "hidden_size": size.width, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "vocab_size": size.vocabulary, "intermediate_size": 2 * size.width, "max_position_embeddings": 2 * size.tokens,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    head = "ForMaskedLM" if kind == "Bert" else "ForCausalLM"
    return _of_transformers(f"{kind}Config", f"{kind}{head}", **sizes | more)


def _gpt2(size: ModelSize) -> Any:
    return _of_transformers(
        "GPT2Config", "GPT2LMHeadModel", n_embd=size.width, n_layer=size.layers, n_head=size.heads,
        vocab_size=size.vocabulary, n_positions=size.tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def _t5(size: ModelSize) -> Any:
    return _of_transformers(
        "T5Config", "T5ForConditionalGeneration", d_model=size.width, d_kv=size.width // size.heads,
        d_ff=2 * size.width, num_layers=size.layers, num_heads=size.heads, vocab_size=size.vocabulary,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip


def _vit(size: ModelSize) -> Any:
    return _of_transformers(
        "ViTConfig", "ViTForImageClassification", hidden_size=size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, intermediate_size=2 * size.width, image_size=size.side, patch_size=8,
    )  # fmt: skip


def _resnet(size: ModelSize) -> Any:
    return _of_transformers(
        "ResNetConfig", "ResNetForImageClassification", embedding_size=size.width // 4,
        hidden_sizes=[size.width // 4, size.width // 2, size.width, size.width], depths=[2, 2, 2, 2],
        layer_type="basic",
    )  # fmt: skip


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
    "gpt2-blocks": lambda size: BlockStack(size, GptBlock),
    "llama-blocks": lambda size: BlockStack(size, LlamaBlock),
}
OF_TORCH = ("lstm", "gpt2-blocks", "llama-blocks")  # written here; the others are transformers'


def make_trained(name: str, size: ModelSize, dtype: torch.dtype, device: torch.device | str = "cpu") -> Trained:
    """A model by name, with random weights and inputs that a seed decides."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    if name not in OF_TORCH and importlib.util.find_spec("transformers") is None:
        raise RunError(f"{name} is a model of transformers, which is not installed: pip install transformers")
    torch.manual_seed(0)
    module = MODELS[name](size).to(device=device, dtype=dtype).train()
    if name in ("vit", "resnet"):
        picture = torch.randn(size.batch, 3, size.side, size.side, dtype=dtype, device=device)
        labels = torch.arange(size.batch, device=device) % 2
        return Trained(module, {"pixel_values": picture, "labels": labels})
    ids = torch.randint(3, size.vocabulary, (size.batch, size.tokens), device=device)
    return Trained(module, {"input_ids": ids, "labels": ids})
