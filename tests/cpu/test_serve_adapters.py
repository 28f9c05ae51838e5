"""Adapters per request: as each merged alone, in one batch; loaded, swapped and dropped while requests run."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilemesh.compress.quantize import quantize
from tilemesh.core.access import server_access
from tilemesh.core.errors import RunError, UsageError
from tilemesh.model import huggingface
from tilemesh.model.adapter import LoraConfig, adapted_modules
from tilemesh.model.config import ModelConfig
from tilemesh.model.kinds import compressed, projections
from tilemesh.model.lora import PEFT_CONFIG, PEFT_WEIGHTS, read_adapter, save_adapter
from tilemesh.model.transformer import Transformer
from tilemesh.serve import Engine, Replicas, Sampling
from tilemesh.serve.jobs import AnswerPart

CONFIG = ModelConfig(
    layers=2, width=32, heads=4, kv_heads=2, mlp_width=64, vocabulary=259, context=96, norm="rmsnorm",
    positions="rotary", activation="swiglu", biases=False, tied=False,
)  # fmt: skip
ALL = ("fc_q", "fc_k", "fc_v", "fc_o", "fc_in", "fc_gate", "fc_out")
GREEDY = Sampling(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)


def model_of(seed: int = 2) -> Transformer:
    model = Transformer(CONFIG, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def write_adapter(folder: Path, seed: int, rank: int = 4, targets: tuple[str, ...] = ALL) -> Path:
    """As PEFT lays it down, with weights that change what is said."""
    lora, shapes = LoraConfig(rank=rank, alpha=2.0 * rank, targets=targets), dict(model_of().named_parameters())
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in adapted_modules(CONFIG, lora):
        outputs, inputs = shapes[f"{name}.weight"].shape
        tensors[f"{name}.lora_a"] = torch.randn(rank, inputs, generator=draw) * 0.1
        tensors[f"{name}.lora_b"] = torch.randn(outputs, rank, generator=draw) * 0.1
    save_adapter(tensors, CONFIG, lora, folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, eight adapters of several ranks and targets, and the model with each of them merged."""
    place = tmp_path_factory.mktemp("adapters")
    huggingface.save(model_of(), place / "base")
    for number in range(8):
        rank, targets = (2, 4, 8)[number % 3], (ALL, ("fc_q", "fc_v"), ("fc_k", "fc_out"))[number % 3]
        write_adapter(place / f"a{number}", number, rank, targets)
        huggingface.save(merged(place, f"a{number}"), place / f"merged{number}")
    return place


def merged(place: Path, name: str) -> Transformer:
    """By PEFT's own definition, read from its files: W + alpha / r B A."""
    model, told = model_of(), json.loads((place / name / PEFT_CONFIG).read_text())
    attention = {f"{letter}_proj": f"attention.fc_{letter}" for letter in "qkvo"}
    theirs = attention | {"gate_proj": "mlp.fc_gate", "up_proj": "mlp.fc_in", "down_proj": "mlp.fc_out"}
    tensors = load_file(place / name / PEFT_WEIGHTS)
    with torch.no_grad():
        for key, low in tensors.items():
            if key.endswith("lora_A.weight"):
                words = key.split(".")
                weight = model.get_submodule(f"layers.{words[4]}.{theirs[words[-3]]}").weight
                high = tensors[key.replace("lora_A", "lora_B")]
                weight += (told["lora_alpha"] / told["r"] * high.double() @ low.double()).float()
    return model


def prompts_of(count: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(1, 256) for _ in range(draw.randrange(4, 24))] for _ in range(count)]


def asked(number: int) -> Sampling:
    return dataclasses.replace(GREEDY, adapter=f"a{number}")


def answers(
    engine: Engine, prompts: list[list[int]], each: list[Sampling]
) -> list[tuple[tuple[int, ...], list[float]]]:
    return [
        (made.answers[0].tokens, [told.logprob for told in made.answers[0].logprobs])
        for made in engine.generate(prompts, each)
    ]


def load_all(engine: Engine, place: Path) -> None:
    for number in range(8):
        engine.load_adapter(f"a{number}", place / f"a{number}")


@pytest.fixture(scope="module")
def alone(folders: Path) -> list[tuple[tuple[int, ...], list[float]]]:
    """What each merged model says to its prompt, the plain one last."""
    expected = []
    for name, prompt in zip([*(f"merged{number}" for number in range(8)), "base"], prompts_of(9), strict=True):
        with Engine(folders / name, pages=60, page_tokens=4) as engine:
            expected += answers(engine, [prompt], [GREEDY])
    return expected


def same(
    made: list[tuple[tuple[int, ...], list[float]]],
    expected: list[tuple[tuple[int, ...], list[float]]],
    most: float = 1e-5,
) -> None:
    """Float32: the same sums in another order."""
    for (tokens, logprobs), (their_tokens, their_logprobs) in zip(made, expected, strict=True):
        assert tokens == their_tokens
        assert logprobs == pytest.approx(their_logprobs, abs=most)


@pytest.mark.parametrize("settings", [{}, {"packed": False}, {"invariant": True}, {"chunk_tokens": 5, "pages": 40}])
def test_eight_adapters_in_one_batch_answer_as_each_merged_alone(
    folders: Path, alone: list[Any], settings: dict[str, Any]
) -> None:
    """And requests without one beside them."""
    options = {"pages": 120, "page_tokens": 4, "adapters": 8, "adapter_rank": 8} | settings
    with Engine(folders / "base", **options) as engine:
        load_all(engine, folders)
        same(answers(engine, prompts_of(9), [*map(asked, range(8)), GREEDY]), alone)


@pytest.mark.slow
def test_two_ranks_hold_adapters(folders: Path, alone: list[Any]) -> None:
    with Engine(folders / "base", ranks=2, pages=120, page_tokens=4, adapters=8, adapter_rank=8) as engine:
        load_all(engine, folders)
        same(answers(engine, prompts_of(9), [*map(asked, range(8)), GREEDY]), alone)


def test_adapters_over_weights_of_4_bits(folders: Path, tmp_path: Path) -> None:
    """Against the same codes decoded, with the adapter merged into what they mean."""
    coded = quantize(model_of(), "int4-g16")
    assert len(compressed(coded)) == 14
    huggingface.save(coded, tmp_path / "int4")
    expected = []
    for number, prompt in enumerate(prompts_of(8)):
        plain, adapter = model_of(), read_adapter(folders / f"a{number}", CONFIG)
        with torch.no_grad():
            for name, layer in projections(coded):
                low, high = adapter.tensors.get(name, (torch.zeros(1, 1), torch.zeros(1, 1)))
                weight = layer.kind.dense(layer)
                plain.get_submodule(name).weight.copy_(weight + high @ low if name in adapter.tensors else weight)
        huggingface.save(plain, tmp_path / f"{number}")
        with Engine(tmp_path / f"{number}", pages=60, page_tokens=4) as engine:
            expected += answers(engine, [prompt], [GREEDY])
    with Engine(tmp_path / "int4", pages=120, page_tokens=4, adapters=8, adapter_rank=8) as engine:
        load_all(engine, folders)
        # Codes of few rows meet activations of 16 bits: each product is off by up to 2^-15 of a row's largest.
        same(answers(engine, prompts_of(8), list(map(asked, range(8)))), expected, most=1e-4)


def test_pages_of_one_adapter_are_never_anothers(folders: Path) -> None:
    prompt = prompts_of(1)[0] * 2
    with Engine(folders / "base", pages=120, page_tokens=4, adapters=2) as engine:
        engine.load_adapter("a0", folders / "a0")
        engine.load_adapter("a1", folders / "a1")
        each = [asked(0), asked(1), GREEDY]
        first = [next(iter(engine.generate([prompt], one))) for one in each]
        assert [made.found_tokens for made in first] == [0, 0, 0]
        again = [next(iter(engine.generate([prompt], one))) for one in each]
        assert all(made.found_tokens > 0 for made in again)
        assert [made.answers[0].tokens for made in again] == [made.answers[0].tokens for made in first]
        assert len({made.answers[0].tokens for made in first}) == 3


def test_a_name_gets_other_weights_and_slots_are_taken_again(folders: Path) -> None:
    prompt = prompts_of(1)[0]
    with Engine(folders / "base", pages=120, page_tokens=4, adapters=1, adapter_rank=4) as engine:
        assert answers(engine, [prompt], [GREEDY])
        for number in (0, 1, 0):  # the same name, in the only slot
            engine.load_adapter("a0", folders / f"a{number}")
            with Engine(folders / f"merged{number}", pages=60) as other:
                same(answers(engine, [prompt], [asked(0)]), answers(other, [prompt], [GREEDY]))
        with pytest.raises(UsageError, match="1 adapters are held, which is all there is room for"):
            engine.load_adapter("a1", folders / "a1")
        engine.drop_adapter("a0")
        assert not engine.adapters
        with pytest.raises(UsageError, match="unknown adapter 'a0'"):
            engine.generate([prompt], asked(0))
        engine.load_adapter("a1", folders / "a1")
        with pytest.raises(UsageError, match="has rank 8 and there is room for 4: start with --adapter-rank 8"):
            engine.load_adapter("a2", folders / "a2")
    with Engine(folders / "base", pages=60) as engine:
        with pytest.raises(UsageError, match="no room for adapters"):
            engine.load_adapter("a0", folders / "a0")
        with pytest.raises(UsageError, match="unknown adapter 'a0'"):  # it had got the model's own vector
            engine.embed(prompt, adapter="a0")


def test_a_request_whose_adapter_was_just_dropped_leaves_nothing(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(folders / "base", pages=60, adapters=1) as engine:
        monkeypatch.setattr(engine, "check", lambda prompt, sampling: 12)  # it was there still
        with pytest.raises(UsageError, match="unknown adapter 'a0'"):
            engine.submit([1], asked(0), lambda part: None)
        assert engine._unfinished == 0


def test_a_request_that_has_not_begun_keeps_its_adapters_slot(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: SimpleQueue[AnswerPart] = SimpleQueue()
    with Engine(folders / "base", pages=60, adapters=1) as engine:
        engine.load_adapter("a0", folders / "a0")

        def submit_first() -> None:  # between taking orders and doing what they said
            monkeypatch.undo()
            engine.submit(prompts_of(1)[0], asked(0), heard.put)

        monkeypatch.setattr(engine._core, "end_late", submit_first)
        with pytest.raises(UsageError, match="1 adapters are held"):
            engine.load_adapter("a0", folders / "a1")
        while heard.get(timeout=60).finish is None:
            pass


def test_an_adapter_is_in_all_replicas_or_in_none(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Replicas(folders / "base", 2, pages=60, adapters=1) as replicas:
        first, second = replicas.engines
        first.load_adapter("a1", folders / "a1")
        assert not replicas.adapters  # one that not all have is not listed
        first.drop_adapter("a1")
        second.load_adapter("a1", folders / "a1")
        with pytest.raises(UsageError, match="1 adapters are held"):
            replicas.load_adapter("a0", folders / "a0")
        assert not first.adapters
        second.drop_adapter("a1")
        replicas.load_adapter("a0", folders / "a0")

        def fail(*_: object) -> None:
            raise RunError("the engine is closed")

        monkeypatch.setattr(second, "put_adapter", fail)
        with pytest.raises(RunError, match="is closed"):
            replicas.load_adapter("a0", folders / "a1")
        assert [engine.adapters["a0"].folder for engine in replicas.engines] == [str(folders / "a0")] * 2
        with monkeypatch.context() as ended:
            ended.setattr(first, "drop_adapter", fail)
            with pytest.raises(RunError, match="is closed"):
                replicas.drop_adapter("a0")
        assert not second.adapters  # the other one serves on
        monkeypatch.undo()
        replicas.load_adapter("a0", folders / "a0")
        first.drop_adapter("a0")
        replicas.drop_adapter("a0")
        assert not second.adapters
        with pytest.raises(UsageError, match="unknown adapter 'a0'"):
            replicas.drop_adapter("a0")


def test_adapters_stay_through_sleep_and_new_weights(folders: Path) -> None:
    prompts = prompts_of(2)
    with Engine(folders / "base", pages=120, page_tokens=4, adapters=2) as engine:
        engine.load_adapter("a0", folders / "a0")
        expected = answers(engine, prompts, [asked(0), GREEDY])
        for level in (1, 2):
            engine.sleep(level)
            with pytest.raises(UsageError, match="the engine sleeps"):
                engine.load_adapter("a1", folders / "a1")
            engine.wake()
            assert answers(engine, prompts, [asked(0), GREEDY]) == expected
        engine.update_weights(model_of(3))
        assert answers(engine, prompts, [asked(0), GREEDY]) != expected
        engine.update_weights(folders / "base")
        assert answers(engine, prompts, [asked(0), GREEDY]) == expected
        engine._weights._on_gpu = True  # where an update takes the memory of all weights again, as zeros
        engine.sleep(2)
        with torch.inference_mode():
            for parameter in engine.served.model.parameters():
                parameter.zero_()
        engine.update_weights(folders / "base")
        engine.wake()
        assert answers(engine, prompts, [asked(0), GREEDY]) == expected


def test_what_is_no_adapter_of_this_model_is_refused_in_one_line(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no adapter_config.json: expected a folder that PEFT wrote"):
        read_adapter(tmp_path, CONFIG)
    told, tensors = json.loads((folders / "a0" / PEFT_CONFIG).read_text()), load_file(folders / "a0" / PEFT_WEIGHTS)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"peft_type": "IA3"}, "peft_type is 'IA3': only LORA is served"),
        ({"use_dora": True}, "use_dora is True: only False is served"),
        ({"r": 3}, r"expected \(3, 64\) and \(32, 3\): it was made for another model"),
    ]
    for change, why in wrong:
        (tmp_path / PEFT_CONFIG).write_text(json.dumps(told | change))
        save_file(tensors, tmp_path / PEFT_WEIGHTS)
        with pytest.raises(UsageError, match=why):
            read_adapter(tmp_path, CONFIG)
    (tmp_path / PEFT_CONFIG).write_text(json.dumps(told))
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": torch.zeros(2, 32)}, tmp_path / PEFT_WEIGHTS)
    with pytest.raises(UsageError, match=r"lm_head.lora_A.weight, which is no adapter of a matrix that is served"):
        read_adapter(tmp_path, CONFIG)


def test_requests_name_an_adapter_as_their_model(folders: Path) -> None:
    """Over HTTP: loaded and dropped with a key, listed, chosen, and unknown names refused."""
    make_app: Any = pytest.importorskip("tilemesh.serve.http").make_app
    testclient: Any = pytest.importorskip("starlette.testclient")
    access = server_access("127.0.0.1", ["key-of-anna"], ["testserver"], [], False)
    prompt = prompts_of(1)[0]
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    with Engine(folders / "base", pages=120, page_tokens=4, adapters=2) as engine:
        open_client = testclient.TestClient(
            make_app(engine, access=server_access("127.0.0.1", [], ["testserver"], [], False))
        )
        load = {"lora_name": "sql", "lora_path": str(folders / "a0")}
        assert open_client.post("/v1/load_lora_adapter", json=load).status_code == 403
        client = testclient.TestClient(make_app(engine, access=access), headers={"Authorization": "Bearer key-of-anna"})
        assert (
            client.post("/v1/load_lora_adapter", json={"lora_name": "sql"})
            .json()["error"]["message"]
            .startswith("lora_path is missing")
        )
        assert client.post("/v1/load_lora_adapter", json=load).json() == {"adapters": ["sql"]}
        listed = client.get("/v1/models").json()["data"]
        assert [(model["id"], model.get("parent")) for model in listed] == [("base", None), ("sql", "base")]
        assert client.get("/v1/models/sql").json()["root"] == str(folders / "a0")
        told = {name: client.post("/v1/completions", json=body | {"model": name}).json() for name in ("base", "sql")}
        assert told["sql"]["model"] == "sql"
        logprobs = {name: made["choices"][0]["logprobs"]["token_logprobs"] for name, made in told.items()}
        assert logprobs["sql"] != pytest.approx(logprobs["base"], abs=1e-3)
        with Engine(folders / "merged0", pages=60) as other:
            ((_, expected),) = answers(other, [prompt], [GREEDY])
        assert logprobs["sql"] == pytest.approx(expected[:6], abs=1e-5)
        with pytest.raises(UsageError, match="called 'sql', as the model is"):
            make_app(engine, "sql")
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).json() == {"adapters": []}
        named = testclient.TestClient(make_app(engine, "sql", access=access), headers=client.headers)
        assert named.post("/v1/load_lora_adapter", json=load).status_code == 400  # its requests were the model's
        refused = client.post("/v1/completions", json=body | {"model": "sql"})
        assert refused.status_code == 404
        assert "model 'sql' is not served here: there is 'base'" in refused.json()["error"]["message"]
