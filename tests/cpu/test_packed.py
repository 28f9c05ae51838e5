"""Weights laid out once for a CPU's products: the same results, the same state dict, and no stale weights."""

import pytest
import torch
from torch.nn import functional

from tilemesh.data.tokenizer import Unknown
from tilemesh.model import packed
from tilemesh.model.config import ModelConfig
from tilemesh.model.packed import Packed, PackedWeight, pack_products, packed_bytes, packs, without_onednn
from tilemesh.model.programs.prepare import prepare
from tilemesh.model.programs.program import Use
from tilemesh.model.transformer import Transformer
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.load import ServedModel

LLAMA = ModelConfig(
    layers=2, width=64, heads=4, kv_heads=2, mlp_width=96, vocabulary=97, context=64, norm="rmsnorm",
    positions="rotary", activation="swiglu", biases=False, tied=False,
)  # fmt: skip
GPT = ModelConfig(layers=2, width=64, heads=4, vocabulary=97, context=64)

pytestmark = pytest.mark.skipif(not packs(torch.float32), reason="this build of torch has no packed products")


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(config, device="meta", dtype=dtype).to_empty(device="cpu").eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2, generator=generator)
    return model


def packed_linears(model: Transformer) -> int:
    return sum(isinstance(getattr(module, "kind", None), Packed) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 33, 130])
def test_a_packed_product_is_as_exact_as_torchs(rows: int, dtype: torch.dtype) -> None:
    if not packs(dtype):
        pytest.skip("this CPU has no packed products of bfloat16")
    weight, bias, x = (torch.randn(*shape).to(dtype) for shape in ((72, 200), (72,), (rows, 200)))
    exact = functional.linear(x.double(), weight.double(), bias.double())
    made = PackedWeight(weight).product(x, bias)
    assert made.dtype == dtype
    # K products and K additions, each rounded once in float32, and the result once in its own dtype.
    size = functional.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    bound = size * 200 * torch.finfo(torch.float32).eps + exact.abs() * torch.finfo(dtype).eps
    assert ((made.double() - exact).abs() <= bound).all()


def test_three_dimensions_keep_their_shape() -> None:
    weight, x = torch.randn(24, 40), torch.randn(2, 5, 40)
    torch.testing.assert_close(PackedWeight(weight).product(x, None), functional.linear(x, weight))


def test_a_weight_written_in_place_is_packed_again() -> None:
    weight, x = torch.randn(24, 40), torch.randn(4, 40)
    held = PackedWeight(weight)
    weight.mul_(2)
    torch.testing.assert_close(held.product(x, None), functional.linear(x, weight))


def test_a_part_of_a_group_written_in_place_is_packed_again() -> None:
    model = model_of(LLAMA)
    programs = prepare(model, Use())
    pack_products(model, programs.groups)
    attention, heads = model.layers[0].attention, programs.groups[0].heads
    x = torch.randn(4, 64)
    with torch.no_grad():
        attention.fc_k.weight.mul_(3)
    wanted = functional.linear(x, attention.fc_k.weight)
    torch.testing.assert_close(heads(x)[:, 64:96], wanted)


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt2"])
def test_all_products_of_a_model_are_packed_and_logits_are_the_same(config: ModelConfig) -> None:
    plain, model = model_of(config), model_of(config)
    programs = prepare(model, Use())
    names = list(model.state_dict())
    pack_products(model, programs.groups)
    assert list(model.state_dict()) == names
    for layer, groups in zip(model.layers, programs.groups, strict=True):
        assert isinstance(layer.attention.fc_o.kind, Packed)
        assert isinstance(layer.mlp.fc_out.kind, Packed)
        assert isinstance(groups.heads.layer.kind, Packed)
    head = model.token_embedding if config.tied else model.output
    assert isinstance(head.kind, Packed)
    tokens = torch.randint(config.vocabulary, (2, 9))
    with torch.inference_mode():
        torch.testing.assert_close(programs(tokens), plain(tokens))


def test_a_model_that_is_cast_afterwards_takes_its_new_weights() -> None:
    plain, model = model_of(GPT).double(), model_of(GPT)
    pack_products(model)
    model.double()
    tokens = torch.randint(GPT.vocabulary, (2, 9))
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), plain(tokens))


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt2"])
def test_an_engine_with_packed_weights_answers_as_one_without(config: ModelConfig) -> None:
    prompts = [[(7 * at + 3 * row) % config.vocabulary for at in range(5 + row)] for row in range(6)]
    answers = []
    for asked in (False, True):
        served = ServedModel("small", model_of(config), Unknown(config.vocabulary), frozenset())
        with Engine(served, pages=64, packed=asked) as engine:
            assert (packed_linears(served.model) > 0) == asked
            found = engine.generate(prompts, Sampling(max_tokens=12, temperature=0, ignore_eos=True))
            answers.append([answer.answers[0].tokens for answer in found])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("machine", "invariant"), [("aarch64", False), ("aarch64", True), ("x86_64", False)])
def test_an_engine_packs_by_itself_on_arm_but_not_where_bits_must_be_the_same(
    monkeypatch: pytest.MonkeyPatch, machine: str, invariant: bool
) -> None:
    monkeypatch.setattr("tilemesh.serve.runner.platform.machine", lambda: machine)
    served = ServedModel("small", model_of(LLAMA), Unknown(LLAMA.vocabulary), frozenset())
    with Engine(served, pages=64, invariant=invariant):
        assert (packed_linears(served.model) > 0) == (machine == "aarch64" and not invariant)


def test_weights_that_would_take_too_much_memory_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    served = ServedModel("small", model_of(LLAMA), Unknown(LLAMA.vocabulary), frozenset())
    monkeypatch.setattr("tilemesh.serve.runner.platform.machine", lambda: "aarch64")
    monkeypatch.setattr("tilemesh.serve.runner.free_cpu_bytes", lambda: 3 * packed_bytes(served.model))
    with Engine(served, pages=64):
        assert packed_linears(served.model) == 0


def test_a_build_without_the_operator_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: PackedWeight) -> torch.Tensor:
        raise NotImplementedError("mkldnn::_reorder_linear_weight")

    monkeypatch.setattr(packed.PackedWeight, "_pack", missing)
    assert not packs(torch.float32)
    assert not packs(torch.float64)


def test_products_are_left_to_blas_until_the_last_caller_is_done() -> None:
    """The switch is the process's, and ranks that are threads end in any order."""
    before = torch._C._get_mkldnn_enabled()
    first, second = without_onednn(), without_onednn()
    assert not torch._C._get_mkldnn_enabled()
    first()
    assert not torch._C._get_mkldnn_enabled()
    second()
    assert torch._C._get_mkldnn_enabled() == before
