"""Text from logits, and a model read from weights that lie anywhere: both below training, which serving cannot use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilemesh.core.config import section
from tilemesh.core.errors import UsageError
from tilemesh.model.cache import KeyValueCache
from tilemesh.model.config import ModelConfig
from tilemesh.model.read import read_model, read_weights
from tilemesh.model.sampling import sample
from tilemesh.model.transformer import Transformer

CONFIG = ModelConfig(layers=1, width=8, heads=2, vocabulary=11, context=6)


def next_number(tokens_BT: Tensor, cache: KeyValueCache) -> Tensor:
    """Thinks that each token is followed by the next number."""
    return torch.nn.functional.one_hot((tokens_BT + 1) % 50, 50) * 100.0


def test_the_likeliest_token_follows_and_a_full_context_begins_anew_with_its_second_half() -> None:
    read: list[list[int]] = []

    def logits(tokens_BT: Tensor, cache: KeyValueCache) -> Tensor:
        read.append(tokens_BT[0].tolist())
        return next_number(tokens_BT, cache)

    assert sample(logits, [3, 4], 5, context=4, temperature=0) == [5, 6, 7, 8, 9]
    assert read == [[3, 4], [5], [6], [6, 7], [8]]
    assert sample(next_number, list(range(9)), 1, context=4) == [9]
    assert sample(next_number, [1], 0, context=4) == []


def test_the_same_seed_draws_the_same_text() -> None:
    def even(tokens_BT: Tensor, cache: KeyValueCache) -> Tensor:
        return torch.zeros(*tokens_BT.shape, 1000)

    drawn = [sample(even, [0], 4, context=8, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompt": []}, "an empty prompt"),
        ({"tokens": -1}, "tokens is -1: expected a whole number"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_what_cannot_be_sampled_is_refused(given: dict[str, object], words: str) -> None:
    asked: dict[str, object] = {"prompt": [1], "tokens": 1, **given}
    with pytest.raises(UsageError, match=words):
        sample(next_number, context=4, **asked)  # type: ignore[arg-type]


class Held:
    """Weights of a model, by name."""

    def __init__(self, model: Transformer) -> None:
        self.parameters = dict(model.named_parameters())

    def weight(self, name: str) -> Tensor:
        return self.parameters[name].detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_read_from_any_weights(dtype: torch.dtype) -> None:
    written = Transformer(CONFIG, seed=3, dtype=dtype)
    found = read_model(CONFIG, Held(written))
    tokens_BT = torch.arange(5)[None]
    assert torch.equal(found(tokens_BT), written.eval()(tokens_BT))
    assert not found.training
    assert not any(parameter.requires_grad for parameter in found.parameters())
    assert read_weights(CONFIG, Held(written)).keys() == dict(written.named_parameters()).keys()


def test_one_section_of_a_configuration_is_read_without_the_others() -> None:
    text = '[model]\nlayers = 1\nwidth = 8\nheads = 2\nvocabulary = 11\ncontext = 6\n[anything]\nat = "all"\n'
    assert section(ModelConfig, "model", text, "config.toml") == CONFIG
    with pytest.raises(UsageError, match=r"config\.toml: model is 3: expected a section \[model\]"):
        section(ModelConfig, "model", "model = 3", "config.toml")
    with pytest.raises(UsageError, match="widht"):
        section(ModelConfig, "model", "[model]\nwidht = 3", "config.toml")
