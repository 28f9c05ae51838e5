"""The Transformer, in plain torch, as one process sees it.

The one idea: every matrix is its own module with a name that says how it may be split (`fc_q`, `fc_k`, `fc_v`,
`fc_gate`, `fc_in` by their output, `fc_o`, `fc_out` by their input), and whatever belongs to one forward pass travels
in a `Pass` value. So a mesh can be laid over the model from outside, and faster programs that compute the same can be
chosen from outside (`model/programs/`); nothing in here knows of either.

B: rows (sequences); T: tokens of this pass; D: width; H: query heads; K: key and value heads;
E: head width; F: MLP width; V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilemesh.core.errors import UsageError
from tilemesh.model.attend import attend
from tilemesh.model.attend_alone import ALONE_BY_TOKEN
from tilemesh.model.cache import KeyValueCache, check_cache
from tilemesh.model.config import ModelConfig
from tilemesh.model.documents import DocumentPlaces, document_places, unmarked
from tilemesh.model.dropout import ORIGIN, Dropout, DropoutPlace, Site
from tilemesh.model.embedding import Embedding
from tilemesh.model.experts import Choices, Experts, RoutedOutput
from tilemesh.model.fresh import give_memory, initialize
from tilemesh.model.kernels import STANDARD, TORCH, ModelKernels
from tilemesh.model.linear import DENSE, Fused, LearnedVector, Linear
from tilemesh.model.norm import ResidualNorm, head_norm_of, norm_of
from tilemesh.model.part import ModelPart, whole_part
from tilemesh.model.rotary import RotaryAngles, RotaryTable, rotary_angles, rotate
from tilemesh.model.soft_cap import soft_capped

# What the first projection applies, and the gate where there is one. `gelu` is GPT-2's, the tanh form.
_FIRST_ACTIVATION = {"relu": "relu", "gelu": "gelu_tanh", "gelu-erf": "gelu", "swiglu": "none", "geglu": "none",
                     "swiglu-clipped": "one_more"}  # fmt: skip
_GATE_ACTIVATION = {"swiglu": "silu", "geglu": "gelu_tanh", "swiglu-clipped": "silu_clipped"}
LATENT_EPSILON = 1e-6
"""Of the norm of a latent: DeepSeek's code has it whatever the other norms' is."""


@dataclass(frozen=True)
class Pass:
    """What one forward pass is about, besides its activations."""

    # No field has a default: torch.compile up to 2.11 evaluates the defaults of a generated `__init__` even where
    # they are not used, and cannot trace one that is itself a dataclass.
    rotary: RotaryAngles | None
    """Cosines and sines of the tokens' positions: (T, E/2), or with a cache (B, T, 1, E/2), each row its own."""
    local_rotary: RotaryAngles | None
    """Of layers with a window, where these have frequencies of their own; else as `rotary`."""
    dropout_seed: int | Tensor | None
    """None: nothing is dropped."""
    place: DropoutPlace
    """Where this pass's activations stand in the whole batch: says what is dropped and, without a cache, positions."""
    cache: KeyValueCache | None
    documents: DocumentPlaces | None
    """Where documents packed into the sequences begin, none of which sees another; None: sequences are whole."""
    counted_BT: Tensor | None
    """Which tokens' targets count, for what trains routers; None: nothing does, or all count."""
    choices: Choices | None
    """Where layers are computed again: which experts were chosen the first time."""


class ResidualStream(NamedTuple):
    """The residual stream between two norms: x + branch, whose addition is left to the next norm."""

    x: Tensor
    branch: Tensor | None = None
    """What the last block computed; None where it is in x already."""
    router_loss: Tensor | None = None
    """Of the layers so far, summed over tokens; None where routers have no losses."""


def added(stream: ResidualStream) -> Tensor:
    """The stream as one tensor."""
    return stream.x if stream.branch is None else stream.x + stream.branch


def settled(stream: ResidualStream) -> ResidualStream:
    """With nothing left to add: one tensor to keep, not two."""
    return ResidualStream(added(stream), None, stream.router_loss)


def with_loss(stream: ResidualStream, router_loss: Tensor | None) -> ResidualStream:
    """The same stream with these losses; not by `_replace`, whose result torch 2.11's compiler cannot give back."""
    return ResidualStream(stream.x, stream.branch, router_loss)


class Attention(nn.Module):
    """Causal attention with grouped-query heads: as many as its projections have outputs for."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype | None = None, kernels: ModelKernels = STANDARD
    ) -> None:
        super().__init__()
        width, kv_width, biases = config.width, config.kv_width, config.has_biases("qkv")
        self.config, self.layer, self.window = config, layer, config.window_of(layer)
        self.implementation = kernels.attention
        self.fc_query_latent: Linear | None = None
        self.query_latent_norm: ResidualNorm | None = None
        self.fc_latent: Linear | None = None
        self.latent_norm: ResidualNorm | None = None
        queries = config.query_latent_width or width
        if config.query_latent_width:
            self.fc_query_latent = Linear(width, queries, False, device="meta", dtype=dtype)
            self.query_latent_norm = ResidualNorm(queries, "rmsnorm", LATENT_EPSILON, TORCH, dtype)
        self.fc_q = Linear(queries, config.query_width, biases, device="meta", dtype=dtype)
        if latent := config.latent_width:
            self.fc_latent = Linear(width, latent + config.rotary_width, False, device="meta", dtype=dtype)
            self.latent_norm = ResidualNorm(latent, "rmsnorm", LATENT_EPSILON, TORCH, dtype)
            width, kv_width = latent, config.kv_heads * config.plain_width
        self.fc_k = Linear(width, kv_width, biases, device="meta", dtype=dtype)
        self.fc_v = Linear(width, config.kv_heads * config.value_head_width, biases, device="meta", dtype=dtype)
        given = config.heads * config.value_head_width
        self.fc_o = Linear(given, config.width, config.has_biases("output"), device="meta", dtype=dtype)
        self.q_norm = head_norm_of(config, config.heads, dtype)
        self.k_norm = head_norm_of(config, config.kv_heads, dtype)
        self.sinks = LearnedVector(config.heads, dtype) if config.score_sink else None

    def forward(self, x_BTD: Tensor, now: Pass) -> Tensor:
        return self.attend(self.queries(x_BTD), *self.keys_and_values(x_BTD), now)

    def queries(self, x_BTD: Tensor) -> Tensor:
        """(B, T, heads x E)"""
        if self.fc_query_latent is not None and self.query_latent_norm is not None:
            x_BTD = self.query_latent_norm(self.fc_query_latent(x_BTD))[0]
        q: Tensor = self.fc_q(x_BTD)
        return q

    def keys_and_values(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Each (B, T, heads x E). Of a latent: keys begin with the part that all heads share, values end with zeros."""
        if self.fc_latent is None or self.latent_norm is None:
            return self.fc_k(x_BTD), self.fc_v(x_BTD)
        config = self.config
        latent, shared = torch.split(self.fc_latent(x_BTD), [config.latent_width, config.rotary_width], dim=-1)
        latent = self.latent_norm(latent)[0]
        k_BTKE, v_BTKE = (
            x.reshape(*x.shape[:-1], x.shape[-1] // width, width)
            for x, width in ((self.fc_k(latent), config.plain_width), (self.fc_v(latent), config.value_head_width))
        )
        shared = shared[..., None, :].expand(*k_BTKE.shape[:-1], shared.shape[-1])
        k_BTKE = torch.cat((shared, k_BTKE), dim=-1)
        v_BTKE = nn.functional.pad(v_BTKE, (0, config.head_width - config.value_head_width))
        return k_BTKE.flatten(-2), v_BTKE.flatten(-2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, now: Pass) -> Tensor:
        """From queries, keys and values, each (B, T, heads x E), to the branch of the residual stream."""
        if self.config.qk_norm == "full":
            q, k = self._normalized(q, k)
        width = self.config.head_width
        q_BTHE, k_BTKE, v_BTKE = (x.reshape(*x.shape[:-1], x.shape[-1] // width, width) for x in (q, k, v))
        if self.config.qk_norm == "head":
            q_BTHE, k_BTKE = self._normalized(q_BTHE, k_BTKE)
        if self.config.query_factor != 1:
            q_BTHE = q_BTHE * self.config.query_factor
        rotary = self.rotary(now)
        if now.cache is None:
            options = {"implementation": self.implementation, **self.seen}
            y_BTHE = attend(q_BTHE, k_BTKE, v_BTKE, rotary, now.documents, **options)
        else:
            if rotary is not None:
                alone = self.implementation == ALONE_BY_TOKEN
                q_BTHE, k_BTKE = rotate(q_BTHE, *rotary, alone), rotate(k_BTKE, *rotary, alone)
            y_BTHE = now.cache.attend(self.layer, q_BTHE, k_BTKE, v_BTKE, **self.seen)
        if self.config.value_head_width < width:
            y_BTHE = y_BTHE[..., : self.config.value_head_width]
        y_BTD: Tensor = self.fc_o(y_BTHE.flatten(-2))
        return y_BTD

    @property
    def seen(self) -> dict[str, Any]:
        """What a cache is told of this layer, where it is not the usual: its window, its scores' cap and its sinks."""
        told: dict[str, Any] = {"window": self.window, "cap": self.config.score_cap}
        told = {name: value for name, value in told.items() if value}
        return told if self.sinks is None else {**told, "sinks_H": self.sinks.weight}

    def compute_by(self, implementation: str) -> None:
        """Take another implementation of attention without a cache, as `model.attend` has them."""
        self.implementation = implementation

    def rotary(self, now: Pass) -> RotaryAngles | None:
        """What this layer's queries and keys are turned by."""
        return now.local_rotary if self.window else now.rotary

    def _normalized(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.q_norm(q)[0], self.k_norm(k)[0]


class Mlp(nn.Module):
    """act(x W_in) W_out, or with a gate (act(x W_gate) * x W_in) W_out; activations are their projections'."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype | None = None, kernels: ModelKernels = STANDARD, hidden: int = 0
    ) -> None:
        super().__init__()
        width, hidden, biases = config.width, hidden or config.mlp_width, config.has_biases("mlp")
        is_plain = kernels.projections == TORCH or config.activation == "swiglu-clipped"  # our kernel does not know it
        kind = DENSE if is_plain else Fused(implementation=kernels.projections)
        gate, first = _GATE_ACTIVATION.get(config.activation), _FIRST_ACTIVATION[config.activation]
        self.fc_gate: Linear | None = None
        if gate is not None:
            self.fc_gate = Linear(width, hidden, biases, activation=gate, kind=kind, device="meta", dtype=dtype)
        self.fc_in = Linear(width, hidden, biases, activation=first, kind=kind, device="meta", dtype=dtype)
        self.fc_out = Linear(hidden, width, biases, device="meta", dtype=dtype)
        self._gated: Callable[[Tensor, Tensor], Tensor] | None = None

    def gate_by(self, gated: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Take one function of the gate's product and of what it opens in place of an activation and a product."""
        self._gated = gated

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF: Tensor = self.fc_in(x_BTD)
        if self.fc_gate is not None:
            given = self._gated
            h_BTF = self.fc_gate(x_BTD) * h_BTF if given is None else given(self.fc_gate.affine(x_BTD), h_BTF)
        y_BTD: Tensor = self.fc_out(h_BTF)
        return y_BTD


class Layer(nn.Module):
    """Attention and MLP, or experts, each added to what came in, with norms where `norm_place` says.

    A norm takes the addition before it along. So a pre-norm layer gives its MLP's result away unadded.
    """

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype | None = None, kernels: ModelKernels = STANDARD
    ) -> None:
        super().__init__()
        self.config = config
        is_sandwich = config.norm_place == "sandwich"
        self.attention_norm = norm_of(config, dtype, kernels)
        self.attention = Attention(config, index, dtype, kernels)
        self.attention_out_norm = norm_of(config, dtype, kernels) if is_sandwich else None
        self.mlp_norm = norm_of(config, dtype, kernels)
        self.mlp: Mlp | Experts = _mlp_of(config.of_layer(index), dtype, kernels)
        self.mlp_out_norm = norm_of(config, dtype, kernels) if is_sandwich else None
        self.attention_dropout = Dropout(config.dropout, index, Site.ATTENTION)
        self.mlp_dropout = Dropout(config.dropout, index, Site.MLP)

    def forward(self, stream: ResidualStream, now: Pass) -> ResidualStream:
        return self.compose(self.attention, self.mlp, stream, now)

    def compose(self, attention: AttentionCall, mlp: MlpCall, stream: ResidualStream, now: Pass) -> ResidualStream:
        """The layer of these two blocks: its own, or programs that compute the same."""
        if not isinstance(self.mlp, Experts):
            return with_loss(self._blocks(attention, mlp, stream, now), stream.router_loss)
        losses = [] if stream.router_loss is None else [stream.router_loss]

        def routed(x_BTD: Tensor) -> Tensor:
            output: Tensor | RoutedOutput = mlp(x_BTD, now.counted_BT, now.choices)
            if isinstance(output, Tensor):
                return output
            losses.append(output.loss)
            return output.y_BTD

        after = self._blocks(attention, routed, stream, now)
        return with_loss(after, torch.stack(losses).sum() if losses else None)

    def _blocks(self, attention: AttentionCall, mlp: MlpCall, stream: ResidualStream, now: Pass) -> ResidualStream:
        x_BTD: Tensor
        y_BTD: Tensor
        if self.config.norm_place == "post":
            x_BTD = added(stream)
            x_BTD, _ = self.attention_norm(x_BTD, self.attention_dropout(attention(x_BTD, now), now))
            x_BTD, _ = self.mlp_norm(x_BTD, self.mlp_dropout(mlp(x_BTD), now))
            return ResidualStream(x_BTD)
        if self.config.norm_place == "branch":
            x_BTD = added(stream)
            x_BTD = x_BTD + self.attention_dropout(self.attention_norm(attention(x_BTD, now))[0], now)
            return ResidualStream(x_BTD, self.mlp_dropout(self.mlp_norm(mlp(x_BTD))[0], now))
        y_BTD, x_BTD = self.attention_norm(stream.x, stream.branch)
        y_BTD = attention(y_BTD, now)
        if self.attention_out_norm is not None:
            y_BTD = self.attention_out_norm(y_BTD)[0]
        y_BTD = self.attention_dropout(y_BTD, now)
        if self.config.parallel_residual:
            return ResidualStream(x_BTD, y_BTD + self.mlp_dropout(mlp(self.mlp_norm(x_BTD)[0]), now))
        y_BTD, x_BTD = self.mlp_norm(x_BTD, y_BTD)
        y_BTD = mlp(y_BTD)
        if self.mlp_out_norm is not None:
            y_BTD = self.mlp_out_norm(y_BTD)[0]
        return ResidualStream(x_BTD, self.mlp_dropout(y_BTD, now))


def _mlp_of(config: ModelConfig, dtype: torch.dtype | None, kernels: ModelKernels) -> Mlp | Experts:
    """One for all tokens, or experts."""
    if not config.experts:
        return Mlp(config, dtype, kernels)
    shared = Mlp(config, dtype, kernels, config.shared_width) if config.shared_width else None
    return Experts(config, (Mlp(config, dtype, kernels) for _ in range(config.experts)), shared, dtype)


AttentionCall = Callable[[Tensor, Pass], Tensor]
MlpCall = Callable[..., Any]
"""Of activations alone; experts take more: see `Experts.forward`."""
LayerCall = Callable[[ResidualStream, Pass], ResidualStream]


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
        self.rotary_table: RotaryTable | None = None
        """Of all positions, where passes shall not compute their cosines and sines anew."""
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
        self.final_norm = norm_of(config, dtype, kernels) if self.part.head and config.norm_place != "post" else None
        self.output = None
        if self.part.head and not config.tied:
            self.output = Linear(config.width, config.vocabulary, bias=False, device="meta", dtype=dtype)
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
        marked: bool = False,
    ) -> Tensor:
        """Logits (B, T, V). With a cache the tokens attend to those already in it and stand where it says.

        Training with dropout wants `dropout_seed`, another each step: `fold_seed(seed, step)`; and where the batch is a
        part of a larger one, `place`. A part of a model without the embedding takes `x_BTD`, the activations that the
        part before it gave; one without the head gives such activations. `marked`: as `prepare` takes it.
        """
        now = self.prepare(tokens_BT, cache=cache, dropout_seed=dropout_seed, place=place, marked=marked)
        stream = ResidualStream(self.enter(tokens_BT, x_BTD, now))
        for layer in self.layers:
            stream = layer(stream, now)
        return self.project(self.normalize(stream)) if self.part.head else added(stream)

    def prepare(
        self,
        tokens_BT: Tensor,
        *,
        cache: KeyValueCache | None = None,
        dropout_seed: int | Tensor | None = None,
        place: DropoutPlace = ORIGIN,
        marked: bool = False,
        table: RotaryTable | None = None,
        counted_BT: Tensor | None = None,
        choices: Choices | None = None,
    ) -> Pass:
        """Check the tokens and gather what the layers need beside their activations.

        `marked`: documents are packed into the sequences and must not see each other; the first token t of each is
        given as -1 - t. No token could say so itself: some chat templates end answers as they end conversations.
        `table`: of all positions' cosines and sines, for many passes; otherwise the model's own, or they are computed.
        `counted_BT`, `choices`: as `Pass` has them.
        """
        if tokens_BT.dim() != 2 or tokens_BT.dtype not in (torch.int64, torch.int32):
            raise UsageError(
                f"tokens are {tuple(tokens_BT.shape)} of {tokens_BT.dtype}: expected (rows, tokens) of int64 or int32"
            )
        config, begin, tokens = self.config, place.token, tokens_BT.shape[1]
        if cache is not None:
            check_cache(cache, tokens_BT, config.context)
        elif begin + tokens > config.context:
            raise UsageError(
                f"{begin + tokens} tokens: the model's context is {config.context}; give fewer or set model.context"
            )
        dropping = self.training and config.dropout > 0
        if dropping and dropout_seed is None:
            raise UsageError(
                f"dropout is {config.dropout} and no dropout_seed was given: pass one for each step, or call .eval()"
            )
        documents = document_places(tokens_BT) if marked and cache is None else None
        rotary = local = None
        if config.positions == "rotary":
            if documents is not None:
                positions = documents.positions_BT[:, None]  # the same for every head
            elif cache is not None:
                positions = cache.positions_BT[:, :, None]
            else:
                assert isinstance(begin, int)  # tokens that are not one run come with a cache
                positions = torch.arange(begin, begin + tokens, device=tokens_BT.device)
            table = table or self.rotary_table
            like = next(self.parameters()) if self.token_embedding is None else self.token_embedding.weight
            rotary, local = rotary_angles(positions, config, like.dtype) if table is None else table.at(positions)
        seed = dropout_seed if dropping else None
        return Pass(rotary, local, seed, place, cache, documents, counted_BT, choices)

    def enter(self, tokens_BT: Tensor, x_BTD: Tensor | None, now: Pass) -> Tensor:
        """What the first layer here is given: embedded tokens, or the activations of the part before."""
        self.part.check_input(x_BTD is not None)
        return self.embed(tokens_BT, now) if x_BTD is None else x_BTD

    def embed(self, tokens_BT: Tensor, now: Pass) -> Tensor:
        """Tokens to activations: what comes before the first layer."""
        assert self.token_embedding is not None
        x_BTD: Tensor = self.token_embedding(tokens_BT if now.documents is None else unmarked(tokens_BT))
        if self.config.scaled_embedding:
            x_BTD = x_BTD * self.config.width**0.5
        if self.position_embedding is not None:
            first = now.place.token
            if now.cache is not None:
                x_BTD = x_BTD + self.position_embedding(now.cache.positions_BT)
            elif now.documents is not None:
                x_BTD = x_BTD + self.position_embedding(now.documents.positions_BT[:, first : first + x_BTD.shape[1]])
            else:
                x_BTD = x_BTD + self.position_embedding.weight[first : first + x_BTD.shape[1]]
        y_BTD: Tensor = self.embedding_dropout(x_BTD, now)
        return y_BTD

    def normalize(self, stream: ResidualStream) -> Tensor:
        """The norm after the last layer, where there is one."""
        if self.final_norm is None:
            return added(stream)
        y_BTD: Tensor = self.final_norm(stream.x, stream.branch)[0]
        return y_BTD

    def project(self, x_BTD: Tensor) -> Tensor:
        """The output projection to logits, or the embedding's table in its place."""
        if self.output is None:
            assert self.token_embedding is not None
            logits_BTV = self.token_embedding.project(x_BTD)
        else:
            logits_BTV = self.output(x_BTD)
        return soft_capped(logits_BTV, self.config.logit_cap)

    @property
    def output_weight(self) -> Tensor:
        """Of the output projection (V, D): its own, or the embedding's table."""
        module = self.token_embedding if self.output is None else self.output
        assert module is not None
        return module.weight
