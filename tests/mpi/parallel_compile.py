"""A rank of a tensor-parallel model under torch.compile: exchanges are operators of its graphs, and nothing changes."""

from __future__ import annotations

from typing import Any

import torch

from tilemesh.comm import connect
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.gate.cases import MODELS


def compiled_is_the_same() -> str:
    torch.set_num_threads(1)
    comm = connect(timeout_s=200.0)
    tokens = torch.arange(22).reshape(2, 11)  # of which ranks have unequal parts
    for sequence in (False, True):
        found = []
        for compiled in (False, True):
            plan = ParallelPlan(tp=comm.size, sequence_parallel=sequence, precision="fp64")
            model = Transformer(MODELS["llama"].replace(dropout=0.0), seed=1, dtype=torch.float64)
            laid = lay(model, Mesh(comm, tp=comm.size), plan)
            loss: Any = laid.loss
            if compiled:
                laid.seams.stay_out_of_graphs()
                loss = torch.compile(laid.loss, backend="inductor" if sequence else "aot_eager")
            for _ in range(2):
                total, count = loss(tokens, tokens)
                laid.gradients.backward(total, count)
                done = laid.gradients.finish(1.0)
            found.append(torch.tensor([done.loss, done.norm], dtype=torch.float64))
        torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)  # a compiler may add in another order
    return comm.backend
