"""What chapter 12 runs: a bandit of eight arms, a chain of choices, and a batch that is used again and again.

The formulas of advantages, surrogates and KL are those that `tilemesh align` trains with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tilemesh.align.formulas.advantages import gae
from tilemesh.align.formulas.policy import ESTIMATORS, SURROGATES

Array = np.ndarray[Any, Any]

REWARDS = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0])
"""What each of eight arms pays on average."""


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max())
    result: Array = powers / powers.sum()
    return result


def exact_gradient(logits: Array, rewards: Array) -> Array:
    """Of the expected reward, by enumeration: every arm, as often as the policy takes it."""
    policy = softmax(logits)
    gradient: Array = policy * (rewards - policy @ rewards)
    return gradient


def sampled_gradient(logits: Array, rewards: Array, draw: np.random.Generator, samples: int, baseline: float) -> Array:
    """From arms that were drawn: (reward - baseline) · ∇ log π, on average the exact one whatever the baseline."""
    policy = softmax(logits)
    arms = draw.choice(len(policy), samples, p=policy)
    paid = rewards[arms] + 0.1 * draw.standard_normal(samples) - baseline
    scores = np.eye(len(policy))[arms] - policy
    gradient: Array = (paid[:, None] * scores).mean(0)
    return gradient


def gradient_noise(shift: float, baseline: float, draws: int = 400) -> float:
    """How far a gradient from 16 samples is from the exact one, typically; all rewards are `shift` higher."""
    draw, logits, rewards = np.random.default_rng(1), np.zeros(8), REWARDS + shift
    right = exact_gradient(logits, rewards)
    errors = [sampled_gradient(logits, rewards, draw, 16, baseline) - right for _ in range(draws)]
    return float(np.sqrt(np.mean(np.square(errors).sum(1))))


def learn(shift: float, with_baseline: bool, steps: int = 120, rate: float = 1.0, seed: int = 0) -> list[float]:
    """Expected reward (without the shift) after each step of 16 samples; the baseline is the mean of past batches."""
    draw, logits, rewards, baseline, curve = np.random.default_rng(seed), np.zeros(8), REWARDS + shift, 0.0, []
    for step in range(steps):
        policy = softmax(logits)
        mean = float(policy @ rewards)
        if with_baseline:
            baseline = mean if step == 0 else 0.9 * baseline + 0.1 * mean
        logits = logits + rate * sampled_gradient(logits, rewards, draw, 16, baseline)
        curve.append(float(softmax(logits) @ REWARDS))
    return curve


# A chain of choices ---------------------------------------------------------------------------------------------------


def chain_advantages(decay: float, knows: bool, length: int = 12, chains: int = 50_000) -> tuple[float, float]:
    """Chains of right (1) and wrong (0) choices, paid at the end for the share that is right, with noise. Of the first
    choice: by how much its advantage is higher where it was right, and how much advantages scatter.

    `knows`: values are what is really to be expected; otherwise 0, as of a critic that has learned nothing.
    """
    draw = np.random.default_rng(2)
    right = draw.integers(0, 2, (chains, length))
    score = right.mean(1) + 0.2 * draw.standard_normal(chains)
    rewards = np.zeros((chains, length))
    rewards[:, -1] = score
    before = np.cumsum(right, 1) - right  # right choices so far; half of the others will be
    values = (before + 0.5 * (length - np.arange(length))) / length if knows else np.zeros((chains, length))
    sequence = np.repeat(np.arange(chains), length)
    advantage, _ = gae(rewards.ravel(), values.ravel(), sequence, 1.0, decay)
    first = advantage.reshape(chains, length)[:, 0]
    signal = float(first[right[:, 0] == 1].mean() - first[right[:, 0] == 0].mean())
    return signal, float(first.std())


# A batch that is used again -------------------------------------------------------------------------------------------


def reuse(
    surrogate: str, seed: int, rounds: int = 40, epochs: int = 20, clip: float = 0.2
) -> tuple[float, list[float]]:
    """Rounds of: draw 24 noisy samples, then make so many updates from them. The KL between the policies before and
    after the first round, and the expected reward after each."""
    draw = np.random.default_rng(seed)
    rewards = torch.from_numpy(REWARDS)
    logits, first, ends = torch.zeros(8, dtype=torch.float64), 0.0, list[float]()
    for round_ in range(rounds):
        old = torch.log_softmax(logits, 0)
        probabilities = old.exp().numpy()
        arms = torch.from_numpy(draw.choice(8, 24, p=probabilities / probabilities.sum()))
        paid = rewards[arms] + torch.from_numpy(draw.standard_normal(24))
        for _ in range(epochs):
            logits.requires_grad_()
            logprob = torch.log_softmax(logits, 0)[arms]
            terms = SURROGATES[surrogate](logprob - old[arms], logprob, paid - paid.mean(), clip, clip, 0.0)
            (gradient,) = torch.autograd.grad(terms.mean(), logits)
            logits = (logits - gradient).detach()
        if round_ == 0:
            policy = torch.softmax(logits, 0)
            first = float((policy * (policy.log() - old)).sum())
        ends.append(float(torch.softmax(logits, 0) @ rewards))
    return first, ends


# KL -------------------------------------------------------------------------------------------------------------------


def expected_estimates(policy: Array, reference: Array) -> dict[str, float]:
    """What each estimator of KL(policy, reference) gives on average: every arm enumerated."""
    logs = torch.log(torch.from_numpy(policy)), torch.log(torch.from_numpy(reference))
    return {name: float((torch.from_numpy(policy) * estimate(*logs)).sum()) for name, estimate in ESTIMATORS.items()}


def divergence(policy: Array, reference: Array) -> float:
    return float((policy * np.log(policy / reference)).sum())


TRUE = np.array([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.0])
"""What eight answers are worth; what a flawed reward model says is the same, but for the last, which it loves."""
PROXY = np.array([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0])
REFERENCE = softmax(np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, -4.0]))
"""Before training: the flaw is rarely met."""


def tuned(beta: float) -> Array:
    """The policy that maximises proxy - beta · KL: the reference times exp(proxy / beta), scaled."""
    return softmax(np.log(REFERENCE) + PROXY / beta)


def best_beta() -> float:
    """Where the true reward is highest."""
    betas = [10 ** (-2.0 + place / 50) for place in range(151)]
    return max(betas, key=lambda beta: float(tuned(beta) @ TRUE))
