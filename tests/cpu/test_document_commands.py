"""The commands and programs of "get started" and the how-tos run as they are written, with a smaller model."""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from tilemesh.cli import train_run
from tilemesh.cli.main import main
from tilemesh.model import huggingface
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.train.export import byte_tokenizer

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.layers=1,model.width=16,model.heads=2,model.kv_heads=1,model.mlp_width=32,model.context=32,train.context=0,"
    "train.batch=4,evaluate.sequences=4"
)
LLAMA = ModelConfig(layers=1, width=16, heads=2, kv_heads=1, vocabulary=256, context=32, norm="rmsnorm", mlp_width=32,
                    positions="rotary", activation="swiglu", biases=False)  # fmt: skip
_FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the how-tos speak of; one rank trains in this process."""
    huggingface.save(Transformer(LLAMA, seed=1), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(byte_tokenizer(), ensure_ascii=False))
    (tmp_path / "notes.txt").write_text("to be or not to be\n" * 400)
    texts = [{"text": f"document {number}: the quick brown fox. " * 3} for number in range(80)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in texts))
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(80)))
    monkeypatch.chdir(tmp_path)
    real = train_run.fit

    @functools.wraps(real)
    def fit(config: Any, **options: Any) -> Any:
        return real(config, **{**options, "in_process": None})

    monkeypatch.setattr(train_run, "fit", fit)
    return tmp_path


def run_document(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run every block for a shell or for Python; the commands that ran."""
    ran = []
    for kind, block in _FENCE.findall((ROOT / "docs" / name).read_text()):
        if kind == "python":
            torch.set_default_dtype(torch.float32)
            exec(compile(_smaller_program(block), name, "exec"), {"__name__": "document"})
        if kind != "bash":
            continue
        for line in block.splitlines():
            command, _, target = line.partition(" > ")
            words = shlex.split(command)
            if words[:2] == ["tilemesh", "train"] and not {"--init", "--resume"} & set(words):
                words += ["--set", SMALL]
            if words[:2] == ["tilemesh", "train"] and "--resume" not in words:
                words += ["--set", "train.device=cpu,checkpoint.background=false"]
            assert words[0] == "tilemesh", f"{name}: a command that is not ours: {line}"
            capsys.readouterr()
            code = main(words[1:])
            printed = capsys.readouterr()
            assert code == 0, f"{line}\n{printed.err}"
            if target:
                Path(target).write_text(printed.out)
            ran.append(line)
    return ran


def _smaller_program(block: str) -> str:
    return block.replace('"train.steps=20"', f'"train.steps=4,train.device=cpu,{SMALL}"')


@pytest.mark.parametrize(
    ("name", "commands"), [("how-to/fine-tune.md", 8), ("how-to/own-data.md", 5), ("how-to/own-module.md", 0)]
)
def test_a_how_to_runs(name: str, commands: int, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(run_document(name, capsys)) == commands


@pytest.mark.slow
def test_get_started_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(run_document("start.md", capsys)) == 7
