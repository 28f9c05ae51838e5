"""Where feedback comes from: functions in processes of their own, reward models, pairs; and what never pays."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from align_start import write_start

from tilemesh.align.checks import check_rewards
from tilemesh.align.config import FeedbackConfig, load
from tilemesh.align.formulas.rollout import Segment
from tilemesh.align.generate import unpacked_bytes
from tilemesh.align.inputs import read_scorers
from tilemesh.align.job import fit
from tilemesh.align.pairs import PairSource
from tilemesh.align.prompts import Pair, Prompt, PromptSource, ServedText, pair_of, without_last
from tilemesh.align.rewards import Rewards, read_reward_model
from tilemesh.align.tasks import TASKS
from tilemesh.align.turns import AnswerTurns, DrawnTalk
from tilemesh.align.verifier import Verifier
from tilemesh.cli.commands.align import AlignOptions, align
from tilemesh.comm.connection import connect
from tilemesh.core.errors import RunError, UsageError
from tilemesh.data.cases import read_cases
from tilemesh.data.tokenizer import Bytes
from tilemesh.launch.function import Called
from tilemesh.parallel.mesh import Mesh
from tilemesh.runs.metrics import STEP, latest
from tilemesh.runs.names import ROLLOUTS
from tilemesh.train.rank import lay_model

FUNCTIONS = """
import os, sys, time

class Number:  # as one of numpy's or torch's
    def item(self):
        return 0.5

def score(prompt, answer, case):
    print("what it prints is no score")
    if answer == "raise":
        raise ValueError("cannot parse")
    if answer == "hang":
        time.sleep(60)
    if answer == "die":
        os._exit(3)
    if answer == "interrupted":
        os.kill(os.getpid(), 2)  # as Ctrl-C does to all processes of a terminal
    if answer == "text":
        return "ten"
    if answer == "nan":
        return float("nan")
    if answer == "long":
        raise ValueError("a line\\n" * 100_000)
    if answer == "half a character":
        return {"score": 1, "\\ud800": 2}
    if answer == "parts":
        return {"score": 0.5, "format": 1.0}
    if answer == "unnamed":
        return {"format": 1.0}
    if answer == "numpy":
        return {"score": Number(), "format": True}
    if answer == "object":
        return object()
    return len(answer) / 10 + case.get("bonus", 0)
"""
QUICK = ("evaluate.every=0", "checkpoint.every=0", "train.trace_steps=0", "align.held_out=2", "train.device=cpu")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start") / "model", "vowels", 4)


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def test_a_verifier_that_crashes_hangs_or_talks_nonsense_never_pays(functions: Path) -> None:
    verifier = Verifier(f"{functions}:score", deadline_s=0.5)
    words = [
        "fine",
        "raise",
        "hang",
        "die",
        "text",
        "nan",
        "unnamed",
        "object",
        "long",
        "parts",
        "numpy",
        "half a character",
    ]
    try:
        scored = verifier([("p", word, {"bonus": 0.1}) for word in words])
    finally:
        verifier.close()
    assert [each.failure == "" for each in scored] == [word in ("fine", *words[-3:]) for word in words]
    assert [dict(each.parts) for each in scored if not each.failure] == [
        {"score": 0.5}, *[{"score": 0.5, "format": 1.0}] * 2, {"score": 1.0, "?": 2.0},
    ]  # fmt: skip
    failures = dict(zip(words, [each.failure for each in scored], strict=True))
    assert "cannot parse" in failures["raise"]
    assert "within 0.5 s" in failures["hang"]
    assert "ended" in failures["die"]
    assert "'ten': expected a number" in failures["text"]
    assert failures["long"].startswith("ValueError: a line a line")
    assert len(failures["long"]) == 300
    with pytest.raises(UsageError, match=r"expected FILE\.py:FUNCTION"):
        Verifier("functions", 1.0)
    functions.write_text("import nothing_like_that\n")
    with pytest.raises(UsageError, match="nothing_like_that"):
        Verifier(f"{functions}:score", 1.0)([("p", "a", {})])
    functions.write_text("import os\nos.abort()\n")
    with pytest.raises(UsageError, match="could not be started: its process ended"):
        Verifier(f"{functions}:score", 1.0)([("p", "a", {})])


def test_answers_that_were_sent_ahead_keep_their_places(functions: Path) -> None:
    """Among 200 of up to 40 kB, those that end the process or are too slow are the only ones without a score."""
    verifier = Verifier(f"{functions}:score", deadline_s=2.0)
    words = ["x" * (number % 7 + 1) * (6000 if number % 31 == 0 else 1) for number in range(200)]
    words[20], words[21], words[150], words[151] = "die", "die", "raise", "interrupted"
    try:
        scored = verifier([("p", word, {}) for word in words])
    finally:
        verifier.close()
    for word, each in zip(words, scored, strict=True):
        assert (each.parts.get("score"), each.failure == "") == (
            (None, False) if word in ("die", "raise") else (len(word) / 10, True)
        )


READS = """
import subprocess, sys

def score(prompt, answer, record):
    if answer == "long":
        return 10**400
    return len(answer) + len(sys.stdin.read()) + len(subprocess.run(["cat"], capture_output=True).stdout)
"""


def test_a_verifier_that_reads_its_input_is_given_no_other_calls(tmp_path: Path) -> None:
    """The calls after it are there, and whoever took one shifted the scores of those behind it by one."""
    path = tmp_path / "reads.py"
    path.write_text(READS)
    verifier = Verifier(f"{path}:score", deadline_s=20.0)
    try:
        scored = verifier([("p", "a" * number, {}) for number in range(5)] + [("p", "long", {})])
    finally:
        verifier.close()
    assert [each.parts.get("score") for each in scored] == [0, 1, 2, 3, 4, None]
    assert "hundreds of digits" in scored[-1].failure


STARTS = """
import pathlib, subprocess, time

def score(prompt, answer, record):
    child = subprocess.Popen(["sleep", "333"])
    pathlib.Path(prompt).write_text(str(child.pid))
    time.sleep(333)
"""


def test_what_a_verifier_started_ends_with_it(tmp_path: Path) -> None:
    """Behind its deadline: otherwise each call that is too slow leaves a process behind."""
    path, note = tmp_path / "starts.py", tmp_path / "child"
    path.write_text(STARTS)
    verifier = Verifier(f"{path}:score", deadline_s=5.0)
    (scored,) = verifier([(str(note), "a", {})])
    assert "no answer within 5 s" in scored.failure
    deadline = time.monotonic() + 10
    while _is_running(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(int(note.read_text()))


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # what has no parent is taken away by the system, when it gets round to it


ENVIRONMENT = """
import json, pathlib
def reply(prompt, turns, case):
    with pathlib.Path(__file__).with_name("calls.jsonl").open("a") as file:
        file.write(json.dumps([prompt, turns]) + "\\n")
    if prompt.startswith("b"):
        raise ValueError("no more")
    return "ab:" if len(turns) < 3 else None
def score(prompt, answer, case):
    assert answer == case.get("turns", [answer])[-1]
    return float(len(case.get("turns", [answer])))
"""


def test_a_conversation_goes_on_with_what_a_users_function_says(tmp_path: Path) -> None:
    """Prompt, answer, reply, answer: what was drawn is trained, what was said is not, and engine and training agree on
    all of it. Where the function fails, or an answer had no end, a conversation has one answer."""
    start = write_start(tmp_path / "start", "vowels", 40)
    functions = tmp_path / "talk.py"
    functions.write_text(ENVIRONMENT)
    sets = (
        "align.task=vowels", f'align.rewards=["{functions}:score=0.1"]', f"align.environment={functions}:reply",
        "align.turns=3", "align.prompts=12", "align.answers=2", "align.max_tokens=9", "align.epochs=2", "train.steps=2",
    )  # fmt: skip
    folder = fit(load(start, sets=[*QUICK, *sets]), start, run=tmp_path / "run", stop_after=1).folder
    rollout, arrays, _ = unpacked_bytes((folder / ROLLOUTS / "batch-00000000.safetensors").read_bytes())
    talks, refused = 0, 0
    for row in range(len(rollout)):
        tokens, drawn = rollout.tokens[rollout.row(row)], rollout.trainable[rollout.row(row)]
        assert not drawn[:5].any()  # the prompt
        given = np.flatnonzero(~drawn[5:]) + 5
        assert tokens[given].tolist() == (list(b"ab:") if len(given) else [])
        assert arrays[f"part {functions}:score"][row] == (3 if len(given) else 1)
        is_refused = bytes(tokens[:1].tolist()) == b"b"
        assert not (is_refused and len(given))
        talks, refused = talks + (len(given) > 0), refused + is_refused
    assert talks > 0
    assert refused > 0
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    (line,) = (line for line in latest(folder) if line["kind"] == STEP)
    prompts = [bytes(rollout.tokens[rollout.row(row)][:1].tolist()) for row in range(len(rollout))]
    failed = sum((prompt, finish) == (b"b", "stop") for prompt, finish in zip(prompts, rollout.finish, strict=True))
    assert failed > 0
    assert (line["unheard"], line["unheard_why"]) == (failed / len(rollout), "ValueError: no more")
    assert line["unscored"] == 0
    assert {len(turns) for _, turns in calls} == {1, 3}
    assert all(turns[1] == "ab:" for _, turns in calls if len(turns) == 3)
    assert [line["mismatch"] < 1e-4 for line in latest(folder) if line["kind"] == STEP] == [True]
    more = ("align.max_tokens=1", "align.held_out=0", "train.steps=1")
    cut = fit(load(start, sets=[*QUICK, *sets, *more]), start, run=tmp_path / "cut").folder
    (line,) = (line for line in latest(cut) if line["kind"] == STEP)
    assert (line["truncated"], line["unheard"]) == (1, 1)
    assert line["unheard_why"] == "answers are cut at 1 tokens, and only one that ended is heard"
    with pytest.raises(UsageError, match="needs a function"):
        load(start, sets=[*QUICK, "align.task=vowels", "align.turns=2"])


def test_what_is_said_and_is_no_text_ends_a_conversation() -> None:
    turns = AnswerTurns.__new__(AnswerTurns)
    served = SimpleNamespace(tokenizer=Bytes())
    turns.prompts = cast("Any", SimpleNamespace(served=served, context=32))
    turns.align = cast("Any", SimpleNamespace(turns=2, longest=4))
    turns._environment = cast("Any", lambda calls: [Called("half \ud800"), Called("é")])
    going = [DrawnTalk(Prompt({}, "a", [1], 0), place, [Segment([1])], ["b"], "stop") for place in range(2)]
    assert turns.heard(going, 1) == going[1:]
    assert [each.failure for each in going] == ["what it said is not UTF-8 text", ""]


def test_what_cannot_be_scored_gets_the_least_that_any_got_and_at_most_nothing() -> None:
    rewards = object.__new__(Rewards)
    rewards.weights = {"task": 1.0, "style": 0.5}
    parts = {"task": np.array([1.0, math.nan, -2.0, 3.0]), "style": np.array([0.0, 1.0, 2.0, math.nan])}
    assert rewards.total(parts).tolist() == [1.0, -1.0, -1.0, -1.0]
    assert rewards.total({"task": np.array([2.0, math.nan]), "style": np.zeros(2)}).tolist() == [2.0, 0.0]
    rewards.weights = {"task": 1.0, "watched": 0.0}  # which counts for nothing and may be missing
    parts = {"task": np.array([2.0, 1.0]), "watched": np.array([math.nan, 3.0])}
    assert rewards.total(parts).tolist() == [2.0, 1.0]
    check_rewards(rewards.total(parts), parts, rewards.weights)
    rewards.weights = {"task": 0.0}
    assert rewards.total({"task": np.array([2.0, math.nan])}).tolist() == [0.0, 0.0]
    scorers = read_scorers(FeedbackConfig(task="sort", rewards=("check.py:score", "task=0.5", "runs/judge=2")))
    assert scorers == {
        "task": ("sort", 0.5, False), "check.py:score": ("check.py:score", 1.0, False),
        "runs/judge": ("runs/judge", 2.0, True),
    }  # fmt: skip


def test_built_in_tasks_pay_their_examples_most_and_nonsense_nothing() -> None:
    for task in TASKS.values():
        for number in range(20):
            case = task.case(0, number)
            assert case == task.case(0, number)
            scores = [task.score(case["prompt"], answer, case) for answer in (task.example(case), "", "\x00\xff;%")]
            best, *others = [score["score"] if isinstance(score, dict) else score for score in scores]
            assert best == 1, task.name
            assert others == [0, 0], task.name


def test_a_users_function_pays_in_a_run(start: Path, tmp_path: Path, functions: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}:", "bonus": n}) + "\n" for n in range(8)))
    sets = [f"align.task={functions}:score", f"align.prompts_file={prompts}", "align.prompts=2", "align.answers=2",
            "align.max_tokens=4", "train.steps=2", *QUICK]  # fmt: skip
    folder = fit(load(start, sets=sets), start, run=tmp_path / "run").folder
    lines = [line for line in latest(folder) if line["kind"] == STEP]
    assert all(math.isfinite(line["reward"]) and line["unscored"] == 0 for line in lines)


def write_pairs(path: Path, count: int) -> Path:
    """The answer with more vowels was preferred."""
    generator = np.random.default_rng(0)
    lines = []
    for number in range(count):
        case = TASKS["vowels"].case(5, number)
        words = ["".join(generator.choice(list(letters), 4)) for letters in ("aeiou", "bcdfg")]
        lines.append(json.dumps({"prompt": case["prompt"], "chosen": words[0], "rejected": words[1]}))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_pairs_train_a_policy_and_a_reward_model_which_then_pays(start: Path, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", 64)
    both = [f"align.preferences={pairs}", "align.prompts=8", "train.steps=12", "optimizer.lr=2e-3", *QUICK]
    dpo = fit(load(start, sets=["align.algorithm=dpo", *both]), start, run=tmp_path / "dpo").folder
    lines = [line for line in latest(dpo) if line["kind"] == STEP]
    assert lines[0]["pair_loss"] == pytest.approx(math.log(2), abs=1e-6)  # the model is its own reference
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[-1]["accuracy"] > 0.9
    reward = fit(load(start, sets=["align.algorithm=reward", *both]), start, run=tmp_path / "reward").folder
    lines = [line for line in latest(reward) if line["kind"] == STEP]
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)  # a head of zeros
    assert lines[-1]["accuracy"] > 0.9
    config = load(start, sets=["align.task=vowels", f'align.rewards=["{reward}=1", "task=0"]', "align.prompts=2",
                               "align.answers=2", "train.steps=1", *QUICK])  # fmt: skip
    paid = fit(config, start, run=tmp_path / "paid").folder
    (line,) = (line for line in latest(paid) if line["kind"] == STEP)
    assert line["reward"] == pytest.approx(line[f"reward/{reward}"])
    laid = lay_model(config.training, Mesh(connect("alone")), torch.device("cpu"), False)
    model = read_reward_model(reward, laid)
    assert model.model.value_head.weight.abs().sum() > 0


def test_a_pair_ends_as_an_answer_of_the_model_does() -> None:
    """Of several tokens after which an answer ends: with the one of the chat template, or of the tokenizer."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}\n{% if add_generation_prompt %}>{% endif %}"
    )
    served = ServedText(Bytes(end=7), frozenset({1, 7, ord("\n"), ord("|")}), template)
    both = {"chosen": "yes", "rejected": "no"}
    for case, end in [({"messages": [{"role": "user", "content": "a"}]}, ord("|")), ({"prompt": "a"}, 7)]:
        chosen, rejected, _ = pair_of({**case, **both}, served)
        assert (chosen[-1], rejected[-1]) == (end, end)


@pytest.mark.parametrize("microbatch", [2, 4])
def test_a_held_out_loss_is_a_mean_over_pairs(microbatch: int) -> None:
    """However many are in a microbatch, and however long they are."""
    source = object.__new__(PairSource)
    source.config = SimpleNamespace(plan=SimpleNamespace(microbatch=microbatch))  # type: ignore[assignment]
    source.mesh = SimpleNamespace(dp=SimpleNamespace(index=0, size=1))  # type: ignore[assignment]
    source.device, source.reference = torch.device("cpu"), None
    source.kept = [Pair([1] * length, [1] * length, 1) for length in (3, 9, 4)]
    losses, total, tokens = iter([1.0, 2.0, 6.0]), 0.0, 0
    for batch in source.held_out():
        weight_N = batch.tensors[2][1]
        total += float(weight_N[0]) * sum(next(losses) for _ in range(len(batch.tensors[0]) // 2))
        tokens += len(weight_N)
    assert total / tokens == pytest.approx(3)


def test_wrong_pairs_and_prompts_are_named(start: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    for text, words in [('{"prompt": "a", "chosen": "b"}\n', "pair 1"), ("{}\n", "line 1"), ("nope\n", "no JSON"),
                        ('{"prompt": null, "chosen": "b", "rejected": "c"}\n', "prompt is None: expected text"),
                        ('{"prompt": "", "chosen": "b", "rejected": "c"}\n', "an empty prompt")]:  # fmt: skip
        file.write_text(text)
        config = load(start, sets=["align.algorithm=dpo", f"align.preferences={file}", "align.prompts=1", *QUICK])
        with pytest.raises(UsageError, match=words):
            fit(config, start, run=tmp_path / f"run-{len(text)}")


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["align.task=FILES/f.py:scoer"], "has no attribute 'scoer'"),
        (["align.task=FILES/f.py:NUMBER"], "NUMBER is a value"),
        (["align.task=FILES/broken.py:score"], "nothing_like_that"),
        (["align.task=f:score"], "expected FILE.py:FUNCTION"),
        (["align.environment=FILES/gone.py:say", "align.turns=2"], "is not there"),
        (["align.max_tokens=30"], "a prompt of 3 tokens and answers of up to 30"),
        (["align.prompts_file=FILES/empty.jsonl"], "a prompt has at least one token"),
        (['align.rewards=["FILES/gone.py:s"]'], "is not there"),
        (['align.rewards=["task=x"]'], "expected NAME=WEIGHT"),
        (['align.rewards=["task=nan"]'], "expected NAME=WEIGHT"),
        (['align.rewards=["task=2", "task=1"]'], "task more than once"),
        (['align.rewards=["FILES/gone=0.5"]'], "FILES/gone"),
        (['align.rewards=["START=0.5"]'], "START"),
        (["align.reference=FILES/gone"], "FILES/gone"),
        (["align.repeats=FILES/gone"], "FILES/gone"),
        (["align.algorithm=dpo", "align.preferences=FILES/pairs.jsonl"], "pair 1 has 36 tokens: the context is 32"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would_before_it_has_a_folder(
    start: Path, tmp_path: Path, sets: list[str], words: str
) -> None:
    (tmp_path / "f.py").write_text("NUMBER = 3\ndef score(prompt, answer, case):\n    return 1\n")
    (tmp_path / "broken.py").write_text("import nothing_like_that\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1"}\n' * 3)
    (tmp_path / "empty.jsonl").write_text('{"prompt": "1+1"}\n{"prompt": ""}\n')
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a" * 9, "chosen": "b" * 26, "rejected": "c"}) + "\n")
    base = ["align.task=FILES/f.py:score", "align.prompts_file=FILES/prompts.jsonl", *QUICK]
    named = [text.replace("FILES", str(tmp_path)).replace("START", str(start)) for text in (*base, *sets)]
    folder = tmp_path / "run"
    options = AlignOptions(start=str(start), sets=tuple(named), run=folder)
    said = []
    for each in (replace(options, dry_run=True), options):
        with pytest.raises((UsageError, RunError)) as refused:
            align(each)
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert words.replace("FILES", str(tmp_path)).replace("START", str(start)) in said[0]
    assert not folder.exists()


def test_answers_that_nobody_limits_fit_the_context(start: Path, functions: Path) -> None:
    cases = functions.with_name("prompts.jsonl")
    cases.write_text('{"prompt": "1+1"}\n')
    sets = [f"align.task={functions}:score", f"align.prompts_file={cases}", *QUICK]
    assert load(start, sets=sets).align.longest == 16
    assert load(start, sets=[*sets, "align.max_tokens=20"]).align.longest == 20


def test_what_is_held_out_is_asked_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "number": n}) + "\n" for n, prompt in enumerate("abcabda")))
    align = FeedbackConfig(task="own", prompts_file=path, held_out=2)
    source = PromptSource(align, 0, ServedText(Bytes(), frozenset()), 99)
    assert [case["number"] for case in source.cases] == [1, 2, 4]
    assert [prompt.text for prompt in source.held_out()] == ["d", "a"]
    assert without_last([1, 1, 1], 1, int) == ([1, 1], [1])  # nothing else would be left


def test_lines_of_cases_end_where_jsonl_has_them_end(tmp_path: Path) -> None:
    """A separator of lines that stands unescaped in a text, as ensure_ascii=False writes it, is text."""
    path = tmp_path / "cases.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\r\n\n{"prompt": "c\x85"}\n', encoding="utf-8", newline="")
    assert [case["prompt"] for case in read_cases(path)] == ["a\u2028b", "c\x85"]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # the mark that editors of Windows put before a file
    assert len(read_cases(path)) == 2
    with pytest.raises(UsageError, match=r"gone\.jsonl does not exist: expected a JSONL file$"):
        read_cases(tmp_path / "gone.jsonl")


def test_a_file_of_cases_that_is_too_large_is_said_to_be_also_where_its_end_is_half_a_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilemesh.data.cases._MOST_BYTES", 15)
    path = tmp_path / "cases.jsonl"
    path.write_text('{"prompt": "éé"}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="is larger than"):
        read_cases(path)
