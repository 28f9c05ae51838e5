"""What the gate compares, without comparing it: the words of a case, and the settings that its layouts cover."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tilemesh.comm import run_threads
from tilemesh.core.conflicts import is_runnable
from tilemesh.core.errors import UsageError
from tilemesh.kernels.lowbit.formats import parse_scheme
from tilemesh.model.config import ModelConfig
from tilemesh.model.kinds import open_codes, projections
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import apply
from tilemesh.parallel.gate import pairs
from tilemesh.parallel.gate.alone import compress_all
from tilemesh.parallel.gate.cases import LOSS_SCALE, Case, gate_plan
from tilemesh.parallel.mesh import Mesh


def test_a_case_says_what_is_not_usual() -> None:
    case = Case("gpt", gate_plan(2))
    assert "loss" not in str(case)
    assert f"loss × {LOSS_SCALE:g}" in str(dataclasses.replace(case, scale=LOSS_SCALE))


def test_layouts_cover_prefetching_and_groups_of_zero() -> None:
    chosen = [choice.layout for choice in pairs._chosen(4)]
    assert {choice.prefetch for choice in chosen if choice.zero == 3} == {0, 1, 2}
    assert {choice.prefetch for choice in chosen if choice.zero < 3} == {0, 1}
    assert {choice.zero_group for choice in chosen if choice.zero and choice.dp == 4} >= {2}
    assert {choice.zero_group for choice in chosen if choice.dp < 4} == {0}


def test_every_case_of_eight_ranks_can_be_laid() -> None:
    """The plan's check takes it, and what ranks would cut divides: in one process, without a rank."""
    models: dict[tuple[ModelConfig, str], Transformer] = {}
    every = pairs.every_case(8, pairs=False)
    assert [case for case in every if case.why_not or not is_runnable(case.layout)] == []
    cuts = {(case.config, case.weights, case.layout.tp, case.layout.ep, case.layout.expert_tp): case for case in every}
    for (config, weights, *_), case in cuts.items():
        if (config, weights) not in models:
            models[config, weights] = Transformer(config, seed=1, device="cpu" if weights else "meta")
            if weights:
                compress_all(models[config, weights], weights)
            if weights.startswith("rounded "):  # in every pass, so that groups that do not divide show there first
                scheme = parse_scheme(weights.removeprefix("rounded "))
                assert all(scheme.groups(layer.in_features) for _, layer in projections(models[config, weights]))
        model, plan = models[config, weights], case.layout
        if plan.tp > 1:
            for _, layer in projections(model):
                open_codes(layer)
        mesh: Any = SimpleNamespace(shape=tuple(plan.axes.items()), comm=SimpleNamespace(rank=plan.world - 1))
        apply._shards(
            model, apply._matched(model, apply.transformer_splits(config, None, plan.routes_apart)), mesh, plan
        )


def test_recipes_of_a_choice_of_models_fit_their_widths() -> None:
    """Whichever models are asked for: 2 of 4 and groups do not go into latents of 9 columns."""
    for names in (("experts",), ("spread", "experts"), ("experts", "gpt")):
        for case in pairs.every_case(2, names, pairs=False):
            cuts = case.weights == "masked" or "-g" in case.weights
            assert not (cuts and case.config.latent_width), case


def test_groups_that_ranks_would_share_are_refused_by_the_plan() -> None:
    case = Case("dropped", gate_plan(1, 4), "adapters int4-g4")
    words = (
        r"tp is 4: layers\.0\.mlp\.shared\.fc_out: groups of 4 do not divide the 6 inputs of a rank; use groups of 6"
    )
    assert re.match(words, case.why_not or "")
    model = Transformer(case.config, seed=1)
    compress_all(model, case.weights)
    with pytest.raises(UsageError, match=words):
        run_threads(4, lambda comm: apply.lay(model, Mesh(comm, tp=4), case.layout))
