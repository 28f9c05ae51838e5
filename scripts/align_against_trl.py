"""Seconds of a GRPO step by tilemesh and by TRL, in turn: the same small model, prompts, function and batch.

python scripts/align_against_trl.py --examples 0 5 --rounds 4 --steps 14 --out rows.jsonl      (needs trl 1.12.0)

Prompts are six digits to sort, after so many worked examples (14 tokens each). Each side runs in a process of its
own on --threads cores, or tilemesh as --dp processes; a row has medians over its steps after the first four, of the
clock and (of this one process, verifier apart) of processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SKIPPED = 4
SCORE = """
def score(prompt, answer, case):
    text, right = answer.split("\\n")[0].strip(), case["answer"]
    if len(text) != 6 or not (text.isascii() and text.isdigit()):
        return 0.0
    return sum(letter == other for letter, other in zip(text, right)) / 6
"""
MODEL = {
    "vocabulary": 256, "context": 256, "layers": 2, "width": 48, "heads": 4, "kv_heads": 2, "mlp_width": 96,
    "activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "tied": False, "biases": False,
}  # fmt: skip


def write_task(folder: Path, examples: int) -> None:
    """A function, prompts, and a model that is right now and then."""
    import torch
    from torch.nn import functional

    from tilemesh.model import huggingface
    from tilemesh.model.config import ModelConfig
    from tilemesh.model.transformer import Transformer

    chance = random.Random(0)

    def case() -> tuple[str, str]:
        digits = [chance.randrange(10) for _ in range(6)]
        return "".join(map(str, digits)) + ">", "".join(map(str, sorted(digits)))

    shown = "".join(f"{prompt}{answer}\n" for prompt, answer in (case() for _ in range(examples)))
    cases = [case() for _ in range(4000)]
    lines = [json.dumps({"prompt": shown + prompt, "answer": answer}) for prompt, answer in cases]
    (folder / "check.py").write_text(SCORE)
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    config = ModelConfig(**MODEL)  # type: ignore[arg-type]
    model = Transformer(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(60):
        some = [f"{shown}{prompt}{answer}\n".encode() for prompt, answer in cases[64 * step : 64 * step + 64]]
        tokens = torch.tensor([list(text) for text in some])
        optimizer.zero_grad()
        logits = model(tokens[:, -14:-1]).flatten(0, 1) if not examples else model(tokens[:, :-1]).flatten(0, 1)
        targets = tokens[:, -13:].flatten() if not examples else tokens[:, 1:].flatten()
        functional.cross_entropy(logits, targets).backward()
        optimizer.step()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    (folder / "model").mkdir()
    huggingface.save_parameters(config, weights, folder / "model", {"eos_token_id": 10})


def run_tilemesh(folder: Path, steps: int, dp: int) -> dict[str, Any]:
    from tilemesh.align.config import load
    from tilemesh.align.job import fit
    from tilemesh.runs.metrics import STEP, latest
    from tilemesh.train.loop import Loop

    marks: list[float] = []
    real = Loop.step

    def step(self: Loop, *given: Any) -> bool:
        marks.append(time.process_time())
        return real(self, *given)

    Loop.step = step  # type: ignore[method-assign]
    sets = [
        f"align.task={folder / 'check.py'}:score", f"align.prompts_file={folder / 'prompts.jsonl'}", "align.prompts=16",
        "align.answers=8", "align.max_tokens=8", "align.held_out=0", "align.kl=off", "optimizer.lr=5e-4",
        f"train.steps={steps}", "evaluate.every=0", "checkpoint.every=0", "train.trace_steps=0", "train.device=cpu",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        run = fit(load(folder / "model", sets=sets, mesh=f"dp={dp}"), folder / "model", run=Path(out) / "run").folder
        lines = [line for line in latest(run) if line["kind"] == STEP][SKIPPED:]
    cpu = [after - before for before, after in zip(marks[SKIPPED:], marks[SKIPPED + 1 :], strict=False)]
    return _row([line["seconds"] for line in lines], cpu, [line["reward"] for line in lines])


def run_trl(folder: Path, steps: int) -> dict[str, Any]:
    import datasets
    import datasets.fingerprint
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tilemesh.train.export import byte_tokenizer

    datasets.disable_caching()
    datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: "x" * 16)
    names: dict[str, Any] = {}
    exec(SCORE, names)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer(), ensure_ascii=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.pad_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens([0, 10])
    cases = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    marks: list[tuple[float, float]] = []

    class Mark(TrainerCallback):
        def on_step_end(self, *given: Any, **more: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    def reward(prompts: Any, completions: Any, answer: Any, **more: Any) -> list[float]:
        rows = zip(prompts, completions, answer, strict=True)
        return [names["score"](prompt, text, {"answer": right}) for prompt, text, right in rows]

    config = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=128, num_generations=8, max_completion_length=8,
        beta=0.0, max_steps=steps, use_cpu=True, bf16=False, learning_rate=5e-4, logging_steps=1, report_to=[],
        save_strategy="no", temperature=1.0, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32), reward_funcs=reward, args=config,
        train_dataset=datasets.Dataset.from_list(cases), processing_class=tokenizer, callbacks=[Mark()],
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    pairs = list(zip(marks[SKIPPED - 1 :], marks[SKIPPED:], strict=False))
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line][SKIPPED:]
    return _row([b[0] - a[0] for a, b in pairs], [b[1] - a[1] for a, b in pairs], rewards)


def _row(wall_s: list[float], cpu_s: list[float], rewards: list[float]) -> dict[str, Any]:
    cpu = statistics.median(cpu_s) if cpu_s else None
    return {
        "steps": len(wall_s),
        "wall_s": statistics.median(wall_s),
        "cpu_s": cpu,
        "reward": statistics.mean(rewards),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, nargs="+", default=[0, 5])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("align_against_trl.jsonl"))
    parser.add_argument("--side", choices=["tilemesh", "trl"])
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.side:
        row = (
            run_trl(asked.folder, asked.steps)
            if asked.side == "trl"
            else run_tilemesh(asked.folder, asked.steps, asked.dp)
        )
        print(f"ROW {json.dumps(row)}")
        return
    with tempfile.TemporaryDirectory() as scratch:
        for examples in asked.examples:
            (Path(scratch) / str(examples)).mkdir()
            write_task(Path(scratch) / str(examples), examples)
        for number in range(asked.rounds):
            for examples in asked.examples:
                for side in ("tilemesh", "trl") if number % 2 else ("trl", "tilemesh"):
                    threads = 1 if side == "tilemesh" and asked.dp > 1 else asked.threads
                    command = [sys.executable, __file__, "--side", side, "--folder", f"{scratch}/{examples}"]
                    command += ["--steps", str(asked.steps), "--dp", str(asked.dp)]
                    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
                    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
                    rows = [line[4:] for line in ended.stdout.splitlines() if line.startswith("ROW ")]
                    if not rows:
                        raise SystemExit(ended.stderr[-2000:])
                    row = {"round": number, "side": side, "prompt_tokens": 7 + 14 * examples, "threads": threads}
                    row |= {"dp": asked.dp if side == "tilemesh" else 1, **json.loads(rows[0])}
                    print(json.dumps(row), flush=True)
                    with asked.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
