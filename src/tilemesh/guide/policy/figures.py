"""Drawings of chapter 12: curves of the formulas that the chapter runs; nothing in them is drawn at random."""

from __future__ import annotations

import numpy as np
import torch

from tilemesh.align.formulas.policy import ESTIMATORS, clipped
from tilemesh.core.scene import Scene, files_of
from tilemesh.guide.policy.work import PROXY, REFERENCE, TRUE, divergence, tuned
from tilemesh.report.draw import Line, PlotAxis
from tilemesh.report.picture import curves


def figures() -> dict[str, str]:
    return files_of(ideas, clip, estimators, hacked)


def ideas() -> str:
    """What fails, and what mends it."""
    scene = Scene(860, 262, "Six ideas, each mending what fails without it")
    rows = (
        ("policy gradient", "E[ r ∇ log π ]", "an offset of the rewards drowns it", 0),
        ("baseline", "A = r - b", "one score for a whole chain: who earned it?", 1),
        ("credit (GAE)", "Σ (γλ)^k δ", "answers are dear, and used once", 2),
        ("ratio", "π_new / π_old", "the ratio runs away", 3),
        ("clip", "min(ρA, clip(ρ)A)", "the reward is not quite what you want", 4),
        ("KL to a reference", "r - β KL", "", 5),
    )
    for place, (name, formula, fails, colour) in enumerate(rows):
        y = 42 + place * 36
        scene.box(24, y, 150, 28, name, colour=colour)
        scene.text(190, y + 18, formula)
        scene.text(400, y + 18, f"fails: {fails}" if fails else "keeps the policy near where it came from", quiet=True)
    return scene.svg()


def clip() -> str:
    """PPO's objective over the ratio, for a good and a bad token."""
    ratios = torch.linspace(0.4, 1.6, 61, dtype=torch.float64)
    lines = []
    for colour, (advantage, words) in enumerate(((1.0, "advantage +1"), (-1.0, "advantage -1"))):
        values = -clipped(ratios.log(), ratios, torch.full_like(ratios, advantage), 0.2, 0.2, 0.0)
        lines.append(Line(words, list(zip(ratios.tolist(), values.tolist(), strict=True)), colour))
    x, y = PlotAxis(0.4, 1.6, "ratio π_new / π_old"), PlotAxis(-1.7, 1.7, "objective")
    return curves("PPO's objective: flat, and so without a gradient, where the ratio has gone far enough", x, y, *lines)


def estimators() -> str:
    """k1, k2 and k3 over the log ratio."""
    logs = torch.linspace(-1.5, 1.5, 61, dtype=torch.float64)
    lines = [
        Line(name, list(zip(logs.tolist(), estimate(logs, torch.zeros_like(logs)).tolist(), strict=True)), colour)
        for colour, (name, estimate) in enumerate(ESTIMATORS.items())
    ]
    x, y = PlotAxis(-1.5, 1.5, "log π - log π_ref of the token that was drawn"), PlotAxis(-1.6, 3.2, "estimate")
    return curves("Three estimates of the KL from one token", x, y, *lines)


def hacked() -> str:
    """What the reward model says and what is true, over the KL."""
    policies = [tuned(beta) for beta in np.geomspace(3.0, 0.02, 40)]
    spread = [divergence(policy, REFERENCE) for policy in policies]
    lines = [
        Line(words, [(kl, float(policy @ worth)) for kl, policy in zip(spread, policies, strict=True)], colour)
        for colour, (words, worth) in enumerate((("the reward model says", PROXY), ("true", TRUE)))
    ]
    x, y = PlotAxis(0, max(spread) * 1.02, "KL from the reference"), PlotAxis(0, 1.05, "expected reward")
    return curves("A flawed reward: training helps, then harms", x, y, *lines)
