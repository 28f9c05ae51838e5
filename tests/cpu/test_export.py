"""From a Hugging Face folder through a run to another: weights, tokenizer and special tokens come along."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tilemesh as tm
from tilemesh.core.errors import UsageError
from tilemesh.data.chat import PLAIN_TEMPLATE
from tilemesh.data.config import DataConfig
from tilemesh.data.corpus import chat_template_of, tokenizer_of
from tilemesh.data.prepare import prepare
from tilemesh.kernels.accuracy import excess, unit
from tilemesh.model import huggingface
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.runs import names
from tilemesh.serve.load import load_served
from tilemesh.serve.write import generate
from tilemesh.train.export import export

TEXT = "the quick brown fox jumps over the lazy dog; " * 60
SHORT = (
    "train.steps=1,train.batch=2,train.device=cpu,plan.dp=1,plan.tp=1,evaluate.every=0,sample.tokens=0,train.context=16"
)
QWEN = ModelConfig(layers=1, width=16, heads=2, kv_heads=1, vocabulary=96, context=24, norm="rmsnorm", head_width=12,
                   positions="rotary", activation="swiglu", biases=False, qk_norm="head")  # fmt: skip


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", minversion="4.50")


@pytest.fixture(scope="module")
def folder(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer, special tokens and a chat template, as people download them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=90, special_tokens=["<s>", "</s>", "<pad>"]))
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    wrapped.chat_template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    place = tmp_path_factory.mktemp("hub")
    wrapped.save_pretrained(place / "model")
    huggingface.save(Transformer(QWEN, seed=1), place / "model")
    config = json.loads((place / "model" / "config.json").read_text())
    (place / "model" / "config.json").write_text(
        json.dumps(config | {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 2})
    )
    (place / "text.txt").write_text(TEXT)
    return place


def trained(folder: Path, *sets: str, init: Path | None = None) -> Path:
    config = tm.train.load_config(sets=[SHORT, f"data.source={folder / 'text.txt'}", *sets], init=init)
    return tm.train.fit(config, run=folder / f"run-{len(list(folder.iterdir()))}", init=init).folder


def test_a_fine_tuned_model_keeps_its_family_tokenizer_and_special_tokens(
    transformers: Any, folder: Path, tmp_path: Path
) -> None:
    run = trained(folder, init=folder / "model")
    assert (run / names.CARRIED / "tokenizer.json").is_file()
    assert export(run, tmp_path / "out") == 1
    before, after = (
        transformers.AutoTokenizer.from_pretrained(place) for place in (folder / "model", tmp_path / "out")
    )
    assert after("the quick dog")["input_ids"] == before("the quick dog")["input_ids"]
    assert (after.bos_token, after.eos_token, after.pad_token) == ("<s>", "</s>", "<pad>")
    chat = [{"role": "user", "content": "fox"}]
    assert after.apply_chat_template(chat, tokenize=False) == "<s>fox</s>"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config = model.config
    assert (config.model_type, config.bos_token_id, config.eos_token_id, config.pad_token_id) == ("qwen3", 0, [1, 2], 2)
    ids = after("the lazy", return_tensors="pt")["input_ids"]
    ours = huggingface.load(tmp_path / "out").eval()
    with torch.no_grad():
        # Two computations of the same in float32: theirs may be off by twice what ours is, or 16 roundings.
        mine, theirs, exact = ours(ids), model.eval()(ids).logits, ours.double()(ids)
        allowed = 2 * (mine.double() - exact).abs().max() + 16 * unit(torch.float32) * exact.abs().max()
        assert (wrong := excess(theirs, exact, allowed)) is None, wrong
    # The folder is one of ours, too: text can be written from it as from the run.
    texts = [generate(place, "the ", tokens=4, temperature=0) for place in (run, tmp_path / "out")]
    assert texts[0] == texts[1]


def test_a_run_on_conversations_is_served_with_its_chat_template_and_ends(folder: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "brown fox"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 60)
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    sets = f"data.chat=true,data.packing=none,data.source={tmp_path / 'chats.jsonl'}"
    run = trained(folder, sets, init=folder / "model")
    served = load_served(run)
    assert served.ends == {1, 5}
    assert served.chat_template == (folder / "model" / "chat_template.jinja").read_text()
    assert (served.special_tokens or {})["bos_token"] == "<s>"
    assert load_served(folder / "model").ends == {1, 5}  # config.json has 1 and 2: transformers follows the other file
    (folder / "model" / "generation_config.json").unlink()
    assert load_served(folder / "model").ends == {1, 2}
    # Shards keep what their tokens mean: the same template, and a plain one for conversations as bytes.
    data = DataConfig(source=str(tmp_path / "chats.jsonl"), chat=True, tokenizer=folder / "model" / "tokenizer.json")
    prepare(data, tmp_path / "tokens")
    prepare(dataclasses.replace(data, tokenizer=None), tmp_path / "bytes")
    for name, template in (("tokens", served.chat_template), ("bytes", PLAIN_TEMPLATE)):
        shards = DataConfig(source=str(tmp_path / name))
        assert chat_template_of(shards, tokenizer_of(shards))[0] == template
    text = DataConfig(source=str(folder / "text.txt"))
    assert chat_template_of(text, tokenizer_of(text))[0] is None


def test_a_model_of_bytes_gets_a_tokenizer_of_bytes(transformers: Any, folder: Path, tmp_path: Path) -> None:
    run = trained(folder, "model.layers=1,model.width=16,model.heads=2,model.kv_heads=2,model.mlp_width=16")
    export(run, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "naïve Ā €\n\tno  two\x00" + "".join(map(chr, range(128)))
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode()), clean_up_tokenization_spaces=False) == text
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == 0
    from tilemesh.data.tokenizer import END_BYTE, open_tokenizer

    assert open_tokenizer(tmp_path / "out" / "tokenizer.json").end == END_BYTE  # so that it can be trained further


def test_a_model_trained_with_a_tokenizer_file_gets_that_one(transformers: Any, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text((folder / "model" / "tokenizer.json").read_text())
    tiny = "model.layers=1,model.width=16,model.heads=2,model.kv_heads=2,model.mlp_width=16,model.vocabulary=96"
    run = trained(folder, tiny, f"data.tokenizer={file}")
    export(run, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer("lazy dog")["input_ids"] == theirs("lazy dog")["input_ids"]
    assert tokenizer.eos_token == "</s>"
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == 1
    # The weights can be exported where the tokenizer is no longer there, and that is said.
    file.unlink()
    told: list[str] = []
    export(run, tmp_path / "again", say=told.append)
    assert "no tokenizer is written beside the weights" in told[0]
    assert not (tmp_path / "again" / "tokenizer.json").exists()


def test_from_python_a_model_is_saved_like_the_folder_that_it_came_from(folder: Path, tmp_path: Path) -> None:
    model = huggingface.load(folder / "model")
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    huggingface.save(model, tmp_path / "out", like=tmp_path / "model")
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [1, 2]
    carried = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= carried
    assert not any(name.endswith(".part") for name in carried)


def test_neither_a_model_nor_a_run_is_written_over(folder: Path, tmp_path: Path) -> None:
    run = trained(folder)
    export(run, tmp_path / "out")
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="out is there already and not empty: name a new folder"):
        export(run, tmp_path / "out")
    with pytest.raises(UsageError, match="is the folder of a run: name another"):
        export(run, run)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
