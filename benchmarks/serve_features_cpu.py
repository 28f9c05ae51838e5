"""What parts of the serving engine bring on this machine's CPU: prefix sharing, chunks, paging, guessing ahead.

    python benchmarks/serve_features_cpu.py [prefix] [chunks] [waste] [guesses] [start]     # default: all; minutes

Each line says what was expected before it was measured. Variants are interleaved; medians, on an idle machine.
The model is a random Llama; the draft model is its first layer, and what the other layers add is scaled down, so that
the two agree about as often as a real pair does.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable

import torch

from tilemesh.data.tokenizer import Unknown
from tilemesh.model import huggingface
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.core import AnswerPart
from tilemesh.serve.load import ServedModel
from tilemesh.serve.speculate import DraftLengths

CONFIG = ModelConfig(
    layers=8, width=512, heads=8, kv_heads=4, mlp_width=1536, vocabulary=4096, context=1280, norm="rmsnorm",
    positions="rotary", activation="swiglu", biases=False, tied=False,
)  # fmt: skip


def served(layers: int = 8, agree: float = 1.0) -> ServedModel:
    model = Transformer(CONFIG, seed=1)
    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            for name, parameter in layer.named_parameters():
                if number and name.endswith(("fc_o.weight", "fc_out.weight")):
                    parameter.mul_(agree)
    if layers < CONFIG.layers:
        small = Transformer(CONFIG.replace(layers=layers), seed=1)
        small.load_state_dict({name: model.state_dict()[name] for name in small.state_dict()})
        model = small
    return ServedModel("random", model.eval().requires_grad_(False), Unknown(CONFIG.vocabulary), frozenset())


def first_token_s(engine: Engine, prompt: list[int]) -> float:
    begun = time.perf_counter()
    list(engine.generate([prompt], Sampling(max_tokens=1, temperature=0)))
    return time.perf_counter() - begun


def prefix() -> None:
    draw, model = random.Random(1), served()

    def prompt(shared: list[int], length: int = 1024) -> list[int]:
        return shared + [draw.randrange(4096) for _ in range(length - len(shared))]

    opening = [draw.randrange(4096) for _ in range(922)]  # 90 % of 1,024
    options = {"pages": 900, "step_tokens": 2048}
    with Engine(model, **options) as sharing, Engine(model, share_prefixes=False, **options) as plain:
        first_token_s(sharing, prompt(opening))
        first_token_s(plain, prompt(opening))
        pairs = [(first_token_s(sharing, prompt(opening)), first_token_s(plain, prompt(opening))) for _ in range(5)]
        with_s, without_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"prefix | 1,024 tokens, 90 % shared: first token {with_s * 1e3:.0f} ms, without {without_s * 1e3:.0f} ms: "
            f"{with_s / without_s:.3f} | expected 0.11 of the tokens, at most 0.2"
        )
        pairs = [(first_token_s(sharing, prompt([], 256)), first_token_s(plain, prompt([], 256))) for _ in range(15)]
        ratio = statistics.median(one / other for one, other in pairs)
        print(f"prefix | no hits, 256 tokens: {ratio:.3f} of without | expected 1.00, at most 1.02")


def chunks() -> None:
    model, draw = served(), random.Random(2)
    found = {}
    for name, size in (("64 tokens", 64), ("unchunked", 2048)):
        with Engine(model, pages=900, step_tokens=2112, chunk_tokens=size, share_prefixes=False) as engine:
            times: list[float] = []
            done = threading.Event()

            def tell(part: AnswerPart, times: list[float] = times, done: threading.Event = done) -> None:
                times.append(time.perf_counter())
                if part.finish is not None:
                    done.set()

            engine.submit([3], Sampling(max_tokens=120, temperature=0, ignore_eos=True), tell)
            for _ in range(4):
                prompt = [draw.randrange(4096) for _ in range(1024)]
                list(engine.generate([prompt], Sampling(max_tokens=1, temperature=0)))
            done.wait()
            gaps = sorted(after - before for before, after in itertools.pairwise(times))
            found[name] = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
    told = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in found.items())
    print(
        f"chunks | p99 between tokens beside prompts of 1,024: {told}: "
        f"{found['64 tokens'] / found['unchunked']:.3f} | expected about 65 / 1,025 = 0.06, at most 0.3"
    )


def waste() -> None:
    """Places of pages that hold no token, over all steps; a page of 16 wastes 7.5 of a sequence's places on average."""
    model, draw, seen = served(1), random.Random(3), []
    with Engine(model, pages=2000, running=32) as engine:
        scheduler = engine._scheduler
        commit: Callable[..., object] = scheduler.commit

        def looked(*step: object) -> object:
            held = sum(len(request.pages) for request in scheduler.running) * 16
            tokens = sum(request.computed for request in scheduler.running)
            if held and all(request.pending <= 1 for request in scheduler.running):
                seen.append((held, tokens))
            return commit(*step)

        scheduler.commit = looked  # type: ignore[method-assign, assignment]
        prompts = [[draw.randrange(4096) for _ in range(draw.randrange(100, 1024))] for _ in range(64)]
        list(engine.generate(prompts, Sampling(max_tokens=60, temperature=0)))
    held, tokens = (sum(column) for column in zip(*seen, strict=True))
    lengths = [len(prompt) + 30 for prompt in prompts]
    share = 7.5 / (statistics.mean(lengths) + 7.5)
    preallocated = 1 - statistics.mean(lengths) / CONFIG.context
    print(
        f"waste  | 100 to 1,024 tokens: {1 - tokens / held:.3f} of the places | expected {share:.3f}, at most "
        f"0.04; one block of the whole context per sequence would waste {preallocated:.2f}"
    )


def tokens_per_s(engine: Engine, prompt: list[int], count: int = 96) -> float:
    begun = time.perf_counter()
    (made,) = engine.generate([prompt], Sampling(max_tokens=count, temperature=0, ignore_eos=True))
    return len(made.answers[0].tokens) / (time.perf_counter() - begun)


def guesses() -> None:
    model = served()
    period = [11, 12, 13, 14, 15, 16, 17]
    text = period * 12
    with Engine(model, pages=300) as plain, Engine(model, pages=300, speculate=8) as guessing:
        tokens_per_s(plain, text, 8), tokens_per_s(guessing, text, 8)
        pairs = [(tokens_per_s(guessing, text), tokens_per_s(plain, text)) for _ in range(3)]
        ratio = statistics.median(one / other for one, other in pairs)
        status = guessing.status
    print(
        f"n-gram | random model, greedy: {ratio:.2f} times as fast, {status.guessed_right} of {status.guessed} guesses "
        "right | at least 1.5 where text repeats"
    )
    for agree in (0.02, 0.2):
        target, small = served(8, agree), served(1, agree)
        draw = random.Random(4)
        prompts = [[draw.randrange(4096) for _ in range(40)] for _ in range(3)]
        with Engine(target, pages=300) as plain, Engine(target, pages=300, draft=small, speculate=4) as drafting:
            tokens_per_s(plain, prompts[0], 8), tokens_per_s(drafting, prompts[0], 24)
            before = drafting.status
            pairs = [(tokens_per_s(drafting, prompt), tokens_per_s(plain, prompt)) for prompt in prompts]
            lengths, after = drafting._guesser, drafting.status
            assert isinstance(lengths, DraftLengths)
            ratio = statistics.median(one / other for one, other in pairs)
            steps = after.steps - before.steps
            right, guessed = after.guessed_right - before.guessed_right, after.guessed - before.guessed
            fixed_s, token_s = lengths._line()
            mean = guessed / max(1, steps)
            alone = fixed_s + token_s
            formula = (steps + right) / steps * alone / (alone + token_s * mean + lengths.pass_s * mean)
        print(
            f"draft  | 1 of 8 layers: {right} of {guessed} right, {mean:.1f} per step: {ratio:.2f} times as fast "
            f"| formula {formula:.2f} (a draft pass takes {lengths.pass_s / alone:.2f} of a step, a checked token "
            f"{token_s / alone:.2f})"
        )


def start() -> None:
    """From the command to the first token over HTTP, of this model in a Hugging Face folder."""
    with tempfile.TemporaryDirectory() as folder:
        huggingface.save(served().model, folder)
        seconds = []
        for _ in range(2):
            begun = time.perf_counter()
            words = [sys.executable, "-m", "tilemesh", "serve", folder, "--port", "0"]
            with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
                assert process.stderr is not None
                ports = (int(found[1]) for line in process.stderr if (found := re.search(r":(\d+)/v1", line)))
                port = next(ports, None)
                if port is None:
                    sys.exit("start  | `tilemesh serve` did not start: pip install 'tilemesh[serve]'")
                body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1}).encode()
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", body) as reply:
                    reply.read()
                seconds.append(time.perf_counter() - begun)
                process.terminate()
    shown = ", then ".join(f"{one:.1f} s" for one in seconds)
    print(f"start  | from `tilemesh serve` to the first token: {shown} | expected 3 s (imports), at most 5 s")


if __name__ == "__main__":
    parts = {"prefix": prefix, "chunks": chunks, "waste": waste, "guesses": guesses, "start": start}
    for name in sys.argv[1:] or parts:
        parts[name]()
