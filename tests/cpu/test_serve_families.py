"""Models of transformers' making, served: greedy answers are theirs, in one process and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tilemesh.serve import Engine, Sampling

_SIZES: dict[str, Any] = {
    "vocab_size": 61, "max_position_embeddings": 96, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10.0, "factor": 4.0, "original_max_position_embeddings": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"sliding_window": 10, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0,
                          "final_logit_softcapping": 4.0}),
    "deepseek_v2": ("deepseek_v2", {"num_key_value_heads": 4, "head_dim": None, "kv_lora_rank": 10, "q_lora_rank": None,
                                    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
                                    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
                                    "moe_intermediate_size": 20, "first_k_dense_replace": 1}),
    "deepseek_v3": ("deepseek_v3", {"num_key_value_heads": 4, "head_dim": 4, "kv_lora_rank": 10, "q_lora_rank": 9,
                                    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
                                    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
                                    "n_group": 4, "topk_group": 2, "moe_intermediate_size": 20,
                                    "first_k_dense_replace": 1}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 10, "num_local_experts": 4, "num_experts_per_tok": 2,
                            "rope_parameters": _YARN | {"truncate": False}}),
    "yarn": ("llama", {"rope_parameters": _YARN | {"mscale": 1.2, "mscale_all_dim": 0.4}}),
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8] * 5, [*[5, 6, 7, 8] * 5, 9], [1], [3, 20, 58] * 9, list(range(2, 58))]
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"pages": 200},
    "tight": {
        "pages": 36,
        "page_tokens": 4,
        "chunk_tokens": 7,
        "step_tokens": 24,
        "running": 4,
        "swap_pages": 8,
        "speculate": 3,
    },
    "two kinds of pages": {"pages": 30, "page_tokens": 4, "chunk_tokens": 7, "step_tokens": 24, "running": 3},
    "two ranks": {"pages": 40, "page_tokens": 4, "chunk_tokens": 11, "step_tokens": 24, "running": 4, "ranks": 2},
}
MORE = 20
pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder, and what transformers generates from it."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    kind, settings = FAMILIES[request.param]
    config = transformers.AutoConfig.for_model(kind, **_SIZES | settings)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    folder = tmp_path_factory.mktemp("theirs") / request.param
    model.save_pretrained(folder)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": MORE, "min_new_tokens": MORE}
    made = [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    assert len({tuple(answer) for answer in made}) == len(PROMPTS)
    return folder, made


@pytest.mark.parametrize(
    ("theirs", "name"),
    [
        *((family, name) for family in FAMILIES for name in ("plain", "tight")),
        ("gemma2", "two kinds of pages"),
        ("gemma2", "two ranks"),
        ("gpt_oss", "two kinds of pages"),
        ("gpt_oss", "two ranks"),
        ("deepseek_v2", "two ranks"),
    ],
    indirect=["theirs"],
)
def test_greedy_answers_are_those_of_transformers(theirs: tuple[Path, list[list[int]]], name: str) -> None:
    folder, expected = theirs
    asked = Sampling(max_tokens=MORE, temperature=0, ignore_eos=True)
    with Engine(folder, dtype="fp32", **ENGINES[name]) as engine:
        assert bool(engine.limits.local_pages) == (name.startswith("two") and folder.name in ("gemma2", "gpt_oss"))
        for _ in range(2):  # the second time prompts are found in the prefix cache
            answers = [list(made.answers[0].tokens) for made in engine.generate(PROMPTS, asked)]
            assert answers == expected
