"""Checkpoints of placed modules: a run that is stopped goes on, on any mesh, as if it had not been."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_placed_models import MODULES
from torch import Tensor, nn

from tilemesh.comm.connection import run_threads
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.axes import ordered, ranks_of
from tilemesh.core.errors import RunError
from tilemesh.graph.joint import ModuleCall, trace_joint
from tilemesh.parallel import Mesh, place
from tilemesh.parallel.placed import place_joint
from tilemesh.train import PlacedCheckpoints

Loss = Callable[[Any], Tensor]


def call(module: nn.Module, example: Any) -> Any:
    return module(**example) if isinstance(example, dict) else module(*example)


def train(module: nn.Module, example: Any, loss: Loss, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss(call(module, example)).backward()
        optimizer.step()


def go_on(
    folder: Path,
    module: nn.Module,
    example: Any,
    loss: Loss,
    axes: Mapping[str, int],
    pins: Mapping[str, str],
    until: int,
) -> dict[str, Tensor]:
    """From the last checkpoint to this step, on ranks that begin with other weights; the whole state then."""
    fresh = copy.deepcopy(module)
    with torch.no_grad():
        for value in fresh.parameters():
            value.fill_(3.0)
    begins = module if not (folder / "checkpoints").exists() else fresh
    joint = place_joint(trace_joint(module, ModuleCall.example(example)), ordered({"dp": 1, "tp": 1} | axes), pins)

    def rank(comm: Communicator) -> dict[str, Tensor] | None:
        placed = place(begins, Mesh(comm, **axes), pins, example, joint=joint)
        optimizer = torch.optim.AdamW(placed.parameters(), 0.01)
        checkpoints = PlacedCheckpoints(folder, placed, optimizer, say=lambda words: None)
        train(placed, example, loss, optimizer, until - checkpoints.restore())
        checkpoints.save(until)
        return placed.gather()

    state, *_ = run_threads(ranks_of(ordered(axes)), rank)
    assert state is not None
    return state


def pins_for(module: nn.Module, example: Any, axes: Mapping[str, int], cuts: Mapping[str, str]) -> dict[str, str]:
    named = [name for name, _ in module.named_parameters()]
    cut = {name: place for words, place in cuts.items() for name in named if re.search(words, name)}
    inputs: Sequence[str] = list(example) if isinstance(example, dict) else [f"input{n}" for n in range(len(example))]
    return (cut if "tp" in axes else {}) | (dict.fromkeys(inputs, "dp:S0") if "dp" in axes else {})


@pytest.mark.parametrize("name", ["cnn", "recommender", pytest.param("bert", marks=pytest.mark.slow)])
def test_a_placed_run_goes_on_on_other_meshes_as_one_process(name: str, tmp_path: Path) -> None:
    """Two ranks, then four, then one: weights, buffers and both moments of Adam move with it."""
    if name == "bert":
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    make, cuts = MODULES[name]
    module, example, loss = make()
    single = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(single.parameters(), 0.01)
    done = 0
    for axes, steps in (({"tp": 2}, 2), ({"dp": 2, "tp": 2}, 4), ({"dp": 1}, 5)):
        state = go_on(tmp_path, module, example, loss, axes, pins_for(module, example, axes, cuts), steps)
        train(single, example, loss, optimizer, steps - done)
        done = steps
        for key, value in single.state_dict().items():
            torch.testing.assert_close(state[key], value, atol=1e-10, rtol=1e-10, msg=f"{key} on {axes}")


def test_dropout_goes_on_where_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.4), nn.Linear(16, 4)).double()
    example = [torch.randn(8, 6).double()]
    whole = go_on(tmp_path / "a", module, example, Tensor.sum, {"tp": 1}, {}, 4)
    go_on(tmp_path / "b", module, example, Tensor.sum, {"tp": 2}, {"0.weight": "tp:S0"}, 1)
    torch.manual_seed(9)
    state = go_on(tmp_path / "b", module, example, Tensor.sum, {"dp": 2}, {"input0": "dp:S0"}, 4)
    for key, value in whole.items():
        torch.testing.assert_close(state[key], value, atol=1e-10, rtol=1e-10, msg=key)


def test_another_modules_checkpoint_is_refused(tmp_path: Path) -> None:
    module, example = nn.Linear(3, 3).double(), [torch.randn(2, 3).double()]
    go_on(tmp_path, module, example, Tensor.sum, {"tp": 1}, {}, 1)
    with pytest.raises(RunError, match=r"0\.bias is in this module alone: it is another module's checkpoint"):
        go_on(tmp_path, nn.Sequential(module), example, Tensor.sum, {"tp": 1}, {}, 2)
    wider = nn.Linear(3, 5).double()
    with pytest.raises(RunError, match="another model's checkpoint"):
        go_on(tmp_path, wider, example, Tensor.sum, {"tp": 1}, {}, 2)
