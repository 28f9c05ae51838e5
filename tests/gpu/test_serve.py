"""Serving on a GPU: kernels over pages against float64, graphs against eager steps and the CPU, bits that stay."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tilemesh.data.tokenizer import Bytes
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.paged_attention.reference import error_bound, exact, paged_attention
from tilemesh.kernels.paged_attention.store import store_pages
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
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
    ("dtype", "width", "group", "window"),
    [(torch.bfloat16, 64, 8, 0), (torch.bfloat16, 128, 4, 200), (torch.float16, 128, 1, 0), (torch.float32, 64, 2, 0)],
)
def test_attention_over_pages_is_within_its_bound(dtype: torch.dtype, width: int, group: int, window: int) -> None:
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
        options: dict[str, Any] = {"tile": tile, "split": split, "longest": 640, "window": window}
        found = paged_attention(*given, **options, implementation="triton")
        want, bound = exact(*given, **options), error_bound(*given, **options)
        assert excess(found[rows], want[rows], bound[rows]) is None


def test_keys_and_values_are_stored_where_they_belong() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    qkv = torch.randn(9, (8 + 4) * 64, device="cuda", generator=generator).to(torch.bfloat16)
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
