"""One process beside the papers: a Transformer of its own, written from them, that shares no line with `model/`."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from typing import get_args

import pytest
import torch

from tilemesh.comm import connect
from tilemesh.model import config as model_config
from tilemesh.model import documents, fresh, rotary, transformer
from tilemesh.model.config import ModelConfig
from tilemesh.model.families.book import FAMILIES, family_of
from tilemesh.model.loss import IGNORED, loss
from tilemesh.parallel.gate import alone, papers
from tilemesh.parallel.gate.cases import PAPERS, Case, gate_plan
from tilemesh.parallel.gate.compare import Gate


@pytest.mark.parametrize("name", PAPERS)
def test_logits_and_gradients_are_the_papers(name: str) -> None:
    config = PAPERS[name]
    model = alone.whole_model(config, "fp64", "", "cpu")
    tokens, targets = alone.batch(config, 0)
    ours = model(tokens[:4])
    loss(ours, targets[:4]).backward()
    weights = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
    theirs = papers.logits(config, weights, tokens[:4])
    papers.mean_loss(theirs, targets[:4], IGNORED).backward()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * float(theirs.detach().abs().max()))
    gradients = {key: torch.zeros_like(value) if value.grad is None else value.grad for key, value in weights.items()}
    assert all(key.endswith("router.bias") for key, value in weights.items() if value.grad is None)
    size = max(float(gradient.norm()) for gradient in gradients.values())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=0, atol=1e-12 * size, msg=f"{name}: {key}")


@pytest.mark.parametrize("name", ["gpt2", "llama3", "gemma3_text", "gemma2"])
def test_documents_packed_into_a_sequence_are_the_papers_one_by_one(name: str) -> None:
    """Positions begin anew with each, and none sees another: as if every document were computed alone."""
    config = PAPERS[name]
    model = alone.whole_model(config, "fp64", "", "cpu")
    tokens, _ = alone.batch(config, 0)
    marked, weights = tokens[:1].clone(), dict(model.named_parameters())
    bounds = (0, 4, 5, tokens.shape[1])
    for begin in bounds[1:-1]:
        marked[0, begin] = -1 - marked[0, begin]
    each = [papers.logits(config, weights, tokens[:1, begin:end]) for begin, end in itertools.pairwise(bounds)]
    theirs = torch.cat(each, 1)
    bound = 1e-12 * float(theirs.detach().abs().max())
    torch.testing.assert_close(model(marked, marked=True), theirs, rtol=0, atol=bound)


def test_every_family_and_every_setting_is_among_them() -> None:
    assert {family_of(config.replace(family=config.family or name)) for name, config in PAPERS.items()
            if name not in ("post", "llama3", "yarn", "neox", "dropped")} == {*FAMILIES}  # fmt: skip
    for field in dataclasses.fields(ModelConfig):
        values = {getattr(config, field.name) for config in PAPERS.values()}
        choices = {
            "norm": model_config.Norm, "norm_place": model_config.NormPlace, "positions": model_config.Positions,
            "activation": model_config.Activation, "qk_norm": model_config.HeadNorm,
            "rotary_scaling": model_config.RotaryScaling, "router_scores": model_config.RouterScores,
        }  # fmt: skip
        if field.name in choices:
            assert values == {*get_args(choices[field.name])}, field.name
        elif field.name == "biases":
            assert values == {True, False, "qkv", "attention", "mlp"}
        elif field.name not in ("dropout", "layers", "width", "vocabulary", "context", "mlp_width", "family"):
            # Both with and without; sizes that have no default meaning need not differ.
            assert len(values) > 1 or field.name in ("rotary_low", "rotary_high"), field.name


def test_scaled_waves_are_shorter_longer_and_in_between() -> None:
    config = PAPERS["llama3"]
    ratios = [
        after / before
        for after, before in zip(
            papers._frequencies(config, config.rotary_width, False),
            papers._frequencies(config.replace(rotary_scaling="none"), config.rotary_width, False),
            strict=True,
        )
    ]
    assert ratios[0] == 1
    assert ratios[-1] == 1 / config.rotary_factor
    assert any(1 / config.rotary_factor < ratio < 1 for ratio in ratios)


def test_the_reference_shares_no_line_with_the_model() -> None:
    """And is short enough to be read beside the papers."""
    source = inspect.getsource(papers)
    assert len(source.splitlines()) <= 315
    assert re.findall(r"^(?:from|import) (tilemesh\S*)", source, re.M) == ["tilemesh.model.config"]

    def lines(text: str) -> set[str]:
        code = {line.strip() for line in text.splitlines()}
        return {line for line in code if len(line) > 30 and not line.startswith(("import", "from", "#", '"""'))}

    for ours in (documents, fresh, rotary, transformer):
        assert lines(source) & lines(inspect.getsource(ours)) == set()


def test_wrong_rotary_angles_everywhere_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the code that every layout shares: one process of the same model cannot show it."""
    right = rotary.rotary_table
    monkeypatch.setattr(rotary, "rotary_table", lambda positions, *more, **told: right(2 * positions, *more, **told))
    cases = [Case("llama", gate_plan(), by_papers=is_by_papers) for is_by_papers in (False, True)]
    (beside_itself, beside_papers) = Gate(connect("alone")).run(cases)
    assert beside_itself.passed
    assert not beside_papers.passed
    assert beside_papers.where.startswith("forward differs first at layers.0.attention;")
