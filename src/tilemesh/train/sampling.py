"""Text and Hugging Face folders from a run: its configuration and a checkpoint, read into one process."""

from __future__ import annotations

from pathlib import Path

from tilemesh.core.ranges import check_sampling
from tilemesh.data.corpus import tokenizer_of
from tilemesh.data.tokenizer import encode_prompt
from tilemesh.model.read import read_model, read_weights
from tilemesh.model.sampling import sample
from tilemesh.runs.reader import open_checkpoint
from tilemesh.train.config import of_run


def generate(
    run: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.7,
    seed: int = 0,
    step: int | None = None,
    device: str = "cpu",
) -> str:
    """What a run's checkpoint (the newest sound one, or that of a step) writes after a prompt."""
    check_sampling(tokens, temperature, seed)  # before gigabytes are read
    config, reader = of_run(run), open_checkpoint(run, step)
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


def export(run: str | Path, folder: str | Path, step: int | None = None) -> int:
    """Write a run's checkpoint as a Hugging Face folder; returns its step."""
    from tilemesh.model import huggingface

    config, reader = of_run(run), open_checkpoint(run, step)
    huggingface.save_parameters(config.model, read_weights(config.model, reader), folder)
    return reader.manifest.step
