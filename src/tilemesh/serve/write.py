"""Text after one prompt, up to the model's end token and of any length: what `tilemesh generate` prints."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable
from pathlib import Path

from tilemesh.core.errors import RunError
from tilemesh.core.ranges import check_sampling
from tilemesh.serve.engine import Engine
from tilemesh.serve.jobs import AnswerPart
from tilemesh.serve.request import FinishReason, Sampling


def generate(
    source: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.7,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    ignore_eos: bool = False,
    step: int | None = None,
    explain: bool = False,
    device: str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """What a run's checkpoint (the newest sound one, or that of a step) or a Hugging Face folder writes after a prompt.

    It ends before the first of the model's end tokens, as an answer of the server does, unless `ignore_eos`.
    `say` hears which step is used, where that is not the run's last one, and with `explain` which programs compute.
    """
    check_sampling(tokens, temperature, seed, top_k, top_p)  # before gigabytes are read
    with Engine(source, device=device, step=step, say=say, running=1) as engine:
        for line in engine.explain() if explain else ():
            say(line)
        whole = engine.encode(prompt)
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, ignore_eos=ignore_eos)
        drawn = generate_tokens(engine, whole, tokens, sampling)
        decode = engine.served.tokenizer.decode  # of a text's first word some drop the blank before it
        return decode([*whole, *drawn])[len(decode(whole)) :]


def generate_tokens(engine: Engine, prompt: list[int], tokens: int, sampling: Sampling) -> list[int]:
    """So many tokens after the prompt, as `model.sampling.sample` draws them, whatever `sampling.max_tokens` is; fewer
    where one of the model's end tokens is drawn, which is not among them.

    When the context is full, its second half is read again as a new beginning.
    """
    whole, context = list(prompt), engine.limits.context
    window = whole[-context:]
    while len(whole) < len(prompt) + tokens:
        drawn = len(whole) - len(prompt)
        # The token that would fill the context is still drawn: it needs no place there.
        most = min(tokens - drawn, context + 1 - len(window))
        answer, ends_with = _ask(engine, window, dataclasses.replace(sampling, max_tokens=most), drawn)
        whole += answer
        if ends_with is not None:
            return whole[len(prompt) : -1]
        window = whole[-max(1, context // 2) :]
    return whole[len(prompt) :]


def _ask(engine: Engine, window: list[int], sampling: Sampling, drawn: int) -> tuple[list[int], str | int | None]:
    """The tokens of an answer, and the one that ended it: the last of them, if one did."""
    parts: queue.SimpleQueue[AnswerPart] = queue.SimpleQueue()  # safe against Ctrl-C while `get` waits
    engine.submit(window, sampling, parts.put, drawn=drawn)
    tokens: list[int] = []
    while True:
        part = parts.get()
        tokens += part.tokens
        if part.finish is FinishReason.ERROR:
            raise RunError(f"the text cannot be written: {part.error}")
        if part.finish is not None:
            return tokens, part.stopped_by
