"""AdamW, SGD, Lion and Muon over named shards of parameters, with their state by the same names, and the precisions.

The one idea: what an optimiser remembers of a parameter has the parameter's shape and is cut like it (its shard says
how), so a checkpoint stores it beside the weight and any layout can read it back. Whose parameters they are, or whether
they are all of a layer's, is not asked. The arithmetic is done by torch's own functions (`update.py`; fused into one
kernel where torch has that) or by tilemesh's kernels (`stepping.py`). With 16-bit weights (`bf16-master`) a float32
copy of each, its master, is what is stepped; torch steps one parameter at a time then, without a second copy of all
gradients. Under autocast (`bf16`) tilemesh's kernels can keep weights that only products read in the same way: the step
that writes the float32 value writes the 16-bit one too, and no pass casts weights or their gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.plan import MASTERED
from tilemesh.core.shard import Shard
from tilemesh.model.kernels import TORCH
from tilemesh.parallel.gradients import GradientStep
from tilemesh.parallel.matrices import MatrixGroup, MatrixRound
from tilemesh.parallel.shard import Held
from tilemesh.runs.manifest import WEIGHT
from tilemesh.train.config import OptimizerConfig
from tilemesh.train.rules import decay_of, kinds_of, rule_of
from tilemesh.train.stepping import KernelUpdate, is_stepped_by_kernels
from tilemesh.train.update import UpdateGroup

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}
STORED = {**dict.fromkeys(MASTERED, torch.bfloat16), "fp64": torch.float64}


def stored_dtype(precision: str) -> torch.dtype:
    """The dtype the model's parameters are kept in."""
    return STORED.get(precision, torch.float32)


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype matmuls run in where that is not the parameters'; None: no autocast."""
    return COMPUTE.get(precision)


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
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{short}_supported", None)
    return is_supported is None or bool(is_supported())


class Optimizer:
    """Steps parameters. `tensors` is everything a checkpoint has to keep of them."""

    def __init__(
        self,
        config: OptimizerConfig,
        trained: Mapping[str, Held],
        precision: str,
        kernels: str = TORCH,
        narrowed: Collection[str] = (),
        matrices: MatrixGroup | None = None,
    ) -> None:
        """`kernels`: who does AdamW's arithmetic, "torch" or the implementation of tilemesh's operator.

        `narrowed`: float32 parameters that the model is to hold in 16 bits from now on, where tilemesh's kernels step
        them; their float32 values are then the optimizer's.

        `matrices`: for Muon, the ranks that hold the other parts of what is held in part. All of them make the same
        steps, with the same parameters in the same order.
        """
        self.config = config
        self.shards = {name: shard for name, (_, shard) in trained.items()}
        self.kinds = {name: kinds_of(config, name, shard.whole) for name, shard in self.shards.items()}
        """What is remembered of each parameter."""
        self.parameters = {name: tensor for name, (tensor, _) in trained.items()}
        is_ours = is_stepped_by_kernels(kernels, config, self.parameters)
        rule = {name: rule_of(config, name, self.shards[name].whole) for name in self.parameters}
        masters = {name for name in self.parameters if rule[name] != "sign"} if precision in MASTERED else narrowed
        self.mastered = frozenset(masters if precision in MASTERED or is_ours else ())
        """Parameters of 16 bits, whose float32 masters are what is stepped."""
        self.stepped: dict[str, nn.Parameter] = {
            name: nn.Parameter(value.detach().float()) if name in self.mastered else value
            for name, value in self.parameters.items()
        }
        for name in self.mastered:
            if self.parameters[name].dtype != torch.bfloat16:
                self.parameters[name].data = self.parameters[name].data.to(torch.bfloat16)
        self.steps = 0
        self.server_steps: list[int] = []
        """Those of each server, where they are its steps."""
        is_fused = config.fused
        if is_fused is None:
            is_fused = all(value.device.type in ("cpu", "cuda") for value in self.stepped.values())

        decay = {name: decay_of(config, name, self.shards[name].whole) for name in self.stepped}
        self.is_ours = is_ours
        """Whether tilemesh's kernels step the parameters."""
        self.groups: list[UpdateGroup | KernelUpdate] = []
        if is_ours:
            by_kernels = {name: value for name, value in self.parameters.items() if rule[name] == config.name}
            wide = {name: self.stepped[name] for name in by_kernels}
            self.groups = [KernelUpdate(config, by_kernels, wide, decay, kernels)] if by_kernels else []
            rule = {name: word for name, word in rule.items() if name not in by_kernels}
        self.groups += self._grouped(decay, rule, is_fused, matrices)

    def _grouped(
        self, decay: Mapping[str, float], rule: Mapping[str, str], is_fused: bool, matrices: MatrixGroup | None
    ) -> Iterator[UpdateGroup]:
        """Parameters with one rule and one decay. With masters each alone: its float32 gradient lives only while it is
        stepped; but matrices of which ranks hold parts by rounds of their exchange."""
        names: dict[tuple[str, str, float, bool], list[str]] = {}
        for name in rule:
            is_cut = rule[name] == "muon" and bool(self.shards[name].cuts)
            alone = name if name in self.mastered and not is_cut else ""
            names.setdefault((alone, rule[name], decay[name], is_cut), []).append(name)
        for (_, _, _, is_cut), together in names.items():
            rounds: Iterable[MatrixRound | None] = [None]
            if is_cut:
                if matrices is None:
                    raise UsageError(f"{together[0]} is held in parts: Muon needs matrices=MatrixGroup(mesh, plan)")
                rounds = matrices.rounds(self.shards[name] for name in together)
            for part in rounds:
                chosen = together if part is None else [shard.name for shard in part.shards]
                parameters, first = {name: self.stepped[name] for name in chosen}, chosen[0]
                yield UpdateGroup(self.config, parameters, decay[first], is_fused, rule=rule[first], matrices=part)

    clips_elsewhere = False
    """Whether gradients are handed to `step` unclipped, since who makes the update clips them."""
    is_asked_to_stop = False
    """Whether a rank that only this optimizer hears of was asked to stop."""

    def reached(self, step: int) -> int:
        """The step at which this rank is after `step`; a later one where others have gone on without it."""
        return step

    def stop(self) -> None:
        """The run stops after this step, before its last one: what a checkpoint keeps is now to be what it stays."""

    def settle(self) -> None:
        """Wait until what is stepped is where it lies between steps."""

    @property
    def divides_wide(self) -> bool:
        """Whether `step` divides gradients on its way, 16-bit ones too in float32: else they are rounded once more."""
        return self.is_ours or bool(self.mastered)

    @property
    def divides(self) -> bool:
        """Whether `step` can divide gradients on its way: torch's fused kernels can, by what they call a scale."""
        return self.divides_wide or all(group.is_fused for group in self.groups)

    @property
    def is_capturable(self) -> bool:
        """Whether `move` can be captured as a CUDA graph: fused kernels read a rate that is on the device."""
        return all(group.is_fused for group in self.groups)

    def capturing(self, now: bool) -> None:
        """What torch's AdamW wants to be told before `move` is captured, and after."""
        for group in self.groups:
            group.is_capturing = now

    def update(self, rate: float | Tensor, done: GradientStep) -> GradientStep:
        """Update by the gradients of a step; the figures of the update, over all ranks that took part in it."""
        self.step(rate, done.divisor)
        return done

    def step(self, rate: float | Tensor, divisor: Tensor | None = None) -> None:
        """Move the parameters, and count it."""
        self.move(rate, divisor)
        self.steps += 1

    @torch.no_grad()
    def move(self, rate: float | Tensor, divisor: Tensor | None = None) -> None:
        """Move the parameters along their gradients, divided by `divisor` where one is given, at this rate."""
        if self.is_ours or not self.mastered:
            for group in self.groups:
                group.step(rate, divisor)
            return
        for group in self.groups:
            if isinstance(group, UpdateGroup) and group.rule == "sign":  # in float32 themselves
                group.step(rate, None)
                continue
            for name, master in group.parameters.items():
                gradient = self.parameters[name].grad
                assert gradient is not None
                master.grad = gradient.float() if divisor is None else gradient.float().div_(divisor)
            group.step(rate, None)
            for name, master in group.parameters.items():
                master.grad = None
                self.parameters[name].copy_(master)

    def figures(self) -> dict[str, Any]:
        """What a run's summary says of how weights were updated, where others than this rank did it."""
        return {}

    # State --------------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """("KIND:PARAMETER", shard, tensor) of all there is to keep; before the first step only the weights."""
        for name, value in self.stepped.items():
            yield f"{WEIGHT}:{name}", self.shards[name], value.detach()
        if self.steps:
            states = {name: state for group in self.groups for name, state in group.state.items()}
            for kind in sorted({kind for kinds in self.kinds.values() for kind in kinds}):
                for name in self.stepped:
                    if kind in self.kinds[name]:
                        yield f"{kind}:{name}", self.shards[name], states[name][kind]

    def kept(self) -> Iterator[Tensor]:
        """Every tensor that is the optimiser's alone: what it remembers, and float32 copies of 16-bit weights."""
        yield from (self.stepped[name] for name in self.parameters if name in self.mastered)
        for group in self.groups:
            for state in group.state.values():
                yield from state.values()

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Weights from elsewhere, local shapes; what the optimiser remembers is left as it is."""
        for name, value in self.stepped.items():
            value.copy_(weights[name])
            if name in self.mastered:
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
            states[name] = {kind: tensors[kind, name].to(value.device, value.dtype) for kind in self.kinds[name]}
            for kind, moment in states[name].items():
                if moment.shape != value.shape:
                    raise RunError(f"{kind} of {name} has shape {tuple(moment.shape)}, expected {tuple(value.shape)}")
        for group in self.groups:
            group.put(steps, states)

    def state_of(self, name: str) -> dict[str, Tensor]:
        """What is remembered of a parameter, by kind; nothing before the first step."""
        return next(group.state[name] for group in self.groups if name in group.parameters)


class LossScale:
    """A factor that keeps fp16 gradients off zero: doubled after a while without overflow, halved at one.

    It multiplies the mean loss of a step, which does not grow with the batch; what is summed over a step's tokens is
    multiplied by `factor`. Both are powers of two, so nothing but overflow and underflow depends on them. A pure
    function of which steps overflowed, which all ranks of a replica see alike, and all replicas that have met.
    """

    def __init__(self, on: bool, tokens: int = 1, value: float = 2.0**16, patience: int = 1000) -> None:
        """`tokens`: of a step, over all ranks and microbatches."""
        self.on, self.value, self.patience = on, value if on else 1.0, patience
        self._tokens = 1 << (tokens - 1).bit_length() if on else 1
        self.good = 0

    @property
    def factor(self) -> float:
        """What a loss that is summed over tokens is multiplied by."""
        return self.value / self._tokens

    def halve(self) -> bool:
        """After an overflow; False where there is nothing left to halve, so that something else is wrong."""
        if not self.on or self.value <= 1.0:
            return False
        self.value, self.good = self.value / 2, 0
        return True

    def grow(self) -> None:
        """After a step without overflow."""
        self.good += self.on
        if self.on and self.good % self.patience == 0:
            self.value = min(2.0**24, self.value * 2)

    def meet(self, replicas: Communicator) -> None:
        """Go on alike on replicas that stepped by themselves: with the smallest scale that any of them came to."""
        if self.on:
            value, good = replicas.max_over_ranks([-self.value, -self.good])
            self.value, self.good = -value, round(-good)

    def state(self) -> dict[str, float]:
        """`of_mean` is missing in checkpoints of older versions, whose scale was that of a microbatch's summed loss."""
        return {"scale": self.value, "good": self.good, "of_mean": int(self.on)}

    def load(self, state: Mapping[str, float]) -> None:
        if self.on and state.get("of_mean"):  # else of a run in another precision: this one begins with its own
            self.value, self.good = float(state["scale"]), int(state["good"])
