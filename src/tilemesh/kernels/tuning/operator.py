"""What an operator gives to be tuned: its configurations, their keys and costs, and a way to time them.

The tuner, the search and the tables know nothing else of an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tilemesh.kernels.tuning.table import Tables
from tilemesh.kernels.tuning.values import ConfigurationT, ProblemIn

if TYPE_CHECKING:
    import torch

    from tilemesh.kernels.launch.gpu import Gpu
    from tilemesh.kernels.tuning.trial import ConfigTimer


class Tunable(Protocol[ProblemIn, ConfigurationT]):
    """One operator, as the tuner sees it."""

    tables: Tables[ConfigurationT]
    last_resort: ConfigurationT
    """Timed with the finalists, chosen only where nothing else ran."""

    def refusal(self, problem: ProblemIn) -> str | None:
        """Why this problem is never tuned, or None."""

    def grid(self, problem: ProblemIn, gpu: Gpu) -> list[ConfigurationT]:
        """Every configuration worth compiling on this GPU, in a fixed order."""

    def predict_s(self, problem: ProblemIn, gpu: Gpu) -> Callable[[ConfigurationT], float]:
        """The cost model: seconds of kernel time by configuration."""

    def features(self, config: ConfigurationT) -> Sequence[float]:
        """Numbers in which near means alike."""

    def untuned(self, problem: ProblemIn, gpu: Gpu) -> ConfigurationT:
        """What `auto` takes where the user tuned nothing."""

    def shortlist(self, problem: ProblemIn, gpu: Gpu) -> list[ConfigurationT]:
        """The few that a model learnt from other problems expects to be fastest; empty without such a model."""

    def built_ins(self, problem: ProblemIn) -> list[ConfigurationT]:
        """The vendor's ways, which tuning never does worse than."""

    def bench(self, problem: ProblemIn, device: torch.device, seed: int) -> ConfigTimer[ConfigurationT]:
        """Times configurations on inputs drawn from a seed."""

    def compiling(self, problem: ProblemIn, config: ConfigurationT, gpu: Gpu) -> tuple[Any, ...] | None:
        """(function, arguments …) that compiles ahead in another process and returns what failed; None: nothing to."""
