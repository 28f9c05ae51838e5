"""FLOPs: the exact count equals the published closed forms, and utilisation relates as defined."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.work.operations import forward_flops, hardware_flops, model_flops, recomputed_flops


@given(st.integers(1, 8), st.sampled_from([128, 2048]), st.integers(1, 100), st.sampled_from([1024, 6144]))
def test_a_gpt_step_is_megatrons_formula(b: int, s: int, layers: int, h: int) -> None:
    """72 b s L h^2 (1 + s/(6h) + V/(12 h L)), Narayanan et al. 2021."""
    v = 51200
    model = ModelConfig(layers=layers, width=h, heads=16, vocabulary=v, context=s)
    formula = 72 * b * s * layers * h * h + 12 * b * s * s * layers * h + 6 * b * s * h * v
    assert model_flops(model, b, s) == formula


def test_grouped_query_and_swiglu_are_counted_as_they_are() -> None:
    model = preset("llama-3-8b")
    found = forward_flops(model, 1, 8192)
    assert found.projections == 32 * 2 * 8192 * 4096 * (2 * 4096 + 2 * 1024)
    assert found.mlp == 32 * 2 * 8192 * 3 * 4096 * 14336
    assert found.logits == 2 * 8192 * 4096 * 128256


def test_recomputation_adds_what_it_repeats() -> None:
    model = preset("gpt3-175b")
    forward = forward_flops(model, 3, 2048)
    assert recomputed_flops(model, 3, 2048, "none") == 0
    assert recomputed_flops(model, 3, 2048, "selective") == forward.scores
    assert recomputed_flops(model, 3, 2048, "full") == forward.layers
    assert hardware_flops(model, 3, 2048, "full") == 4 * forward.layers + 3 * forward.logits


def test_six_n_is_close_for_large_models() -> None:
    assert 6 * 174_604_259_328 * 2048 / model_flops(preset("gpt3-175b"), 1, 2048) == pytest.approx(0.973, abs=0.001)
