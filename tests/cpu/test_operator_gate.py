"""The differential gate of the operators: a sample here, all of it with the slow tests (operator_gate.py says what)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from differential import KINDS
from operator_cases import SUBJECTS
from operator_gate import BAD_INDICES, check_derivatives, check_indices, run_task, tasks

import tilemesh as tm
from tilemesh.kernels.registry import public_functions

SAMPLE = {  # where faults were found, and every kind of values and dtype once
    "rotary": (torch.float32, "plain"), "cross_entropy": (torch.float32, "offset"),
    "linear_cross_entropy": (torch.float32, "offset"), "softmax": (torch.bfloat16, "-inf"),
    "layer_norm": (torch.float16, "largest"), "swiglu": (torch.float64, "inf"), "geglu": (torch.float32, "nan"),
    "scale_shift": (torch.bfloat16, "zeros"), "rms_norm": (torch.float16, "subnormal"),
    "row_linear": (torch.float32, "plain"), "lowbit_linear": (torch.float32, "plain"),
    "scaled_matmul": (torch.float32, "offset"), "scaled_matmul of floats": (torch.float32, "zeros"),
    "likeliest": (torch.float32, "largest"), "few_linear": (torch.bfloat16, "zeros"),
    "route_tokens": (torch.float32, "offset"), "unpermute_rows": (torch.bfloat16, "inf"),
    "adamw": (torch.float32, "plain"), "global_norm": (torch.float32, "offset"),
}  # fmt: skip


def group(task: Any) -> tuple[Any, ...]:
    """Tasks that make one test: an operator in one dtype, or one of its other checks."""
    return (task[1], str(task[2])[6:] if len(task) > 2 else task[0].__name__)


@pytest.mark.parametrize("name", SAMPLE)
def test_an_operator_agrees_with_eager_and_float64(name: str) -> None:
    dtype, kind = SAMPLE[name]
    cases = [task for task in tasks() if task[1] == name and task[2:4] == (dtype, kind)][:2]  # of its options
    assert not [fault for task in cases for fault in run_task(task)]


@pytest.mark.parametrize("name", BAD_INDICES)
def test_indices_that_are_out_of_range_are_refused(name: str) -> None:
    assert not check_indices(name, "cpu")


def test_attention_has_derivatives_of_derivatives() -> None:
    assert not check_derivatives("attention", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted({group(task) for task in tasks()}), ids=" ".join)
def test_all_of_the_gate(part: tuple[Any, ...]) -> None:
    assert not [fault for task in tasks() if group(task) == part for fault in run_task(task)]


def test_every_operator_is_in_the_gate() -> None:
    functions = {name for name in dir(tm.kernels) if name.islower()}
    assert set(public_functions()) <= functions
    assert functions <= set(SUBJECTS)
    assert {kind for _, kind in SAMPLE.values()} == set(KINDS)
