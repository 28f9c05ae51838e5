"""Pictures with their channels last: where that moves fewer bytes, equal to eager, results laid as eager lays them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilemesh.graph.backend import Backend
from tilemesh.graph.channels import channels_last


class Mixed(nn.Module):
    """What follows a convolution's layout, what does not, and a convolution with more weights than pictures."""

    def __init__(self, before: int = 3) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(before, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.same, self.group = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8)
        self.wide, self.last = nn.Conv2d(8, 64, 5, stride=4), nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        x = nn.functional.max_pool2d(x + self.group(self.same(x)), 2)
        both = torch.cat([x, nn.functional.avg_pool2d(x, 3, 1, 1)], 1)[:, 4:12]
        return self.last(self.wide(both)) + self.norm.weight.sum()  # type: ignore[no-any-return]


def _lays(backend: Backend) -> int:
    graphs = [piece.graph for piece in backend.report.pieces if piece.graph is not None]
    return sum(node.op == "lay" for graph in graphs for node in graph.nodes())


def _results(form: nn.Module, model: Mixed, x: torch.Tensor, train: bool) -> list[torch.Tensor]:
    """What a pass returns, and of a training step the gradients and the running variance."""
    model.zero_grad()
    model.norm.reset_running_stats()
    source = x.detach().clone().requires_grad_(train)
    with torch.set_grad_enabled(train):
        result = form(source)
    if not train:
        return [result]
    result.square().sum().backward()
    gradients = [each.grad for each in (source, *model.parameters()) if each.grad is not None]
    assert model.norm.running_var is not None
    return [result.detach(), *gradients, model.norm.running_var.clone()]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_model_of_pictures_equals_eager(train: bool, layout: torch.memory_format) -> None:
    """Errors against float64 are those of eager, in another order of summing: of all gradients together, because that
    of a bias before a batch norm is zero."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, backend = Mixed().train(train), Backend()
    x = torch.randn(4, 3, 32, 32).contiguous(memory_format=layout)
    eager = _results(model, model, x, train)
    ours = _results(torch.compile(model, backend=backend), model, x, train)
    exact = _results(model.double(), model, x.double(), train)
    assert [each.stride() for each in ours] == [each.stride() for each in eager]
    for places in (slice(0, 1), slice(1, None)):
        if exact[places]:
            truth, mine, theirs = (
                torch.cat([each.flatten().double() for each in values[places]]) for values in (exact, ours, eager)
            )
            error, own, size = float((mine - truth).norm()), float((theirs - truth).norm()), float(truth.norm())
            assert error <= 4 * own + torch.finfo(torch.float32).eps * size
    assert (_lays(backend) > 0) == (train or layout is torch.contiguous_format)


class OverChannels(nn.Module):
    """Attention of channels to one another: its rows are pixels, which then lie apart."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)])
        self.qkv = nn.Conv2d(8, 24, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.stem(x)).reshape(len(x), 3, 2, 4, 32 * 32).unbind(1)
        return nn.functional.scaled_dot_product_attention(*qkv)


def test_attention_reads_pictures_that_lie_otherwise() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, backend, x = OverChannels(), Backend(), torch.randn(2, 8, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x), rtol=1e-4, atol=1e-4)
    assert _lays(backend)


@pytest.mark.parametrize(("channels", "side", "groups"), [(64, 4, 1), (8, 64, 8)])
def test_what_has_more_weights_than_pictures_or_groups_stays(channels: int, side: int, groups: int) -> None:
    torch._dynamo.reset()
    backend = Backend()
    model = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, groups=groups), nn.ReLU())
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False)(torch.randn(1, channels, side, side))
    assert _lays(backend) == 0
    graph = backend.report.pieces[0].before
    assert graph is not None
    assert channels_last(graph, "c") is graph
    assert channels_last(graph, "interpret") is graph


def test_a_known_batch_norm_is_part_of_its_activation() -> None:
    torch._dynamo.reset()
    backend = Backend()
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert backend.report.pieces[0].opaque == ["aten.convolution.default"]
