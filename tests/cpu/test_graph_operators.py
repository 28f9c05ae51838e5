"""torch's own database of operators (`op_db`) through the backend: no result differs from eager.

For every operator that the lowering turns into primitives, and those that torch writes in terms of them, a few of the
database's sample inputs are compiled and compared, results and gradients, in float64 and for comparisons in int64.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from typing import Any

import pytest
import torch

if importlib.util.find_spec("expecttest") is None:  # the database imports it for a class of tests that is not used here
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from tilemesh.graph.backend import compiled
from tilemesh.graph.generated import way_for
from tilemesh.graph.lower import NotServedError, decompositions

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
SAMPLES = 4  # of each operator: kernels are compiled for every one


def _program(operator: OpInfo, sample: Any, places: list[int]) -> Any:
    """The operator as a function of its floating-point tensors, results flat, and gradients of those."""

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = list(tensors)
        flat, spec = torch.utils._pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        for place, tensor in zip(places, given, strict=True):
            flat[place] = tensor
        first, args, kwargs = torch.utils._pytree.tree_unflatten(flat, spec)
        results = [
            each for each in torch.utils._pytree.tree_leaves(operator(first, *args, **kwargs)) if torch.is_tensor(each)
        ]
        slopes = [each for each in results if each.requires_grad]
        if not slopes:
            return results
        total = sum(
            (each * torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype).reshape(each.shape)).sum()
            for each in slopes
        )
        leaves = [tensor for tensor in given if tensor.requires_grad]
        return results + [each for each in torch.autograd.grad(total, leaves, allow_unused=True) if each is not None]

    return run


@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", range(6))
def test_no_operator_gives_another_result(start: int) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    way = way_for(torch.device("cpu"))
    compared = 0
    for name in sorted(CASES)[start::6]:
        operator = CASES[name]
        if torch.float64 not in operator.dtypes:
            continue
        for number, sample in enumerate(
            operator.sample_inputs("cpu", torch.float64, requires_grad=operator.supports_autograd)
        ):
            if number >= SAMPLES:
                break
            leaves = torch.utils._pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
            places = [place for place, each in enumerate(leaves) if torch.is_tensor(each)]
            tensors = [leaves[place] for place in places]
            program = _program(operator, sample, places)
            functionalised = torch.func.functionalize(program, remove="mutations")
            expected = program(*tensors)
            traced = make_fx(functionalised, decomposition_table=decompositions(), tracing_mode="fake")(*tensors)
            try:
                run, *_ = compiled(traced, [tensor.detach() for tensor in tensors], way)
            except NotServedError:
                continue
            ours = run([tensor.detach() for tensor in tensors])
            assert len(ours) == len(expected), name
            for mine, theirs in zip(ours, expected, strict=True):
                torch.testing.assert_close(
                    mine,
                    theirs.detach(),
                    rtol=1e-10,
                    atol=1e-10,
                    equal_nan=True,
                    msg=lambda said, name=name, number=number: f"{name} sample {number}: {said}",
                )
            compared += 1
    assert compared > 20
