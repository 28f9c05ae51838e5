"""Passes of one and of a few tokens by the kernels that decode: what the model's own layers give."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from tilemesh.model import stacked, transformer
from tilemesh.model.config import ModelConfig
from tilemesh.model.few_tokens import FewTokens
from tilemesh.model.stacked import stack_products
from tilemesh.model.transformer import Layer, Transformer
from tilemesh.serve.request import ServeRequest
from tilemesh.serve.runner import Runner
from tilemesh.serve.scheduler import Scheduler, ServeLimits

LIMITS = ServeLimits(pages=40, context=64, page_tokens=16, step_tokens=64, chunk_tokens=64, running=8)
LLAMA = ModelConfig(
    layers=2, width=128, heads=4, kv_heads=2, mlp_width=256, vocabulary=64, context=64, norm="rmsnorm",
    positions="rotary", activation="swiglu", biases=False, tied=False,
)  # fmt: skip


def model_of(dtype: torch.dtype, config: ModelConfig = LLAMA) -> Transformer:
    model = Transformer(config, seed=1, dtype=torch.float64).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(4 if parameter.dim() > 1 else 1)  # fresh weights say next to nothing
        parameter.copy_(parameter.to(torch.bfloat16))
    return model.to(dtype)


def logits_of(
    dtype: torch.dtype, requests: int, change: Callable[[Runner], None] = lambda runner: None, **options: str
) -> torch.Tensor:
    """Of two steps in which all requests decode, after a step with their prompts; drawn tokens are given."""
    runner, scheduler, draw = Runner(model_of(dtype), LIMITS, **options), Scheduler(LIMITS), random.Random(2)
    change(runner)
    for number in range(requests):
        scheduler.add(ServeRequest(str(number), [draw.randrange(64) for _ in range(3 + 5 * number)], 3))
    found = []
    while scheduler.busy:
        plan = scheduler.plan()
        logits = runner.run(plan)
        found += [logits[entry.request.name].logits_NV.double() for entry in plan.entries]
        scheduler.commit(plan, {entry.request.name: [draw.randrange(64)] for entry in plan.entries})
    return torch.cat(found[requests:])


def test_a_few_tokens_by_interpreted_kernels_are_as_near_as_the_models_own_layers() -> None:
    """In 16 bits both round; neither may be much further from float64 than the other."""
    used = []

    def with_few(runner: Runner) -> None:
        class Watched(FewTokens):
            def __call__(self, x_TD: torch.Tensor, now: transformer.Pass) -> torch.Tensor:
                used.append(len(x_TD))
                return super().__call__(x_TD, now)

        assert FewTokens.serves(runner.model)
        runner._few = Watched(runner.model, "interpret")

    exact = logits_of(torch.float64, 3)
    plain = logits_of(torch.bfloat16, 3)
    few = logits_of(torch.bfloat16, 3, with_few, implementation="interpret")
    assert used == [24, 3, 3]
    assert float((few - exact).norm()) < 1.5 * float((plain - exact).norm())
    assert float((few - exact).norm()) < 0.05 * float(exact.norm())


def test_one_token_with_norms_inside_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that a GPU takes, on a CPU: float64, so that it is the same but for the order of sums."""
    for module in (stacked, transformer):
        monkeypatch.setattr(module, "is_one_row", lambda x: x.numel() == x.shape[-1])
    passed = []
    one_token = Layer._one_token
    monkeypatch.setattr(Layer, "_one_token", lambda *given: passed.append(1) or one_token(*given))

    def with_rows(runner: Runner) -> None:
        for layer in runner.model.layers:
            for product in (layer.attention, layer.mlp):
                product.stacked = None  # type: ignore[assignment]
        stack_products(runner.model, one_row=True)

    exact = logits_of(torch.float64, 1)
    found = logits_of(torch.float64, 1, with_rows, implementation="interpret")
    assert len(passed) == 2  # all layers but the first, whose stream has no branch yet, in two steps
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [{"norm": "layernorm"}, {"biases": True}, {"activation": "gelu"}, {"qk_norm": "head"}, {"width": 96, "heads": 4}],
)
def test_other_layers_are_left_to_the_model(changes: dict[str, object]) -> None:
    config = LLAMA.replace(**changes)
    runner = Runner(model_of(torch.bfloat16, config), LIMITS)
    assert not FewTokens.serves(runner.model)
    assert FewTokens.serves(Runner(model_of(torch.bfloat16), LIMITS).model)
    assert not FewTokens.serves(Runner(model_of(torch.float32), LIMITS).model)
    assert [FewTokens.takes(tokens) for tokens in (1, 2, 64, 65)] == [False, True, True, False]
