"""AdamW over many parameters at once (Loshchilov and Hutter 2019).

The rule is torch's: decoupled decay, both averages corrected for their bias, eps outside of the root. `AdamW` keeps the
device's table of addresses between steps; `adamw` is one call of it. Everything happens in place.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import Range
from tilemesh.kernels.accuracy import accumulator, unit
from tilemesh.kernels.adamw.op import register, traced_step
from tilemesh.kernels.adamw.table import BLOCK, MOST_KEPT, BlockTable, check_lists, is_aligned
from tilemesh.kernels.launch import call
from tilemesh.kernels.launch.implementation import implementation_of
from tilemesh.kernels.launch.tensors import check_device, dtype_name, is_plain, is_traced


class AdamW:
    """Steps these parameters in place, all in one launch per combination of dtypes.

    parameters, exp_avgs, exp_avg_sqs: contiguous, of equal shapes, one device; the averages are float32 (float64 for
    float64 parameters). masters: float32 copies of 16-bit parameters, which are what is stepped; None in the place of a
    parameter that is stepped itself. weight_decay: one number, or one per parameter.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        masters: Sequence[Tensor | None] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Sequence[float] = 0.01,
        implementation: str = "auto",
    ) -> None:
        count = len(parameters)
        decays = [weight_decay] * count if isinstance(weight_decay, (int, float)) else list(weight_decay)
        _check_numbers(betas, eps, decays, count)
        masters = [None] * count if masters is None else masters
        if len(masters) != count:
            raise UsageError(
                f"{len(masters)} masters for {count} parameters: expected as many, None where there is none"
            )
        wide = [value if master is None else master for master, value in zip(masters, parameters, strict=True)]
        lists = {"parameters": parameters, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "masters": wide}
        check_lists(lists)
        for name, tensors in lists.items():
            for at, (tensor, parameter) in enumerate(zip(tensors, parameters, strict=True)):
                wanted = parameter.dtype if tensor is parameter else accumulator(parameter.dtype)
                if tensor.dtype != wanted or not tensor.is_contiguous():
                    raise UsageError(
                        f"{name}[{at}] is {dtype_name(tensor.dtype)} with strides {tensor.stride()}: expected a "
                        f"contiguous {dtype_name(wanted)} tensor for a {dtype_name(parameter.dtype)} parameter"
                    )
        self.parameters, self.exp_avgs, self.exp_avg_sqs = list(parameters), list(exp_avgs), list(exp_avg_sqs)
        self.masters = list(masters)
        self.betas, self.eps, self.decays = (float(betas[0]), float(betas[1])), float(eps), [*map(float, decays)]
        self.how = implementation_of(implementation, parameters)
        self._groups: dict[tuple[object, ...], list[_Group]] = {}
        self._seen: set[tuple[object, ...]] = set()  # kinds of gradients that have passed the checks
        self._stepped = list({id(tensor): tensor for tensors in lists.values() for tensor in tensors}.values())
        self._numbers: dict[float, Tensor] = {}  # on the device, where they are given beside tensors
        self._repeated: dict[tuple[object, ...], call.RepeatedLaunches] = {}

    def step(
        self, gradients: Sequence[Tensor], *, rate: float | Tensor, step: int | Tensor, divisor: float | Tensor = 1.0
    ) -> None:
        """Move the parameters along their gradients, each divided by `divisor`.

        step: how many steps there are with this one, from 1. rate, step and divisor may be tensors of one element on
        the parameters' device: nothing then waits for the device, and the call can be captured as a CUDA graph.
        """
        key = self._key(gradients, (rate, step, divisor)) if self.how == "triton" and self.parameters else None
        repeated = None if key is None else self._repeated.get(key)
        if repeated is not None:
            repeated()
            return
        seen = tuple([(type(g), g.dtype, g.shape, g.device) if isinstance(g, Tensor) else None for g in gradients])
        if seen not in self._seen:  # a training loop gives the same ones at each step
            check_lists({"parameters": self.parameters, "gradients": gradients})
            self._seen.add(seen)
        _check_step(*map(_at_hand, (rate, step, divisor)))
        if not self.parameters:
            return
        with torch.no_grad():
            if self.how == "torch":
                self._by_torch(gradients, rate, step, divisor)
                return
            made = self._by_kernels(gradients, rate, step, divisor)
        if key is not None:
            if len(self._repeated) >= MOST_KEPT:
                self._repeated.pop(next(iter(self._repeated)))
            self._repeated[key] = made

    def check_step(
        self, gradients: Sequence[Tensor], rate: float | Tensor, step: int | Tensor, divisor: float | Tensor
    ) -> None:
        """Refuse what `step` refuses."""
        check_lists({"parameters": self.parameters, "gradients": gradients})
        _check_step(rate, step, divisor)

    def _key(self, gradients: Sequence[Tensor], scalars: tuple[float | Tensor, ...]) -> tuple[object, ...] | None:
        """All that decides what a step launches, on which memory; None where it may not simply be repeated.

        A rate or a step that is no tensor is copied to the device anew each time. A capture has tables of its own.
        """
        rate, step, _ = scalars
        if type(rate) is not Tensor or type(step) is not Tensor or self._is_capturing():
            return None
        # A method mapped over tensors takes half as long as a loop that asks each for everything.
        if {*map(type, gradients)} != {Tensor} or not all(map(Tensor.is_contiguous, gradients)):
            return None
        parts = [
            (value.data_ptr(), value.dtype, value.shape) if isinstance(value, Tensor) else value for value in scalars
        ]
        shapes = [gradient.shape for gradient in gradients]
        dtypes = [gradient.dtype for gradient in gradients]
        addresses, devices = map(Tensor.data_ptr, gradients), map(Tensor.get_device, gradients)
        return (*parts, *shapes, *dtypes, *addresses, *devices, *map(Tensor.data_ptr, self._stepped))

    def _by_kernels(
        self, gradients: Sequence[Tensor], rate: float | Tensor, step: int | Tensor, divisor: float | Tensor
    ) -> call.RepeatedLaunches:
        """One launch for the scalars where they are tensors, one for each group; returns what repeats them."""
        from tilemesh.kernels.adamw import kernel

        repeated = call.RepeatedLaunches(call.interpreted if self.how == "interpret" else call.compiled)
        gradients = [gradient.contiguous() for gradient in gradients]
        scalars = self._scalars(repeated.launch, rate, step, divisor)
        constants = {"beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps}
        for group in self._grouped(gradients):
            parameters = [self.parameters[at] for at in group.members]
            written = parameters
            if self.how == "interpret":  # which truncates where it should round to bfloat16
                parameters = [p.float() if p.dtype is torch.bfloat16 else p.detach() for p in parameters]
            masters = [master for at in group.members if (master := self.masters[at]) is not None]
            of_group = ([of[at] for at in group.members] for of in (gradients, self.exp_avgs, self.exp_avg_sqs))
            columns = [parameters, *of_group, masters if group.has_masters else parameters]
            given = {"table": group.table.rows(columns), "owners": group.table.owners}
            given |= {"scalars": scalars} | group.likes(parameters[0].dtype)
            repeated.launch(
                kernel.update_plan, given, written=(), masters=group.has_masters, aligned=group.aligned, **constants
            )
            for parameter, made in zip(written, parameters, strict=True):
                if made.dtype != parameter.dtype:
                    parameter.copy_(made)
        return repeated

    def _scalars(self, launch: Any, rate: float | Tensor, step: int | Tensor, divisor: float | Tensor) -> Tensor:
        """Rate, bias corrections and divisor in float64, on the device."""
        device = self.parameters[0].device
        if not any(isinstance(value, Tensor) for value in (rate, step, divisor)):
            corrections = [1 - beta**step for beta in self.betas]
            return torch.tensor([rate, *corrections, divisor], dtype=torch.float64, device=device)
        from tilemesh.kernels.adamw import kernel

        given = {
            name: (value if isinstance(value, Tensor) else self._number(value))
            for name, value in (("rate", rate), ("step", step), ("divisor", divisor))
        }
        check_device({"parameters": self.parameters[0], **given})
        made = torch.empty(4, dtype=torch.float64, device=device)
        given = {name: value.detach().reshape(1) for name, value in given.items()} | {"scalars": made}
        logs = {"log_beta1": _log2(self.betas[0]), "log_beta2": _log2(self.betas[1])}
        launch(kernel.correct_plan, given, written=("scalars",), **logs)
        return made

    def _is_capturing(self) -> bool:
        return self.parameters[0].is_cuda and torch.cuda.is_current_stream_capturing()

    def _number(self, value: float) -> Tensor:
        """A number on the device; kept, because a divisor of 1 comes at every step."""
        number = self._numbers.get(value)
        if number is None:
            number = torch.full((1,), value, dtype=torch.float64, device=self.parameters[0].device)
            if len(self._numbers) < MOST_KEPT and not self._is_capturing():
                self._numbers[value] = number
        return number

    def _grouped(self, gradients: Sequence[Tensor]) -> list[_Group]:
        lists = (self.parameters, gradients, self.exp_avgs, self.exp_avg_sqs)
        kinds = tuple([
            (tensors[0].dtype, tensors[1].dtype, is_aligned(*tensors, *([] if master is None else [master])),
             master is not None)
            for master, *tensors in zip(self.masters, *lists, strict=True)
        ])  # fmt: skip
        if kinds not in self._groups:
            made = []
            for kind in dict.fromkeys(kinds):
                members = [
                    at for at, other in enumerate(kinds) if other == kind and self.parameters[at].numel()
                ]  # an empty one has no block
                if members:
                    sizes, decays = zip(
                        *((self.parameters[at].numel(), self.decays[at]) for at in members), strict=True
                    )
                    device = self.parameters[0].device
                    made.append(_Group(members, kind, BlockTable(sizes, BLOCK, device, decays)))
            self._groups[kinds] = made
        return self._groups[kinds]

    def _by_torch(
        self, gradients: Sequence[Tensor], rate: float | Tensor, step: int | Tensor, divisor: float | Tensor
    ) -> None:
        beta1, beta2 = self.betas
        rate, step, divisor = _number(rate), _number(step), _number(divisor)
        for at, (parameter, average, square) in enumerate(
            zip(self.parameters, self.exp_avgs, self.exp_avg_sqs, strict=True)
        ):
            master = self.masters[at]
            value = parameter if master is None else master
            moved, slope = value.to(average.dtype), gradients[at].to(average.dtype) / divisor
            moved = moved - rate * self.decays[at] * moved
            average.mul_(beta1).add_(slope, alpha=1 - beta1)
            square.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
            root = square.sqrt() / (1 - beta2**step) ** 0.5 + self.eps
            value.copy_(moved - rate / (1 - beta1**step) * average / root)
            if value is not parameter:
                parameter.copy_(value)


class _Group:
    """Parameters that one launch steps: equal dtypes and alignment, all with masters or none."""

    def __init__(
        self, members: list[int], kind: tuple[torch.dtype, torch.dtype, bool, bool], table: BlockTable
    ) -> None:
        self.members, self.kind, self.table = members, kind, table
        self.aligned, self.has_masters = kind[2:]
        self._likes: dict[torch.dtype, dict[str, Tensor]] = {}

    def likes(self, parameter: torch.dtype) -> dict[str, Tensor]:
        """Tensors of one element that tell the kernel dtypes."""
        if parameter not in self._likes:
            names = ("like_parameter", "like_gradient", "like_state")
            dtypes = (parameter, self.kind[1], accumulator(self.kind[0]))
            self._likes[parameter] = {
                name: torch.empty(1, dtype=dtype, device=self.table.device)
                for name, dtype in zip(names, dtypes, strict=True)
            }
        return self._likes[parameter]


def adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor | None] | None = None,
    *,
    rate: float | Tensor = 1e-3,
    step: int | Tensor = 1,
    divisor: float | Tensor = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float | Sequence[float] = 0.01,
    implementation: str = "auto",
) -> None:
    """One step over all parameters, in place: `AdamW` says what is expected, and is what a training loop keeps.

    In torch.compile's graphs it is one operator; `AdamW` is for calls outside of them.
    """
    kept = AdamW(
        parameters, exp_avgs, exp_avg_sqs, masters=masters, betas=betas, eps=eps, weight_decay=weight_decay,
        implementation=implementation,
    )  # fmt: skip
    if parameters and (is_traced() or not all(map(is_plain, parameters))):
        kept.check_step(gradients, rate, step, divisor)
        numbers = (rate, step, divisor)
        traced_step(
            parameters, gradients, exp_avgs, exp_avg_sqs, kept.masters, numbers, kept.betas, kept.eps, kept.decays,
            implementation,
        )  # fmt: skip
        return
    kept.step(gradients, rate=rate, step=step, divisor=divisor)


def _step_of_a_graph(  # type: ignore[no-untyped-def]
    parameters, gradients, exp_avgs, exp_avg_sqs, masters, mastered, rate, step, divisor, betas, eps, decays,
    implementation,
):  # fmt: skip
    by_place = dict(zip(mastered, masters, strict=True))
    kept = AdamW(
        parameters, exp_avgs, exp_avg_sqs, masters=[by_place.get(at) for at in range(len(parameters))],
        betas=tuple(betas), eps=eps, weight_decay=decays, implementation=implementation,
    )  # fmt: skip
    kept.step(gradients, rate=rate, step=step, divisor=divisor)


register("adamw", _step_of_a_graph, lambda *given: None)  # everything is in place


def exact_step(
    value: Tensor, gradient: Tensor, average: Tensor, square: Tensor, *, rate: float, step: int, divisor: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A value after one step, in float64, and how far a step in float32 (float64 for float64) may be from it.

    Each of a dozen operations rounds once, a division twice. What the averages are summed from may cancel in the first;
    the second has terms of one sign.
    """
    u, (beta1, beta2) = unit(accumulator(value.dtype)), betas
    value, gradient, average, square = (tensor.double() for tensor in (value, gradient, average, square))
    slope = gradient / divisor
    first, second = beta1 * average + (1 - beta1) * slope, beta2 * square + (1 - beta2) * slope * slope
    per_first = rate / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + eps)
    decayed = value - rate * weight_decay * value
    terms = beta1 * average.abs() + (1 - beta1) * slope.abs()
    bound = u * (3 * value.abs() + per_first * (6 * terms + 24 * first.abs()))
    made = decayed - per_first * first
    return made, 1.01 * (bound + u * made.abs())


def _number(value: Any) -> Any:
    """A tensor as numbers are: in float64, and without a dimension, so that nothing becomes as wide as it is."""
    return value.detach().reshape(()).double() if isinstance(value, Tensor) else value


def _log2(beta: float) -> float:
    return math.log2(beta) if beta else -math.inf


_NOT_NEGATIVE = Range(0)
_ANY_NUMBER = Range(-sys.float_info.max)
_FROM_ONE = Range(1)


def _at_hand(value: Any) -> Any:
    """The number in a tensor that lies in the host's memory, to be checked like any other; on a GPU nobody waits."""
    is_at_hand = isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1
    if not is_at_hand or is_traced():
        return value
    number = value.item()
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _check_step(rate: float | Tensor, step: int | Tensor, divisor: float | Tensor) -> None:
    for name, value in (("rate", rate), ("step", step), ("divisor", divisor)):
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise UsageError(f"{name} has shape {tuple(value.shape)}: expected a number or a tensor of one element")
        elif name == "step":
            _FROM_ONE.check(name, value, whole=True)
        else:
            (_NOT_NEGATIVE if name == "rate" else _ANY_NUMBER).check(name, value)
            if name == "divisor" and value == 0:
                raise UsageError("divisor is 0: expected a number that gradients can be divided by")


def _check_numbers(betas: tuple[float, float], eps: float, decays: Sequence[float], count: int) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UsageError(f"betas are {betas}: expected two numbers from 0 to below 1")
    _NOT_NEGATIVE.check("eps", eps)
    if len(decays) != count or not all(decay in _NOT_NEGATIVE for decay in decays):
        raise UsageError(f"weight_decay has {len(decays)} values: expected one number, or {count}, of 0 or more")
