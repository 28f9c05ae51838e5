"""AdamW and SGD over named shards of parameters, with their state by the same names, and the precisions.

The one idea: what an optimiser remembers of a parameter has the parameter's shape and is cut like it (its shard says
how), so a checkpoint stores it beside the weight and any layout can read it back. Whose parameters they are, or whether
they are all of a layer's, is not asked. The arithmetic is torch's optimisers' or tilemesh's (`updates.py`). With 16-bit
weights (`bf16-master`) a float32 copy of each is what is stepped.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from tilemesh.core.errors import RunError
from tilemesh.core.shard import Shard
from tilemesh.model.kernels import TORCH
from tilemesh.parallel.shard import Held
from tilemesh.runs.manifest import WEIGHT
from tilemesh.train.config import OptimizerConfig
from tilemesh.train.updates import KernelUpdate, TorchUpdate, Update

_KINDS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-master": torch.bfloat16, "fp16": torch.float16}
STORED = {"bf16-master": torch.bfloat16, "fp64": torch.float64}


def stored_dtype(precision: str) -> torch.dtype:
    """The dtype the model's parameters are kept in."""
    return STORED.get(precision, torch.float32)


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype matmuls run in where that is not the parameters'; None: no autocast."""
    return COMPUTE[precision] if precision in ("bf16", "fp16") else None


def warning(precision: str, device: torch.device) -> str:
    """What to tell who asks for 16-bit products of a CPU that has none; torch's own words for it fill a screen."""
    short = "fp16" if precision == "fp16" else "bf16"
    if device.type != "cpu" or not precision.startswith(short):
        return ""
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    if _multiplies(short):
        return ""
    return f"SLOW: this CPU multiplies no {short} numbers, torch takes them one by one; use plan.precision=fp32"


def _multiplies(short: str) -> bool:
    """Whether torch's library for CPUs has products of this kind here."""
    asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{short}_supported", None)
    return asked is None or bool(asked())


class Optimizer:
    """Steps parameters. `tensors` is everything a checkpoint has to keep of them."""

    def __init__(self, config: OptimizerConfig, held: Mapping[str, Held], precision: str, kernels: str = TORCH) -> None:
        """`kernels`: who does AdamW's arithmetic, "torch" or the implementation of tilemesh's operator."""
        self.config = config
        self.shards = {name: shard for name, (_, shard) in held.items()}
        self.kinds = _KINDS[config.name] if config.name == "adamw" or config.momentum else ()
        self.parameters = {name: tensor for name, (tensor, _) in held.items()}
        self.has_masters = precision == "bf16-master"
        self.stepped: dict[str, nn.Parameter] = self.parameters
        if self.has_masters:
            self.stepped = {name: nn.Parameter(value.detach().float()) for name, value in self.parameters.items()}
        self.steps = 0
        decay = {name: config.weight_decay if decays(self.shards[name].whole) else 0.0 for name in self.stepped}
        self._update: Update
        if _is_ours(kernels, config, self.stepped):
            self._update = KernelUpdate(config, self.parameters, self.stepped, decay, kernels)
        else:
            self._update = TorchUpdate(config, self.parameters, self.stepped, decay)

    @property
    def is_ours(self) -> bool:
        """Whether tilemesh's kernels step the parameters."""
        return isinstance(self._update, KernelUpdate)

    @property
    def divides(self) -> bool:
        """Whether `step` can divide gradients on its way."""
        return self._update.divides

    @property
    def divides_in_passing(self) -> bool:
        """Whether gradients that ranks have summed are better left undivided for it."""
        return self._update.divides_in_passing

    @property
    def is_capturable(self) -> bool:
        """Whether `move` can be captured as a CUDA graph: kernels then read a rate that is on the device."""
        return self._update.is_capturable

    def capturing(self, now: bool) -> None:
        """Told before `move` is captured, and after."""
        self._update.capturing(now)

    def step(self, rate: float | Tensor, divisor: Tensor | None = None) -> None:
        """Move the parameters, and count it."""
        self.move(rate, divisor)
        self.steps += 1

    @torch.no_grad()
    def move(self, rate: float | Tensor, divisor: Tensor | None = None) -> None:
        """Move the parameters along their gradients, divided by `divisor` where one is given, at this rate."""
        self._update.move(rate, divisor)

    # State --------------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """("KIND:PARAMETER", shard, tensor) of all there is to keep; before the first step only the weights."""
        for name, value in self.stepped.items():
            yield f"{WEIGHT}:{name}", self.shards[name], value.detach()
        if self.steps:
            for kind in self.kinds:
                for name in self.stepped:
                    yield f"{kind}:{name}", self.shards[name], self._update.state(name)[kind]

    def kept(self) -> Iterator[Tensor]:
        """Every tensor that is the optimiser's alone: what it remembers, and float32 copies of 16-bit weights."""
        if self.has_masters:
            yield from self.stepped.values()
        yield from self._update.kept()

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Weights from elsewhere, local shapes; what the optimiser remembers is left as it is."""
        for name, value in self.stepped.items():
            value.copy_(weights[name])
            if self.has_masters:
                self.parameters[name].copy_(value)

    @torch.no_grad()
    def load(self, steps: int, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        """What `tensors` gave, of a run that had made so many steps."""
        self.load_weights({name: tensors[WEIGHT, name] for name in self.stepped})
        self.steps = steps
        if not steps:
            return
        states = {}
        for name, value in self.stepped.items():
            states[name] = {kind: tensors[kind, name].to(value.device, value.dtype) for kind in self.kinds}
            for kind, found in states[name].items():
                if found.shape != value.shape:
                    raise RunError(f"{kind} of {name} has shape {tuple(found.shape)}, expected {tuple(value.shape)}")
        self._update.put(steps, states)


def _is_ours(kernels: str, config: OptimizerConfig, stepped: Mapping[str, nn.Parameter]) -> bool:
    """Whether tilemesh's kernels do the arithmetic: they have AdamW, and on a CPU torch's own is the quicker one."""
    if kernels == TORCH or config.name != "adamw" or config.fused is False or not stepped:
        return False
    on_gpu = all(value.is_cuda and value.is_contiguous() for value in stepped.values())
    return on_gpu or kernels == "interpret"


def decays(whole: Sequence[int]) -> bool:
    """Whether weight decay applies to a parameter of this whole shape: to matrices, not to biases and norms."""
    return len(whole) >= 2


class LossScale:
    """A factor that keeps fp16 gradients off zero: doubled after a while without overflow, halved at one.

    A pure function of which steps overflowed, which all ranks see alike.
    """

    def __init__(self, on: bool, value: float = 2.0**14, patience: int = 1000) -> None:
        self.on, self.value, self.patience = on, value if on else 1.0, patience
        self.good = 0

    def update(self, overflowed: bool) -> None:
        if not self.on:
            return
        if overflowed:
            self.value, self.good = max(1.0, self.value / 2), 0
        else:
            self.good += 1
            if self.good % self.patience == 0:
                self.value = min(2.0**24, self.value * 2)

    def state(self) -> dict[str, float]:
        return {"scale": self.value, "good": self.good}

    def load(self, state: Mapping[str, float]) -> None:
        if self.on:
            self.value, self.good = float(state["scale"]), int(state["good"])
