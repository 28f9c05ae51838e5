"""Routing of tokens to experts: the kernels in the interpreter against plain torch and float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from tilemesh.comm import connect
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.context import Context, use
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.program import Operand, compile_step
from tilemesh.kernels.routing import kernel
from tilemesh.kernels.routing.cost import cost, route_cost, unpermute_cost
from tilemesh.kernels.routing.reference import (
    exact_unpermuted,
    permute_rows,
    route_tokens,
    unpermute_bound,
    unpermute_rows,
)
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.apply import lay
from tilemesh.parallel.mesh import Mesh

INTERPRETED = {"implementation": "interpret"}


def scores_of(tokens: int, experts: int, favoured: bool = False) -> torch.Tensor:
    scores = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    if favoured:  # which all tokens pick first; and one that nobody picks
        scores[:, experts // 2] += 20
        scores[:, 0] -= 40
    return scores


def test_places_are_those_of_a_stable_sort_by_expert() -> None:
    """By hand: tokens 0 and 2 pick expert 1 then 0, token 1 picks 2 then 1; nobody picks 3."""
    scores = torch.tensor([[1.0, 2, -9, -9], [-9, 1, 2, -9], [1, 2, -9, -9]])
    for options in ({}, INTERPRETED):
        weights, experts, slots, counts = route_tokens(scores, picked=2, renormalized=True, **options)
        assert experts.tolist() == [[1, 0], [2, 1], [1, 0]]
        assert counts.tolist() == [2, 3, 1, 0]
        assert slots.tolist() == [[2, 0], [5, 3], [4, 1]]
        first = 1 / (1 + torch.tensor(-1.0).exp())
        torch.testing.assert_close(weights, torch.stack([first, 1 - first]).expand(3, 2), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("renormalized", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "picked"), [(1, 5, 2), (300, 8, 2), (17, 40, 8), (3, 3, 3), (130, 64, 1)]
)
def test_routing_and_its_gradient(tokens: int, experts: int, picked: int, renormalized: bool) -> None:
    scores = scores_of(tokens, experts, favoured=tokens == 300)
    how = partial(route_tokens, picked=picked, renormalized=renormalized)
    leaf, wide = scores.clone().requires_grad_(), scores.double().requires_grad_()
    weights, *places = how(leaf, **INTERPRETED)
    expected, *wanted = how(wide)
    for mine, theirs in zip(places, wanted, strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-6 + experts * 2**-23, atol=1e-30)
    upstream = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
    (found,) = torch.autograd.grad(weights, leaf, upstream)
    (true,) = torch.autograd.grad(expected, wide, upstream.double())
    # A difference of terms of the size of upstream, each rounded a few times.
    assert (found.double() - true).abs().max() <= 64 * 2**-24 * upstream.abs().max() * picked
    again, *same = how(leaf, places[0], **INTERPRETED)  # as where a layer is computed a second time
    assert torch.equal(again, weights)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(same, places, strict=True))


def test_experts_that_were_picked_before_are_kept_whatever_scores_say() -> None:
    scores, before = scores_of(9, 6), torch.tensor([[5, 0]] * 9)
    for options in ({}, INTERPRETED):
        weights, experts, _, counts = route_tokens(scores, before, picked=2, renormalized=False, **options)
        assert torch.equal(experts, before)
        torch.testing.assert_close(weights, scores.softmax(-1)[:, [5, 0]], rtol=1e-6, atol=0)
        assert counts.tolist() == [9, 0, 0, 0, 0, 9]


def test_scores_that_are_no_numbers_touch_no_memory_outside() -> None:
    scores = torch.full((5, 6), torch.nan)
    _, experts, slots, counts = route_tokens(scores, picked=2, **INTERPRETED)
    assert 0 <= int(experts.min()) <= int(experts.max()) < 6
    assert sorted(slots.flatten().tolist()) == list(range(10))
    assert counts.sum() == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("tokens", "width", "picked"), [(5, 24, 2), (19, 1030, 3), (2, 7, 1)])
def test_rows_to_their_places_and_back(tokens: int, width: int, picked: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    _, _, slots, _ = route_tokens(scores_of(tokens, 4), picked=picked)
    x = torch.randn(2 * tokens, width, generator=generator).to(dtype)[::2].requires_grad_()
    rows = permute_rows(x, slots, **INTERPRETED)
    for token, places in enumerate(slots.tolist()):
        assert all(torch.equal(rows[place], x[token]) for place in places)
    upstream = torch.randn(rows.shape, generator=generator).to(dtype)
    (found,) = torch.autograd.grad(rows, x, upstream)
    ones = torch.ones(slots.shape, dtype=dtype)
    assert excess(found, exact_unpermuted(upstream, ones, slots), unpermute_bound(upstream, ones, slots)) is None

    weights = torch.rand(slots.shape, generator=generator).requires_grad_()
    results = torch.randn(slots.numel(), width, generator=generator).to(dtype).requires_grad_()
    y = unpermute_rows(results, weights, slots, **INTERPRETED)
    bare = results.detach(), weights.detach(), slots
    assert excess(y.detach(), exact_unpermuted(*bare), unpermute_bound(*bare)) is None
    grad = torch.randn(width, tokens, generator=generator).to(dtype).T
    of_results, of_weights = torch.autograd.grad(y, [results, weights], grad)
    for token, places in enumerate(slots.tolist()):
        for at, place in enumerate(places):
            share = grad[token].double() * bare[1][token, at].double()
            assert (of_results[place].double() - share).abs().max() <= torch.finfo(dtype).eps * share.abs().max()
            terms = grad[token].double() * bare[0][place].double()
            assert abs(of_weights[token, at] - terms.sum()) <= (width + 2) * 2**-24 * terms.abs().sum()


def test_every_place_is_written_whatever_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are allocated, not zeroed: an expert that no token picked leaves nothing behind."""
    plain = torch.empty

    def poisoned(*shape, **options):
        made = plain(*shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made.fill_(-7)

    scores = scores_of(40, 8, favoured=True)
    monkeypatch.setattr(kernel.torch, "empty", poisoned)
    weights, experts, slots, counts = route_tokens(scores, picked=2, **INTERPRETED)
    assert not weights.isnan().any()
    assert counts[0] == 0
    assert sorted(slots.flatten().tolist()) == list(range(80))
    assert int(experts.min()) >= 0
    assert not permute_rows(torch.ones(40, 8), slots, **INTERPRETED).isnan().any()


def test_an_operator_that_is_asked_for_weights_alone_has_no_other_gradient() -> None:
    scores = scores_of(4, 5).requires_grad_()
    _, experts, slots, counts = route_tokens(scores, picked=2, **INTERPRETED)
    assert not any(tensor.requires_grad for tensor in (experts, slots, counts))


def test_a_layer_that_is_computed_again_keeps_the_same_tensors() -> None:
    """With experts that are given the second time; torch's checkpoints count what is kept."""
    config = ModelConfig(
        layers=2, width=16, heads=2, vocabulary=20, context=8, mlp_width=24, activation="swiglu", biases=False,
        experts=4, experts_per_token=2, balance_loss=0.1,
    )  # fmt: skip
    tokens, gradients = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(1)), []
    with use(Context(on_cpu="interpret")):
        for recompute in ("none", "full"):
            plan = ParallelPlan(recompute=recompute)  # type: ignore[arg-type]
            laid = lay(Transformer(config, seed=1), Mesh(connect("alone")), plan)
            total, count = laid.loss(tokens, tokens)
            laid.gradients.backward(total, count)
            gradients.append([mine.tensor.grad for mine in laid.held.values()])
    for kept, again in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, again, rtol=0, atol=0)


def test_costs_count_each_byte_once() -> None:
    assert cost(10, 16, 2).bytes_moved == 2 * 10 * 16 * 3 + 8 * 20
    assert unpermute_cost(10, 16, 2, passes="both").bytes_moved == 2 * cost(10, 16, 2).bytes_moved + 2 * 10 * 16 * 2
    assert route_cost(10, 8, 2).bytes_moved == 4 * 80 + 20 * (4 + 16) + 8 * 8


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: route_tokens(torch.ones(3, 4), picked=5), "expected .N, X. and 1 to X"),
        (lambda: route_tokens(torch.ones(3, 4), torch.ones(3, 2), picked=2), "int64 .3, 2."),
        (lambda: permute_rows(torch.ones(3, 4), torch.zeros(2, 2, dtype=torch.int64)), "int64 .N, C."),
        (lambda: unpermute_rows(torch.ones(3, 4), torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int64)), "N C, D"),
        (lambda: unpermute_rows(torch.ones(4, 4), torch.ones(4, 1), torch.zeros(2, 2, dtype=torch.int64)), "floats"),
    ],
)
def test_what_does_not_fit_is_refused(call, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


@pytest.mark.slow
def test_the_kernels_compile_for_an_h200_that_is_not_here() -> None:
    def place(*shape: int, dtype: str = "bfloat16") -> Place:
        return Place(shape, tuple(torch.empty(shape, device="meta").stride()), dtype, True)

    pairs, scores = place(4096, 2, dtype="int64"), place(4096, 8, dtype="float32")
    weights, x, rows = place(4096, 2, dtype="float32"), place(4096, 1024), place(8192, 1024)
    made = [
        (partial(kernel.route_plan, renormalized=True), {
            "scores": scores, "weights": weights, "experts": pairs, "slots": pairs, "counts": place(8, dtype="int64"),
        }),
        (partial(kernel.scores_back_plan, renormalized=True), {
            "scores": scores, "experts": pairs, "grad": weights, "dscores": scores,
        }),
        (kernel.spread_plan, {"x": x, "slots": pairs, "y": rows}),
        (kernel.gather_plan, {"x": rows, "weights": weights, "slots": pairs, "y": x}),
        (kernel.gather_plan, {"x": rows, "slots": pairs, "y": x}),
        (kernel.unpermute_back_plan, {
            "grad": x, "x": rows, "weights": weights, "slots": pairs, "dx": rows, "dweights": weights,
        }),
    ]  # fmt: skip
    for plan, places in made:
        planned = plan(places)
        operands = {name: Operand(where.dtype) for name, where in places.items()}
        operands |= {name: Operand(buffer.dtype) for name, buffer in planned.buffers.items()}
        for step in planned.steps:
            assert compile_step(step, operands, GPUTarget("cuda", 90, 32)).metadata.shared <= 232_448
