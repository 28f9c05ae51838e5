"""What a run's routers are seen to do: the same on every layout, once per token, and on the run's page."""

from __future__ import annotations

import base64
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig
from tilemesh.model.experts import Experts
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.apply import lay
from tilemesh.parallel.laid import StepPiece
from tilemesh.parallel.mesh import Mesh
from tilemesh.report.routing_part import LayerLoad, drawing, routing
from tilemesh.report.run import Run, read
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.metrics import latest
from tilemesh.train.load import load
from tilemesh.train.rank import train_here
from tilemesh.train.routers import RouterWatch
from tilemesh.train.rows import rows

CONFIG = ModelConfig(
    layers=3, width=16, heads=4, vocabulary=40, context=32, mlp_width=24, norm="rmsnorm", activation="swiglu",
    biases=False, experts=4, experts_per_token=2, dense_layers=(1,), balance_loss=0.1, positions="rotary",
)  # fmt: skip


def seen(plan: dict[str, Any], in_turn: bool = False) -> list[dict[str, Any]]:
    """Of one step of 8 sequences, evaluated before and after."""

    def main(comm: Communicator) -> dict[str, Any]:
        layout = ParallelPlan(precision="fp64", microbatch=8 // plan.get("dp", 1), **plan)
        laid = lay(Transformer(CONFIG, seed=1, dtype=torch.float64), Mesh(comm, **layout.axes), layout)
        watch = RouterWatch(laid, in_turn)
        text = torch.randint(40, (8, 13), generator=torch.Generator().manual_seed(5))
        mine = text[layout.microbatch * laid.mesh.dp.index :][: layout.microbatch]
        laid.module.eval()
        with torch.no_grad():
            laid.loss(mine[:, :-1], mine[:, 1:])
        laid.module.train()
        laid.passes([StepPiece(mine[:, :-1], mine[:, 1:], 0)])
        return watch.figures(CONFIG.expert_layers, CONFIG.experts)

    return run_threads(math.prod(plan.get(axis, 1) for axis in ("dp", "tp", "pp", "cp")), main)


def test_every_layout_sees_the_same_choices() -> None:
    """Picks counted by hand on one process; recomputation and held-out text count nothing."""
    model, picks = Transformer(CONFIG, seed=1, dtype=torch.float64), []
    routers = [module.router for module in model.modules() if isinstance(module, Experts)]
    for router in routers:
        router.register_forward_hook(lambda module, args, routing: picks.append(routing))
    text = torch.randint(40, (8, 13), generator=torch.Generator().manual_seed(5))
    model(text[:, :-1])
    wanted = [[4 * int((routing.experts_NC == expert).sum()) / (2 * 96) for expert in range(4)] for routing in picks]
    spread = [torch.distributions.Categorical(logits=routing.scores_NX.detach()).entropy() for routing in picks]
    sure = [value.mean() / math.log(4) for value in spread]
    plans: list[dict[str, Any]] = [
        {}, {"recompute": "full"}, {"dp": 2, "ep": 2, "recompute": "operators"}, {"tp": 2}, {"pp": 2},
        {"cp": 2, "ep": 2, "recompute": "full"},
    ]  # fmt: skip
    for plan in plans:
        for figures in seen(plan):
            assert figures["expert_load"] == [pytest.approx(row, abs=1e-4) for row in wanted], plan
            assert figures["router_entropy"] == pytest.approx([float(value) for value in sure], abs=1e-4)
            assert figures["busiest_expert"] == pytest.approx(max(map(max, wanted)), abs=1e-4)


def test_tokens_that_go_to_experts_in_turn_are_even() -> None:
    for figures in seen({"dp": 2, "ep": 2, "recompute": "full"}, in_turn=True):
        assert figures["expert_load"] == [[1.0] * 4] * 2


def test_a_run_keeps_and_shows_what_its_routers_did(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {number}: {number * 7} dogs\n" for number in range(200)))
    sets = (
        "model.layers=2,model.width=16,model.heads=4,model.mlp_width=24,model.context=16,model.experts=4,train.steps=2,"
        "train.batch=4,train.trace_steps=0,evaluate.every=1,checkpoint.every=0,sample.tokens=0,train.force_balance=true,"
        f"train.device=cpu,data.source={tmp_path / 'text.txt'}"
    )
    config, folder = load(mesh="dp=2,ep=2", sets=[sets]), tmp_path / "run"
    new_run(TRAIN, config.to_toml(), folder)
    run_threads(2, lambda comm: train_here(config, folder, comm))
    lines = [line for line in latest(folder) if line["kind"] == "step"]
    assert [line["expert_load"] for line in lines] == [[[1.0] * 4] * 2] * 2
    assert all(0 < value <= 1 for line in lines for value in line["router_entropy"])
    run = read(folder)
    assert {row.case.get("routing") for row in rows(run.summary, {})} == {"forced balance"}
    page = str(routing(run))
    assert "train.force_balance" in page
    assert "Busiest expert" in page
    picture = re.search(r"data:image/svg\+xml;base64,([^\"]+)", page)
    assert picture is not None
    assert "layer 1, expert 3: 1 times the mean" in base64.b64decode(picture[1]).decode()


@pytest.mark.parametrize("told", [None, [], [[]], [["a"]], [[-1.0]], [3], [[1e200]], {"a": 1}])
def test_what_cannot_be_meant_is_not_drawn(told: Any) -> None:
    assert routing(Run("r", "/r", "done", steps=[{"step": 1, "expert_load": told}])) is None


def test_many_layers_are_thinned_and_idle_experts_named() -> None:
    picture = drawing([LayerLoad(0, [0.0, 2.5, 0.5], 0.5)] * 60)
    assert picture.count("2.50 × the mean, 1 idle, entropy 0.50") == 20
