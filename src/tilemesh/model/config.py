"""What a Transformer is, as data: its shape, and the presets by name.

The one idea: everything that is said about a model before it exists (memory, FLOPs, time) follows from these few
numbers (`model/work/`), so they are checked here and nowhere else. No torch: the planner reads this file on machines
without it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tilemesh.core.config import check_fields, from_dict, to_dict
from tilemesh.core.errors import Argument, UsageError, unknown
from tilemesh.core.plan_file import MODEL, PlanFile
from tilemesh.core.ranges import Range

Norm = Literal["layernorm", "rmsnorm"]
NormPlace = Literal["pre", "post", "branch", "sandwich"]
Positions = Literal["learned", "rotary"]
Activation = Literal["relu", "gelu", "gelu-erf", "swiglu", "geglu", "swiglu-clipped"]
GATED: tuple[Activation, ...] = ("swiglu", "geglu", "swiglu-clipped")
Biases = bool | Literal["qkv", "attention", "mlp"]
HeadNorm = Literal["none", "head", "full"]
RotaryScaling = Literal["none", "linear", "llama3", "yarn"]
RouterScores = Literal["softmax", "sigmoid"]
RouterBias = bool | Literal["scores"]

_SWIGLU_MULTIPLE = 256  # Llama rounds the MLP's width up to this


VOCABULARY_MULTIPLE = 64
"""What a whole model on a GPU rounds its vocabulary up to a multiple of: 128-byte lines of 16-bit numbers."""


@dataclass(frozen=True)
class ModelConfig:
    """The Transformer, a decoder."""

    # Sizes go far beyond any model that was trained; everything computed from them is quick and finite.
    layers: Annotated[int, Range(1, 10_000)]
    """Layers, each of an attention block and an MLP."""
    width: Annotated[int, Range(1, 10_000_000)]
    """Width of the residual stream, also called hidden size or d_model."""
    heads: Annotated[int, Range(1, 1_000_000)]
    """Attention heads (of queries)."""
    vocabulary: Annotated[int, Range(1, 1_000_000_000)]
    """How many different tokens there are; a file may leave it out where text is read as bytes: 256."""
    context: Annotated[int, Range(1, 1_000_000_000)]
    """Tokens of the longest sequence; the rows of a learned position table."""
    kv_heads: Annotated[int, Range(0, 1_000_000)] = 0
    """Heads of keys and values; fewer than `heads` is grouped-query attention; 0: as many as `heads`."""
    mlp_width: Annotated[int, Range(0, 100_000_000)] = 0
    """Hidden width of an MLP; 0: 4 x width, or for swiglu 8/3 x width rounded up to a multiple of 256."""
    norm: Norm = "layernorm"
    """Kind of normalization."""
    norm_place: NormPlace = "pre"
    """What of each block (attention, MLP) is normalized; pre: its input; post: the sum of its input and output; branch:
    its output before that is added (OLMo 2); sandwich: its input and its output (Gemma 2 and 3)."""
    positions: Positions = "learned"
    """How positions enter: a learned table that is added to the embedding, or rotary embeddings of queries and keys."""
    activation: Activation = "gelu"
    """Of the MLP; gelu is the tanh approximation, as in GPT-2, gelu-erf the exact one; swiglu and geglu have a gate, a
    second projection, with silu and gelu; swiglu-clipped is (u + 1) g sigmoid(1.702 g) of a gate g of at most 7 and of
    u between -7 and 7 (gpt-oss)."""
    biases: Biases = True
    """Which projections have biases: all, none, or those of queries, keys and values (qkv), of the attention, or of the
    MLP; a LayerNorm always has one, an RMSNorm never."""
    tied: bool = True
    """Whether the output projection is the token embedding."""
    dropout: Annotated[float, Range(0, 1, below=True)] = 0.0
    """Probability of dropout after the embedding, attention and MLP."""
    norm_epsilon: Annotated[float, Range(0)] = 1e-5
    """Added to the variance in every norm."""
    rotary_base: Annotated[float, Range(0, above=True)] = 10_000.0
    """Base of the rotary frequencies, also called theta."""
    head_width: Annotated[int, Range(0, 1_000_000)] = 0
    """Width of a head; 0: width / heads."""
    qk_norm: HeadNorm = "none"
    """An RMSNorm of queries and keys before they are rotated: of each head (Qwen 3, Gemma 3), or of all heads together
    (full: OLMo 2)."""
    parallel_residual: bool = False
    """Whether attention and MLP read the same input and are added together (GPT-NeoX); for norm_place pre."""
    window: Annotated[int, Range(0, 1_000_000_000)] = 0
    """Sliding-window attention: a token attends to so many tokens, itself included; 0: to all before it."""
    full_layers: tuple[Annotated[int, Range(0, 10_000)], ...] = ()
    """With a window, the layers (from 0) that attend to all tokens before, all the same."""
    rotary_fraction: Annotated[float, Range(0, 1, above=True)] = 1.0
    """How much of each head is rotated, from its beginning."""
    rotary_scaling: RotaryScaling = "none"
    """How rotary frequencies are stretched for a longer context: all of them (linear), or the slow ones (llama3, as in
    Llama 3.1; yarn), by rotary_factor."""
    rotary_factor: Annotated[float, Range(1)] = 1.0
    """By how much frequencies are divided."""
    rotary_low: Annotated[float, Range(0, above=True)] = 1.0
    """For llama3 and yarn: those that turn less often than this over rotary_trained tokens are divided in full."""
    rotary_high: Annotated[float, Range(0, above=True)] = 4.0
    """For llama3 and yarn (32 is usual there): those that turn more often than this over rotary_trained tokens stay."""
    rotary_trained: Annotated[int, Range(1, 1_000_000_000)] = 8192
    """For llama3 and yarn: the context that the model had before it was stretched."""
    rotary_gain: Annotated[float, Range(0)] = 0.0
    """For yarn: what turned queries and keys are multiplied by (attention factor); 0: 1 + ln(rotary_factor) / 10."""
    rotary_rounded: bool = True
    """For yarn: whether the pairs between which frequencies go from kept to divided are rounded to whole ones."""
    rotary_local_base: Annotated[float, Range(0)] = 0.0
    """Base of the rotary frequencies, without scaling, in layers with a window (Gemma 3); 0: as in the others."""
    score_width: Annotated[int, Range(0, 1_000_000)] = 0
    """Attention's scores are divided by the square root of this; 0: of the head's width."""
    score_gain: Annotated[float, Range(0, above=True)] = 1.0
    """Attention's scores are multiplied by this as well (DeepSeek-V2 with yarn)."""
    latent_width: Annotated[int, Range(0, 1_000_000)] = 0
    """Latent attention (DeepSeek-V2): keys and values of all heads are made of one latent of this width, normalized;
    the part of keys that is turned is made beside it, one for all heads; 0: of the residual stream."""
    query_latent_width: Annotated[int, Range(0, 1_000_000)] = 0
    """With a latent, queries of all heads are made of another one of this width, normalized; 0: of the residual
    stream."""
    value_width: Annotated[int, Range(0, 1_000_000)] = 0
    """With a latent, width of a head of values, at most head_width; 0: as wide as queries and keys."""
    score_cap: Annotated[float, Range(0)] = 0.0
    """Attention's scores s are cap x tanh(s / cap) before the softmax (Gemma 2); 0: as they are."""
    score_sink: bool = False
    """Whether each head has one logit more, a learned one, in the softmax of its scores, which takes no value: an
    attention sink (gpt-oss)."""
    logit_cap: Annotated[float, Range(0)] = 0.0
    """Logits z are cap x tanh(z / cap) (Gemma 2); 0: as they are."""
    norm_offset: bool = False
    """Whether the weights of norms are stored less 1 (Gemma)."""
    scaled_embedding: bool = False
    """Whether the embedding is multiplied by the square root of the width (Gemma)."""
    experts: Annotated[int, Range(0, 100_000)] = 0
    """MLPs of each layer, of which a router picks some for each token (mixture of experts); 0: one MLP for all."""
    experts_per_token: Annotated[int, Range(0, 100_000)] = 0
    """How many experts compute each token; 0 where there are none, otherwise 2."""
    router_renormalized: bool = True
    """Whether the weights of a token's experts, probabilities of a softmax over all experts, are divided by their sum,
    so that they add up to 1 (Mixtral); equal to a softmax over the experts that were picked."""
    router_scores: RouterScores = "softmax"
    """What makes a router's products the scores of experts: a softmax over all of them, or of each its sigmoid
    (DeepSeek-V3)."""
    router_bias: RouterBias = False
    """Whether experts are picked by their scores plus a bias of each, which weighs nothing; training moves it by
    optimizer.balance_rate, up where an expert is picked less than the mean and down where more (DeepSeek-V3). scores: a
    bias of the router's products, as any projection has one (gpt-oss)."""
    router_groups: Annotated[int, Range(1, 100_000)] = 1
    """A token picks among the experts of some of so many groups alone, neighbours, such as those of one node."""
    router_groups_per_token: Annotated[int, Range(1, 100_000)] = 1
    """How many groups a token picks: those with the best expert, or with sigmoid scores the best two."""
    router_scale: Annotated[float, Range(0, above=True)] = 1.0
    """What the weights of a token's experts are multiplied by."""
    shared_width: Annotated[int, Range(0, 100_000_000)] = 0
    """In layers with experts, the hidden width of an MLP that all tokens pass beside them, a shared expert (of several,
    the sum); 0: there is none."""
    shared_gate: bool = False
    """Whether what the shared expert gives is multiplied by the sigmoid of a score of the token (Qwen 2 MoE)."""
    dense_layers: tuple[Annotated[int, Range(0, 10_000)], ...] = ()
    """Layers (from 0) that have one MLP for all tokens in a model with experts."""
    dense_width: Annotated[int, Range(0, 100_000_000)] = 0
    """Hidden width of the MLP in dense_layers; 0: mlp_width."""
    balance_loss: Annotated[float, Range(0)] = 0.0
    """In training, the weight of a loss of every layer with experts, which is 1 where a sequence's tokens spread evenly
    over them and grows where few take most: experts / experts_per_token times the sum, over experts, of the part of the
    tokens that picked it times its mean probability (as DeepSeek-V3 has it, sequence by sequence; 0.001 is usual)."""
    router_z_loss: Annotated[float, Range(0)] = 0.0
    """In training, the weight of the squared logarithm of the sum of the exponentials of a router's scores, in every
    layer with experts (ST-MoE; 0.001 is usual); of sigmoids, of the sum of these."""
    expert_capacity: Annotated[float, Range(0)] = 0.0
    """In training, the most that an expert takes of a sequence over what would be even: of each sequence at most
    expert_capacity x tokens x experts_per_token / experts picks, rounded up, those of the earliest tokens; what is
    dropped counts 0 (1.25 is usual); 0: nothing is dropped, as in held-out text, generation and serving always."""
    family: str = ""
    """The Hugging Face model_type that it is exported as; empty: the first that can express the model."""

    def __post_init__(self) -> None:
        for name in ("full_layers", "dense_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has lists
        check_fields(self, "model.")
        # Frozen, yet whoever reads the config should meet a number and never "0 means".
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "experts_per_token", self.experts_per_token or (2 if self.experts else 0))
        object.__setattr__(self, "mlp_width", self.mlp_width or _default_mlp_width(self.width, self.activation))
        if not self.head_width and self.width % self.heads:
            raise UsageError(
                f"width {self.width} is not divisible by {self.heads} heads: set model.heads to a divisor of the width"
            )
        object.__setattr__(self, "head_width", self.head_width or self.width // self.heads)
        if self.heads % self.kv_heads:
            raise UsageError(
                f"{self.heads} heads do not share {self.kv_heads} kv_heads evenly: set model.kv_heads to a divisor of "
                f"{self.heads}"
            )
        if self.positions == "rotary" and self.rotary_width % 2:
            raise UsageError(
                f"rotary positions turn pairs and {self.rotary_width} of a head are rotated: expected an even width"
            )
        self._check_kinds()
        self._check_latent()

    def _check_latent(self) -> None:
        if not self.latent_width:
            for name in ("value_width", "query_latent_width"):
                if value := getattr(self, name):
                    raise UsageError(f"{name} {value} without a latent: set model.latent_width")
            return
        if self.value_width > self.head_width:
            raise UsageError(f"value_width is {self.value_width}: expected at most the head's {self.head_width}")
        if self.positions != "rotary" or not 0 < self.rotary_width < self.head_width:
            raise UsageError("latent_width without rotary positions of a part of each head: set model.rotary_fraction")
        wrong = {"kv_heads": self.heads, "qk_norm": "none", "biases": False}
        for name, value in wrong.items():
            if getattr(self, name) != value:
                raise UsageError(f"latent_width with {name} {getattr(self, name)}: set model.{name}={value}")

    def _check_kinds(self) -> None:
        """Refuse settings that have no meaning together."""
        if self.parallel_residual and self.norm_place != "pre":
            raise UsageError(f"parallel_residual with norm_place {self.norm_place}: set norm_place to pre")
        if self.full_layers and not self.window:
            raise UsageError("full_layers without a window: set window, or leave full_layers empty")
        if self.full_layers and max(self.full_layers) >= self.layers:
            raise UsageError(f"full_layers names layer {max(self.full_layers)}: expected 0 to {self.layers - 1}")
        if self.norm_offset and self.norm != "rmsnorm":
            raise UsageError(f"norm_offset with {self.norm}: only the weights of an rmsnorm are stored less 1")
        picked = self.experts_per_token
        if picked > self.experts:
            raise UsageError(
                f"{picked} experts_per_token of {self.experts} experts: set model.experts to at least as many"
            )
        for name in _OF_EXPERTS:
            if not self.experts and getattr(self, name) != getattr(ModelConfig, name):
                raise UsageError(f"{name} without experts: set model.experts, or leave {name} out")
        groups, among = self.router_groups, self.router_groups_per_token
        if self.experts and (self.experts % groups or among > groups or self.experts // groups * among < picked):
            raise UsageError(
                f"{among} of {groups} router_groups of {self.experts} experts, of which a token picks {picked}: "
                "expected groups of one size, and as many experts in those that a token picks"
            )
        if self.shared_gate and not self.shared_width:
            raise UsageError("shared_gate without a shared expert: set model.shared_width, or leave shared_gate out")
        if self.dense_width and not self.dense_layers:
            raise UsageError("dense_width without dense_layers: name the layers, or leave dense_width out")
        if self.dense_layers and not (len({*self.dense_layers}) < self.layers > max(self.dense_layers)):
            raise UsageError(
                f"dense_layers names {len({*self.dense_layers})} of {self.layers} layers, up to "
                f"{max(self.dense_layers)}: expected some of 0 to {self.layers - 1}, not all"
            )
        if self.rotary_gain and self.rotary_scaling != "yarn":
            raise UsageError(f"rotary_gain with rotary_scaling {self.rotary_scaling}: leave it out, or set yarn")
        if self.rotary_scaling == "yarn" and self.rotary_base <= 1:
            raise UsageError(f"yarn with rotary_base {self.rotary_base}: expected more than 1, or all pairs turn alike")
        if self.rotary_low >= self.rotary_high:
            raise UsageError(f"rotary_low is {self.rotary_low}: expected less than rotary_high, {self.rotary_high}")

    def has_biases(self, part: Literal["qkv", "output", "mlp"]) -> bool:
        """Whether the projections of this part of a layer have biases: of q, k and v, attention's output, the MLP."""
        return self.biases if isinstance(self.biases, bool) else part in _BIASES[self.biases]

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Those whose tokens are routed."""
        return tuple(layer for layer in range(self.layers) if self.experts and layer not in self.dense_layers)

    def of_layer(self, layer: int) -> ModelConfig:
        """The configuration of a model all of whose layers are as this one is."""
        return _dense(self) if layer in self.dense_layers else self

    @property
    def kinds(self) -> tuple[ModelConfig, ...]:
        """Its different `of_layer`: with experts, and where some layers have none (`dense_of`), without."""
        return (self, _dense(self)) if self.dense_layers else (self,)

    def dense_of(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Of chunks with so many layers each, from the first on: how many of these are of the second kind."""
        if not self.dense_layers:
            return (0,) * len(counts)
        spans = itertools.pairwise((0, *itertools.accumulate(counts)))
        return tuple(sum(begin <= layer < end for layer in {*self.dense_layers}) for begin, end in spans)

    @property
    def layers_by_kind(self) -> tuple[tuple[ModelConfig, int], ...]:
        """`kinds`, each with how many of all layers are of it."""
        (dense,) = self.dense_of((self.layers,))
        return tuple(zip(self.kinds, (self.layers - dense, dense), strict=False))

    def window_of(self, layer: int) -> int:
        """How many tokens a token attends to in this layer; 0: all before it."""
        return 0 if layer in self.full_layers else self.window

    @property
    def rotary_width(self) -> int:
        """How much of a head is rotated."""
        return int(self.head_width * self.rotary_fraction + 1e-9)  # a fraction may be a quotient of two widths

    @property
    def turned_factor(self) -> float:
        """What turning multiplies queries and keys by, in layers whose frequencies are stretched."""
        if self.rotary_scaling != "yarn":
            return 1.0
        return self.rotary_gain or 1 + math.log(self.rotary_factor) / 10

    @property
    def has_local_rotary(self) -> bool:
        """Whether layers with a window have rotary frequencies of their own."""
        is_other = self.rotary_local_base != self.rotary_base or self.rotary_scaling != "none"
        return bool(self.window) and self.rotary_local_base != 0.0 and is_other

    @property
    def query_factor(self) -> float:
        """What queries are multiplied by, so that scores divided by sqrt(head_width) come out as asked for."""
        return self.score_gain * (math.sqrt(self.head_width / self.score_width) if self.score_width else 1.0)

    @property
    def query_width(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all keys together; the values are as wide, with zeros where a head of them is narrower."""
        return self.kv_heads * self.head_width

    @property
    def value_head_width(self) -> int:
        """Width of a head of values."""
        return self.value_width or self.head_width

    @property
    def plain_width(self) -> int:
        """How much of a head is not turned: with a latent, what each head of keys has of its own."""
        return self.head_width - self.rotary_width

    @property
    def mlp_inputs(self) -> int:
        """Projections into the MLP: swiglu and geglu have a gate beside the value."""
        return 2 if self.activation in GATED else 1

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed; a head's width that followed from width and heads goes on doing so."""
        if self.head_width * self.heads == self.width and changes.keys() & {"width", "heads"}:
            changes.setdefault("head_width", 0)
        return dataclasses.replace(self, **changes)


_BIASES: Mapping[str, tuple[str, ...]] = {"qkv": ("qkv",), "attention": ("qkv", "output"), "mlp": ("mlp",)}
_OF_EXPERTS = (
    "router_renormalized", "router_scores", "router_bias", "router_groups", "router_groups_per_token", "router_scale",
    "shared_width", "shared_gate", "dense_layers", "dense_width", "balance_loss", "router_z_loss", "expert_capacity",
)  # fmt: skip
"""Settings that say something where there are experts alone."""
EXPERT_FIELDS = frozenset(("experts", "experts_per_token", *_OF_EXPERTS))
_OF_TRAINING = ("dropout", "context", "balance_loss", "router_z_loss", "expert_capacity")
_LLAMA = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "biases": False, "tied": False}

_QWEN3_MOE = {
    **_LLAMA, "vocabulary": 151936, "context": 40960, "head_width": 128, "qk_norm": "head", "norm_epsilon": 1e-6,
    "rotary_base": 1e6, "experts": 128, "experts_per_token": 8,
}  # fmt: skip

_GPT_OSS = {
    "width": 2880, "heads": 64, "kv_heads": 8, "head_width": 64, "mlp_width": 2880, "vocabulary": 201088,
    "context": 131072, "norm": "rmsnorm", "positions": "rotary", "activation": "swiglu-clipped", "tied": False,
    "rotary_base": 150_000.0, "rotary_scaling": "yarn", "rotary_factor": 32.0, "rotary_high": 32.0,
    "rotary_trained": 4096, "rotary_rounded": False, "window": 128, "score_sink": True, "experts_per_token": 4,
    "router_bias": "scores",
}  # fmt: skip

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
    # "The Llama 3 Herd of Models", table 3, with the frequencies of 3.1 left plain.
    "llama-3-405b": {
        "layers": 126, "width": 16384, "heads": 128, "kv_heads": 8, "mlp_width": 53248, "vocabulary": 128256,
        "context": 8192, "rotary_base": 500_000.0, **_LLAMA,
    },
    # Jiang et al. 2024 and config.json.
    "mixtral-8x7b": {
        "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336, "vocabulary": 32000,
        "context": 32768, "rotary_base": 1e6, "experts": 8, "experts_per_token": 2, **_LLAMA,
    },
    # Dai et al. 2024 (DeepSeekMoE), table 2 and config.json: the first layer has no experts, others two shared ones.
    "deepseek-moe-16b": {
        "layers": 28, "width": 2048, "heads": 16, "mlp_width": 1408, "vocabulary": 102400, "context": 4096,
        "norm_epsilon": 1e-6, "experts": 64, "experts_per_token": 6, "router_renormalized": False,
        "shared_width": 2816, "dense_layers": (0,), "dense_width": 10944, **_LLAMA,
    },
    # DeepSeek-AI 2024 (2412.19437), section 4.2, and config.json, with the frequencies of its first 4,096 tokens.
    "deepseek-v3": {
        "layers": 61, "width": 7168, "heads": 128, "mlp_width": 2048, "vocabulary": 129280, "context": 4096,
        "norm_epsilon": 1e-6, "head_width": 192, "rotary_fraction": 1 / 3, "latent_width": 512,
        "query_latent_width": 1536, "value_width": 128, "experts": 256, "experts_per_token": 8,
        "router_scores": "sigmoid", "router_bias": True, "router_groups": 8, "router_groups_per_token": 4,
        "router_scale": 2.5, "shared_width": 2048, "dense_layers": (0, 1, 2), "dense_width": 18432, **_LLAMA,
    },
    # "Qwen3 Technical Report", table 2, and config.json.
    "qwen3-30b-a3b": {
        "layers": 48, "width": 2048, "heads": 32, "kv_heads": 4, "mlp_width": 768, **_QWEN3_MOE,
    },
    "qwen3-235b-a22b": {
        "layers": 94, "width": 4096, "heads": 64, "kv_heads": 4, "mlp_width": 1536, **_QWEN3_MOE,
    },
    # OpenAI 2025 (2508.10925), table 1, and config.json; every second layer has no window.
    "gpt-oss-20b": {"layers": 24, "full_layers": tuple(range(1, 24, 2)), "experts": 32, **_GPT_OSS},
    "gpt-oss-120b": {"layers": 36, "full_layers": tuple(range(1, 36, 2)), "experts": 128, **_GPT_OSS},
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
    """What keeps the weights of one model from being the other's, in words: all but what is of training alone."""
    ours = to_dict(here)
    return [
        f"{name} is {value} there and {ours.get(name)} here"
        for name, value in there.items()
        if value != ours.get(name) and name not in _OF_TRAINING
    ]


def planned_model(plan: PlanFile) -> ModelConfig | None:
    """The model that a plan was made for; None where its file, written by hand, names none."""
    shape = plan.sections[MODEL]
    return from_dict(ModelConfig, shape, f"{plan.source}: model") if shape else None


def check_planned(plan: PlanFile, model: ModelConfig, *instead: str | Argument) -> None:
    """Refuse a plan that was made for another model; `instead`: what else to do about it."""
    planned = planned_model(plan)
    if planned is not None and (different := unlike(to_dict(planned), model)):
        more = f" ({len(different) - 1} more)" if len(different) > 1 else ""
        words = f" '{plan.source}' was made for another model: {different[0]}{more}; "
        raise UsageError(Argument("plan"), words, *instead, "make a plan for this one")


def before_experts(model: ModelConfig) -> ModelConfig:
    """The model whose MLP each expert of this one may begin as a copy of, with the same logits; UsageError where they
    would be others."""
    reasons = ["model.router_renormalized=true"] * (not model.router_renormalized)
    reasons += ["model.router_scale=1"] * (model.router_scale != 1)
    reasons += ["model.shared_width=0"] * bool(model.shared_width)
    reasons += ["model.expert_capacity=0"] * (model.expert_capacity > 0)
    reasons += ["model.dense_width=0"] * (model.dense_width not in (0, model.mlp_width))
    if reasons:
        raise UsageError(
            "experts that begin as copies of an MLP give what it gives where the weights of a token's experts add up "
            f"to 1, none is dropped and all MLPs are as wide: set {', '.join(reasons)}"
        )
    return _dense(model)


def check_written_model(told: object, step: int, model: ModelConfig, source: object) -> None:
    """Refuse a checkpoint whose weights, by what was told when they were written, are not of the model configured."""
    different = unlike(told, model) if isinstance(told, dict) else []
    if different:
        raise UsageError(
            f"{source} is not the configuration that step {step} was written with: "
            f"{'; '.join(f'model.{words}' for words in different)}; put it back"
        )


@functools.lru_cache
def _dense(model: ModelConfig) -> ModelConfig:
    plain = {name: getattr(ModelConfig, name) for name in _OF_EXPERTS}
    return model.replace(**plain, experts=0, experts_per_token=0, mlp_width=model.dense_width or model.mlp_width)


def _default_mlp_width(width: int, activation: str) -> int:
    if activation not in GATED:
        return 4 * width
    least = -(-8 * width // 3)
    return -(-least // _SWIGLU_MULTIPLE) * _SWIGLU_MULTIPLE
