"""AdamW beside torch's fused step, for `tilemesh bench kernel adamw`. Calls work in place and return nothing."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from tilemesh.core.hardware import Device
from tilemesh.kernels.accuracy import accumulator, excess, rounding_error, unit
from tilemesh.kernels.adamw.cost import FORM
from tilemesh.kernels.adamw.reference import AdamW, exact_step
from tilemesh.kernels.operator_bench import EAGER, OURS, Arguments, OperatorBench
from tilemesh.kernels.problems import SizedProblem
from tilemesh.kernels.rates import pass_s

_RATE, _STEP = 1e-3, 10
_CORRECTION_ERROR = 2 * unit(torch.float32) / (1 - 0.999**_STEP)


class AdamWBench(OperatorBench[SizedProblem]):
    name, form = "adamw", FORM
    compile_modes: ClassVar[dict[str, str | None]] = {}
    in_place = True

    def arguments(self, problem: SizedProblem, device: torch.device, seed: int) -> Arguments:
        tensors, elements = problem.sizes
        dtype = getattr(torch, problem.dtype)
        generator, kind = torch.Generator(device).manual_seed(seed), accumulator(dtype)

        def drawn() -> list[Tensor]:
            return [torch.randn(elements, generator=generator, device=device, dtype=kind) for _ in range(tensors)]

        values, gradients = drawn(), [gradient.to(dtype) for gradient in drawn()]
        averages, squares = drawn(), [square.square() for square in drawn()]
        masters = values if dtype != kind else None
        return [value.to(dtype) for value in values], gradients, averages, squares, masters

    def calls(self, problem: SizedProblem) -> dict[str, Any]:
        kept: dict[int, AdamW] = {}  # by the first parameter's address: each set of arguments has its own
        on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

        def scalars(device: torch.device) -> tuple[Tensor, Tensor]:
            """Rate and step where a training step that is captured as a CUDA graph has them: on the device."""
            if device not in on_device:
                on_device[device] = tuple(torch.full((), value, device=device) for value in (_RATE, float(_STEP)))  # type: ignore[assignment]
            return on_device[device]

        def ours(*arguments: Any) -> None:
            parameters, gradients, averages, squares, masters = arguments
            key = parameters[0].data_ptr()
            if key not in kept or kept[key].parameters[0] is not parameters[0]:
                kept[key] = AdamW(parameters, averages, squares, masters=masters)
            rate, step = scalars(parameters[0].device)
            kept[key].step(gradients, rate=rate, step=step)

        def eager(*arguments: Any) -> None:
            parameters, gradients, averages, squares, masters = arguments
            rate, step = scalars(parameters[0].device)
            stepped = parameters if masters is None else masters
            slopes = gradients if masters is None else [gradient.to(masters[0].dtype) for gradient in gradients]
            torch._fused_adamw_(
                stepped, slopes, averages, squares, [], [step] * len(parameters), lr=rate, beta1=0.9, beta2=0.999,
                weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
            if masters is not None:
                torch._foreach_copy_(parameters, masters)

        return {OURS: ours, EAGER: eager}

    def wrong(self, problem: SizedProblem, arguments: Arguments, result: Any) -> str | None:
        """One step, tensor by tensor against float64; `arguments` are those before it, `result` those after it.

        Beside the rounding of a step, 1 - beta2**step may be a float32 number, as torch's fused step computes it: of 1
        it is off by two roundings, and the tenth step leaves a hundredth of it, whose root divides the move.
        """
        parameters, _, _, _, masters = result
        starts, *states = (arguments[0] if masters is None else arguments[4]), *arguments[1:4]
        for at, parameter in enumerate(parameters):
            exact, bound = exact_step(starts[at], *(tensors[at] for tensors in states), rate=_RATE, step=_STEP)
            bound = bound + _CORRECTION_ERROR * (exact - starts[at].double()).abs()
            updated = parameter if masters is None else masters[at]
            wrong = excess(updated, exact, bound + rounding_error(exact, updated.dtype))
            if wrong is None and masters is not None and not torch.equal(parameter, updated.to(parameter.dtype)):
                wrong = "the parameter is not its master, rounded"
            if wrong is not None:
                return f"tensor {at}: {wrong}"
        return None

    def predict_s(self, problem: SizedProblem, device: torch.device, figures: Device) -> float:
        return pass_s(FORM.cost(problem), figures)


BENCH = AdamWBench()
