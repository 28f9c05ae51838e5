"""Compressing small models: methods do what they are for, and what is written comes back."""

import copy
import importlib
import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tilemesh.compress import methods, mixed
from tilemesh.compress.calibrate import InputStatistics, held_back, layer_by_layer, mean_divergence, mean_loss
from tilemesh.compress.distill import distill, last_activations
from tilemesh.compress.factorize import factorize, factors, rank_of
from tilemesh.compress.methods import MovedScales, awq_scales, clipped, gptq, output_error
from tilemesh.compress.prune import check_writable, prune, sparsity_at
from tilemesh.compress.quantize import quantize
from tilemesh.compress.recipe import ActivationsRecipe, PruneRecipe, RankRecipe, Recipe, WeightsRecipe, read_recipe
from tilemesh.compress.shrink import shrink
from tilemesh.core.errors import UsageError
from tilemesh.kernels.lowbit import codes
from tilemesh.kernels.lowbit.formats import Scheme, parse_scheme
from tilemesh.model import huggingface, lowbit_files
from tilemesh.model.adapter import LoraConfig
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.dropout import DropoutPlace
from tilemesh.model.kinds import FewBits, few_bits, model_bytes, projections, put
from tilemesh.model.lora import attach
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.gate.cases import MODELS

quantizing = importlib.import_module("tilemesh.compress.quantize")  # the package has a function of that name
RECIPES = ("int8", "int4-g32-gptq", "int4-g32-awq", "int4-g32-clip", "int3-g32", "int8-a8-smooth", "int8-a8-static",
           "int4-g32-mixed", "nf4-g32", "fp8", "fp8-a8", "fixed16", "int4-g32-affine", "int2-g32-2level",
           "rank-50")  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Transformer:
    made = Transformer(preset("tiny").replace(layers=2), seed=3).eval().requires_grad_(False)
    with torch.no_grad():
        for name, value in made.named_parameters():
            if name.endswith("norm.weight"):  # channels of different size, as trained models have
                generator = torch.Generator().manual_seed(len(name))
                value.mul_(torch.exp(torch.randn(value.shape, generator=generator)))
    return made


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (8, 129), generator=torch.Generator().manual_seed(5))


def activations(seed: int, inputs: int = 64, count: int = 512) -> InputStatistics:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=generator) / inputs**0.5
    spread = torch.exp(torch.randn(inputs, generator=generator))
    found = InputStatistics.empty(inputs, torch.device("cpu"))
    found.add(torch.randn(count, inputs, generator=generator) @ mixing * spread)
    return found


@pytest.mark.parametrize("name", ["int4-g16", "int3-g16", "int3-g16-affine", "nf4-g16", "int2"])
def test_gptq_loses_less_than_rounding_and_clipping_less_than_its_own_measure(name):
    weight, inputs, scheme = (
        torch.randn(24, 64, generator=torch.Generator().manual_seed(1)),
        activations(2),
        parse_scheme(name),
    )
    nearest = codes.rounded(weight, scheme)
    made = gptq(weight, scheme, inputs)
    better = codes.decode(made.codes, scheme, made.scales, made.zeros, torch.float32)
    assert output_error(better - weight, inputs.gram) < 0.8 * output_error(nearest - weight, inputs.gram)
    cut = clipped(weight, scheme)
    back = codes.decode(cut.codes, scheme, cut.scales, cut.zeros, torch.float32)
    assert (back - weight).norm() <= (nearest - weight).norm() * (1 + 1e-6)


@pytest.mark.parametrize("name", ["int4-g16", "int3-g16-affine", "nf4-g16", "fp8"])
def test_gptq_leaves_weights_of_zero_at_zero(name):
    """Those that pruning took: the errors of other columns had been put into them."""
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    inputs, scheme = activations(2), parse_scheme(name)
    weight.view(24, 16, 4)[:, :, ::2] = 0
    made, nearest = gptq(weight, scheme, inputs), codes.rounded(weight, scheme)
    better = codes.decode(made.codes, scheme, made.scales, made.zeros, torch.float32)
    assert (better[weight == 0] == 0).all()
    assert output_error(better - weight, inputs.gram) < output_error(nearest - weight, inputs.gram)


def test_awq_is_never_worse_on_its_text():
    weight, inputs, scheme = (
        torch.randn(24, 64, generator=torch.Generator().manual_seed(1)),
        activations(2),
        parse_scheme("int3-g16"),
    )
    found = awq_scales([weight], [scheme], inputs)
    assert found.share <= 1
    moved = codes.rounded(weight * found.factors, scheme) / found.factors
    nearest = codes.rounded(weight, scheme)
    assert found.share == pytest.approx(
        output_error(moved - weight, inputs.gram) / output_error(nearest - weight, inputs.gram), rel=1e-3
    )


def test_awq_finds_what_the_published_search_finds_on_the_activations_themselves():
    generator = torch.Generator().manual_seed(5)
    weight, scheme = torch.randn(24, 64, generator=generator), parse_scheme("int3-g16")
    x = torch.randn(400, 64, generator=generator) * torch.exp(torch.randn(64, generator=generator))
    inputs = InputStatistics.empty(64, torch.device("cpu"))
    inputs.add(x)

    def error(scales: torch.Tensor) -> float:
        return float((x @ (codes.rounded(weight * scales, scheme) / scales - weight).t()).square().mean())

    found = []
    for step in range(21):  # Lin et al. 2023, section 3.2: s = mean|x|^a, by the error of the output
        scales = x.abs().mean(0) ** (step / 20)
        found.append(error(scales / (scales.max() * scales.min()).sqrt()))
    # Scales that differ in their last bit can move a weight that lies between two codes: 1 of 1,536 is about 0.5 %.
    assert error(awq_scales([weight], [scheme], inputs).factors) <= min(found) * 1.01


@pytest.mark.parametrize("name", ["int3-g4", "int2-g4", "int3-g16", "int3", "int8-tensor", "int3-g16-affine"])
def test_clipping_never_changes_the_output_more_than_rounding(name):
    """Of all groups of a row together, where inputs of different groups vary together."""
    generator = torch.Generator().manual_seed(1)
    weight, scheme = torch.rand(32, 64, generator=generator), parse_scheme(name)
    inputs = InputStatistics.empty(64, torch.device("cpu"))
    inputs.add(torch.randn(512, 1, generator=generator) + 0.3 * torch.randn(512, 64, generator=generator))
    cut = clipped(weight, scheme, inputs.gram)
    back = codes.decode(cut.codes, scheme, cut.scales, cut.zeros, torch.float32)
    changes = back - weight, codes.rounded(weight, scheme) - weight
    now, was = (((change @ inputs.gram) * change).sum(1) for change in changes)
    if scheme.granularity == "tensor":
        now, was = now.sum(), was.sum()
    assert (now <= was * (1 + 1e-4) + 1e-9).all()


def scales_that_do_harm(weights, schemes, inputs):
    factors = torch.exp(torch.linspace(-3, 3, weights[0].shape[1]).roll(7))
    return MovedScales(factors, 0.0)


def test_awq_changes_only_layers_whose_output_it_keeps_closer_than_rounding(model, tokens, monkeypatch):
    text = tokens[:, :-1]
    rounding = quantize(model, "int3-g32")
    monkeypatch.setattr(quantizing, "awq_scales", scales_that_do_harm)
    monkeypatch.setitem(methods.METHODS, "awq", methods.METHODS["nearest"])
    assert torch.equal(quantize(model, "int3-g32-awq", text)(text[:2]), rounding(text[:2]))


@pytest.mark.parametrize("in_place", [False, True])
def test_awq_is_rounding_where_the_predictions_come_out_worse(in_place, model, tokens, monkeypatch):
    """Also where every layer by itself seemed better."""
    text, said = tokens[:, :-1], []
    rounding = quantize(model, "int3-g32")
    monkeypatch.setattr(quantizing, "awq_scales", scales_that_do_harm)
    tried = itertools.count()

    def layers_seem_better(model, text, change, judged, *output):
        layer_by_layer(
            model, text, lambda *given: change(*given[:3], lambda layer: float(next(tried))), judged, *output
        )

    monkeypatch.setattr(quantizing, "layer_by_layer", layers_seem_better)
    given = copy.deepcopy(model)
    made = quantize(given, "int3-g32-awq", text, in_place=in_place, say=said.append)
    assert torch.equal(made(text[:2]), rounding(text[:2]))
    assert (made is given) == in_place
    assert said[-1].startswith("awq does worse than rounding on text held back")


def test_awq_is_rounding_where_its_loss_is_larger_although_its_predictions_are_closer(model, tokens, monkeypatch):
    text = tokens[:, :-1]
    rounding = quantize(model, "int2-g32")
    taken = quantize(model, "int2-g32-awq", text)
    assert not torch.equal(taken(text[:2]), rounding(text[:2]))
    order = itertools.cycle([1.0, 1.0, 0.5, 0.4])  # two sequences held back, by AWQ and by rounding
    monkeypatch.setattr(quantizing, "mean_loss", lambda *_: next(order))
    assert torch.equal(quantize(model, "int2-g32-awq", text)(text[:2]), rounding(text[:2]))


@pytest.mark.parametrize("recipe", ["int3-g32-awq", "int2-g32-awq", "int2-g32-clip", "int2-awq"])
def test_predictions_on_text_held_back_stay_closer_than_with_rounding(recipe, model, tokens):
    text = tokens[:, :-1]
    other = held_back(text)[1]
    rounding = quantize(model, recipe.rpartition("-")[0])
    small = quantize(model, recipe, text)
    assert mean_divergence(small, model, other) <= mean_divergence(rounding, model, other)


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_written_comes_back_bit_for_bit(name, model, tokens, tmp_path):
    small = shrink(model, name, tokens)
    huggingface.save(small, tmp_path)
    again = huggingface.load(tmp_path).eval().requires_grad_(False)
    assert torch.equal(again(tokens[:2, :-1]), small(tokens[:2, :-1]))
    assert model_bytes(again) == model_bytes(small) < model_bytes(model)
    plain = dict(huggingface.read_parameters(tmp_path))
    assert plain.keys() == dict(model.named_parameters()).keys()
    for key, value in plain.items():
        assert value.shape == model.get_parameter(key).shape


def by_their_definition(tensors: dict[str, torch.Tensor], name: str, weights: dict[str, Any]) -> torch.Tensor:
    """A matrix as compressed-tensors reads it: bits from dense 32-bit words, plus 2^(bits - 1); (code - zero) scale."""

    def unpacked(words: torch.Tensor, count: int) -> torch.Tensor:
        rows = [sum((word % 2**32) << 32 * place for place, word in enumerate(row)) for row in words.tolist()]
        bits = weights["num_bits"]
        return torch.tensor([[(row >> bits * k) % 2**bits - 2 ** (bits - 1) for k in range(count)] for row in rows])

    scale, zero = tensors[f"{name}.weight_scale"].double(), tensors.get(f"{name}.weight_zero_point")
    if f"{name}.weight_packed" in tensors:
        outputs, inputs = tensors[f"{name}.weight_shape"].tolist()
        codes = unpacked(tensors[f"{name}.weight_packed"], inputs)
        zero = zero if zero is None else unpacked(zero.t(), outputs).t()
    else:
        codes = tensors[f"{name}.weight"].double()
    groups = codes.double().reshape(len(codes), scale.shape[1] if scale.dim() > 1 else 1, -1)
    return ((groups - (0 if zero is None else zero.double()[..., None])) * scale[..., None]).reshape(codes.shape)


@pytest.mark.parametrize(
    "name",
    ["int2-g32", "int3", "int3-g32-affine", "int4-g32-affine", "int8-g32-affine", "int4-g32-a8", "int4-g32+int8"],
)
def test_folders_of_whole_numbers_are_compressed_tensors(name, model, tokens, tmp_path):
    small = shrink(model, name.removesuffix("+int8"), tokens)
    if name.endswith("+int8"):  # as a mixed recipe may decide
        plain = model.layers[0].mlp.fc_in
        put(small, "layers.0.mlp.fc_in", few_bits(plain, Scheme(), codes.quantize(plain.weight, Scheme())))
    huggingface.save(small, tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert told["quant_method"] == "compressed-tensors"
    assert told["format"] in {group["format"] for group in told["config_groups"].values()} | {"mixed-precision"}
    tensors, theirs = load_file(tmp_path / "model.safetensors"), lowbit_files._their_names(small)
    kept = {theirs[key]: module for key, module in projections(small) if isinstance(module.kind, FewBits)}
    groups = {target: group for group in told["config_groups"].values() for target in group["targets"]}
    assert groups.keys() == kept.keys()
    for target, group in groups.items():
        meant = by_their_definition(tensors, target, group["weights"])
        torch.testing.assert_close(meant, kept[target].kind.decoded(kept[target], torch.float64), rtol=0, atol=0)
    again = huggingface.load(tmp_path).eval().requires_grad_(False)
    assert torch.equal(again(tokens[:2, :-1]), small(tokens[:2, :-1]))


@pytest.mark.parametrize("name", ["nf4-g32", "int2-g32-2level", "rank-50"])
def test_folders_that_only_we_can_read_are_refused_by_transformers(name, model, tokens, tmp_path):
    """There they were loaded with random matrices; folders of before, with the usual name, still load here."""
    huggingface.save(model, tmp_path)  # plain weights, which must not stay beside a config.json of others
    small = shrink(model, name, tokens)
    huggingface.save(small, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [huggingface.OWN_WEIGHTS]
    transformers = pytest.importorskip("transformers")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / huggingface.OWN_WEIGHTS).rename(tmp_path / huggingface.WEIGHTS)
    assert torch.equal(huggingface.load(tmp_path).eval()(tokens[:2, :-1]), small(tokens[:2, :-1]))


@pytest.mark.parametrize("kind", ["gpt", "neox"])
def test_families_with_joined_and_transposed_matrices_come_back_too(kind, tmp_path):
    config = MODELS[kind].replace(context=64, score_sink=False)
    plain = Transformer(config, seed=1).eval().requires_grad_(False)
    small = quantize(plain, "int4-g8")
    huggingface.save(small, tmp_path)
    tokens = torch.randint(0, config.vocabulary, (1, 20))
    with torch.no_grad():  # the same way of multiplying for both
        assert torch.equal(huggingface.load(tmp_path).eval()(tokens), small(tokens))


def test_zeros_of_so_few_outputs_that_a_word_holds_them_are_read(tmp_path: Any) -> None:
    heads = {"heads": 4, "kv_heads": 1, "tied": False, "biases": False}  # keys have 4 outputs, of 4 bits each
    config = ModelConfig(layers=1, width=16, vocabulary=32, context=8, norm="rmsnorm", positions="rotary",
                         activation="swiglu", **heads)  # fmt: skip
    small = quantize(Transformer(config, seed=1).eval(), "int4-g8-affine")
    huggingface.save(small, tmp_path)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(huggingface.load(tmp_path).eval()(tokens), small(tokens))


@pytest.mark.parametrize("activation", ["swiglu", "swiglu-clipped"])
def test_moved_scales_change_nothing_by_themselves(activation, model, tokens, monkeypatch):
    """In 16-bit fixed point a moved scale shows, and rounding does not."""
    monkeypatch.setattr(quantizing, "JUDGED", ())  # all scales are kept
    model = Transformer(model.config.replace(activation=activation), seed=3).eval().requires_grad_(False)
    for value in model.parameters():  # channels of different size, as trained models have
        value.mul_(torch.exp(torch.randn(value.shape[-1:], generator=torch.Generator().manual_seed(1))))
    before = model(tokens[:2, :-1])
    smooth = Recipe(weights=WeightsRecipe(scheme="fixed16"), activations=ActivationsRecipe(smooth=0.5))
    for recipe in (read_recipe("fixed16-awq"), smooth):
        after = quantize(model, recipe, tokens[:, :-1])(tokens[:2, :-1])
        assert (after - before).norm() < 2e-3 * before.norm()


def test_the_output_projection_is_quantised_by_the_method_with_what_enters_it(tokens):
    plain = Transformer(preset("tiny").replace(layers=1, tied=False), seed=3).eval().requires_grad_(False)
    with torch.no_grad():
        spread = torch.randn(plain.final_norm.weight.shape, generator=torch.Generator().manual_seed(1))
        plain.final_norm.weight.mul_(torch.exp(spread))
    text, other = tokens[:6, :-1], tokens[6:, :-1]
    found = InputStatistics.empty(plain.config.width, torch.device("cpu"))
    found.add(last_activations(plain, text))

    def made(method: str) -> Transformer:
        weights = WeightsRecipe(scheme="int3-g32", method=method, layers=("output",))
        return quantize(plain, Recipe(weights=weights), text)

    expected = gptq(plain.output.weight, parse_scheme("int3-g32"), found)
    by_gptq = made("gptq").output
    assert torch.equal(codes.unpack(by_gptq.codes, parse_scheme("int3-g32").number, 128), expected.codes)
    nearest = mean_divergence(made("nearest"), plain, other)
    for method in ("gptq", "clip", "awq"):
        assert mean_divergence(made(method), plain, other) < 0.8 * nearest
    assert not torch.equal(made("awq").final_norm.weight, plain.final_norm.weight)  # it takes up the scales


def test_the_output_projection_is_rounded_where_a_method_moves_the_logits_more(tokens, monkeypatch):
    plain = Transformer(preset("tiny").replace(layers=1, tied=False), seed=3).eval().requires_grad_(False)
    recipe = Recipe(weights=WeightsRecipe(scheme="int3-g32", method="awq", layers=("output",)))
    bad = MovedScales(torch.logspace(-3, 3, plain.config.width), 0.0)
    monkeypatch.setattr(quantizing, "awq_scales", lambda *_: bad)
    made = quantize(plain, recipe, tokens[:, :-1])
    nearest = quantize(plain, Recipe(weights=replace(recipe.weights, method="nearest")))
    assert torch.equal(made.output.codes, nearest.output.codes)
    assert torch.equal(made.final_norm.weight, plain.final_norm.weight)


def test_bias_correction_keeps_the_mean():
    config = MODELS["gpt"].replace(dropout=0.0, context=64)
    plain = Transformer(config, seed=1).eval().requires_grad_(False)
    text = torch.randint(0, config.vocabulary, (16, 48), generator=torch.Generator().manual_seed(1))
    corrected = quantize(plain, "int2-g8-bias", text)
    biases = [m.bias for _, m in projections(corrected) if isinstance(m.kind, FewBits)]
    assert all(bias is not None and bias.abs().sum() > 0 for bias in biases)


@pytest.mark.parametrize("structure", ["heads-50", "mlp-25", "layers-50"])
def test_structured_pruning_gives_an_ordinary_smaller_model(structure, model, tokens, tmp_path):
    small = prune(model, structure)
    assert model_bytes(small) < model_bytes(model)
    huggingface.save(small, tmp_path)
    again = huggingface.load(tmp_path).eval()
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(again(tokens[:2, :-1]), small(tokens[:2, :-1]))


def test_pruning_what_does_nothing_changes_nothing(model, tokens):
    """Channels and heads with zero weights go first, and the output stays."""
    whole = copy.deepcopy(model)
    with torch.no_grad():
        for layer in whole.layers:
            layer.mlp.fc_out.weight[:, ::4] = 0
            layer.mlp.fc_in.weight[::4] = 0
            layer.mlp.fc_gate.weight[::4] = 0
            layer.attention.fc_o.weight[:, :64] = 0
            for part in (layer.attention.fc_q, layer.attention.fc_k, layer.attention.fc_v):
                part.weight[: part.weight.shape[0] // 2] = 0
    before = whole(tokens[:2, :-1])
    for recipe in ("mlp-25", "heads-50"):
        torch.testing.assert_close(prune(whole, recipe)(tokens[:2, :-1]), before, rtol=1e-4, atol=1e-4)


def test_sinks_of_scores_go_with_their_heads():
    config = ModelConfig(layers=1, width=32, heads=4, vocabulary=256, context=64, kv_heads=2, norm="rmsnorm",
                         positions="rotary", activation="swiglu", biases=False, tied=False, head_width=8,
                         score_sink=True)  # fmt: skip
    plain, text = Transformer(config).requires_grad_(False), torch.arange(20)[None]
    attention = plain.layers[0].attention
    attention.sinks.weight.copy_(torch.arange(4.0))
    attention.fc_o.weight[:, :16] = 0
    for part in (attention.fc_q, attention.fc_k, attention.fc_v):
        part.weight[: len(part.weight) // 2] = 0
    small = prune(plain, "heads-50")
    assert small.layers[0].attention.sinks.weight.tolist() == [2, 3]
    torch.testing.assert_close(small(text), plain(text))


@pytest.mark.parametrize(("recipe", "zeros"), [("unstructured-75", 0.75), ("2:4", 0.5)])
def test_unstructured_pruning_sets_zeros(recipe, zeros, model, tokens):
    pruned = prune(model, recipe)
    weight = pruned.layers[0].mlp.fc_in.weight
    assert (weight == 0).float().mean() == pytest.approx(zeros, abs=0.01)
    first = read_recipe(recipe)
    with torch.no_grad():  # as its callers compute
        scored = prune(
            model, first.__class__(prune=PruneRecipe(first.prune.structure, first.prune.amount, "first-order")), tokens
        )
    assert not torch.equal(scored.layers[0].mlp.fc_in.weight, weight)


@pytest.mark.parametrize("structure", ["heads", "layers"])
def test_an_amount_that_takes_nothing_or_all_is_told_which_percentages_do_something(structure, model):
    units = {"heads": model.config.kv_heads, "layers": model.config.layers}[structure]
    for percent, taken in ((1, "none"), (99, "all")):
        with pytest.raises(UsageError, match=f"takes {taken} of this model's {units} ") as caught:
            prune(model, f"{structure}-{percent}")
        least, most = (int(word) for word in re.findall(rf"{structure}-(\d+)", str(caught.value)))
        assert least < most
        for works in (least, most):
            prune(model, f"{structure}-{works}")
        for too_far in (least - 1, most + 1):
            with pytest.raises(UsageError):
                prune(model, f"{structure}-{too_far}")
    single = Transformer(preset("tiny").replace(layers=1, heads=2, kv_heads=1), seed=3)
    with pytest.raises(UsageError, match="cannot go: set it to "):
        prune(single, f"{structure}-50")


def test_fewer_heads_of_a_family_that_cannot_write_them_are_refused_before_anything_is_computed(model):
    """The weights had been judged for a minute before a folder was found to have no place for them."""
    gpt2 = preset("gpt2-124m")
    with pytest.raises(UsageError, match=r"fewer heads of a gpt2 model: .* prune mlp or layers \(mlp-25, layers-25\)"):
        check_writable(gpt2, PruneRecipe("heads", 0.5))
    with pytest.raises(UsageError, match="takes none of this model's 12"):
        check_writable(gpt2, PruneRecipe("heads", 0.01))
    for structure in ("mlp", "layers"):
        check_writable(gpt2, PruneRecipe(structure, 0.25))
    check_writable(model.config, PruneRecipe("heads", 0.5))


def test_gradual_pruning_rises_from_nothing_to_the_amount():
    wanted = PruneRecipe("unstructured", 0.8, begin=0.1, end=0.6)
    rising = [sparsity_at(wanted, place / 20) for place in range(21)]
    assert rising[0] == rising[2] == 0
    assert rising == sorted(rising)
    assert rising[12:] == [0.8] * 9
    at_once = replace(wanted, begin=0.5, end=0.5)
    assert [sparsity_at(at_once, place / 4) for place in range(5)] == [0, 0, 0.8, 0.8, 0.8]


def test_the_rank_of_a_factorisation_keeps_its_share_and_its_error_is_the_best():
    weight, inputs = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)), activations(2)
    rank = rank_of(24, 64, 0.5)
    assert rank * (24 + 64) <= 0.5 * 24 * 64 < (rank + 1) * (24 + 64)
    plain, aware = factors(weight, rank), factors(weight, rank, inputs)
    values = torch.linalg.svdvals(weight)
    assert (plain[0] @ plain[1] - weight).norm() == pytest.approx(float(values[rank:].norm()), rel=1e-3)
    assert output_error(aware[0] @ aware[1] - weight, inputs.gram) < output_error(
        plain[0] @ plain[1] - weight, inputs.gram
    )


def test_a_student_learns_its_teacher(model, tokens):
    student = Transformer(model.config.replace(layers=1), seed=9)
    loss = distill(student, model, share=1.0, temperature=1.0, hidden=0.1)
    inputs, targets = tokens[:2, :-1], tokens[:2, 1:]
    first, count = loss(inputs, targets)
    assert int(count) == targets.numel()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        loss(inputs, targets)[0].backward()
        optimizer.step()
    assert loss(inputs, targets)[0] < 0.9 * first
    copied = copy.deepcopy(model)
    same, _ = distill(copied, model, share=1.0)(inputs, targets)
    assert float(same) == pytest.approx(0, abs=1e-2)
    packed = torch.where(torch.arange(inputs.shape[1]) % 50 == 0, -1 - inputs, inputs)  # both read it alike
    for told, options in ((packed, {"marked": True}), (inputs[:, :64], {"place": DropoutPlace(token=32)})):
        same, _ = distill(copied, model, share=1.0)(told, targets[:, : told.shape[1]], **options)
        assert float(same) == pytest.approx(0, abs=1e-2)
    with pytest.raises(UsageError, match="must share a tokenizer"):
        distill(Transformer(model.config.replace(vocabulary=300)), model)
    with pytest.raises(UsageError, match=r"set distill\.hidden to 0"):
        distill(Transformer(model.config.replace(width=64)), model, hidden=1.0)


@pytest.mark.parametrize(
    ("recipe", "text", "words"),
    [
        ("int4-g48", None, "groups of 48 do not divide 128 inputs"),
        ("int4-g32-gptq", None, "looks at activations: give tokens"),
        ("int4-g32-gptq", 3, "387 tokens to calibrate with: expected at least 512"),
        ("heads-10", None, "prune.amount 0.1 takes none of this model's 2 groups of heads"),
        ("rank-1", None, "leaves rank 0"),
        ("2:4-30", None, "2:4 takes two of every four weights and no percentage"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(recipe, text, words, model, tokens):
    given = None if text is None else torch.randint(0, 256, (text, 130))
    with pytest.raises(UsageError, match=words) as caught:
        shrink(model, recipe, given if recipe != "rank-1" else tokens)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("some text", "tokens are a str: expected a tensor of whole numbers"),
        (torch.zeros(8, 128), "tokens are torch.float32"),
        (torch.full((8, 128), 999), "token 999 in the text to calibrate with: the model has 256"),
        (torch.full((8, 128), 256), "token 256 in the text to calibrate with: the model has 256"),
        (torch.full((8, 128), -1), "token -1 "),
    ],
)
def test_calibration_text_that_is_none_is_refused(text, words, model):
    with pytest.raises(UsageError, match=words):
        quantize(model, "int4-g32-gptq", text)


def test_a_compressed_model_is_not_compressed_again_and_one_with_adapters_not_without_them(model, tokens):
    adapted = copy.deepcopy(model)
    attach(adapted, LoraConfig(rank=2), seed=0)
    for given, words in ((quantize(model, "int8"), "compressed already"), (adapted, "a model with adapters")):
        for again in (quantize, prune, factorize):
            recipe = {quantize: "int8", prune: "mlp-25", factorize: "rank-50"}[again]
            with pytest.raises(UsageError, match=words):
                again(given, recipe)


def test_matrices_of_latents_are_not_calibrated_by_what_enters_others():
    """They had stayed as they were, or were fitted to what enters the queries'."""
    config = ModelConfig(layers=1, width=16, heads=2, vocabulary=256, context=64, norm="rmsnorm", positions="rotary",
                         activation="swiglu", biases=False, tied=False, head_width=6, rotary_fraction=1 / 3,
                         latent_width=16)  # fmt: skip
    plain, text = Transformer(config).requires_grad_(False), torch.zeros(8, 65, dtype=torch.long)
    for recipe in ("int8-gptq", "int8-a8-smooth", "int8-mixed", "rank-50"):
        with pytest.raises(UsageError, match="with latent attention by a recipe that looks at text"):
            shrink(plain, recipe, text)
    assert isinstance(shrink(plain, "int8").layers[0].attention.fc_latent.kind, FewBits)
    for recipe in (Recipe(rank=RankRecipe(0.5, aware=False)), "mlp-25", "2:4"):
        shrink(plain, recipe)(text[:, :-1])


def test_a_module_that_is_no_transformer_is_refused(model):
    """Pruning single weights of one once returned it as it was, without a word."""
    other = torch.nn.Sequential(torch.nn.Linear(4, 4))
    ways = {
        "quantise": lambda: quantize(other, "int8"),
        "prune": lambda: prune(other, "2:4"),
        "factorise": lambda: factorize(other, "rank-50"),
        "distil into": lambda: distill(other, model),
        "distil from": lambda: distill(model, other),
    }
    for words, way in ways.items():
        with pytest.raises(UsageError, match=f"cannot {words} a Sequential: expected a tilemesh Transformer"):
            way()


def test_mixed_bits_take_no_more_bytes_than_uniform_ones_and_lose_less(model, tokens):
    held = torch.randint(0, 256, (8, 129), generator=torch.Generator().manual_seed(6))
    uniform, mixed = quantize(model, "int3-g32", tokens[:, :-1]), quantize(model, "int3-g32-mixed", tokens[:, :-1])
    assert model_bytes(mixed) <= model_bytes(uniform)
    plain = mean_loss(model, held[:, :-1], held[:, 1:])
    assert abs(mean_loss(mixed, held[:, :-1], held[:, 1:]) - plain) < 1


def test_too_few_mixed_bits_are_told_how_many_would_do(model, tokens, monkeypatch):
    def made(bits: float) -> Transformer:
        return quantize(model, Recipe(weights=WeightsRecipe(scheme="int4-g32", bits=bits)), tokens[:, :-1])

    with monkeypatch.context() as patch:
        patch.setattr(mixed, "sensitivities", None)  # nothing is measured before
        with pytest.raises(UsageError, match=r"set it to at least \S+$") as caught:
            made(0.5)
    least = float(str(caught.value).rpartition(" ")[2])
    made(least)
    with pytest.raises(UsageError, match="set it to at least"):
        made(least - 0.02)


def test_config_of_a_config_with_wide_heads_survives_head_pruning():
    config = ModelConfig(layers=1, width=64, heads=4, vocabulary=32, context=16, kv_heads=4, head_width=32,
                         norm="rmsnorm", positions="rotary", activation="swiglu", biases=False, tied=False)  # fmt: skip
    small = prune(Transformer(config, seed=1).requires_grad_(False), "heads-50")
    assert (small.config.heads, small.config.kv_heads, small.config.head_width) == (2, 2, 32)
