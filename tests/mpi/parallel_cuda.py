"""A laid model's exchanges on CUDA tensors over nccl, on the one rank of one GPU: seams, loss and a bucket's handle."""

from __future__ import annotations

import torch
from torch import nn

from tilemesh.comm import connect
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.linear import DENSE, LayerPlace, as_kind
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.tensor import Passage, Seams, vocabulary_loss


def exchanges_right() -> str:
    """Over what they were: nccl."""
    comm = connect("torch", timeout_s=60.0)
    assert comm.transport.device is not None, "not over nccl"
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 6, device="cuda", dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 6, (2, 5), device="cuda")
    total, count = vocabulary_loss(logits, targets, Seams(comm), 6)
    total.backward()
    whole = logits.detach().clone().requires_grad_()
    wanted = nn.functional.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="sum")
    wanted.backward()
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(logits.grad, whole.grad)
    assert int(count) == 10

    for sequence in (False, True):
        seams = Seams(comm, sequence, tokens=5)
        plain = nn.Linear(4, 3, device="cuda", dtype=torch.float64)
        cut = as_kind(plain, DENSE)
        cut.stand(LayerPlace(leave=Passage(seams, "leave")))
        x = torch.randn(2, 5, 4, device="cuda", dtype=torch.float64, requires_grad=True)
        y = cut(Passage(seams, "enter")(x))
        assert y.is_cuda
        torch.testing.assert_close(y, plain(x))
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        torch.testing.assert_close(gradient, torch.autograd.grad(plain(x).square().sum(), x)[0])

    # Hooks run on autograd's thread here; the handle begun there is waited for by this one.
    model = nn.Linear(64, 64, device="cuda")
    laid = lay(model, Mesh(comm), ParallelPlan(precision="fp32"), {}, bucket_bytes=1)
    handles = []
    for bucket in laid.gradients.buckets:
        bucket.parameters[0].register_post_accumulate_grad_hook(
            lambda parameter: handles.append(comm.all_reduce(parameter.grad, out=parameter.grad, wait=False))
        )
    x = torch.randn(8, 64, device="cuda")
    laid.gradients.backward(laid.module(x).square().sum(), 8)
    assert [handle.wait().is_cuda for handle in handles] == [True, True]
    laid.gradients.finish()
    again = torch.autograd.grad(laid.module(x).square().sum() / 8, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), again, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    return "nccl"
