"""Choosing placements: solvers against brute force, figures against counts, known layouts without pins."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from simulated_mesh import exchanged, gather, run_node, scatter
from training_programs import Training, transformer

from tilemesh.comm.schedules.book import build as build_schedule
from tilemesh.comm.schedules.collectives import layout
from tilemesh.comm.schedules.cost import count
from tilemesh.core.axes import Axes, members
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.book import build as build_step
from tilemesh.core.step.simulate import StepTimes, simulate
from tilemesh.core.tensor_placement import SILENT, S, TensorPlacement, exchange_of, parse
from tilemesh.graph.build import argument
from tilemesh.graph.evaluate import run_numpy
from tilemesh.graph.ir import Graph, Node, make, ordered
from tilemesh.parallel.choose import CHOOSERS, choose, race
from tilemesh.parallel.choose.dynamic import dynamic
from tilemesh.parallel.choose.recipes import recipes, with_recipes
from tilemesh.parallel.choose.stages import cut_stages, placed_stage_s
from tilemesh.parallel.choose.walk import Walk, at_random, greedy
from tilemesh.plan.constants import HIDDEN_COST
from tilemesh.plan.place.cost import MeshCost
from tilemesh.plan.place.exchange import exchange_steps
from tilemesh.plan.place.overlap import begun_early
from tilemesh.plan.place.problem import Chosen, Moment, PlacementProblem, Transfer
from tilemesh.plan.place.propagate import PlacedGraph, propagate
from tilemesh.plan.place.rules import EXCHANGES
from tilemesh.plan.place.space import PlacementSpace

needs_scipy = pytest.mark.skipif(
    importlib.util.find_spec("scipy") is None, reason="scipy is not installed: pip install 'tilemesh[choose]'"
)
Draw = np.random.Generator


def table(random: Draw, rows: int, columns: int, zeros: float = 0.3) -> tuple[tuple[float, ...], ...]:
    drawn = random.integers(1, 30, (rows, columns)) * (random.random((rows, columns)) > zeros)
    return tuple(tuple(float(cell) for cell in row) for row in drawn)


def drawn_problem(random: Draw, is_tree: bool = False) -> PlacementProblem:
    """At most eight variables of at most four choices, whose values are read by later ones, and live for a while."""
    count = int(random.integers(2, 9))
    choices = [int(random.integers(1, 5)) for _ in range(count)]
    seconds = tuple(tuple(float(cost) for cost in random.integers(1, 20, many)) for many in choices)
    transfers = []
    for source in range(count - 1):
        states, targets = int(random.integers(1, 4)), int(random.integers(1, 5))
        later = list(range(source + 1, count))
        many = 1 if is_tree else int(random.integers(1, 4))
        own = {source} if random.random() < 0.1 else set()
        readers = sorted({int(random.choice(later)) for _ in range(many)} | own)
        costs = table(random, states, targets)
        transfers.append(
            Transfer(
                source,
                tuple(int(random.integers(states)) for _ in range(choices[source])),
                tuple((each, tuple(int(random.integers(targets)) for _ in range(choices[each]))) for each in readers),
                costs,
                costs,
                table(random, states, targets),
                int(random.integers(1, 3)),
            )
        )
    values = tuple((v, tuple(float(size) for size in random.integers(1, 40, choices[v]))) for v in range(count))
    moments = []
    for at in range(count):
        living = {v: int(random.integers(1, 3)) for v in range(at + 1) if random.random() < 0.6}
        copies = [
            (t, r)
            for t, each in enumerate(transfers)
            for r, (v, _) in enumerate(each.readers)
            if v == at != each.source
        ]
        moments.append(Moment(living, tuple(copies)))
    names = tuple(f"v{number}" for number in range(count))
    return PlacementProblem(names, seconds, tuple(transfers), values, tuple(moments))


def every_choice(problem: PlacementProblem) -> tuple[Any, Any, Any]:
    """All of them, with seconds and peak bytes, written out again in numpy."""
    grid = np.stack(np.meshgrid(*[np.arange(len(own)) for own in problem.seconds], indexing="ij"), -1)
    grid = grid.reshape(-1, len(problem.seconds))
    seconds = sum(np.array(own)[grid[:, v]] for v, own in enumerate(problem.seconds))
    for each in problem.transfers:
        state = np.array(each.states)[grid[:, each.source]]
        for target in range(len(each.seconds[0])):
            wanted = np.zeros(len(grid), dtype=bool)
            for reader, wants in each.readers:
                wanted |= np.array(wants)[grid[:, reader]] == target
            seconds = seconds + wanted * each.count * np.array(each.seconds)[state, target]
    peak = np.zeros(len(grid))
    for moment in problem.moments:
        held = np.zeros(len(grid))
        for value, many in moment.values.items():
            variable, sizes = problem.values[value]
            held += many * np.array(sizes)[grid[:, variable]]
        for transfer, reader in moment.copies:
            each = problem.transfers[transfer]
            variable, wants = each.readers[reader]
            state = np.array(each.states)[grid[:, each.source]]
            held += np.array(each.copy_bytes)[state, np.array(wants)[grid[:, variable]]]
        peak = np.maximum(peak, held)
    return grid, seconds, peak


def against_brute_force(seed: int) -> None:
    random = np.random.default_rng(seed)
    problem = drawn_problem(random)
    grid, seconds, peak = every_choice(problem)
    some = int(random.integers(len(grid)))
    figures = problem.figures(grid[some])
    assert (figures.seconds, figures.memory_bytes) == (pytest.approx(seconds[some]), pytest.approx(peak[some]))
    limit = math.inf if seed % 3 == 0 else float(np.quantile(peak, random.random() * 0.5))
    problem = replace(problem, limit_bytes=limit)
    best = seconds[peak <= limit].min()
    chosen = choose(problem, "ilp")
    assert chosen.figures is not None
    assert chosen.figures.seconds == pytest.approx(best, rel=1e-6)
    assert chosen.is_optimal
    assert chosen.lp_bound_s <= best * (1 + 1e-6)
    for each in race(problem, ("random", "greedy", "dp", "mcmc")) if seed % 10 == 0 else ():
        assert each.figures is None or each.figures.seconds >= best * (1 - 1e-9), each.chooser
        assert each.bound_s <= best * (1 + 1e-6), "what is called a bound is one"


@needs_scipy
@pytest.mark.parametrize("part", range(2))
def test_integer_programming_finds_what_brute_force_finds(part: int) -> None:
    for seed in range(10 * part, 10 * part + 10):
        against_brute_force(seed)


@pytest.mark.slow
@needs_scipy
@pytest.mark.parametrize("part", range(10))
def test_integer_programming_finds_what_brute_force_finds_a_thousand_times(part: int) -> None:
    for seed in range(100 * part, 100 * part + 100):
        against_brute_force(seed)


@pytest.mark.parametrize("seed", range(30))
def test_dynamic_programming_is_exact_on_trees_and_says_where_it_is_not(seed: int) -> None:
    problem = drawn_problem(np.random.default_rng(seed), is_tree=True)
    _, seconds, _ = every_choice(problem)
    chosen = dynamic(problem, most=10**6)
    assert chosen.figures is not None
    assert chosen.figures.seconds == pytest.approx(seconds.min())
    assert chosen.is_optimal
    narrow = dynamic(problem, most=1)
    assert narrow.figures is not None
    assert narrow.figures.seconds >= seconds.min() * (1 - 1e-9)
    assert not narrow.is_optimal or narrow.figures.seconds == pytest.approx(seconds.min())


def test_a_walk_knows_after_any_changes_what_its_choice_takes() -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        problem = replace(drawn_problem(random), limit_bytes=50.0)
        walk = Walk(problem, [0] * len(problem.seconds))
        for _ in range(20):
            variable = int(random.integers(len(problem.seconds)))
            walk.move(variable, int(random.integers(len(problem.seconds[variable]))))
        figures = problem.figures(walk.choice)
        assert walk.seconds == pytest.approx(figures.seconds)
        assert float(walk.held.max()) == pytest.approx(figures.memory_bytes)


def test_every_chooser_goes_around_exchanges_that_there_is_no_way_for() -> None:
    """Which take for ever: a walk must come back from one to a number."""
    none = ((0.0, 0.0), (0.0, 0.0))
    ways = ((0.0, math.inf), (math.inf, 0.0))
    exchange = Transfer(0, (0, 1), ((1, (0, 1)),), ways, none, none)
    problem = PlacementProblem(("a", "b"), ((1.0, 2.0), (5.0, 1.0)), (exchange,))
    for answer in race(problem):
        assert answer.choice == (1, 1), answer.chooser


def test_what_fits_nowhere_is_refused() -> None:
    problem = PlacementProblem(("v",), ((1.0,),), (), ((0, (8.0,)),), (Moment({0: 1}),), 4.0)
    for name in CHOOSERS:
        if name != "ilp" or importlib.util.find_spec("scipy"):
            with pytest.raises(UsageError, match=f"{name} found no placement within"):
                choose(problem, name)
    with pytest.raises(UsageError, match="chooser 'ilpp'"):
        choose(problem, "ilpp")


# Programs -------------------------------------------------------------------------------------------------------------


def space_of(step: Training, axes: Axes, cluster: str = "8xh100", **more: Any) -> PlacementSpace:
    graph, carried = step
    return PlacementSpace(graph, MeshCost(axes, parse_cluster(cluster)), carried, **more)


def inputs_of(space: PlacementSpace, chosen: Chosen) -> dict[str, str]:
    assert chosen.is_optimal
    assert chosen.choice is not None
    placed = space.placed(chosen.choice)
    return {node["name"]: str(placed.placements[node]) for node in placed.graph.inputs}


def weights_of(space: PlacementSpace, chosen: Chosen) -> dict[str, set[str]]:
    """Of all layers together, and without their states."""
    found: dict[str, set[str]] = {}
    for name, placement in inputs_of(space, chosen).items():
        if name.startswith("layers.") and name[-2:] not in (".m", ".v"):
            found.setdefault(name.split(".")[-1], set()).add(placement)
    return found


def cut_as(columns: str, rows: str) -> dict[str, set[str]]:
    return {name: {columns} for name in COLUMNS} | {name: {rows} for name in ROWS}


def tightest(space: PlacementSpace, loose: Chosen) -> Chosen:
    """The optimum under the least memory in which there is one, to a hundredth or so."""
    assert loose.figures is not None
    fits, low, high = loose, 0.0, loose.figures.memory_bytes
    for _ in range(7):
        limit = (low + high) / 2
        try:
            fits = choose(replace(space.problem, limit_bytes=limit))
        except UsageError:
            low = limit
        else:
            high = limit
    return fits


COLUMNS, ROWS = ("wq", "wk", "wv", "w1"), ("wo", "w2")


@needs_scipy
def test_megatrons_layouts_are_found_without_pins() -> None:
    """Few tokens, large weights: the first matrices by rows of torch's layout, the last by columns, and sums only where
    these leave, forward, and where those do, backward."""
    space = space_of(transformer(2, 4, 64, 2048, 8192, 16), (("tp", 4),))
    chosen = choose(space.problem)
    assert weights_of(space, chosen) == cut_as("tp:S(0)", "tp:S(1)")
    assert chosen.choice is not None
    sent = {exchange.node.shape for exchange in space.placed(chosen.choice).exchanges if exchange.nbytes > 100}
    assert sent == {(4 * 64, 2048)}, "only activations travel"


@needs_scipy
def test_memory_decides_between_copies_of_weights_and_fsdp() -> None:
    """Many tokens: the batch is cut. Where weights fit, all ranks keep them; where not, each keeps some rows."""
    space = space_of(transformer(2, 128, 128, 1024, 4096, 8), (("dp", 8),))
    chosen = choose(space.problem)
    assert chosen.figures is not None
    assert inputs_of(space, chosen)["x"] == "dp:S(0)"
    assert weights_of(space, chosen) == cut_as("R", "R")
    tight = tightest(space, chosen)
    assert inputs_of(space, tight)["x"] == "dp:S(0)"
    cuts = weights_of(space, tight)
    assert set().union(*cuts.values()) <= {"dp:S(0)", "dp:S(1)"}, "every weight is cut, and gathered where it is used"
    assert tight.figures is not None
    assert tight.figures.memory_bytes < 0.75 * chosen.figures.memory_bytes
    small = space_of(transformer(1, 64, 128, 64, 64, 4), (("dp", 8),))
    alike = inputs_of(small, choose(small.problem))
    assert {alike[name] for name in alike if name.startswith("layers.")} == {"R"}, "small weights: plain DDP"


@pytest.mark.slow
@needs_scipy
def test_on_two_axes_megatron_and_fsdp_are_found_together() -> None:
    """Where memory is short every weight is cut by both axes: by tp as Megatron has it, by dp along the other dim (axes
    that cut one dim are nested in the order of the mesh, so dp's pieces of tp's rows would not be gathered alone)."""
    space = space_of(transformer(1, 64, 64, 1024, 4096, 8), (("dp", 4), ("tp", 4)), "1x16xh100")
    loose = choose(space.problem)
    assert loose.figures is not None
    tight = tightest(space, loose)
    assert weights_of(space, tight) == cut_as("tp:S(0) dp:S(1)", "dp:S(0) tp:S(1)")


@needs_scipy
def test_no_chooser_finds_less_than_the_solver() -> None:
    space = space_of(transformer(1, 8, 32, 256, 512, 4), (("tp", 4),), "4xh100")
    answers = race(space.problem)
    assert answers[0].is_optimal
    assert {each.chooser for each in answers} == set(CHOOSERS)
    for each in answers:
        assert each.figures is not None
        assert each.figures.seconds >= answers[0].bound_s * (1 - 1e-9)


def test_exchanges_move_while_a_rank_computes() -> None:
    """Two products and a sum of the first: it is begun before the second and waited for after, on links that move by
    themselves; by known layouts of a Transformer as much is hidden as can be, and as many bytes are sent."""
    x, w = (argument(name, [512, 512]) for name in "xw")
    first, second = make("dot", x, w), make("dot", w, x)
    total = make("all_reduce", first, axis="dp", ranks=8, serial=0)
    graph, cost = Graph((x, w), (total, second)), MeshCost((("dp", 8),), parse_cluster("8xh100"))
    [compute_s] = {cost.compute_s(node, (TensorPlacement(),) * 2, TensorPlacement()) for node in (first, second)}
    took = cost.groups["dp"].exchange_s("all_reduce", 4 * 512 * 512)
    exposed = max(0.0, took - compute_s)
    assert [node.op for node in begun_early(graph)][-3:] == ["dot", "all_reduce", "dot"]
    expected = 2 * compute_s + exposed + HIDDEN_COST * (took - exposed)
    assert cost.of_program(graph)[0] == pytest.approx(expected)

    space = space_of(transformer(2, 16, 64, 1024, 4096, 8), (("dp", 4), ("tp", 2)))
    problem, serial = space.problem, MeshCost(space.cost.axes, parse_cluster("8xh100"))
    serial.groups = {axis: replace(group, hides=False) for axis, group in serial.groups.items()}
    for name, pins in recipes(space).items():
        chosen = greedy(problem.fixed(space.pinned(pins)))
        assert chosen.choice is not None
        program = space.program(chosen.choice, 0)
        hidden_s, sent = space.cost.of_program(program)
        plain_s, same = serial.of_program(program)
        replicated = TensorPlacement()
        computing = [node for node in program.nodes() if node.op not in EXCHANGES]
        least_s = sum(space.cost.compute_s(node, (replicated,) * len(node.inputs), replicated) for node in computing)
        assert sent == same > 0
        assert least_s < hidden_s < plain_s, name
        assert name not in ("ddp", "fsdp") or plain_s - hidden_s > 0.5 * (1 - HIDDEN_COST) * (plain_s - least_s)


def sent_of(collective: str, parts: Sequence[Any], results: Sequence[Any]) -> float:
    """What a rank sends on average, by the schedule's own steps, of arrays that ranks of one axis have."""
    ranks = len(parts)
    schedule = build_schedule(collective, "pairwise" if collective == "all_to_all" else "ring", ranks)
    if collective == "all_to_all":
        sizes: tuple[int, ...] = (parts[0].nbytes // ranks,) * ranks
    elif collective == "all_reduce":
        sizes = (parts[0].nbytes,)
    else:
        sizes = tuple(each.nbytes for each in (parts if collective == "all_gather" else results))
    counted = count(schedule, lambda rank: layout(collective, rank, 0, ranks, schedule.chunks, sizes, sizes))
    return sum(each.nbytes for each in counted) / ranks


def run_counted(placed: PlacedGraph, arrays: Sequence[Any], random: Draw) -> tuple[list[Any], float]:
    """The outputs of simulated ranks, and what each of them sent on average."""
    axes, sent = placed.axes, 0.0
    lies: dict[Node, list[Any]] = {}
    copies: dict[tuple[Node, TensorPlacement, bool], list[Any]] = {}
    forward = set(ordered(placed.graph.outputs[:1]))

    def moved(parts: list[Any], before: TensorPlacement, after: TensorPlacement) -> list[Any]:
        nonlocal sent
        for axis, old, new in exchange_steps(before, after, axes):
            results = exchanged(parts, before, before.put(axis, new), axes, random)
            if (collective := exchange_of(old, new)) not in SILENT:
                along = members(0, ((axis, dict(axes)[axis]),), axes)
                sent += sent_of(collective, [parts[r] for r in along], [results[r] for r in along])
            parts, before = results, before.put(axis, new)
        assert before == after
        return parts

    def read(value: Node, wanted: TensorPlacement, is_forward: bool) -> list[Any]:
        if (value, wanted, is_forward) not in copies:
            copies[value, wanted, is_forward] = moved(lies[value], placed.given[value], wanted)
        return copies[value, wanted, is_forward]

    for node in placed.graph.nodes():
        if node.op == "input":
            whole = np.asarray(arrays[placed.graph.inputs.index(node)])
            lies[node] = scatter(whole, placed.given[node], axes, random)
            continue
        taken = placed.taken[node]
        values = [read(value, wanted, node in forward) for value, wanted in zip(node.inputs, taken, strict=True)]
        lies[node] = run_node(node, values, taken, placed.given[node], axes)
    outputs = []
    for node in placed.graph.outputs:
        parts = moved(lies[node], placed.given[node], placed.placements[node])
        outputs.append(gather(parts, placed.placements[node], axes))
    return outputs, sent


@pytest.mark.parametrize(("axes", "seeds"), [((("tp", 2), ("dp", 2)), 3), ((("dp", 4),), 2)])
def test_chosen_placements_compute_the_same_and_send_what_was_predicted(axes: Axes, seeds: int) -> None:
    step = transformer(1, 4, 4, 16, 32, 4, norms=True, dtype="float64", state="float64")
    space = space_of(step, axes, "4xh100")
    random = np.random.default_rng(0)
    arrays = [random.random(node.shape) + 0.1 for node in space.graph.inputs]
    wanted = run_numpy(space.graph, *arrays)
    answers = [greedy(space.problem), *(at_random(space.problem, 1, seed) for seed in range(seeds))]
    for each in answers:
        assert each.choice is not None
        assert each.figures is not None
        placed = space.placed(each.choice)
        outputs, sent = run_counted(placed, arrays, random)
        for got, whole in zip(outputs, wanted, strict=True):
            np.testing.assert_allclose(got, whole, rtol=1e-9, atol=1e-9)
        assert placed.nbytes == pytest.approx(each.figures.sent_bytes)
        assert sent == pytest.approx(each.figures.sent_bytes)
        for output, node in space.carried.items():
            assert placed.placements[output] == placed.placements[node], "new weights lie as the old ones"


@pytest.mark.slow
@needs_scipy
def test_llama_8b_on_64_ranks_is_built_and_solved_with_proof() -> None:
    """Layers that are alike are chosen once: as many variables as for four layers."""
    few = space_of(llama_8b(4), (("tp", 8), ("dp", 8)), "64xh100")
    space = space_of(llama_8b(32), (("tp", 8), ("dp", 8)), "64xh100", limit_bytes=80e9)
    assert len(space.problem.names) == len(few.problem.names)
    answers = race(space.problem, ("random", "greedy", "mcmc", "ilp"))
    assert answers[0].is_optimal
    assert answers[0].choice is not None
    assert answers[0].figures is not None
    assert space.placed(answers[0].choice).nbytes == pytest.approx(answers[0].figures.sent_bytes)


def llama_8b(layers: int) -> Training:
    return transformer(layers, 64, 1024, 4096, 14336, 32, kv_heads=8, vocabulary=128256, norms=True)


@needs_scipy
def test_recipes_travel_as_their_names_say() -> None:
    """Megatron's and sequence parallelism exchange activations alone, the latter's input in parts of its tokens."""
    space = space_of(transformer(2, 4, 64, 2048, 8192, 16), (("tp", 4),))
    answers = {each.chooser: each for each in with_recipes(space, [choose(space.problem)])}
    for name, lies in (("megatron", "R"), ("sequence", "tp:S(0)")):
        chosen = answers[name]
        assert chosen.choice is not None
        placed = space.placed(chosen.choice)
        sent = {(each.collective, math.prod(each.node.shape)) for each in placed.exchanges if each.nbytes > 100}
        assert {size for _, size in sent} == {4 * 64 * 2048}, name
        assert {"all_gather", "reduce_scatter"} <= {collective for collective, _ in sent}
        [x] = (node for node in space.graph.inputs if node["name"] == "x")
        assert lies == str(placed.placements[x]) or name == "megatron"
    figures = [answers[name].figures for name in ("ilp", "megatron", "sequence", "fsdp")]
    seconds = [each.seconds for each in figures if each is not None]
    assert seconds == sorted(seconds), "few tokens and large weights: no other layout is as fast"


def test_recipes_pin_the_layouts_that_their_names_say() -> None:
    space = space_of(transformer(1, 8, 16, 64, 128, 4), (("tp", 2), ("dp", 2)), "4xh100")
    pins = recipes(space)

    def of(name: str, weight: str) -> set[str]:
        return {str(placement) for key, placement in pins[name].items() if key.endswith(weight)}

    for weight in COLUMNS:
        assert (of("megatron", weight), of("2d", weight)) == ({"tp:S(0)"}, {"tp:S(0) dp:S(1)"})
    for weight in ROWS:
        assert (of("megatron", weight), of("2d", weight)) == ({"tp:S(1)"}, {"dp:S(0) tp:S(1)"})
    assert (of("fsdp", "wq"), of("ddp", "wq"), of("ddp", "x")) == ({"dp:S(0)"}, {"R"}, {"dp:S(0)"})
    answers = with_recipes(space, [greedy(space.problem)])
    assert {each.chooser for each in answers} == {"greedy", *pins}
    for each in answers:
        assert each.choice is not None
        placed = space.placed(each.choice)
        for node in space.graph.inputs:
            wanted = pins.get(each.chooser, {}).get(node["name"])
            assert wanted is None or placed.placements[node] == wanted


# Stages ---------------------------------------------------------------------------------------------------------------


def all_cuts(layers: int, ranks: int) -> Iterator[list[tuple[range, range]]]:
    """Every way to give stretches of layers to stretches of ranks."""
    for stages in range(1, min(layers, ranks) + 1):
        for i in itertools.combinations(range(1, layers), stages - 1):
            for a in itertools.combinations(range(1, ranks), stages - 1):
                ends = zip((0, *i), (*i, layers), (0, *a), (*a, ranks), strict=True)
                yield [(range(*each[:2]), range(*each[2:])) for each in ends]


@pytest.mark.parametrize("seed", range(12))
def test_stages_are_cut_as_well_as_any(seed: int) -> None:
    """Also on ranks that differ, and where some stretches do not fit."""
    random = np.random.default_rng(seed)
    layers, ranks, microbatches = int(random.integers(1, 6)), int(random.integers(1, 6)), int(random.integers(1, 9))
    work, speed = random.integers(1, 9, layers), random.integers(1, 4, ranks)

    def stage_s(some: range, on: range) -> float:
        too_many = len(some) > 3 * len(on)
        return math.inf if too_many else float(work[list(some)].sum() / speed[list(on)].sum() ** 0.8)

    every = []
    for cut in all_cuts(layers, ranks):
        times = [stage_s(*stage) for stage in cut]
        every.append(sum(times) + (microbatches - 1) * max(times))
    if min(every) == math.inf:
        with pytest.raises(UsageError, match="no cut into stages fits"):
            cut_stages(layers, ranks, microbatches, stage_s)
        return
    cut = cut_stages(layers, ranks, microbatches, stage_s)
    assert cut.seconds == pytest.approx(min(every))
    assert (sum(cut.layers), sum(cut.ranks)) == (layers, ranks)


def test_a_cut_into_stages_takes_on_a_pipeline_what_was_predicted() -> None:
    """Six ranks of one kind, two slower ones: fewer layers there. A schedule's simulation agrees."""
    speed = [2.0, 2.0, 2.0, 1.0]
    cut = cut_stages(14, 4, 8, lambda some, on: len(some) / speed[on[0]], sizes=(1,))
    assert cut.layers == (4, 4, 4, 2)
    forward = [seconds / 3 for seconds in cut.stage_s]
    times = StepTimes(forward, forward, forward)
    program = build_step("gpipe", len(cut.layers), cut.microbatches)
    assert simulate(program, times).total_s == pytest.approx(cut.seconds)
    plan = ParallelPlan(pp=4, accumulation=8, chunk_layers=cut.layers)
    assert plan.chunk_layers == cut.layers


def test_stages_of_placed_layers_on_two_kinds_of_gpu() -> None:
    """Two H100 and two T4: each kind has a stage of its own, the faster one more layers."""
    devices = ["h100"] * 2 + ["t4"] * 2
    stage_s = placed_stage_s(lambda layers: transformer(layers, 8, 128, 1024, 4096, 8), devices, "greedy")
    cut = cut_stages(4, 4, 16, stage_s, sizes=(2,))
    assert cut.ranks == (2, 2)
    assert cut.layers[0] > cut.layers[1]
    assert stage_s(range(4), range(4)) == math.inf, "no stage has both"


def test_a_turned_tensor_has_a_price_of_its_own() -> None:
    """Its columns are rows of what it is a view of, and need no copy into their places."""
    x = make("input", name="x", shape=(64, 64), dtype="float32")
    turned = make("transpose", x, order=(1, 0))
    cost, cut = MeshCost((("dp", 4),), parse_cluster("4xh100")), TensorPlacement((("dp", S(1)),))
    dear, cheap = (cost.exchange(node, cut, TensorPlacement())[0] for node in (x, turned))
    assert dear > cheap


def test_what_a_max_is_looked_for_in_again_is_summed_once() -> None:
    """Sums over two axes in two orders may differ in their last bit: none would be the largest, its gradient lost."""
    x, w, axes = argument("x", (8, 99), "float64"), argument("w", (99, 8), "float64"), (("tp", 2), ("dp", 2))
    y = make("reshape", make("dot", x, w), shape=(64,))
    top = make("broadcast", make("amax", y, dims=(0,)), shape=(64,), dims=())
    graph = Graph((x, w), (make("cast", make("compare", top, y, kind="equal"), dtype="float64"),))
    space = PlacementSpace(graph, MeshCost(axes, parse_cluster("4xh100")))
    placed = [space.placed(at_random(space.problem, 1, seed).choice or ()) for seed in range(20)]
    placed.append(propagate(graph, {"x": parse("tp:S1,dp:S1")}, axes))
    assert {mark.kind for each in placed for _, mark in each.placements[y]} <= {"S", "R"}
    assert {mark.kind for _, mark in placed[-1].given[y.inputs[0]]} == {"P"}


def test_new_values_of_an_input_that_nobody_reads_are_placed() -> None:
    """As a spectral norm's vector is written, and made anew in each call."""
    x, old, axes = argument("x", (8,), "float64"), argument("old", (8,), "float64"), (("tp", 2),)
    space = PlacementSpace(
        Graph((x, old), (new := make("add", x, x),)), MeshCost(axes, parse_cluster("2xh100")), {new: old}
    )
    assert space.result(new, choose(space.problem, "greedy").choice or ()) == TensorPlacement()
