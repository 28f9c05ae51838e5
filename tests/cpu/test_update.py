"""The arithmetic of a training step's update: torch's own optimisers, bit for bit, without what they import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from tilemesh.train.config import OptimizerConfig
from tilemesh.train.update import UpdateGroup


def theirs(config: OptimizerConfig, parameters: list[nn.Parameter], fused: bool) -> torch.optim.Optimizer:
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=1.0, momentum=config.momentum, weight_decay=config.weight_decay, fused=fused
        )
    return torch.optim.AdamW(
        parameters, lr=1.0, betas=config.betas, eps=config.epsilon, weight_decay=config.weight_decay, fused=fused
    )


@pytest.mark.parametrize(("fused", "divisor"), [(False, None), (True, None), (True, 3.0)])  # only fused ones divide
@pytest.mark.parametrize(("name", "momentum"), [("adamw", 0.9), ("sgd", 0.9), ("sgd", 0.0)])
def test_three_steps_are_those_of_torchs_optimiser(
    name: str, momentum: float, fused: bool, divisor: float | None
) -> None:
    config = OptimizerConfig(name=name, momentum=momentum, weight_decay=0.1)
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    values = [random(5, 3), random(7), random(2, 2)]
    ours, peers = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    group = UpdateGroup(config, {str(number): value for number, value in enumerate(ours)}, config.weight_decay, fused)
    optimizer = theirs(config, peers, fused)
    scale = None if divisor is None else torch.tensor(divisor)
    optimizer.grad_scale = scale  # type: ignore[attr-defined]
    for step in range(3):
        for mine, peer in zip(ours[:2], peers[:2], strict=True):  # the third never has a gradient
            mine.grad = random(*mine.shape)
            peer.grad = mine.grad.clone()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()
        with torch.no_grad():
            group.step(0.1 / (1 + step), scale)
    assert all(torch.equal(mine, peer) for mine, peer in zip(ours, peers, strict=True))
    kept = {name: dict(state) for name, state in group.state.items()}
    assert set(kept) == {str(number) for number, peer in enumerate(peers) if optimizer.state[peer]}
    for name, state in kept.items():
        peer_state = optimizer.state[peers[int(name)]]
        assert set(state) == set(peer_state)
        assert all(torch.equal(value, peer_state[kind]) for kind, value in state.items())


def test_a_step_imports_nothing_that_compiles() -> None:
    """Making one of torch's optimisers does, which takes every rank as long as `import torch`."""
    code = (
        "import sys, torch; from tilemesh.train.rank import train_here; from tilemesh.train.update import UpdateGroup;"
        "from tilemesh.train.config import OptimizerConfig;"
        "value = torch.nn.Parameter(torch.ones(2)); value.grad = torch.ones(2);"
        "torch.set_grad_enabled(False); UpdateGroup(OptimizerConfig(), {'w': value}, 0.1, True).step(0.1, None);"
        "print(sorted({'torch._dynamo', 'torch._inductor', 'triton', 'sympy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
