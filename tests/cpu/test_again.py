"""Layers that keep only some operators' results: gradients of layers that keep all, and the bytes that are counted."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.errors import RunError
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import ResidualStream, Transformer, added
from tilemesh.model.work.kept import kept_by_operators, kept_bytes
from tilemesh.model.work.task import Task
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.again import PRODUCTS, KeepingMode, KeptResult, call_again, contexts
from tilemesh.parallel.host import HostLink
from tilemesh.parallel.offload import HostActivations

ROWS, TOKENS = 2, 16
LLAMA = ModelConfig(
    layers=3, width=32, heads=4, kv_heads=2, mlp_width=48, vocabulary=72, context=TOKENS, norm="rmsnorm",
    positions="rotary", activation="swiglu", biases=False, tied=False,
)  # fmt: skip
GPT = ModelConfig(layers=3, width=32, heads=4, vocabulary=72, context=TOKENS)
MODELS = pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
OTHERS = [
    LLAMA.replace(qk_norm="head", head_width=12, activation="geglu", norm_place="sandwich", norm_offset=True),
    LLAMA.replace(qk_norm="full", norm_place="branch"),
    GPT.replace(parallel_residual=True, positions="rotary", rotary_fraction=0.5),
    GPT.replace(activation="relu"),
]


def gradients(comm: Communicator, config: ModelConfig, recompute: Any, compiled: bool = False) -> dict[str, Any]:
    plan = ParallelPlan(precision="fp32", microbatch=ROWS, recompute=recompute)
    laid = lay(Transformer(config, seed=1), Mesh(comm), plan)
    tokens = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % config.vocabulary
    call: Any = torch.compile(laid.loss, backend="aot_eager") if compiled else laid.loss
    total, count = call(tokens, tokens.roll(-1, 1))
    laid.gradients.backward(total, count)
    laid.gradients.finish()
    return {name: parameter.grad for name, parameter in laid.module.named_parameters()}


@MODELS
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_gradients_are_those_of_layers_that_keep_everything(config: ModelConfig, compiled: bool) -> None:
    def main(comm: Communicator) -> tuple[dict[str, Any], dict[str, Any]]:
        return gradients(comm, config, "none"), gradients(comm, config, "operators", compiled)

    kept, again = run_threads(1, main)[0]
    for name, gradient in kept.items():
        # The same operators on the same values: only how a compiler orders sums may differ.
        bound = 1e-5 * float(gradient.abs().max()) if compiled else 0.0
        torch.testing.assert_close(again[name], gradient, rtol=0, atol=bound, msg=name)


def tensors_of(result: KeptResult) -> list[torch.Tensor]:
    several = result.tensors if isinstance(result.tensors, tuple) else (result.tensors,)
    return [tensor for tensor in several if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("config", [LLAMA, GPT, *OTHERS], ids=["llama", "gpt", "gemma", "olmo", "neox", "opt"])
def test_a_layer_keeps_what_the_planner_counts(config: ModelConfig) -> None:
    """Of one layer: its input, and what the policy keeps, operation by operation."""
    model, plan = Transformer(config, seed=1), ParallelPlan(precision="fp32", microbatch=ROWS, recompute="operators")
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    now = model.prepare(tokens)
    x_BTD = model.enter(tokens, None, now)
    kept: deque[KeptResult] = deque()
    with KeepingMode(kept) as mode:
        model.layers[0](ResidualStream(x_BTD), now)
    nbytes = sum(tensor.numel() * tensor.element_size() for result in kept for tensor in tensors_of(result))
    task = Task.of(plan, TOKENS, "eager", gpu=False)
    counted = sum(tensor.nbytes for tensor in kept_by_operators(config, task))
    assert mode.is_kept.products == 5 + config.mlp_inputs
    assert nbytes + x_BTD.numel() * x_BTD.element_size() == counted
    assert counted == kept_bytes(config, task, "operators")[0] < kept_bytes(config, task, "none")[0]


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_what_is_kept_goes_to_the_host_with_what_autograd_keeps(config: ModelConfig) -> None:
    model, plan = Transformer(config, seed=1), ParallelPlan(precision="fp32", microbatch=ROWS, recompute="operators")
    tokens, found = torch.zeros(ROWS, TOKENS, dtype=torch.int64), []
    task = Task.of(plan, TOKENS, "eager", gpu=False)
    for moves in (False, True):
        model.zero_grad()
        now = model.prepare(tokens)
        x_BTD = model.enter(tokens, None, now).detach().requires_grad_()
        host = HostActivations(HostLink(x_BTD.device), model.parameters())
        with host.keeping((0, 0, 0)):
            y_BTD = added(call_again(model.layers[0], ResidualStream(x_BTD), now, moves=moves))
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in host.here())
        wanted = sum(tensor.nbytes for tensor in kept_by_operators(config, task)) if moves else x_BTD.nbytes
        assert nbytes == wanted
        host.out((0, 0, 0))
        assert [*host.here()] == []
        host.into((0, 0, 0))
        host.ready((0, 0, 0))
        y_BTD.square().sum().backward()
        found.append([x_BTD.grad, *(parameter.grad for parameter in model.layers[0].parameters())])
    for kept, moved in zip(*found, strict=True):
        assert torch.equal(kept, moved)


def test_what_was_written_to_or_is_asked_for_twice_is_refused() -> None:
    x, w = torch.ones(2, 3), torch.ones(3, 4)
    keeping, again = contexts(deque())
    with keeping:
        made = x @ w
    made.add_(1)
    with again, pytest.raises(RunError, match="was written to before the backward pass read it"):
        x @ w
    keeping, again = contexts(deque())
    with keeping:
        x @ w
    with again:
        assert torch.equal(x @ w, torch.full((2, 4), 3.0))
    _, again_without = contexts(deque())
    with again_without, pytest.raises(RunError, match="goes backward once"):
        x @ w


def test_products_are_named_as_autograd_calls_them() -> None:
    """An operator that torch renames would be computed again without a word."""
    for name in PRODUCTS:
        space, _, operator = name.partition("::")
        if space == "tilemesh":
            import tilemesh.kernels.matmul.op  # noqa: F401  registers it
        assert hasattr(getattr(torch.ops, space), operator), name
