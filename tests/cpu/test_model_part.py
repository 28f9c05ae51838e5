"""Parts of a model: they hold what they say, and one after the other they are the whole, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig
from tilemesh.model.loss import loss_sum
from tilemesh.model.part import TIED, ModelPart, cut_parts, whole_part
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.weights import shard_parameters
from tilemesh.parallel import Mesh, lay

SMALL: dict[str, Any] = {"layers": 5, "width": 16, "heads": 4, "vocabulary": 18, "context": 8}
LLAMA: dict[str, Any] = {
    "kv_heads": 2, "mlp_width": 24, "norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "biases": False,
}  # fmt: skip
MODELS = {
    "gpt": ModelConfig(**SMALL, dropout=0.2),
    "post": ModelConfig(**SMALL, norm_place="post", tied=False),
    "llama": ModelConfig(**SMALL, **LLAMA, tied=False),
    "tied llama": ModelConfig(**SMALL, **LLAMA),
}
CUTS = [(5,), (2, 3), (1, 3, 1), (0, 4, 1)]
TOKENS = torch.randint(18, (2, 8), generator=torch.Generator().manual_seed(1))
TARGETS = TOKENS.roll(-1, dims=1)


@given(
    st.sampled_from(list(MODELS.values())), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.sampled_from([1, 2])
)
def test_parts_hold_what_the_planner_counts(config: ModelConfig, layers: list[int], tp: int) -> None:
    config = config.replace(layers=sum(layers))
    shards = shard_parameters(config, tp)
    for part in cut_parts(config, layers):
        held = sum(weight.held(tp) for weight in part.weights(config))
        assert held == shards.stage(len(part.layers), part.embedding, part.head)
        assert part.shared(config) == ((TIED,) if config.tied and part.embedding != part.head else ())


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_part_has_the_parameters_it_says_by_their_names_and_with_the_weights_of_the_whole(
    config: ModelConfig,
) -> None:
    full = dict(Transformer(config, seed=3).named_parameters())
    seen: set[str] = set()
    for part in cut_parts(config, (2, 2, 1)):
        made = dict(Transformer(config, seed=3, part=part).named_parameters())
        assert {name.rpartition(".")[0] for name in made} == {weight.name for weight in part.weights(config)}
        assert all(torch.equal(value, full[name]) for name, value in made.items())
        assert seen & made.keys() == (set(part.shared(config)) if part.head else set())
        seen |= made.keys()
    assert seen == full.keys()


@pytest.mark.parametrize("layers", CUTS, ids=str)
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_parts_in_a_row_are_the_whole(config: ModelConfig, layers: tuple[int, ...]) -> None:
    full = Transformer(config, seed=3, dtype=torch.float64)
    loss_sum(full(TOKENS, dropout_seed=7), TARGETS)[0].backward()
    parts = [Transformer(config, seed=3, dtype=torch.float64, part=part) for part in cut_parts(config, layers)]
    x: Tensor | None = None
    for part in parts:
        x = part(TOKENS, x_BTD=x, dropout_seed=7)
    assert x is not None
    loss_sum(x, TARGETS)[0].backward()
    gradients: dict[str, Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = gradients.get(name, torch.zeros(())) + parameter.grad  # a tied table: of both its uses
    for name, parameter in full.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_laid_parts_in_a_row_are_the_laid_whole(config: ModelConfig, sequence: bool) -> None:
    """Two stages over tp 2, one after the other on the same two ranks."""
    plan = ParallelPlan(tp=2, sequence_parallel=sequence, precision="fp64")

    def main(comm: Communicator) -> None:
        mesh = Mesh(comm, tp=2)
        made = [lay(Transformer(config, device="meta", dtype=torch.float64, part=part), mesh, plan)
                for part in (whole_part(config), *cut_parts(config, (2, 3)))]  # fmt: skip
        for laid in made:
            laid.initialize(3)
        full, first, last = made
        wanted, count = full.loss(TOKENS, TARGETS, dropout_seed=7)
        x = first.activations(TOKENS, dropout_seed=7).x
        found, _ = last.loss(TOKENS, TARGETS, x_BTD=x, dropout_seed=7)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        wanted.backward()
        found.backward()
        gradients: dict[str, Tensor] = {}
        for laid in (first, last):
            for name, held in laid.held.items():
                assert held.tensor.grad is not None
                gradients[name] = gradients.get(name, torch.zeros(())) + held.tensor.grad
        for name, held in full.held.items():
            torch.testing.assert_close(gradients[name], held.tensor.grad, rtol=1e-12, atol=1e-12)
        with pytest.raises(UsageError, match="without its head"):
            first.loss(TOKENS, TARGETS, dropout_seed=7)
        assert count == TOKENS.numel()

    run_threads(2, main, timeout_s=60.0)


def test_what_is_no_part_is_refused() -> None:
    config = MODELS["gpt"]
    with pytest.raises(UsageError, match="layers 3 to 6: expected some of the model's 0 to 5"):
        Transformer(config, device="meta", part=ModelPart(3, 6, False, False))
    with pytest.raises(UsageError, match="with the head, which is after the last: leave it out"):
        Transformer(config, device="meta", part=ModelPart(0, 2, True, True))
    with pytest.raises(UsageError, match="parts of 2, 2 layers: expected numbers that add up to 5"):
        cut_parts(config, (2, 2))
    middle = Transformer(config, part=cut_parts(config, (2, 2, 1))[1])
    with pytest.raises(UsageError, match="expected x_BTD, the activations of the part before it"):
        middle(TOKENS, dropout_seed=1)
