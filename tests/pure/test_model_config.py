"""Model configurations: exact parameter counts, what follows from what, and what cannot be."""

from __future__ import annotations

import pytest

from tilemesh.core.errors import UsageError
from tilemesh.model.config import PRESETS, ModelConfig, preset
from tilemesh.model.work.weights import count_parameters

# As the published checkpoints hold them (Hugging Face: safetensors' own totals); GPT-3 by the convention in config.py.
COUNTS = {
    "gpt2-124m": 124_439_808,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-v3": 671_026_419_200,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gpt3-175b": 174_604_259_328,
}


@pytest.mark.parametrize(("name", "total"), COUNTS.items())
def test_presets_have_exactly_the_published_parameters(name: str, total: int) -> None:
    assert count_parameters(preset(name)).total == total


def test_every_preset_is_counted_or_small() -> None:
    assert set(PRESETS) == {*COUNTS, "tiny"}
    assert count_parameters(preset("tiny")).total < 2_000_000


def test_gpt3_is_the_sum_of_its_parts_by_hand() -> None:
    h = 12288
    # 12h^2 + 13h a layer (weights; nine h of biases, four of norms), 50,257 + 2,048 rows of embeddings, a last norm.
    by_hand = 96 * (12 * h * h + 13 * h) + (50257 + 2048) * h + 2 * h
    assert count_parameters(preset("gpt3-175b")).total == by_hand


def test_open_fields_follow_what_is_set_over_a_preset() -> None:
    model = ModelConfig(**{**PRESETS["gpt3-175b"], "width": 20480, "heads": 128})
    assert (model.mlp_width, model.kv_heads, model.head_width) == (81920, 128, 160)
    assert preset("tinyllama-1.1b").mlp_width == 5632
    assert preset("llama-2-7b").mlp_width == 11008


def test_a_tied_output_is_counted_once() -> None:
    tied = preset("llama-2-7b").replace(tied=True)
    assert count_parameters(preset("llama-2-7b")).total - count_parameters(tied).total == 32000 * 4096


def test_post_norm_has_no_final_norm() -> None:
    assert count_parameters(preset("gpt2-124m").replace(norm_place="post")).final_norm == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 5}, "not divisible by 5 heads"),
        ({"heads": 12, "kv_heads": 5}, "kv_heads"),
        ({"layers": 0}, "layers is 0"),
        ({"activation": "swish"}, "did you mean 'swiglu'"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"width": 36, "heads": 12, "positions": "rotary"}, "even width"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ModelConfig(**{**PRESETS["gpt2-124m"], **changes})


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'llama-3-70b'"):
        preset("lama-3-70b")
