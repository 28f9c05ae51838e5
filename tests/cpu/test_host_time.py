"""What the host does for a product on a GPU, the launch left out: compiled plans are replaced by ones that launch
nothing, so that what surrounds them runs on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from tilemesh import kernels
from tilemesh.kernels import context
from tilemesh.kernels.adamw.reference import AdamW
from tilemesh.kernels.launch import call, operator
from tilemesh.kernels.launch.gpu import described_gpu
from tilemesh.kernels.lowbit.codes import quantize
from tilemesh.kernels.lowbit.formats import Scheme
from tilemesh.kernels.lowbit_linear import kernel as lowbit
from tilemesh.kernels.lowbit_linear import some_rows, tokens
from tilemesh.kernels.matmul import op
from tilemesh.kernels.matmul.run import TilesRunner
from tilemesh.kernels.scaled_matmul import kernel as scaled
from tilemesh.kernels.scaled_matmul.reference import by_library

MOST = 5
"""Times of torch's own call of a tiny product, which is 7 us where the products below are 9 to 20."""


def times(cls: type[call.Launched]) -> call.Launched:
    """A plan that was compiled."""
    made = cls.__new__(cls)
    made.device, made.index, made.several, made.scratch_begins, made.known = torch.device("cpu"), 0, False, [], {}
    made.program = SimpleNamespace(calls=lambda place: made.known.setdefault(place, [(int, ())]))  # type: ignore
    return made


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Plans that were compiled since."""
    plans: list[object] = []
    monkeypatch.setattr(call, "_compile", lambda plan, *_: plans.append(plan) or times(call.Launched))
    monkeypatch.setattr(operator, "implementation_of", lambda *_: "triton")
    monkeypatch.setattr(op, "prepare_on", lambda *_: times(TilesRunner))
    facts = {"serves": True, "launches_early": True, "device_index": 0, "gpu_of": described_gpu("h200")}
    for name, value in facts.items():
        monkeypatch.setattr(tokens, name, lambda *_, value=value: value)
    monkeypatch.setattr(some_rows, "form_of", lambda rows: None)
    return plans


W, CODES, SCALES = torch.randn(64, 128).bfloat16(), torch.zeros(4096, 64, dtype=torch.uint8), torch.ones(4096, 1)
X, ROW, GAIN = torch.randn(8, 128).bfloat16(), torch.randn(1, 128).bfloat16(), torch.ones(128).bfloat16()
BYTES = (torch.zeros(8, 128, dtype=torch.int8), torch.zeros(64, 128, dtype=torch.int8))
FACTORS = (torch.ones(8, 1), torch.ones(64, 1))
PRODUCTS: dict[str, Callable[[], object]] = {
    "fused_matmul": lambda: kernels.fused_matmul(X, W.t()),
    "row_linear": lambda: kernels.row_linear(ROW, W, gate="silu", settled=True),
    "norm_row_linear": lambda: kernels.norm_row_linear(ROW, ROW, GAIN, W, gate="silu", settled=True),
    "few_linear": lambda: kernels.few_linear(X, W),
    "lowbit_linear": lambda: kernels.lowbit_linear(X, CODES, SCALES, settled=True),
    "lowbit_linear of one token": lambda: kernels.lowbit_linear(ROW, CODES, SCALES, settled=True),
    "norm_lowbit_linear": lambda: kernels.norm_lowbit_linear(ROW, ROW, GAIN, CODES, SCALES, settled=True),
    "scaled_matmul": lambda: kernels.scaled_matmul(*BYTES, *FACTORS),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_found_by_one_look_up(name: str, planned: list[object]) -> None:
    """Codes of 4 bits on a GPU were the one product that was not: their call took 80 to 190 us each time."""
    with context.use(context.Context()), torch.no_grad():
        PRODUCTS[name]()
        plans = len(planned)
        ours, torchs = seconds(PRODUCTS[name], lambda: functional.linear(ROW, W))
    assert len(planned) == plans
    assert ours < MOST * torchs, f"{1e6 * ours:.1f} us, torch {1e6 * torchs:.1f}"


def test_a_product_of_the_library_is_repeated_like_a_launch(
    planned: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes that are decoded for many tokens, and fp8 codes of few."""
    monkeypatch.setattr(scaled, "library_is_quicker", lambda *_: True)
    made = quantize(X, Scheme("fp8")), quantize(W, Scheme("fp8"))
    given = (*(each.codes for each in made), *(each.scales for each in made))
    with context.use(context.Context()), torch.no_grad():
        lowbit_many = kernels.lowbit_linear(torch.ones(200, 128), CODES, SCALES)
        found = kernels.scaled_matmul(*given, code="fp8")
        assert len(planned) == 1
        monkeypatch.setattr(lowbit, "forward", None)
        monkeypatch.setattr(scaled, "forward", None)
        assert kernels.lowbit_linear(torch.ones(200, 128), CODES, SCALES).shape == lowbit_many.shape
        assert torch.equal(kernels.scaled_matmul(*given, code="fp8"), found)
    torch.testing.assert_close(found, X @ W.t(), rtol=0.1, atol=1.5)


def test_a_product_of_the_library_costs_little_beside_its_own_call(
    planned: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recording took views with their history, and named the overload: as long as the library's call again."""
    monkeypatch.setattr(scaled, "library_is_quicker", lambda *_: True)
    made = quantize(X[:1, :16], Scheme("fp8")), quantize(W[:16, :16], Scheme("fp8"))
    given = (*(each.codes for each in made), *(each.scales for each in made))
    with context.use(context.Context()), torch.no_grad():
        ours, torchs = seconds(
            lambda: kernels.scaled_matmul(*given, code="fp8"), lambda: by_library(*given, code="fp8")
        )
    assert ours < 3 * torchs, f"{1e6 * ours:.1f} us, torch {1e6 * torchs:.1f}"


def test_a_step_of_adamw_asks_tensors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether 64 tensors lie where they lay took 25 us, where a launch over all of them is 6."""
    monkeypatch.setattr(call, "compiled", lambda *_, **__: times(call.Launched))
    parameters, gradients, averages, squares = ([torch.randn(64) for _ in range(16)] for _ in range(4))
    adamw = AdamW(parameters, averages, squares)
    monkeypatch.setattr(adamw, "how", "triton")
    rate, step = torch.tensor(1e-3), torch.tensor(10.0)
    tensors = (*parameters, *gradients, *averages, *squares)
    ours, asked = seconds(
        lambda: adamw.step(gradients, rate=rate, step=step), lambda: [tensor.data_ptr() for tensor in tensors]
    )
    assert ours < 5 * asked, f"{1e6 * ours:.1f} us, the addresses {1e6 * asked:.1f}"


def seconds(*functions: Callable[[], object]) -> list[float]:
    """Of each call: the processor's time for it in the quickest of many readings, taken in turns."""
    quickest = [float("inf") for _ in functions]
    for _ in range(40):
        for at, function in enumerate(functions):
            begin = time.thread_time()
            for _ in range(50):
                function()
            quickest[at] = min(quickest[at], (time.thread_time() - begin) / 50)
    return quickest
