"""Advantages, weights, losses: against oracles written from the papers, against trl where it is there, however cut."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tilemesh.align.formulas import advantages, policy, preferences
from tilemesh.align.formulas.algorithms import ALGORITHMS, BASELINES, PER_TOKEN, PREFERENCES, Algorithm
from tilemesh.align.formulas.losses import FIGURES, PolicyTokens, policy_loss
from tilemesh.align.formulas.policy import CORRECTIONS, ESTIMATORS, RATIOS, SURROGATES
from tilemesh.align.formulas.rollout import Rollout, Segment, join, pack
from tilemesh.align.formulas.weights import WEIGHTINGS
from tilemesh.core.errors import UsageError

LONGEST = 9
CASES = 200


class Drawn:
    """Random answers of random lengths, with holes in their masks: padded as libraries have them, and packed."""

    def __init__(self, seed: int, rows: int = 6) -> None:
        generator = np.random.default_rng(seed)
        self.mask = generator.random((rows, LONGEST)) < 0.7
        self.mask &= np.arange(LONGEST) < generator.integers(1, LONGEST + 1, rows)[:, None]
        self.mask[np.arange(rows), 0] = True
        self.logprob = -generator.exponential(1.5, (rows, LONGEST))
        self.old = self.logprob + 0.4 * generator.standard_normal((rows, LONGEST))
        self.reference = self.logprob + 0.6 * generator.standard_normal((rows, LONGEST))
        self.sampled = self.old + 0.3 * generator.standard_normal((rows, LONGEST))
        self.advantage = np.repeat(generator.standard_normal(rows)[:, None], LONGEST, 1)
        self.entropy = generator.random((rows, LONGEST))
        self.value, self.old_value, self.returns = generator.standard_normal((3, rows, LONGEST))
        self.rows = rows
        self.sequence = np.nonzero(self.mask)[0]

    def packed(self, weighting: str) -> PolicyTokens:
        """With gradients, of all rows."""

        def of(values: np.ndarray[Any, Any], grad: bool = False) -> Tensor:
            return torch.tensor(values[self.mask], dtype=torch.float64, requires_grad=grad)

        weight = WEIGHTINGS[weighting](self.sequence, self.rows, LONGEST)
        count = int(self.mask.sum())
        return PolicyTokens(
            of(self.logprob, True), of(self.entropy, True), of(self.value, True), of(self.old), of(self.sampled),
            of(self.advantage), torch.tensor(weight), torch.full((count,), 1 / count, dtype=torch.float64),
            torch.tensor(self.sequence), of(self.reference), of(self.old_value), of(self.returns),
        )  # fmt: skip


def gradients(loss: Tensor, tokens: PolicyTokens) -> list[np.ndarray[Any, Any]]:
    leaves = [leaf for leaf in (tokens.logprob_N, tokens.entropy_N, tokens.value_N) if leaf is not None]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [np.zeros(len(leaf)) if part is None else part.numpy() for leaf, part in zip(leaves, found, strict=True)]


def paper_loss(row: Algorithm, drawn: Drawn, correction: str, most: float) -> tuple[float, np.ndarray[Any, Any]]:
    """An algorithm token by token in plain Python, with its derivative by each log-probability."""
    rows, total = drawn.rows, 0.0
    slope = np.zeros_like(drawn.logprob)
    counts = drawn.mask.sum(1)
    for i in range(rows):
        here = np.flatnonzero(drawn.mask[i])
        difference = {int(t): drawn.logprob[i, t] - drawn.old[i, t] for t in here}
        for t in here:
            advantage = drawn.advantage[i, t]
            weight = {
                "token": 1 / drawn.mask.sum(), "sequence": 1 / (rows * counts[i]), "constant": 1 / (rows * LONGEST),
                "sum": 1 / rows,
            }[row.weighting]  # fmt: skip
            if correction != "none":
                importance = math.exp(drawn.old[i, t] - drawn.sampled[i, t])
                weight_of_term = weight * (
                    min(importance, most) if correction == "truncate" else importance * (importance <= most)
                )
            else:
                weight_of_term = weight
            if row.surrogate == "plain":
                total -= weight_of_term * advantage * drawn.logprob[i, t]
                slope[i, t] -= weight_of_term * advantage
            else:
                log_ratio = difference[int(t)] if row.ratio == "token" else sum(difference.values()) / len(here)
                ratio = math.exp(log_ratio)
                if row.surrogate == "weight":
                    bound = min(max(ratio, 1 - row.clip_low if row.clip_low else 0.0), 1 + row.clip_high)
                    total -= weight_of_term * bound * advantage * drawn.logprob[i, t]
                    slope[i, t] -= weight_of_term * bound * advantage
                else:
                    bounded = min(max(ratio, 1 - row.clip_low), 1 + row.clip_high)
                    pays = min(ratio * advantage, bounded * advantage)
                    is_free = ratio * advantage <= bounded * advantage
                    if row.dual_clip and advantage < 0 and pays < row.dual_clip * advantage:
                        pays, is_free = row.dual_clip * advantage, False
                    total -= weight_of_term * pays
                    if is_free and row.ratio == "token":
                        slope[i, t] -= weight_of_term * ratio * advantage
                    elif is_free:
                        slope[i, here] -= weight_of_term * ratio * advantage / len(here)
            if row.kl == "loss":
                gap = drawn.reference[i, t] - drawn.logprob[i, t]
                total += row.kl_coefficient * weight * (math.exp(gap) - gap - 1)
                slope[i, t] += row.kl_coefficient * weight * (1 - math.exp(gap))
    return total, slope


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_its_paper_token_by_token(name: str) -> None:
    base = ALGORITHMS[name]
    for seed in range(CASES // len(ALGORITHMS)):
        dual = 3.0 if seed % 2 and base.surrogate == "clip" else 0.0
        row = dataclasses.replace(base, dual_clip=dual, entropy_coefficient=0.1 * (seed % 3))
        correction = ("none", "truncate", "mask")[seed % 3]
        drawn = Drawn(seed)
        tokens = drawn.packed(row.weighting)
        loss, figures = policy_loss(row, tokens, correction, 1.5)
        expected, slope = paper_loss(row, drawn, correction, 1.5)
        entropy = drawn.entropy[drawn.mask].mean()
        near = np.clip(drawn.value, drawn.old_value - row.value_clip, drawn.old_value + row.value_clip)
        errors = np.maximum((drawn.value - drawn.returns) ** 2, (near - drawn.returns) ** 2)[drawn.mask] / 2
        expected += -row.entropy_coefficient * entropy + row.value_coefficient * errors.mean()
        assert loss.item() == pytest.approx(expected, abs=1e-10)
        by_logprob, by_entropy, by_value = gradients(loss, tokens)
        np.testing.assert_allclose(by_logprob, slope[drawn.mask], atol=1e-12)
        np.testing.assert_allclose(by_entropy, -row.entropy_coefficient / drawn.mask.sum(), atol=1e-12)
        is_plain = (drawn.value - drawn.returns) ** 2 >= (near - drawn.returns) ** 2
        of_value = np.where(is_plain | (np.abs(drawn.value - drawn.old_value) < row.value_clip), drawn.value, 0)
        of_value = np.where(of_value != 0, drawn.value - drawn.returns, 0)[drawn.mask] * row.value_coefficient
        np.testing.assert_allclose(by_value, of_value / drawn.mask.sum(), atol=1e-12)
        named = dict(zip(FIGURES, figures.tolist(), strict=True))
        ratio = np.exp(drawn.logprob - drawn.old)
        if row.ratio == "token":
            high = ((ratio > 1 + row.clip_high) & (drawn.advantage > 0))[drawn.mask].mean()
            assert named["clipped_high"] == pytest.approx(high)
        assert named["mismatch"] == pytest.approx(np.abs(drawn.old - drawn.sampled)[drawn.mask].mean())


def _places(which: Tensor) -> Tensor:
    return torch.nonzero(which)[:, 0]


def part_of(tokens: PolicyTokens, keep: Tensor) -> PolicyTokens:
    """Some tokens of a batch, as a rank or a microbatch has them; sequences are numbered anew."""
    values = {field.name: getattr(tokens, field.name) for field in dataclasses.fields(tokens)}
    cut = {name: None if value is None else value[keep] for name, value in values.items()}
    cut["sequence_N"] = torch.unique(cut["sequence_N"], return_inverse=True)[1]
    return PolicyTokens(**cut)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_cut_of_the_batch_gives_the_same_gradient(name: str) -> None:
    """Microbatches, packing and replicas are the same thing here: parts with whole sequences, in any order."""
    row = ALGORITHMS[name]
    for seed in range(20):
        drawn = Drawn(seed, rows=8)
        tokens = drawn.packed(row.weighting)
        loss, figures = policy_loss(row, tokens, "truncate")
        expected = gradients(loss, tokens)
        generator = np.random.default_rng(seed)
        owner = torch.tensor(generator.integers(0, 1 + seed % 5, drawn.rows))[tokens.sequence_N]
        parts = [_places(owner == part) for part in generator.permutation(1 + seed % 5)]
        pieces = [policy_loss(row, part_of(tokens, part), "truncate") for part in parts if len(part)]
        total = torch.stack([piece for piece, _ in pieces]).sum()
        assert total.item() == pytest.approx(loss.item(), abs=1e-12)
        for ours, theirs in zip(gradients(total, tokens), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-12)
        torch.testing.assert_close(torch.stack([part for _, part in pieces]).sum(0), figures, rtol=0, atol=1e-12)


def test_a_mean_per_microbatch_would_be_another_loss() -> None:
    """That the test above can fail: weights made of each part by itself are seen."""
    drawn = Drawn(3, rows=8)
    tokens = drawn.packed("token")
    row = ALGORITHMS["dapo"]
    whole = policy_loss(row, tokens)[0].item()
    halves = [_places(tokens.sequence_N < 3), _places(tokens.sequence_N >= 3)]
    means = 0.0
    for half in halves:
        piece = part_of(tokens, half)
        piece = dataclasses.replace(piece, weight_N=torch.full_like(piece.weight_N, 1 / len(half) / 2))
        means += policy_loss(row, piece)[0].item()
    assert abs(means - whole) > 1e-4


def test_the_two_forms_of_a_sequence_ratio_have_one_gradient_where_a_sequence_has_one_advantage() -> None:
    drawn = Drawn(11)
    found = []
    for ratio in ("sequence", "sequence-token"):
        tokens = drawn.packed("sequence")
        row = dataclasses.replace(ALGORITHMS["gspo"], ratio=ratio, clip_low=0.2, clip_high=0.2)
        loss, _ = policy_loss(row, tokens)
        found.append((loss.item(), gradients(loss, tokens)[0]))
    assert found[0][0] == pytest.approx(found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-12)
    drawn.advantage += np.arange(LONGEST) / 3
    other = []
    for ratio in ("sequence", "sequence-token"):
        tokens = drawn.packed("sequence")
        row = dataclasses.replace(ALGORITHMS["gspo"], ratio=ratio, clip_low=0.2, clip_high=0.2)
        other.append(gradients(policy_loss(row, tokens)[0], tokens)[0])
    assert np.abs(other[0] - other[1]).max() > 1e-3


# Advantages -----------------------------------------------------------------------------------------------------------


def test_advantages_follow_their_definitions() -> None:
    for seed in range(50):
        generator = np.random.default_rng(seed)
        group = generator.integers(0, 4, 12)
        reward = generator.standard_normal(12)
        for i in range(12):
            mine = reward[group == group[i]]
            others = [reward[j] for j in range(12) if group[j] == group[i] and j != i]
            mean = sum(mine) / len(mine)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in mine) / (len(mine) - 1)) if others else 0.0
            assert advantages.group_mean(reward, group)[i] == pytest.approx(reward[i] - mean, abs=1e-12)
            expected = (reward[i] - mean) / (deviation + 1e-4)
            assert advantages.group_normalized(reward, group)[i] == pytest.approx(expected, abs=1e-9)
            alone = reward[i] - sum(others) / len(others) if others else 0.0
            assert advantages.leave_one_out(reward, group)[i] == pytest.approx(alone, abs=1e-12)
        np.testing.assert_allclose(advantages.batch_mean(reward, group), reward - sum(reward) / 12, atol=1e-12)
        white = BASELINES["batch-std"](reward, group)
        assert abs(white.mean()) < 1e-12
        assert white.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_answers_that_are_all_paid_the_same_have_no_spread() -> None:
    """Also where a mean of equal numbers is another number: they are no signal, whatever epsilon is."""
    group = np.repeat([0, 1], 8)
    for pay in (0.1, 0.4, 0.7, 5 / 6):
        reward = np.concatenate([np.full(8, pay), np.arange(8.0)])
        deviation = advantages.group_means(reward, group)[1]
        assert not deviation[:8].any()
        assert deviation[8:].all()
        for advantage in (advantages.group_normalized(reward, group, 0.0), advantages.leave_one_out(reward, group)):
            assert not advantage[:8].any()
            assert np.isfinite(advantage).all()


def test_gae_is_the_sum_of_its_definition_past_tokens_that_are_not_trained() -> None:
    for seed in range(50):
        drawn = Drawn(seed)
        score = np.random.default_rng(seed).standard_normal(drawn.rows)
        kl = (drawn.logprob - drawn.reference)[drawn.mask]
        reward = advantages.token_rewards(score, drawn.sequence, kl, 0.3)
        advantage, returns = advantages.gae(reward, drawn.value[drawn.mask], drawn.sequence, 0.97, 0.9)
        place = 0
        for i in range(drawn.rows):
            here = np.flatnonzero(drawn.mask[i])
            values = [drawn.value[i, t] for t in here] + [0.0]
            pays = [-0.3 * (drawn.logprob[i, t] - drawn.reference[i, t]) for t in here]
            pays[-1] += score[i]
            steps = [pays[n] + 0.97 * values[n + 1] - values[n] for n in range(len(here))]
            for n in range(len(here)):
                expected = sum((0.97 * 0.9) ** (m - n) * steps[m] for m in range(n, len(here)))
                assert advantage[place] == pytest.approx(expected, abs=1e-10)
                assert returns[place] == pytest.approx(expected + values[n], abs=1e-10)
                place += 1


# A bandit whose every action is enumerated ----------------------------------------------------------------------------


def test_which_estimators_of_the_kl_are_unbiased() -> None:
    """Values: k1 and k3 on average are the KL, k2 is not. Gradients in a loss: k2's is the KL's, k1's is 0, and k3's is
    that of the KL the other way round. In a reward (a score function's weight) k1's is the KL's."""
    logits = torch.tensor([0.3, -0.7, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([-0.2, 0.5, 0.4, 0.9], dtype=torch.float64), 0)
    logprob = torch.log_softmax(logits, 0)
    kl = (logprob.exp() * (logprob - reference)).sum()
    (slope,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (other,) = torch.autograd.grad((reference.exp() * (reference - logprob)).sum(), logits, retain_graph=True)
    chance = logprob.exp().detach()
    values = {name: (chance * estimate(logprob, reference)).sum().item() for name, estimate in ESTIMATORS.items()}
    assert values["k1"] == pytest.approx(kl.item(), abs=1e-12)
    assert values["k3"] == pytest.approx(kl.item(), abs=1e-12)
    assert abs(values["k2"] - kl.item()) > 1e-3
    slopes = {}
    for name, estimate in ESTIMATORS.items():
        (slopes[name],) = torch.autograd.grad((chance * estimate(logprob, reference)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(slopes["k1"], torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(slopes["k2"], slope, rtol=0, atol=1e-12)
    torch.testing.assert_close(slopes["k3"], other, rtol=0, atol=1e-12)
    weight = ESTIMATORS["k1"](logprob, reference).detach()
    (in_reward,) = torch.autograd.grad((chance * weight * logprob).sum(), logits)
    torch.testing.assert_close(in_reward, slope, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "is_biased"), [("grpo", True), ("dr-grpo", False), ("dapo", False), ("rloo", False)])
def test_the_length_trap_all_its_answers_enumerated(name: str, is_biased: bool) -> None:
    """A right answer is one token; a wrong one goes on with probability s after each. Length is not paid: nothing may
    push s. A mean over each answer's own length punishes long wrong answers less per token, and pushes it up."""
    share, longest = 0.3, 8
    go_on = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    more, less = torch.nn.functional.logsigmoid(go_on), torch.nn.functional.logsigmoid(-go_on)
    first = torch.log(torch.tensor([share, 1 - share], dtype=torch.float64))
    answers = [[first[0]]]
    answers += [[first[1], *[more] * further, less] for further in range(longest - 2)]
    answers.append([first[1], *[more] * (longest - 2)])  # cut off
    deviation = math.sqrt(share * (1 - share))
    paid = [(1 - share) / deviation] + [-share / deviation] * (len(answers) - 1)
    if name in ("dr-grpo", "rloo"):
        paid = [value * deviation for value in paid]
    chances = torch.stack([torch.stack(answer).sum() for answer in answers]).exp().detach()
    assert chances.sum().item() == pytest.approx(1)
    sequence = np.repeat(np.arange(len(answers)), [len(answer) for answer in answers])
    # Of a batch with as many answers as one likes: each as often as it is likely. `token` divides by a constant then.
    weight = torch.tensor(WEIGHTINGS[ALGORITHMS[name].weighting](sequence, len(answers), longest))
    logprob = torch.stack([token for answer in answers for token in answer])
    tokens = PolicyTokens(
        logprob, None, None, logprob.detach(), logprob.detach(), torch.tensor(paid, dtype=torch.float64)[sequence],
        weight * chances[sequence], weight, torch.tensor(sequence),
    )  # fmt: skip
    (slope,) = torch.autograd.grad(policy_loss(ALGORITHMS[name], tokens)[0], go_on)
    assert slope.item() < -1e-4 if is_biased else abs(slope.item()) < 1e-12


# Preferences ----------------------------------------------------------------------------------------------------------


def sides(seed: int) -> tuple[preferences.Side, preferences.Side]:
    generator = np.random.default_rng(seed)

    def side() -> preferences.Side:
        tokens = torch.tensor(generator.integers(2, 9, 5), dtype=torch.float64)
        logprob = torch.tensor(-generator.exponential(1, 5) * tokens.numpy() - 0.01, requires_grad=True)
        return preferences.Side(logprob, logprob.detach() + torch.tensor(generator.standard_normal(5)), tokens)

    return side(), side()


def test_preference_losses_are_their_papers() -> None:
    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    for seed in range(40):
        chosen, rejected = sides(seed)
        found = {name: loss(chosen, rejected, 0.3, 0.2) for name, loss in preferences.PAIR_LOSSES.items()}
        for i in range(5):
            lp, lr, n = (float(x[i]) for x in chosen)
            mp, mr, m = (float(x[i]) for x in rejected)
            odds = [math.exp(p) / (1 - math.exp(p)) for p in (lp / n, mp / m)]
            expected = {
                "dpo": -math.log(sigmoid(0.3 * ((lp - lr) - (mp - mr)) - 0.2)),
                "ipo": ((lp - lr) / n - (mp - mr) / m - 1 / 0.6) ** 2,
                "kto": (2 - sigmoid(0.3 * (lp - lr - 0.2)) - sigmoid(0.3 * (0.2 - (mp - mr)))) / 2,
                "orpo": -lp / n - 0.3 * math.log(sigmoid(math.log(odds[0] / odds[1]))),
                "simpo": -math.log(sigmoid(0.3 * (lp / n - mp / m) - 0.2)),
            }
            for name, value in expected.items():
                assert float(found[name][i]) == pytest.approx(value, abs=1e-9), name
        for name, loss in preferences.PAIR_LOSSES.items():  # by finite differences
            (slope,) = torch.autograd.grad(loss(chosen, rejected, 0.3, 0.2).sum(), rejected.logprob_P)
            moved = [rejected._replace(logprob_P=rejected.logprob_P.detach() + sign * 1e-6) for sign in (1, -1)]
            up, down = (loss(chosen, side, 0.3, 0.2).detach() for side in moved)
            torch.testing.assert_close(slope, (up - down) / 2e-6, rtol=1e-5, atol=1e-7, msg=name)
    scores = torch.tensor([1.0, -0.5]), torch.tensor([0.2, 0.4])
    expected = [
        -math.log(1 / (1 + math.exp(-(a - b - 0.1)))) + 0.01 * (a + b) ** 2
        for a, b in zip(*map(Tensor.tolist, scores), strict=True)
    ]
    assert preferences.bradley_terry(*scores, margin=0.1, centre=0.01).tolist() == pytest.approx(expected, abs=1e-6)


# Extremes -------------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64)
FAR = (-2000.0, -709.0, -88.0, -44.0, -0.1, 0.0, 0.1, 1.0, 44.0, 88.0, 89.0, 709.0, 710.0, 2000.0)
"""Log ratios, or what two log-probabilities differ by; e to 88.7 is the largest number of fp32."""


def value_and_slope(loss: Any, at: Sequence[float], dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """Of a loss per element, by its first argument."""
    x = torch.tensor(at, dtype=dtype, requires_grad=True)
    value = loss(x)
    (slope,) = torch.autograd.grad(value.sum(), x, allow_unused=True)
    return value.tolist(), slope.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("dual", [0.0, 3.0])
def test_surrogates_far_from_1(dtype: torch.dtype, advantage: float, dual: float) -> None:
    """Against their definitions in float64, with ratios up to the root of the largest number."""
    most, paid = math.log(torch.finfo(dtype).max) / 2, torch.tensor(advantage, dtype=dtype)
    for name, surrogate in SURROGATES.items():
        values, slopes = value_and_slope(lambda x, f=surrogate: f(x, x, paid, 0.2, 0.3, dual), FAR, dtype)
        for log_ratio, value, slope in zip(FAR, values, slopes, strict=True):
            ratio = math.exp(min(log_ratio, most))
            kept = min(max(ratio, 0.8), 1.3)
            counted = min(ratio, dual) if dual else ratio
            is_held = ratio > 1.3 if advantage > 0 else ratio < 0.8 or counted < ratio
            expected = {
                "plain": (advantage * log_ratio, advantage),
                "clip": (min(counted * advantage, kept * advantage), 0.0 if is_held else ratio * advantage),
                "weight": (kept * advantage * log_ratio, kept * advantage),
            }[name]
            assert (value, slope) == pytest.approx([-each for each in expected], rel=1e-4, abs=1e-6), (name, log_ratio)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_estimators_and_corrections_far_from_0(dtype: torch.dtype) -> None:
    most, none = math.log(torch.finfo(dtype).max) / 2, torch.zeros(len(FAR), dtype=dtype)
    for name, estimator in ESTIMATORS.items():
        values, slopes = value_and_slope(lambda x, f=estimator: f(x, none), FAR, dtype)
        for apart, value, slope in zip(FAR, values, slopes, strict=True):
            ratio = math.exp(min(-apart, most))
            expected = {"k1": (apart, 1.0), "k2": (apart**2 / 2, apart), "k3": (ratio + apart - 1, 1 - ratio)}[name]
            assert (value, slope) == pytest.approx(expected, rel=1e-4, abs=1e-5), (name, apart)
    far = torch.tensor(FAR, dtype=dtype)
    for name, correction in CORRECTIONS.items():
        expected = [min(math.exp(min(x, 9)), 2.0) if x <= math.log(2) or name == "truncate" else 0.0 for x in FAR]
        assert correction(far, 2.0).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", [*ALGORITHMS])
@pytest.mark.parametrize("ratio", [*RATIOS])
def test_policy_losses_stay_finite_whatever_the_weights(name: str, ratio: str) -> None:
    """Tokens and whole answers that are e to 2000 times likelier than they were, or less likely."""
    for advantage in (-1.0, 0.0, 1.0):
        for estimator in ESTIMATORS:
            row = dataclasses.replace(
                ALGORITHMS[name], ratio=ratio, kl="loss", kl_coefficient=0.1, estimator=estimator,
                value_coefficient=0.1, entropy_coefficient=0.1,
            )  # fmt: skip
            tokens = Drawn(3).packed(row.weighting)
            count = len(tokens.old_N)
            far = torch.tensor([FAR[place % len(FAR)] for place in range(count)])
            single = {key: None if each is None else each.float() for key, each in vars(tokens).items()}
            single |= {"sequence_N": tokens.sequence_N, "advantage_N": torch.full((count,), advantage)}
            gradients = {key: single[key].detach().requires_grad_() for key in ("logprob_N", "entropy_N", "value_N")}
            single |= gradients | {"old_N": gradients["logprob_N"].detach() - far, "reference_N": far - 2001}
            total, figures = policy_loss(row, PolicyTokens(**single), "truncate")
            total.backward()
            assert total.isfinite()
            assert figures.isfinite().all()
            assert all(each.grad.isfinite().all() for each in gradients.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_preference_losses_of_the_surest_and_the_least_likely_answers(dtype: torch.dtype) -> None:
    """Against their definitions with 400 digits. A probability that rounds to 1 is the largest below it."""
    mp = pytest.importorskip("mpmath").mp
    below_1, beta = -torch.finfo(dtype).eps / 2, 0.3

    def log_sigmoid(x: Any) -> Any:
        return -mp.log(1 + mp.exp(-x))

    def log_odds(x: Any) -> Any:
        return x - mp.log(1 - mp.exp(x))

    definitions = {
        "dpo": lambda a, b: -log_sigmoid(beta * (a - b) - 0.2),
        "ipo": lambda a, b: (a - b - 1 / (2 * beta)) ** 2,
        "kto": lambda a, b: (1 - mp.exp(log_sigmoid(beta * (a - 0.2))) + 1 - mp.exp(log_sigmoid(beta * (0.2 - b)))) / 2,
        "orpo": lambda a, b: -a - beta * log_sigmoid(log_odds(a) - log_odds(b)),
        "simpo": lambda a, b: -log_sigmoid(beta * (a - b) - 0.2),
    }
    assert definitions.keys() == preferences.PAIR_LOSSES.keys()
    sure = [0.0, below_1, -1e-3, -1.0, -90.0, -300.0]
    pairs = [(a, b) for a in sure for b in sure]
    none, one = torch.zeros(len(pairs), dtype=dtype), torch.ones(len(pairs), dtype=dtype)
    with mp.workdps(400):
        for name, loss in preferences.PAIR_LOSSES.items():
            both = torch.tensor(pairs, dtype=dtype, requires_grad=True)
            value = loss(*(preferences.Side(both[:, side], none, one) for side in (0, 1)), beta, 0.2)
            (slope,) = torch.autograd.grad(value.sum(), both)
            for place, pair in enumerate(pairs):
                at = tuple(mp.mpf(min(each, below_1)) for each in pair)
                slopes = (mp.diff(definitions[name], at, order) for order in ((1, 0), (0, 1)))
                expected = [float(each) for each in (definitions[name](*at), *slopes)]
                found = [float(value[place]), *slope[place].tolist()]
                assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), (name, pair)


# Rollouts -------------------------------------------------------------------------------------------------------------


def test_a_rollout_is_made_of_tokens_and_knows_what_was_drawn() -> None:
    """An end token that was drawn is trained, the same id in the prompt or in a user's turn is not."""
    end = 7
    turns = [
        [Segment([1, end, 2]), Segment([5, end], [-0.1, -0.2], [3, 3]), Segment([end, 4]), Segment([6], [-0.5], [4])],
        [Segment([1]), Segment([end], [-2.0], [4])],
    ]
    rollout = pack(turns, group=[0, 1], finish=["stop", "length"], temperature=0.7, reward=[1.0, 0.0])
    assert rollout.tokens.tolist() == [1, end, 2, 5, end, end, 4, 6, 1, end]
    assert rollout.trainable.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] + [False, True]
    assert rollout.trained.tolist() == [3, 1]
    assert rollout.first_version.tolist() == [3, 4]
    assert rollout.sequence.tolist() == [0] * 8 + [1] * 2
    again = join([pack(turns[:1], [0], ["stop"], 0.7, [1.0]), pack(turns[1:], [1], ["length"], 0.7, [0.0])])
    for field in dataclasses.fields(Rollout):
        assert np.array_equal(getattr(again, field.name), getattr(rollout, field.name)), field.name
    with pytest.raises(UsageError, match="one of each per token"):
        pack([[Segment([1, 2], [-0.1], [0, 0])]], [0], ["stop"])
    with pytest.raises(UsageError, match="not above 0"):
        pack([[Segment([1], [0.1], [0])]], [0], ["stop"])


def test_every_row_names_functions_and_a_paper() -> None:
    assert {"reinforce", "rloo", "ppo", "grpo", "dr-grpo", "dapo"} <= ALGORITHMS.keys()
    assert {"dpo", "reward"} <= PREFERENCES.keys()
    for row in ALGORITHMS.values():
        assert row.paper
        assert row.baseline in (*BASELINES, *PER_TOKEN)
        assert row.weighting in WEIGHTINGS
        assert row.ratio in RATIOS
        assert row.surrogate in SURROGATES
        assert row.estimator in ESTIMATORS
    assert set(CORRECTIONS) == {"truncate", "mask"}
    assert set(PREFERENCES) == {*preferences.PAIR_LOSSES, "reward"}


# trl ------------------------------------------------------------------------------------------------------------------


def trl_grpo(**settings: Any) -> Any:
    """trl's own loss over tensors that we hand it."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError).GRPOTrainer
    same = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=True)
    options = {"use_bias_correction_kl": False, "delta": None, "steps_per_generation": 1}
    me = SimpleNamespace(
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", beta=0.0, loss_type="grpo", epsilon_low=0.2, epsilon_high=0.2,
        use_vllm=False, vllm_importance_sampling_correction=False, model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1, max_completion_length=LONGEST, accelerator=same,
        _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    me.args = SimpleNamespace(**options)
    for name, value in settings.items():
        setattr(me.args if name in options else me, name, value)
    return trainer, me


TRL = {
    "grpo": {"loss_type": "grpo", "beta": 0.04},
    "dr-grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
}  # fmt: skip


@pytest.mark.parametrize("name", TRL)
def test_values_and_gradients_are_those_of_trl(name: str) -> None:
    for seed in range(CASES // len(TRL)):
        drawn, row = Drawn(seed), ALGORITHMS[name]
        settings = dict(TRL[name])
        if seed % 2 and row.surrogate == "clip":
            row, settings = dataclasses.replace(row, dual_clip=3.0), {**settings, "delta": 3.0}
        trainer, me = trl_grpo(**settings)
        logprob = torch.tensor(drawn.logprob, requires_grad=True)
        me._get_per_token_logps_and_entropies = lambda *args, logprob=logprob, **options: (logprob, logprob * 0, None)
        mask = torch.tensor(drawn.mask).to(torch.float64)
        ids = torch.zeros(drawn.rows, LONGEST, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
            "advantages": torch.tensor(drawn.advantage[:, 0]), "old_per_token_logps": torch.tensor(drawn.old),
            "ref_per_token_logps": torch.tensor(drawn.reference), "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        theirs = trainer._compute_loss(me, None, inputs)
        theirs.backward()
        tokens = drawn.packed(row.weighting)
        ours, _ = policy_loss(row, tokens)
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
        assert logprob.grad is not None
        np.testing.assert_allclose(gradients(ours, tokens)[0], logprob.grad.numpy()[drawn.mask], atol=1e-6)


def test_rloo_and_whitening_are_those_of_trl() -> None:
    trainer = pytest.importorskip("trl.trainer.rloo_trainer", exc_type=ImportError).RLOOTrainer
    ppo = pytest.importorskip("trl.experimental.ppo.ppo_trainer", exc_type=ImportError)
    _, me = trl_grpo()
    row = dataclasses.replace(ALGORITHMS["rloo"], surrogate="clip", ratio="product", weighting="sequence")
    for seed in range(CASES // 4):
        drawn = Drawn(seed)
        logprob = torch.tensor(drawn.logprob, requires_grad=True)
        me._get_per_token_logps_and_entropies = lambda *args, logprob=logprob, **options: (logprob, logprob * 0, None)
        mask = torch.tensor(drawn.mask).to(torch.float64)
        ids = torch.zeros(drawn.rows, LONGEST, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
            "advantages": torch.tensor(drawn.advantage[:, 0]), "old_logps": (torch.tensor(drawn.old) * mask).sum(1),
        }  # fmt: skip
        theirs = trainer._compute_loss(me, None, inputs)
        theirs.backward()
        tokens = drawn.packed(row.weighting)
        ours, _ = policy_loss(row, tokens)
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
        assert logprob.grad is not None
        np.testing.assert_allclose(gradients(ours, tokens)[0], logprob.grad.numpy()[drawn.mask], atol=1e-6)
        white = ppo.masked_whiten(torch.tensor(drawn.value), torch.tensor(drawn.mask)).numpy()[drawn.mask]
        np.testing.assert_allclose(advantages.whiten(drawn.value[drawn.mask]), white, atol=1e-6)


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_preference_losses_are_those_of_trl(name: str) -> None:
    trainer = pytest.importorskip("trl.trainer.dpo_trainer", exc_type=ImportError).DPOTrainer
    same = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, device="cpu")
    me = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=same, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", beta=0.1, label_smoothing=0.0, use_weighting=False,
        loss_types=["sigmoid" if name == "dpo" else name], loss_weights=[1.0], _total_train_tokens=0,
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    for seed in range(CASES // 4):
        generator = np.random.default_rng(seed)
        pairs, length, vocabulary = 3, 7, 11
        ids = torch.tensor(generator.integers(0, vocabulary, (2 * pairs, length)))
        mask = torch.tensor(generator.random((2 * pairs, length)) < 0.6)
        mask[:, 0], mask[:, 1] = False, True
        logits = torch.tensor(generator.standard_normal((2 * pairs, length, vocabulary)), requires_grad=True)
        reference = torch.tensor(-generator.exponential(5, 2 * pairs))
        inputs = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask.long(),
            "ref_chosen_logps": reference[:pairs], "ref_rejected_logps": reference[pairs:],
        }  # fmt: skip
        theirs = trainer._compute_loss(me, lambda logits=logits, **_: SimpleNamespace(logits=logits), inputs, False)
        (slope,) = torch.autograd.grad(theirs, logits)
        each = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        rows, places = torch.nonzero(mask[:, 1:], as_tuple=True)
        whole = policy.sequence_sums(each[rows, places], rows, 2 * pairs)
        count = torch.bincount(rows, minlength=2 * pairs).to(torch.float64)
        both = [
            preferences.Side(whole[part], reference[part], count[part])
            for part in (slice(0, pairs), slice(pairs, 2 * pairs))
        ]
        ours = preferences.PAIR_LOSSES[name](*both, 0.1, 0.0).mean()
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
        torch.testing.assert_close(torch.autograd.grad(ours, logits)[0], slope, rtol=0, atol=1e-6)


def test_reward_models_orpo_and_simpo_are_those_of_trl() -> None:
    reward = pytest.importorskip("trl.trainer.reward_trainer", exc_type=ImportError).RewardTrainer
    orpo = pytest.importorskip("trl.experimental.orpo.orpo_trainer", exc_type=ImportError).ORPOTrainer
    cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer", exc_type=ImportError).CPOTrainer
    same = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, device="cpu")
    for seed in range(CASES // 4):
        generator = np.random.default_rng(seed)
        scores = torch.tensor(generator.standard_normal((6, 1)), requires_grad=True)
        me = SimpleNamespace(
            model=SimpleNamespace(training=True), accelerator=same, _total_train_tokens=0,
            args=SimpleNamespace(center_rewards_coefficient=0.01),
            _metrics={"train": defaultdict(list)},
        )  # fmt: skip
        inputs = {"attention_mask": torch.ones(6, 2)}
        theirs = reward.compute_loss(me, lambda scores=scores, **_: SimpleNamespace(logits=scores), inputs)
        ours = preferences.bradley_terry(scores[:3, 0], scores[3:, 0], centre=0.01).mean()
        (slope,), (mine,) = (torch.autograd.grad(loss, scores) for loss in (theirs, ours))
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
        torch.testing.assert_close(mine, slope, rtol=0, atol=1e-6)
        chosen, rejected = sides(seed)
        means = [side.logprob_P / side.tokens_P for side in (chosen, rejected)]
        odds = orpo.odds_ratio_loss(SimpleNamespace(beta=0.3, accelerator=same), *means)[0]
        torch.testing.assert_close(
            preferences.orpo(chosen, rejected, 0.3, 0.0).float(), (-means[0] - odds).float(), rtol=1e-5, atol=1e-5
        )
        settings = {"beta": 2.0, "simpo_gamma": 1.0, "loss_type": "simpo", "label_smoothing": 0.0, "alpha": 0.0}
        simpo = cpo.cpo_loss(SimpleNamespace(accelerator=same, **settings), *means)[0]
        torch.testing.assert_close(preferences.simpo(chosen, rejected, 2.0, 1.0), simpo, rtol=0, atol=1e-6)
