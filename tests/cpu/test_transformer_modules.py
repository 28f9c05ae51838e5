"""Modules over operators: what torch's own compute with the same state dict, by the interpreter and by torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import tilemesh as tm
from tilemesh.core.errors import UsageError

kernels = tm.kernels
X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([[0, 3, 2, 1, -100], [6, 5, 4, 0, 1]])
EACH = pytest.mark.parametrize("how", ["torch", "interpret"])
pytestmark = pytest.mark.skipif(not hasattr(torch.nn, "RMSNorm"), reason="needs nn.RMSNorm")


def filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


@EACH
@pytest.mark.parametrize(("ours", "torchs"), [("FusedRMSNorm", nn.RMSNorm), ("FusedLayerNorm", nn.LayerNorm)])
def test_norms_have_torchs_state_and_add_a_residual(ours, torchs, how):
    theirs, mine = filled(torchs(16, eps=1e-5)), getattr(kernels, ours)(16, eps=1e-5, implementation=how)
    mine.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(mine(X), theirs(X))
    y, total = mine(X, X.flip(0))
    torch.testing.assert_close(total, X + X.flip(0))
    torch.testing.assert_close(y, theirs(total))


@EACH
def test_losses(how):
    head = kernels.FusedLinearCrossEntropyLoss(16, 7, label_smoothing=0.1, implementation=how)
    filled(head)
    wanted = functional.cross_entropy((X @ head.weight.T).flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(head(X, TARGETS), wanted)
    loss = kernels.FusedCrossEntropyLoss(label_smoothing=0.1, reduction="none", implementation=how)
    each = functional.cross_entropy(
        (X @ head.weight.T).flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1, reduction="none"
    )
    torch.testing.assert_close(loss((X @ head.weight.T).detach(), TARGETS).flatten(), each)
    head(X, TARGETS).backward()
    assert head.weight.grad is not None


@EACH
def test_softmax_and_mlps(how):
    x = X[:, :, :8]
    torch.testing.assert_close(kernels.FusedSoftmax(scale=0.5, implementation=how)(x), (0.5 * x).softmax(-1))
    scores = X @ X.mT
    unseen = torch.ones(5, 5, dtype=torch.bool).triu(1)
    causal = kernels.FusedSoftmax(causal=True, implementation=how)(scores)
    torch.testing.assert_close(causal, scores.masked_fill(unseen, -torch.inf).softmax(-1))
    plain = filled(kernels.FusedMlp(16, 24, activation="gelu", implementation=how))
    torch.testing.assert_close(plain(X), plain.fc_out(functional.gelu(plain.fc_in(X))), atol=1e-5, rtol=1e-5)
    for activation, act in (("swiglu", functional.silu), ("geglu", lambda g: functional.gelu(g, approximate="tanh"))):
        gated = filled(kernels.GatedMlp(16, 24, activation=activation, implementation=how))
        torch.testing.assert_close(gated(X), gated.fc_out(act(gated.fc_gate(X)) * gated.fc_in(X)))


@EACH
def test_rotary_turns_by_relative_positions(how):
    """A query's product with a key depends on how far apart they are, and on nothing else of where they stand."""
    turn = kernels.Rotary(16, implementation=how)
    q, k = X[:1, None, :1], X[1:, None, :1]
    near, far = ((turn(q, start=start + 3) * turn(k, start=start)).sum() for start in (0, 11))
    torch.testing.assert_close(near, far)
    assert not torch.allclose(near, (q * k).sum())
    torch.testing.assert_close(turn(X[:, None])[:, :, 2:], turn(X[:, None, 2:], start=2))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kernels.FusedCrossEntropyLoss(smoothing=0.1), "label_smoothing"),
        (lambda: kernels.FusedLinearCrossEntropyLoss(4, 4, differentiated=True), "differentiated"),
        (lambda: kernels.GatedMlp(4, 4, activation="reglu"), "swiglu"),
        (lambda: kernels.FusedMlp(4, 4, activation="swish"), "activation"),
        (lambda: kernels.FusedRMSNorm(4, implementation="cuda"), "implementation"),
        (lambda: kernels.Rotary(5), "even"),
    ],
)
def test_bad_arguments_are_refused_when_a_module_is_made(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_they_say_what_they_are():
    assert "scale=0.5" in repr(kernels.FusedSoftmax(scale=0.5))
    assert "activation=geglu" in repr(kernels.GatedMlp(4, 8, activation="geglu"))
    assert "z_loss=0.1" in repr(kernels.FusedCrossEntropyLoss(z_loss=0.1))
