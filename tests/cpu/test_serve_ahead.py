"""Steps that are launched before the tokens of the last are known: the same answers, and nothing leaks.

On a CPU, with calls in place of CUDA graphs: all of the code but the capture itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import RunError
from tilemesh.data.tokenizer import Bytes
from tilemesh.kernels.paged_attention.cpu import library
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.serve import Engine, Sampling, stretch
from tilemesh.serve.core import EngineCore
from tilemesh.serve.device_steps import PlainCalls
from tilemesh.serve.jobs import AnswerPart, PromptJob
from tilemesh.serve.load import ServedModel
from tilemesh.serve.request import FinishReason, ServeRequest
from tilemesh.serve.runner import Runner
from tilemesh.serve.sampling import DrawKind, RowDraws, TokenDraw, draw_on_device, draw_tokens, logprobs_of
from tilemesh.serve.scheduler import UNKNOWN, Scheduled, Scheduler, ServeLimits
from tilemesh.serve.staging import Staging, StepSizes, rounded_tokens

CONTEXT = 48
LLAMA = ModelConfig(
    layers=2, width=32, heads=4, kv_heads=2, vocabulary=256, context=CONTEXT, norm="rmsnorm", positions="rotary",
    activation="swiglu", biases=False, tied=False,
)  # fmt: skip
GPT = ModelConfig(layers=2, width=32, heads=4, vocabulary=256, context=CONTEXT)
WINDOWED = LLAMA.replace(window=7, full_layers=(1,))


def served(config: ModelConfig = LLAMA, dtype: torch.dtype = torch.float64) -> ServedModel:
    model = Transformer(config, seed=1, dtype=dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)  # fresh weights say next to nothing; these have opinions
    return ServedModel("small", model, Bytes(), frozenset({0}))


@pytest.fixture(scope="module")
def models() -> list[ServedModel]:
    return [served(LLAMA), served(GPT), served(WINDOWED)]


def test_invariant_steps_launched_ahead_have_the_bits_of_steps_that_are_waited_for() -> None:
    """By the interpreted kernels of attention over pages: alone, among others, in chunks, after preemption."""
    model, draw = served(LLAMA.replace(layers=1), torch.float32), random.Random(2)
    prompts = [[draw.randrange(1, 256) for _ in range(length)] for length in (3, 17, 30)]
    asked = [Sampling(max_tokens=4, temperature=heat, seed=3, logprobs=0, ignore_eos=True) for heat in (0.0, 1.0, 0.7)]
    found = []
    for graphs, world in (
        (None, {"running": 1}),
        (PlainCalls(), {"running": 3, "chunk_tokens": 7}),
        (PlainCalls(), {"running": 2, "pages": 12}),
    ):

        def runner(model: Transformer, limits: ServeLimits, *_: object, how: PlainCalls | None = graphs) -> Runner:
            return Runner(model, limits, "cpu", invariant=True, implementation="interpret", graphs=how)

        options: dict[str, Any] = {"pages": 60, "page_tokens": 4, "share_prefixes": False, **world}
        with Engine(model, invariant=True, make_runner=runner, **options) as engine:
            made = [completion.answers[0] for completion in engine.generate(prompts, asked)]
        found.append([(answer.tokens, [*answer.logprobs]) for answer in made])
    assert found[1] == found[0]
    assert found[2] == found[0]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**48))
def test_launched_ahead_is_waited_for(models: list[ServedModel], seed: int) -> None:
    draw = random.Random(seed)
    least = draw.choice((1, stretch.LEAST_ROWS))  # whether rows are stepped as arrays, or one by one
    model = draw.choice(models)
    opening = [draw.randrange(1, 256) for _ in range(draw.choice((0, 8, 20)))]
    prompts = [
        [*opening, *(draw.randrange(1, 256) for _ in range(draw.choice((1, 2, 7, 20))))]
        for _ in range(draw.choice((1, 2, 7)))
    ]
    asked = Sampling(
        max_tokens=draw.choice((1, 3, 8)),
        temperature=draw.choice((0.0, 1.3)),
        seed=draw.randrange(2**40),
        top_k=draw.choice((0, 20)),
        top_p=draw.choice((1.0, 0.9)),
        min_p=draw.choice((0.0, 0.02)),
        stop=draw.choice(((), ("a", "\x05"))),
        frequency_penalty=draw.choice((0.0, 0.0, 0.5)),
        logprobs=draw.choice((None, 0, 2)),
    )
    options = {
        "pages": draw.choice((14, 60)), "page_tokens": draw.choice((4, 16)), "chunk_tokens": draw.choice((5, 64)),
        "step_tokens": 64, "running": draw.choice((2, 8)), "swap_pages": draw.choice((0, 30)),
        "share_prefixes": draw.random() < 0.7,
    }  # fmt: skip
    found = []
    for ahead in (True, False):
        with (
            mock.patch.object(stretch, "LEAST_ROWS", least),
            Engine(model, launch_ahead=ahead, **options) as engine,  # type: ignore[arg-type]
        ):
            jobs = [engine.submit(prompt, asked, lambda part: None) for prompt in prompts[:2]]
            for job in jobs:
                engine.abort(job)
            assert not (ahead and engine.limits.local_pages)  # a step launched ahead has one table of pages
            found.append([completion.answers[0] for completion in engine.generate(prompts, asked)])
            assert engine.status.pages_used == 0
    assert [answer.tokens for answer in found[0]] == [answer.tokens for answer in found[1]]
    assert [answer.text for answer in found[0]] == [answer.text for answer in found[1]]
    assert [answer.finish for answer in found[0]] == [answer.finish for answer in found[1]]
    for answers in zip(*found, strict=True):
        drawn = [[(each.token, each.logprob, each.sampled) for each in answer.logprobs] for answer in answers]
        assert [token for token, *_ in drawn[0]] == ([] if asked.logprobs is None else list(answers[0].tokens))
        assert np.array(drawn[0]) == pytest.approx(np.array(drawn[1]), abs=1e-12)


Heard = dict[tuple[int, int], list[AnswerPart]]


def heard_of_a_stretch(seed: int, least: int, is_ahead: bool = True) -> tuple[Heard, int]:
    """What is told of answers under way, by prompt and answer; and how many steps were taken as arrays. Something may
    interrupt: a request that comes, one that is aborted (the first), other weights; or too few pages. `is_ahead`: as
    on a GPU; or as on a CPU, whose function for attention is of float32."""
    draw, model = random.Random(seed), served(dtype=torch.float64 if is_ahead else torch.float32)
    if draw.random() < 0.3:
        model.model.token_embedding.weight[200] = torch.nan  # type: ignore[union-attr]
    options = {"pages": draw.choice((40, 200)), "page_tokens": draw.choice((2, 4, 16)), "running": 20}
    limits = ServeLimits(context=CONTEXT, step_tokens=64, share_answers=draw.random() < 0.6, **options)
    ahead = {"implementation": "torch", "graphs": PlainCalls()} if is_ahead else {}
    runner = Runner(model.model, limits, **ahead)  # type: ignore[arg-type]
    core, heard = EngineCore(runner, Scheduler(limits), model.tokenizer, model.ends, 256), Heard()
    answers, length = draw.choice((1, 4)), draw.choice((2, 9, 30))

    def add(number: int, wants: int | None) -> PromptJob:
        prompt = [draw.randrange(1, 200) for _ in range(draw.choice((1, 3, 9)))]
        sampling = Sampling(n=answers, temperature=1.3, logprobs=wants, stop_tokens=tuple(range(250, 256)))
        job = PromptJob(
            prompt, sampling, number, lambda part: heard.setdefault((number, part.answer), []).append(part), whole=True
        )
        core.add(job, length)
        return job

    def renew() -> None:
        core.tell_held()
        core.renew(7)

    jobs = [add(number, None if number == 1 else 0) for number in range(draw.choice((2, 5)))]
    late, what = draw.randrange(12), draw.choice(("add", "abort", "weights", ""))
    steps = as_arrays = 0
    with mock.patch.object(stretch, "LEAST_ROWS", least), mock.patch.object(stretch, "_COLUMNS", 5):
        while core.busy:
            if steps == late and what == "add":
                add(len(jobs), 0)
            elif steps == late and what == "abort":
                core.abort(jobs[0])
            elif steps == late and what == "weights":
                core.changes.append((False, renew))
                core.take_changes()
            core.step()
            steps, as_arrays = steps + 1, as_arrays + (core._stretch is not None)
    assert core.scheduler.pool.used == 0
    return heard, as_arrays


def compared(parts: list[AnswerPart]) -> tuple[object, ...]:
    scores = [(score.logprob, score.sampled) for part in parts for score in part.logprobs]
    versions = [part.version for part in parts for _ in part.tokens]
    text, last = "".join(part.text for part in parts), parts[-1]
    return [token for part in parts for token in part.tokens], scores, text, versions, last.finish, last.stopped_by


@pytest.mark.parametrize("is_ahead", [True, False])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**48))
def test_a_stretch_of_rows_is_rows_one_by_one(seed: int, is_ahead: bool) -> None:
    if not is_ahead and library() is None:
        pytest.skip("no compiler for the function that attends on a CPU")
    (arrays, steps), (single, none) = (heard_of_a_stretch(seed, least, is_ahead) for least in (1, 10**9))
    event(f"{min(steps, 1)} stretch")
    assert none == 0
    assert arrays.keys() == single.keys()
    for key in arrays:
        got, expected = compared(arrays[key]), compared(single[key])
        if FinishReason.ABORT in (got[4], expected[4]):  # the step under way was read, or was not
            shorter, longer = sorted((got[0], expected[0]), key=len)  # type: ignore[type-var, arg-type]
            assert longer[: len(shorter)] == shorter  # type: ignore[arg-type, index]
        else:
            assert (got[0], *got[2:]) == (expected[0], *expected[2:])
            # Rows of a CPU's step stand in another order than one by one, and some bits follow from that.
            assert np.array(got[1]) == pytest.approx(np.array(expected[1]), abs=1e-13 if is_ahead else 1e-4)


@pytest.mark.parametrize("share", [True, False])
def test_pages_of_answers_are_found_where_somebody_may_ask(share: bool) -> None:
    prompt, asked = list(range(1, 10)), Sampling(max_tokens=20, n=4, temperature=1.3, ignore_eos=True, seed=1)
    options = {"page_tokens": 4, "pages": 90, "launch_ahead": True, "share_answers": share}
    with mock.patch.object(stretch, "LEAST_ROWS", 1), Engine(served(), **options) as engine:  # type: ignore[arg-type]
        first = next(iter(engine.generate([prompt], asked)))
        kept = len(engine._scheduler.prefixes)
        further = [*prompt, *first.answers[2].tokens]
        # Of two at a time, which begin alike, none may wait for a page that the other does not give.
        again = list(engine.generate([further, further], Sampling(max_tokens=2, temperature=0)))
    assert kept == (2 + 4 * 5 if share else 2)  # 9 tokens of the prompt, 28 computed
    assert again[0].found_tokens == (28 if share else 8)
    assert again[0].answers == again[1].answers


def test_answers_are_stepped_as_arrays() -> None:
    assert heard_of_a_stretch(3, least=1)[1] > 0
    assert library() is None or heard_of_a_stretch(3, least=1, is_ahead=False)[1] > 0


def test_log_probabilities_of_drawn_tokens_do_not_hold_steps_up() -> None:
    """What learning from feedback asks for: the step that draws a token scores it."""
    graphs = Counted()
    core, parts = core_of(served(), graphs), list[AnswerPart]()
    job = PromptJob([1, 2, 3], Sampling(max_tokens=8, temperature=0.8, logprobs=0), 5, parts.append)
    core.add(job, 8)
    while core.busy:
        core.step()
    assert graphs.captured > 0
    assert len([score for part in parts for score in part.logprobs]) == 8


class Counted(PlainCalls):
    """How many steps were captured, and how many called."""

    def __init__(self) -> None:
        self.captured = self.warmed = 0

    def warm(self, body: Callable[[], object]) -> None:
        self.warmed += 1
        super().warm(body)

    def capture(self, body: Callable[[], object]):  # type: ignore[no-untyped-def]
        self.captured += 1
        return super().capture(body)


class Refused(PlainCalls):
    def capture(self, body: Callable[[], object]):  # type: ignore[no-untyped-def]
        raise RunError("cannot be captured in a CUDA graph: because")


def core_of(model: ServedModel, graphs: PlainCalls, say: Callable[[str], None] = print) -> EngineCore:
    limits = ServeLimits(pages=80, context=CONTEXT, page_tokens=4, step_tokens=64, running=8)
    runner = Runner(model.model, limits, implementation="torch", graphs=graphs, say=say)
    return EngineCore(runner, Scheduler(limits), model.tokenizer, model.ends, 256)


def answered(core: EngineCore, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        core.add(PromptJob(prompt, sampling, 7, lambda part, n=number: tokens[n].extend(part.tokens)), 6)  # type: ignore[misc]
    while core.busy:
        core.step()
    return tokens


def test_a_step_is_launched_before_the_last_is_read(models: list[ServedModel]) -> None:
    graphs = Counted()
    core = core_of(models[0], graphs)
    parts: list[int] = []
    sampling = Sampling(max_tokens=6, temperature=0, ignore_eos=True)
    core.add(PromptJob([5, 6, 7], sampling, 0, lambda part: parts.extend(part.tokens)), 6)
    heard = []
    while core.busy:
        core.step()
        heard.append(len(parts))
    assert heard == [0, 1, 2, 3, 4, 5, 6]  # the prompt's step, five of decoding, and one that only reads
    assert (graphs.captured, graphs.warmed) == (1, 2)  # the second step of one row; the prompt's came once
    assert core.scheduler.pool.used == 0


def test_rows_are_rounded_up_and_captured_once(models: list[ServedModel]) -> None:
    graphs = Counted()
    core = core_of(models[0], graphs)
    prompts = [[number + 1, 9] for number in range(7)]
    first = answered(core, prompts, Sampling(temperature=0, ignore_eos=True))
    assert graphs.captured == 1  # 7 rows as 8
    captured = core.runner.ahead._captured  # type: ignore[union-attr]
    assert [shape[:2] for shape in captured] == [("rows", 8)]
    assert answered(core, prompts[:3], Sampling(temperature=0, ignore_eos=True)) == first[:3]
    # 3 rows as 4, and steps of up to 64 tokens with prompts, of which this was the second
    assert [shape[:2] for shape in captured] == [("rows", 8), ("tokens", 64), ("rows", 4)]
    answered(core, prompts[:3], Sampling(temperature=1, ignore_eos=True))
    assert graphs.captured == 4  # another kind of drawing, for which prompts have come once


def test_a_capture_that_fails_is_said_and_done_without(models: list[ServedModel]) -> None:
    said: list[str] = []
    prompts = [[3, 4], [5]]
    sampling = Sampling(temperature=0, ignore_eos=True)
    found = answered(core_of(models[0], Refused(), said.append), prompts, sampling)
    assert found == answered(core_of(models[0], PlainCalls()), prompts, sampling)
    assert said == ["a step cannot be captured in a CUDA graph: because; steps are launched kernel by kernel"]


def test_logits_that_are_nan_end_their_request_alone() -> None:
    model = served()
    model.model.token_embedding.weight[200] = torch.nan  # type: ignore[union-attr]
    heard: list[FinishReason | None] = []
    core = core_of(model, PlainCalls())
    for prompt in ([200, 1], [2, 3]):
        sampling = Sampling(temperature=0, ignore_eos=True, logit_bias={})
        core.add(PromptJob(prompt, sampling, 0, lambda part: heard.append(part.finish)), 3)
    while core.busy:
        core.step()
    assert heard.count(FinishReason.ERROR) == 1
    assert core.scheduler.pool.used == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**48))
def test_rows_drawn_at_once_are_rows_drawn_one_by_one(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, vocabulary = draw.choice((1, 5)), draw.choice((7, 300))
    logits = torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * 3
    if draw.random() < 0.3:
        logits = logits.round()  # equal ones are kept or dropped together
    drawings = [
        TokenDraw(
            Sampling(
                temperature=draw.choice((0.0, 0.7, 1.0)), top_k=draw.choice((0, 1, 5, 1000)),
                top_p=draw.choice((1.0, 0.5, 0.95)), min_p=draw.choice((0.0, 0.1)),
            ), seed, 0, number, [], 0,
        ) for number in range(rows)
    ]  # fmt: skip
    staging = Staging(StepSizes(ServeLimits(pages=1, context=8, running=rows), 8), vocabulary, pinned=False)
    kind = staging.write_decoding((), drawings, {}, rows)
    temperature, top_k, top_p, min_p, uniform = staging.host.floats
    draws = RowDraws(temperature, uniform, top_k.long(), top_p, min_p)
    found, scores = draw_on_device(logits, draws, kind, scored=True)
    assert found.tolist() == draw_tokens(logits, drawings)
    expected = [(each.logprob, each.sampled) for each in logprobs_of(logits, found.tolist(), 0, drawings)]
    assert scores is not None
    assert scores.t().numpy() == pytest.approx(np.array(expected), abs=1e-12)
    logits[0, 3] = torch.inf
    assert draw_on_device(logits, draws, DrawKind.GREEDY)[0].tolist()[0] == -1


def test_tokens_are_looked_up_in_one_place_whoever_knows_them() -> None:
    """Those that the host knows, those that the last step drew, a prompt's, and padding; tiles of decoding rows."""
    limits = ServeLimits(pages=9, context=32, page_tokens=4, running=3, step_tokens=64)
    staging = Staging(StepSizes(limits, 8), 256, pinned=False)
    known = Scheduled(ServeRequest("known", [7, 8, 9], 5), 2, 1, (), True, (5, 6))
    drawn = Scheduled(ServeRequest("drawn", [4, 4, 4, 4, UNKNOWN], 5), 4, 1, (), True, (1, 3))
    prompt = Scheduled(ServeRequest("prompt", [20, 21, 22, 23, 24, UNKNOWN], 5), 1, 5, (), True, (0, 8))
    drawings = [TokenDraw(Sampling(temperature=0), 0, 0, 0, [], 0)] * 3
    host = staging.host
    host.drawn[:] = torch.tensor([100, 101, 102])
    staging.write_decoding((known, drawn), drawings[:2], {"drawn": 2}, 3)
    _, source, position, place = host.of_tokens(3)
    assert host.numbers[source].tolist() == [9, 102, 0]
    assert (position.tolist(), place.tolist()) == ([2, 4, 0], [5 * 4 + 2, 3 * 4, -1])
    assert host.tiles_of_rows(3).tolist() == [[0, 0, 1, 2], [1, 1, 1, 4], [0, 0, 0, 0]]
    staging.write_prompts((known, drawn, prompt), drawings, {"drawn": 0, "prompt": 1}, 64)
    _, source, position, place = host.of_tokens(64)
    assert host.numbers[source].tolist() == [9, 100, 21, 22, 23, 24, 101] + [0] * 57
    assert position.tolist()[:8] == [2, 4, 1, 2, 3, 4, 5, 0]
    assert place.tolist()[:8] == [22, 12, 1, 2, 3, 32, 33, -1]


def test_steps_of_all_sizes_are_captured_before_the_first_request_where_asked_for(models: list[ServedModel]) -> None:
    prompts, asked = [[5, 6, 7], [9]], Sampling(max_tokens=6, temperature=0, ignore_eos=True)
    found = []
    for prepare in (True, False):
        with Engine(models[0], launch_ahead=True, prepare=prepare, pages=40, running=20) as engine:
            found.append([completion.answers[0].tokens for completion in engine.generate(prompts, asked)])
            ahead = engine._core.runner.ahead
            assert ahead is not None
            kept = sorted(ahead._captured)
        if prepare:
            shapes = [("rows", rows) for rows in (1, 2, 4, 8, 16, 20)]
            shapes += [("tokens", tokens) for tokens in range(64, 513, 64)]
            assert kept == [(*shape, kind, False) for shape in shapes for kind in (0, 1)]
    assert found[0] == found[1]


@given(st.integers(1, 1 << 20))
def test_tokens_are_rounded_up_to_few_numbers(tokens: int) -> None:
    found = rounded_tokens(tokens)
    assert tokens <= found < tokens + max(64, tokens / 8 + 1)
    assert rounded_tokens(found) == found
    octave = range(found // 2 + 1, found + 1)
    if found > 1024 and found & (found - 1) == 0:
        assert len({rounded_tokens(one) for one in range(octave.start, octave.stop, 32)} | {found}) == 8


@given(st.integers(1, 700), st.integers(1, 300), st.sampled_from((1, 2, 8, 16)), st.randoms())
def test_there_are_tiles_for_every_way_to_cut_a_step(step: int, running: int, tile: int, draw: random.Random) -> None:
    sizes = StepSizes(ServeLimits(pages=1, context=8, step_tokens=max(step, running), running=running), tile)
    tokens, counts = draw.randint(1, sizes.limits.step_tokens), []
    while sum(counts) < tokens and len(counts) < running:
        counts.append(draw.randint(1, min(tokens - sum(counts), draw.choice((1, 3, tokens)))))
    needed = sum(-(-count // tile) for count in counts)
    rounded = rounded_tokens(sum(counts))
    assert needed <= sizes.tiles(rounded) <= sizes.tiles(sizes.most_tokens)
    assert rounded in sizes.all_tokens()
    assert len(counts) <= sizes.drawn(rounded)
