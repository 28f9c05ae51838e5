"""Programs as a GPU chooses them: in 16 bits no further from float64 than the definition is."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tilemesh.model.config import ModelConfig
from tilemesh.model.programs import definition, one_token, products
from tilemesh.model.programs.few_tokens import FEW
from tilemesh.model.programs.prepare import prepare
from tilemesh.model.programs.program import LayerProgram
from tilemesh.model.transformer import Transformer
from tilemesh.serve.request import ServeRequest
from tilemesh.serve.runner import Runner
from tilemesh.serve.scheduler import Scheduler, ServeLimits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LLAMA = ModelConfig(
    layers=3, width=256, heads=4, kv_heads=2, mlp_width=512, vocabulary=256, context=64, norm="rmsnorm",
    positions="rotary", activation="swiglu", biases=False, tied=False,
)  # fmt: skip
GPT2 = ModelConfig(layers=3, width=256, heads=4, vocabulary=256, context=64)
LIMITS = ServeLimits(pages=40, context=64, page_tokens=16, step_tokens=64, chunk_tokens=64, running=8)
DEFINITION: tuple[LayerProgram, ...] = (definition.ATTENTION, definition.MLP)


def logits_of(config: ModelConfig, dtype: torch.dtype, device: str, requests: int, is_defined: bool) -> Tensor:
    """Of steps in which all requests decode, after one with their prompts; drawn tokens are given."""
    model = Transformer(config.replace(dropout=0.0), seed=1, dtype=torch.float64).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(4 if parameter.dim() > 1 else 1).copy_(parameter.to(torch.bfloat16))
    runner = Runner(model.to(device, dtype), LIMITS, device)
    if is_defined:
        runner.programs = prepare(runner.model, runner.programs.use, device, DEFINITION)
    scheduler, draw, found = Scheduler(LIMITS), random.Random(2), []
    for number in range(requests):
        scheduler.add(ServeRequest(str(number), [draw.randrange(256) for _ in range(3 + number)], 4))
    while scheduler.busy:
        plan = scheduler.plan()
        logits = runner.run(plan)
        found += [logits[entry.request.name].logits_NV.double().cpu() for entry in plan.entries]
        scheduler.commit(plan, {entry.request.name: [draw.randrange(256)] for entry in plan.entries})
    return torch.cat(found)


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_programs_are_as_near_as_the_definition(config: ModelConfig, requests: int) -> None:
    exact = logits_of(config, torch.float64, "cpu", requests, True)
    defined, found = (logits_of(config, torch.bfloat16, "cuda", requests, is_defined) for is_defined in (True, False))
    assert float((found - exact).norm()) < 1.5 * float((defined - exact).norm())
    assert float((found - exact).norm()) < 0.05 * float(exact.norm())


def test_what_is_chosen() -> None:
    model = Transformer(LLAMA, device="cuda", dtype=torch.bfloat16).eval().requires_grad_(False)
    programs = Runner(model, LIMITS, "cuda").programs
    names = {rows: [[program.name for program in choice.programs] for choice in programs.choices[rows]]
             for rows in programs.choices}  # fmt: skip
    assert names["1"] == [[products.ATTENTION.name, one_token.GATE.name], *[[one_token.NORMS.name]] * 2]
    if programs.use.launches_early:
        assert names["2-64"] == [[FEW.name]] * 3
    assert names["more"] == [[products.ATTENTION.name, products.MLP.name]] * 3
