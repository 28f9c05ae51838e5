"""The fused matmul beside what a user would write instead, for the rows of `tilemesh bench kernel matmul`.

Peers: eager (three operators), addmm + relu_, torch.compile (default and max-autotune), cuBLASLt's own epilogue where
it applies. `a @ b` alone is measured too, as a reference for what fusion adds on top; it computes less, so it is no
peer but a column of its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from tilemesh.core.hardware import Device
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.activations import reference as activations
from tilemesh.kernels.launch.gpu import described_gpu
from tilemesh.kernels.matmul import reference
from tilemesh.kernels.matmul.choose import choose
from tilemesh.kernels.matmul.cost import FORM, predict_s, rates_of
from tilemesh.kernels.matmul.op import fused_matmul
from tilemesh.kernels.matmul.problem import Problem
from tilemesh.kernels.matmul.trial import allowed_error, checked_rows, exact_rows, input_bytes, make_inputs
from tilemesh.kernels.matmul.tuning import TUNING
from tilemesh.kernels.operator_bench import EAGER, OURS, Arguments, OperatorBench
from tilemesh.measure.row import COMPUTES_LESS

(ALONE,) = COMPUTES_LESS


class FusedMatmulBench(OperatorBench[Problem]):
    """See `bench.operator.OperatorBench`. A call's arguments are a, b and c."""

    name = "fused_matmul"
    form = FORM
    compile_modes: ClassVar[Mapping[str, str | None]] = {
        "compile": None,
        "compile max-autotune": "max-autotune-no-cudagraphs",
    }
    no_peers = (ALONE,)

    def arguments(self, problem: Problem, device: torch.device, seed: int) -> Arguments:
        inputs = make_inputs(problem, device, seed)
        return inputs.a, inputs.b, inputs.c

    def calls(self, problem: Problem) -> dict[str, Callable[..., object]]:
        activation = problem.activation

        def eager(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
            return reference.fused_matmul(a, b, c, activation)

        calls: dict[str, Callable[..., object]] = {
            OURS: lambda a, b, c: fused_matmul(a, b, c, activation=activation),
            EAGER: eager,
        }
        if problem.c is not None:
            in_place: dict[str, Callable[[Tensor], Tensor]] = {
                "relu": torch.relu_,
                "silu": partial(torch.nn.functional.silu, inplace=True),
            }
            after = in_place.get(activation, lambda x: activations.activate(x, activation))
            calls["addmm"] = lambda a, b, c: after(torch.addmm(c, a, b))
        if problem.c_kind == "row" and activation in ("relu", "gelu_tanh"):
            gelu = activation == "gelu_tanh"
            calls["cublaslt"] = lambda a, b, c: torch._addmm_activation(c.reshape(-1), a, b, use_gelu=gelu)
        calls[ALONE] = lambda a, b, c: a @ b
        return calls

    def wrong(self, problem: Problem, arguments: Arguments, result: Tensor) -> str | None:
        rows = checked_rows(problem.m, result.device)
        exact = exact_rows(arguments, problem.activation, rows)
        return excess(result[rows], exact, allowed_error(problem, arguments, rows, exact))

    def predict_s(self, problem: Problem, device: torch.device, figures: Device) -> float:
        if device.type == "cuda":
            config = choose(problem, "auto", None, device)
        else:  # for a GPU that is not here: what `auto` takes there
            config = TUNING.untuned(problem, described_gpu(figures.name))
        return predict_s(problem, config, rates_of(figures, problem.dtype, problem.precision))

    def bytes_held(self, problem: Problem) -> int:
        return input_bytes(problem)

    def chosen(self, problem: Problem, device: torch.device) -> dict[str, str]:
        return {"config": choose(problem, "auto", None, device).label}


BENCH = FusedMatmulBench()
