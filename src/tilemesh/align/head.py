"""What a laid model says of the tokens that were drawn: log-probabilities, entropies, values, over any tp.

The one idea: only trained tokens go through the output projection.

B: rows; T: tokens; N: trained tokens; D: width; V: vocabulary, or this rank's part of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemesh.core.shard import share
from tilemesh.model.kinds import without_adapters
from tilemesh.model.linear import Linear
from tilemesh.model.loss import IGNORED
from tilemesh.model.shared_prompts import SharedPrompts
from tilemesh.model.transformer import ResidualStream, Transformer
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.logprobs import logprobs
from tilemesh.train.resume import CRITIC

VALUE_HEAD = "value_head"


def add_critic(model: Transformer) -> None:
    """Beside an actor, a model of the same shape with a value head and weights of its own, for the same optimizer. It
    has no output projection."""
    like = next(model.parameters())
    config = dataclasses.replace(model.config, tied=True)
    critic = Transformer(config, device=like.device, dtype=like.dtype, kernels=model.kernels)
    add_value_head(critic)
    model.add_module(CRITIC, critic)


def critic_of(laid: Laid) -> Laid | None:
    """The critic beside a laid actor, if there is one: over the same ranks, with the same exchanges."""
    critic = getattr(laid.model, CRITIC, None)
    if critic is None:
        return None
    own = f"{CRITIC}."
    shards = {name.removeprefix(own): shard for name, shard in laid.shards.items() if name.startswith(own)}
    return Laid(critic, laid.mesh, laid.plan, shards, laid.seams, laid.gradients, use=laid.use)


def add_value_head(model: Transformer) -> None:
    """A number for each token from the model's last activations: a critic's value, or a reward model's score. It begins
    at 0."""
    like = next(model.parameters())
    head = Linear(model.config.width, 1, False, device="meta", dtype=like.dtype)
    weight = torch.nn.Parameter(torch.zeros(1, model.config.width, dtype=like.dtype, device=like.device))
    head.weight = weight
    model.add_module(VALUE_HEAD, head)


class TokenFigures(NamedTuple):
    """Of each trained token."""

    logprob_N: Tensor
    entropy_N: Tensor
    value_N: Tensor | None
    router_loss: Tensor | None
    """Of experts' routers in training, summed over the trained tokens."""


Reference = Callable[..., TokenFigures]
"""`token_figures` of a model that is not trained."""


def trained_rows(targets_BT: Tensor) -> Tensor:
    """Where tokens stand whose targets are trained, counted over the flattened batch."""
    return torch.nonzero(targets_BT.flatten() != IGNORED)[:, 0]


def token_figures(
    laid: Laid,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    temperature: float,
    *,
    places_S4: Tensor | None = None,
    critic: Laid | None = None,
    layers: Sequence[Callable[..., Any]] | None = None,
    entropy_has_gradient: bool = False,
    **options: Any,
) -> TokenFigures:
    """A pass over a batch. Targets that are not trained are IGNORED. `places_S4`: of `shared.PassRows`. `critic`: what
    gives values, if not the model itself. `layers`: as `laid.stream` takes them."""
    if places_S4 is not None and len(places_S4):
        options["cache"] = SharedPrompts(places_S4, tokens_BT.device)
    stream = laid.stream(tokens_BT, layers, targets_BT=targets_BT, **options)
    rows_N = trained_rows(targets_BT)
    with laid.autocast():
        x_BTD, logits_1NV = laid.head(stream, rows_N)
    targets_N = targets_BT.flatten()[rows_N]
    vocabulary = laid.model.config.vocabulary
    invariant = laid.use.invariant
    scores = logprobs(logits_1NV[0], targets_N, temperature, laid.seams, vocabulary, entropy_has_gradient, invariant)
    value_N = values(laid, x_BTD, tokens_BT, rows_N)
    if critic is not None:
        value_N = _values_at(critic, critic.stream(tokens_BT, **options), tokens_BT, rows_N)
    return TokenFigures(*scores, value_N, stream.router_loss)


def base_figures(laid: Laid, *arguments: Any, **options: Any) -> TokenFigures:
    """The same of the weights that adapters are beside: a reference that takes no memory of its own."""
    with without_adapters(laid.model):
        return token_figures(laid, *arguments, **options)


def values(laid: Laid, x_BTD: Tensor, tokens_BT: Tensor, rows_N: Tensor) -> Tensor | None:
    """What the value head says at some tokens, in at least float32; None where there is none. `x_BTD`: of these tokens,
    or where ranks cut sequences, of all tokens that are this rank's."""
    head = getattr(laid.model, VALUE_HEAD, None)
    if head is None:
        return None
    with laid.autocast():
        value = head(x_BTD)[..., 0]
    value = value.to(torch.promote_types(value.dtype, torch.float32))
    if not laid.seams.sequence:
        only: Tensor = value[0]
        return only
    all_BT = value.new_zeros(tokens_BT.shape)
    first, count = share(tokens_BT.shape[1], laid.mesh.tp.size, laid.mesh.tp.index)
    padded_BT = torch.cat((all_BT[:, :first], value, all_BT[:, first + count :]), 1)
    return laid.seams.add(padded_BT).flatten()[rows_N]


def scores(laid: Laid, tokens_BT: Tensor, last_B: Tensor, layers: Sequence[Callable[..., Any]] | None = None) -> Tensor:
    """What a reward model gives each row: its value at the row's last token."""
    rows_B = torch.arange(len(last_B), device=last_B.device) * tokens_BT.shape[1] + last_B
    return _values_at(laid, laid.stream(tokens_BT, layers), tokens_BT, rows_B)


def _values_at(laid: Laid, stream: ResidualStream, tokens_BT: Tensor, rows_N: Tensor) -> Tensor:
    with laid.autocast():
        x_BTD = laid.model.normalize(stream)
    if not laid.seams.sequence:
        x_BTD = x_BTD.flatten(0, 1)[None, rows_N]
    value_N = values(laid, x_BTD, tokens_BT, rows_N)
    assert value_N is not None
    return value_N
