"""The planner's bytes by axis and collective are those that a recorder counts in a step, to the byte."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from sampled import sampled

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.plan import ParallelPlan, Precision
from tilemesh.core.step.book import find, synchronous
from tilemesh.core.step.program import chunk_layers
from tilemesh.measure.trace import Trace
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.step_exchanges import step_exchanges
from tilemesh.model.work.task import Task
from tilemesh.model.work.weights import SLICED
from tilemesh.parallel.apply import lay
from tilemesh.parallel.laid import StepPiece
from tilemesh.parallel.mesh import Mesh
from tilemesh.train.record import CONTROL, Recorder, observe_mesh

TIMEOUT_S = 60.0
TOKENS = 8


SIZES = [(2, 2, 1), (4, 2, 1), (4, 1, 1), (8, 2, 1), (4, 2, 2)]  # tp, key/value heads, dp


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    ("sizes", "precision"),
    [
        *sampled(((sizes, "fp32") for sizes in SIZES), [(sizes, "fp32") for sizes in SIZES[::2]]),
        # In 16 bits one tensor-parallel layout and one of both axes: the counts are the same, the bytes half.
        *(pytest.param(sizes, "bf16", marks=[] if sizes in SIZES[::4] else pytest.mark.slow) for sizes in SIZES),
    ],
)
def test_what_is_predicted_is_what_is_recorded(
    sizes: tuple[int, int, int], precision: Precision, sequence: bool
) -> None:
    tp, kv_heads, dp = sizes
    config = ModelConfig(layers=2, width=32, heads=8, kv_heads=kv_heads, mlp_width=64, vocabulary=64, context=TOKENS)
    plan = ParallelPlan(dp=dp, tp=tp, sequence_parallel=sequence, precision=precision, microbatch=2, accumulation=3)

    def main(comm: Communicator) -> dict[str, dict[str, int]]:
        mesh, recorder = Mesh(comm, dp=dp, tp=tp), Recorder(Trace(None))
        laid = lay(Transformer(config), mesh, plan)
        observe_mesh(mesh, recorder)
        for microbatch in range(plan.accumulation):
            tokens = torch.randint(0, 64, (plan.microbatch, TOKENS + 1), generator=torch.Generator().manual_seed(0))
            loss, count = laid.loss(tokens[:, :-1], tokens[:, 1:])
            laid.gradients.backward(loss, count, last=microbatch + 1 == plan.accumulation)
        laid.gradients.finish()
        return recorder.bytes_by_axis()

    recorded = run_threads(dp * tp, main, timeout_s=TIMEOUT_S)[0]
    recorded.pop(CONTROL, None)
    assert recorded == step_exchanges(config, plan, Task.of(plan, TOKENS, "eager"), (config.layers,))


@pytest.mark.parametrize(
    ("recompute", "sequence", "dropout"),
    sampled(
        itertools.product(("operators", "full"), (False, True), (0.0, 0.1)),
        [("operators", False, 0.1), ("operators", True, 0.0), ("full", False, 0.0), ("full", True, 0.1)],
    ),
)
def test_what_is_computed_again_is_exchanged_again(recompute: Any, sequence: bool, dropout: float) -> None:
    config = ModelConfig(
        layers=3, width=32, heads=8, mlp_width=64, vocabulary=64, context=TOKENS, dropout=dropout, norm="rmsnorm"
    )
    plan = ParallelPlan(tp=2, sequence_parallel=sequence, precision="fp32", microbatch=2, recompute=recompute)

    def main(comm: Communicator) -> dict[str, dict[str, int]]:
        mesh, recorder = Mesh(comm, dp=1, tp=2), Recorder(Trace(None))
        laid = lay(Transformer(config), mesh, plan)
        observe_mesh(mesh, recorder)
        tokens = torch.randint(0, 64, (plan.microbatch, TOKENS + 1), generator=torch.Generator().manual_seed(0))
        loss, count = laid.loss(tokens[:, :-1], tokens[:, 1:], dropout_seed=1 if dropout else None)
        laid.gradients.backward(loss, count)
        laid.gradients.finish()
        return recorder.bytes_by_axis()

    recorded = run_threads(2, main, timeout_s=TIMEOUT_S)[0]
    recorded.pop(CONTROL, None)
    assert recorded == step_exchanges(config, plan, Task.of(plan, TOKENS, "eager"), (config.layers,))


TIED = ModelConfig(layers=4, width=16, heads=4, vocabulary=19, context=TOKENS)
UNTIED = ModelConfig(
    layers=5, width=16, heads=4, kv_heads=1, mlp_width=24, vocabulary=18, context=TOKENS, norm="rmsnorm",
    positions="rotary", activation="swiglu", biases=False, tied=False,
)  # fmt: skip
MIXED = UNTIED.replace(experts=2, experts_per_token=1, dense_layers=(0, 3), dense_width=32, qk_norm="head")
LISTED: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    # Every schedule, with ZeRO-3 over two replicas: what its list gathers and sums, each way of placing chunks.
    **{
        name: (TIED if turn % 2 else UNTIED, {"schedule": name, "dp": 2, "zero": 3})
        for turn, name in enumerate(synchronous())
    },
    "two holders, summed over stages": (TIED, {"schedule": "chimera"}),
    "two holders, ZeRO-1": (UNTIED, {"schedule": "dualpipe", "dp": 2, "zero": 1}),
    "two holders, split layers": (UNTIED, {"schedule": "chimera", "tp": 2, "sequence_parallel": True}),
    "a tied table on both ends": (TIED, {"schedule": "1f1b", "tp": 2, "dp": 2, "zero": 2}),
    "slices, ZeRO-2": (TIED, {"schedule": "terapipe", "slices": 3, "dp": 2, "zero": 2}),
    "groups of replicas": (UNTIED, {"schedule": "zb-v", "dp": 4, "zero": 2, "zero_group": 2}),
    "one stage recomputes": (
        TIED, {"schedule": "1f1b", "tp": 2, "recompute": "full", "recompute_every": 2, "recompute_stages": (0,)},
    ),
    "some layers without experts": (
        MIXED, {"schedule": "1f1b", "tp": 2, "dp": 2, "zero": 2, "recompute": "full", "recompute_every": 2},
    ),
    "no pipeline, some layers without experts": (MIXED, {"pp": 1, "tp": 2, "dp": 2, "zero": 3}),
    "four stages": (TIED, {"schedule": "chimera", "pp": 4}),
    "no pipeline, a tied table, ZeRO-3": (TIED, {"pp": 1, "dp": 2, "zero": 3, "tp": 2, "sequence_parallel": True}),
    "no pipeline, groups of replicas": (UNTIED, {"pp": 1, "dp": 4, "zero": 1, "zero_group": 2, "tp": 1}),
    "no pipeline, ZeRO-2 and split layers": (UNTIED, {"pp": 1, "dp": 2, "zero": 2, "tp": 2, "sequence_parallel": True}),
}  # fmt: skip


def difference(after: dict[str, dict[str, int]], before: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """What came to it in between, without what did not change."""
    more = {
        axis: {name: nbytes - before.get(axis, {}).get(name, 0) for name, nbytes in by.items()}
        for axis, by in after.items()
    }
    more = {axis: {name: nbytes for name, nbytes in by.items() if nbytes} for axis, by in more.items()}
    return {axis: by for axis, by in more.items() if by}


SAMPLE = (
    "1f1b", "interleaved", "zb-v", "chimera", "terapipe", "two holders, split layers", "a tied table on both ends",
    "slices, ZeRO-2", "groups of replicas", "one stage recomputes", "some layers without experts",
    "no pipeline, some layers without experts", "no pipeline, a tied table, ZeRO-3",
)  # fmt: skip


@pytest.mark.parametrize("name", sampled(LISTED, SAMPLE))
def test_what_a_listed_step_exchanges_is_predicted_for_every_stage(name: str) -> None:
    config, fields = LISTED[name]
    more = {"interleave": 2} if find(fields.get("schedule", "1f1b")).interleaves else {}
    plan = ParallelPlan(**{"pp": 2, "precision": "fp32", "microbatch": 2, "accumulation": 4, **fields, **more})

    def main(comm: Communicator) -> dict[str, dict[str, int]]:
        mesh, recorder = Mesh(comm, **plan.axes), Recorder(Trace(None))
        observe_mesh(mesh, recorder)  # before: groups of stages are made when the model is laid
        laid = lay(Transformer(config), mesh, plan)
        before = recorder.bytes_by_axis()
        tokens = torch.randint(0, config.vocabulary, (plan.microbatch, TOKENS + 1))
        laid.passes([StepPiece(tokens[:, :-1], tokens[:, 1:], 0)] * plan.accumulation)
        laid.gradients.finish()
        laid.gradients.updated()
        return difference(recorder.bytes_by_axis(), before)

    counted = run_threads(plan.world, main, timeout_s=TIMEOUT_S)
    counts = chunk_layers(plan, config.layers) if plan.pp > 1 else (config.layers,)
    for stage in range(plan.pp):
        recorded = counted[stage * plan.dp * plan.tp]
        recorded.pop(CONTROL, None)
        assert recorded == step_exchanges(config, plan, Task.of(plan, TOKENS, "eager"), counts, stage), stage


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({"cp": 2}, "fp32"),
        pytest.param({"cp": 4, "recompute": "full"}, "fp32", marks=pytest.mark.slow),
        ({"cp": 2, "dp": 2, "zero": 1}, "bf16"),
        ({"cp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full"}, "fp32"),
        ({"cp": 2, "cp_exchange": "heads", "recompute": "full"}, "fp32"),
        ({"cp": 2, "dp": 2, "zero": 3, "cp_exchange": "heads"}, "fp32"),
        ({"cp": 2, "pp": 2, "accumulation": 4}, "fp32"),
        ({"cp": 2, "cp_exchange": "gather", "recompute": "full"}, "bf16"),
        ({"cp": 4, "cp_exchange": "gather"}, "fp32"),
        ({"cp": 4, "tp": 2, "cp_exchange": "heads-ring"}, "fp32"),
        pytest.param({"cp": 8, "cp_exchange": "heads-ring", "recompute": "full"}, "bf16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_ranks_that_share_sequences_exchange_is_what_the_formulas_say(
    settings: dict[str, Any], precision: Precision
) -> None:
    """In sequences of 11 tokens, whose blocks are uneven: ranks send unequal amounts."""
    config = ModelConfig(
        layers=3, width=32, heads=8, kv_heads=4, mlp_width=64, vocabulary=64, context=12, positions="rotary"
    )
    for context in (11,):
        plan = ParallelPlan(**{"precision": precision, "microbatch": 2, "accumulation": 2, **settings})

        def main(comm: Communicator, plan: ParallelPlan = plan, context: int = context) -> dict[str, dict[str, int]]:
            mesh, recorder = Mesh(comm, **plan.axes), Recorder(Trace(None))
            observe_mesh(mesh, recorder)
            laid = lay(Transformer(config), mesh, plan)
            tokens = torch.randint(0, 64, (2, context + 1), generator=torch.Generator().manual_seed(0))
            laid.passes([StepPiece(tokens[:, :-1], tokens[:, 1:], 0)] * plan.accumulation)
            laid.gradients.finish()
            laid.gradients.updated()
            return recorder.bytes_by_axis()

        recorded = run_threads(plan.world, main, timeout_s=TIMEOUT_S)[0]
        recorded.pop(CONTROL, None)
        counts = chunk_layers(plan, config.layers) if plan.pp > 1 else (config.layers,)
        assert recorded == step_exchanges(config, plan, Task.of(plan, context, "eager"), counts)


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({"dp": 2, "ep": 2}, "fp32"),
        ({"dp": 4, "ep": 2, "recompute": "full"}, "bf16"),
        ({"dp": 4, "ep": 2, "zero": 1}, "fp32"),
        ({"dp": 4, "ep": 2, "zero": 3}, "fp32"),
        ({"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True}, "fp32"),
        ({"dp": 2, "ep": 2, "cp": 2}, "fp32"),
        ({"dp": 2, "ep": 4, "cp": 2, "zero": 1}, "fp32"),
        ({"ep": 2, "cp": 4, "zero": 1}, "fp32"),
        ({"dp": 2, "ep": 2, "pp": 2, "accumulation": 4}, "fp32"),
        ({"tp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True, "recompute": "full"}, "fp32"),
        ({"dp": 2, "tp": 2, "ep": 4, "expert_tp": 1, "sequence_parallel": True, "zero": 1}, "bf16"),
        ({"dp": 2, "tp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True, "zero": 3}, "fp32"),
        ({"tp": 4, "ep": 2, "expert_tp": 1, "sequence_parallel": True}, "fp32"),
        ({"cp": 2, "ep": 2, "balance_loss": 0.1, "recompute": "full"}, "fp32"),
        ({"cp": 2, "ep": 2, "router_z_loss": 0.1}, "bf16"),
        ({"cp": 4, "ep": 2, "expert_capacity": 4.0, "recompute": "full"}, "fp32"),
        (
            {"tp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True, "balance_loss": 0.1, "recompute": "full"}
            | {"recompute_every": 2},
            "bf16",
        ),
        (
            {"tp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True, "balance_loss": 0.1, "recompute": "full"}
            | {"norm_place": "post"},
            "fp32",
        ),
        ({"tp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True, "router_z_loss": 0.1}, "fp32"),
        (
            {"cp": 2, "tp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True, "expert_capacity": 4.0}
            | {"balance_loss": 0.1},
            "fp32",
        ),
    ],
    ids=str,
)
def test_what_ranks_that_share_out_experts_exchange_is_what_the_formulas_say(
    settings: dict[str, Any], precision: Precision
) -> None:
    """How many rows come to a rank is its neighbours' routers' choice; how many leave them all is not."""
    config = ModelConfig(
        layers=2, width=32, heads=8, mlp_width=48, vocabulary=64, context=8, activation="swiglu", biases=False,
        experts=4, experts_per_token=2, tied=False, qk_norm="full",
    )  # fmt: skip
    model = {name: settings[name] for name in settings if name in {*SLICED, "router_z_loss", "norm_place"}}
    config = config.replace(**model)
    settings = {name: settings[name] for name in settings if name not in model}
    plan = ParallelPlan(**{"precision": precision, "microbatch": 2, "accumulation": 2, **settings})

    def main(comm: Communicator) -> dict[str, dict[str, int]]:
        mesh, recorder = Mesh(comm, **plan.axes), Recorder(Trace(None))
        observe_mesh(mesh, recorder)
        laid = lay(Transformer(config, seed=comm.rank), mesh, plan)
        tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(mesh.dp.index))
        laid.passes([StepPiece(tokens[:, :-1], tokens[:, 1:], 0)] * plan.accumulation)
        laid.gradients.finish()
        laid.gradients.updated()
        return recorder.bytes_by_axis()

    recorded = run_threads(plan.world, main, timeout_s=TIMEOUT_S)
    per_stage = plan.world // plan.pp
    counts = chunk_layers(plan, config.layers) if plan.pp > 1 else (config.layers,)
    task = Task.of(plan, 8, "eager", imbalance=1.0)
    for stage in range(plan.pp):
        mine = recorded[stage * per_stage : (stage + 1) * per_stage]
        predicted = step_exchanges(config, plan, task, counts, stage)
        rows = predicted["ep"].pop("all_to_all")
        assert sum(by["ep"].pop("all_to_all") for by in mine) == per_stage * rows
        mine[0].pop(CONTROL, None)
        assert {axis: by for axis, by in mine[0].items() if by} == {axis: by for axis, by in predicted.items() if by}
