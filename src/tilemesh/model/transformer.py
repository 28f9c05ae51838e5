"""The Transformer, in plain torch, as one process sees it.

The one idea: every matrix is its own module with a name that says how it may be split (`fc_q`, `fc_k`, `fc_v`,
`fc_gate`, `fc_in` by their output, `fc_o`, `fc_out` by their input), and whatever belongs to one forward pass travels
in a `Pass` value. So a mesh can be laid over the model from outside; nothing in here knows of ranks.

B: rows (sequences); T: tokens of this pass; D: width; H: query heads; K: key and value heads;
E: head width; F: MLP width; V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.core.errors import UsageError
from tilemesh.kernels.attention.joined import self_attention
from tilemesh.kernels.attention.reference import attention as windowed_attention
from tilemesh.kernels.embedding.reference import embedding
from tilemesh.kernels.gated.reference import geglu
from tilemesh.kernels.linear_cross_entropy.reference import linear_cross_entropy
from tilemesh.kernels.mlp.reference import mlp
from tilemesh.model.cache import AttendJoined, KeyValueCache
from tilemesh.model.config import ModelConfig
from tilemesh.model.documents import DocumentPlaces, attend_within, document_places
from tilemesh.model.dropout import ORIGIN, DropoutPlace, Site, dropout
from tilemesh.model.fresh import give_memory, initialize
from tilemesh.model.kernels import STANDARD, TORCH, ModelKernels
from tilemesh.model.linear import ALONE, DENSE, Fused, Linear
from tilemesh.model.loss import IGNORED
from tilemesh.model.norm import ResidualNorm
from tilemesh.model.one_row import is_one_row
from tilemesh.model.part import ModelPart, whole_part
from tilemesh.model.rotary import looked_up, rotary_table, rotate
from tilemesh.model.stacked import StackedProduct

# What the first projection applies, and the gate where there is one. `gelu` is GPT-2's, the tanh form.
_FIRST_ACTIVATION = {"relu": "relu", "gelu": "gelu_tanh", "gelu-erf": "gelu", "swiglu": "none", "geglu": "none"}
_GATE_ACTIVATION = {"swiglu": "silu", "geglu": "gelu_tanh"}


@dataclass(frozen=True)
class Pass:
    """What one forward pass is about, besides its activations."""

    # No field has a default: torch.compile up to 2.11 evaluates the defaults of a generated `__init__` even where
    # they are not used, and cannot trace one that is itself a dataclass.
    rotary: tuple[Tensor, Tensor] | None
    """Cosines and sines of the tokens' positions: (T, E/2), or with a cache (B, T, 1, E/2), each row its own."""
    local_rotary: tuple[Tensor, Tensor] | None
    """Of layers with a window, where these have frequencies of their own; else as `rotary`."""
    dropout_seed: int | Tensor | None
    """None: nothing is dropped."""
    place: DropoutPlace
    """Where this pass's activations stand in the whole batch: says what is dropped and, without a cache, positions."""
    cache: KeyValueCache | None
    documents: DocumentPlaces | None
    """Where documents packed into the sequences begin, none of which sees another; None: sequences are whole."""


class ResidualStream(NamedTuple):
    """The residual stream between two norms: x + branch, whose addition is left to the next norm."""

    x: Tensor
    branch: Tensor | None = None
    """What the last block computed; None where it is in x already."""


def added(stream: ResidualStream) -> Tensor:
    """The stream as one tensor."""
    return stream.x if stream.branch is None else stream.x + stream.branch


class Embedding(nn.Embedding):
    """torch's, but where it has no memory it draws no weights: random ops on the meta device import for two seconds."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class HeldProduct(Protocol):
    """Computes products with a weight that it holds: see `model.packed`."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor: ...


class Dropout(nn.Module):
    """Drops by place: see `model.dropout`. A module, so that a model can be given another kind."""

    def __init__(self, rate: float, layer: int, site: Site) -> None:
        super().__init__()
        self.rate, self.layer, self.site = rate, layer, site

    def forward(self, x_BTD: Tensor, now: Pass) -> Tensor:
        if now.dropout_seed is None:
            return x_BTD
        return dropout(x_BTD, self.rate, seed=now.dropout_seed, layer=self.layer, site=self.site, place=now.place)


class Attention(nn.Module):
    """Causal attention with grouped-query heads. `heads` and `kv_heads` are what this module holds of them."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype | None = None, kernels: ModelKernels = STANDARD
    ) -> None:
        super().__init__()
        width, kv_width, biases = config.width, config.kv_width, config.has_biases("qkv")
        self.layer, self.heads, self.kv_heads = layer, config.heads, config.kv_heads
        self.implementation = kernels.attention
        self.window, self.query_factor = config.window_of(layer), config.query_factor
        self.qk_norm = config.qk_norm
        self.rotates_whole = config.rotary_width == config.head_width
        """Whether rotary positions turn all of a head."""
        self.joined = False
        """Whether query, key and value come out of one product; their weights stay three."""
        self.stacked: StackedProduct | None = None
        """The same for a model that only computes forward: see `model.stacked`."""
        self.fc_q = Linear(width, config.query_width, biases, device="meta", dtype=dtype)
        self.fc_k = Linear(width, kv_width, biases, device="meta", dtype=dtype)
        self.fc_v = Linear(width, kv_width, biases, device="meta", dtype=dtype)
        self.fc_o = Linear(config.query_width, width, config.has_biases("output"), device="meta", dtype=dtype)
        self.q_norm, self.k_norm = _head_norm(config, config.heads, dtype), _head_norm(config, config.kv_heads, dtype)

    def forward(self, x_BTD: Tensor, now: Pass) -> Tensor:
        projections = (self.fc_q, self.fc_k, self.fc_v)
        rotary = now.local_rotary if self.window else now.rotary
        is_ours = self.implementation != TORCH and now.cache is None and now.documents is None
        y_BTD: Tensor
        if is_ours and self.joined and rotary is None and self.qk_norm == "none" and self.query_factor == 1:
            y_BTD = self.fc_o(self._attend_joined(joined(x_BTD, projections)))
            return y_BTD
        if self.stacked is not None:
            qkv_BTF = self.stacked(x_BTD)
            if self.joined_cache(now) is not None:
                y_BTD = self.fc_o(self.attend(qkv_BTF, now))
                return y_BTD
            q, k, v = torch.split(qkv_BTF, self.stacked.widths, dim=-1)
        elif self.joined:
            q, k, v = torch.split(
                joined(x_BTD, projections), [projection.weight.shape[0] for projection in projections], dim=-1
            )
        else:
            q, k, v = (projection(x_BTD) for projection in projections)
        if self.qk_norm == "full":
            q, k = self._normalized(q, k)
        q_BTHE = _by_heads(q, self.heads)
        k_BTKE, v_BTKE = _by_heads(k, self.kv_heads), _by_heads(v, self.kv_heads)
        if self.qk_norm == "head":
            q_BTHE, k_BTKE = self._normalized(q_BTHE, k_BTKE)
        if self.query_factor != 1:
            q_BTHE = q_BTHE * self.query_factor
        if is_ours:
            if rotary is not None:
                cos, sin = (table[:, None] for table in rotary)  # the same for every head of a token
                q_BTHE, k_BTKE = rotate(q_BTHE, cos, sin), rotate(k_BTKE, cos, sin)
            y_BTD = self.fc_o(self._attend_joined(torch.cat([q_BTHE, k_BTKE, v_BTKE], dim=-2).flatten(-2)))
            return y_BTD
        if now.cache is None:
            y_BTHE = self._attend(q_BTHE, k_BTKE, v_BTKE, rotary, now.documents)
        else:
            if rotary is not None:
                q_BTHE, k_BTKE = rotate(q_BTHE, *rotary), rotate(k_BTKE, *rotary)
            kept = {"window": self.window} if self.window else {}
            y_BTHE = now.cache.attend(self.layer, q_BTHE, k_BTKE, v_BTKE, **kept)
        y_BTD = self.fc_o(y_BTHE.flatten(-2))
        return y_BTD

    def attend(self, qkv_BTF: Tensor, now: Pass, dtype: torch.dtype | None = None) -> Tensor:
        """From the stacked product to what the last projection takes, where `joined_cache` has something."""
        attend_joined, rotary = self.joined_cache(now), now.local_rotary if self.window else now.rotary
        assert attend_joined is not None
        held = {"heads": self.heads, "kv_heads": self.kv_heads}
        return attend_joined(self.layer, qkv_BTF, rotary, **held, window=self.window, dtype=dtype).flatten(-2)

    def joined_cache(self, now: Pass) -> AttendJoined | None:
        """The cache's attention over queries, keys and values side by side, where it has one and nothing but turning
        whole heads lies between the product and attention."""
        if now.cache is None or self.qk_norm != "none" or self.query_factor != 1:
            return None
        rotary = now.local_rotary if self.window else now.rotary
        return getattr(now.cache, "attend_joined", None) if rotary is None or self.rotates_whole else None

    def _normalized(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.q_norm(q)[0], self.k_norm(k)[0]

    def _attend_joined(self, qkv_BTF: Tensor) -> Tensor:
        """By tilemesh's kernels, whose gradient for queries, keys and values side by side is one tensor too."""
        y_BTD: Tensor = self_attention(
            qkv_BTF, heads=self.heads, kv_heads=self.kv_heads, window=self.window, implementation=self.implementation
        )
        return y_BTD

    def _attend(
        self,
        q_BTHE: Tensor,
        k_BTKE: Tensor,
        v_BTKE: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        documents: DocumentPlaces | None,
    ) -> Tensor:
        """The pass's tokens attend to one another; heads stand before tokens from here on, as torch's kernels want."""
        q_BHTE, k_BKTE, v_BKTE = q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2)
        if rotary is not None:
            q_BHTE, k_BKTE = rotate(q_BHTE, *rotary), rotate(k_BKTE, *rotary)
        y_BHTE: Tensor
        if documents is not None:
            y_BHTE = attend_within(q_BHTE, k_BKTE, v_BKTE, documents, self.window)
            return y_BHTE.transpose(1, 2)
        if 0 < self.window < q_BHTE.shape[2]:
            y_BHTE = windowed_attention(q_BHTE, k_BKTE, v_BKTE, causal=True, window=self.window)
            return y_BHTE.transpose(1, 2)
        y_BHTE = functional.scaled_dot_product_attention(
            q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return y_BHTE.transpose(1, 2)


def _by_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, heads x E) as (B, T, heads, E)."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


class Mlp(nn.Module):
    """act(x W_in) W_out, or with a gate (act(x W_gate) * x W_in) W_out; activations are fused into their products."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None = None, kernels: ModelKernels = STANDARD) -> None:
        super().__init__()
        width, hidden, biases = config.width, config.mlp_width, config.has_biases("mlp")
        self.fc_gate: Linear | None = None
        self.stacked: StackedProduct | None = None
        """Gate and first projection by one product, in a model that only computes forward: see `model.stacked`."""
        self.gate = _GATE_ACTIVATION.get(config.activation)
        kind = DENSE if kernels.projections == TORCH else Fused(implementation=kernels.projections)
        if self.gate is not None:
            self.fc_gate = Linear(width, hidden, biases, activation=self.gate, kind=kind, device="meta", dtype=dtype)
        first = _FIRST_ACTIVATION[config.activation]
        self.fc_in = Linear(width, hidden, biases, activation=first, kind=kind, device="meta", dtype=dtype)
        self.fc_out = Linear(hidden, width, biases, device="meta", dtype=dtype)
        self.implementation, self.activation = kernels.mlp, first

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.implementation != TORCH and self._is_whole():
            made_BTD: Tensor = mlp(
                x_BTD, self.fc_in.weight, self.fc_in.bias, self.fc_out.weight, self.fc_out.bias,
                activation=self.activation, implementation=self.implementation,
            )  # fmt: skip
            return made_BTD
        if self.stacked is not None:
            if self.gate == "silu":
                h_BTF = self.stacked.gated(x_BTD)
            else:
                gate_BTF, h_BTF = self.stacked(x_BTD).chunk(2, -1)
                h_BTF = geglu(gate_BTF, h_BTF)
        else:
            h_BTF = self.fc_in(x_BTD)
            if self.fc_gate is not None:
                h_BTF = self.fc_gate(x_BTD) * h_BTF
        y_BTD: Tensor = self.fc_out(h_BTF)
        return y_BTD

    def _is_whole(self) -> bool:
        """Whether nothing is between the two products but the activation, and nobody has replaced one of them."""
        products = (self.fc_in, self.fc_out)
        return self.fc_gate is None and all(
            layer.kind.stacked() == DENSE and layer.place == ALONE for layer in products
        )


class Layer(nn.Module):
    """Attention and MLP, each added to what came in, with norms where `norm_place` says.

    A norm takes the addition before it along. So a pre-norm layer gives its MLP's result away unadded.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype | None = None,
        kernels: ModelKernels = STANDARD,
    ) -> None:
        super().__init__()
        self.norm_place, self.parallel_residual = config.norm_place, config.parallel_residual
        is_sandwich = self.norm_place == "sandwich"
        self.attention_norm = _norm(config, dtype, kernels)
        self.attention = Attention(config, index, dtype, kernels)
        self.attention_out_norm = _norm(config, dtype, kernels) if is_sandwich else None
        self.mlp_norm = _norm(config, dtype, kernels)
        self.mlp = Mlp(config, dtype, kernels)
        self.mlp_out_norm = _norm(config, dtype, kernels) if is_sandwich else None
        self.attention_dropout = Dropout(config.dropout, index, Site.ATTENTION)
        self.mlp_dropout = Dropout(config.dropout, index, Site.MLP)

    def forward(self, stream: ResidualStream, now: Pass) -> ResidualStream:
        x_BTD: Tensor
        y_BTD: Tensor
        if self._has_norms_inside(stream, now):
            return self._one_token(stream, now)
        if self.norm_place == "post":
            x_BTD = added(stream)
            x_BTD, _ = self.attention_norm(x_BTD, self.attention_dropout(self.attention(x_BTD, now), now))
            x_BTD, _ = self.mlp_norm(x_BTD, self.mlp_dropout(self.mlp(x_BTD), now))
            return ResidualStream(x_BTD)
        if self.norm_place == "branch":
            x_BTD = added(stream)
            x_BTD = x_BTD + self.attention_dropout(self.attention_norm(self.attention(x_BTD, now))[0], now)
            return ResidualStream(x_BTD, self.mlp_dropout(self.mlp_norm(self.mlp(x_BTD))[0], now))
        y_BTD, x_BTD = self.attention_norm(*stream)
        y_BTD = self.attention(y_BTD, now)
        if self.attention_out_norm is not None:
            y_BTD = self.attention_out_norm(y_BTD)[0]
        y_BTD = self.attention_dropout(y_BTD, now)
        if self.parallel_residual:
            return ResidualStream(x_BTD, y_BTD + self.mlp_dropout(self.mlp(self.mlp_norm(x_BTD)[0]), now))
        y_BTD, x_BTD = self.mlp_norm(x_BTD, y_BTD)
        y_BTD = self.mlp(y_BTD)
        if self.mlp_out_norm is not None:
            y_BTD = self.mlp_out_norm(y_BTD)[0]
        return ResidualStream(x_BTD, self.mlp_dropout(y_BTD, now))

    def _has_norms_inside(self, stream: ResidualStream, now: Pass) -> bool:
        """Whether `_one_token` computes this: one token of a model that serves, and a plain layer with norms before."""
        heads, gated = self.attention.stacked, self.mlp.stacked
        if heads is None or gated is None or stream.branch is None or not is_one_row(stream.x):
            return False
        if self.norm_place != "pre" or self.parallel_residual or self.mlp.gate != "silu":
            return False
        takes = heads.takes_norm(self.attention_norm) and gated.takes_norm(self.mlp_norm)
        return takes and self.attention.joined_cache(now) is not None

    def _one_token(self, stream: ResidualStream, now: Pass) -> ResidualStream:
        """The same with each norm inside of the product that reads it: two launches less for one token."""
        heads, gated = self.attention.stacked, self.mlp.stacked
        assert heads is not None
        assert gated is not None
        assert stream.branch is not None
        qkv_BTF, x_BTD = heads.normed(stream.x, stream.branch, self.attention_norm)
        y_BTD = self.attention.fc_o(self.attention.attend(qkv_BTF, now))
        h_BTF, x_BTD = gated.normed(x_BTD, y_BTD, self.mlp_norm, gate="silu")
        return ResidualStream(x_BTD, self.mlp.fc_out(h_BTF))


class Transformer(nn.Module):
    """A decoder as `ModelConfig` describes it, or a part of one. On the meta device it has shapes and no memory."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kernels: ModelKernels = STANDARD,
        part: ModelPart | None = None,
    ) -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        self.part = whole_part(config) if part is None else part
        """Which layers it has, and whether it takes tokens and gives logits; activations otherwise."""
        self.part.check(config)
        # Everything begins without memory: weights are then written once, by `initialize`, not first by torch's init.
        self.token_embedding = None
        if self.part.embedding or (self.part.head and config.tied):
            self.token_embedding = Embedding(config.vocabulary, config.width, device="meta", dtype=dtype)
        self.position_embedding = None
        if self.part.embedding and config.positions == "learned":
            self.position_embedding = Embedding(config.context, config.width, device="meta", dtype=dtype)
        self.embedding_dropout = Dropout(config.dropout, 0, Site.EMBEDDING)
        self.layers = nn.ModuleList()
        for index in self.part.layers:  # under the number that it has in the whole model
            self.layers.add_module(str(index), Layer(config, index, dtype, kernels))
        has_norm = self.part.head and config.norm_place != "post"
        self.final_norm = _norm(config, dtype, kernels) if has_norm else None
        self.documents_marked = False
        """Whether documents packed into one sequence must not see each other: the first token t of each is then given
        as -1 - t. No token could say so itself: some chat templates end answers as they end conversations."""
        self.align_vocabulary = 1
        """The output projection is computed as if the vocabulary were a multiple of this; what it has more is cut off.
        16-bit products on a GPU want multiples of 8: others run at a sixth of the speed."""
        self.output = None
        self.tied_product: HeldProduct | None = None
        """Who computes the product with the embedding's table, in a model that only computes forward."""
        if self.part.head and not config.tied:
            self.output = Linear(config.width, config.vocabulary, bias=False, device="meta", dtype=dtype)
        self._rotary_kept: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        target = torch.get_default_device() if device is None else torch.device(device)
        if target.type != "meta":
            give_memory(self, target)
            initialize(self, seed)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        x_BTD: Tensor | None = None,
        cache: KeyValueCache | None = None,
        dropout_seed: int | Tensor | None = None,
        place: DropoutPlace = ORIGIN,
    ) -> Tensor:
        """Logits (B, T, V). With a cache the tokens attend to those already in it and stand where it says.

        Training with dropout wants `dropout_seed`, another each step: `fold_seed(seed, step)`; and where the batch is a
        part of a larger one, `place`. A part of a model without the embedding takes `x_BTD`, the activations that the
        part before it gave; one without the head gives such activations.
        """
        now = self.prepare(tokens_BT, cache=cache, dropout_seed=dropout_seed, place=place)
        stream = ResidualStream(self.enter(tokens_BT, x_BTD, now))
        for layer in self.layers:
            stream = layer(stream, now)
        return self.head(stream) if self.part.head else added(stream)

    def enter(self, tokens_BT: Tensor, x_BTD: Tensor | None, now: Pass) -> Tensor:
        """What the first layer here is given: embedded tokens, or the activations of the part before."""
        if (x_BTD is None) is not self.part.embedding:
            wanted = "tokens alone" if self.part.embedding else "x_BTD, the activations of the part before it"
            raise UsageError(f"layers {self.part.begin} to {self.part.end} of a model: expected {wanted}")
        return self.embed(tokens_BT, now) if x_BTD is None else x_BTD

    def prepare(
        self,
        tokens_BT: Tensor,
        *,
        cache: KeyValueCache | None = None,
        dropout_seed: int | Tensor | None = None,
        place: DropoutPlace = ORIGIN,
    ) -> Pass:
        """Check the tokens and gather what the layers need beside their activations."""
        if tokens_BT.dim() != 2 or tokens_BT.dtype not in (torch.int64, torch.int32):
            raise UsageError(
                f"tokens are {tuple(tokens_BT.shape)} of {tokens_BT.dtype}: expected (rows, tokens) of int64 or int32"
            )
        config = self.config
        if cache is None:
            end = place.token + tokens_BT.shape[1]
            if end > config.context:
                raise UsageError(
                    f"{end} tokens: the model's context is {config.context}; give fewer or set model.context"
                )
        else:
            _check_cache(cache, tokens_BT, config)
        dropping = self.training and config.dropout > 0
        if dropping and dropout_seed is None:
            raise UsageError(
                f"dropout is {config.dropout} and no dropout_seed was given: pass one for each step, or call .eval()"
            )
        documents = None
        if self.documents_marked and cache is None:
            documents = document_places(tokens_BT)
        rotary = local = None
        if config.positions == "rotary":
            held = next(self.parameters()) if self.token_embedding is None else self.token_embedding.weight
            wide = held.dtype == torch.float64
            dtype = torch.float64 if wide else torch.float32
            if cache is not None and self._rotary_kept is not None:
                rotary = local = looked_up(self._rotary_kept[0], cache.positions_BT)
                if config.has_local_rotary:
                    local = looked_up(self._rotary_kept[1], cache.positions_BT)
                return Pass(rotary, local, dropout_seed if dropping else None, place, cache, None)
            if documents is not None:
                positions = documents.positions_BT[:, None]  # the same for every head
            elif cache is None:
                positions = torch.arange(place.token, end, device=tokens_BT.device)
            else:
                positions = cache.positions_BT[:, :, None]
            rotary = local = rotary_table(positions, config, dtype)
            if config.has_local_rotary:
                local = rotary_table(positions, config, dtype, is_local=True)
        return Pass(rotary, local, dropout_seed if dropping else None, place, cache, documents)

    def keep_rotary(self) -> None:
        """Compute the cosines and sines of all positions once; passes with a cache look theirs up from now on."""
        if self.config.positions == "rotary":
            held = next(self.parameters())
            dtype = torch.float64 if held.dtype == torch.float64 else torch.float32
            positions = torch.arange(self.config.context, device=held.device)
            whole = rotary_table(positions, self.config, dtype)
            local = (
                rotary_table(positions, self.config, dtype, is_local=True) if self.config.has_local_rotary else whole
            )
            self._rotary_kept = (whole, local)

    def embed(self, tokens_BT: Tensor, now: Pass) -> Tensor:
        """Tokens to activations: what comes before the first layer."""
        assert self.token_embedding is not None
        # A table that is cut over ranks is another module, which sees to its own part.
        fused = self.kernels.embedding != TORCH and type(self.token_embedding) is Embedding and now.cache is None
        fused = fused and not self.config.scaled_embedding  # positions are added after the scaling
        fused = fused and now.documents is None
        if now.documents is not None:
            tokens_BT = torch.where(tokens_BT < 0, -1 - tokens_BT, tokens_BT)
        x_BTD: Tensor
        if fused:
            positions = None if self.position_embedding is None else self.position_embedding.weight
            options = {"start": now.place.token, "implementation": self.kernels.embedding}
            x_BTD = embedding(tokens_BT, self.token_embedding.weight, positions, **options)
        else:
            x_BTD = self.token_embedding(tokens_BT)
            if self.config.scaled_embedding:
                x_BTD = x_BTD * self.config.width**0.5
        if self.position_embedding is not None and not fused:
            if now.documents is not None:
                start = now.place.token
                x_BTD = x_BTD + self.position_embedding(now.documents.positions_BT[:, start : start + x_BTD.shape[1]])
            elif now.cache is None:
                start = now.place.token
                x_BTD = x_BTD + self.position_embedding.weight[start : start + x_BTD.shape[1]]
            else:
                x_BTD = x_BTD + self.position_embedding(now.cache.positions_BT)
        y_BTD: Tensor = self.embedding_dropout(x_BTD, now)
        return y_BTD

    def head(self, stream: ResidualStream) -> Tensor:
        """Activations to logits: what comes after the last layer."""
        return self.project(self.normalize(stream))

    def normalize(self, stream: ResidualStream) -> Tensor:
        """The norm after the last layer, where there is one."""
        if self.final_norm is None:
            return added(stream)
        y_BTD: Tensor = self.final_norm(*stream)[0]
        return y_BTD

    def project(self, x_BTD: Tensor) -> Tensor:
        """The output projection, or the embedding's table in its place."""
        if self.align_vocabulary > 1:  # only then: a weight in few bits is computed when it is asked for
            weight_VD = self.output_weight
            more = -len(weight_VD) % self.align_vocabulary
            if more:
                padded = functional.linear(x_BTD, functional.pad(weight_VD, (0, 0, 0, more)))
                return padded[..., : len(weight_VD)]
        if self.output is None:
            if self.tied_product is not None:
                return self.tied_product.product(x_BTD, None)
            return functional.linear(x_BTD, self.output_weight)
        logits_BTV: Tensor = self.output(x_BTD)
        return logits_BTV

    @property
    def output_weight(self) -> Tensor:
        """Of the output projection (V, D): its own, or the embedding's table."""
        module = self.token_embedding if self.output is None else self.output
        assert module is not None
        return module.weight

    def fused_loss_sum(self, x_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """As `loss_sum(self.project(x_BTD), targets_BT)`, without ever holding the logits of all tokens.

        For a model whose `kernels.loss` is ours. Call it under autocast as the layers are: it casts as a product does.
        """
        targets_BT = targets_BT.long()
        total: Tensor = linear_cross_entropy(
            x_BTD,
            self.output_weight,
            targets_BT,
            ignore_index=IGNORED,
            reduction="sum",
            implementation=self.kernels.loss,
        )
        return total, (targets_BT != IGNORED).sum()


def joined(x: Tensor, projections: Sequence[nn.Linear]) -> Tensor:
    """What several projections make of the same x, side by side, by one product with their weights in a row.

    Worth it where weights are cast on their way anyway (autocast under torch.compile): the cast then writes them side
    by side. One wide product for three, forward and twice backward, and nothing to add up for x's gradient.
    """
    weight = torch.cat([projection.weight for projection in projections])
    bias = None if projections[0].bias is None else torch.cat([projection.bias for projection in projections])
    return functional.linear(x, weight, bias)


def _check_cache(cache: KeyValueCache, tokens_BT: Tensor, config: ModelConfig) -> None:
    """Nothing is read off a device here: positions stay below the capacity, which is a number of the host."""
    if cache.positions_BT.shape != tokens_BT.shape:
        raise UsageError(
            f"tokens are {tuple(tokens_BT.shape)} and the cache is prepared for {tuple(cache.positions_BT.shape)}: "
            "expected a position per token; prepare the cache before each pass"
        )
    if cache.capacity > config.context:
        raise UsageError(
            f"a cache for {cache.capacity} tokens per sequence: the model's context is {config.context}; "
            "make it with a smaller capacity"
        )


def _norm(config: ModelConfig, dtype: torch.dtype | None, kernels: ModelKernels) -> ResidualNorm:
    norm = ResidualNorm(config.width, config.norm, config.norm_epsilon, kernels.norms, dtype, config.norm_offset)
    norm.is_wide = config.norm_place == "post"  # there a norm's result is the residual stream itself
    return norm


def _head_norm(config: ModelConfig, heads: int, dtype: torch.dtype | None) -> ResidualNorm | None:
    """Of queries or keys: over each head, or over all heads together."""
    if config.qk_norm == "none":
        return None
    width = config.head_width * (heads if config.qk_norm == "full" else 1)
    return ResidualNorm(width, "rmsnorm", config.norm_epsilon, TORCH, dtype, config.norm_offset)
