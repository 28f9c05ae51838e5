"""What the gate compares, without comparing it: the words of a case, and the settings that its layouts cover."""

from __future__ import annotations

import dataclasses

from tilemesh.parallel.gate import pairs
from tilemesh.parallel.gate.cases import LOSS_SCALE, Case, gate_plan


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
