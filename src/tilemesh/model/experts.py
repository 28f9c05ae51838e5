"""A mixture of experts: MLPs beside each other, of which a router picks some for each token (Shazeer et al. 2017).

The one idea: experts are MLPs as any layer has one, each with parameters of its own names. So whatever is laid over an
MLP from outside (ranks, adapters, recipes, optimizers) is laid over each of them. An expert takes as many tokens as
picked it, or none, and then has a gradient of zeros; with `expert_capacity` training drops what is beyond (`take`).

A token's experts are chosen once. Where a layer is computed again in the backward pass, the choice of the first time is
kept in the pass's `Choices` and taken from there; scores and weights, which have gradients, are computed again.

N: tokens of all rows; D: width; X: experts; C: experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.kernels.routing.reference import permute_rows, route_tokens, unpermute_rows
from tilemesh.model.capacity import OrderedCounts, rows_within
from tilemesh.model.config import ModelConfig
from tilemesh.model.linear import LearnedVector
from tilemesh.model.row_blocks import in_row_blocks

EXCESS_SIZE = 2.0**-60
"""Of a pick in the gradient of a router's bias: sums of such numbers are exact as those of whole numbers are."""
Computation = Callable[[Tensor, Tensor], Tensor]
"""From rows ordered by expert, and how many each expert takes, to the results."""


@dataclass(eq=False)
class ExpertChoice:
    """What was decided for the tokens of one pass of one layer, and is not decided again."""

    experts_NC: Tensor
    counts_X: Tensor
    """How many rows each expert takes."""
    arriving: Any = None
    """Where others have some of the experts: what the exchange knows of the rows that come."""
    slots_NC: Tensor | None = None
    """Where some were dropped: as `Routing` has it, those behind all that experts take."""
    sums: Tensor | None = None
    """Where ranks share sequences: by sequence, how often each expert was picked, and the tokens that count."""


Choices = dict["Experts", ExpertChoice]
"""Of the layers of one pass."""
Results = Callable[[Computation], Tensor]
"""Waits for rows that were sent to this rank's experts, computes them, and gives what became of one's own rows."""
Exchange = Callable[[Tensor, ExpertChoice], Results]
"""Sends rows, ordered by expert, to where their experts are; what is computed before its result is called, they travel
beside."""


class Routing(NamedTuple):
    """Which experts compute each token, and what their results count."""

    experts_NC: Tensor
    weights_NC: Tensor
    scores_NX: Tensor
    """The logarithms of what they were picked by, but for a constant of each token, a bias and groups."""
    slots_NC: Tensor
    """Where each token's rows lie among those of all experts, which are ordered by expert; of one expert by token."""
    counts_X: Tensor
    """How often each expert was picked."""


class RouterLoad:
    """What a router's choices came to since somebody took it; on the device, so that nobody waits."""

    def __init__(self, experts: int, device: torch.device) -> None:
        self.sums = torch.zeros(experts + 3, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, routing: Routing, taken_X: Tensor) -> None:
        likely_NX = routing.scores_NX.log_softmax(-1)
        self.sums[:-3] += routing.counts_X
        self.sums[-3] += (routing.counts_X - taken_X).sum()
        self.sums[-2] -= (likely_NX.exp() * likely_NX).sum()
        self.sums[-1] += len(likely_NX)

    def take(self) -> Tensor:
        """By expert, how often it was picked; the picks that were dropped; the entropy of routers' probabilities,
        summed over tokens; the tokens."""
        sums = self.sums.clone()
        self.sums.zero_()  # in place: a captured step goes on adding to it
        return sums


class RoutedOutput(NamedTuple):
    """What experts give where their router is trained to spread tokens."""

    y_BTD: Tensor
    loss: Tensor
    """Of the router, summed over the tokens that count."""


class Router(nn.Module):
    """A score of every expert for every token: the likeliest are picked. In float32 at least, as all routing is: of two
    experts that are close, 16 bits would pick another.

    Sigmoids are taken as softmaxes over their logarithms: what is divided by the sum of a token's experts is the same,
    and so is what DeepSeek-V3's loss of balance divides by the sum of all.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.width, device="meta", dtype=dtype))
        self.bias: nn.Parameter | None = None
        """Of the experts' scores, where they are picked; in float32 at least: its steps are small."""
        if config.router_bias is True:
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            self.bias = nn.Parameter(torch.empty(config.experts, device="meta", dtype=wide))
        self.shift = LearnedVector(config.experts, dtype) if config.router_bias == "scores" else None
        """What is added to the product with the weight."""
        self.copies = 1
        """Ranks that route the same tokens, and whose gradients are added up."""
        self.product: Callable[[Tensor, Tensor], Tensor] = functional.linear
        self.in_blocks = False
        self.in_turn = False
        """Whether tokens go to experts in turn, whatever their scores: to measure speed without imbalance."""
        self.over_sequences: Callable[[Tensor], Tensor] | None = None
        """Where ranks share sequences: adds what each has counted of its tokens."""

    def forward(
        self,
        x_ND: Tensor,
        experts_NC: Tensor | None = None,
        repeats: bool = False,
        counted_N: Tensor | None = None,
    ) -> Routing:
        """`experts_NC`: chosen before; None: to be chosen. `repeats`: the pass is made twice, the second time with the
        experts of the first, and both must keep the same tensors: experts are chosen before they are weighed.
        `counted_N`: the tokens whose picks move the bias; None: all, no padding among them."""
        options: dict[str, Any] = {"picked": self.config.experts_per_token}
        options["renormalized"] = self.config.router_renormalized
        scores_NX, config = in_row_blocks(self._scores, x_ND) if self.in_blocks else self._scores(x_ND), self.config
        if experts_NC is None and self.in_turn:
            picks = torch.arange(len(x_ND) * config.experts_per_token, device=x_ND.device)
            experts_NC = picks.view(len(x_ND), -1) % config.experts
        elif experts_NC is None and (self.bias is not None or config.router_groups > 1):
            experts_NC = self._pick(scores_NX.detach())
        elif repeats and experts_NC is None:
            experts_NC = route_tokens(scores_NX.detach(), **options)[1]
        weights_NC, experts_NC, slots_NC, counts_X = route_tokens(scores_NX, experts_NC, **options)
        if config.router_scores == "sigmoid" and not config.router_renormalized:
            weights_NC = weights_NC * scores_NX.exp().sum(-1, keepdim=True)
        if config.router_scale != 1:
            weights_NC = weights_NC * config.router_scale
        if self.bias is not None and self.training and torch.is_grad_enabled():
            function: Any = _Excess
            picks_X = counts_X
            if counted_N is not None:
                picks_N = counted_N.to(counts_X.dtype).repeat_interleave(config.experts_per_token)
                picks_X = torch.zeros_like(counts_X).scatter_add(0, experts_NC.flatten().long(), picks_N)
            weights_NC = function.apply(weights_NC, self.bias, picks_X, 1 / self.copies)
        return Routing(experts_NC, weights_NC, scores_NX, slots_NC, counts_X)

    @torch.no_grad()
    def _pick(self, scores_NX: Tensor) -> Tensor:
        """The experts of each token, where a bias or groups have a say."""
        config, is_sigmoid = self.config, self.config.router_scores == "sigmoid"
        by_NX = scores_NX.exp() if is_sigmoid else scores_NX.softmax(-1)
        if self.bias is not None:
            by_NX = by_NX + self.bias.to(by_NX.dtype)
        if config.router_groups_per_token < config.router_groups:
            by_NGE = by_NX.view(len(by_NX), config.router_groups, config.experts // config.router_groups)
            best_NG = by_NGE.topk(min(1 + is_sigmoid, by_NGE.shape[-1]), -1).values.sum(-1)
            groups_NP = best_NG.topk(config.router_groups_per_token, -1).indices
            out_NG = torch.ones_like(best_NG, dtype=torch.bool).scatter_(-1, groups_NP, False)
            by_NX = by_NGE.masked_fill(out_NG[..., None], -torch.inf).flatten(1)
        return by_NX.topk(config.experts_per_token, -1).indices

    def compute_by(self, product: Callable[[Tensor, Tensor], Tensor], in_blocks: bool) -> None:
        """Another product than torch's, or blocks of tokens of one shape."""
        self.product, self.in_blocks = product, in_blocks

    def _scores(self, x_ND: Tensor) -> Tensor:
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        with torch.autocast(x_ND.device.type, enabled=False):
            scores_NX = self.product(x_ND.to(wide), self.weight.to(wide))
            if self.shift is not None:
                scores_NX = scores_NX + self.shift.weight.to(wide)
        return functional.logsigmoid(scores_NX) if self.config.router_scores == "sigmoid" else scores_NX

    def loss(self, routing: Routing, counted_BT: Tensor, choice: ExpertChoice | None = None) -> Tensor:
        """What training adds to the loss of the tokens that count: `balance_loss` and `router_z_loss`, summed.

        A sequence is balanced for itself and weighs as its tokens do, so cutting a batch into rows changes nothing.
        `choice`: keeps what ranks told one another of their tokens.
        """
        config, (rows, tokens) = self.config, counted_BT.shape
        scores_BTX = routing.scores_NX.view(rows, tokens, config.experts)
        weights_BT = counted_BT.to(scores_BTX.dtype)
        squares_BT = scores_BTX.logsumexp(-1).square()
        total = config.router_z_loss * (squares_BT * weights_BT).sum()
        if not config.balance_loss:
            return total
        picks = weights_BT.repeat_interleave(config.experts_per_token, 1)
        picked_BX = torch.zeros_like(scores_BTX[:, 0]).scatter_add(1, routing.experts_NC.view(picks.shape), picks)
        counts_B = weights_BT.sum(1)
        if self.over_sequences is not None:  # each rank's part of the loss is that of its tokens
            sums = None if choice is None else choice.sums
            if sums is None:
                sums = self.over_sequences(torch.cat([picked_BX, counts_B[:, None]], dim=1))
            if choice is not None:
                choice.sums = sums
            picked_BX, counts_B = sums[:, :-1], sums[:, -1]
        likely_BX = (scores_BTX.softmax(-1) * weights_BT[..., None]).sum(1)
        evenness_B = (picked_BX * likely_BX).sum(-1) / counts_B.clamp(min=1)
        return total + config.balance_loss * config.experts / config.experts_per_token * evenness_B.sum()


class _Excess(torch.autograd.Function):
    """Nothing forward; backward the gradient of a router's bias: by expert, how much more than the mean it was picked,
    times the number of experts, which is whole.

    So it is exchanged, added up over microbatches and ranks, and cut as any gradient is, and its sign, which moves the
    bias, is that over the whole batch. It is too small to count in the norm of all gradients.
    """

    @staticmethod
    def forward(ctx: Any, weights_NC: Tensor, bias_X: Tensor, counts_X: Tensor, part: float) -> Tensor:
        ctx.counts_X, ctx.dtype, ctx.part = counts_X, bias_X.dtype, part
        return weights_NC.view_as(weights_NC)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        excess_X = ctx.counts_X * len(ctx.counts_X) - ctx.counts_X.sum()
        return grad, excess_X.to(ctx.dtype) * (EXCESS_SIZE * ctx.part), None, None


class TokenGate(nn.Module):
    """A number between 0 and 1 for every token: the sigmoid of a score, in float32 at least."""

    def __init__(self, width: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width, device="meta", dtype=dtype))
        self.product: Callable[[Tensor, Tensor], Tensor] = functional.linear
        self.in_blocks = False

    def forward(self, x_BTD: Tensor) -> Tensor:
        return in_row_blocks(self._gate, x_BTD) if self.in_blocks else self._gate(x_BTD)

    def compute_by(self, product: Callable[[Tensor, Tensor], Tensor], in_blocks: bool) -> None:
        """Another product than torch's, or blocks of tokens of one shape."""
        self.product, self.in_blocks = product, in_blocks

    def _gate(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return self.product(x.to(wide), self.weight.to(wide)).sigmoid()


class Experts(nn.Module):
    """The sum of what a token's experts make of it, each times its weight, and of what a shared one does."""

    def __init__(
        self,
        config: ModelConfig,
        experts: Iterable[nn.Module],
        shared: nn.Module | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config, dtype)
        self.experts = nn.ModuleList(experts)
        self.shared = shared
        self.shared_gate = TokenGate(config.width, dtype) if config.shared_gate else None
        self.load: RouterLoad | None = None
        """Where somebody wants to know which experts training picks."""
        self.computation: Computation | None = None
        self.ordered_counts: OrderedCounts | None = None
        """Where ranks share sequences: what their earlier tokens have picked."""
        self.exchange: Exchange | None = None
        """Where others have some of the experts, and these alone are in `experts`: what makes rows reach theirs."""

    def forward(
        self, x_BTD: Tensor, counted_BT: Tensor | None = None, choices: Choices | None = None
    ) -> Tensor | RoutedOutput:
        """With the router's losses where it has some and it is said which tokens' targets count. `choices`: as the
        module says."""
        x_ND = x_BTD.flatten(0, -2)
        choice = None if choices is None else choices.get(self)
        before_NC = None if choice is None else choice.experts_NC
        counted_N = None if counted_BT is None else counted_BT.flatten()
        routing: Routing = self.router(x_ND, before_NC, choices is not None, counted_N)
        if choice is None:
            choice = self.take(routing, x_BTD.shape[:-1])
            if choices is not None:
                choices[self] = choice
            if self.load is not None and self.training:
                self.load.add(routing, choice.counts_X)
        slots_NC = routing.slots_NC if choice.slots_NC is None else choice.slots_NC
        rows_ND = permute_rows(x_ND, slots_NC)
        dropped = 0 if choice.slots_NC is None else len(rows_ND) - int(choice.counts_X.sum())
        rows_ND = rows_ND[: len(rows_ND) - dropped] if dropped else rows_ND
        results_of = None if self.exchange is None else self.exchange(rows_ND, choice)
        # What does not wait for rows of other ranks is computed while they travel.
        has_loss = self.config.balance_loss or self.config.router_z_loss
        loss = self.router.loss(routing, counted_BT, choice) if counted_BT is not None and has_loss else None
        shared_BTD = None if self.shared is None else self._shared(x_BTD)
        results = self.compute(rows_ND, choice.counts_X) if results_of is None else results_of(self.compute)
        results = functional.pad(results, (0, 0, 0, dropped)) if dropped else results
        # Back in the order of tokens, where each one's results are added in the order of its experts' weights.
        y_BTD: Tensor = unpermute_rows(results, routing.weights_NC, slots_NC).view(x_BTD.shape)
        if shared_BTD is not None:
            y_BTD = y_BTD + shared_BTD
        return y_BTD if loss is None else RoutedOutput(y_BTD, loss)

    def take(self, routing: Routing, shape: torch.Size) -> ExpertChoice:
        """What experts take of what was picked for (B, T) tokens: all, but in training with `expert_capacity`."""
        if not (self.training and self.config.expert_capacity):
            return ExpertChoice(routing.experts_NC, routing.counts_X)
        experts_BTC = routing.experts_NC.view(*shape, self.config.experts_per_token)
        slots_NC, taken_X = rows_within(self.config, experts_BTC, self.ordered_counts)
        return ExpertChoice(routing.experts_NC, taken_X, slots_NC=slots_NC.view_as(routing.slots_NC))

    def stay_out_of_graphs(self) -> None:
        """Under torch.compile: how many rows each expert takes differs by step, and is asked for or exchanged."""
        apart: Any = torch.compiler.disable
        self.forward = apart(self.forward)  # type: ignore[method-assign]

    def _shared(self, x_BTD: Tensor) -> Tensor:
        """What the expert of all tokens gives."""
        assert self.shared is not None
        y_BTD: Tensor = self.shared(x_BTD)
        return y_BTD if self.shared_gate is None else y_BTD * self.shared_gate(x_BTD).to(y_BTD.dtype)

    @property
    def waits_for_loads(self) -> bool:
        """Whether the host asks the device how many rows each expert takes: such a pass cannot be captured."""
        drops = self.training and self.config.expert_capacity > 0
        return self.computation is None or self.exchange is not None or drops

    def compute(self, rows_ND: Tensor, counts: Tensor) -> Tensor:
        """What the experts here make of rows that are ordered by expert, so many for each."""
        if self.computation is not None:
            return self.computation(rows_ND, counts)
        parts = zip(self.experts, torch.split(rows_ND, counts.tolist()), strict=True)
        return torch.cat([expert(rows) for expert, rows in parts])

    def compute_by(self, computation: Computation) -> None:
        """Another way than one expert after the other."""
        self.computation = computation
