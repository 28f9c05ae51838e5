"""Hugging Face's folders: the same logits as `transformers` both ways, and everything that does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tilemesh.core.errors import UsageError
from tilemesh.model import families, huggingface
from tilemesh.model.config import PRESETS, ModelConfig, preset
from tilemesh.model.transformer import Transformer

TOKENS_BT = torch.randint(31, (2, 11), generator=torch.Generator().manual_seed(1))
GPT2: dict[str, Any] = {"vocab_size": 31, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3,
                        "bos_token_id": None, "eos_token_id": None}  # fmt: skip
LLAMA: dict[str, Any] = {"vocab_size": 31, "max_position_embeddings": 16, "hidden_size": 24, "intermediate_size": 40,
                         "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}  # fmt: skip
CASES = {
    "gpt2": ("gpt2", GPT2),
    "gpt2-relu-untied": ("gpt2", GPT2 | {"activation_function": "relu", "n_inner": 40, "tie_word_embeddings": False}),
    "llama": ("llama", LLAMA | {"rms_norm_eps": 1e-3}),
    "llama-3": ("llama", LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-tied-biased": ("llama", LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
}
OURS = {
    "gpt2": ModelConfig(layers=2, width=24, heads=3, vocabulary=31, context=16, dropout=0.2),
    "gpt2-untied": ModelConfig(layers=2, width=24, heads=3, vocabulary=31, context=16, mlp_width=40, tied=False,
                               activation="relu", norm_epsilon=1e-3),
    "llama": ModelConfig(layers=2, width=24, heads=6, kv_heads=2, vocabulary=31, context=16, norm="rmsnorm",
                         positions="rotary", activation="swiglu", biases=False, tied=False, rotary_base=500.0),
    "llama-tied": ModelConfig(layers=2, width=24, heads=6, vocabulary=31, context=16, norm="rmsnorm", dropout=0.2,
                              positions="rotary", activation="swiglu", norm_epsilon=1e-3),
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Imported here: it takes seconds, and only some of the tests need it."""
    return pytest.importorskip("transformers", minversion="4.50")


def theirs(transformers: Any, case: str) -> nn.Module:
    kind, settings = CASES[case]
    config = {"gpt2": transformers.GPT2Config, "llama": transformers.LlamaConfig}[kind](**settings)
    model: nn.Module = {"gpt2": transformers.GPT2LMHeadModel, "llama": transformers.LlamaForCausalLM}[kind](config)
    return lively(model)


def lively(model: nn.Module) -> nn.Module:
    """Every parameter matters: biases are not 0, norms not 1, attention not flat."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model.eval()


class Rotary64(nn.Module):
    """Llama's table of angles in float64; `transformers` makes it in float32 whatever the model's dtype."""

    def __init__(self, base: float, head_width: int) -> None:
        super().__init__()
        self.base, self.head_width = base, head_width

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.arange(0, self.head_width, 2, dtype=torch.float64)
        angle = position_ids[..., None].double() / self.base ** (pair / self.head_width)
        both = torch.cat((angle, angle), dim=-1)
        return both.cos(), both.sin()


def widened(model: Any) -> Any:
    """Their model in float64 throughout: Llama's norms and angles are float32 by their code, so they are replaced."""
    model.double()
    if model.config.model_type != "llama":
        return model
    config = model.config
    base = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    model.model.rotary_emb = Rotary64(base, config.hidden_size // config.num_attention_heads)

    def wide(norm: Any) -> nn.Module:
        made = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=torch.float64)
        made.weight = norm.weight
        return made

    for layer in model.model.layers:
        layer.input_layernorm = wide(layer.input_layernorm)
        layer.post_attention_layernorm = wide(layer.post_attention_layernorm)
    model.model.norm = wide(model.model.norm)
    return model


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    made = model(TOKENS_BT)
    logits: Tensor = made if isinstance(made, Tensor) else made.logits
    return logits


# ---- against transformers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_their_model_read_by_us_gives_their_logits(transformers: Any, case: str, tmp_path: Path) -> None:
    model = theirs(transformers, case)
    model.save_pretrained(tmp_path)
    ours32, ours64 = huggingface.load(tmp_path).eval(), huggingface.load(tmp_path, dtype=torch.float64).eval()
    assert {parameter.dtype for parameter in ours32.parameters()} == {torch.float32}
    theirs32, theirs64 = logits_of(model), logits_of(widened(model))
    torch.testing.assert_close(logits_of(ours64), theirs64, rtol=1e-12, atol=1e-12)
    # In float32 their own code, norms and angles included: no further from float64 than twice what they are, or than
    # rounding the logits to float32, should theirs happen to be nearer than that on some machine.
    assert (logits_of(ours32) - theirs64).norm() <= 2 * max((theirs32 - theirs64).norm(), 2**-24 * theirs64.norm())


@pytest.mark.parametrize("case", OURS)
def test_our_model_read_by_them_gives_our_logits(transformers: Any, case: str, tmp_path: Path) -> None:
    model = lively(Transformer(OURS[case], seed=2, dtype=torch.float64))
    assert isinstance(model, Transformer)
    huggingface.save(model, tmp_path)
    read, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True, local_files_only=True
    )
    assert not any(report.values()), report
    torch.testing.assert_close(logits_of(model), logits_of(widened(read.eval())), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_shards_are_read_through_their_index(transformers: Any, case: str, tmp_path: Path) -> None:
    model = theirs(transformers, case)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = (huggingface.load(tmp_path / name).state_dict() for name in ("whole", "shards"))
    assert all(torch.equal(value, shards[key]) for key, value in whole.items())


@pytest.mark.parametrize("case", ["gpt2", "llama-tied-biased"])
def test_a_model_saved_without_its_head_is_read(transformers: Any, case: str, tmp_path: Path) -> None:
    model: Any = theirs(transformers, case)
    getattr(model, model.base_model_prefix).save_pretrained(tmp_path)
    assert not any(name.startswith(("model.", "transformer.")) for name in load_file(tmp_path / "model.safetensors"))
    model.double()
    ours = huggingface.load(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(logits_of(ours), logits_of(widened(model)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["GPT2Config", "LlamaConfig"])
def test_their_defaults_are_ours(transformers: Any, name: str) -> None:
    """A key that config.json leaves out means what it means to them."""
    written = getattr(transformers, name)().to_dict()
    written["model_type"] = name.removesuffix("Config").lower()
    sizes = {"model_type", "tie_word_embeddings", *families.FAMILIES[written["model_type"]].sizes.values()}
    short = {key: value for key, value in written.items() if key in sizes}
    assert families.from_json(short) == families.from_json(written)


# ---- alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", OURS)
def test_what_is_saved_is_read_back_bit_for_bit(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = Transformer(OURS[case], seed=2, dtype=dtype)
    huggingface.save(model, tmp_path)
    read = huggingface.load(tmp_path)
    assert read.config == model.config
    for key, value in model.state_dict().items():
        assert (read.state_dict()[key].dtype, read.state_dict()[key].is_contiguous()) == (dtype, True)
        assert torch.equal(read.state_dict()[key], value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    streamed = dict(huggingface.read_parameters(tmp_path))
    assert all(torch.equal(streamed[key], value) for key, value in model.named_parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_config_json(name: str) -> None:
    config = preset(name)
    written = json.loads(json.dumps(families.to_json(config, "bfloat16")))
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert families.from_json(written) == config


def test_rotary_settings_of_older_files_are_read() -> None:
    new = families.to_json(OURS["llama"], "float32")
    old = {key: value for key, value in new.items() if key != "rope_parameters"} | {"rope_scaling": None}
    assert families.from_json(old).rotary_base == 500.0


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("gpt2", {"model_type": "gpt3"}, "unknown model_type 'gpt3': did you mean 'gpt2'"),
        ("gpt2", {"activation_function": "gelu"}, "unknown activation_function in config.json 'gelu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "only False is supported"),
        ("gpt2", {"embd_pdrop": 0.3}, "embd_pdrop is 0.3 and resid_pdrop 0.2"),
        ("gpt2", {"n_layer": None}, "n_layer is None: expected a whole number"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0: expected"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "scaled by 'llama3'"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "scaled by 'linear'"),
        ("llama", {"head_dim": 8}, "head_dim is 8: expected hidden_size / num_attention_heads = 4.0"),
        ("llama", {"mlp_bias": True}, "attention_bias is False and mlp_bias is not"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu'"),
    ],
)
def test_a_config_that_means_another_model_is_refused(case: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        families.from_json(families.to_json(OURS[case], "float32") | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_place": "post"}, "gpt2 has no norm_place=post; llama has no norm=layernorm, norm_place=post"),
        ({"heads": 4, "kv_heads": 2}, "gpt2 has no kv_heads=2"),
        ({"norm": "rmsnorm"}, "gpt2 has no norm=rmsnorm"),
    ],
)
def test_a_model_that_no_layout_expresses_is_not_saved(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        huggingface.save(Transformer(OURS["gpt2"].replace(**changes)), tmp_path / "out")
    with pytest.raises(UsageError, match="meta device"):
        huggingface.save(Transformer(OURS["gpt2"], device="meta"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- files that are not as they should be ----------------------------------------------------------------------


def spoilt(folder: Path, case: str = "gpt2", **changes: Tensor | None) -> Path:
    """A saved model with tensors added or replaced (a tensor) or taken away (None); dots are written `__`."""
    huggingface.save(Transformer(OURS[case]), folder)
    tensors: dict[str, Tensor | None] = {**load_file(folder / "model.safetensors")}
    tensors |= {key.replace("__", "."): value for key, value in changes.items()}
    save_file({key: value for key, value in tensors.items() if value is not None}, folder / "model.safetensors")
    return folder


def test_each_tensor_that_does_not_fit_gets_a_line(tmp_path: Path) -> None:
    spoilt(
        tmp_path,
        transformer__wte__weight=torch.zeros(32, 24),
        transformer__h__0__attn__c_attn__weight=torch.zeros(72, 24),
        transformer__h__1__ln_2__bias=None,
        transformer__h__2__ln_1__bias=torch.zeros(24),
        wpe__weight=torch.zeros(16, 24),
        transformer__ln_f__bias=torch.zeros(24, dtype=torch.int8),
    )
    with pytest.raises(UsageError) as caught:
        huggingface.load(tmp_path)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{tmp_path}: tensors do not fit config.json"
    told = {line.strip() for line in lines}
    twice = {line for line in told if "wpe.weight" in line}  # both names of one tensor: one of them is too many
    assert told - twice == {
        "mis-shaped: transformer.wte.weight, shape (32, 24), expected (31, 24)",
        "mis-shaped: transformer.h.0.attn.c_attn.weight, shape (72, 24), expected (24, 72)",
        "missing: transformer.h.1.ln_2.bias, expected shape (24,)",
        "unexpected: transformer.h.2.ln_1.bias, shape (24,)",
        "not floating point: transformer.ln_f.bias, I8, expected one of F64, F32, F16, BF16",
    }
    assert len(twice) == 1
    assert "unexpected" in twice.pop()


def test_a_folder_of_another_model_does_not_fill_the_screen(tmp_path: Path) -> None:
    spoilt(tmp_path, "llama")
    (tmp_path / "config.json").write_text(json.dumps(families.to_json(OURS["gpt2"], "float32")))
    with pytest.raises(UsageError) as caught:
        huggingface.load(tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    # 20 of Llama's 21 tensors are not GPT-2's (lm_head is known to both), and all 28 of GPT-2's are missing.
    assert lines[-1].strip() == f"and {20 + 28 - 20} more"


def test_leftovers_of_old_versions_and_a_tied_output_are_passed_over(tmp_path: Path) -> None:
    table = Transformer(OURS["gpt2"]).token_embedding.weight.detach().clone()
    mask = {"transformer__h__0__attn__bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8)}
    huggingface.load(spoilt(tmp_path / "gpt2", **mask, lm_head__weight=table))
    huggingface.load(
        spoilt(tmp_path / "llama", "llama", model__layers__1__self_attn__rotary_emb__inv_freq=torch.ones(2))
    )
    with pytest.raises(UsageError, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        huggingface.load(spoilt(tmp_path / "other", lm_head__weight=table + 1))
    with pytest.raises(UsageError, match=r"mis-shaped: lm_head.weight, shape \(2, 24\)"):
        huggingface.load(spoilt(tmp_path / "short", lm_head__weight=table[:2].clone()))


def test_mixed_dtypes_want_a_decision(tmp_path: Path) -> None:
    spoilt(tmp_path, transformer__ln_f__bias=torch.zeros(24, dtype=torch.bfloat16))
    with pytest.raises(UsageError, match="tensors of BF16 and F32: say which"):
        huggingface.load(tmp_path)
    read = huggingface.load(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in read.parameters()} == {torch.float32}


def test_files_that_are_not_there_or_not_whole_are_named(tmp_path: Path) -> None:
    spoilt(tmp_path)
    weights, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UsageError, match=r"model.safetensors is not a whole safetensors file"):
        huggingface.load(tmp_path)
    weights.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=r"neither .* pytorch_model.bin is pickled and never opened"):
        huggingface.load(tmp_path)
    for text, words in (
        ('{"weight_map": {"wte.weight": "a-1.safetensors"}}', "a-1.safetensors does not exist"),
        ('{"weight_map": {"wte.weight": "../x.safetensors"}}', "expected files of this folder"),
        ('{"weights": {}}', "not an index"),
        ("[", "not JSON"),
    ):
        index.write_text(text)
        with pytest.raises(UsageError, match=words):
            huggingface.load(tmp_path)
    for text, words in (("{", "is not JSON"), ("[]", "holds a list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=words):
            huggingface.load(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        families.read_config(tmp_path / "nowhere")
