"""Text from a model: one token after the other, each drawn from what the model thinks comes next.

`sample` works with any function from tokens and a cache to logits, so a model laid over ranks and one in one process
write the same text from the same weights and seed. `generate` reads a run's checkpoint into one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tilemesh.core.errors import RunError, UsageError
from tilemesh.data.corpus import tokenizer_of
from tilemesh.data.tokenizer import encode_prompt
from tilemesh.model.cache import DenseCache, KeyValueCache
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.runs.reader import Reader, open_checkpoint
from tilemesh.train.config import TrainConfig, check_written_model, of_run

Logits = Callable[[Tensor, KeyValueCache], Tensor]


def sample(
    logits: Logits,
    prompt: Sequence[int],
    tokens: int,
    *,
    context: int,
    temperature: float = 0.7,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[int]:
    """So many tokens after the prompt. Temperature 0 always takes the likeliest.

    When the context is full, its second half is read again as a new beginning: cheaper than moving on by one token.
    """
    if not prompt:
        raise UsageError("an empty prompt: give at least one character")
    if tokens < 0:
        raise UsageError(f"{tokens} tokens were asked for: expected 0 or more")
    if not temperature >= 0:
        raise UsageError(f"temperature is {temperature}: expected 0 or more")
    generator = torch.Generator().manual_seed(seed)
    whole = list(prompt)
    cache = DenseCache(1, context, device)
    pending = whole[-context:]
    for _ in range(tokens):
        if cache.lengths[0] + len(pending) > context:
            cache, pending = DenseCache(1, context, device), whole[-max(1, context // 2) :]
        with torch.no_grad():
            found = logits(torch.tensor([pending], device=device), cache.extend(len(pending)))[0, -1]
        scores = found.double().cpu()  # drawn on the CPU: the same text on every device with the same logits
        if temperature == 0:
            token = int(scores.argmax())
        else:
            shares = torch.softmax(scores / temperature, dim=0)
            token = int(torch.multinomial(shares, 1, generator=generator))
        whole.append(token)
        pending = [token]
    return whole[len(prompt) :]


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


def read_model(config: ModelConfig, reader: Reader, device: str = "cpu") -> Transformer:
    """The whole model in one process, for reading: no dropout, no gradients."""
    weights = read_weights(config, reader)
    dtype = next(iter(weights.values())).dtype
    model = Transformer(config, device="meta", dtype=dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model.eval().requires_grad_(False)


def read_weights(config: ModelConfig, reader: Reader) -> dict[str, Tensor]:
    """The model's parameters by their names, each of the shape that the configuration says."""
    weights = {}
    for name, parameter in Transformer(config, device="meta").named_parameters():
        weights[name] = reader.weight(name)
        if weights[name].shape != parameter.shape:
            there, here = tuple(weights[name].shape), tuple(parameter.shape)
            raise RunError(f"{name} has shape {there} in {reader.folder} and {here} in this model: it is another's")
    return weights


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
