"""A dozen models of transformers and an LSTM through the backend: loss and gradient in float64 as in eager.

Some of these models compute parts in float32 whatever their weights are (norms, the loss), where any other order of
additions shows in the seventh digit. Here `torch.float32` means float64 while a model runs, eager and compiled, so that
what is compared has one precision throughout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tilemesh.bench.graph.models import MODELS, SIZES, Trained, make_trained
from tilemesh.graph.backend import Backend
from tilemesh.graph.memory import arena

QUICK = ("lstm", "bert", "llama")


@pytest.fixture(autouse=True)
def _one_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    with torch._dynamo.config.patch(allow_rnn=True):
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(torch, "float32", torch.float64)
            yield
        torch.set_default_dtype(torch.float32)
    torch._dynamo.reset()


def _step(trained: Trained, call: object) -> tuple[float, list[torch.Tensor]]:
    loss = trained.step(call)  # type: ignore[arg-type]
    slopes = [weight.grad.clone() for weight in trained.module.parameters() if weight.grad is not None]
    return loss.item(), slopes


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_loss_and_gradient_are_those_of_eager(name: str) -> None:
    if name != "lstm" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    trained = make_trained(name, SIZES["tiny"], torch.float64)
    state = {key: value.clone() for key, value in trained.module.state_dict().items()}
    expected, theirs = _step(trained, trained.module)
    backend = Backend()
    compiled = torch.compile(trained.module, backend=backend)
    trained.module.load_state_dict(state)
    for _ in range(2):
        trained.module.load_state_dict(state)
        loss, ours = _step(trained, compiled)
        assert loss == pytest.approx(expected, rel=1e-10)
        distance = sum(float((mine - other).square().sum()) for mine, other in zip(ours, theirs, strict=True)) ** 0.5
        assert distance <= 1e-10 * sum(float(other.square().sum()) for other in theirs) ** 0.5
    for piece in backend.report.pieces:
        if piece.graph is not None and piece.graph.launches:
            plan = arena(piece.graph)
            assert plan.size <= 1.05 * plan.bound
            assert piece.graph.launches <= piece.nodes_before
    if name in QUICK:
        assert all(piece.graph is not None for piece in backend.report.pieces), str(backend.report)
