"""Programs: each computes what the definition does, for every family; which are chosen, and why the others are not."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.data.tokenizer import Unknown
from tilemesh.kernels.few_linear.cpu import few_product
from tilemesh.kernels.lowbit.codes import quantize
from tilemesh.kernels.lowbit.formats import parse_scheme
from tilemesh.kernels.paged_attention.cpu import turn_and_store
from tilemesh.model import huggingface
from tilemesh.model.cache import DenseCache
from tilemesh.model.config import ModelConfig
from tilemesh.model.kernels import OURS, PLAIN, STANDARD
from tilemesh.model.kinds import few_bits, put
from tilemesh.model.programs import definition, ends, few_tokens, fused_mlp, joined, one_token, products, rows_on_cpu
from tilemesh.model.programs.explain import explain
from tilemesh.model.programs.group import as_one, layer_groups
from tilemesh.model.programs.prepare import PROGRAMS, Prepared, prepare
from tilemesh.model.programs.program import CUT_OTHERWISE, TRAINING, LayerProgram, Use, row_class
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.gate.alone import compress_all
from tilemesh.parallel.gate.cases import PAPERS
from tilemesh.serve import Engine
from tilemesh.serve.load import ServedModel
from tilemesh.serve.request import ServeRequest
from tilemesh.serve.runner import Runner
from tilemesh.serve.scheduler import Scheduler, ServeLimits
from tilemesh.train.load import load
from tilemesh.train.plain import planned_programs

DEFINITION = (definition.ATTENTION, definition.MLP)
REFERENCE_FEW = dataclasses.replace(few_tokens.FEW, implementation="torch")
SERVING = (products.ATTENTION, products.MLP, one_token.GATE, one_token.NORMS, REFERENCE_FEW)
TRAINED = (joined.JOINED, fused_mlp.FUSED_MLP, ends.EMBEDDING, ends.PROJECTION)
SERVES = Use(side_by_side=True, single_rows=True, launches_early=True)
TRAINS = Use(trains=True, compiled=True, casts=True, aligns_vocabulary=True)
LLAMA = ModelConfig(
    layers=2, width=128, heads=4, kv_heads=2, mlp_width=256, vocabulary=64, context=64, norm="rmsnorm",
    positions="rotary", activation="swiglu", biases=False, tied=False,
)  # fmt: skip


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float64, **options: Any) -> Transformer:
    """No weight is 0 or 1, and all are exact in 16 bits: models of other dtypes have the same."""
    model = Transformer(config.replace(dropout=0.0), seed=1, dtype=torch.float64, **options)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)  # fresh weights say next to nothing
            parameter.add_(0.1 * torch.empty(parameter.shape).normal_(generator=generator))
            parameter.copy_(parameter.to(torch.bfloat16))
    return model.to(dtype)


def limits_of(config: ModelConfig) -> ServeLimits:
    return ServeLimits(
        pages=40, context=config.context, page_tokens=4, step_tokens=64, chunk_tokens=64, running=8
    )  # fmt: skip


def used_by(programs: Prepared) -> set[str]:
    """Names of all that were chosen somewhere."""
    chosen = {program.name for layers in programs.choices.values() for choice in layers for program in choice.programs}
    return chosen | {name for name, reason in programs.ends.items() if not reason}


def reasons(programs: Prepared, program: LayerProgram) -> set[str]:
    """Why layers are not computed by this one."""
    return {
        choice.refused[program.name] for choice in programs.choices[program.rows[-1]] if program.name in choice.refused
    }


def decoded(config: ModelConfig, requests: int, use: Use, programs: Sequence[LayerProgram]) -> tuple[Tensor, set[str]]:
    """Logits of a step with prompts and of steps in which all requests decode; drawn tokens are given."""
    model = model_of(config).eval().requires_grad_(False)
    runner = Runner(model, limits_of(config), implementation="torch", packed=False)
    runner.programs = prepare(model, use, programs=programs)
    return steps(runner, config, requests), used_by(runner.programs)


def steps(runner: Runner, config: ModelConfig, requests: int) -> Tensor:
    scheduler, draw, found = Scheduler(runner.limits), random.Random(2), []
    for number in range(requests):
        scheduler.add(ServeRequest(str(number), [draw.randrange(config.vocabulary) for _ in range(2 + number)], 3))
    while scheduler.busy:
        plan = scheduler.plan()
        logits = runner.run(plan)
        found += [logits[entry.request.name].logits_NV.double() for entry in plan.entries]
        scheduler.commit(plan, {entry.request.name: [draw.randrange(config.vocabulary)] for entry in plan.entries})
    return torch.cat(found)


# Equal to the definition ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("name", PAPERS)
def test_every_program_that_serves_computes_the_definition(name: str, requests: int) -> None:
    config = PAPERS[name]
    exact, _ = decoded(config, requests, SERVES, DEFINITION)
    for program in SERVING:
        found, used = decoded(config, requests, SERVES, (*DEFINITION, program))
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-11 * float(exact.abs().max()))
        assert (program.name in used) == (name in APPLIES[program.name]), program.name


_GEMMA = {"gemma2", "gemma3_text"}
_GATED = {"llama", "llama3", "yarn", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "qwen2_moe", "deepseek_v2", *_GEMMA}
_SILU = _GATED - _GEMMA
_NORM_FIRST = {"llama", "yarn", "mistral"}
"""RMSNorm before each block, heads turned whole, no bias."""
APPLIES = {
    products.ATTENTION.name: {*PAPERS} - {"deepseek_v2", "deepseek_v3"}, products.MLP.name: _GATED,
    one_token.GATE.name: _SILU,
    one_token.NORMS.name: _NORM_FIRST, few_tokens.FEW.name: _NORM_FIRST,
    joined.JOINED.name: {"gpt2", "post"}, fused_mlp.FUSED_MLP.name: {"gpt2", "gpt_neox", "neox", "post"},
    ends.EMBEDDING.name: {*PAPERS} - {*_GEMMA, "post"}, ends.PROJECTION.name: {*PAPERS},
}  # fmt: skip


# In C, on a CPU: float32 alone, so that what a step is off by is held against what the definition is off by.
_IN_C = (rows_on_cpu.IN_C, rows_on_cpu.STEP)
_QUEUE = [(5, 4), (90, 5), (1, 6), (17, 3), (200, 4)]
"""Tokens of prompts, and of answers: steps that decode, with prompts in them, and of more tokens than few."""


def served_steps(
    config: ModelConfig, dtype: torch.dtype, programs: Sequence[LayerProgram] | None
) -> tuple[Tensor, Any]:
    """`programs`: beside the definition; None: the definition over gathered pages."""
    model = model_of(config, dtype).eval().requires_grad_(False)
    limits = ServeLimits(pages=60, context=config.context, page_tokens=16, step_tokens=128, chunk_tokens=64, running=4)
    runner = Runner(model, limits, packed=False, implementation="torch" if programs is None else "auto")
    use = Use(side_by_side=programs is not None)
    runner.programs = prepare(model, use, programs=(*DEFINITION, *(programs or ())))
    scheduler, draw, found = Scheduler(limits), random.Random(2), []
    for number, (prompt, output) in enumerate(_QUEUE):
        scheduler.add(ServeRequest(str(number), [draw.randrange(config.vocabulary) for _ in range(prompt)], output))
    while scheduler.busy:
        plan = scheduler.plan()
        logits = runner.run(plan)
        found += [
            logits[entry.request.name].logits_NV.double() for entry in plan.entries if entry.request.name in logits
        ]
        sampled = {entry.request.name: [draw.randrange(config.vocabulary)] for entry in plan.entries if entry.samples}
        scheduler.commit(plan, sampled)
    return torch.cat(found), runner.programs


@pytest.mark.skipif(rows_on_cpu.library() is None, reason="no C compiler here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "yarn", "odd"])
def test_functions_in_c_are_as_exact_as_the_definition(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths that no vector divides, biases, windows and a cap among them."""
    monkeypatch.setattr(rows_on_cpu, "multiplies_few", lambda dtype: True)  # on arm64 it is tried as well
    odd = LLAMA.replace(
        width=60, heads=6, kv_heads=3, mlp_width=91, vocabulary=67, score_cap=4.0, logit_cap=9.0, biases=True
    )
    config = (odd if name == "odd" else PAPERS[name]).replace(context=256)
    exact, _ = served_steps(config, torch.float64, None)
    plain, _ = served_steps(config, dtype, None)
    off = float((plain - exact).norm())
    for program in _IN_C:
        found, programs = served_steps(config, dtype, (program,))
        assert program.name in used_by(programs)
        # Sums of float32 in another order; in bfloat16 less is rounded on the way, and a layer's result as often.
        most = 3.0 if dtype is torch.float32 else 1.1
        assert 0 < float((found - exact).norm()) < most * off, program.name


@pytest.mark.skipif(rows_on_cpu.library() is None, reason="no C compiler here")
def test_a_product_with_a_stored_bfloat16_is_that_with_the_float_it_means() -> None:
    """Bit for bit, whatever the numbers of rows, outputs and inputs; infinities, zeros' signs and the smallest too."""
    generator = torch.Generator().manual_seed(5)
    for rows, outputs, inputs in ((1, 64, 128), (5, 67, 91), (64, 130, 48), (3, 1, 1)):
        x, weight = (torch.randn(size, inputs, generator=generator) for size in (rows, outputs))
        weight[0, 0], weight[-1, -1] = -0.0, 1e-40
        weight, bias = weight.bfloat16(), torch.randn(outputs, generator=generator).bfloat16()
        found = few_product(x, weight, bias)
        assert torch.equal(found, few_product(x, weight.float(), bias.float()))
        assert found.dtype is torch.float32
    assert few_product(torch.ones(1, 1), torch.tensor([[float("inf")]]).bfloat16()).isinf().all()


@pytest.mark.skipif(rows_on_cpu.library() is None, reason="no C compiler here")
def test_keys_and_values_are_rounded_to_bfloat16_as_torch_rounds() -> None:
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.00390625, 1.01171875, 3.4e38, 1e-40, -1e-45]
    row = torch.cat((torch.tensor(special), torch.randn(6, generator=torch.Generator().manual_seed(6))))
    keys, values = (torch.zeros(2, 4, 1, 16, dtype=torch.bfloat16) for _ in range(2))
    q = turn_and_store(torch.cat((row, row, -row))[None], None, torch.tensor([5]), keys, values, 1)
    assert torch.equal(q.view(torch.int32), row.view(1, 1, 16).view(torch.int32))
    for found, exact in ((keys, row), (values, -row)):
        torch.testing.assert_close(found[1, 1, 0], exact.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert not keys[0].any()
    assert not values[1, 2:].any()


def test_functions_in_c_say_why_they_are_not_taken() -> None:
    model = model_of(LLAMA, torch.float32).eval().requires_grad_(False)
    other = model_of(LLAMA).eval().requires_grad_(False)
    assert reasons(prepare(other, Use()), rows_on_cpu.IN_C) == {"its functions are for serving in float32 and bfloat16"}
    for use, reason in (
        (Use(), "the cache wants queries, keys and values apart"),
        (Use(invariant=True), CUT_OTHERWISE),  # the last one: the model stays so
    ):
        if rows_on_cpu.library() is not None:
            assert reasons(prepare(model, use), rows_on_cpu.STEP) == {reason}


def gradients(programs: Callable[..., Tensor], model: Transformer, tokens: Tensor) -> list[Tensor]:
    logits = programs(tokens)
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    return [logits, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("name", PAPERS)
def test_every_program_that_trains_has_the_definitions_gradients(name: str) -> None:
    config = PAPERS[name]
    model = model_of(config, kernels=dataclasses.replace(OURS, projections="torch"))
    tokens = torch.randint(config.vocabulary, (2, 6), generator=torch.Generator().manual_seed(0))
    exact = gradients(model, model, tokens)
    for program in TRAINED:
        programs = prepare(model, TRAINS, programs=(*DEFINITION, program))
        assert (program.name in used_by(programs)) == (name in APPLIES[program.name]), program.name
        for mine, theirs in zip(gradients(programs, model, tokens), exact, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernels", [STANDARD, PLAIN, OURS], ids=["standard", "torch", "ours"])
def test_the_loss_without_logits_is_that_of_the_logits(kernels: Any) -> None:
    model = model_of(PAPERS["gpt2"], kernels=kernels)
    programs = prepare(model, TRAINING)
    assert (programs.loss_sum is not None) == (kernels is OURS)
    if programs.loss_sum is not None:
        x, targets = torch.randn(2, 5, model.config.width, dtype=torch.float64), torch.tensor([[1, 2, -100, 3, 4]] * 2)
        total, count = programs.loss_sum(x, targets)
        wanted = functional.cross_entropy(model.project(x).flatten(0, 1), targets.flatten(), reduction="sum")
        torch.testing.assert_close(total, wanted)
        assert count == 8


def test_a_few_tokens_by_interpreted_kernels_are_as_near_as_the_models_own_layers() -> None:
    """In 16 bits both round; neither may be much further from float64 than the other."""
    pytest.importorskip("triton")
    found = {}
    for dtype, program in ((torch.float64, None), (torch.bfloat16, None), (torch.bfloat16, "interpret")):
        model = model_of(LLAMA, dtype).eval().requires_grad_(False)
        runner = Runner(model, limits_of(LLAMA), implementation="torch" if program is None else "interpret")
        if program is not None:
            some = dataclasses.replace(few_tokens.FEW, implementation=program)
            runner.programs = prepare(model, SERVES, programs=(*DEFINITION, some))
            assert used_by(runner.programs) == {"definition", some.name}
        found[dtype, program] = steps(runner, LLAMA, 3)
    exact, plain, few = found.values()
    assert float((few - exact).norm()) < 1.5 * float((plain - exact).norm())
    assert float((few - exact).norm()) < 0.05 * float(exact.norm())


# Chosen ---------------------------------------------------------------------------------------------------------------


def test_classes_of_rows() -> None:
    assert [row_class(rows) for rows in (1, 2, 64, 65)] == ["1", "2-64", "2-64", "more"]


def test_what_serves_a_plain_model_on_a_gpu() -> None:
    model = model_of(LLAMA, torch.bfloat16).eval().requires_grad_(False)
    programs = prepare(model, SERVES)
    names = {rows: [[program.name for program in choice.programs] for choice in programs.choices[rows]]
             for rows in programs.choices}  # fmt: skip
    assert names == {
        "1": [[products.ATTENTION.name, one_token.GATE.name], [one_token.NORMS.name]],
        "2-64": [[few_tokens.FEW.name]] * 2,
        "more": [[products.ATTENTION.name, products.MLP.name]] * 2,
    }
    first, second = programs.choices["1"]
    assert first.refused[one_token.NORMS.name] == "before the first layer's norm there is nothing to add"
    assert first.refused[joined.JOINED.name] == "weights in a row would be copied in every pass"
    assert second.refused[products.MLP.name].startswith("predicted ")
    assert second.seconds < first.seconds


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"norm": "layernorm"}, "a norm is no plain RMSNorm"),
        ({"biases": True}, "a projection has a bias"),
        ({"activation": "gelu"}, "there is no gate"),
        ({"qk_norm": "head"}, "queries and keys are normalized"),
        ({"rotary_fraction": 0.5}, "rotary positions turn a part of each head"),
        ({"width": 96}, "there is no kernel for a matrix of 192 by 96"),
    ],
)
def test_other_layers_are_no_few_tokens(changes: dict[str, object], why: str) -> None:
    model = model_of(LLAMA.replace(**changes), torch.bfloat16).eval().requires_grad_(False)
    assert reasons(prepare(model, SERVES), few_tokens.FEW) == {why}


@pytest.mark.parametrize(
    ("use", "why"),
    [
        ({"invariant": True}, "its sums are cut otherwise than those of other numbers of rows"),
        ({"launches_early": False}, "kernels here are not launched before the one ahead has ended"),
        ({"side_by_side": False}, "the cache wants queries, keys and values apart"),
    ],
)
def test_other_uses_have_no_few_tokens(use: dict[str, bool], why: str) -> None:
    model = model_of(LLAMA, torch.bfloat16).eval().requires_grad_(False)
    assert reasons(prepare(model, dataclasses.replace(SERVES, **use)), few_tokens.FEW) == {why}


def test_backward_in_halves_and_updates_under_way_leave_out_what_copies_or_joins() -> None:
    model = model_of(PAPERS["gpt2"], kernels=OURS)
    plain = used_by(prepare(model, TRAINS))
    assert {joined.JOINED.name, fused_mlp.FUSED_MLP.name} <= plain
    assert used_by(prepare(model, dataclasses.replace(TRAINS, puts_off=True))) & plain == {
        definition.ATTENTION.name, ends.EMBEDDING.name, ends.LOSS.name, ends.PROJECTION.name,
    } & plain  # fmt: skip
    meanwhile = used_by(prepare(model, dataclasses.replace(TRAINS, updates_meanwhile=True)))
    assert fused_mlp.FUSED_MLP.name in meanwhile
    assert joined.JOINED.name not in meanwhile


def test_a_matrix_of_another_kind_is_not_passed_by() -> None:
    """A program that reads weights is for dense ones alone: also where another kind has a weight among its pieces."""
    from tilemesh.model.lora import LoraConfig, attach

    model = model_of(PAPERS["gpt2"], kernels=OURS)
    attach(model, LoraConfig(rank=2, targets=("fc_v", "fc_in")), seed=0)
    programs = prepare(model, TRAINS)
    assert not {joined.JOINED.name, fused_mlp.FUSED_MLP.name} & used_by(programs)


# Storage --------------------------------------------------------------------------------------------------------------


def test_projections_lie_in_one_storage_and_keep_their_names() -> None:
    model, plain = (model_of(LLAMA).eval().requires_grad_(False) for _ in range(2))
    programs = prepare(model, Use())
    layer: Any = model.layers[0]
    heads, gated, *_ = programs.groups[0]
    assert heads is not None
    assert gated is not None
    assert heads.widths == [128, 64, 64]
    assert layer.attention.fc_k.weight.data_ptr() == heads.layer.weight[128:].data_ptr()
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in plain.state_dict().items()
    }
    with torch.no_grad():
        layer.attention.fc_v.weight.mul_(2)
    x = torch.randn(3, 128, dtype=torch.float64)
    torch.testing.assert_close(heads(x)[:, 192:], functional.linear(x, layer.attention.fc_v.weight))
    again = prepare(model, Use()).groups[0].heads
    assert again is not None
    assert again.layer.weight.data_ptr() == heads.layer.weight.data_ptr()  # found, not copied


@pytest.mark.parametrize("scheme", ["", "int8"])
@pytest.mark.parametrize("config", [LLAMA, PAPERS["gpt2"]], ids=["llama", "gpt2"])
def test_a_model_that_is_read_has_one_storage_for_each_group(config: ModelConfig, scheme: str, tmp_path: Path) -> None:
    """So nothing is copied when it is prepared to serve; files, names and values are what they were."""
    saved = model_of(config, torch.float32).requires_grad_(False)
    if scheme:
        compress_all(saved, scheme)
    huggingface.save(saved, tmp_path)
    model = huggingface.load(tmp_path).requires_grad_(False)
    before = {name: value.data_ptr() for name, value in model.named_parameters()}
    groups = prepare(model, Use()).groups
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == before
    assert (groups[0].gated is not None) == (config.activation == "swiglu")
    storages = {value.untyped_storage().data_ptr() for name, value in model.named_parameters() if ".fc_" in name}
    pieces = sum(".fc_" in name for name in before)
    per_layer = len({name.rpartition(".")[2] for name in before if "fc_q" in name})
    # Three matrices become one, and gate and first projection one.
    assert len(storages) == pieces - config.layers * per_layer * (3 if config.activation == "swiglu" else 2)
    for name, value in saved.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), value, rtol=0, atol=0)
    huggingface.save(model, tmp_path / "again")
    again = huggingface.load(tmp_path / "again")
    assert all(torch.equal(value, again.get_parameter(name)) for name, value in model.named_parameters())


def test_what_lies_under_one_another_is_one() -> None:
    whole = torch.arange(24.0).view(6, 4)
    one = as_one([whole[:1], whole[1:4], whole[4:]])
    assert one is not None
    assert torch.equal(one, whole)
    assert one.data_ptr() == whole.data_ptr()
    assert as_one([whole[1:4], whole[:1]]) is None
    assert as_one([whole[:2], whole[3:]]) is None
    assert as_one([whole[:2], whole[2:].clone()]) is None


def test_projections_stay_apart_where_they_must() -> None:
    model = model_of(LLAMA)
    layer: Any = model.layers[0]
    assert layer_groups(layer).heads_apart == "weights are trained"
    model.requires_grad_(False)
    hook = layer.attention.fc_k.register_forward_pre_hook(lambda module, given: None)
    assert layer_groups(layer).heads_apart == "somebody listens to them"
    hook.remove()
    assert layer_groups(layer).heads is not None
    put(model, "layers.0.attention.fc_k", few_bits_of(layer.attention.fc_k))
    assert layer_groups(layer).heads_apart == "their matrices are of several kinds"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_model_of_which_some_matrices_are_compressed_is_computed(dtype: torch.dtype, activation: Any) -> None:
    model = model_of(LLAMA.replace(activation=activation), dtype).eval().requires_grad_(False)
    for name in ("attention.fc_q", "attention.fc_o", "mlp.fc_in"):
        layer = model.get_submodule(f"layers.0.{name}")
        put(model, f"layers.0.{name}", few_bits_of(layer))
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(prepare(model, Use())(tokens), model(tokens), rtol=1e-2, atol=1e-2)


def test_few_bits_with_a_bias_have_no_gate_inside_their_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whose kernel for one token takes no bias."""
    monkeypatch.setattr("tilemesh.model.programs.group.takes_one_token", lambda *given: True)
    for biases in (False, True):
        model = model_of(LLAMA.replace(biases=biases)).requires_grad_(False)
        layer: Any = model.layers[0]
        for name in ("fc_gate", "fc_in"):
            put(layer.mlp, name, few_bits_of(getattr(layer.mlp, name)))
        gated = layer_groups(layer).gated
        assert gated is not None
        assert gated.takes_row(layer.mlp_norm.weight) != biases


def few_bits_of(layer: Any) -> Any:
    scheme = parse_scheme("int8")
    return few_bits(layer, scheme, quantize(layer.weight, scheme))


def test_hooks_before_a_block_are_called_before_its_program() -> None:
    """As where a region cut over ranks begins."""
    model = model_of(LLAMA).eval().requires_grad_(False)
    seen = []
    for layer in model.layers:
        layer.attention.register_forward_pre_hook(lambda module, given: seen.append(1) or (2 * given[0], *given[1:]))
        layer.mlp.register_forward_pre_hook(lambda module, given: seen.append(2) or (given[0] / 2,))
    programs, tokens = prepare(model, Use()), torch.arange(5)[None]
    assert products.ATTENTION.name in used_by(programs)
    found = programs(tokens, cache=DenseCache(1, 8).extend(5))
    assert seen == [1, 2, 1, 2]
    torch.testing.assert_close(found, model(tokens, cache=DenseCache(1, 8).extend(5)), rtol=1e-11, atol=1e-11)


def test_programs_of_all_layers_are_compiled_once() -> None:
    config = PAPERS["gpt2"].replace(layers=5)
    model = model_of(config, kernels=dataclasses.replace(OURS, attention="torch", norms="torch", projections="torch"))
    programs, graphs = prepare(model, TRAINS), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    tokens = torch.arange(5)[None]
    now = model.prepare(tokens)
    stream = own = model.layers[0](_stream(model.embed(tokens, now)), now)
    for layer in programs.layers[1:]:
        assert layer not in list(model.layers)
        stream = torch.compile(layer, backend=backend)(stream, now)
    for layer in list(model.layers)[1:]:
        own = layer(own, now)
    assert len(graphs) == 1
    torch.testing.assert_close(stream, own, rtol=1e-11, atol=1e-11)


def _stream(x: Tensor) -> Any:
    from tilemesh.model.transformer import ResidualStream

    return ResidualStream(x)


def test_every_program_is_named_once() -> None:
    names = [program.name for program in PROGRAMS if program.name != "definition"]
    assert len(set(names)) == len(names)


# Explained ------------------------------------------------------------------------------------------------------------


def test_what_serves_is_told_with_times_and_reasons() -> None:
    lines = explain(prepare(model_of(LLAMA, torch.bfloat16).eval().requires_grad_(False), SERVES))
    assert lines[0] == "programs of 2 layers, predicted for a plain CPU (two channels of memory)"
    ones = [line.strip() for line in lines if line.startswith("  1 token: ")]
    assert [line.rpartition(", ")[0] for line in ones] == [
        f"1 token: {products.ATTENTION.name} + {one_token.GATE.name}: 1 layer",
        f"1 token: {one_token.NORMS.name}: 1 layer",
    ]
    assert all(re.search(r"µs each for 1 forward$", line) for line in ones)
    assert f"  2 to 64 tokens: {few_tokens.FEW.name}: 2 layers, " in " ".join(lines)
    reason = "before the first layer's norm there is nothing to add (1 of 2 layers)"
    assert any(line == f"    not {one_token.NORMS.name}: {reason}" for line in lines)


@pytest.mark.parametrize(
    ("sets", "chosen", "refused"),
    [
        ("train.kernels=tilemesh", fused_mlp.FUSED_MLP.name, "not weights of query, key and value in a row: weights"),
        ("train.kernels=tilemesh,plan.tp=2", "definition", "not MLP as one operator: ranks share the layer"),
        ("plan.pp=2,plan.schedule=zb-h1", "definition", "not MLP as one operator: the MLP's kernels are torch's"),
    ],
)
def test_what_trains_is_told_before_anything_is_computed(sets: str, chosen: str, refused: str) -> None:
    config = load("gpt2-124m", sets=[sets, "model.layers=4,train.compile=false,train.device=cpu"])
    text = "\n".join(explain(planned_programs(config, torch.device("cpu"))))
    assert re.search(rf"a microbatch: (definition \+ )?{chosen}: 4 layers", text)
    assert refused in text


def test_an_engine_tells_its_programs() -> None:
    served = ServedModel("small", model_of(LLAMA).eval().requires_grad_(False), Unknown(64), frozenset())
    with Engine(served, pages=8) as engine:
        lines = engine.explain()
    assert f"more tokens: {products.ATTENTION.name} + {products.MLP.name}: 2 layers" in " ".join(lines)
    assert lines[-1].endswith("; steps are not captured")
