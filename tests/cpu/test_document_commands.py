"""Every command that a document shows in a block for a shell runs as it is written, with a smaller model and fewer
readings; a block whose first lines say that it needs a GPU, several machines or a cluster does not.

The folder it runs in holds what documents speak of (RUN, model/, text.jsonl, …). The how-tos and what is quick run in
`make test`, all documents in `make test-all`.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from warm import warm_start

from tilemesh.cli.main import main
from tilemesh.core.calibration import Calibration, Rates
from tilemesh.core.plan import ParallelPlan
from tilemesh.measure.machine import this_machine
from tilemesh.model import huggingface
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.train import job
from tilemesh.train.export import byte_tokenizer

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
SMALL = (
    "model.layers=1,model.width=16,model.heads=2,model.kv_heads=1,model.mlp_width=32,model.context=32,train.context=0,"
    "train.batch=12,evaluate.sequences=4"
)
ON_CPU = "train.device=cpu,checkpoint.background=false,train.compile=false"
LLAMA = ModelConfig(layers=1, width=128, heads=2, kv_heads=1, vocabulary=256, context=32, norm="rmsnorm", mlp_width=256,
                    positions="rotary", activation="swiglu", biases=False)  # fmt: skip
START_S = 60
MOST_S = 900
"""Of a document: some start eight ranks several times."""
_FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
KINDS = ("bash", "python", "text", "toml", "yaml", "json", "cpp", "c", "csv")
_NEEDS = re.compile(r"^# needs (a GPU|several machines|a cluster)$", re.MULTILINE)
_SERVING = (["tilemesh", "serve"], ["tilemesh", "watch"])


class DocumentBlock(NamedTuple):
    kind: str
    text: str

    @property
    def needs(self) -> str:
        """Hardware that a machine for tests does not have."""
        found = _NEEDS.search("\n".join(self.text.splitlines()[:2]))
        return found[1] if found else ""

    @property
    def lines(self) -> list[str]:
        """Commands, without comments."""
        joined = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in joined if line.strip() and not line.startswith("#")]


def blocks(document: Path) -> list[DocumentBlock]:
    return [DocumentBlock(*found) for found in _FENCE.findall(document.read_text())]


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


# ---- what is there ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one rank."""
    folder = tmp_path_factory.mktemp("trained") / "RUN"
    small = "model.layers=2,model.width=64,model.heads=2,model.kv_heads=1,model.mlp_width=128,model.context=32"
    settings = f"{small},train.context=0,train.batch=4,train.steps=4,evaluate.sequences=4,sample.tokens=0,{ON_CPU}"
    with warm_start():
        assert main(["train", "--mesh", "dp=1", "--out", str(folder), "--set", settings]) == 0
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the how-tos speak of; one rank trains in this process."""
    for name in ("model", "folder"):
        huggingface.save(Transformer(LLAMA, seed=1), tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(byte_tokenizer(), ensure_ascii=False))
        described = json.loads((tmp_path / name / "config.json").read_text()) | {"eos_token_id": 0}
        (tmp_path / name / "config.json").write_text(json.dumps(described))
    (tmp_path / "notes.txt").write_text("to be or not to be\n" * 400)
    texts = [{"text": f"document {number}: the quick brown fox. " * 3} for number in range(80)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in texts))
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(80)))
    (tmp_path / "my.toml").write_text("[train]\nsteps = 4\n")
    (tmp_path / "plan.toml").write_text(ParallelPlan(dp=2, precision="fp32").to_toml())
    (tmp_path / "mine.toml").write_text('name = "mine"\nlike = "h100"\nmemory_gib = 96\npower_w = 500\n')
    rows = (ROOT / "benchmarks" / "results" / "collectives-mpi4-neoverse-n1-2c.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(rows[:40]) + "\n")
    (tmp_path / "script.py").write_text(
        "import tilemesh as tm\n\nwith tm.comm.connect() as comm:\n    comm.barrier()\n"
    )
    (tmp_path / "package").mkdir()
    shutil.copy(tmp_path / "script.py", tmp_path / "package" / "module.py")
    (tmp_path / "package" / "__init__.py").touch()
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = job.fit

    @functools.wraps(real)
    def fit(config: Any, **options: Any) -> Any:
        return real(config, **{**options, "in_process": None})

    monkeypatch.setattr(job, "fit", fit)
    return tmp_path


def copy_runs(place: Path, trained: Path) -> None:
    for name in ("RUN", "OTHER", "A", "B", "C", "runs/NAME"):
        shutil.copytree(trained, place / name)


# ---- running ----------------------------------------------------------------------------------------------------


def run_document(name: str, capsys: pytest.CaptureFixture[str], python: bool = False) -> list[str]:
    """Run every block for a shell, and with `python` those for Python; the commands that ran."""
    ran = []
    for block in blocks(ROOT / name):
        if (file := re.match(r"# (\w+\.py)\n", block.text)) and block.kind == "python":
            Path(file[1]).write_text(block.text)
        elif block.kind == "python" and python:
            torch.set_default_dtype(torch.float32)
            exec(compile(_smaller_program(block.text), name, "exec"), {"__name__": "document"})
        if block.kind == "bash" and not block.needs:
            ran += run_block(name, block.lines, capsys)
    return ran


def run_block(name: str, lines: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    servers: list[subprocess.Popen[bytes]] = []
    ran = []
    try:
        for line in lines:
            command, _, target = line.partition(" > ")
            words = shlex.split(command, comments=True)
            if words[:2] in _SERVING:
                _stop(servers)
                servers.append(_started(words))
            elif words[0] == "curl":
                assert _answered(words), line
            elif words[0] != "tilemesh":
                continue  # `test_what_is_not_ours_exists` looks at these
            else:
                printed = _printed(words, line, capsys)
                if target:
                    Path(shlex.split(target, comments=True)[0]).write_text(printed)
            ran.append(line)
    finally:
        _stop(servers)
    assert ran or lines, f"{name}: an empty block"
    return ran


def _printed(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    code = main(smaller(words)[1:])
    printed = capsys.readouterr()
    assert code == 0, f"{line}\n{printed.err}"
    return printed.out


def smaller(words: list[str]) -> list[str]:
    """The same with less to do; a later value of an option replaces an earlier one."""
    options = set(words)
    match words[1:3]:
        case ["train", *_]:
            settings = [] if "--resume" in options else [ON_CPU]
            settings += [] if {"--init", "--resume"} & options else [SMALL]
            settings += ["model.heads=4,model.kv_heads=4"] if "tp=4" in options else []
            settings += ["plan.microbatch=12"] if "plan.microbatch=" in " ".join(words) else []
            settings += ["train.steps=8"] if "--out" not in options else []
            # A step in bf16 with 50,257 tokens takes a minute on a CPU that has no such unit.
            settings += ["plan.precision=fp32,model.vocabulary=256"] if "gpt2-124m" in options else []
            return [*words, *(["--set", ",".join(settings)] if settings else [])]
        case ["align", *_]:
            few = "train.steps=2,align.prompts=2,align.answers=2,align.held_out=2,evaluate.every=0,train.device=cpu"
            return words if "--resume" in options else [*words, "--set", few]
        case ["verify", *_]:
            return [*words, "--ranks", "2", "--models", "gpt", "--no-pairs"]
        case ["bench", "collective"]:
            if {"--draw", "--simulate"} & options:
                return words
            return [*words, "--ranks", "2", "--sizes", "1KiB", "--quick"]
        case ["bench", "methods"]:
            return [*words, "--steps", "8", "--blocks", "1"]
        case ["bench", "compress"]:
            return [*words, "--recipes", "int8,int4-g64", "--peers", "none", "--sequences", "4", "--seconds", "0.2"]
        case ["bench", "train"]:
            return [*words, "--mesh", "dp=1", "--peers", "eager", "--blocks", "1", "--steps", "1", "--set", SMALL]
        case ["guide", *_]:
            return [*words, "--no-pause"]
    return words


def _smaller_program(block: str) -> str:
    return block.replace('"train.steps=20"', f'"train.steps=4,train.device=cpu,{SMALL}"')


def _started(words: list[str]) -> subprocess.Popen[bytes]:
    """A server, once it answers."""
    port = words[words.index("--port") + 1] if "--port" in words else "8000"
    given = words if "--port" in words else [*words, "--port", port]
    server = subprocess.Popen([sys.executable, "-m", "tilemesh", *given[1:]])
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert server.poll() is None, f"{' '.join(words)} ended with {server.returncode}"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{'/health' if words[1] == 'serve' else '/'}", timeout=5)
        except OSError:
            time.sleep(0.2)
        else:
            return server
    server.kill()
    raise AssertionError(f"{' '.join(words)} does not answer after {START_S} s")


def _answered(words: list[str]) -> bool:
    """What `curl ADDRESS -d DATA` would get."""
    data = words[words.index("-d") + 1].encode()
    request = urllib.request.Request(f"http://{words[1]}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return bool(answer.status == 200 and answer.read())
    except urllib.error.HTTPError as refused:  # a base model has no chat template
        return refused.code == 400 and "chat template" in refused.read().decode()


def _stop(servers: list[subprocess.Popen[bytes]]) -> None:
    while servers:
        server = servers.pop()
        server.send_signal(signal.SIGINT)
        try:
            server.wait(START_S)
        except subprocess.TimeoutExpired:
            server.kill()


# ---- documents --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("how-to/fine-tune.md", 8),
        ("how-to/own-data.md", 5),
        ("how-to/own-module.md", 0),
        ("how-to/teach-with-a-function.md", 4),
    ],
)
def test_a_how_to_runs(name: str, commands: int, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(run_document(f"docs/{name}", capsys, python=True)) == commands


@pytest.mark.parametrize("steps", [3, pytest.param(80, marks=[pytest.mark.slow, pytest.mark.timeout(MOST_S)])])
def test_a_chat_model_is_trained_served_and_answers_openais_client(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The how-to's scripts and commands as they stand, in its order; the quick one takes fewer steps."""
    for package in ("openai", "uvicorn", "jinja2"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    conversations, _, train, serve, ask = blocks(ROOT / "docs/how-to/chat-model.md")
    exec(compile(conversations.text, "chats.py", "exec"), {})
    (line,) = train.lines
    assert main([*shlex.split(line)[1:], "--set", f"train.steps={steps},{ON_CPU}"]) == 0
    server = _started(shlex.split(serve.lines[0]))
    try:
        capsys.readouterr()
        exec(compile(ask.text, "ask.py", "exec"), {})
    finally:
        _stop([server])
    answers = [line for line in capsys.readouterr().out.splitlines() if "->" in line]
    assert [line.partition(" ->")[0] for line in answers] == ["sky", "snow", "coal"]
    if steps == 80:
        assert [line.partition("-> ")[2].strip() for line in answers] == [
            "It is blue.", "It is white.", "It is black."
        ]  # fmt: skip


def test_what_a_reader_brings_is_proved_and_runs() -> None:
    """In a process of its own: what it registers stays there."""
    program = "\n".join(
        block.text for block in blocks(ROOT / "docs/how-to/bring-your-own.md") if block.kind == "python"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert "star all_reduce: 4 ranks" in ran.stdout
    assert ran.stdout.splitlines()[-2:] == ["[ 6. 10. 14.]", "(True, [(16, 8), (16,), (2, 32), (4,)])"]


def test_the_hang_of_the_how_to_is_named_with_its_line(tmp_path: Path) -> None:
    (program,) = [block.text for block in blocks(ROOT / "docs/how-to/find-a-hang.md") if block.kind == "python"]
    (tmp_path / "stuck.py").write_text(program.replace("timeout_s=8", "timeout_s=2"))
    command = [sys.executable, "-m", "tilemesh", "launch", "--ranks", "2", "--", str(tmp_path / "stuck.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode != 0
    words = r"not arrived: rank 1 is in no collective, at \S*stuck\.py:11 in <module>"
    assert re.search(words, " ".join((ran.stdout + ran.stderr).split())), ran.stderr


def test_the_module_of_the_how_to_trains_as_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = [block.text for block in blocks(ROOT / "docs/how-to/own-module.md") if block.kind == "python"]
    losses = []
    single = program.replace("tp=2", "tp=1").replace("run_threads(2,", "run_threads(1,")
    # By batch, as the text says: whole matrices and half of the rows each.
    replicas = program.replace("tp=2", "dp=2")
    for written in (program, single, replicas, replicas.replace("return done.loss", "return len(y)")):
        exec(compile(written, "own-module.md", "exec"), {"__name__": "document"})
        losses.append(json.loads(capsys.readouterr().out))
    (first, second), (alone,), replicas, rows = losses
    assert first == second == pytest.approx(alone, rel=1e-5)
    assert replicas == pytest.approx([alone, alone], rel=1e-5)
    assert rows == [16, 16]
    assert f"[{str(first)[:5]}…" in program


@pytest.mark.slow
def test_the_strange_module_of_the_how_to_trains_as_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    (program,) = [block.text for block in blocks(ROOT / "docs/how-to/any-module.md") if block.kind == "python"]
    losses = []
    for written in (program, program.replace("dp=2, tp=2", "dp=1").replace("run_threads(4,", "run_threads(1,")):
        exec(compile(written, "any-module.md", "exec"), {"__name__": "document"})
        losses.append(json.loads(capsys.readouterr().out))
    ranks, (alone,) = losses
    assert ranks == pytest.approx([alone] * 4, rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(MOST_S)
def test_get_started_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(run_document("docs/start.md", capsys, python=True)) == 7


_HERE = {
    "docs/how-to/chat-model.md",
    "docs/how-to/fine-tune.md",
    "docs/how-to/own-data.md",
    "docs/how-to/own-module.md",
    "docs/start.md",
    "docs/how-to/teach-with-a-function.md",
}
OTHERS = [
    name_of(document)
    for document in DOCUMENTS
    if name_of(document) not in _HERE
    and any(block.kind == "bash" and not block.needs and "tilemesh" in block.text for block in blocks(document))
]


@pytest.mark.slow
@pytest.mark.timeout(MOST_S)
@pytest.mark.parametrize("name", OTHERS)
def test_a_document_runs(name: str, place: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if any(line.startswith("tilemesh serve") for block in blocks(ROOT / name) for line in block.lines):
        pytest.importorskip("uvicorn")  # of the extra `serve`
    copy_runs(place, trained)
    for words in (["data", "prepare", "text.jsonl", "shards"], ["plan", "--draw", "zb-v", "--csv", "mine.csv"]):
        assert main(words) == 0
    cores = Rates(matmul_flops_per_s={"fp32": 3e10}, copy_bytes_per_s=1e10)
    Calibration(this_machine().id, "this machine", "now", one_core=cores, all_cores=cores).save()
    assert run_document(name, capsys)


def shell_lines() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        for block in blocks(document):
            if block.kind == "bash":
                for line in block.lines:
                    yield name_of(document), line


def test_what_is_not_ours_exists() -> None:
    """`make` has its target, `pip` its extra; the rest of a block for a shell is what starts programs."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    known = ("tilemesh", "curl", "pytest", "python3", "mpiexec", "torchrun", "srun", ".venv/bin/pre-commit")
    for name, line in shell_lines():
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert words[1] in targets, f"{name}: {line}"
        elif words[:2] == ["pip", "install"]:
            for wanted in re.findall(r"\[([^\]]*)\]", line):
                assert set(wanted.split(",")) <= extras, f"{name}: {line}"
        else:
            assert words[0] in known, f"{name}: {line}: a block for a shell holds commands; use ```text for the rest"


def test_every_block_says_what_it_is() -> None:
    for document in DOCUMENTS:
        opening = False
        for line in document.read_text().splitlines():
            if line.startswith("```"):
                opening = not opening
                assert not opening or line != "```", f"{name_of(document)}: a block without a language"
        for block in blocks(document):
            assert block.kind in KINDS, name_of(document)
