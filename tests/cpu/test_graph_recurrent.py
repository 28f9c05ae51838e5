"""LSTMs in compiled programs: one operator of torch's library per layer and direction, as eager runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tilemesh.graph.backend import Backend

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")


@pytest.fixture(autouse=True)
def _traced_through() -> Any:
    with torch._dynamo.config.patch(allow_rnn=True), torch.backends.mkldnn.flags(enabled=True):
        yield


def _values(module: nn.LSTM, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Results and gradients of a step whose loss reads everything."""
    module.zero_grad()
    x.grad = None
    torch.manual_seed(1)
    y, (h, c) = call(x)
    (y.square().sum() + h.sin().sum() + c.cos().sum()).backward()
    values = [y, h, c, *(weight.grad for weight in module.parameters()), x.grad]
    return [value.detach().clone() for value in values if value is not None]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_layers": 3, "dropout": 0.5},
        pytest.param({"num_layers": 2, "bidirectional": True, "batch_first": True}, marks=pytest.mark.slow),
        pytest.param({"num_layers": 2, "bias": False}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("reads_gradient", [False, True])
def test_an_lstm_is_its_layers_and_has_the_values_of_eager(settings: dict[str, Any], reads_gradient: bool) -> None:
    """Whether the input has a gradient or not: without one, torch's own compilers fail, with one they unroll it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, backend = nn.LSTM(8, 16, **settings), Backend()
    x = torch.randn(5, 3, 8, requires_grad=reads_gradient)
    ours = _values(module, torch.compile(module, backend=backend), x)
    torch.testing.assert_close(ours, _values(module, module, x), rtol=1e-5, atol=1e-6)
    forward, backward = ([*piece.opaque] for piece in backend.report.pieces)
    layers = settings.get("num_layers", 1) * (2 if settings.get("bidirectional") else 1)
    assert forward.count("aten.mkldnn_rnn_layer.default") == layers
    assert backward.count("aten.mkldnn_rnn_layer_backward.default") == layers


def test_a_long_sequence_compiles_to_as_many_operators_as_a_short_one() -> None:
    counts = []
    for steps in (4, 400):
        torch._dynamo.reset()
        module, backend = nn.LSTM(4, 4), Backend()
        _values(module, torch.compile(module, backend=backend), torch.randn(steps, 2, 4, requires_grad=True))
        counts.append([piece.nodes_before for piece in backend.report.pieces])
    assert counts[0] == counts[1]


def test_inference_and_what_the_library_does_not_serve() -> None:
    """64-bit numbers and projections are computed by torch's operators, step by step."""
    for module, x in (
        (nn.LSTM(4, 4), torch.randn(3, 2, 4)),
        (nn.LSTM(4, 4).double(), torch.randn(3, 2, 4, dtype=torch.float64)),
        (nn.LSTM(4, 4, proj_size=2), torch.randn(3, 2, 4)),
    ):
        torch._dynamo.reset()
        with torch.no_grad():
            expected = module(x)
            torch.testing.assert_close(torch.compile(module, backend=Backend())(x), expected, rtol=1e-5, atol=1e-6)
