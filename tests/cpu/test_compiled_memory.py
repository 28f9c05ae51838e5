"""What torch.compile keeps of a layer, read off its own partition of the graph, is what the planner counts."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig
from tilemesh.model.kernels import PLAIN
from tilemesh.model.loss import loss_sum
from tilemesh.model.programs.prepare import prepare
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.kept import kept_tensors
from tilemesh.model.work.task import Task
from tilemesh.train.plain import gpu_use

ROWS, TOKENS = 3, 32
SIZES: dict[str, Any] = {"width": 48, "heads": 4, "vocabulary": 248, "context": TOKENS}
LLAMA = {
    "kv_heads": 2, "mlp_width": 104, "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "biases": False,
    "tied": False,
}  # fmt: skip
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.permute.default, torch.ops.aten.split_with_sizes.default)


class ReadOffError(Exception):
    """The graph was seen: nothing has to be compiled any more."""


def owner(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory this one is a view of."""
    while node.target in VIEWS or (node.target is operator.getitem and node.args[0].target in VIEWS):  # type: ignore[union-attr]
        node = node.args[0]  # type: ignore[assignment]
    return node


def kept_bytes(config: ModelConfig, autocast: bool) -> int:
    """Bytes of activations that the compiled forward pass hands to the backward pass; weights' copies left out."""
    # Imported here: seconds, which only the process that runs this test should pay.
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.decomposition import select_decomp_table

    model = Transformer(config, kernels=PLAIN).train()
    programs = prepare(model, gpu_use(compiled=True))
    found: list[int] = []

    def partition(joint: torch.fx.GraphModule, inputs: Any, **named: Any) -> Any:
        _recursive_joint_graph_passes(joint)
        forward, _ = min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **named)
        (outputs,) = next(node for node in forward.graph.nodes if node.op == "output").args
        nodes = {owner(node) for node in outputs[named["num_fwd_outputs"] :]}
        values = [node.meta["val"] for node in nodes if node.op != "placeholder"]
        # Whatever has a value or more for each token; copies of weights have no such dim.
        sizes = [one.numel() * one.element_size() for one in values if isinstance(one, torch.Tensor) and _by_token(one)]
        found.append(sum(sizes))
        raise ReadOffError

    def loss(inputs: torch.Tensor, targets: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = programs(inputs, dropout_seed=seed if config.dropout else None)
        return loss_sum(logits, targets)[0]

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph, partition_fn=partition, decompositions=select_decomp_table()
    )
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    torch.compiler.reset()
    with pytest.raises(Exception, match="ReadOffError"):
        torch.compile(loss, backend=backend)(tokens, tokens, torch.tensor(1))
    torch.compiler.reset()
    return found[0]


def _by_token(value: torch.Tensor) -> bool:
    shape = tuple(value.shape)
    return shape[:2] == (ROWS, TOKENS) or shape[:1] == (ROWS * TOKENS,) or (shape[:1] == (ROWS,) and TOKENS in shape)


KEYS: dict[str, dict[str, Any]] = {
    "wide-heads": {**LLAMA, "head_width": 16},
    "head-norms": {**LLAMA, "qk_norm": "head"},
    "full-head-norms": {**LLAMA, "qk_norm": "full"},
    "parallel": {**LLAMA, "parallel_residual": True},
    "branch-norms": {**LLAMA, "norm_place": "branch"},
    "sandwich-norms": {**LLAMA, "norm_place": "sandwich"},
    "scaled-queries": {"score_width": 9},
    "gemma": {
        **LLAMA, "norm_place": "sandwich", "activation": "geglu", "qk_norm": "head", "head_width": 16,
        "norm_offset": True, "scaled_embedding": True, "score_width": 9,
    },
}  # fmt: skip
CASES = [
    pytest.param(LLAMA, 0.0, True, id="llama"),
    pytest.param({}, 0.1, True, id="gpt-dropout", marks=pytest.mark.slow),
    pytest.param({}, 0.0, True, id="gpt", marks=pytest.mark.slow),
    pytest.param({}, 0.0, False, id="gpt-fp32", marks=pytest.mark.slow),
    pytest.param({"activation": "relu"}, 0.0, True, id="relu", marks=pytest.mark.slow),
    pytest.param(LLAMA, 0.1, True, id="llama-dropout", marks=pytest.mark.slow),
    pytest.param(LLAMA, 0.0, False, id="llama-fp32", marks=pytest.mark.slow),
    *(pytest.param(fields, 0.0, True, id=name, marks=pytest.mark.slow) for name, fields in KEYS.items()),
]


@pytest.mark.parametrize(("kind", "dropout", "autocast"), CASES)
def test_a_layer_keeps_what_the_planner_counts(kind: dict[str, Any], dropout: float, autocast: bool) -> None:
    """Of one layer more: the first and the last one keep a little less or more."""
    three, two = (ModelConfig(layers=n, dropout=dropout, **{**SIZES, **kind}) for n in (3, 2))
    measured = kept_bytes(three, autocast) - kept_bytes(two, autocast)
    plan = ParallelPlan(microbatch=ROWS, precision="bf16" if autocast else "fp32")
    counted = sum(tensor.nbytes for tensor in kept_tensors(three, Task.of(plan, TOKENS, "compiled")))
    assert measured == counted
