"""Text and Hugging Face folders from a run: its configuration and a checkpoint, read into one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tilemesh.core.ranges import check_sampling
from tilemesh.data.corpus import tokenizer_of
from tilemesh.data.tokenizer import encode_prompt
from tilemesh.model.read import read_model, read_weights
from tilemesh.model.sampling import sample
from tilemesh.runs.reader import Reader, open_checkpoint
from tilemesh.train.check import check_written_model
from tilemesh.train.config import TrainConfig, of_run


def generate(
    run: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.7,
    seed: int = 0,
    step: int | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """What a run's checkpoint (the newest sound one, or that of a step) writes after a prompt.

    `say` hears which step is used, where that is not the run's last one.
    """
    check_sampling(tokens, temperature, seed)  # before gigabytes are read
    config, reader = _opened(run, step, say)
    model = read_model(config.model, reader, device)
    tokenizer = tokenizer_of(config.data)
    ids = sample(
        lambda x, cache: model(x, cache=cache),
        encode_prompt(tokenizer, prompt),
        tokens,
        context=config.model.context,
        temperature=temperature,
        seed=seed,
        device=device,
    )
    return tokenizer.decode(ids)


def export(
    run: str | Path, folder: str | Path, step: int | None = None, say: Callable[[str], None] = lambda text: None
) -> int:
    """Write a run's checkpoint as a Hugging Face folder; returns its step. `say` as in `generate`."""
    from tilemesh.model import huggingface

    config, reader = _opened(run, step, say)
    huggingface.save_parameters(config.model, read_weights(config.model, reader), folder)
    return reader.manifest.step


def _opened(run: str | Path, step: int | None, say: Callable[[str], None]) -> tuple[TrainConfig, Reader]:
    config = of_run(run)
    reader = open_checkpoint(run, step, say)
    check_written_model(reader.manifest, config.model, run)
    return config, reader
