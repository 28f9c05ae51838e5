"""Eleven modules that are no Transformers of ours, placed on meshes: each trains as one process does."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
from float64_source import read_as_float64
from test_placed_module import D, Loss, itself, require_equal

Case = tuple[nn.Module, Any, Loss]
"""A module, what it is called with, and the loss of what it returns."""
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def own_loss(result: Any) -> Tensor:
    return result.loss  # type: ignore[no-any-return]


def bert() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=16, **SIZES, **NO_DROPOUT)
    tokens, mask = torch.randint(0, 40, (4, 6)), torch.ones(4, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    example = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    return transformers.BertForMaskedLM(config).to(D), example, own_loss


def gpt2() -> Case:
    """The loss is the caller's: that of Hugging Face is in float32."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(0, 40, (4, 6))

    def loss(result: Any) -> Tensor:
        return functional.cross_entropy(result.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return transformers.GPT2LMHeadModel(config).to(D), {"input_ids": tokens}, loss


def vit() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=5, **SIZES, **NO_DROPOUT)
    example = {"pixel_values": torch.randn(4, 3, 8, 8, dtype=D), "labels": torch.randint(0, 5, (4,))}
    return transformers.ViTForImageClassification(config).to(D), example, own_loss


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.other_norm = nn.Conv2d(8, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.first(x))), 2)
        x = functional.relu(self.other_norm(self.second(x)), inplace=True)
        return functional.cross_entropy(self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1)), y)


def cnn() -> Case:
    return Cnn().to(D), [torch.randn(8, 3, 8, 8, dtype=D), torch.randint(0, 5, (8,))], itself


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(20, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 20)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.rnn(self.table(x))[0]).flatten(0, 1), y.flatten())


def lstm() -> Case:
    return Lstm().to(D), [torch.randint(0, 20, (4, 3)) for _ in range(2)], itself


class Experts(nn.Module):
    """Each token by the two best of four experts, all of them computed and weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 8) / 3), nn.Parameter(torch.randn(4, 8, 6) / 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        chances = torch.softmax(self.router(x), -1)
        best, who = chances.topk(2, -1)
        gates = torch.zeros_like(chances).scatter(-1, who, best / best.sum(-1, keepdim=True))
        inner = functional.gelu(torch.einsum("nd,edf->enf", x, self.up))
        return functional.mse_loss(torch.einsum("enf,efd,ne->nd", inner, self.down, gates) + x, y)


def experts() -> Case:
    return Experts().to(D), [torch.randn(8, 6, dtype=D) for _ in range(2)], itself


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = block(3, 8), block(8, 8), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.last, self.head = block(16, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = self.middle(functional.avg_pool2d(fine, 2))
        return functional.mse_loss(self.head(self.last(torch.cat([self.up(coarse), fine], 1))), y)


def unet() -> Case:
    return UNet().to(D), [torch.randn(4, 3, 8, 8, dtype=D) for _ in range(2)], itself


class Recommender(nn.Module):
    """Products of all pairs of embeddings, as DLRM has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(23, 6), nn.Embedding(11, 6)])
        self.bag, self.bottom, self.top = nn.EmbeddingBag(17, 6), nn.Linear(4, 6), nn.Linear(6 + 6, 1)

    def forward(self, numbers: Tensor, ids: Tensor, several: Tensor, y: Tensor) -> Tensor:
        looked_up = [table(ids[:, place]) for place, table in enumerate(self.tables)]
        all_ = torch.stack([torch.relu(self.bottom(numbers)), *looked_up, self.bag(several)], 1)
        rows, columns = torch.tril_indices(4, 4, -1)
        pairs = torch.bmm(all_, all_.transpose(1, 2))[:, rows, columns]
        scores = self.top(torch.cat([all_[:, 0], pairs], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(scores, y)


def recommender() -> Case:
    ids = torch.stack([torch.randint(0, rows, (8,)) for rows in (23, 11)], 1)
    several, y = torch.randint(0, 17, (8, 3)), torch.randint(0, 2, (8,)).to(D)
    return Recommender().to(D), [torch.randn(8, 4, dtype=D), ids, several, y], itself


class Diffusion(nn.Module):
    """Predicts the noise in a picture, told how much of it there is; what is coarse attends to all of the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.last = block(3, 8), block(8, 8), block(16, 8)
        self.time, self.head = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 8)), nn.Conv2d(8, 3, 1)
        self.norm, self.qkv, self.out = nn.GroupNorm(4, 8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-torch.arange(3, dtype=D))
        amount = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        fine = self.down(t.cos()[:, None, None, None] * x + t.sin()[:, None, None, None] * noise)
        coarse = self.middle(functional.avg_pool2d(fine, 2) + amount[:, :, None, None])
        rows = self.norm(coarse).flatten(2).transpose(1, 2)
        q, k, v = (each.unflatten(2, (2, 4)).transpose(1, 2) for each in self.qkv(rows).chunk(3, 2))
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        coarse = coarse + self.out(attended).transpose(1, 2).unflatten(2, coarse.shape[2:])
        up = functional.interpolate(coarse, scale_factor=2, mode="nearest")
        return functional.mse_loss(self.head(self.last(torch.cat([up, fine], 1))), noise)


def diffusion() -> Case:
    return Diffusion().to(D), [*(torch.randn(8, 3, 8, 8, dtype=D) for _ in range(2)), torch.rand(8, dtype=D)], itself


def of_tokens(kind: str, config: Any, *names: str) -> Case:
    """A model of transformers whose norms are in float64 too, called with tokens by these names."""
    transformers = pytest.importorskip("transformers")
    source = read_as_float64(sys.modules[getattr(transformers, kind).__module__])
    tokens = torch.randint(0, 40, (4, 6))

    def loss(result: Any) -> Tensor:
        return functional.cross_entropy(result.logits.flatten(0, 1), tokens.flatten())

    return getattr(source, kind)(config).to(D), dict.fromkeys(names, tokens), loss


def t5() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return of_tokens("T5ForConditionalGeneration", config, "input_ids", "decoder_input_ids")


def mixtral() -> Case:
    """A loop over experts asks for tensors' values, and torch's grouped product takes no float64: by batched ones."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=40, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=16, use_cache=False,
        experts_implementation="batched_mm", **SIZES,
    )  # fmt: skip
    return of_tokens("MixtralForCausalLM", config, "input_ids")


Q_K_V = r"(query|key|value|[qkv]_proj|intermediate\.dense|fc1)\.weight$"
MODULES: dict[str, tuple[Callable[[], Case], dict[str, str]]] = {
    "bert": (bert, {Q_K_V: "tp:S0"}),
    "gpt2": (gpt2, {r"(c_attn|c_fc)\.weight$": "tp:S1", r"wte\.weight$": "tp:S0"}),
    "vit": (vit, {Q_K_V: "tp:S0"}),
    "cnn": (cnn, {r"first\.weight$": "tp:S0", r"head\.weight$": "tp:S0"}),
    "lstm": (lstm, {r"weight_.h_l0$": "tp:S0", r"table\.weight$": "tp:S0"}),
    "experts": (experts, {r"^(up|down)$": "tp:S0"}),
    "unet": (unet, {r"down\.0\.weight$": "tp:S0"}),
    "recommender": (recommender, {r"tables.*weight$": "tp:S0", r"bag\.weight$": "tp:S1"}),
    "t5": (t5, {r"\.(q|k|v|wi)\.weight$": "tp:S0"}),
    "mixtral": (mixtral, {r"[qkv]_proj\.weight$": "tp:S0", r"experts\.gate_up_proj$": "tp:S0"}),
    "diffusion": (diffusion, {r"down\.0\.weight$": "tp:S0", r"time\.0\.weight$": "cp:S0"}),
}
MESHES = ({"dp": 2, "tp": 2}, {"tp": 2}, {"dp": 2}, {"dp": 4}, {"tp": 4})
SLOW = ("vit", "t5")
CASES = [
    pytest.param(name, axes, id=f"{name}-{axes}", marks=[pytest.mark.slow] if turn or name in SLOW else [])
    for name in MODULES
    for turn, axes in enumerate(({"dp": 2, "cp": 2, "tp": 2},) if name == "diffusion" else MESHES)
]


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_a_module_trains_on_ranks_as_one_process_does(name: str, axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    make, cuts = MODULES[name]
    module, example, loss = make()
    pins: dict[str, str] = {}
    for words, placement in cuts.items():
        if placement[:2] in axes:
            fitting = [name for name, _ in module.named_parameters() if re.search(words, name)]
            assert fitting, words
            pins |= dict.fromkeys(fitting, placement)
    if "dp" in axes:
        inputs = example if isinstance(example, dict) else [f"input{place}" for place in range(len(example))]
        pins |= dict.fromkeys(inputs, "dp:S0")
    held, exchanged = require_equal(module, example, axes, pins, loss)
    whole = sum(value.numel() for value in module.parameters())
    assert held < whole or "tp" not in axes
    assert {words.split()[1] for words in exchanged} == set(axes), "ranks of every axis work together"
    if name == "bert" and axes == {"tp": 2}:
        # Megatron's: in each direction a sum where attention and where the MLP end, and one more for each of q, k, v.
        assert exchanged.count("all_reduce tp") == 6
