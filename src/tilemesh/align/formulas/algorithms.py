"""Algorithms as rows of choices: each field names a function of this folder, and each row the paper that chose it so.

Adding one is a row, and at most one function. Settings of a run go over a row's fields by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tilemesh.align.formulas import advantages
from tilemesh.align.formulas.rollout import Floats, Whole

Baseline = Callable[[Floats, Whole], Floats]
BASELINES: dict[str, Baseline] = {
    "zero": lambda reward_S, group_S: reward_S,
    "batch": advantages.batch_mean,
    "batch-std": lambda reward_S, group_S: advantages.whiten(reward_S),
    "group": advantages.group_mean,
    "group-std": advantages.group_normalized,
    "leave-one-out": advantages.leave_one_out,
}
"""What an answer's reward is compared with."""
PER_TOKEN = ("critic", "returns")
"""Beside them, what tokens have of their own: GAE, and what a token and those after it are paid."""


@dataclass(frozen=True)
class Algorithm:
    """How rewards become a loss."""

    name: str
    paper: str
    baseline: str = "group-std"
    """One of BASELINES, or of PER_TOKEN."""
    epsilon: float = 1e-4
    """Added to a group's deviation (trl; verl: 1e-6)."""
    weighting: str = "token"
    """What a token counts for: one of WEIGHTINGS."""
    ratio: str = "token"
    """New over old probability of what: one of RATIOS."""
    surrogate: str = "clip"
    """One of SURROGATES."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    """0: none."""
    kl: Literal["off", "loss", "reward"] = "off"
    """Where the distance to the reference counts."""
    estimator: str = "k3"
    """One of ESTIMATORS."""
    kl_coefficient: float = 0.0
    whiten: bool = False
    """Whether advantages of tokens are whitened over the batch."""
    discount: float = 1.0
    decay: float = 0.95
    """GAE's λ."""
    value_coefficient: float = 0.0
    value_clip: float = 0.2
    entropy_coefficient: float = 0.0
    epochs: int = 1
    """How often a batch of rollouts is gone through."""
    filter_groups: bool = False
    """Whether groups whose answers were all paid alike are left out: their advantages are 0."""

    @property
    def has_critic(self) -> bool:
        return self.baseline == "critic"

    @property
    def has_reference(self) -> bool:
        return self.kl != "off" and self.kl_coefficient > 0


@dataclass(frozen=True)
class PreferenceAlgorithm:
    """How pairs of answers become a loss."""

    name: str
    paper: str
    beta: float = 0.1
    margin: float = 0.0
    has_reference: bool = True


_ROWS = (
    Algorithm("reinforce", "Williams 1992", "batch", weighting="sum", surrogate="plain"),
    Algorithm("reinforce++", "Hu 2025, arXiv 2501.03262", "returns", kl="reward", estimator="k1", kl_coefficient=0.01,
              whiten=True),
    Algorithm("rloo", "Ahmadian et al. 2024, arXiv 2402.14740", "leave-one-out", weighting="sum", surrogate="plain",
              kl="reward", estimator="k1", kl_coefficient=0.0),
    Algorithm("ppo", "Schulman et al. 2017, arXiv 1707.06347; Ouyang et al. 2022, arXiv 2203.02155", "critic",
              kl="reward", estimator="k1", kl_coefficient=0.05, whiten=True, value_coefficient=0.1, epochs=4),
    Algorithm("grpo", "Shao et al. 2024, arXiv 2402.03300", weighting="sequence", kl="loss", kl_coefficient=0.04),
    Algorithm("dr-grpo", "Liu et al. 2025, arXiv 2503.20783", "group", weighting="constant"),
    Algorithm("dapo", "Yu et al. 2025, arXiv 2503.14476", clip_high=0.28, filter_groups=True),
    Algorithm("gspo", "Zheng et al. 2025, arXiv 2507.18071", weighting="sequence", ratio="sequence", clip_low=3e-4,
              clip_high=4e-4),
    Algorithm("cispo", "MiniMax 2025, arXiv 2506.13585", surrogate="weight", clip_low=0.0, clip_high=4.0),
)  # fmt: skip
ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}

_PAIRS = (
    PreferenceAlgorithm("dpo", "Rafailov et al. 2023, arXiv 2305.18290"),
    PreferenceAlgorithm("ipo", "Azar et al. 2023, arXiv 2310.12036"),
    PreferenceAlgorithm("kto", "Ethayarajh et al. 2024, arXiv 2402.01306"),
    PreferenceAlgorithm("orpo", "Hong et al. 2024, arXiv 2403.07691", has_reference=False),
    PreferenceAlgorithm("simpo", "Meng et al. 2024, arXiv 2405.14734", beta=2.0, margin=1.0, has_reference=False),
    PreferenceAlgorithm("reward", "Bradley and Terry 1952; Stiennon et al. 2020, arXiv 2009.01325", beta=0.0,
                        has_reference=False),
)  # fmt: skip
PREFERENCES: dict[str, PreferenceAlgorithm] = {row.name: row for row in _PAIRS}
