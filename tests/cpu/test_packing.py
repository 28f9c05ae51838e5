"""Documents packed into one sequence: none sees another, positions begin anew, on every layout; exact on resume."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from test_data_sources import write_chat_tokenizer
from test_train_run import losses, made, state, trained

from tilemesh.model.config import ModelConfig
from tilemesh.model.documents import attend_within, document_places
from tilemesh.model.loss import loss_sum
from tilemesh.model.transformer import Transformer
from tilemesh.runs.files import read_object
from tilemesh.runs.metrics import latest
from tilemesh.train.rows import rows

END = 0
ROTARY = ModelConfig(layers=2, width=16, heads=4, kv_heads=2, vocabulary=32, context=24, norm="rmsnorm", mlp_width=32,
                     positions="rotary", activation="swiglu", biases=False)  # fmt: skip
LEARNED = ModelConfig(layers=2, width=16, heads=2, vocabulary=32, context=24)
WINDOWED = dataclasses.replace(ROTARY, window=3)


def test_where_documents_begin() -> None:
    places = document_places(torch.tensor([[5, END, -7, 7, END, -9], [END, -1 - END, -2, 2, 3, 4]]))
    assert places.positions_BT.tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 2, 3]]
    assert places.number_BT.tolist() == [[1, 1, 2, 2, 2, 3], [1, 2, 3, 3, 3, 3]]
    assert places.starts.tolist() == [0, 2, 5, 6, 7, 8, 12]


def marked(tokens_BT: torch.Tensor, begins: list[int]) -> torch.Tensor:
    """Tokens of one row with those marked that begin a document."""
    tokens_BT = tokens_BT.clone()
    tokens_BT[:, begins] = -1 - tokens_BT[:, begins]
    return tokens_BT


@pytest.mark.parametrize("config", [ROTARY, LEARNED, WINDOWED], ids=["rotary", "learned", "window"])
def test_a_packed_document_is_what_it_would_be_alone(config: ModelConfig) -> None:
    model = Transformer(config, seed=1, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    lengths = [5, 9, 1, 7]
    documents = [torch.randint(1, 32, (length,), generator=draw) for length in lengths]
    documents[1][4] = END  # as some chat templates end every answer
    packed = torch.cat([torch.cat([document, torch.tensor([END])]) for document in documents])[None, :24]
    together = model(marked(packed, [6, 16, 18]), marked=True)
    begin = 0
    for document in documents:
        end = min(begin + len(document) + 1, 24)
        alone = model(packed[:, begin:end])
        torch.testing.assert_close(together[:, begin:end], alone, rtol=1e-12, atol=1e-12)
        begin = end
    assert not torch.allclose(together, model(packed))


@pytest.mark.parametrize("window", [0, 3])
def test_both_ways_of_attending_agree_with_their_gradients(window: int) -> None:
    tokens = torch.randint(-1, 3, (3, 12), generator=torch.Generator().manual_seed(2))
    places = document_places(tokens)
    found = []
    for end_to_end in (False, True):
        draw = torch.Generator().manual_seed(3)
        q, k, v = (
            torch.randn(3, heads, 12, 8, generator=draw, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)
        )
        y = attend_within(q, k, v, places, window, end_to_end)
        y.square().sum().backward()
        found.append([y, q.grad, k.grad, v.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_the_loss_is_that_of_the_documents_by_themselves() -> None:
    """Two documents in one row, and the same two in rows of their own, padded: one loss."""
    model = Transformer(ROTARY, seed=1, dtype=torch.float64)
    packed = marked(torch.tensor([[3, 4, 5, END, 6, 7, END, 9]]), [4, 7])
    targets = torch.tensor([[4, 5, END, -100, 7, END, -100, -100]])
    together = loss_sum(model(packed, marked=True), targets)
    rows = torch.tensor([[3, 4, 5, END], [6, 7, END, END]])
    wanted = torch.tensor([[4, 5, END, -100], [7, END, -100, -100]])
    apart = loss_sum(model(rows), wanted)
    torch.testing.assert_close(together, apart)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("documents")
    records = [{"text": f"{number}: " + "fox " * (number % 9)} for number in range(300)]
    (place / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "x" * (n % 20)}]}
        for n in range(300)
    ]
    (place / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chats))
    write_chat_tokenizer(place / "zephyr", "zephyr")
    return place


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_every_layout_trains_what_one_process_trains(folder: Path, tmp_path: Path, positions: str) -> None:
    sets = f"data.packing=documents,model.positions={positions},plan.precision=fp64,train.steps=3,sample.tokens=0"
    source = str(folder / "text.jsonl")
    trained(made(source, "dp=1,tp=1", sets), tmp_path / "alone")
    alone = state(tmp_path / "alone", 3)
    plain = tmp_path / "stream"
    trained(made(source, "dp=1,tp=1", sets.replace("documents", "stream")), plain)
    assert losses(plain) != losses(tmp_path / "alone")
    sliced = "plan.schedule=terapipe,plan.slices=3,plan.accumulation=4"
    layouts = [f"tp=2,pp=2;{sliced},plan.sequence_parallel=true,plan.recompute=full"]
    if positions == "rotary":
        layouts += ["dp=2,tp=2", "dp=2,tp=1;plan.zero=3", "pp=2;plan.accumulation=4"]
    for number, layout in enumerate(layouts):
        mesh, _, more = layout.partition(";")
        trained(made(source, mesh, sets, *([more] if more else [])), tmp_path / str(number))
        for name, value in state(tmp_path / str(number), 3).items():
            torch.testing.assert_close(value, alone[name], rtol=1e-7, atol=1e-9, msg=f"{layout}: {name}")


@pytest.mark.parametrize(
    "sets",
    [
        "data.packing=none,data.source={}/text.jsonl",
        pytest.param("data.packing=documents,data.chat=true,data.source={}/chat.jsonl", marks=pytest.mark.slow),
        pytest.param("data.packing=none,data.chat=true,data.source={}/chat.jsonl", marks=pytest.mark.slow),
        "data.packing=documents,data.chat=true,data.source={0}/chat.jsonl,data.tokenizer={0}/zephyr/tokenizer.json",
        "data.packing=none,data.chat=true,data.source={0}/chat.jsonl,data.tokenizer={0}/zephyr/tokenizer.json",
        "data.mixture=[{}/text.jsonl=3,stdlib=1]",
    ],
)
def test_a_run_that_was_stopped_goes_on_with_the_same_sequences(folder: Path, tmp_path: Path, sets: str) -> None:
    config = made("stdlib", "dp=2,tp=1", sets.format(folder), "train.steps=4,sample.tokens=0,checkpoint.every=2")
    trained(config, tmp_path / "whole")
    trained(config, tmp_path / "run", stop_after=2)
    # On another layout, which takes the same sequences.
    again = dataclasses.replace(
        config, plan=dataclasses.replace(config.plan, dp=1, microbatch=2 * config.plan.microbatch)
    )
    trained(again, tmp_path / "run", resume=True)
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert [ours[step] for step in (1, 2)] == [theirs[step] for step in (1, 2)]
    assert [ours[step] for step in (3, 4)] == pytest.approx([theirs[step] for step in (3, 4)], rel=1e-5)


def test_padding_is_no_throughput(tmp_path: Path) -> None:
    """Documents of seven bytes and their end are sequences of seven tokens, whatever the context has room for."""
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{number:07d}"}}\n' for number in range(500)))
    sets = f"data.packing=none,data.source={tmp_path}/text.jsonl,train.steps=6,checkpoint.every=0,evaluate.every=0"
    trained(made("", "dp=2,tp=1", f"{sets},sample.tokens=0"), tmp_path / "run")
    lines = [line for line in latest(tmp_path / "run") if line["kind"] == "step"]
    for count in range(1, 7):
        median = sorted(line["seconds"] for line in lines[:count])[count // 2]
        assert lines[count - 1]["tokens_per_s"] == pytest.approx(8 * 7 / median)
    summary = read_object(tmp_path / "run" / "summary.json")
    (throughput,) = [row for row in rows(summary, {}) if row.name == "throughput"]
    assert throughput.measured is not None
    assert throughput.measured.median == pytest.approx(8 * 7 / summary["step_time_s"]["median"])
