"""What the host needs to launch a training step on a GPU: measured on models so small that the GPU only waits.

The one idea: launches cost the same whatever they launch. A model of two depths is trained for real, compiled and
eagerly, by the code that `tilemesh train` runs on one GPU; the difference of the depths is what a layer costs, the rest
what a step costs. Forward and backward passes, which a step makes once a microbatch, are timed apart from clipping and
the optimiser, within the same steps, by the host's clock: nothing is waited for in between, as in a run. Two kinds of
layer: GPT-2's (LayerNorm, biases, gelu) and Llama's (RMSNorm, rotary, grouped heads, swiglu).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemesh.comm.connection import connect
from tilemesh.measure.figure import Figure, FigureOutcome
from tilemesh.measure.sample import Sample
from tilemesh.model.config import ModelConfig
from tilemesh.model.kernels import PLAIN, STANDARD
from tilemesh.model.loss import loss_sum
from tilemesh.model.programs.prepare import prepare
from tilemesh.model.programs.program import TRAINING
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.gradients import LocalGradients, Parts
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import trained
from tilemesh.train.config import OptimizerConfig
from tilemesh.train.optimizer import Optimizer
from tilemesh.train.plain import gpu_use

DEPTHS = (2, 6)
SMALL: Mapping[str, Any] = {"width": 64, "heads": 2, "vocabulary": 256, "context": 32}
"""Its kernels take a few microseconds each on any GPU, less than launching them."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "gpt": {},
    "llama": {
        "kv_heads": 1, "norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "biases": False, "tied": False,
    },
}  # fmt: skip
CODES = ("compiled", "eager")
PARTS: Mapping[str, str] = {
    "passes": "passes, without layers",
    "passes-layer": "passes, a layer",
    "update": "update, without layers",
    "update-layer": "update, a layer",
}
"""Of either part of a step what it costs by itself and for each layer: keys of a calibration, and words."""

WARM_STEPS = 6
STEPS = 16
ROUNDS = 9
_LEAST_S = 1e-9  # what noise makes negative costs nothing, and a calibration holds no zeros


def host_figures(device: str = "cuda") -> list[Figure]:
    """Not yet measured; what belongs to one kind and code is measured with the first of its figures."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    figures = []
    for kind in KINDS:
        for code in CODES:
            costs = HostCosts(kind, code, device)
            figures += [_figure(name, costs, part) for part in PARTS]
    return figures


def _figure(name: str, costs: HostCosts, part: str) -> Figure:
    return Figure(
        part="gpu",
        rate="host_s",
        name="host",
        case={"gpu": name, "layers": costs.kind, "code": costs.code, "what": PARTS[part]},
        unit="s",
        predicted=None,
        limit=None,
        missing={
            "predicted": "nothing predicts it: predictions are made of these figures",
            "limit": "no datasheet says what Python costs",
            "peers": "it is torch's own cost",
        },
        measure=partial(costs.outcome, part),
        key=f"{costs.kind}-{costs.code}-{part}",
    )


@dataclass(frozen=True)
class Read:
    """Seconds of one depth's passes, and of what follows them in a step."""

    passes_s: float
    update_s: float


def split(shallow: Read, deep: Read, depths: tuple[int, int] = DEPTHS) -> dict[str, float]:
    """Seconds by part: a line through the two depths, for the passes and for what comes after them."""
    few, many = depths
    parts = {}
    for name, low, high in (
        ("passes", shallow.passes_s, deep.passes_s),
        ("update", shallow.update_s, deep.update_s),
    ):
        layer = max(_LEAST_S, (high - low) / (many - few))
        parts[f"{name}-layer"] = layer
        parts[name] = max(_LEAST_S, low - few * layer)
    return parts


class HostCosts:
    """The costs of one kind of layer in one code."""

    def __init__(self, kind: str, code: str, device: str, rounds: int = ROUNDS) -> None:
        self.kind, self.code, self.device, self.rounds = kind, code, device, rounds

    def outcome(self, part: str) -> FigureOutcome:
        return FigureOutcome(Sample.of([parts[part] for parts in self.rounds_read]))

    @cached_property
    def rounds_read(self) -> list[dict[str, float]]:
        """The parts as each round has them: some steps of one depth, then of the other."""
        torch.compiler.reset()  # what was compiled for another kind is asked first, each time, whether it fits
        steps = [small_step(self.kind, self.code, self.device, layers) for layers in DEPTHS]
        for step in steps:
            for _ in range(WARM_STEPS):  # compiles
                step.passes()
                step.update()
        rounds = []
        for _ in range(self.rounds):
            shallow, deep = (self._read(step) for step in steps)
            rounds.append(split(shallow, deep))
        return rounds

    def _read(self, step: SmallStep) -> Read:
        """Medians over some steps: one that the machine interrupts moves neither."""
        self._wait()
        passes, updates = [], []
        for _ in range(STEPS):
            began = time.perf_counter()
            step.passes()
            between = time.perf_counter()
            step.update()
            ended = time.perf_counter()
            passes.append(between - began)
            updates.append(ended - between)
        self._wait()
        return Read(statistics.median(passes), statistics.median(updates))

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


class SmallStep(NamedTuple):
    """A training step in two parts: forward and backward; clipping, optimiser, and gradients forgotten."""

    passes: Callable[[], None]
    update: Callable[[], None]


def small_step(kind: str, code: str, device: str, layers: int) -> SmallStep:
    """A training step of so many small layers."""
    config = ModelConfig(layers=layers, **SMALL, **KINDS[kind])
    model = Transformer(config, device=device, kernels=PLAIN if code == "compiled" else STANDARD).train()
    programs = prepare(model, gpu_use(compiled=True) if code == "compiled" else TRAINING, device)
    parameters = trained(model)
    gradients = LocalGradients(Parts(parameters, Mesh(connect("alone"))), config.context)
    optimizer = Optimizer(OptimizerConfig(), parameters, "bf16")
    # A CPU without bf16 products, where the tests run this, takes them one by one.
    autocast = device == "cuda"
    tokens = torch.randint(config.vocabulary, (1, config.context + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = programs(inputs)
        return loss_sum(logits, targets)

    run: Any = torch.compile(loss) if code == "compiled" else loss

    def passes() -> None:
        total, count = run(inputs, targets)
        gradients.backward(total, count, last=True, scale=1.0)

    def update() -> None:
        done = gradients.finish(1.0, divide=not optimizer.divides)
        optimizer.step(1e-4, done.divisor)
        gradients.clear()

    return SmallStep(passes, update)
