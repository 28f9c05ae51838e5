"""The backend and its generated Triton kernels on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tilemesh.graph.backend import Backend
from tilemesh.graph.kernel_call import embedding_gradient

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class Block(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 20_001)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("graphs", [None, False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_a_step_equals_eager(dtype: torch.dtype, bound: float, graphs: bool | None) -> None:
    """In float32 and bfloat16 the reference is float64: our error stays within the bound, as torch's own does."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Block().cuda().to(dtype)
    x, targets = torch.randn(4, 33, 96, device="cuda", dtype=dtype), torch.randint(0, 20_001, (4, 33), device="cuda")
    exact = Block().cuda().double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    exact(x.double(), targets).backward()
    backend = Backend(cuda_graphs=graphs)
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        loss = compiled(x, targets)
        loss.backward()
    distance, size = 0.0, 0.0
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        distance += float((mine.grad.double() - theirs.grad).square().sum())
        size += float(theirs.grad.square().sum())
    assert distance**0.5 <= bound * size**0.5
    assert all(piece.graph is not None for piece in backend.report.pieces)
    # By default a program is recorded that takes the host longer than the GPU, as this one.
    assert [piece.recorded for piece in backend.report.pieces] == [graphs is not False] * 2, str(backend.report)
    assert any(node.op == "region" for piece in backend.report.pieces for node in piece.graph.nodes())  # type: ignore[union-attr]


def test_a_tables_gradient_in_bfloat16() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (4, 33), device="cuda")
    gradient = torch.randn(4, 33, 96, device="cuda", dtype=torch.bfloat16)
    exact = torch.ops.aten.embedding_dense_backward(gradient.double(), tokens, 50, -1, False)
    ours = embedding_gradient(gradient, tokens, 50, -1, False)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-2, atol=1e-2)


class Scaled(nn.Module):
    """A number that is a tensor of the host, as Gemma2 and Mistral have it."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.drop = drop
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) * torch.tensor(8.0, dtype=x.dtype)
        return self.second(nn.functional.dropout(hidden, self.drop, self.training and self.drop > 0)).softmax(-1)


def test_recorded_programs_leave_results_to_their_caller() -> None:
    """Results and gradients of earlier steps stay, two steps before one backward pass, gradients that are added up,
    forward passes without gradients between them, and a CUDA graph that the caller captures."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Scaled().cuda()
    inputs = [torch.randn(16, 64, device="cuda") for _ in range(6)]
    backend = Backend()
    compiled = torch.compile(model, backend=backend)

    def used(call: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        kept: list[torch.Tensor] = []
        for x in inputs:
            kept.append(call(x))
            kept[-1].square().sum().backward()
            kept.append(model.first.weight.grad)  # type: ignore[arg-type]
            model.first.weight.grad = None
            with torch.no_grad():
                kept.append(call(x + 1))
        for one, two in zip(inputs[:3], inputs[3:], strict=True):
            (call(one) * call(two)).sum().backward()
        return [*kept, *(weight.grad for weight in model.parameters() if weight.grad is not None)]

    used(compiled)  # compiles and records
    for mine, theirs in zip(used(compiled), used(model), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert all(piece.recorded for piece in backend.report.pieces), str(backend.report)
    with torch.no_grad():
        model.eval()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        for _ in range(3):
            compiled(inputs[0])
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            compiled(inputs[0])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = compiled(inputs[0])
        graph.replay()
        torch.testing.assert_close(result, compiled(inputs[0]), rtol=1e-5, atol=1e-6)


def test_recorded_dropout_draws_what_eager_draws() -> None:
    torch._dynamo.reset()
    model = Scaled(0.25).cuda()
    x = torch.randn(16, 64, device="cuda")
    backend = Backend()
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        compiled(x).sum().backward()
    torch.manual_seed(2)
    mine = [compiled(x).detach() for _ in range(2)]
    torch.manual_seed(2)
    theirs = [model(x).detach() for _ in range(2)]
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.equal(*mine)


@torch.library.custom_op("tilemesh_gpu_test::in_order", mutates_args=())
def in_order(x: torch.Tensor) -> torch.Tensor:
    """The elements as they lie in memory, as a kernel in C reads them."""
    return torch.as_strided(x, (x.numel(),), (1,), x.storage_offset()).clone()


@in_order.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel())


def test_operators_get_operands_that_lie_as_traced() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return in_order((x * 1.5).t().contiguous()) + in_order(torch.ones(64, 32, device="cuda")) * 2

    torch._dynamo.reset()
    x = torch.randn(64, 32, device="cuda")
    torch.testing.assert_close(torch.compile(run, backend=Backend())(x), run(x))


@pytest.mark.parametrize("graphs", [True, False])
def test_results_lie_as_in_eager(graphs: bool) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.tanh(x + 1)
        return y.t().contiguous(), x.t() + 1, x.t().contiguous(), torch.exp(y)[:, ::2], y.sum(0).expand(4, 32)

    torch._dynamo.reset()
    x = torch.randn(64, 32, device="cuda")
    compiled = torch.compile(run, backend=Backend(cuda_graphs=graphs))
    with torch.no_grad():
        for _ in range(3):
            for ours, theirs in zip(compiled(x), run(x), strict=True):
                assert ours.stride() == theirs.stride()
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_t5_is_as_near_to_float64_as_eager() -> None:
    """Every parameter's gradient in float32: at most twice as far from float64's as eager's own is.

    The squares of ReLUs: of 8 million operands of a ReLU one or two lie so near to zero that the order of additions
    decides their sign, eager's as ours, and each puts all gradients before it 10 to 1,000 times as far off.
    """
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=512, d_kv=64, d_ff=1024, num_layers=4, num_heads=8, vocab_size=8192, dropout_rate=0.0,
        decoder_start_token_id=0, feed_forward_proj="relu2",
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).cuda()
    exact = transformers.T5ForConditionalGeneration(config).cuda().double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    tokens, labels = (torch.randint(0, 8192, (4, 256), device="cuda") for _ in range(2))

    def gradients(module: nn.Module, call: Any) -> dict[str, torch.Tensor]:
        module.zero_grad(set_to_none=True)
        call(input_ids=tokens, labels=labels).loss.backward()
        return {name: value.grad.double() for name, value in module.named_parameters() if value.grad is not None}

    true, plain = gradients(exact, exact), gradients(model, model)
    ours = gradients(model, torch.compile(model, backend=Backend()))
    ratios = {name: float((ours[name] - true[name]).norm() / (plain[name] - true[name]).norm()) for name in true}
    far = {name: f"{ratio:.2f}" for name, ratio in ratios.items() if ratio > 2}
    assert len(ratios) > 50
    assert not far, f"times eager's error: {far}"


@pytest.mark.parametrize("bad", [7, -1])
def test_targets_and_rows_that_are_none_end_with_an_error(bad: int) -> None:
    """The device ends with it, and with it the process: each is tried in one of its own."""
    import subprocess
    import sys

    for call in (
        "cross_entropy(torch.randn(3, 5, device='cuda'), i)",
        "embedding(i, torch.randn(5, 2, device='cuda'))",
    ):
        text = (
            "import torch; from tilemesh.graph.backend import Backend; from torch.nn.functional import *\n"
            f"i = torch.tensor([1, {bad}, 2], device='cuda')\n"
            f"torch.compile(lambda i: {call} * 2, backend=Backend(cuda_graphs=False))(i); torch.cuda.synchronize()"
        )
        ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
        assert ended.returncode != 0, call
        assert "device-side assert" in ended.stderr, ended.stderr[-400:]
