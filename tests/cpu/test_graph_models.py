"""A dozen models of transformers, an LSTM and blocks in plain torch through the backend: as in eager, in float64.

Most of these models compute some part in float32 whatever their dtype is: norms, rotary positions, the loss. There
another order of additions shows in the seventh digit, and nothing smaller could be seen. So each model is taken from
its source with `float32` read as `float64`: then everything is float64, and equal within 1e-10.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator

import pytest
import torch
from float64_source import read_as_float64

from tilemesh.bench.graph.models import MODELS, OF_TORCH, SIZES, Trained, make_trained
from tilemesh.graph.backend import Backend
from tilemesh.graph.memory import arena

BOUND = 1e-10
QUICK = (("bert", True), ("llama", False))
CASES = [
    pytest.param(name, kernels, marks=() if (name, kernels) in QUICK else pytest.mark.slow)
    for name in MODELS
    for kernels in (True, False)
]


@pytest.fixture(autouse=True)
def _dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
    torch._dynamo.reset()


def _step(trained: Trained, call: object) -> tuple[float, list[torch.Tensor]]:
    loss = trained.step(call)  # type: ignore[arg-type]
    slopes = [weight.grad.clone() for weight in trained.module.parameters() if weight.grad is not None]
    return loss.item(), slopes


def _in_float64(trained: Trained) -> Trained:
    """The same model with the same weights, all of it in float64."""
    kind = type(trained.module)
    model = getattr(read_as_float64(sys.modules[kind.__module__]), kind.__name__)(trained.module.config)
    model = model.to(torch.float64).train()
    model.load_state_dict(trained.module.state_dict())
    losses = read_as_float64(importlib.import_module("transformers.loss.loss_utils"))
    usual = getattr(trained.module, "loss_function", None)
    if usual is not None:
        model.loss_function = getattr(losses, usual.__name__)
    return Trained(model, trained.inputs)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "kernels"), CASES)
def test_loss_and_gradient_are_those_of_eager(name: str, kernels: bool) -> None:
    if name not in OF_TORCH and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    trained = make_trained(name, SIZES["tiny"], torch.float64)
    if name not in OF_TORCH:
        trained = _in_float64(trained)
    state = {key: value.clone() for key, value in trained.module.state_dict().items()}
    expected, theirs = _step(trained, trained.module)
    backend = Backend(kernels=kernels)
    compiled = torch.compile(trained.module, backend=backend)
    for _ in range(2):
        trained.module.load_state_dict(state)
        loss, ours = _step(trained, compiled)
        assert loss == pytest.approx(expected, rel=BOUND)
        distance = sum(float((mine - other).square().sum()) for mine, other in zip(ours, theirs, strict=True)) ** 0.5
        assert distance <= BOUND * sum(float(other.square().sum()) for other in theirs) ** 0.5
    for piece in backend.report.pieces:
        if piece.graph is not None and piece.graph.launches:
            plan = arena(piece.graph)
            assert plan.size <= 1.05 * plan.bound
            assert piece.graph.launches <= piece.nodes_before
    if (name, kernels) in QUICK:
        assert all(piece.graph is not None for piece in backend.report.pieces), str(backend.report)
