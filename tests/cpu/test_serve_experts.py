"""Replicas that hold the experts of a model together: the same answers as one process gives."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tilemesh.cli.commands.serve import read_mesh
from tilemesh.compress.quantize import quantize
from tilemesh.core.errors import RunError, UsageError
from tilemesh.model import huggingface
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.serve import Engine, Replicas, Sampling
from tilemesh.serve.answers import Completion
from tilemesh.serve.ranks import RankRunner

CONFIG = ModelConfig(
    layers=3, width=32, heads=4, kv_heads=2, mlp_width=48, vocabulary=259, context=96, norm="rmsnorm",
    positions="rotary", activation="swiglu", biases=False, tied=False, experts=6, experts_per_token=2,
    shared_width=16, shared_gate=True, router_renormalized=False, dense_layers=(1,), dense_width=64,
)  # fmt: skip
PROMPTS = [[5, 6, 7, 8] * 5, [*[5, 6, 7, 8] * 5, 9], [1], [3, 200, 258] * 9, [17] * 31]
ASKED = Sampling(max_tokens=19, temperature=0.9, seed=4, n=2, logprobs=1)
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("warm")


def fresh(seed: int) -> Transformer:
    model = Transformer(CONFIG.replace(biases="qkv"), seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "experts"
    huggingface.save(fresh(2), path)
    return path


@pytest.fixture(scope="module")
def joined(folder: Path) -> Iterator[Replicas]:
    """Two replicas with few pages: preemption, chunks of prompts, and a replica without a step."""
    with Replicas(folder, 2, ep=2, dtype="fp64", pages=34, page_tokens=4, swap_pages=12, chunk_tokens=9) as replicas:
        yield replicas


def tokens(completions: Iterator[Completion]) -> list[list[int]]:
    return [answer.tokens for completion in completions for answer in completion.answers]


def logprobs(completions: list[Completion]) -> list[float]:
    return [told.logprob for made in completions for answer in made.answers for told in answer.logprobs]


def test_replicas_that_share_experts_answer_as_one_process_does(folder: Path, joined: Replicas) -> None:
    with Engine(folder, dtype="fp64", pages=200) as engine:
        expected = list(engine.generate(PROMPTS, ASKED))
        alone = tokens(engine.generate([PROMPTS[3]], GREEDY))
        vector = engine.embed(PROMPTS[0])
    made = list(joined.generate(PROMPTS, ASKED))
    assert tokens(iter(made)) == tokens(iter(expected))
    assert logprobs(made) == pytest.approx(logprobs(expected), abs=1e-11)
    assert all(engine.status.steps > 0 for engine in joined.engines)
    assert joined.status.pages_used == 0
    for engine in joined.engines:  # the other has no step, and some of the experts
        assert tokens(engine.generate([PROMPTS[3]], GREEDY)) == alone
        assert engine.embed(PROMPTS[0]) == pytest.approx(vector, abs=1e-6)


def test_their_weights_change_together_and_they_sleep_together(folder: Path, tmp_path: Path, joined: Replicas) -> None:
    other = fresh(3)
    huggingface.save(other, tmp_path / "other", like=folder)
    with Engine(folder, dtype="fp64", pages=200) as engine:
        before = tokens(engine.generate(PROMPTS, GREEDY))
    with Engine(tmp_path / "other", dtype="fp64", pages=200) as engine:
        expected = tokens(engine.generate(PROMPTS, GREEDY))
    assert tokens(joined.generate(PROMPTS, GREEDY)) == before != expected
    version = joined.update_weights(other)
    made = list(joined.generate(PROMPTS, GREEDY))
    assert tokens(iter(made)) == expected
    assert {number for one in made for answer in one.answers for number in answer.versions} == {version}
    with pytest.raises(UsageError, match="version"):
        joined.update_weights(other, version)
    joined.sleep(2)
    with pytest.raises(UsageError, match="update_weights before wake"):
        joined.wake()
    joined.update_weights(folder)
    joined.wake()
    assert tokens(joined.generate(PROMPTS, GREEDY)) == before


@pytest.mark.slow  # tests of ranks without experts lose some more often
@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="only Linux says which process is behind a socket")
def test_a_lost_rank_is_started_again_for_all_of_them(folder: Path, joined: Replicas) -> None:
    """With the weights of the last update on all ranks, whichever replica asks first."""
    joined.update_weights(fresh(5))
    joined.update_weights(folder)
    before = tokens(joined.engines[0].generate(PROMPTS, GREEDY))
    runner = joined.engines[1]._core.runner
    assert isinstance(runner, RankRunner)
    group = joined._joint._group if joined._joint is not None else None
    assert group is not None
    who = group._connections[1].getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    os.kill(int.from_bytes(who[:4], "little"), signal.SIGKILL)
    with pytest.raises(RunError, match="gone"):
        list(joined.engines[0].generate(PROMPTS, GREEDY))
    assert tokens(joined.engines[0].generate(PROMPTS, GREEDY)) == before
    with pytest.raises(RunError, match="others were started in its place"):  # its pages are lost, too
        list(joined.engines[1].generate(PROMPTS, GREEDY))
    both: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda engine=engine: both.append(tokens(engine.generate(PROMPTS, GREEDY))))
        for engine in joined.engines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert both == [before, before]


@pytest.mark.slow  # four ranks; the first test has the same passes on two
@pytest.mark.parametrize("recipe", ["", "int8"])
def test_experts_over_replicas_and_matrices_over_ranks(folder: Path, tmp_path: Path, recipe: str) -> None:
    source = folder
    if recipe:
        source = tmp_path / "small"
        huggingface.save(quantize(huggingface.load(folder), recipe), source, like=folder)
    with Engine(source, dtype="fp64", pages=200) as engine:
        expected = tokens(engine.generate(PROMPTS, GREEDY))
    with Replicas(source, 2, ranks=2, ep=2, dtype="fp64", pages=60, page_tokens=4, chunk_tokens=7) as replicas:
        assert tokens(replicas.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.slow  # the first test has the same passes
def test_codes_of_few_bits_and_bits_that_follow_from_a_sequence_alone(folder: Path, tmp_path: Path) -> None:
    huggingface.save(quantize(huggingface.load(folder), "int4-g16"), tmp_path / "small", like=folder)
    with Engine(tmp_path / "small", pages=200, invariant=True) as engine:
        expected = list(engine.generate(PROMPTS, ASKED))
    with Replicas(tmp_path / "small", 2, ep=2, pages=40, page_tokens=4, chunk_tokens=7, invariant=True) as replicas:
        made = list(replicas.generate(PROMPTS, ASKED))
    assert tokens(iter(made)) == tokens(iter(expected))
    assert logprobs(made) == logprobs(expected)


def test_meshes_that_serving_refuses_say_why(folder: Path) -> None:
    assert read_mesh("dp=4,ep=2") == {"tp": 1, "dp": 4, "ep": 2}
    for text, words in (
        ("tp=2,ep=2", "set dp to a multiple of it"),
        ("pp=2", "stages would take turns"),
        ("cp=2", "one new token of each request"),
    ):
        with pytest.raises(UsageError, match=words):
            read_mesh(text)
    with pytest.raises(UsageError, match="ep is 4 and 6 experts do not divide by it"):
        Replicas(folder, 4, ep=4, pages=9)
