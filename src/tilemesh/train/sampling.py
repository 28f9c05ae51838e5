"""Text from a model: one token after the other, each drawn from what the model thinks comes next.

`sample` works with any function from tokens and a cache to logits, so a model laid over ranks and one in one process
write the same text from the same weights and seed. `generate` reads a run's checkpoint into one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import check_sampling
from tilemesh.data.corpus import tokenizer_of
from tilemesh.data.tokenizer import encode_prompt
from tilemesh.model.cache import DenseCache, KeyValueCache
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.runs.reader import Reader, open_checkpoint
from tilemesh.train.config import of_run

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
    check_sampling(tokens, temperature, seed)
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
            # The largest is 0 before the division: a tiny temperature gives -inf beside it, never inf - inf.
            shares = torch.softmax((scores - scores.max()) / temperature, dim=0)
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


def read_model(config: ModelConfig, reader: Reader, device: str = "cpu") -> Transformer:
    """The whole model in one process, for reading: no dropout, no gradients."""
    weights = {name: reader.weight(name) for name in _names(config)}
    dtype = next(iter(weights.values())).dtype
    model = Transformer(config, device="meta", dtype=dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model.eval().requires_grad_(False)


def export(run: str | Path, folder: str | Path, step: int | None = None) -> int:
    """Write a run's checkpoint as a Hugging Face folder; returns its step."""
    from tilemesh.model import huggingface

    config, reader = of_run(run), open_checkpoint(run, step)
    weights = {name: reader.weight(name) for name in _names(config.model)}
    huggingface.save_parameters(config.model, weights, folder)
    return reader.manifest.step


def _names(config: ModelConfig) -> list[str]:
    return [name for name, _ in Transformer(config, device="meta").named_parameters()]
