"""Losses of answers as objectives of a step: what a microbatch's tensors are, and what is lowered.

A microbatch has tokens and targets (IGNORED where not trained), as `shared.PassRows` has them, and `floats_KN`: of each
trained token, in the order of sequences, the numbers that its loss needs. Weights come multiplied by the step's trained
tokens, because a step's gradients are divided by these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilemesh.align.checks import check_loss
from tilemesh.align.config import AlignConfig
from tilemesh.align.formulas.losses import FIGURES, PolicyTokens, policy_loss
from tilemesh.align.formulas.policy import sequence_sums
from tilemesh.align.formulas.preferences import PAIR_LOSSES, Side, bradley_terry
from tilemesh.align.head import critic_of, scores, token_figures, trained_rows
from tilemesh.parallel.laid import Laid
from tilemesh.train.source import Objective

OLD, SAMPLED, ADVANTAGE, WEIGHT, REFERENCE, OLD_VALUE, RETURN, SEQUENCE = range(8)
FLOATS = 8
PAIR_FIGURES = ("pair_loss", "accuracy", "margin", "chosen")
"""Means over the pairs of a step: loss, how often the chosen answer is ahead, by how much, its own gain or score."""


class FeedbackObjective:
    """What is lowered, and the sums that a step's line is made of."""

    def __init__(self, config: AlignConfig, laid: Laid) -> None:
        self.config, self.laid, self.align = config, laid, config.align
        self.critic = critic_of(laid)
        self.layers: Sequence[Callable[..., Any]] | None = None
        if config.train.compile:
            if config.plan.tp > 1:
                laid.seams.stay_out_of_graphs()
            self.layers = laid.compiled_regions().layers
        self.names = (*(PAIR_FIGURES if self.align.is_of_pairs else FIGURES), "objective")
        self._sums = torch.zeros(len(self.names), dtype=torch.float64)
        self._arrived: list[Tensor] = []
        """What each microbatch's loss was multiplied by before its gradients were taken."""

    def objective(self) -> Objective:
        if self.align.algorithm == "reward":
            return Objective(self.reward_loss, self.reward_loss)
        if self.align.is_of_pairs:
            return Objective(self.pair_loss, self.pair_loss)
        return Objective(self.policy_loss, _as_it_is)

    def step_figures(self, loss: float, count: int) -> dict[str, float]:
        """Of the step's microbatches, over all replicas and so many trained tokens (a collective call)."""
        sums, self._sums = self._sums.numpy(), torch.zeros_like(self._sums)
        replicas = self.laid.mesh.dp
        sums = replicas.comm.all_reduce(sums) if replicas.size > 1 else sums
        figures = dict(zip(self.names, (sums / max(1, count)).tolist(), strict=True))
        arrived, self._arrived = self._arrived, []
        factors = [] if self.config.plan.precision == "fp16" else [float(each) for each in arrived]  # that has its own
        check_loss(loss, figures.pop("objective"), factors)
        return figures

    def policy_loss(
        self, tokens_BT: Tensor, targets_BT: Tensor, floats_KN: Tensor, places_S4: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        align, row = self.align, self.align.row
        figures = token_figures(
            self.laid, tokens_BT, targets_BT, align.temperature, places_S4=places_S4, critic=self.critic,
            layers=self.layers, entropy_has_gradient=row.entropy_coefficient > 0, **options,
        )  # fmt: skip
        wide = floats_KN.to(figures.logprob_N.dtype)
        old_N = wide[OLD]
        if align.old == "trainer" and align.steps_per_batch == 1:
            old_N = figures.logprob_N.detach()
        has_critic = figures.value_N is not None
        tokens = PolicyTokens(
            figures.logprob_N, figures.entropy_N, figures.value_N, old_N, wide[SAMPLED], wide[ADVANTAGE], wide[WEIGHT],
            torch.ones_like(old_N), floats_KN[SEQUENCE].long(), wide[REFERENCE] if align.has_reference else None,
            wide[OLD_VALUE] if has_critic else None, wide[RETURN] if has_critic else None,
            figures.logprob_N.detach() if align.old == "engine" else None,
        )  # fmt: skip
        total, sums = policy_loss(row, tokens, align.correction, align.correction_most)
        return self._lowered(_routed(total, figures.router_loss), sums, len(old_N))

    def pair_loss(
        self, tokens_BT: Tensor, targets_BT: Tensor, floats_KN: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Rows are chosen and rejected answers in turn; the first float is the reference's log-probability, the second
        what a pair counts for."""
        row = self.align.pair_row
        figures = token_figures(self.laid, tokens_BT, targets_BT, 1.0, layers=self.layers, **options)
        logprob_N = figures.logprob_N
        rows_N = trained_rows(targets_BT)
        owner_N, floats = rows_N // tokens_BT.shape[1], floats_KN.to(logprob_N.dtype)
        count_B = torch.bincount(owner_N, minlength=len(tokens_BT)).to(logprob_N.dtype)
        columns = [sequence_sums(each, owner_N, len(tokens_BT)) for each in (logprob_N, floats[0])]
        chosen, rejected = (Side(*(column[side::2] for column in (*columns, count_B))) for side in (0, 1))
        loss_P = PAIR_LOSSES[row.name](chosen, rejected, row.beta, row.margin)
        return self._pairs(loss_P, chosen.gain_P, rejected.gain_P, floats[1], len(rows_N), figures.router_loss)

    def reward_loss(
        self, tokens_BT: Tensor, targets_BT: Tensor, floats_KN: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """A reward model's, from the value at each row's last token."""
        rows_N = trained_rows(targets_BT)
        counted_BT = targets_BT != -100
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        last_B = (counted_BT * places_T).amax(1) + 1  # the last token itself: targets are one ahead
        score_B = scores(self.laid, tokens_BT, last_B, self.layers)
        chosen_P, rejected_P = score_B[0::2], score_B[1::2]
        loss_P = bradley_terry(chosen_P, rejected_P, self.align.margin or 0.0, self.align.centre)
        return self._pairs(loss_P, chosen_P, rejected_P, floats_KN[1].to(score_B.dtype), len(rows_N))

    def _pairs(
        self,
        loss_P: Tensor,
        chosen_P: Tensor,
        rejected_P: Tensor,
        weight_N: Tensor,
        tokens: int,
        router_loss: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        weight = weight_N[0] if len(weight_N) else weight_N.new_zeros(())
        with torch.no_grad():
            ahead_P = chosen_P - rejected_P
            parts = (loss_P, (ahead_P > 0).to(loss_P.dtype), ahead_P, chosen_P)
            sums = torch.stack([(weight * part).sum() for part in parts])
        return self._lowered(_routed(weight * loss_P.sum(), router_loss), sums, tokens)

    def _lowered(self, total: Tensor, sums: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """A microbatch's loss and tokens, noted."""
        if torch.is_grad_enabled():
            self._sums += torch.cat((sums, total.detach()[None])).double().cpu()
        if total.requires_grad:
            total.register_hook(self._arrived.append)  # type: ignore[no-untyped-call]
        return total, torch.tensor(tokens, device=total.device)


def _routed(total: Tensor, router_loss: Tensor | None) -> Tensor:
    return total if router_loss is None else total + router_loss


def _as_it_is(total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """What was summed when held-out prompts were answered."""
    return total, count
