"""Experts that ranks share out, planned: what travels, what each holds, how uneven it is, and when it wins."""

from __future__ import annotations

import dataclasses
import itertools
import math
from random import Random
from typing import Any

import pytest

from tilemesh.core.conflicts import is_runnable
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import Cluster, parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.work.routing import busiest_rows, equal_tokens, imbalance, sent_rows
from tilemesh.model.work.task import STATE_BYTES, Task
from tilemesh.model.work.weights import count_parameters, why_not
from tilemesh.plan.choose import search
from tilemesh.plan.clock import Clock
from tilemesh.plan.cut import spread_uneven
from tilemesh.plan.prediction import Prediction
from tilemesh.plan.space import Pins
from tilemesh.plan.speed import group
from tilemesh.plan.step import predict
from tilemesh.plan.why import why

MIXTRAL, QWEN = preset("mixtral-8x7b"), preset("qwen3-30b-a3b")
NODE, NODES = parse_cluster("8xh100"), parse_cluster("64xh100")


def plan(**settings: object) -> ParallelPlan:
    return ParallelPlan(**{"precision": "bf16-master", "accumulation": 4, **settings})  # type: ignore[arg-type]


def predicted(
    model: ModelConfig = MIXTRAL, cluster: str = "64xh100", told: float = 0.0, **settings: object
) -> Prediction:
    return predict(model, parse_cluster(cluster), plan(**settings), 4096, imbalance=told)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ep", [1, 2, 8])
def test_states_are_those_of_the_experts_held_cut_over_what_is_left_of_dp(ep: int, zero: int) -> None:
    """Counted by hand: 16-bit weights and gradients, 12 bytes of optimizer."""
    layers, dp, parts = MIXTRAL.layers, 8, count_parameters(MIXTRAL)
    experts = layers * 3 * MIXTRAL.experts * MIXTRAL.width * MIXTRAL.mlp_width // ep
    common = parts.total - experts * ep
    memory = predicted(cluster="8xh100", dp=dp, ep=ep, zero=zero).memory
    stored = math.ceil(common / dp) + math.ceil(experts / (dp // ep))
    for from_stage, size, name in zip(
        (3, 2, 1), STATE_BYTES["bf16-master"], ("weights", "gradients", "optimizer"), strict=True
    ):
        held = stored if zero >= from_stage else common + experts
        assert getattr(memory, f"{name}_bytes") == size * held


MIXED = MIXTRAL.replace(layers=8, dense_layers=(0, 1, 4), dense_width=6144)
"""Its layers are like those of a model with experts and of one without."""


@pytest.mark.parametrize(
    "settings", [{"dp": 8, "ep": 4, "zero": 1}, {"dp": 4, "tp": 2, "ep": 4, "recompute": "full", "zero": 3},
                 {"dp": 4, "pp": 2, "ep": 2, "chunk_layers": (5, 3)}]
)  # fmt: skip
def test_layers_of_two_kinds_are_predicted_as_those_of_a_model_of_either(settings: dict[str, Any]) -> None:
    """What a step and a rank need grows by each kind's layer as it does in a model all of whose layers are of it."""
    settings = {"microbatch": 1, **settings}

    def of(model: ModelConfig, layers: int) -> Prediction:
        cut = {"chunk_layers": (layers // 2,) * 2} if "pp" in settings else {}
        own = model.replace(layers=layers, dense_layers=(), dense_width=0)
        return predicted(own, "8xh100", 1.0, **settings | cut | ({} if own.experts else {"ep": 1}))

    mixed = predicted(MIXED, "8xh100", 1.0, **settings)
    experts, dense = MIXED.kinds
    assert [dense.experts, dense.mlp_width, dense.layers] == [0, 6144, 8]
    if "pp" in settings:  # the first stage has layers 0 to 4, three of which are dense
        assert mixed.passes is not None
        each = [of(kind, 8).passes for kind in (experts, dense)]
        (routed, plain) = ((times.forward_s[0] if times else 0.0) / 4 for times in each)
        first, last = mixed.passes.forward_s
        assert first == pytest.approx(2 * routed + 3 * plain, rel=0.01)  # the embedding and a message beside them
        assert last > 3 * routed
        return
    (four, two), (none, less) = ((of(kind, 4), of(kind, 2)) for kind in (experts, dense))
    for value in (
        lambda one: one.times.compute_s,
        lambda one: one.times.recompute_s,
        lambda one: one.times.ep_s,
        lambda one: one.memory.weights_bytes + one.memory.gradients_bytes + one.memory.optimizer_bytes,
        lambda one: one.memory.activations_bytes,
        lambda one: one.model_flops,
        lambda one: one.hardware_flops,
    ):
        layer, plain = (value(four) - value(two)) / 2, (value(none) - value(less)) / 2
        assert value(mixed) == pytest.approx(value(four) + layer + 3 * plain, rel=1e-6)


def test_a_cut_weighs_layers_of_two_kinds() -> None:
    """Dense layers that cost little are put together; nothing is heavier than it must be."""
    light = MIXTRAL.replace(layers=12, dense_layers=tuple(range(6)), dense_width=256)
    counts = predicted(light, "4xh100", 1.0, pp=4, accumulation=8).chunk_layers
    assert sum(counts) == 12
    assert counts[0] > counts[-1]
    for costs in ((1.0, 3.0, 1.0, 1.0, 2.0), (0.5,) * 7, (4.0, 1.0, 1.0)):
        for chunks in (1, 2, 3):
            cuts = [(0, *ends, len(costs)) for ends in itertools.combinations(range(1, len(costs)), chunks - 1)]
            best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
            found = (0, *itertools.accumulate(spread_uneven(costs, chunks)))
            assert max(sum(costs[a:b]) for a, b in itertools.pairwise(found)) == pytest.approx(best)


def test_rows_that_travel_are_each_tokens_picks() -> None:
    """Four times a layer and microbatch: there and back, and the gradients; of eight parts one stays."""
    rows = 4096 * MIXTRAL.experts_per_token * MIXTRAL.width * 2
    found = predicted(dp=64, ep=8, told=1.0)
    assert found.traffic["ep"] == pytest.approx(4 * MIXTRAL.layers * 4 * rows * 7 / 8, rel=1e-5)
    assert found.times.ep_s > 0 == predicted(dp=64).times.ep_s
    again = predicted(dp=64, ep=8, told=1.0, recompute="full")
    assert again.traffic["ep"] == pytest.approx(1.5 * found.traffic["ep"], rel=1e-5)


def test_rows_between_nodes_take_an_adapters_time() -> None:
    inside, across = (group(NODES, ranks, 1) for ranks in (8, 64))
    nbytes = 64 * 2**20
    node = NODES.node
    assert inside.exchange_s("all_to_all", nbytes) == pytest.approx(
        nbytes * 7 / 8 / (0.8 * node.intra.bytes_per_s), rel=0.01
    )
    slow = nbytes * 7 / 8 / (0.8 * node.inter_bytes_per_s_per_device)
    assert across.exchange_s("all_to_all", nbytes) == pytest.approx(slow, rel=0.01)
    # Sent to a node once, a row with eight copies for 64 ranks passes 1 - (7/8)^8 of eight nodes.
    assert across.exchange_s("all_to_all", nbytes, 8) == pytest.approx(slow * (1 - (7 / 8) ** 8), rel=0.01)


@pytest.mark.parametrize(("tokens", "ep"), [(64, 2), (256, 4), (256, 8)])
def test_the_busiest_rank_gets_what_random_picks_give_it(tokens: int, ep: int) -> None:
    """Drawn, 60 times: the mean of the greatest load lies below what is expected of it and above half its excess."""
    model = MIXTRAL.replace(experts=16, experts_per_token=2, balance_loss=0.01)
    task, draw = Task(1, tokens, tokens, ep=ep), Random(0)
    greatest = []
    for _ in range(60):
        loads = [0] * ep
        for _ in range(tokens * ep):
            for expert in draw.sample(range(16), 2):
                loads[expert * ep // 16] += 1
        greatest.append(max(loads))
    excess = sum(greatest) / len(greatest) / (2 * tokens) - 1
    assert excess <= imbalance(model, task) - 1 <= 2.5 * excess
    assert busiest_rows(model, task) == math.ceil(sent_rows(model, task) * imbalance(model, task))


@pytest.mark.parametrize(("vocabulary", "ep"), [(16, 2), (256, 4), (2048, 8)])
def test_equal_tokens_that_pick_alike_load_a_rank_as_expected(vocabulary: int, ep: int) -> None:
    """Drawn, 60 times: each kind of token picks once, and comes as often as Zipf's law says."""
    model = MIXTRAL.replace(experts=16, experts_per_token=2, vocabulary=vocabulary)
    draw, greatest = Random(0), []
    parts = [1 / rank for rank in range(1, vocabulary + 1)]
    assert equal_tokens(vocabulary) == pytest.approx(sum(p * p for p in parts) / sum(parts) ** 2, rel=0.05)
    for _ in range(60):
        loads = [0.0] * ep
        for part in parts:
            for expert in draw.sample(range(16), 2):
                loads[expert * ep // 16] += part / sum(parts) / 2
        greatest.append(max(loads) * ep)
    excess = sum(greatest) / len(greatest) - 1
    expected = imbalance(model, Task(64, 4096, 4096, ep=ep)) - 1
    assert expected / 2 < excess < expected


def test_ranks_that_take_turns_on_a_core_leave_it_to_the_busiest() -> None:
    """Two of four ranks wait at a time at least, so what the busiest has more is another's core's."""
    node, times = parse_cluster("4xcpu").node, []
    for turns in (1.0, 1.25, 2.0):
        crowded = dataclasses.replace(node, device=dataclasses.replace(node.device, ranks_per_core=turns))
        clock = Clock(QWEN, Cluster((crowded,)), 512, imbalance=1.5)
        times.append(clock.task(plan(dp=4, ep=4, precision="fp32")).imbalance)
    assert times == [1.5, 1.2, 1.0]


def test_imbalance_lengthens_the_step_and_fills_the_memory() -> None:
    even, random, skewed = (predicted(dp=64, ep=8, told=told) for told in (1.0, 0.0, 2.0))
    assert even.step_time_s < random.step_time_s < skewed.step_time_s
    assert even.memory.activations_bytes < random.memory.activations_bytes < skewed.memory.activations_bytes
    assert skewed.times.ep_s == pytest.approx(2 * even.times.ep_s, rel=0.02)
    assert predicted(dp=64, told=2.0).step_time_s == predicted(dp=64).step_time_s, "nothing travels, nobody waits"
    with pytest.raises(UsageError, match=r"imbalance is 0\.5"):
        predicted(dp=64, ep=8, told=0.5)


def test_experts_that_tp_does_not_share_take_their_own_tokens() -> None:
    """As many experts' bytes on a rank, half the rows to send, and no exchange of tp around them."""
    shared = predicted(QWEN, dp=32, ep=16, tp=2, sequence_parallel=True, told=1.0)
    alone = predicted(QWEN, dp=32, ep=32, tp=2, sequence_parallel=True, expert_tp=1, told=1.0)
    assert alone.memory.weights_bytes == shared.memory.weights_bytes
    assert alone.traffic["ep"] == pytest.approx(shared.traffic["ep"] / 2 * (31 / 32) / (15 / 16), rel=1e-5)
    assert alone.traffic["tp"] < 0.6 * shared.traffic["tp"]
    assert is_runnable(plan(dp=32, ep=32, tp=2, sequence_parallel=True, expert_tp=1))
    assert not is_runnable(plan(dp=16, ep=32, tp=4, sequence_parallel=True, expert_tp=2))
    words = why_not(QWEN, plan(dp=4, tp=2, expert_tp=1, ep=2))
    assert words == "expert_tp is 1 and tp 2: each rank routes its own tokens; set sequence_parallel"


@pytest.mark.parametrize(
    ("mesh", "meshes"),
    [
        ({"ep": 2}, ["dp=2,ep=2"]),
        ({"dp": 2, "ep": 3}, ["dp=2,ep=2", "dp=3,ep=3"]),
        ({"dp": 2, "ep": 4}, ["dp=2,ep=2", "dp=4,ep=4"]),
        ({"dp": 3, "cp": 2, "tp": 2, "ep": 4}, ["dp=3,tp=2,cp=2,ep=3", "dp=4,tp=2,cp=2,ep=4"]),
        ({"dp": 5, "ep": 2}, ["dp=6,ep=2"]),
    ],
)
def test_replicas_that_cannot_share_out_experts_are_told_which_can(mesh: dict[str, int], meshes: list[str]) -> None:
    model = QWEN.replace(experts=12)
    words = why_not(model, plan(**mesh)) or ""
    assert "do not make up groups" in words
    assert words.endswith(f"; set the mesh {' or '.join(meshes)}")
    for text in meshes:
        sizes = {axis: int(size) for axis, _, size in (word.partition("=") for word in text.split(","))}
        assert why_not(model, plan(**sizes)) is None


STATES = ("weights", "gradients", "optimizer")


def test_the_search_shares_experts_out_where_that_fits_best_and_says_why() -> None:
    found = search(QWEN, "64xh100", batch=512, context=4096, pins=Pins.parse(["tp=1,pp=1,zero=1"]))
    assert found.best.plan.ep > 1
    words = " ".join(why(found))
    assert f"ep {found.best.plan.ep} puts {128 // found.best.plan.ep} of 128 on each GPU" in words
    assert "times the mean (expected of text)" in words
    cut = search("mixtral-8x7b", "16xh100", batch=64, pins=Pins.parse(["tp=2,pp=1,ep=8,expert_tp=0,zero=3"]))
    assert "puts 1 of 8 on each GPU, 1/2 of each" in " ".join(why(cut))
    bare = dataclasses.replace(cut.best.plan, zero=0)
    states = [getattr(cut.estimator().predict(bare).memory, f"{each}_bytes") for each in STATES]
    assert f"of states instead of {format_bytes(sum(states))}" in " ".join(why(cut))
    piped = search("mixtral-8x7b", "16xh100", batch=64, pins=Pins.parse(["pp=4"]))
    other = min(point for point in piped.points if (point.layout.ep > 1) != (piped.best.plan.ep > 1))
    exact_s = piped.estimator().step_s(other.layout)
    assert abs(exact_s / other.time_s - 1) > 1e-3, "a pipeline in closed form is not the one that is simulated"
    assert f"takes {format_seconds(exact_s)}" in " ".join(why(piped))
    assert {
        prediction.plan.ep for prediction in search(QWEN, "16xh100", batch=64, pins=Pins.parse(["ep=4"])).predictions
    } == {4}
    wide = search(QWEN, "64xh100", batch=512, context=4096, pins=Pins.parse(["tp=1,pp=1,zero=1,microbatch=1"]))
    assert max(point.layout.ep for point in wide.points) == 32, "over four nodes at most, unless it is fixed"
    far = search(QWEN, "64xh100", batch=512, context=4096, pins=Pins.parse(["tp=1,pp=1,zero=1,microbatch=1,ep=64"]))
    assert far.best.plan.ep == 64
    with pytest.raises(UsageError, match=r"no dp x cp of 16 ranks with .* is a multiple of it: fix ep=16"):
        search(QWEN, "16xh100", batch=64, pins=Pins.parse(["ep=32"]))
    dense = search("llama-3-8b", NODE, batch=64)
    assert {point.layout.ep for point in dense.points} == {1}
    with pytest.raises(UsageError, match="no layout is possible: ep is 2 and the model has no experts"):
        search("llama-3-8b", NODE, batch=64, pins=Pins.parse(["ep=2"]))
    with pytest.raises(
        UsageError, match="ep is 5 and 128 experts do not divide by it: 2, 4, 8, 16, 32, 64, 128 would do"
    ):
        search(QWEN, NODE, batch=64, pins=Pins.parse(["ep=5"]))
