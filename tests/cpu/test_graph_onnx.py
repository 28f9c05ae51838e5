"""What the IR holds, exported to ONNX by torch's own exporter and run by onnxruntime."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import tilemesh as tm
from tilemesh.graph.ir import Graph

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime onnxscript")
pytest.importorskip("onnxscript", reason="pip install onnxruntime onnxscript")


class Attending(nn.Module):
    """A norm, attention, GELU: reshapes, products, a softmax, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        mixed = torch.softmax(y @ y.transpose(-1, -2) * 8**-0.5, -1) @ y
        return x + self.down(nn.functional.gelu(self.up(mixed)))  # type: ignore[no-any-return]


def _pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)
    ).eval()


@pytest.mark.parametrize("name", ["attending", "pictures, weights folded"])
def test_an_exported_graph_runs_elsewhere(name: str) -> None:
    torch.manual_seed(0)
    model, x = (Attending(), torch.randn(2, 5, 8)) if name == "attending" else (_pictures(), torch.randn(2, 3, 8, 8))
    traced = tm.graph.trace(model, [x])
    graph: Graph = traced.graph
    given = [*traced.weights.values(), x]
    if name != "attending":
        graph, given = traced.frozen(), [x]
    with torch.no_grad():
        exported = torch.onnx.export(tm.graph.export(graph), tuple(given), dynamo=True, verbose=False)
    buffer = io.BytesIO()
    exported.save(buffer)
    session = onnxruntime.InferenceSession(buffer.getvalue(), providers=["CPUExecutionProvider"])
    named = dict(zip([each.name for each in session.get_inputs()], [value.numpy() for value in given], strict=True))
    torch.testing.assert_close(torch.from_numpy(session.run(None, named)[0]), model(x).detach(), rtol=1e-4, atol=1e-5)
