"""Advantages, losses and their gradients are those of verl and of Liger, over random masks, where these are installed.

In an environment of their own: `pip install --no-deps verl==0.9.1 liger-kernel==0.8.5`, and what verl's `core_algos`
imports (ray, tensordict, omegaconf, hydra-core). TRL's are in test_align_core.py.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_align_core import CASES, LONGEST, Drawn, gradients, sides
from torch import Tensor

from tilemesh.align.formulas import advantages, policy, preferences
from tilemesh.align.formulas.algorithms import ALGORITHMS, BASELINES
from tilemesh.align.formulas.losses import policy_loss
from tilemesh.align.formulas.policy import ESTIMATORS

Floats = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def verl() -> Any:
    return pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)


def liger(module: str, function: str) -> Any:
    return getattr(pytest.importorskip(f"liger_kernel.chunked_loss.{module}", exc_type=ImportError), function)


def padded(values: Floats) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# verl -----------------------------------------------------------------------------------------------------------------

AGGREGATES = {
    "token": "token-mean", "sequence": "seq-mean-token-mean", "sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}  # fmt: skip


def verl_config(low: float, high: float, dual: float = 3.0) -> Any:
    actor = pytest.importorskip("verl.workers.config", exc_type=ImportError).ActorConfig
    config = object.__new__(actor)  # its own checks want a whole run
    values = {"clip_ratio": low, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}
    for name, value in {**values, "global_batch_info": {}}.items():
        object.__setattr__(config, name, value)
    return config


@pytest.mark.parametrize("weighting", AGGREGATES)
@pytest.mark.parametrize("name", ["ppo", "dapo", "gspo", "cispo", "reinforce"])
def test_policy_losses_and_gradients_are_those_of_verl(verl: Any, name: str, weighting: str) -> None:
    theirs = {"ppo": "vanilla", "dapo": "vanilla", "gspo": "gspo", "cispo": "cispo", "reinforce": "gpg"}[name]
    row = dataclasses.replace(
        ALGORITHMS[name], weighting=weighting, kl="off", value_coefficient=0.0,
        dual_clip=3.0 if theirs == "vanilla" else 0.0, ratio="sequence-token" if name == "gspo" else "token",
        clip_low=0.2 if name == "cispo" else ALGORITHMS[name].clip_low,
    )  # fmt: skip
    loss_of = verl.get_policy_loss_fn(theirs)
    for seed in range(CASES // 5):
        drawn = Drawn(seed)
        correction = ("none", "truncate")[seed % 2]
        importance = padded(np.minimum(np.exp(drawn.old - drawn.sampled), 2.0)) if seed % 2 else None
        logprob = padded(drawn.logprob).requires_grad_()
        expected, _ = loss_of(
            old_log_prob=padded(drawn.old), log_prob=logprob, advantages=padded(drawn.advantage),
            response_mask=padded(drawn.mask), loss_agg_mode=AGGREGATES[weighting],
            config=verl_config(row.clip_low, row.clip_high), rollout_is_weights=importance,
        )  # fmt: skip
        (slope,) = torch.autograd.grad(expected, logprob)
        tokens = drawn.packed(weighting)
        ours, _ = policy_loss(row, tokens, correction, 2.0)
        assert ours.item() == pytest.approx(expected.item(), abs=1e-6)
        np.testing.assert_allclose(gradients(ours, tokens)[0], slope.numpy()[drawn.mask], atol=1e-6)


def test_values_and_estimates_of_the_kl_are_those_of_verl(verl: Any) -> None:
    for seed in range(CASES):
        drawn = Drawn(seed)
        mask, value = padded(drawn.mask), padded(drawn.value).requires_grad_()
        expected, _ = verl.compute_value_loss(value, padded(drawn.returns), padded(drawn.old_value), mask, 0.2)
        (slope,) = torch.autograd.grad(expected, value)
        tokens = drawn.packed("token")
        assert tokens.value_N is not None
        assert tokens.old_value_N is not None
        assert tokens.return_N is not None
        ours = policy.value_loss(tokens.value_N, tokens.old_value_N, tokens.return_N, 0.2).mean()
        assert ours.item() == pytest.approx(expected.item(), abs=1e-6)
        np.testing.assert_allclose(torch.autograd.grad(ours, tokens.value_N)[0], slope.numpy()[drawn.mask], atol=1e-6)
        for name, estimate in ESTIMATORS.items():
            logprob = padded(drawn.logprob).requires_grad_()
            theirs = verl.kl_penalty(logprob, padded(drawn.reference), name)[mask > 0]
            assert tokens.reference_N is not None
            mine = estimate(tokens.logprob_N, tokens.reference_N)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
            (slope,) = torch.autograd.grad(theirs.sum(), logprob)
            (own,) = torch.autograd.grad(mine.sum(), tokens.logprob_N, retain_graph=True)
            np.testing.assert_allclose(own, slope.numpy()[drawn.mask], atol=1e-6)


def rewards_at_the_end(drawn: Drawn, score: Floats) -> Tensor:
    """Where verl has an answer's score: at its last token."""
    paid = np.zeros(drawn.mask.shape)
    last = LONGEST - 1 - drawn.mask[:, ::-1].argmax(1)
    paid[np.arange(drawn.rows), last] = score
    return padded(paid)


def test_advantages_are_those_of_verl(verl: Any) -> None:
    for seed in range(CASES):
        drawn, generator = Drawn(seed, rows=8), np.random.default_rng(seed)
        mask, score, group = padded(drawn.mask), generator.standard_normal(8), np.repeat(np.arange(2), 4)
        paid = rewards_at_the_end(drawn, score)

        def theirs(name: str, **more: Any) -> Floats:
            got, _ = verl.get_adv_estimator_fn(name)(token_level_rewards=paid.clone(), response_mask=mask, **more)  # noqa: B023
            return np.asarray(got.numpy()[drawn.mask])  # noqa: B023

        sequence = drawn.sequence
        for name, ours in (
            ("grpo", advantages.group_normalized(score, group, 1e-6)),
            ("grpo_vectorized", advantages.group_normalized(score, group, 1e-6)),
            ("rloo", BASELINES["leave-one-out"](score, group)),
            ("rloo_vectorized", BASELINES["leave-one-out"](score, group)),
        ):
            np.testing.assert_allclose(ours[sequence], theirs(name, index=group), atol=1e-6)
        dr = theirs("grpo", index=group, norm_adv_by_std_in_grpo=False)
        np.testing.assert_allclose(BASELINES["group"](score, group)[sequence], dr, atol=1e-6)
        kl = (drawn.logprob - drawn.reference)[drawn.mask]
        token_rewards = advantages.token_rewards(score, sequence, kl, 0.1)
        paid = verl.compute_rewards(paid, padded(drawn.logprob), padded(drawn.reference), 0.1) * mask
        estimate, returns = advantages.gae(token_rewards, drawn.value[drawn.mask], sequence, 0.97, 0.9)
        whitened, expected = verl.compute_gae_advantage_return(paid, padded(drawn.value), mask, 0.97, 0.9)
        np.testing.assert_allclose(returns, expected.numpy()[drawn.mask], atol=1e-6)
        np.testing.assert_allclose(advantages.whiten(estimate), whitened.numpy()[drawn.mask], atol=1e-6)
        to_go = advantages.returns_to_go(token_rewards, sequence, 0.97)
        plus = theirs("reinforce_plus_plus", config=SimpleNamespace(gamma=0.97))
        np.testing.assert_allclose(advantages.whiten(to_go), plus, atol=1e-6)


# Liger ----------------------------------------------------------------------------------------------------------------

LIGER: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04},
    "dr-grpo": {"loss_type": "dr_grpo", "max_completion_length": LONGEST},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
}  # fmt: skip


@pytest.mark.parametrize("name", LIGER)
def test_policy_losses_and_gradients_are_those_of_liger(name: str) -> None:
    loss_of = liger("grpo_loss", "LigerFusedLinearGRPOFunction").ppo_loss_fn
    for seed in range(CASES // len(LIGER)):
        drawn, row, settings = Drawn(seed), ALGORITHMS[name], {"beta": 0.0, **LIGER[name]}
        if seed % 2 and row.surrogate == "clip":
            row, settings = dataclasses.replace(row, dual_clip=3.0), {**settings, "delta": 3.0}
        correction = ("none", "truncate", "mask")[seed % 3]
        importance = np.exp(drawn.old - drawn.sampled)
        kept = np.minimum(importance, 2.0) if correction == "truncate" else importance * (importance <= 2.0)
        logprob, mask = padded(drawn.logprob).requires_grad_(), padded(drawn.mask)
        expected, _ = loss_of(
            logprob, mask, padded(drawn.advantage[:, 0]), mask, ref_per_token_logps=padded(drawn.reference),
            old_per_token_logps=padded(drawn.old), **settings,
            vllm_is_ratio=None if correction == "none" else padded(kept),
        )  # fmt: skip
        (slope,) = torch.autograd.grad(expected, logprob)
        tokens = drawn.packed(row.weighting)
        ours, _ = policy_loss(row, tokens, correction, 2.0)
        assert ours.item() == pytest.approx(expected.item(), abs=1e-6)
        np.testing.assert_allclose(gradients(ours, tokens)[0], slope.numpy()[drawn.mask], atol=1e-6)


def test_preference_losses_and_gradients_are_those_of_liger() -> None:
    orpo = liger("orpo_loss", "LigerFusedLinearORPOFunction").preference_loss_fn
    dpo = liger("dpo_loss", "LigerFusedLinearDPOFunction").preference_loss_fn
    simpo = liger("simpo_loss", "LigerFusedLinearSimPOFunction").preference_loss_fn
    kto = liger("kto_loss", "LigerFusedLinearKTOFunction").preference_loss_fn
    for seed in range(CASES):
        chosen, rejected = sides(seed)
        both, pairs = torch.zeros(2 * len(chosen.logprob_P)), len(chosen.logprob_P)
        leaves = (chosen.logprob_P, rejected.logprob_P)
        means = [side.logprob_P / side.tokens_P for side in (chosen, rejected)]
        labels = torch.arange(2 * pairs) < pairs
        logprobs, references = (torch.cat(each) for each in (leaves, (chosen.reference_P, rejected.reference_P)))
        expected = {
            "dpo": dpo(*leaves, both, chosen.reference_P, rejected.reference_P, beta=0.3)[0],
            "orpo": orpo(*means, both, beta=0.3)[0] - means[0].mean(),
            "simpo": simpo(*means, both, beta=0.3, gamma=0.2)[0],
            "kto": kto(logprobs, labels, both, references, beta=0.3, kl=torch.tensor(0.2))[0],
        }
        for name, theirs in expected.items():
            margin = {"simpo": 0.2, "kto": 0.2}.get(name, 0.0)
            ours = preferences.PAIR_LOSSES[name](chosen, rejected, 0.3, margin).mean()
            assert ours.item() == pytest.approx(theirs.item(), abs=1e-6), name
            slopes = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (ours, theirs)]
            torch.testing.assert_close(*slopes, rtol=0, atol=1e-6, msg=name)
