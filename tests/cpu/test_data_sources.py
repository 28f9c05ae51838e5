"""JSONL, Parquet, folders of both, conversations, mixtures, packing; shards written some at a time."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import itertools
import json
import lzma
import signal
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.cli.main import main
from tilemesh.core.errors import RunError, UsageError
from tilemesh.data import prepare as preparing
from tilemesh.data import records
from tilemesh.data.chat import Conversation, Template, read_conversation, template_of
from tilemesh.data.config import DataConfig, check_source
from tilemesh.data.corpus import open_corpus
from tilemesh.data.documents import documents, misnamed_words
from tilemesh.data.prepare import PreparationStoppedError, prepare
from tilemesh.data.samples import IGNORED, PERIOD, Mixture, Samples, apportioned, held_out_samples, train_mixture
from tilemesh.data.stream import Stream
from tilemesh.data.tokenizer import FileTokenizer
from tilemesh.model.loss import IGNORED as MODEL_IGNORED


def written(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


class TestRecords:
    def test_a_field_of_each_line_is_a_document(self, tmp_path: Path) -> None:
        source = written(tmp_path / "a.jsonl", [{"text": "one", "id": 1}, {"text": "zwei"}])
        assert [document.content for document in documents(DataConfig(source=source))] == [b"one", b"zwei"]
        corpus = open_corpus(DataConfig(source=source, held_out=0.0))
        assert corpus.train.parts[0].tobytes() == b"one\0zwei\0"

    def test_a_folder_of_text_and_records(self, tmp_path: Path) -> None:
        written(tmp_path / "b.ndjson", [{"body": "record"}])
        (tmp_path / "a.txt").write_text("text")
        found = list(documents(DataConfig(source=str(tmp_path), field="body")))
        assert [(document.name, document.content) for document in found] == [
            ("a.txt", b"text"),
            ("b.ndjson:1", b"record"),
        ]
        sizes = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert found[-1].read_bytes == sizes

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ('{"body": "x", "id": 2}', r"a\.jsonl:2 has no field 'text': it has body, id; set data.field"),
            ("[1]", r"a\.jsonl:2 is a list: expected one JSON object per record"),
            ('{"text": ', r"a\.jsonl:2 is not JSON"),
            ('{"text": 3}', r"text of .* record 2 is 3: expected text"),
            ('{"text": [{"role": "user"}]}', r"expected text; for conversations set data.chat=true"),
            ("[" * 100_000, r"nested too deeply"),
        ],
    )
    def test_a_record_that_is_not_as_expected_is_named(self, tmp_path: Path, line: str, words: str) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
        source = DataConfig(source=str(tmp_path / "a.jsonl"))
        with pytest.raises(UsageError, match=words):
            list(documents(source))
        with pytest.raises(UsageError, match=words):
            check_source(source)

    @pytest.mark.parametrize("asked", [{}, {"chat": True, "field": "text"}])
    def test_conversations_are_named_where_text_was_expected(self, tmp_path: Path, asked: dict[str, Any]) -> None:
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        source = written(tmp_path / "chats.jsonl", [{"id": 1, "messages": messages}])
        words = "it has id, messages; to read the conversations in it set data.chat=true and data.field=messages"
        with pytest.raises(UsageError, match=words):
            check_source(DataConfig(source=source, **asked))
        check_source(DataConfig(source=source, chat=True, field="messages"))
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table({"id": [1], "messages": [messages]}), tmp_path / "chats.parquet")
        with pytest.raises(UsageError, match=words):
            check_source(DataConfig(source=str(tmp_path / "chats.parquet"), **asked))

    def test_what_is_wrong_in_a_mixture_is_said_of_the_mixture(self, tmp_path: Path) -> None:
        good = written(tmp_path / "good.jsonl", [{"text": "x"}])
        with pytest.raises(UsageError, match=r"^data.mixture '.*gone' does not exist"):
            check_source(DataConfig(mixture=(f"{good}=1", f"{tmp_path / 'gone'}=1")))
        late = tmp_path / "late.jsonl"  # nobody looks so far before reading begins
        late.write_text('{"text": "%s"}\n' % ("x" * 1000) * 2000 + "{}\n")
        with pytest.raises(UsageError, match=r"^data.mixture .*late.jsonl:2001 has no field 'text'"):
            open_corpus(DataConfig(mixture=(f"{good}=1", f"{late}=1")))

    def test_the_first_records_are_looked_at_before_anything_begins(self, tmp_path: Path) -> None:
        source = written(tmp_path / "a.jsonl", [{"prompt": "x", "answer": "y"}])
        with pytest.raises(UsageError, match="has no field 'text': it has prompt, answer"):
            check_source(DataConfig(source=source))
        (tmp_path / "a.jsonl").write_text("\n")
        with pytest.raises(UsageError, match="has no record"):
            check_source(DataConfig(source=source))

    def test_parquet_without_pyarrow_is_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a.parquet").write_bytes(b"PAR1")
        monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
        with pytest.raises(RunError, match="`pyarrow` is not installed: pip install"):
            check_source(DataConfig(source=str(tmp_path / "a.parquet")))

    def test_parquet(self, tmp_path: Path) -> None:
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table({"text": ["one", "zwei"], "id": [1, 2]}), tmp_path / "a.parquet")
        source = DataConfig(source=str(tmp_path / "a.parquet"))
        check_source(source)
        assert [document.content for document in documents(source)] == [b"one", b"zwei"]
        with pytest.raises(UsageError, match="has no field 'body': it has text, id"):
            check_source(DataConfig(source=source.source, field="body"))
        (tmp_path / "b.parquet").write_bytes(b"nothing of the kind")
        with pytest.raises(UsageError, match="is not a Parquet file"):
            check_source(DataConfig(source=str(tmp_path / "b.parquet")))


class TestFormats:
    """A file is read as what it is, or refused with what to do; never as bytes that nobody meant."""

    RECORDS: ClassVar = [{"text": "one", "id": 1}, {"text": "zwei", "tags": ["a", {"b": None}]}]

    def _contents(self, path: Path, **settings: Any) -> list[Any]:
        data = DataConfig(source=str(path), **settings)
        check_source(data)
        read = list(documents(data))
        assert read[-1].read_bytes == path.stat().st_size
        return [document.content for document in read]

    @pytest.mark.parametrize("indent", [None, 2])
    def test_an_array_of_records(self, tmp_path: Path, indent: int | None) -> None:
        path = tmp_path / "a.json"
        path.write_bytes(b"\xef\xbb\xbf\n " + json.dumps(self.RECORDS, indent=indent).encode() + b"\n")
        assert self._contents(path) == [b"one", b"zwei"]
        path.write_text(json.dumps([{"messages": CHAT}]))
        assert self._contents(path, chat=True) == [Conversation(CHAT)]

    @pytest.mark.parametrize("size", [1, 2, 7, 64])
    def test_an_array_is_read_piece_by_piece(self, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        values = [{"text": f'é"\\{number}', "n": [number, -1.5e-3, True, None, {}]} for number in range(40)]
        (tmp_path / "a.json").write_text(json.dumps(values, indent=1))
        monkeypatch.setattr(records, "_READ_CHARACTERS", size)
        assert self._contents(tmp_path / "a.json") == [value["text"].encode() for value in values]

    def test_a_large_array_is_checked_by_its_beginning(self, tmp_path: Path) -> None:
        line = json.dumps({"text": "x" * 1000}) + ","
        (tmp_path / "a.json").write_text("[" + line * 12_000 + "17]")  # 12 MB: the last record is not reached
        check_source(DataConfig(source=str(tmp_path / "a.json")))
        with pytest.raises(UsageError, match="record 12001 is a int: expected one JSON object"):
            list(documents(DataConfig(source=str(tmp_path / "a.json"))))

    def test_lines_and_single_objects_are_records_too(self, tmp_path: Path) -> None:
        written(tmp_path / "lines.json", self.RECORDS)
        assert self._contents(tmp_path / "lines.json") == [b"one", b"zwei"]
        for indent in (None, 2):
            (tmp_path / "one.json").write_text(json.dumps(self.RECORDS[0], indent=indent))
            assert self._contents(tmp_path / "one.json") == [b"one"]

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ('{"rows": [{"text": "x"}]}', r"records under 'rows': expected an array.*jq -c '\.rows\[\]'"),
            ('{\n"body": "x"\n}', r"has no field 'text': it has body; set data.field"),
            ('[{"body": "x"}]', r"record 1 has no field 'text': it has body; set data.field"),
            ('[{"text": "x"} {"text": "y"}]', "record 2 is not JSON: expected a comma"),
            ('[{"text": "x"},]', "record 2 is not JSON"),
            ('[{"text": "x"}, {"te', "record 2 is not JSON"),
            ('[{"text": "x"}', "record 2 is not JSON: expected a comma or the array's end"),
            ('[{"text": "x"}]\n[]', "more after its array"),
            ('["x"]', "is a str: expected one JSON object per record"),
            ("[]", "has no record"),
            ("", "is not JSON"),
            ("[" * 100_000, "nested too deeply"),
            ('[{"n": ' + "1" * 5000 + "}]", "is not JSON"),
            (b'[{"text": "\xff"}]', "is not JSON: 'utf-8' codec"),
        ],
    )
    def test_json_that_is_no_records(self, tmp_path: Path, content: str | bytes, words: str) -> None:
        (tmp_path / "a.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UsageError, match=words):
            check_source(DataConfig(source=str(tmp_path / "a.json")))

    @pytest.mark.parametrize(("ending", "library"), [(".gz", gzip), (".bz2", bz2), (".xz", lzma)])
    def test_compressed_files_are_read(self, tmp_path: Path, ending: str, library: Any) -> None:
        lines = "".join(json.dumps(record) + "\n" for record in self.RECORDS).encode()
        for name, content in (("a.jsonl", lines), ("a.json", json.dumps(self.RECORDS).encode())):
            (tmp_path / (name + ending)).write_bytes(library.compress(content))
            assert self._contents(tmp_path / (name + ending)) == [b"one", b"zwei"]
        text = tmp_path / ("notes.txt" + ending)
        text.write_bytes(library.compress(b"some text" * 1000))
        assert self._contents(text) == [b"some text" * 1000]
        text.write_bytes(text.read_bytes()[:40])
        with pytest.raises(UsageError, match="cannot be decompressed"):
            list(documents(DataConfig(source=str(text))))
        text.write_bytes(b"not compressed at all")
        with pytest.raises(UsageError, match="cannot be decompressed"):
            check_source(DataConfig(source=str(text)))

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            (
                "a.jsonl.zst",
                b"\x28\xb5\x2f\xfd...",
                r"a\.jsonl\.zst' is compressed by zstd: decompress it first \(zstd -d\)",
            ),
            ("a.tar.gz", b"\x1f\x8b...", "is an archive: unpack it into a folder"),
            ("a.zip", b"PK\x03\x04...", "unpack it into a folder"),
            ("a.parquet.gz", b"\x1f\x8b...", "decompress it first"),
            # No time of day: a test has the same name in every worker.
            ("a.txt", gzip.compress(b"text", mtime=0), r"is compressed by gzip: let its name end in \.gz"),
            ("a", b"\x28\xb5\x2f\xfd...", "is compressed by zstd"),
            ("a.txt.gz", gzip.compress(b"text\0", mtime=0), "is not text"),
            ("a.dat", b"\0\1\2", r"is not text \(it has zero bytes\)"),
            ("a.txt", "text".encode("utf-16"), "expected text in UTF-8"),
            ("a.pdf", b"%PDF-1.7 ", "turn it into text first"),
            ("train-00000.bin", b"tokens", "is a shard: name the folder"),
        ],
    )
    def test_what_is_not_text_is_refused(self, tmp_path: Path, name: str, content: bytes, words: str) -> None:
        (tmp_path / name).write_bytes(content)
        data = DataConfig(source=str(tmp_path / name))
        with pytest.raises(UsageError, match=words):
            check_source(data)
        with pytest.raises(UsageError, match=words):
            prepare(data, tmp_path / "shards")
        assert not (tmp_path / "shards").exists()

    @pytest.mark.parametrize(
        ("name", "content", "is_said"),
        [
            ("a.txt", '{"text": "one"}\n{"text": "zwei"}\n', True),
            ("a.log", '{"text": "one"}', True),
            ("a.txt.gz", '{"text": "one"}\n{"text": "zwei"}\n', True),
            ("a.jsonl", '{"text": "one"}\n{"text": "zwei"}\n', False),
            ("a.txt", '{"text": "one"}\nand then prose\n', False),
            ("a.txt", "[1, 2]\n[3]\n", False),
            ("a.txt", "\nprose\n", False),
            ("a.py", "{\n  1: 2}\n", False),
        ],
    )
    def test_text_that_looks_like_json_lines_is_said(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, is_said: bool
    ) -> None:
        folder = tmp_path / "data"
        folder.mkdir()
        (folder / name).write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
        (folder / "b.txt").write_text("prose " * 100)
        for source in (folder, folder / name):
            data = DataConfig(source=str(source), held_out=0.0)
            words = f"{name} looks like JSON lines and is read as text" if is_said else ""
            assert misnamed_words(data).startswith(words)
            assert bool(misnamed_words(data)) == is_said
        mixture = DataConfig(mixture=("stdlib=1", f"{folder}=1"))
        assert bool(misnamed_words(mixture)) == is_said
        assert main(["data", "prepare", str(folder), str(tmp_path / "shards"), "--held-out", "0"]) == 0
        assert ("(--field, now 'text')" in capsys.readouterr().err) == is_said
        assert misnamed_words(DataConfig(source=str(tmp_path / "shards"))) == ""

    def test_a_folder_refuses_archives_and_says_what_it_leaves_out(self, tmp_path: Path) -> None:
        folder = tmp_path / "data"
        folder.mkdir()
        (folder / "a.txt.gz").write_bytes(gzip.compress(b"text"))
        (folder / "b.json").write_text(json.dumps(self.RECORDS))
        data = DataConfig(source=str(folder), held_out=0.0)
        assert [(document.name, document.content) for document in documents(data)] == [
            ("a.txt.gz", b"text"), ("b.json:1", b"one"), ("b.json:2", b"zwei"),
        ]  # fmt: skip
        assert "left out" not in open_corpus(data).words
        (folder / "c.png").write_bytes(b"\x89PNG\0")
        (folder / "d.txt").write_bytes(gzip.compress(b"misnamed"))
        check_source(data)
        assert open_corpus(data).words.endswith("(c.png and 1 other file left out: not text)")
        assert open_corpus(data).train.length == len(b"text one zwei ")
        (folder / "e.jsonl.zst").write_bytes(b"...")
        with pytest.raises(
            UsageError, match=r"e\.jsonl\.zst', compressed by zstd: decompress .*; or leave it out with data\.pattern"
        ):
            check_source(data)
        check_source(DataConfig(source=str(folder), pattern="*.gz"))
        with pytest.raises(UsageError, match="has no text file"):
            check_source(DataConfig(source=str(folder), pattern="*.png"))


CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "yes"},
]


class TestChat:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.append(1) }}",
            "{{ cycler.__init__.__globals__ }}",
        ],
    )
    def test_a_template_reaches_nothing_but_its_conversation(self, source: str) -> None:
        pytest.importorskip("jinja2")
        with pytest.raises(UsageError, match="chat template"):
            Template({"default": source}, {}).render(CHAT, answer_follows=True)

    def test_answers_are_what_counts(self) -> None:
        text, answers = template_of(None).write(Conversation(CHAT))
        assert text == template_of(None).render(CHAT, answer_follows=False)
        assert [text[answer.begin : answer.end] for answer in answers] == ["hello\n", "yes\n"]
        assert text[: answers[0].begin] == "<|user|>\nhi\n<|assistant|>\n"

    def test_a_conversation_as_tokens(self, tmp_path: Path) -> None:
        source = written(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": CHAT[:2]}])
        stream = open_corpus(DataConfig(source=source, chat=True, held_out=0.0)).train
        counted = bytes(stream.parts[0][stream.counted[0]])
        assert counted == b"hello\nyes\n\0hello\n\0"

    def test_the_older_form_of_messages(self) -> None:
        told = read_conversation([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], None, "here")
        assert told.messages == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ("text", "expected a list of messages"),
            ([], "expected a list of messages"),
            ([{"role": "user"}], "expected role and content, texts"),
            ([{"role": "user", "content": "q"}], "has no message of role assistant"),
        ],
    )
    def test_what_is_no_conversation(self, value: Any, words: str) -> None:
        with pytest.raises(UsageError, match=words):
            read_conversation(value, None, "a.jsonl:1")

    def test_a_template_that_rewrites_the_past_is_refused(self) -> None:
        source = "{{ messages|length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        with pytest.raises(UsageError, match="cannot be told from them"):
            Template({"default": source}, {}).write(Conversation(CHAT))

    def test_text_files_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("text")
        with pytest.raises(UsageError, match=r"conversations are read from \.jsonl"):
            check_source(DataConfig(source=str(tmp_path), chat=True))
        with pytest.raises(UsageError, match="which has no conversations"):
            check_source(DataConfig(chat=True))

    @pytest.mark.parametrize("turns", [1, 2])
    @pytest.mark.parametrize("family", ["mistral", "zephyr", "olmo2", "chatml", "llama3"])
    def test_an_answer_counts_up_to_its_first_end_token(self, tmp_path: Path, family: str, turns: int) -> None:
        corpus = open_corpus(conversations(tmp_path, family, turns))
        (tokens,), (counted,) = corpus.train.parts, corpus.train.counted
        stop = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "olmo2": "<|endoftext|>"}.get(family, "</s>")
        once = ["hello", stop, *(["yes", stop] if turns == 2 else [])]
        assert spelt(tmp_path / family, tokens[counted]) == once * 3

    @pytest.mark.parametrize("turns", [1, 2])
    @pytest.mark.parametrize("family", ["mistral", "zephyr", "olmo2", "chatml"])
    def test_conversations_are_documents_whatever_ends_an_answer(self, tmp_path: Path, family: str, turns: int) -> None:
        data = conversations(tmp_path, family, turns)
        prepare(data, tmp_path / "shards")
        for corpus in (open_corpus(data), open_corpus(DataConfig(source=str(tmp_path / "shards"), held_out=0.0))):
            end, stream = corpus.tokenizer.end, corpus.train
            whole, counts = stream.tokens(0, stream.length), stream.counts(0, stream.length)
            size = stream.length // 3  # the same conversation three times
            assert stream.begins(end).tolist() == [0, size, 2 * size]
            alone = Samples(stream, size + 4, "none", end)
            assert len(alone) == 3
            for inputs, targets in (alone[0], alone[2]):
                assert inputs.tolist() == [*whole[: size - 1], *[end] * 5]
                wanted = np.where(counts[1:size], whole[1:size], IGNORED)
                assert targets.tolist() == [*wanted, *[IGNORED] * 5]
            context = size + 2  # so that conversations begin inside of sequences, the third in the second one
            first, second = (Samples(stream, context, "documents", end)[index] for index in (0, 1))
            assert np.flatnonzero(first.inputs < 0).tolist() == [size]
            assert np.flatnonzero(second.inputs < 0).tolist() == [2 * size - context]
            for number, (inputs, targets) in enumerate((first, second)):
                begin = number * context
                here = slice(begin + 1, begin + context + 1)
                assert np.where(inputs < 0, -1 - inputs, inputs).tolist() == whole[begin : begin + context].tolist()
                is_first = np.arange(stream.length) % size == 0
                wanted = np.where(counts[here] & ~is_first[here], whole[here], IGNORED)
                assert targets.tolist() == wanted.tolist()

    def test_held_out_conversations_keep_their_boundaries(self, tmp_path: Path) -> None:
        corpus = open_corpus(dataclasses.replace(conversations(tmp_path, "zephyr", 2), held_out=0.5))
        train, held, end = corpus.train, corpus.held_out, corpus.tokenizer.end
        size = (train.length + held.length) // 3
        assert train.begins(end).tolist() == [0, size]
        assert held.begins(end).tolist() == [0, 2 * size - train.length]

    def test_shards_without_boundaries_are_read_as_before(self, tmp_path: Path) -> None:
        prepare(conversations(tmp_path, "zephyr", 1), tmp_path / "shards")
        meta = json.loads((tmp_path / "shards/meta.json").read_text())
        assert meta.pop("begins")
        (tmp_path / "shards/train-00000.begins").unlink()
        (tmp_path / "shards/meta.json").write_text(json.dumps(meta))
        old = DataConfig(source=str(tmp_path / "shards"), packing="none", held_out=0.0)
        with pytest.raises(UsageError, match="cut in the middle: prepare the shards again, or set "):
            open_corpus(old)
        meta["ends_inside"] = False
        (tmp_path / "shards/meta.json").write_text(json.dumps(meta))
        stream = open_corpus(old).train
        ends = np.flatnonzero(stream.parts[0] == 0)[:-1]
        assert stream.begins(0).tolist() == [0, *(ends + 1)]

    def test_boundaries_that_were_lost_are_missed(self, tmp_path: Path) -> None:
        prepare(conversations(tmp_path, "zephyr", 1), tmp_path / "shards")
        (tmp_path / "shards/train-00000.begins").unlink()
        with pytest.raises(UsageError, match="does not say where conversations begin in train-00000"):
            open_corpus(DataConfig(source=str(tmp_path / "shards")))

    def test_tools_and_calls_are_written_or_refused(self, tmp_path: Path) -> None:
        call = {"type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
        messages = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}, *CHAT[2:]]
        record = {"messages": messages, "tools": [{"name": "look"}]}
        source = DataConfig(source=written(tmp_path / "a.jsonl", [record]), chat=True, held_out=0.0)
        with pytest.raises(UsageError, match=r"^a\.jsonl:1: this chat template does not write tools, which are there"):
            open_corpus(source)
        written(tmp_path / "a.jsonl", [{"messages": messages}])
        with pytest.raises(UsageError, match="does not write tool_calls, which are there: use another template"):
            open_corpus(source)
        template = Template({"default": "other", "tool_use": TOOL_TEMPLATE}, {})
        text, answers = template.write(read_conversation(messages, record["tools"], "here"))
        assert text.startswith('[{"name": "look"}]|user:hi|')
        assert text[answers[0].begin : answers[0].end] == '{"name": "look", "arguments": {"at": "é"}}|'
        for wrong, words in (("look", "tools is 'look': expected a list"), ({}, "tools is {}: expected a list")):
            with pytest.raises(UsageError, match=words):
                read_conversation(messages, wrong, "here")
        with pytest.raises(UsageError, match="expected role and content, texts"):
            read_conversation([CHAT[0], {"role": "assistant", "content": None}], None, "here")

    def test_templates_by_name_want_a_default(self) -> None:
        with pytest.raises(UsageError, match="templates for rag, tool_use and none called default"):
            Template({"rag": "x", "tool_use": "y"}, {})


class TestTokenizerFiles:
    def test_the_end_is_told_or_asked_for(self, tmp_path: Path) -> None:
        write_chat_tokenizer(tmp_path, "mistral")
        for settings, end in (({"eos_token": "<s>"}, 1), ({"eos_token": {"content": "yes"}}, 7), ({}, 0)):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
            assert FileTokenizer(tmp_path / "tokenizer.json").end == end
        known = FileTokenizer(tmp_path / "tokenizer.json").vocabulary
        for name, more in (("pad_token", 0), ("eos_token", 1)):  # tokens that the vocabulary lacks
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: "[NEW]"}))
            assert FileTokenizer(tmp_path / "tokenizer.json").vocabulary == known + more
        (tmp_path / "tokenizer_config.json").unlink()
        text = (tmp_path / "tokenizer.json").read_text().replace("</s>", "<end>")
        (tmp_path / "tokenizer.json").write_text(text)
        source = written(tmp_path / "a.jsonl", [{"text": "hi"}])
        with pytest.raises(UsageError, match=r"no token that is known to end a document: name it as eos_token"):
            open_corpus(DataConfig(source=source, tokenizer=tmp_path / "tokenizer.json"))

    def test_text_that_is_not_utf8_is_refused_with_its_place(self, tmp_path: Path) -> None:
        write_chat_tokenizer(tmp_path / "mistral", "mistral")
        (tmp_path / "notes.txt").write_bytes("un café".encode("latin-1"))
        data = DataConfig(source=str(tmp_path / "notes.txt"), held_out=0.0)
        with pytest.raises(UsageError, match=r"^notes\.txt: byte 6 is 0xe9, which is not UTF-8: .* iconv -f latin1"):
            open_corpus(dataclasses.replace(data, tokenizer=tmp_path / "mistral/tokenizer.json"))
        assert open_corpus(data).train.parts[0].tobytes() == b"un caf\xe9\0"  # a byte is a token
        source = tmp_path / "a.jsonl"
        source.write_text('{"text": "\\ud800"}\n')
        with pytest.raises(UsageError, match="half a surrogate pair"):
            open_corpus(DataConfig(source=str(source)))
        for content in ("\ud800", "\ufdd0"):
            with pytest.raises(UsageError, match="which are no text: take them out"):
                read_conversation([CHAT[0], {"role": "assistant", "content": content}], None, "a.jsonl:1")

    def test_a_vocabulary_with_holes_is_as_wide_as_its_largest_id(self, tmp_path: Path) -> None:
        write_chat_tokenizer(tmp_path, "zephyr")
        described = json.loads((tmp_path / "tokenizer.json").read_text())
        described["model"]["vocab"]["yes"] = 300
        (tmp_path / "tokenizer.json").write_text(json.dumps(described))
        source = written(tmp_path / "a.jsonl", [{"text": "yes hi"}])
        meta = prepare(DataConfig(source=source, tokenizer=tmp_path / "tokenizer.json"), tmp_path / "shards")
        assert (meta["dtype"], meta["vocabulary"]) == ("uint16", 301)
        corpus = open_corpus(DataConfig(source=str(tmp_path / "shards"), held_out=0.0))
        assert np.concatenate(corpus.train.parts).tolist() == [300, described["model"]["vocab"]["hi"], 0]


TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}|{% endif %}{% for m in messages %}{{ m.role }}:"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ m.content or '' }}|{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEMPLATES = {
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}",
    "zephyr": "{% for m in messages %}\n{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    "olmo2": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '<|user|>\n' + m['content'] + '\n' }}{% else %}{{ '<|assistant|>\n' + m['content'] + eos_token }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
}
"""As the families' folders have them, without their error messages: how answers end is what differs."""
SPECIAL = {
    "mistral": ["</s>", "<s>"],
    "zephyr": ["</s>", "<s>"],
    "olmo2": ["<|endoftext|>"],
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": ["<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}
"""The first of them ends documents."""


def write_chat_tokenizer(folder: Path, family: str) -> None:
    """A tokenizer of words with a family's special tokens and chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir(exist_ok=True)
    plain = [
        "?",
        "\n",
        "hi",
        "hello",
        "more",
        "yes",
        "[INST]",
        "[/INST]",
        "<|user|>",
        "<|assistant|>",
        "user",
        "assistant",
    ]
    words = {word: number for number, word in enumerate([*SPECIAL[family], *plain])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    pattern = tokenizers.Regex(r"\n|[^\s]+")
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "removed", invert=True)
    inner.add_special_tokens(SPECIAL[family])
    inner.save(str(folder / "tokenizer.json"))
    told = {"eos_token": SPECIAL[family][0], "bos_token": SPECIAL[family][min(1, len(SPECIAL[family]) - 1)]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, "chat_template": TEMPLATES[family]}))


def conversations(folder: Path, family: str, turns: int) -> DataConfig:
    """The same conversation three times."""
    write_chat_tokenizer(folder / family, family)
    source = written(folder / "a.jsonl", [{"messages": CHAT[: 2 * turns]}] * 3)
    return DataConfig(source=source, chat=True, tokenizer=folder / family / "tokenizer.json", held_out=0.0)


def spelt(folder: Path, tokens: Any) -> list[str]:
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [inner.id_to_token(int(token)) for token in tokens]


class TestPacking:
    def test_what_counts_for_nothing_is_the_models(self) -> None:
        assert IGNORED == MODEL_IGNORED

    @given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 7))
    def test_a_document_by_itself_has_every_target_once(self, lengths: list[int], context: int) -> None:
        """Document i is i+1 repeated, then 0, which ends it."""
        pieces = [np.array([number + 1] * length + [0]) for number, length in enumerate(lengths)]
        samples = Samples(Stream((np.concatenate(pieces),)), context, "none", 0)
        targets: Counter[int] = Counter()
        for index in range(len(samples)):
            inputs, wanted = samples[index]
            real = wanted != IGNORED
            assert len(set(inputs[real].tolist())) == 1
            assert set(inputs[~real].tolist()) <= {0}
            targets.update(wanted[real].tolist())
        expected = {number + 1: length - 1 for number, length in enumerate(lengths) if length > 1}
        assert targets == Counter(expected | {0: len(lengths)})

    def test_no_document_is_predicted_from_the_one_before(self) -> None:
        stream = Stream((np.array([5, 6, 0, 7, 8, 0, 9]),))
        inputs, targets = Samples(stream, 6, "documents", 0)[0]
        assert inputs.tolist() == [5, 6, 0, -1 - 7, 8, 0]
        assert targets.tolist() == [6, 0, IGNORED, 8, 0, IGNORED]
        assert Samples(stream, 6, "stream", 0)[0].targets.tolist() == [6, 0, 7, 8, 0, 9]

    def test_what_does_not_count_is_no_target(self) -> None:
        stream = Stream((np.arange(1, 4), np.arange(4, 8)), (np.array([0, 1, 0]), np.array([1, 0, 0, 1])))
        assert Samples(stream, 3, "stream", 0)[0].targets.tolist() == [2, IGNORED, 4]
        assert Samples(stream, 3, "stream", 0)[1].targets.tolist() == [IGNORED, IGNORED, 7]


class TestMixture:
    @given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(8, 300))
    def test_slots_follow_weights(self, weights: list[float], total: int) -> None:
        slots = apportioned(weights, total)
        assert sum(slots) == total
        assert all(slot >= 1 for slot in slots)
        for slot, weight in zip(slots, weights, strict=True):
            assert abs(slot - max(1, weight / sum(weights) * total)) <= len(weights)

    def test_a_run_takes_each_source_by_its_weight_and_every_sample_once_an_epoch(self) -> None:
        def numbers(begin: int, count: int) -> Samples:
            return Samples(Stream((np.arange(begin, begin + 2 * count + 1),)), 2, "stream", -1)

        mixture = Mixture([numbers(0, 700), numbers(10_000, 50)], [3, 1], seed=4)
        places = [mixture.place(position) for position in range(2 * PERIOD)]
        taken = Counter(source for source, _ in places)
        assert taken == {0: 6144, 1: 2048}
        for source, count in ((0, 700), (1, 50)):
            order = [index for owner, index in places if owner == source]
            for epoch in itertools.batched(order, count) if hasattr(itertools, "batched") else [order[:count]]:
                assert len(epoch) < count or sorted(epoch) == list(range(count))
        # Both sources come everywhere, not one after the other.
        assert {source for source, _ in places[:32]} == {0, 1}
        assert mixture.at(5).inputs[0] == mixture.sources[places[5][0]][places[5][1]].inputs[0]

    def test_sources_and_weights_of_a_configuration(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"a" * 400)
        b = written(tmp_path / "b.jsonl", [{"text": "b" * 200}])
        corpus = open_corpus(DataConfig(mixture=(f"{tmp_path / 'a.txt'}=3", f"{b}=1"), held_out=0.25))
        assert corpus.words.startswith("a mixture of 75 % ")
        mixture = train_mixture(corpus, 8, "stream", 0)
        share = np.mean([mixture.at(position).inputs[0] == ord("a") for position in range(PERIOD)])
        assert share == 0.75
        held = held_out_samples(corpus, 8, "stream", 6)
        assert [chr(pair.inputs[0]) for pair in held] == ["a", "b"] * 3
        assert corpus.fingerprint() != corpus.train.fingerprint()

    @pytest.mark.parametrize("wrong", ["books", "=1", "a=-1", "a=0", "a=x"])
    def test_what_is_no_mixture(self, wrong: str) -> None:
        with pytest.raises(UsageError, match=r"data\.mixture"):
            DataConfig(mixture=(wrong,))

    def test_sources_of_different_tokenizers(self, tmp_path: Path) -> None:
        (tmp_path / "shards").mkdir()
        np.arange(500, dtype=np.uint16).tofile(tmp_path / "shards" / "train.bin")
        with pytest.raises(UsageError, match="have different tokenizers"):
            open_corpus(DataConfig(mixture=("stdlib=1", f"{tmp_path / 'shards'}=1")))

    def test_shards_of_unknown_tokens_whose_documents_end_otherwise(self, tmp_path: Path) -> None:
        for end in (3, 9):
            (tmp_path / str(end)).mkdir()
            np.arange(500, dtype=np.uint16).tofile(tmp_path / str(end) / "train.bin")
            (tmp_path / str(end) / "meta.json").write_text(json.dumps({"vocabulary": 500, "end": end}))
        mixture = (f"{tmp_path / '3'}=1", f"{tmp_path / '9'}=1")
        with pytest.raises(UsageError, match="have different tokenizers"):
            open_corpus(DataConfig(mixture=mixture, packing="documents"))

    def test_sources_of_one_tokenizer_that_was_written_again(self, tmp_path: Path) -> None:
        """transformers writes what is put around a prompt, which no document has."""
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            write_chat_tokenizer(tmp_path / name, "mistral")
            file = tmp_path / name / "tokenizer.json"
            if name == "b":
                around = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}]}
                around |= {"pair": [{"Sequence": {"id": key, "type_id": 0}} for key in "AB"], "special_tokens": {}}
                file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": around}, indent=4))
            source = written(tmp_path / f"{name}.jsonl", [{"text": "hi yes"} for _ in range(60)])
            prepare(DataConfig(source=source, tokenizer=file), tmp_path / f"{name}-shards")
        mixture = (f"{tmp_path / 'a-shards'}=1", f"{tmp_path / 'b-shards'}=1")
        assert len(open_corpus(DataConfig(mixture=mixture)).parts) == 2

    def test_a_source_without_one_sequence(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"a")
        corpus = open_corpus(DataConfig(mixture=("stdlib=1", f"{tmp_path / 'a.txt'}=1")))
        with pytest.raises(UsageError, match=r"source 2 of data\.mixture is shorter than one sequence"):
            train_mixture(corpus, 8, "stream", 0)


class TestPrepare:
    @pytest.fixture
    def source(self, tmp_path: Path) -> DataConfig:
        records = [{"text": f"document {number} " * (1 + number % 7)} for number in range(200)]
        return DataConfig(source=written(tmp_path / "a.jsonl", records), held_out=0.1)

    @pytest.mark.parametrize("chat", [False, True])
    def test_shards_are_what_training_would_read(self, tmp_path: Path, source: DataConfig, chat: bool) -> None:
        if chat:
            records = [{"messages": [*CHAT[:3], {"role": "assistant", "content": str(n)}]} for n in range(200)]
            source = DataConfig(source=written(tmp_path / "a.jsonl", records), chat=True, held_out=0.1)
        meta = prepare(source, tmp_path / "shards", shard_tokens=2000)
        assert len([name for name in meta["files"] if name.startswith("train")]) > 3
        direct, mapped = open_corpus(source), open_corpus(DataConfig(source=str(tmp_path / "shards")))
        for ours, theirs in ((direct.train, mapped.train), (direct.held_out, mapped.held_out)):
            assert np.array_equal(np.concatenate(ours.parts), np.concatenate(theirs.parts))
            assert [bool(ours.counted), bool(theirs.counted)] == [chat, chat]
            if chat:
                assert np.array_equal(np.concatenate(ours.counted), np.concatenate(theirs.counted) != 0)
                assert len(ours.kept_begins[0]) > 10
            assert np.array_equal(ours.begins(0), theirs.begins(0))

    @pytest.mark.parametrize("stops_at", [1, 3, 4, 7])
    def test_a_call_that_was_killed_goes_on_to_the_same_files(
        self, tmp_path: Path, source: DataConfig, monkeypatch: pytest.MonkeyPatch, stops_at: int
    ) -> None:
        prepare(source, tmp_path / "whole", shard_tokens=2000)
        count = 0

        def dying(path: Path, content: bytes, write: Any = preparing._write_whole) -> None:
            nonlocal count
            count += 1
            if count > stops_at:
                raise KeyboardInterrupt
            write(path, content)

        with monkeypatch.context() as patched:
            patched.setattr(preparing, "_write_whole", dying)
            with pytest.raises(KeyboardInterrupt):
                prepare(source, tmp_path / "ours", shard_tokens=2000)
        half = DataConfig(source=str(tmp_path / "ours"))
        for reading in (open_corpus, check_source, lambda data: prepare(data, tmp_path / "more")):
            with pytest.raises(UsageError, match="is not complete: `tilemesh data prepare` was stopped"):
                reading(half)
        with pytest.raises(UsageError, match=r"was begun otherwise \(held_out was 0.1 and is 0.3\)"):
            prepare(DataConfig(source=source.source, held_out=0.3), tmp_path / "ours", shard_tokens=2000)
        seen: list[int] = []
        prepare(source, tmp_path / "ours", shard_tokens=2000, on_progress=lambda read, total: seen.append(read))
        files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
        assert {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()} == files
        assert seen == sorted(seen)
        assert seen[-1] == Path(source.source).stat().st_size
        with pytest.raises(UsageError, match="has shards already"):
            prepare(source, tmp_path / "ours")

    @pytest.mark.parametrize("chat", [False, True])
    @pytest.mark.parametrize("after", [1, 30, 120, 199])
    def test_a_call_that_was_asked_to_stop_keeps_what_it_read(
        self, tmp_path: Path, source: DataConfig, after: int, chat: bool
    ) -> None:
        if chat:
            source = conversations(tmp_path, "zephyr", 1)
            written(tmp_path / "a.jsonl", [{"messages": CHAT[: 2 + 2 * (number % 2)]} for number in range(200)])
        prepare(source, tmp_path / "whole", shard_tokens=800)
        ours, read = tmp_path / "ours", itertools.count(1)
        with pytest.raises(PreparationStoppedError, match=rf"stopped after {after} documents, which are kept in "):
            prepare(source, ours, shard_tokens=800, is_asked_to_stop=lambda: next(read) == after)
        rest = itertools.count()
        prepare(source, ours, shard_tokens=800, is_asked_to_stop=lambda: next(rest) < 0)
        assert next(rest) == 200 - after  # none was tokenised twice
        files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
        assert {path.name: path.read_bytes() for path in ours.iterdir()} == files

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signals_stop_the_command_and_it_says_so(
        self, tmp_path: Path, source: DataConfig, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        def signalled(data: DataConfig) -> Any:
            for at, document in enumerate(documents(data)):
                if at == 69:
                    signal.raise_signal(number)
                yield document

        before = signal.getsignal(number)
        with monkeypatch.context() as patched:
            patched.setattr(preparing, "documents", signalled)
            assert main(["data", "prepare", source.source, str(tmp_path / "shards")]) == 130
        assert signal.getsignal(number) is before
        assert "stopped after 70 documents, which are kept in " in capsys.readouterr().err
        assert main(["data", "prepare", source.source, str(tmp_path / "shards")]) == 0
        meta = json.loads((tmp_path / "shards/meta.json").read_text())
        assert meta["documents"] == 200

    def test_a_file_of_waiting_documents_that_is_not_ours(self, tmp_path: Path, source: DataConfig) -> None:
        with pytest.raises(PreparationStoppedError):
            prepare(source, tmp_path / "shards", is_asked_to_stop=lambda: True)
        (tmp_path / "shards/preparing.npz").write_bytes(b"something else")
        with pytest.raises(UsageError, match=r"preparing.npz is not what `tilemesh data prepare` wrote"):
            prepare(source, tmp_path / "shards")

    @pytest.mark.parametrize("out", ["texts/out", "texts/new/out", "linked/out", "linked"])
    def test_shards_do_not_lie_in_their_source(self, tmp_path: Path, out: str) -> None:
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts/a.txt").write_text("words " * 100)
        (tmp_path / "linked").symlink_to("texts")
        with pytest.raises(UsageError, match=r"lies in the source .* name a folder outside of it"):
            prepare(DataConfig(source=str(tmp_path / "texts")), tmp_path / out)
        assert [path.name for path in (tmp_path / "texts").iterdir()] == ["a.txt"]

    def test_shards_are_not_prepared_again(self, tmp_path: Path, source: DataConfig) -> None:
        prepare(source, tmp_path / "shards")
        with pytest.raises(UsageError, match="there is nothing to prepare"):
            prepare(DataConfig(source=str(tmp_path / "shards")), tmp_path / "more")
        with pytest.raises(UsageError, match="prepare each of its sources by itself"):
            prepare(DataConfig(mixture=("a=1",)), tmp_path / "more")
