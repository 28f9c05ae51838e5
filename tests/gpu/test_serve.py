"""Serving on a GPU: kernels over pages against float64, graphs against eager steps and the CPU, bits that stay."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tilemesh.data.tokenizer import Bytes
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.few_linear import reference as few
from tilemesh.kernels.paged_attention.reference import error_bound, exact, paged_attention
from tilemesh.kernels.paged_attention.store import store_pages
from tilemesh.kernels.row_linear import reference as row
from tilemesh.model import huggingface
from tilemesh.model.adapter import LoraConfig, adapted_modules
from tilemesh.model.config import ModelConfig
from tilemesh.model.lora import save_adapter
from tilemesh.model.programs.prepare import prepare
from tilemesh.model.programs.program import Use
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.gate.alone import compress_all
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.load import ServedModel
from tilemesh.serve.request import ServeRequest
from tilemesh.serve.runner import Runner
from tilemesh.serve.scheduler import Scheduler, ServeLimits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONTEXT = 640
LLAMA = ModelConfig(
    layers=2, width=256, heads=4, kv_heads=2, vocabulary=512, context=CONTEXT, norm="rmsnorm", positions="rotary",
    activation="swiglu", biases=False, tied=False,
)  # fmt: skip


def served(dtype: torch.dtype, device: str, config: ModelConfig = LLAMA) -> ServedModel:
    model = Transformer(config, seed=1, dtype=dtype, device="cpu").eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(3)  # fresh weights say next to nothing; these have opinions
    return ServedModel("small", model.to(device), Bytes(), frozenset({0}))


def prompts_of(count: int, longest: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(1, 256) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


@pytest.mark.parametrize(
    ("dtype", "width", "group", "window", "cap"),
    [
        (torch.bfloat16, 64, 8, 0, 0.0),
        (torch.bfloat16, 128, 4, 200, 2.0),
        (torch.float16, 128, 1, 0, 0.0),
        (torch.float32, 64, 2, 0, 0.0),
        (torch.bfloat16, 256, 2, 0, 50.0),
        (torch.float32, 64, 2, 200, 3.0),
    ],
)
def test_attention_over_pages_is_within_its_bound(
    dtype: torch.dtype, width: int, group: int, window: int, cap: float
) -> None:
    generator, kv_heads, page = torch.Generator("cuda").manual_seed(0), 2, 16
    tokens = {"device": "cuda", "generator": generator}
    keys, values = (torch.randn(200, page, kv_heads, width, **tokens).to(dtype) for _ in range(2))  # type: ignore[call-overload]
    tables = torch.randperm(200, **tokens)[:160].view(4, 40).to(torch.int32)  # type: ignore[call-overload]
    decode = [(0, 0, 1, 0), (1, 1, 1, 255), (2, 2, 1, 256), (3, 3, 1, 639), (0, 0, 0, 0)]
    each = 32 // group
    prompt = [(1, 4 + at, min(each, 70 - at), 300 + at) for at in range(0, 70, each)]
    q = torch.randn(74, kv_heads * group, width, **tokens).to(dtype)  # type: ignore[call-overload]
    for listed, rows, tile, split in ((decode, slice(0, 4), 1, 256), (prompt, slice(4, 74), each, 0)):
        tiles = torch.tensor(listed, dtype=torch.int32, device="cuda")
        given = (q, keys, values, tables, tiles)
        options: dict[str, Any] = {"tile": tile, "split": split, "longest": 640, "window": window, "cap": cap}
        if window:
            options["sinks"] = torch.linspace(-2, 5, q.shape[1], device="cuda").to(dtype)
        found = paged_attention(*given, **options, implementation="triton")
        want, bound = exact(*given, **options), error_bound(*given, **options)
        assert excess(found[rows], want[rows], bound[rows]) is None


def random_on_gpu(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("gate", ["none", "silu"])
@pytest.mark.parametrize(
    ("dtype", "outputs", "inputs"),
    [
        (torch.bfloat16, 2560, 2048),
        (torch.bfloat16, 4096, 14336),
        (torch.float16, 6146, 4096),
        (torch.float32, 70, 513),
    ],
)
def test_one_row_times_a_matrix_is_within_its_bound(dtype: torch.dtype, outputs: int, inputs: int, gate: str) -> None:
    """As they follow each other when decoding: each launched while the one before runs, its weights read already."""
    high = outputs * (1 if gate == "none" else 2)
    x, branch = random_on_gpu(1, inputs, dtype=dtype), random_on_gpu(1, inputs, seed=1, dtype=dtype)
    weight, bias = random_on_gpu(high, inputs, seed=2, dtype=dtype), random_on_gpu(high, seed=3, dtype=dtype)
    scale = random_on_gpu(inputs, seed=4, dtype=dtype)
    made = [row.row_linear(x, weight, bias, gate=gate, settled=True, implementation="triton") for _ in range(20)]
    assert all(torch.equal(made[0], other) for other in made)
    assert excess(made[-1], row.exact(x, weight, bias, gate), row.error_bound(x, weight, bias, gate)) is None
    found, total = row.norm_row_linear(x, branch, scale, weight, eps=1e-5, gate=gate, implementation="triton")
    assert torch.equal(total, x + branch)
    given = (x, branch, scale, weight, 1e-5, gate)
    assert excess(found, row.norm_exact(*given), row.norm_error_bound(*given)) is None
    chained = x  # a row that the kernel before has just written is waited for
    for _ in range(5):
        chained, _ = row.norm_row_linear(chained, branch, scale, weight[:inputs], settled=True, implementation="triton")
        want = row.norm_exact(x, branch, scale, weight[:inputs], 1e-6)
        if weight.shape[0] < inputs:
            break
        assert excess(chained, want, row.norm_error_bound(x, branch, scale, weight[:inputs], 1e-6)) is None
        x = chained


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "gate"),
    [
        (64, 2560, 2048, "none"),
        (2, 4096, 14336, "none"),
        (48, 5632, 2048, "silu"),
        (64, 14336, 4096, "silu"),
        (64, 6144, 4096, "none"),
        (20, 5632, 2048, "silu"),
        (17, 2048, 2048, "none"),
    ],
)
def test_a_few_rows_times_a_matrix_are_within_their_bound(rows: int, outputs: int, inputs: int, gate: str) -> None:
    x, weight = random_on_gpu(rows, inputs), random_on_gpu(outputs * (1 if gate == "none" else 2), inputs, seed=1)
    parts = few.few_linear(x, weight, gate=gate, implementation="triton")
    assert excess(parts.double().sum(0), few.exact(x, weight, gate), few.error_bound(x, weight, gate)) is None
    residual, scale = random_on_gpu(rows, outputs, seed=2), random_on_gpu(outputs, seed=3)
    found, total = few.parts_rms_norm(parts, residual, scale, implementation="triton")
    want, sums = few.parts_rms_norm(parts, residual, scale, implementation="torch")
    torch.testing.assert_close(total, sums, rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(found, want, rtol=2**-6, atol=2**-6)


def test_keys_and_values_are_stored_where_they_belong() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    qkv = torch.randn(1, 9, (8 + 4) * 64, device="cuda", generator=generator).to(torch.bfloat16)
    angle = torch.rand(9, 32, device="cuda", generator=generator) * 6
    places = torch.tensor([3, 0, -1, 17, 9, 40, 41, 42, 63], device="cuda")
    made = []
    for implementation in ("torch", "triton"):
        keys, values = (torch.full((4, 16, 2, 64), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        q = store_pages(qkv, (angle.cos(), angle.sin()), places, keys, values, heads=8, implementation=implementation)
        made.append((q, keys, values))
    # One rounding of 16 bits: a fused multiply and add may fall on the other side.
    torch.testing.assert_close(made[1], made[0], rtol=2**-7, atol=2**-9)


def test_logits_are_those_of_the_cpu() -> None:
    """Float32 against float64 on the CPU: errors of sums, a few hundred terms, over two layers."""
    limits = ServeLimits(pages=200, context=CONTEXT, page_tokens=16, step_tokens=256, chunk_tokens=100, running=6)
    found: list[list[torch.Tensor]] = []
    for dtype, device in ((torch.float32, "cuda"), (torch.float64, "cpu")):
        scheduler, runner = Scheduler(limits), Runner(served(dtype, device).model, limits, device)
        draw, mine = random.Random(1), []
        for number, prompt in enumerate(prompts_of(5, 400)):
            scheduler.add(ServeRequest(str(number), prompt, 4))
        while scheduler.busy:
            plan = scheduler.plan()
            logits = runner.run(plan)
            mine += [logits[entry.request.name].logits_NV.double().cpu() for entry in plan.entries if entry.samples]
            scheduler.commit(
                plan, {entry.request.name: [draw.randrange(256)] for entry in plan.entries if entry.samples}
            )
        found.append(mine)
    assert len(found[0]) == len(found[1]) == 20
    for ours, exact_logits in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact_logits, rtol=1e-4, atol=1e-4 * float(exact_logits.abs().max()))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=40, temperature=0, ignore_eos=True),
        Sampling(max_tokens=12, temperature=0.8, seed=3, top_k=50, top_p=0.9, min_p=0.01),
        Sampling(max_tokens=12, temperature=0.8, seed=3, repetition_penalty=1.2, logprobs=1),
    ],
)
def test_graphs_give_what_eager_steps_and_the_cpu_give(sampling: Sampling) -> None:
    prompts = prompts_of(9, 300)
    answers = {}
    for name, device, ahead in (("graphs", "cuda", True), ("eager", "cuda", False), ("cpu", "cpu", None)):
        said: list[str] = []
        with Engine(
            served(torch.float32, device), device=device, pages=400, step_tokens=512, running=8, launch_ahead=ahead,
            say=said.append,
        ) as engine:  # fmt: skip
            answers[name] = [completion.answers[0].tokens for completion in engine.generate(prompts, sampling)]
            assert engine.status.pages_used == 0
        assert not said
    assert answers["graphs"] == answers["eager"] == answers["cpu"]


def test_graphs_in_16_bits_are_near_eager_steps() -> None:
    """A first token is the same kernels' in both; later ones may differ where two logits are next to equal."""
    prompts = prompts_of(20, 600)
    asked = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
    found = []
    for ahead in (True, False):
        with Engine(
            served(torch.bfloat16, "cuda"), device="cuda", pages=1000, running=32, launch_ahead=ahead
        ) as engine:
            found.append([completion.answers[0].tokens for completion in engine.generate(prompts, asked)])
    same = sum(ours == theirs for ours, theirs in zip(*found, strict=True))
    assert same >= 15


MIXTURE = LLAMA.replace(experts=8, experts_per_token=2, mlp_width=384)


def test_experts_answer_with_graphs_as_without() -> None:
    """Their loads stay on the device. Prompts of one kernel are those of the other, as above; and the plain way in
    float32, one expert after the other, picks the same first tokens."""
    prompts = prompts_of(20, 300)
    asked = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
    found = []
    for dtype, ahead in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, None)):
        said: list[str] = []
        given = served(dtype, "cuda", MIXTURE)
        with Engine(given, device="cuda", pages=1000, running=32, launch_ahead=ahead, say=said.append) as engine:
            found.append([completion.answers[0].tokens for completion in engine.generate(prompts, asked)])
        blocks = [layer.mlp for layer in given.model.layers]
        assert all(block.waits_for_loads is (dtype is torch.float32) for block in blocks)
        assert not said
    graphs, eager, plain = found
    assert sum(ours == theirs for ours, theirs in zip(graphs, eager, strict=True)) >= 15
    assert sum(ours[0] == theirs[0] for ours, theirs in zip(graphs, plain, strict=True)) >= 17


@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=["one MLP", "experts"])
def test_weights_of_4_bits_answer_with_graphs_as_without(config: ModelConfig) -> None:
    """Prompts are padded to 64 tokens, which is a kernel of its own; then one token at a time."""
    prompts = prompts_of(12, 300)
    asked = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
    found = []
    for ahead in (True, False):
        given = served(torch.bfloat16, "cuda", config)
        compress_all(given.model, "int4-g128")
        with Engine(given, device="cuda", pages=600, running=12, launch_ahead=ahead) as engine:
            found.append([completion.answers[0].tokens for completion in engine.generate(prompts, asked)])
        assert not any(getattr(layer.mlp, "waits_for_loads", False) for layer in given.model.layers)
    firsts = [[tokens[0] for tokens in answers] for answers in found]
    assert sum(ours == theirs for ours, theirs in zip(*firsts, strict=True)) >= 10


def test_soft_caps_and_two_kinds_of_pages_answer_as_a_cpu_does() -> None:
    """Launched ahead all layers have the same pages, otherwise those with a window their own; float32, greedy."""
    config = LLAMA.replace(window=100, full_layers=(1,), score_cap=4.0, logit_cap=9.0, score_sink=True)
    prompts = prompts_of(12, 500)
    asked = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
    found = []
    for device, ahead in (("cuda", True), ("cuda", False), ("cpu", False)):
        options: dict[str, Any] = {"pages": 480, "running": 12, "launch_ahead": ahead}
        with Engine(served(torch.float32, device, config), device=device, **options) as engine:
            assert bool(engine.limits.local_pages) is not ahead
            found.append([completion.answers[0].tokens for completion in engine.generate(prompts, asked)])
    for ours in found[:2]:
        assert sum(mine[0] == theirs[0] for mine, theirs in zip(ours, found[2], strict=True)) >= 11


def test_invariant_bits_do_not_depend_on_the_batch() -> None:
    """Logits of the same request alone and among others, in chunks and whole, with a prefix found and without."""
    limits = ServeLimits(pages=300, context=CONTEXT, page_tokens=16, step_tokens=256, chunk_tokens=256, running=8)
    cut_up = ServeLimits(pages=300, context=CONTEXT, page_tokens=16, step_tokens=64, chunk_tokens=37, running=8)
    model = served(torch.bfloat16, "cuda").model
    prompts = prompts_of(6, 300)
    watched = max(prompts, key=len)

    def logits_of(given: list[list[int]], sizes: ServeLimits) -> list[torch.Tensor]:
        scheduler, runner = Scheduler(sizes), Runner(model, sizes, "cuda", invariant=True)
        for number, prompt in enumerate(given):
            scheduler.add(ServeRequest(str(number), list(prompt), 12))
        name, found = str(given.index(watched)), []
        while scheduler.busy:
            plan = scheduler.plan()
            logits, sampled = runner.run(plan), {}
            for entry in plan.entries:
                if entry.samples:
                    rows = logits[entry.request.name].logits_NV
                    sampled[entry.request.name] = [int(rows[-1].argmax())]
                    if entry.request.name == name:
                        found.append(rows)
            scheduler.commit(plan, sampled)
        return found

    alone = logits_of([watched], limits)
    for other in (logits_of(prompts, limits), logits_of(prompts, cut_up), logits_of([watched[:100], watched], cut_up)):
        assert len(alone) == len(other)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(alone, other, strict=True))


def test_weights_change_under_captured_steps_and_memory_comes_and_goes(tmp_path: Path) -> None:
    """An update in place keeps every graph; a sleep gives all memory back, and its wake never holds weights twice."""
    config = dataclasses.replace(LLAMA, layers=4, width=1024, heads=16, kv_heads=8, head_width=64, mlp_width=4096)
    asked, prompts = Sampling(max_tokens=24, temperature=0, ignore_eos=True), prompts_of(6, 100)
    models = [Transformer(config, seed=seed, device="cpu") for seed in (1, 2)]
    for number, model in enumerate(models):
        for parameter in model.parameters():
            parameter.data.mul_(3 if parameter.dim() > 1 else 1)
        huggingface.save(model, tmp_path / str(number))

    def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
        return [completion.answers[0].tokens for completion in engine.generate(prompts, asked)]

    settings: dict[str, Any] = {"device": "cuda", "pages": 2000, "running": 8, "share_prefixes": False}
    expected = []
    for number in range(2):
        with Engine(tmp_path / str(number), **settings) as engine:
            expected.append(tokens_of(engine))
    assert expected[0] != expected[1]
    with Engine(tmp_path / "0", **settings) as engine:
        assert [tokens_of(engine) for _ in range(2)] == [expected[0]] * 2
        runner = engine._core.runner
        assert isinstance(runner, Runner)
        assert runner.ahead is not None
        captured = dict(runner.ahead._captured)
        assert captured
        for source, number in ((tmp_path / "1", 1), (models[0], 0), (models[1].to("cuda", torch.float64), 1)):
            engine.update_weights(source)
            assert tokens_of(engine) == expected[number]
        assert all(runner.ahead._captured[shape] is graph for shape, graph in captured.items())
        models[1].to("cpu")
        weights = sum(parameter.nbytes for parameter in runner.model.parameters())
        pages = sum(part.nbytes for stored in runner.cache._stored.values() for part in stored.parts)
        for level, given_back in ((1, pages), (2, pages + weights)):
            before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            engine.sleep(level)
            assert before - torch.cuda.memory_allocated() >= given_back
            assert reserved - torch.cuda.memory_reserved() >= 0.9 * given_back  # others may use the same GPU
            assert not runner.ahead._captured
            torch.cuda.reset_peak_memory_stats()
            engine.wake()
            assert torch.cuda.max_memory_allocated() <= before + (1 << 20)
            assert [tokens_of(engine) for _ in range(2)] == [expected[1]] * 2
            assert runner.ahead._captured
        engine.sleep(2)
        torch.cuda.reset_peak_memory_stats()
        engine.update_weights(tmp_path / "0")  # in its sleep: the weights come back, the pages do not
        assert torch.cuda.max_memory_allocated() <= before - pages + (64 << 20)  # one matrix on its way
        engine.wake()
        assert tokens_of(engine) == expected[0]


@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_engine_and_a_pass_that_trains_have_the_same_bits(dtype: torch.dtype, window: int) -> None:
    """In chunks and whole, alone and among others, over a thousand tokens; and the pass has gradients."""
    config = dataclasses.replace(LLAMA, window=window, full_layers=(1,) if window else ())
    given = served(dtype, "cuda", config)
    model = Transformer(config, device="cuda", dtype=dtype)
    model.load_state_dict(given.model.state_dict())
    programs = prepare(model, Use(trains=True, invariant=True), "cuda")
    prompts = [prompt for prompt in prompts_of(12, 600) if len(prompt) > 3]
    asked = Sampling(max_tokens=24, temperature=1, seed=3, logprobs=0, ignore_eos=True)
    for options in ({"running": 1}, {"running": 12, "chunk_tokens": 37, "step_tokens": 128}):
        with Engine(given, device="cuda", invariant=True, pages=600, **options) as engine:  # type: ignore[arg-type]
            completions = list(engine.generate(prompts, asked))
        rows = [[*made.prompt_tokens, *made.answers[0].tokens] for made in completions]
        longest = max(map(len, rows))
        padded = torch.tensor([[*row, *[1] * (longest - len(row))] for row in rows], device="cuda")
        logits = programs(padded)
        assert logits.requires_grad
        ours = logits.float().log_softmax(-1)[:, :-1].gather(2, padded[:, 1:, None])[..., 0]
        for logprobs, tokens, made in zip(ours, rows, completions, strict=True):
            expected = [told.logprob for told in made.answers[0].logprobs]
            assert logprobs[len(tokens) - 25 : len(tokens) - 1].tolist() == expected
    logits.float().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)


def test_gradients_of_the_invariant_pass_are_as_near_as_the_ordinary_ones() -> None:
    """bf16 against float64: no further than twice what the ordinary pass is."""
    tokens = torch.randint(1, 256, (3, 300), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    found: dict[str, list[torch.Tensor]] = {}
    for name, dtype, use in (
        ("exact", torch.float64, Use(trains=True)),
        ("ordinary", torch.bfloat16, Use(trains=True)),
        ("invariant", torch.bfloat16, Use(trains=True, invariant=True)),
    ):
        model = served(torch.bfloat16, "cuda").model.to(dtype).requires_grad_(True)
        logits = prepare(model, use, "cuda")(tokens)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten()).backward()
        found[name] = [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]

    def error(name: str) -> float:
        pairs = zip(found[name], found["exact"], strict=True)
        return sum(float((ours - exact).norm() / exact.norm()) for ours, exact in pairs)

    assert error("invariant") <= 2 * error("ordinary")


def test_adapters_in_one_batch_answer_as_each_merged_alone(tmp_path: Path) -> None:
    """Float32 on both sides; requests without an adapter beside them."""
    lora, prompts = LoraConfig(rank=8, alpha=16.0), prompts_of(5, 60)
    asked = Sampling(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)
    expected = []
    base = served(torch.float32, "cuda")
    for number in range(4):
        draw, merged, tensors = torch.Generator().manual_seed(number), served(torch.float32, "cuda"), {}
        for name in adapted_modules(LLAMA, lora):
            weight = merged.model.get_submodule(name).weight
            low, high = (
                torch.randn(*shape, generator=draw) * 0.05 for shape in ((8, weight.shape[1]), (len(weight), 8))
            )
            tensors |= {f"{name}.lora_a": low, f"{name}.lora_b": high}
            weight.data += (2.0 * high.double() @ low.double()).to(weight)
        save_adapter(tensors, LLAMA, lora, tmp_path / str(number))
        with Engine(merged, device="cuda", pages=100) as engine:
            expected += list(engine.generate([prompts[number]], asked))
    with Engine(served(torch.float32, "cuda"), device="cuda", pages=100) as engine:
        expected += list(engine.generate([prompts[4]], asked))
    with Engine(base, device="cuda", pages=100, adapters=4) as engine:
        for number in range(4):
            engine.load_adapter(str(number), tmp_path / str(number))
        each = [*(dataclasses.replace(asked, adapter=str(number)) for number in range(4)), asked]
        made = list(engine.generate(prompts, each))
    for ours, theirs in zip(made, expected, strict=True):
        assert ours.answers[0].tokens == theirs.answers[0].tokens
        values = [told.logprob for told in theirs.answers[0].logprobs]
        assert [told.logprob for told in ours.answers[0].logprobs] == pytest.approx(values, abs=1e-4)
