"""A part of the vocabulary's loss on a GPU: the compiled kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tilemesh.comm.connection import connect
from tilemesh.kernels.cross_entropy.part import part_sums
from tilemesh.parallel.tensor import Seams, vocabulary_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [7, 1000, 50304])
def test_loss_and_gradient(classes, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (3 * torch.randn(2, 300, classes, generator=generator, device="cuda", dtype=torch.float64)).to(dtype)
    targets = torch.randint(classes, (2, 300), generator=generator, device="cuda")
    targets[0, :9] = -100
    wide = logits.double().requires_grad_()
    exact = functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum")
    (wanted,) = torch.autograd.grad(exact, wide)
    errors = []
    for kernels in ("triton", "torch"):
        leaf = logits.clone().requires_grad_()
        total, counted = vocabulary_loss(leaf * 1, targets, Seams(connect("alone")), classes, kernels)
        (found,) = torch.autograd.grad(total, leaf)
        assert counted == 591
        errors.append(((total.double() - exact).abs(), (found.double() - wanted).norm()))
    for mine, torchs, size in zip(*errors, (exact, wanted.norm()), strict=True):
        assert mine <= 2 * torchs + 4 * torch.finfo(dtype).eps * size


def test_a_target_outside_of_all_classes_is_nan_and_harmless():
    logits = torch.randn(4, 1000, device="cuda")
    targets = torch.tensor([0, 2000, -1, 1 << 40], device="cuda")
    *_, chosen = part_sums(logits, targets, 0, 2000)
    assert chosen.isnan().tolist() == [False, True, True, True]
