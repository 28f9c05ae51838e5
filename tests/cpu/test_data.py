"""Sources, streams over shards, held-out text, and the shards that `data prepare` writes."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.core.errors import RunError, UsageError
from tilemesh.data.config import DataConfig
from tilemesh.data.corpus import EncodedDocument, check_vocabulary, is_held_out, open_corpus, split_documents
from tilemesh.data.order import Order
from tilemesh.data.prepare import prepare
from tilemesh.data.stream import Stream, batch
from tilemesh.data.tokenizer import open_tokenizer
from tilemesh.train.export import byte_tokenizer


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), context=st.integers(1, 17), seed=st.integers(0, 99)
)
def test_samples_cover_a_stream_whatever_its_shards(lengths: list[int], context: int, seed: int) -> None:
    whole = np.random.default_rng(seed).integers(0, 256, sum(lengths)).astype(np.uint8)
    stream = Stream(tuple(np.split(whole, np.cumsum(lengths)[:-1])))
    for index in range(stream.samples(context)):
        sample = stream.sample(index, context)
        assert np.array_equal(sample, whole[index * context : index * context + context + 1])
    assert stream.samples(context) * context + 1 <= stream.length or stream.samples(context) == 0


def test_a_batch_is_the_rows_of_a_position() -> None:
    stream, order = Stream((np.arange(101, dtype=np.uint16),)), Order(10, seed=3)
    whole = batch(stream, order, 16, range(8), 10)
    assert whole.shape == (8, 11)
    assert np.array_equal(batch(stream, order, 16, range(4, 8), 10), whole[4:])
    assert np.array_equal(whole[:, 1:], whole[:, :-1] + 1)


def test_the_standard_library_is_text_and_partly_held_out() -> None:
    corpus = open_corpus(DataConfig())
    assert corpus.train.length > 3_000_000
    assert 0.002 < corpus.held_out.length / corpus.train.length < 0.1
    assert b"import" in corpus.train.parts[0][:200_000].tobytes()
    assert corpus.train.fingerprint() == open_corpus(DataConfig()).train.fingerprint()
    assert corpus.train.fingerprint() != corpus.held_out.fingerprint()


def test_of_many_documents_at_least_one_is_held_out() -> None:
    pieces = [EncodedDocument(f"{number}", np.full(3, number, np.uint16), None, 0) for number in range(2000)]
    is_held = [is_held_out(piece.name, 0.02) for piece in pieces]
    none_by_name = [piece for piece, is_it in zip(pieces, is_held, strict=True) if not is_it][:60]
    train, held = split_documents(none_by_name, 0.02)
    assert (train.length, held.length) == (59 * 3, 3)
    assert split_documents(none_by_name[::-1], 0.02)[1].parts[0].tolist() == held.parts[0].tolist()
    assert split_documents(none_by_name, 0.0)[1].length == 0
    by_name = [piece for piece, is_it in zip(pieces, is_held, strict=True) if is_it]
    assert split_documents([*none_by_name, *by_name], 0.02)[1].length == 3 * len(by_name)


def test_a_file_a_folder_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    (tmp_path / "b.md").write_bytes(b"y" * 500)
    (tmp_path / "c.dat").write_bytes(b"\0\1\2")
    one = open_corpus(DataConfig(source=str(tmp_path / "a.txt"), held_out=0.1))
    assert (one.train.length, one.held_out.length) == (901, 100)
    both = open_corpus(DataConfig(source=str(tmp_path), held_out=0.0))
    assert both.train.parts[0].tobytes() == b"x" * 1000 + b"\0" + b"y" * 500 + b"\0"
    assert open_corpus(DataConfig(source=str(tmp_path), pattern="*.md", held_out=0)).train.length == 501
    with pytest.raises(UsageError, match="does not exist"):
        open_corpus(DataConfig(source=str(tmp_path / "none")))
    with pytest.raises(UsageError, match=r"set data\.pattern"):
        open_corpus(DataConfig(source=str(tmp_path), pattern="*.rst"))


def test_prepared_shards_are_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 256)) * 20)
    source = DataConfig(source=str(tmp_path / "a.txt"), held_out=0.1)
    meta = prepare(source, tmp_path / "shards", shard_tokens=1000)
    assert meta["dtype"] == "uint8"
    assert len(meta["files"]) == 6
    direct, mapped = open_corpus(source), open_corpus(DataConfig(source=str(tmp_path / "shards")))
    for ours, theirs in ((direct.train, mapped.train), (direct.held_out, mapped.held_out)):
        assert np.array_equal(np.concatenate(ours.parts), np.concatenate(theirs.parts))
    assert all(isinstance(part, np.memmap) for part in mapped.train.parts)
    assert mapped.tokenizer.decode([104, 105]) == "hi"
    with pytest.raises(UsageError, match="has shards already"):
        prepare(source, tmp_path / "shards")
    (tmp_path / "shards" / "train-00000.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="cut short"):
        open_corpus(DataConfig(source=str(tmp_path / "shards")))


def test_shards_from_elsewhere_are_16_bit_tokens(tmp_path: Path) -> None:
    np.arange(5000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "val.bin")
    corpus = open_corpus(DataConfig(source=str(tmp_path)))
    assert (corpus.train.length, corpus.held_out.length) == (5000, 100)
    with pytest.raises(UsageError, match=r"set data\.tokenizer"):
        corpus.tokenizer.encode(b"text")
    documents = DataConfig(source=str(tmp_path), packing="documents")
    with pytest.raises(UsageError, match="nobody said which token ends a document"):
        open_corpus(documents)
    (tmp_path / "meta.json").write_text(json.dumps({"end": 50}))
    corpus = open_corpus(documents)
    assert corpus.train.begins(corpus.tokenizer.end).tolist() == [0, 51]
    (tmp_path / "meta.json").write_text(json.dumps({"end": "50"}))
    with pytest.raises(UsageError, match="end is '50'"):
        open_corpus(documents)
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": "int3"}))
    with pytest.raises(UsageError, match="dtype is 'int3'"):
        open_corpus(DataConfig(source=str(tmp_path)))


def test_a_tokenizers_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "<eos>": 2, "?": 3}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    (tmp_path / "t.txt").write_text("one two one three " * 100)
    source = DataConfig(source=str(tmp_path / "t.txt"), tokenizer=path, held_out=0.0)
    corpus = open_corpus(source)
    assert corpus.train.sample(0, 4).tolist() == [0, 1, 0, 3, 0]
    assert corpus.train.parts[0][-1] == 2
    prepare(source, tmp_path / "shards")
    again = open_corpus(DataConfig(source=str(tmp_path / "shards"), held_out=0.0))
    assert again.tokenizer.decode([0, 1]) == "one two"
    with pytest.raises(UsageError, match="the tokenizer has 4 tokens and the model's vocabulary is 3"):
        check_vocabulary(corpus.tokenizer, 3)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UsageError, match="not a tokenizers file"):
        open_tokenizer(tmp_path / "broken.json")
    with pytest.raises(UsageError, match="does not exist"):
        open_tokenizer(tmp_path / "none.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(RunError, match=r"pip install .tilemesh\[hf\]"):
        open_tokenizer(path)


def test_shards_keep_the_tokenizer_that_they_were_prepared_with(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "t.txt").write_text("one two " * 100)
    files = {}
    for name, words in (("a", ("one", "two")), ("b", ("two", "one"))):
        vocabulary = {word: number for number, word in enumerate([*words, "<eos>"])}
        inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<eos>"))
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        inner.save(str(tmp_path / f"{name}.json"))
        files[name] = tmp_path / f"{name}.json"
    (tmp_path / "bytes.json").write_text(json.dumps(byte_tokenizer()))
    source = DataConfig(source=str(tmp_path / "t.txt"))
    prepare(dataclasses.replace(source, tokenizer=files["a"]), tmp_path / "words")
    prepare(source, tmp_path / "bytes")
    for shards, same, other in (("words", "a", "b"), ("bytes", "bytes", "a")):
        data = DataConfig(source=str(tmp_path / shards), tokenizer=tmp_path / f"{same}.json")
        assert open_corpus(data).tokenizer.vocabulary == (3 if same == "a" else 256)
        with pytest.raises(UsageError, match="were prepared with"):
            open_corpus(dataclasses.replace(data, tokenizer=files[other]))


def test_a_folder_in_place_of_a_tokenizer_is_said_to_be_one(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(UsageError, match=r"is a folder: expected a tokenizer.json file; it has no tokenizer.json"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"is a folder: expected a tokenizer.json file; give .*/tokenizer.json"):
        open_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        open_tokenizer(tmp_path / "none")
