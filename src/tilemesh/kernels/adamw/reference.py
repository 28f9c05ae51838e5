"""AdamW over many parameters at once (Loshchilov and Hutter 2019), and the global norm of many gradients.

The rule is torch's: decoupled decay, both averages corrected for their bias, eps outside of the root. `AdamW` keeps the
device's table of addresses between steps; `adamw` is one call of it. Everything happens in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import Range
from tilemesh.kernels import context
from tilemesh.kernels.accuracy import accumulator, rounding_error, unit
from tilemesh.kernels.adamw.table import BLOCK, NORM_BLOCK, NORM_WARPS, BlockTable, is_aligned
from tilemesh.kernels.launch import call
from tilemesh.kernels.launch.implementation import implementation_of
from tilemesh.kernels.launch.tensors import FLOATS, check_device, check_tensors, dtype_name


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
        _check_lists(lists)
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

    @torch.no_grad()
    def step(
        self, gradients: Sequence[Tensor], *, rate: float | Tensor, step: int | Tensor, divisor: float | Tensor = 1.0
    ) -> None:
        """Move the parameters along their gradients, each divided by `divisor`.

        step: how many steps there are with this one, from 1. rate, step and divisor may be tensors of one element on
        the parameters' device: nothing then waits for the device, and the call can be captured as a CUDA graph.
        """
        seen = tuple([(type(g), g.dtype, g.shape, g.device) if isinstance(g, Tensor) else None for g in gradients])
        if seen not in self._seen:  # a training loop gives the same ones at each step
            _check_lists({"parameters": self.parameters, "gradients": gradients})
            self._seen.add(seen)
        for name, value in (("rate", rate), ("step", step), ("divisor", divisor)):
            if isinstance(value, Tensor) and value.numel() != 1:
                raise UsageError(f"{name} has shape {tuple(value.shape)}: expected a number or a tensor of one element")
        if not self.parameters:
            return
        if self.how == "torch":
            self._by_torch(gradients, rate, step, divisor)
            return
        from tilemesh.kernels.adamw import kernel

        launch = call.interpreted if self.how == "interpret" else call.compiled
        gradients = [gradient.contiguous() for gradient in gradients]
        scalars = self._scalars(launch, rate, step, divisor)
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
            launch(kernel.update_plan, given, written=(), masters=group.has_masters, aligned=group.aligned, **constants)
            for parameter, made in zip(written, parameters, strict=True):
                if made.dtype != parameter.dtype:
                    parameter.copy_(made)

    def _scalars(self, launch: Any, rate: float | Tensor, step: int | Tensor, divisor: float | Tensor) -> Tensor:
        """Rate, bias corrections and divisor in float64, on the device."""
        device = self.parameters[0].device
        if not any(isinstance(value, Tensor) for value in (rate, step, divisor)):
            corrections = [1 - beta**step for beta in self.betas]
            return torch.tensor([rate, *corrections, divisor], dtype=torch.float64, device=device)
        from tilemesh.kernels.adamw import kernel

        given = {
            name: (value if isinstance(value, Tensor) else torch.full((1,), value, dtype=torch.float64, device=device))
            for name, value in (("rate", rate), ("step", step), ("divisor", divisor))
        }
        check_device({"parameters": self.parameters[0], **given})
        made = torch.empty(4, dtype=torch.float64, device=device)
        given = {name: value.detach().reshape(1) for name, value in given.items()} | {"scalars": made}
        logs = {"log_beta1": _log2(self.betas[0]), "log_beta2": _log2(self.betas[1])}
        launch(kernel.correct_plan, given, written=("scalars",), **logs)
        return made

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
                    at for at, one in enumerate(kinds) if one == kind and self.parameters[at].numel()
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
    """One step over all parameters, in place: `AdamW` says what is expected, and is what a training loop keeps."""
    kept = AdamW(
        parameters, exp_avgs, exp_avg_sqs, masters=masters, betas=betas, eps=eps, weight_decay=weight_decay,
        implementation=implementation,
    )  # fmt: skip
    kept.step(gradients, rate=rate, step=step, divisor=divisor)


@torch.no_grad()
def global_norm(tensors: Sequence[Tensor], *, implementation: str = "auto") -> Tensor:
    """The root of the sum of all elements' squares, as a scalar on their device: at least float32, in a fixed order."""
    if not tensors:
        raise UsageError("global_norm of no tensors: expected at least one")
    _check_lists({"tensors": tensors})
    kind = torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32
    tensors = [tensor.detach().contiguous() for tensor in tensors if tensor.numel()] or [tensors[0].new_zeros(1)]
    how = implementation_of(implementation, tensors)
    if how == "torch":
        return torch.stack([tensor.to(kind).square().sum() for tensor in tensors]).sum().sqrt()
    from tilemesh.kernels.adamw import kernel

    launch = call.interpreted if how == "interpret" else call.compiled
    tables = _norm_tables(tensors, NORM_BLOCK)
    device = tensors[0].device
    partial = torch.empty(sum(table.blocks for *_, table in tables), dtype=kind, device=device)
    begin = 0
    for members, dtype, aligned, table in tables:
        of_group = partial[begin : begin + table.blocks]
        begin += table.blocks
        given = {"table": table.rows([[tensors[at] for at in members]]), "owners": table.owners, "partial": of_group}
        given |= {"like": torch.empty(1, dtype=dtype, device=device)}
        launch(kernel.squares_plan, given, written=("partial",), aligned=aligned)
    norm = torch.empty(1, dtype=kind, device=device)
    launch(kernel.norm_plan, {"partial": partial, "norm": norm}, written=("norm",))
    return norm[0]


def norm_bound(norm: Tensor, dtype: torch.dtype, elements: int) -> Tensor:
    """How far `global_norm` of so many elements of this dtype may be from the exact norm.

    A sum of squares, none of which is negative, is off by at most one unit for each addition that a term goes through:
    those of its thread and of the tree over threads, in the dtype's accumulator, then the same over blocks in float64.
    A root halves what its argument is off by.
    """
    u, blocks = unit(accumulator(dtype)), -(-elements // NORM_BLOCK)
    threads = 32 * NORM_WARPS
    additions = NORM_BLOCK // threads + threads.bit_length()
    last = blocks // 4096 + 8 + 10
    return norm.double() * ((1 + additions) * u + last * unit(torch.float64)) / 2 + rounding_error(
        norm.double(), accumulator(dtype)
    )


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


def _norm_tables(tensors: Sequence[Tensor], block: int) -> list[tuple[list[int], torch.dtype, bool, BlockTable]]:
    kinds = tuple([(tensor.dtype, is_aligned(tensor), tensor.numel()) for tensor in tensors])
    key, runners = ("global_norm", tensors[0].device, *kinds), context.current.runners
    found: list[tuple[list[int], torch.dtype, bool, BlockTable]] | None
    found = runners.recent.get(key) or runners.older.get(key)
    if found is None:
        found = []
        for dtype, aligned in dict.fromkeys(kind[:2] for kind in kinds):
            members = [at for at, kind in enumerate(kinds) if kind[:2] == (dtype, aligned)]
            sizes = [tensors[at].numel() for at in members]
            table = BlockTable(sizes, block, tensors[0].device, [0.0] * len(members))
            found.append((members, dtype, aligned, table))
        runners.keep(key, found)
    return found


def _log2(beta: float) -> float:
    return math.log2(beta) if beta else -math.inf


def _check_lists(lists: dict[str, Sequence[Tensor]]) -> None:
    """Lists of as many tensors, of equal shapes, floating point, on one device."""
    (first, parameters), *_ = lists.items()
    for name, tensors in lists.items():
        if len(tensors) != len(parameters):
            raise UsageError(f"{len(tensors)} {name} for {len(parameters)} {first}: expected as many")
        for at, (tensor, parameter) in enumerate(zip(tensors, parameters, strict=True)):
            check_tensors({f"{name}[{at}]": tensor})
            if tensor is None or tensor.shape != parameter.shape or tensor.dtype not in FLOATS:
                shown = "None" if tensor is None else f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
                raise UsageError(f"{name}[{at}] is {shown}: expected floating point {tuple(parameter.shape)}")
            if tensor.device != parameters[0].device:
                raise UsageError(f"{name}[{at}] is on {tensor.device}: expected {parameters[0].device}, as {first}[0]")


_NOT_NEGATIVE = Range(0)


def _check_numbers(betas: tuple[float, float], eps: float, decays: Sequence[float], count: int) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UsageError(f"betas are {betas}: expected two numbers from 0 to below 1")
    _NOT_NEGATIVE.check("eps", eps)
    if len(decays) != count or not all(decay in _NOT_NEGATIVE for decay in decays):
        raise UsageError(f"weight_decay has {len(decays)} values: expected one number, or {count}, of 0 or more")
