"""The gate for folders: a sample in `make test`, all of it in `make test-all`. What a case is: `folder_configs.py`,
`folder_tokenizers.py`, `folder_ends.py`; from a shell: `folder_gate.py`."""

from __future__ import annotations

import pytest
from folder_configs import BASES, ConfigCase, config_cases
from folder_ends import ends_cases
from folder_gate import sampled, wrong_lines
from folder_tokenizers import LAYOUTS, TokenizerCase, tokenizer_cases

LEAST_CASES = 5500

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

FOUND = [
    ConfigCase("gemma3", (("rope_parameters", {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}),)),
    ConfigCase("phi3-window", (("layer_types", ["full_attention", "full_attention"]),)),
    ConfigCase("mistral-window", (("layer_types", ["full_attention", "sliding_attention"]),)),
    ConfigCase("gpt2", (("num_attention_heads", 2),)),
    ConfigCase("gpt_neox", (("head_dim", 16),)),
    ConfigCase("phi3", (("sliding_window", 0), ("layer_types", ["full_attention"] * 2))),
    ConfigCase("llama-scaled", (("rope_scaling", {"rope_theta": 70.0}),)),
    ConfigCase("qwen3_moe-window", ()),
    ConfigCase("qwen2_moe-window", ()),
    ConfigCase("mixtral-window", (("layer_types", ["full_attention"] * 2),)),
    ConfigCase("gpt_oss", (("layer_types", ["full_attention"] * 2),)),
    *(TokenizerCase("llama2", change) for change in (
        "eos_token has another name", "special tokens only in special_tokens_map.json", "chat_template is a list",
        "a vocabulary with holes", "tokenizer.json truncates")),
]  # fmt: skip
"""What the gate found once: each was wrong."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_targets_and_ends_of_real_layouts(layout: str) -> None:
    assert not wrong_lines([TokenizerCase(layout, "as it is"), TokenizerCase(layout, "as it is", is_marked=True)])


def test_what_was_found_stays_right() -> None:
    assert not wrong_lines(FOUND)


@pytest.mark.parametrize("base", [base for base in BASES if "-" not in base])
def test_attention_in_both_directions_is_not_computed_as_causal(base: str) -> None:
    assert not wrong_lines([ConfigCase(base, (("is_causal", False),))])


def test_a_sample() -> None:
    cases = [*sampled([*config_cases()], 8), *sampled([*tokenizer_cases()], 4), *sampled([*ends_cases()], 3)]
    assert not wrong_lines(cases)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("base", BASES)
def test_every_change_of_a_configuration(base: str) -> None:
    assert not wrong_lines(case for case in config_cases() if case.base == base)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_change_of_tokenizer_files(layout: str) -> None:
    assert not wrong_lines(case for case in tokenizer_cases() if case.layout == layout)


@pytest.mark.slow
def test_every_combination_of_end_tokens() -> None:
    assert not wrong_lines(ends_cases())
    assert len([*config_cases(), *tokenizer_cases(), *ends_cases()]) >= LEAST_CASES
