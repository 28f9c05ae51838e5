"""A model over the stages of a pipeline computes what one process computes, by every schedule; and what stops it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from sampled import sampled
from torch import Tensor

from tilemesh.bench.train import sleeping
from tilemesh.comm import Communicator, run_threads
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.action import Action
from tilemesh.core.step.book import build, find, synchronous
from tilemesh.core.step.passes import exchange, recompute
from tilemesh.core.step.program import PlannedStep
from tilemesh.core.step.search import PassTimes, search
from tilemesh.core.step.slices import cut_sequence
from tilemesh.core.step.text import to_csv
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.loss import IGNORED, loss_sum
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.operations import forward_flops
from tilemesh.model.work.slices import slice_flops, slice_lengths
from tilemesh.parallel import Mesh, lay, run
from tilemesh.parallel.laid import StepPiece
from tilemesh.parallel.pipeline import Pipeline, StageModule
from tilemesh.parallel.run import StepRunner, sends_first

GPT = ModelConfig(layers=4, width=16, heads=4, vocabulary=19, context=8, dropout=0.1)
LLAMA = ModelConfig(
    layers=5, width=16, heads=4, kv_heads=2, mlp_width=24, vocabulary=18, context=8, norm="rmsnorm", positions="rotary",
    activation="swiglu", biases=False, tied=False,
)  # fmt: skip
SHORT_AND_LONG = ModelConfig(layers=4, width=8, heads=2, mlp_width=8, vocabulary=19, context=40, dropout=0.1)
"""So narrow, and of so many tokens, that attention takes most of a pass."""
ROWS, SEED = 2, 5
BOUND = 1e-12  # float64: a sum of some thousand terms in another order

SEARCHED = to_csv(search(2, 4, PassTimes(1.0, 1.4, 0.6, 0.1), 2))
WITH_MESSAGES = to_csv(exchange(build("1f1b", 2, 4), reduce="step"))  # as torch writes them: the messages are left out
# Every schedule on two ranks; then with replicas, split layers, more stages, stages of unequal layers.
LAYOUTS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    **{
        name: (GPT if place % 2 else LLAMA, {"schedule": name, "pp": 2, "accumulation": 4})
        for place, name in enumerate(
            (
                "gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "breadth-first", "zb-v", "v-half", "v-min",
                "dualpipe-v", "dualpipe", "chimera",
            )
        )
    },
    "tied in a V": (GPT, {"schedule": "zb-v", "pp": 2, "accumulation": 2}),
    "tied in two ways": (GPT, {"schedule": "dualpipe", "pp": 2, "dp": 2, "accumulation": 4}),
    "uneven stages": (GPT, {"schedule": "1f1b", "pp": 2, "accumulation": 3, "chunk_layers": (3, 1)}),
    "replicas and split layers": (GPT, {"schedule": "zb-v", "dp": 2, "tp": 2, "pp": 2, "accumulation": 2}),
    "sequence parallel": (
        LLAMA, {"schedule": "zb-h1", "tp": 2, "pp": 2, "accumulation": 2, "sequence_parallel": True},
    ),
    "slices of sequences": (LLAMA, {"schedule": "terapipe", "slices": 3, "pp": 2, "accumulation": 2}),
    "slices of unequal length": (SHORT_AND_LONG, {"schedule": "terapipe", "slices": 3, "pp": 4, "accumulation": 2}),
    "slices, replicas and split layers": (
        GPT, {"schedule": "terapipe", "slices": 3, "dp": 2, "tp": 2, "pp": 2, "accumulation": 2, "recompute": "full"},
    ),
    "one stage recomputes": (
        GPT, {"schedule": "1f1b", "pp": 2, "accumulation": 3, "recompute": "full", "recompute_stages": (0,)},
    ),
    "searched": (GPT, {"schedule": SEARCHED, "pp": 2, "accumulation": 4}),
    "listed, with messages and replicas": (
        LLAMA, {"schedule": WITH_MESSAGES, "pp": 2, "dp": 2, "accumulation": 4},
    ),
    "four stages": (GPT, {"schedule": "1f1b", "pp": 4, "accumulation": 2}),
}  # fmt: skip


def plan_of(**fields: Any) -> ParallelPlan:
    more = {"interleave": 2} if find(fields["schedule"]).interleaves else {}
    return ParallelPlan(microbatch=ROWS, precision="fp64", **fields, **more)


def text(config: ModelConfig, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocabulary, (rows, config.context), generator=generator)
    targets = tokens.roll(-1, 1).clone()
    targets[0, :3] = targets[-1] = IGNORED
    return tokens, targets


def whole_step(config: ModelConfig, rows: int) -> tuple[Transformer, float, float, dict[str, Tensor]]:
    """One process: model, loss, norm and gradients."""
    model = Transformer(config, seed=3, dtype=torch.float64)
    tokens, targets = text(config, rows)
    total, count = loss_sum(model(tokens, dropout_seed=SEED), targets)
    (total / count).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    return model, float((total / count).detach()), norm, gradients


def pieces(plan: ParallelPlan, config: ModelConfig, replica: int) -> list[StepPiece]:
    tokens, targets = text(config, plan.batch)
    first = [(replica * plan.accumulation + turn) * ROWS for turn in range(plan.accumulation)]
    return [StepPiece(tokens[row : row + ROWS], targets[row : row + ROWS], row) for row in first]


def staged(comm: Communicator, plan: ParallelPlan, config: ModelConfig) -> Pipeline:
    laid = lay(Transformer(config, seed=3, dtype=torch.float64), Mesh(comm, **plan.axes), plan)
    assert isinstance(laid, Pipeline)
    return laid


def gradients_of(laid: Pipeline) -> dict[str, Tensor] | None:
    return laid.gather({name: p.grad for name, p in laid.module.named_parameters() if p.grad is not None})


def far(found: dict[str, Tensor], wanted: dict[str, Tensor], norm: float) -> float:
    assert list(found) == list(wanted)
    return max(float((found[name] - wanted[name]).norm()) for name in wanted) / norm


def test_slices_of_a_model_with_experts_count_those_that_a_token_passes() -> None:
    """As many FLOPs as the whole model's forward pass, which counts so."""
    config = preset("mixtral-8x7b")
    assert config.layers * slice_flops(config)(512, 0) == forward_flops(config, 1, 512).layers


def test_slices_are_as_long_as_the_dynamic_program_says() -> None:
    """The first slice attends to nothing before it, so it is the longest; a rank passes on just these tokens."""
    config, fields = LAYOUTS["slices of unequal length"]
    plan = plan_of(**fields)
    best = tuple(cut_sequence(40, 4, slice_flops(config), 1, 3))
    assert slice_lengths(config, 4, 3, 40) == best == (16, 13, 11)

    def main(comm: Communicator) -> list[int]:
        laid, seen = staged(comm, plan, config), []
        for passer in laid.passers.values():
            inner = passer.laid.activations

            def activations(tokens_BT: Tensor, inner: Any = inner, **options: Any) -> Tensor:
                seen.append(tokens_BT.shape[1])
                made: Tensor = inner(tokens_BT, **options)
                return made

            passer.laid.activations = activations  # type: ignore[method-assign]
        laid.passes(pieces(plan, config, 0), dropout_seed=SEED)
        return seen

    for seen in run_threads(plan.world, main)[:-1]:  # the last stage computes its loss at once
        assert seen == [*best] * plan.accumulation


SAMPLE = (
    "1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v", "chimera", "tied in two ways", "uneven stages",
    "sequence parallel", "slices of unequal length", "slices, replicas and split layers", "one stage recomputes",
    "searched", "listed, with messages and replicas",
)  # fmt: skip


@pytest.mark.parametrize("name", sampled(LAYOUTS, SAMPLE))
def test_a_pipeline_computes_what_one_process_computes(name: str) -> None:
    config, fields = LAYOUTS[name]
    plan = plan_of(**fields)
    model, loss, norm, wanted = whole_step(config, plan.batch)
    tokens, targets = text(config, 2)

    def main(comm: Communicator) -> Any:
        laid = staged(comm, plan, config)
        for _ in range(2):  # a second step begins where the first left nothing behind
            laid.passes(pieces(plan, config, laid.mesh.dp.index), dropout_seed=SEED, scale=4.0)
            step = laid.gradients.finish()
        found = gradients_of(laid)
        laid.module.eval()
        total, count = laid.loss(tokens, targets)
        return step, found, laid.logits(tokens), float(total), float(count)

    results = run_threads(plan.world, main)
    assert far(results[0][1], wanted, norm) < BOUND
    model.eval()
    logits = model(tokens).detach()
    for step, _, mine, _, _ in results:
        assert abs(step.loss - loss) < BOUND * loss
        assert abs(step.norm - norm) < BOUND * norm
        assert float((mine - logits).abs().max()) < BOUND
    total, count = loss_sum(logits, targets)
    copies = plan.dp * plan.tp
    assert abs(sum(one[3] for one in results) / copies - float(total)) < BOUND * float(total)
    assert sum(one[4] for one in results) / copies == int(count)


def test_forward_passes_done_again() -> None:
    plan = plan_of(schedule="1f1b", pp=2, accumulation=3)
    _, _, norm, wanted = whole_step(GPT, plan.batch)

    def main(comm: Communicator) -> Any:
        laid = staged(comm, plan, GPT)
        program = exchange(recompute(build("1f1b", 2, 3)))
        laid.runner = StepRunner(program, comm, laid.passers, laid.runner.services)
        laid.step = PlannedStep(program, laid.step.layers)
        laid.passes(pieces(plan, GPT, 0), dropout_seed=SEED)
        laid.gradients.finish()
        return gradients_of(laid)

    found = run_threads(2, main)[0]
    assert found is not None
    assert far(found, wanted, norm) < BOUND


@pytest.mark.parametrize("recompute", ["full", "operators"])
def test_passes_done_again_cut_sequences_as_long_as_they_were(recompute: str) -> None:
    """Of sequence parallelism: a microbatch of another length may have passed since."""
    plan = plan_of(schedule="1f1b", pp=2, tp=2, accumulation=3, sequence_parallel=True, recompute=recompute)
    tokens, targets = text(LLAMA, plan.batch)
    cuts = [StepPiece(tokens[:ROWS, :n], targets[:ROWS, :n], 0) for n in (8, 5, 7)]
    model = Transformer(LLAMA, seed=3, dtype=torch.float64)
    losses = [loss_sum(model(piece.tokens), piece.targets) for piece in cuts]
    (sum(total for total, _ in losses) / sum(count for _, count in losses)).backward()

    def main(comm: Communicator) -> dict[str, Tensor] | None:
        laid = staged(comm, plan, LLAMA)
        laid.passes(cuts)
        laid.gradients.finish()
        return gradients_of(laid)

    found = run_threads(plan.world, main)[0]
    assert found is not None
    assert far(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, 1.0) < BOUND


def test_weights_are_loaded_from_one_rank_and_gathered_again() -> None:
    plan = plan_of(schedule="1f1b", pp=2, tp=2, accumulation=2)
    state = {name: value + 1 for name, value in Transformer(GPT, seed=3, dtype=torch.float64).state_dict().items()}

    def main(comm: Communicator) -> Any:
        laid = staged(comm, plan, GPT)
        laid.load(state if comm.rank == 1 else None, root=1)
        return laid.gather()

    found = run_threads(4, main)
    assert all(one is None for one in found[1:])
    assert {name: torch.equal(found[0][name], value) for name, value in state.items()} == dict.fromkeys(state, True)


def test_a_stage_asks_alone_for_groups_that_only_its_experts_need() -> None:
    config = replace(LLAMA, layers=2, experts=4, experts_per_token=2, dense_layers=(0,))
    plan = plan_of(schedule="1f1b", pp=2, dp=2, tp=2, ep=2, accumulation=1)
    _, _, norm, wanted = whole_step(config, plan.batch)

    def main(comm: Communicator) -> dict[str, Tensor] | None:
        laid = staged(comm, plan, config)
        laid.passes(pieces(plan, config, laid.mesh.dp.index))
        laid.gradients.finish()
        return laid.gather_gradients()

    found = run_threads(plan.world, main, timeout_s=60)[0]
    assert found is not None
    assert far(found, wanted, norm) < BOUND


def test_only_one_holder_of_a_tied_table_writes_it() -> None:
    for schedule, writers in (("1f1b", [True, False]), ("chimera", [True, False]), ("zb-v", [True])):
        plan = plan_of(schedule=schedule, pp=2, accumulation=2)

        def main(comm: Communicator, plan: ParallelPlan = plan) -> Any:
            shards = staged(comm, plan, GPT).shards
            return shards["token_embedding.weight"].writes if "token_embedding.weight" in shards else None

        assert [writes for writes in run_threads(2, main) if writes is not None] == writers


class Echo:
    """A chunk whose passes only say that they were made."""

    def __init__(self, said: list[str], number: int) -> None:
        self.said, self.number = said, number

    def forward(self, microbatch: int, piece: int, x: Tensor | None, *, keeps: bool) -> Tensor:
        self.said.append(f"F{self.number} of {microbatch} from {None if x is None else float(x)}")
        return torch.full((), 10.0 * self.number + microbatch)

    def recompute(self, microbatch: int, piece: int) -> None:
        self.said.append(f"again {self.number}")

    def backward(self, microbatch: int, piece: int, gradient: Tensor | None, *, splits: bool) -> Tensor:
        self.said.append(f"{'I' if splits else 'B'}{self.number} of {microbatch}")
        return torch.full((), -1.0)

    def weights(self, microbatch: int, piece: int) -> None:
        self.said.append(f"W{self.number} of {microbatch}")

    def landing(self, microbatch: int, piece: int, of: str) -> Tensor:
        return torch.empty(())


def test_the_runtime_hands_each_pass_what_the_one_before_gave_and_refuses_what_nobody_does() -> None:
    program = exchange(build("1f1b", 2, 2))

    def main(comm: Communicator) -> list[str]:
        said: list[str] = []
        notes: list[str] = []
        StepRunner(program, comm, {comm.rank: Echo(said, comm.rank)}, note=notes.append)()
        assert notes[:-1] == [str(action) for action in sends_first(program.actions[comm.rank])]
        with pytest.raises(UsageError, match="was not given chunk"):
            StepRunner(program, comm, {})
        runner = StepRunner(program, comm, {comm.rank: Echo(said, comm.rank)})
        with pytest.raises(UsageError, match="0UNSHARD: this step has nothing that does GATHER of weights"):
            runner._do(Action("GATHER", 0, of="weights"))
        return said

    first, second = run_threads(2, main)
    assert first == ["F0 of 0 from None", "F0 of 1 from None", "B0 of 0", "B0 of 1"]
    assert second == ["F1 of 0 from 0.0", "B1 of 0", "F1 of 1 from 1.0", "B1 of 1"]


def test_stages_that_sleep_run_by_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [sleeping.simulated_s("1f1b", ranks, 8) for ranks in (2, 4, 8)] == pytest.approx([0.27, 0.33, 0.45])
    for name in ("FORWARD_S", "INPUT_S", "WEIGHT_S"):
        monkeypatch.setattr(sleeping, name, 1e-4)
    programs = [sleeping.program_of(name, 2, 4) for name in ("zb-v", "dualpipe", "interleaved")]

    def steps(comm: Communicator) -> None:
        for program in programs:
            chunks = {chunk: sleeping.SleepingChunk() for chunk in program.placement.held[comm.rank]}
            StepRunner(program, comm, chunks)()

    run_threads(2, steps)


def test_sends_that_a_thread_would_move_too_slowly_are_waited_for_in_the_order_that_was_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Communicator, "is_moved_apart", True)
    monkeypatch.setattr(run, "_MOST_LEFT", 0)
    for name in ("FORWARD_S", "INPUT_S", "WEIGHT_S"):
        monkeypatch.setattr(sleeping, name, 1e-4)
    names = [name for name in synchronous() if name != "terapipe" and find(name).why_not(4, 8) is None]
    programs = [sleeping.program_of(name, 4, 8) for name in names]

    def told_after(runner: StepRunner, under_way: list[int], action: Action, do: Callable[[], None]) -> None:
        do()
        under_way.append(len(runner.sending))

    def steps(comm: Communicator) -> None:
        for program in programs:
            chunks = {chunk: sleeping.SleepingChunk() for chunk in program.placement.held[comm.rank]}
            told: list[str] = []
            runner = StepRunner(program, comm, chunks, sleeping.SERVICES, told.append)
            under_way: list[int] = []
            runner.around = partial(told_after, runner, under_way)
            runner()
            assert told[:-1] == [str(action) for action in program.actions[comm.rank]]
            assert not any(under_way)

    run_threads(4, steps)


class Stalls(Echo):
    """Never comes back from one pass, until the test is over."""

    over = threading.Event()

    def forward(self, microbatch: int, piece: int, x: Tensor | None, *, keeps: bool) -> Tensor:
        if (self.number, microbatch) == (2, 3):
            self.over.wait(30)
        return super().forward(microbatch, piece, x, keeps=keeps)


def test_a_stalled_rank_its_action_and_who_waits_for_whom_are_named() -> None:
    program = exchange(build("1f1b", 4, 8))
    said: list[str] = []

    def main(comm: Communicator) -> None:
        def note(text: str) -> None:
            comm.watch.process.stage = f"step 1: {text}"

        try:
            StepRunner(program, comm, {comm.rank: Stalls([], comm.rank)}, note=note)()
        except RunError as error:
            said.append(str(error))
            Stalls.over.set()
            raise

    with pytest.raises(RunError, match="rank 2 is in no collective, at step 1: 2F3"):
        run_threads(4, main, timeout_s=1.0)
    assert said  # who waited says the same
    for words in said:
        assert "rank 2 is in no collective, at step 1: 2F3" in words
        assert "recv from rank 2" in words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "1f1b", "pp": 8, "accumulation": 8}, "pp 8 needs as many layers, the model has 4: pp 4 at most"),
        ({"schedule": "zb-v", "pp": 4, "accumulation": 8}, "2 chunks of zb-v needs as many layers.*pp 2 at most"),
        ({"schedule": "dualpipe", "pp": 2, "accumulation": 3}, "at least 4 microbatches: .* is 3, 4 is the next"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(fields: dict[str, Any], words: str) -> None:
    plan = plan_of(**fields)

    def main(comm: Communicator) -> None:
        mesh = Mesh(comm, **plan.axes)
        with pytest.raises(UsageError, match=words):
            lay(Transformer(GPT, device="meta"), mesh, plan)

    run_threads(plan.world, main)


def test_a_stage_trains_unless_it_is_told_not_to() -> None:
    model = Transformer(preset("tiny").replace(layers=1), seed=1)
    stage = StageModule({0: model})
    for turn, mode in ((stage.eval, False), (stage.train, True)):
        turn()
        assert {module.training for module in (stage, model, *stage.modules())} == {mode}


def test_what_is_not_trained_is_not_trained_in_a_stage_either() -> None:
    model = Transformer(preset("tiny").replace(layers=2), seed=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)

    def main(comm: Communicator) -> dict[str, bool]:
        laid = lay(model, Mesh(comm, pp=2), ParallelPlan(pp=2, accumulation=2, precision="fp32"))
        return {name: parameter.requires_grad for name, parameter in laid.module.named_parameters()}

    stages = run_threads(2, main)
    assert all(is_trained == ("norm" not in name) for stage in stages for name, is_trained in stage.items())
    assert all(set(stage.values()) == {False, True} for stage in stages)
