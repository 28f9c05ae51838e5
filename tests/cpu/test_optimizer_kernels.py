"""AdamW of tilemesh's kernels inside of training: the same steps, the same state, the same checkpoints as torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilemesh.comm.connection import connect
from tilemesh.core.errors import RunError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.shard import Shard
from tilemesh.kernels.accuracy import unit
from tilemesh.model.config import preset
from tilemesh.model.kernels import PLAIN
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.apply import lay
from tilemesh.parallel.gradients import settle
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import Held
from tilemesh.train.config import LoopConfig, OptimizerConfig, TrainConfig
from tilemesh.train.optimizer import Optimizer
from tilemesh.train.plain import product_parameters
from tilemesh.train.rank import make_optimizer

pytest.importorskip("triton")

SHAPES = {"w": (5, 3), "bias": (7,), "table": (2, 1024)}
CONFIG = OptimizerConfig(name="adamw", weight_decay=0.1)


def drawn(dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
    }


class Stepped:
    """An optimizer over drawn parameters; each step has drawn gradients."""

    def __init__(self, precision: str, kernels: str) -> None:
        self.dtype = {"bf16-master": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
        values = {name: torch.nn.Parameter(value) for name, value in drawn(self.dtype, 0).items()}
        self.held = {name: Held(value, Shard(name, tuple(value.shape), (), 0)) for name, value in values.items()}
        self.optimizer = Optimizer(CONFIG, self.held, precision, kernels)

    def step(self, number: int, divisor: Tensor | None = None) -> None:
        for name, gradient in drawn(self.dtype, number).items():
            self.held[name].tensor.grad = gradient
        self.optimizer.step(0.01 * number, divisor)

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, _, tensor in self.optimizer.tensors()}


@pytest.mark.parametrize(("precision", "u"), [("fp64", 2.0**-53), ("fp32", unit(torch.float32))])
def test_three_steps_are_torchs(precision: str, u: float) -> None:
    ours, torchs = Stepped(precision, "interpret"), Stepped(precision, "torch")
    assert (ours.optimizer.is_ours, torchs.optimizer.is_ours) == (True, False)
    for number in (1, 2, 3):
        ours.step(number)
        torchs.step(number)
    for name, found in ours.tensors().items():
        # Some 12 roundings a step, on either side.
        torch.testing.assert_close(found, torchs.tensors()[name], rtol=0, atol=2 * 3 * 12 * u * 4)


def test_masters_are_what_is_stepped_and_weights_are_masters_rounded() -> None:
    ours, torchs = Stepped("bf16-master", "interpret"), Stepped("bf16-master", "torch")
    for number in (1, 2):
        ours.step(number)
        torchs.step(number)
    for name, found in ours.tensors().items():
        torch.testing.assert_close(found, torchs.tensors()[name], rtol=0, atol=2 * 2 * 12 * unit(torch.float32) * 4)
    for name, (parameter, _) in ours.held.items():
        assert torch.equal(parameter, ours.optimizer.stepped[name].to(torch.bfloat16))


@pytest.mark.parametrize("precision", ["fp32", "bf16-master"])
@pytest.mark.parametrize(("first", "second"), [("interpret", "torch"), ("torch", "interpret")])
def test_either_goes_on_from_the_others_checkpoint(precision: str, first: str, second: str) -> None:
    whole, begun, rest = Stepped(precision, second), Stepped(precision, first), Stepped(precision, second)
    begun.step(1)
    kept = {tuple(name.split(":", 1)): tensor for name, tensor in begun.tensors().items()}
    rest.optimizer.load(1, kept)  # type: ignore[arg-type]
    assert {name: tensor.tolist() for name, tensor in rest.tensors().items()} == {
        name: tensor.tolist() for name, tensor in begun.tensors().items()
    }
    rest.step(2)
    for number in (1, 2):
        whole.step(number)
    for name, found in rest.tensors().items():
        torch.testing.assert_close(found, whole.tensors()[name], rtol=0, atol=2 * 2 * 12 * unit(torch.float32) * 4)


def test_a_stopped_run_goes_on_bit_for_bit() -> None:
    whole, begun, rest = (Stepped("fp32", "interpret") for _ in range(3))
    begun.step(1)
    rest.optimizer.load(1, {tuple(name.split(":", 1)): tensor for name, tensor in begun.tensors().items()})  # type: ignore[misc]
    rest.step(2)
    for number in (1, 2):
        whole.step(number)
    for name, found in rest.tensors().items():
        assert torch.equal(found, whole.tensors()[name])


def test_16_bit_gradients_are_divided_in_float32() -> None:
    """By masters too: divided before, each would be rounded to 16 bits once more, and a factor on a GPU as well."""
    torchs, ours = Stepped("bf16-master", "torch"), Stepped("bf16-master", "interpret")
    assert torchs.optimizer.divides_wide
    assert ours.optimizer.divides_wide
    for stepped in (torchs, ours):
        stepped.step(1, torch.tensor(3.3))
    averages = {name: value for name, value in torchs.tensors().items() if name.startswith("exp_avg:")}
    for name, gradient in drawn(torch.bfloat16, 1).items():
        exact = (1 - CONFIG.betas[0]) * gradient.double() / 3.3
        torch.testing.assert_close(averages[f"exp_avg:{name}"].double(), exact, rtol=4 * unit(torch.float32), atol=0)
    for name, value in ours.tensors().items():
        torch.testing.assert_close(value, torchs.tensors()[name], rtol=16 * unit(torch.float32), atol=1e-9)


@pytest.mark.parametrize("norm", [5.0, 0.5])
def test_clipping_over_a_mesh_is_folded_into_the_step(norm: float) -> None:
    """What `settle` leaves undivided, the step divides: sums over 8 tokens, clipped to a norm of 1."""
    divided, folded = Stepped("fp64", "torch"), Stepped("fp64", "interpret")

    def step(stepped: Stepped, divide: bool) -> None:
        gradients = drawn(torch.float64, 1)
        for name, gradient in gradients.items():
            stepped.held[name].tensor.grad = gradient
        options: dict[str, Any] = {"factor": 1 / 8, "max_norm": 1.0, "divide": divide}
        done = settle(list(gradients.values()), 2.0, 8, norm, **options)
        assert (done.divisor is None) is divide
        stepped.optimizer.step(0.01, done.divisor)

    step(divided, True)
    step(folded, not folded.optimizer.is_ours)
    for name, found in folded.tensors().items():
        torch.testing.assert_close(found, divided.tensors()[name], rtol=0, atol=1e-14)


@pytest.mark.parametrize("norm", [5.0, 0.5])
@pytest.mark.parametrize("factor", [1.0, 1 / 8])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_norm_that_is_still_being_computed_clips_as_a_number_does(
    norm: float, factor: float, max_norm: float | None
) -> None:
    """Means longer than `max_norm` become that long, shorter ones stay: multiplied here, or divided by the step."""
    expected = factor * (min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0)  # torch's clip_grad_norm_
    gradient = torch.tensor([3.0, -4.0], dtype=torch.float64)
    for known in (norm, torch.tensor(norm, dtype=torch.float64)):
        multiplied = gradient.clone()
        done = settle([multiplied], 2.0, 8, known, factor=factor, max_norm=max_norm)
        assert done.divisor is None
        torch.testing.assert_close(multiplied, gradient * expected, rtol=1e-14, atol=0)
        left = gradient.clone()
        done = settle([left], 2.0, 8, known, factor=factor, max_norm=max_norm, divide=False)
        assert torch.equal(left, gradient)
        divisor = 1.0 if done.divisor is None else float(done.divisor)
        assert divisor == pytest.approx(1 / expected, rel=1e-14)


def test_who_steps_is_decided_by_device_and_configuration() -> None:
    assert not Stepped("fp32", "auto").optimizer.is_ours  # on a CPU torch's own fused step is the quicker one
    held = Stepped("fp32", "torch").held
    for config in (OptimizerConfig(name="sgd"), OptimizerConfig(name="adamw", fused=False)):
        assert not Optimizer(config, held, "fp32", "interpret").is_ours


def test_a_parameter_without_a_gradient_is_named() -> None:
    ours = Stepped("fp32", "interpret")
    with pytest.raises(RunError, match="w has no gradient"):
        ours.optimizer.step(0.1)


class Narrow:
    """A tiny gpt2 under autocast on one process, stepped by tilemesh's AdamW, with its products' weights in 16 bits."""

    def __init__(self, is_narrow: bool, accumulation: int = 1) -> None:
        model = preset("gpt2-124m").replace(
            layers=1, width=16, heads=2, kv_heads=2, mlp_width=24, vocabulary=37, context=4, dropout=0.0
        )
        plan = ParallelPlan(precision="bf16", microbatch=2, accumulation=accumulation)
        self.config = TrainConfig(model=model, train=LoopConfig(batch=plan.batch), optimizer=CONFIG, plan=plan)
        made = Transformer(model, seed=3, kernels=PLAIN).train()
        self.laid: Laid = lay(made, Mesh(connect("alone")), plan, gradients="local", tokens=8 * accumulation)
        if is_narrow:
            self.optimizer = make_optimizer(self.config, self.laid, "interpret")
        else:
            self.optimizer = Optimizer(CONFIG, self.laid.gradients.stepped, "bf16", "interpret")

    def step(self, number: int, clip: float | None = None) -> tuple[float, float]:
        tokens = torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(number))
        total, count = self.laid.loss(tokens[:, :-1], tokens[:, 1:])
        self.laid.gradients.backward(total, count)
        done = self.laid.gradients.finish(clip, divide=not self.optimizer.divides)
        self.optimizer.step(0.01, done.divisor)
        self.laid.gradients.clear()
        return float(done.loss), float(done.norm)

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, _, tensor in self.optimizer.tensors()}


def test_weights_that_products_read_are_written_in_16_bits_by_the_step() -> None:
    """Autocast rounds weights and widens gradients in passes of their own: the same losses and float32 states, bit for
    bit, come out without them."""
    wide, narrow = Narrow(False), Narrow(True)
    names = {name for name, value in narrow.laid.module.named_parameters() if value.dtype == torch.bfloat16}
    assert names == product_parameters(wide.laid.module) == narrow.optimizer.mastered
    assert "layers.0.mlp.fc_in.bias" in names
    assert not {name for name in names if "norm" in name or "embedding" in name}
    for number in (1, 2, 3):
        assert narrow.step(number)[0] == wide.step(number)[0]
    kept = wide.tensors()
    assert {value.dtype for value in kept.values()} == {torch.float32}
    for name, found in narrow.tensors().items():
        assert torch.equal(found, kept[name]), name
    for name in names:
        assert torch.equal(dict(narrow.laid.module.named_parameters())[name], kept[f"weight:{name}"].bfloat16())


def test_narrow_weights_are_clipped_and_go_on_from_a_checkpoint_of_wide_ones() -> None:
    wide, narrow = Narrow(False), Narrow(True)
    wide.step(1)
    narrow.optimizer.load(1, {tuple(name.split(":", 1)): tensor for name, tensor in wide.tensors().items()})  # type: ignore[misc]
    _, norm = wide.step(2, clip=0.1)
    # Squares are added in another order: 300 terms at most, and the root halves what that comes to.
    assert narrow.step(2, clip=0.1)[1] == pytest.approx(norm, rel=300 * unit(torch.float32))
    assert norm > 0.1
    kept = wide.tensors()
    for name, found in narrow.tensors().items():
        torch.testing.assert_close(found, kept[name], rtol=1e-4, atol=1e-7)


def test_gradients_that_add_up_stay_float32() -> None:
    """Over microbatches, and over ranks (whose steps are waited for): in 16 bits the sums would round."""
    assert not Narrow(True, accumulation=2).optimizer.mastered
