"""A compiled layer of one rank of tp on a GPU: one graph, and the loss and gradients of the uncompiled one."""

from __future__ import annotations

import pytest
import torch

from tilemesh.comm.runtime.mirror import mirror
from tilemesh.parallel.mesh import Mesh
from tilemesh.train.load import load
from tilemesh.train.rank import lay_model
from tilemesh.train.source import next_token

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
SIZES = "model.layers=3,model.width=256,model.heads=4,model.context=128,model.vocabulary=512,model.dropout=0.0"


@pytest.mark.parametrize("sequence", ["false", "true"])
def test_loss_and_gradients_are_those_of_exchanges_outside_of_graphs(sequence: str) -> None:
    torch._dynamo.reset()
    sets = f"plan.precision=fp32,plan.sequence_parallel={sequence},train.compile=layers,train.device=cuda"
    config = load("llama-3-8b", mesh="dp=1,tp=2", sets=[SIZES, "model.kv_heads=2,model.mlp_width=512", sets])
    laid = lay_model(config, Mesh(mirror(2), tp=2), torch.device("cuda"))
    objective = next_token(config, laid)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(512, (2, 128), generator=generator).cuda() for _ in range(2))
    parameters = list(laid.module.parameters())
    for parameter in parameters:
        torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator("cuda").manual_seed(1))
    compiled, eager = (
        (total.detach(), *torch.autograd.grad(total, parameters))
        for total in (loss(tokens, targets)[0] for loss in (objective.loss, objective.held_out))
    )
    for ours, plain in zip(compiled, eager, strict=True):
        # Sums of a few hundred float32 terms, added in another order, through three layers.
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))
