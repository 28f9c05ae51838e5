"""torch's own database of operators (`op_db`) through the backend: no result differs from eager.

For every operator that the lowering turns into primitives, and those that torch writes in terms of them, a few of the
database's sample inputs are compiled and compared, results and gradients, in float64 and for comparisons in int64.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

if importlib.util.find_spec("expecttest") is None:  # the database imports it for a class of tests that is not used here
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in

from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from tilemesh.graph.aten import decompositions
from tilemesh.graph.backend import compiled
from tilemesh.graph.generated import way_for
from tilemesh.graph.lower import NotServedError

# Names in the database of what is lowered. Random operators and those that change their input are tested elsewhere.
NAMES = """
    add sub mul div pow maximum minimum exp log sqrt sin cos tanh sigmoid erf neg abs eq ne lt gt le ge where sum
    mean amax var_mean view reshape unsqueeze squeeze permute transpose t expand cat split split_with_sizes mm bmm
    addmm rsqrt reciprocal clamp clamp_min clamp_max masked_fill logical_not logical_and logical_or full zeros_like
    ones_like full_like clone softmax log_softmax addcmul addcdiv rsub lerp square nn.functional.relu
    nn.functional.gelu nn.functional.silu nn.functional.layer_norm nn.functional.rms_norm nn.functional.mse_loss
    nn.functional.softplus nn.functional.elu nn.functional.leaky_relu nn.functional.hardswish nn.functional.glu
    nn.functional.nll_loss nn.functional.cross_entropy nn.functional.embedding nn.functional.logsigmoid select slice
    narrow chunk
"""
CASES = {
    f"{each.name}{each.variant_test_name and '-' + each.variant_test_name}": each
    for each in op_db
    if each.name in NAMES.split()
}
PARTS = 4
# Kernels are compiled for every sample: one of each operator here, eight in `make test-all`.
RUNS = [
    pytest.param(part, samples, marks=() if samples == 1 else pytest.mark.slow)
    for part in range(PARTS)
    for samples in (1, 8)
]


def _forward(operator: OpInfo, sample: Any, places: list[int]) -> Callable[..., list[torch.Tensor]]:
    """The operator as a function of its tensors, with its results in a list."""
    flat, spec = torch.utils._pytree.tree_flatten((sample.input, sample.args, sample.kwargs))

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        first, args, kwargs = torch.utils._pytree.tree_unflatten(given, spec)
        results = torch.utils._pytree.tree_leaves(operator(first, *args, **kwargs))
        return [each for each in results if torch.is_tensor(each)]

    return run


def _with_slopes(results: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results, and the gradients of a weighted sum of them."""
    total = torch.zeros((), dtype=torch.float64)
    for each in results:
        if each.requires_grad:
            weights = torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype).reshape(each.shape)
            total = total + (each * weights).sum()
    slopes = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else ()
    return [*results, *(each for each in slopes if each is not None)]


def _compile(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    try:
        return compiled(module, inputs, way_for(torch.device("cpu")))[0]
    except NotServedError:
        return make_boxed_func(module.forward)  # type: ignore[no-any-return]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("part", "most"), RUNS)
def test_no_operator_gives_another_result(part: int, most: int) -> None:
    compared = 0
    for name in sorted(CASES)[part::PARTS]:
        operator = CASES[name]
        if torch.float64 not in operator.dtypes:
            continue
        samples = operator.sample_inputs("cpu", torch.float64, requires_grad=operator.supports_autograd)
        for number, sample in enumerate(itertools.islice(samples, most)):
            leaves = torch.utils._pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
            places = [place for place, each in enumerate(leaves) if torch.is_tensor(each)]
            tensors = [leaves[place] for place in places]
            slopes = [tensor for tensor in tensors if tensor.requires_grad]
            run = _forward(operator, sample, places)
            expected = _with_slopes(run(*tensors), slopes)
            through = aot_function(run, fw_compiler=_compile, bw_compiler=_compile, decompositions=decompositions())
            try:
                ours = _with_slopes(through(*tensors), slopes)
            except DataDependentOutputException:  # torch itself cannot trace a number that a tensor decides
                continue
            assert len(ours) == len(expected), name
            for mine, theirs in zip(ours, expected, strict=True):
                assert mine.shape == theirs.shape, f"{name} sample {number}"
                assert mine.dtype == theirs.dtype, f"{name} sample {number}"
                close = torch.allclose(mine.detach(), theirs.detach(), rtol=1e-10, atol=1e-10, equal_nan=True)
                assert close, f"{name} sample {number}"
            compared += 1
    assert compared > 15
