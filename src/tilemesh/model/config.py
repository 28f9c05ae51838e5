"""What a Transformer is, as data: its shape, and the presets by name.

The one idea: everything that is said about a model before it exists (memory, FLOPs, time) follows from these few
numbers (`model/work/`), so they are checked here and nowhere else. No torch: the planner reads this file on machines
without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tilemesh.core.config import to_dict
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.ranges import Range, shown

Norm = Literal["layernorm", "rmsnorm"]
NormPlace = Literal["pre", "post"]
Positions = Literal["learned", "rotary"]
Activation = Literal["relu", "gelu", "swiglu"]

_SWIGLU_MULTIPLE = 256  # Llama rounds the MLP's width up to this


# Far beyond any model that was trained, and small enough that everything computed from them is quick and finite.
SIZES = {
    "layers": Range(1, 10_000), "width": Range(1, 10_000_000), "heads": Range(1, 1_000_000),
    "vocabulary": Range(1, 1_000_000_000), "context": Range(1, 1_000_000_000), "kv_heads": Range(0, 1_000_000),
    "mlp_width": Range(0, 100_000_000),
}  # fmt: skip
NUMBERS = {"dropout": Range(0, 1, below=True), "norm_epsilon": Range(0), "rotary_base": Range(0, above=True)}


VOCABULARY_MULTIPLE = 64
"""What a whole model on a GPU rounds its vocabulary up to a multiple of: 128-byte lines of 16-bit numbers."""


@dataclass(frozen=True)
class ModelConfig:
    """The Transformer, a decoder."""

    layers: int
    """Layers, each of an attention block and an MLP."""
    width: int
    """Width of the residual stream, also called hidden size or d_model."""
    heads: int
    """Attention heads (of queries)."""
    vocabulary: int
    """How many different tokens there are; 256 where text is read as bytes."""
    context: int
    """Tokens of the longest sequence; the rows of a learned position table."""
    kv_heads: int = 0
    """Heads of keys and values; fewer than `heads` is grouped-query attention; 0: as many as `heads`."""
    mlp_width: int = 0
    """Hidden width of the MLP; 0: 4 x width, or for swiglu 8/3 x width rounded up to a multiple of 256."""
    norm: Norm = "layernorm"
    """Kind of normalization."""
    norm_place: NormPlace = "pre"
    """pre: each block's input is normalized; post: the sum of its input and output is."""
    positions: Positions = "learned"
    """How positions enter: a learned table that is added to the embedding, or rotary embeddings of queries and keys."""
    activation: Activation = "gelu"
    """Of the MLP; gelu is the tanh approximation, as in GPT-2; swiglu has a gate, a second projection."""
    biases: bool = True
    """Whether projections have biases; a LayerNorm always has one, an RMSNorm never."""
    tied: bool = True
    """Whether the output projection is the token embedding."""
    dropout: float = 0.0
    """Probability of dropout after the embedding, attention and MLP."""
    norm_epsilon: float = 1e-5
    """Added to the variance in every norm."""
    rotary_base: float = 10_000.0
    """Base of the rotary frequencies, also called theta."""

    def __post_init__(self) -> None:
        for name, sizes in SIZES.items():
            sizes.check(f"model.{name}", getattr(self, name), whole=True)
        for name in ("biases", "tied"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"model.{name} is {shown(getattr(self, name))}: expected true or false")
        for name, numbers in NUMBERS.items():
            numbers.check(f"model.{name}", getattr(self, name))
        choices = {"norm": Norm, "norm_place": NormPlace, "positions": Positions, "activation": Activation}
        for name, choice in choices.items():
            if getattr(self, name) not in get_args(choice):
                raise unknown(name, str(getattr(self, name)), get_args(choice))
        # Frozen, yet whoever reads the config should meet a number and never "0 means".
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "mlp_width", self.mlp_width or _default_mlp_width(self.width, self.activation))
        if self.width % self.heads:
            raise UsageError(
                f"width {self.width} is not divisible by {self.heads} heads: set model.heads to a divisor of the width"
            )
        if self.heads % self.kv_heads:
            raise UsageError(
                f"{self.heads} heads do not share {self.kv_heads} kv_heads evenly: set model.kv_heads to a divisor of "
                f"{self.heads}"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise UsageError(
                f"rotary positions turn pairs and a head is {self.head_width} wide: expected an even width"
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Width of all keys together; the values are as wide."""
        return self.kv_heads * self.head_width

    @property
    def mlp_inputs(self) -> int:
        """Projections into the MLP: swiglu has a gate beside the value."""
        return 2 if self.activation == "swiglu" else 1

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


_LLAMA = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "biases": False, "tied": False}

# Plain dicts, so that what a preset leaves open (kv_heads, mlp_width) still follows a width or heads set over it.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Small enough for two CPU cores, bytes as tokens; grouped-query and swiglu, so that nothing of a Llama is untried.
    "tiny": {"layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "vocabulary": 256, "context": 128, **_LLAMA},
    # Radford et al. 2019, the smallest; Hugging Face `gpt2`.
    "gpt2-124m": {
        "layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "context": 1024, "dropout": 0.1,
    },
    # Hugging Face `TinyLlama/TinyLlama-1.1B-*`, config.json.
    "tinyllama-1.1b": {
        "layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "vocabulary": 32000, "context": 2048, **_LLAMA,
    },
    # Touvron et al. 2023, table 1 of the second paper and config.json.
    "llama-2-7b": {"layers": 32, "width": 4096, "heads": 32, "vocabulary": 32000, "context": 4096, **_LLAMA},
    # "The Llama 3 Herd of Models", table 3.
    "llama-3-8b": {
        "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336, "vocabulary": 128256,
        "context": 8192, "rotary_base": 500_000.0, **_LLAMA,
    },
    "llama-3-70b": {
        "layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "mlp_width": 28672, "vocabulary": 128256,
        "context": 8192, "rotary_base": 500_000.0, **_LLAMA,
    },
    # Brown et al. 2020, table 2.1. Counted as GPT-2 is: biases, learned positions, tied output projection, GPT-2's
    # 50,257 tokens. That gives 174,604,259,328; the name rounds it.
    "gpt3-175b": {
        "layers": 96, "width": 12288, "heads": 96, "vocabulary": 50257, "context": 2048, "dropout": 0.1,
    },
}  # fmt: skip


def preset(name: str) -> ModelConfig:
    """The model of that name."""
    if name not in PRESETS:
        raise unknown("model", name, PRESETS)
    return ModelConfig(**PRESETS[name])


def unlike(there: Mapping[str, Any], here: ModelConfig) -> list[str]:
    """What keeps the weights of one model from being the other's, in words: all but dropout and context."""
    ours = to_dict(here)
    return [
        f"{name} is {value} there and {ours.get(name)} here"
        for name, value in there.items()
        if value != ours.get(name) and name not in ("dropout", "context")
    ]


def check_written_model(told: object, step: int, model: ModelConfig, source: object) -> None:
    """Refuse a checkpoint whose weights, by what was told when they were written, are not of the model configured."""
    different = unlike(told, model) if isinstance(told, dict) else []
    if different:
        raise UsageError(
            f"{source} is not the configuration that step {step} was written with: "
            f"{'; '.join(f'model.{words}' for words in different)}; put it back"
        )


def _default_mlp_width(width: int, activation: str) -> int:
    if activation != "swiglu":
        return 4 * width
    least = -(-8 * width // 3)
    return -(-least // _SWIGLU_MULTIPLE) * _SWIGLU_MULTIPLE
