"""The loss over a vocabulary that ranks cut: tilemesh's kernels by the interpreter, against torch and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.comm.connection import connect, run_threads
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError
from tilemesh.core.shard import share
from tilemesh.kernels.accuracy import excess, unit
from tilemesh.kernels.cross_entropy.part import part_sums, write_part_gradient
from tilemesh.parallel.tensor import Seams, vocabulary_loss

pytest.importorskip("triton")

CLASSES = 9
HOW = ("interpret", "torch")


def drawn(dtype: torch.dtype = torch.float64, rows: int = 14) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(rows, CLASSES, generator=generator, dtype=torch.float64) * 5).to(dtype)
    targets = torch.randint(0, CLASSES, (rows,), generator=generator)
    targets[:3] = -100
    return logits, targets


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_parts_add_up_to_the_whole(dtype: torch.dtype, how: str) -> None:
    logits, targets = drawn(dtype)
    exact = torch.logsumexp(logits.double(), 1)
    found = [part_sums(logits[:, a:b].clone(), targets, a, CLASSES, implementation=how) for a, b in ((0, 4), (4, 9))]
    sums, chosen = torch.stack([top + total.log() for top, total, _ in found]), sum(chosen for *_, chosen in found)
    u = unit(torch.float64 if dtype == torch.float64 else torch.float32)
    counts = targets != -100
    allowed = (16 + 8 * (logits.double().abs().amax(1) + exact.abs())) * u
    assert excess(torch.logsumexp(sums, 0)[counts], exact[counts], allowed[counts]) is None
    assert torch.equal(chosen[counts].double(), logits.double().gather(1, targets.clamp(min=0)[:, None])[:, 0][counts])
    assert not chosen[~counts].any()


@pytest.mark.parametrize("how", HOW)
def test_a_parts_gradient_is_written_over_its_logits(how: str) -> None:
    logits, targets = drawn()
    whole = logits.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(
        3 * functional.cross_entropy(whole, targets, reduction="sum", ignore_index=-100), whole
    )
    tops, upstream = logits.amax(1), torch.tensor(3.0, dtype=torch.float64)
    totals = (logits - tops[:, None]).exp().sum(1)
    columns_first = logits.t().contiguous().t()
    for begin, end, mine in ((0, 4, logits[:, :4].clone()), (4, 9, logits[:, 4:].clone()), (0, 9, columns_first)):
        mine.copy_(logits[:, begin:end])
        made = write_part_gradient(mine, targets, begin, tops, totals, upstream, implementation=how)
        assert made.data_ptr() == mine.data_ptr()
        torch.testing.assert_close(mine, wanted[:, begin:end])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loss_over_ranks_is_torchs(dtype: torch.dtype, ranks: int) -> None:
    logits, targets = drawn(dtype)
    logits, targets = logits.view(2, 7, CLASSES), targets.view(2, 7)
    whole = logits.to(torch.promote_types(dtype, torch.float32), copy=True).requires_grad_()
    wanted = functional.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="sum")
    wanted.backward()

    def main(comm: Communicator) -> None:
        first, count = share(CLASSES, comm.size, comm.rank)
        leaf = logits[..., first : first + count].clone().requires_grad_()
        total, counted = vocabulary_loss(leaf * 1, targets, Seams(comm), CLASSES, "interpret")
        total.backward()
        assert total.dtype == wanted.dtype
        torch.testing.assert_close(total, wanted)
        assert counted == 11
        torch.testing.assert_close(leaf.grad, whole.grad[..., first : first + count].to(dtype))

    run_threads(ranks, main)


@pytest.mark.parametrize("kernels", HOW)
def test_what_all_logits_share_costs_no_precision(kernels: str) -> None:
    """Whole numbers beside 2^22 are exact in float32: the loss and its gradient are those without it."""
    whole = drawn(torch.float32)[0].round()
    targets, made = drawn()[1], []
    for offset in (0.0, 2.0**22):
        logits = (whole + offset).requires_grad_()
        total, _ = vocabulary_loss((logits * 1)[None], targets[None], Seams(connect("alone")), CLASSES, kernels)
        made.append((total.detach(), *torch.autograd.grad(total, logits)))
    for plain, shifted in zip(*made, strict=True):
        assert torch.equal(plain, shifted)


def test_a_second_backward_pass_is_refused() -> None:
    logits, targets = drawn()
    logits = logits.requires_grad_() * 1
    total, _ = vocabulary_loss(logits[None], targets[None], Seams(connect("alone")), CLASSES, "interpret")
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_a_target_outside_of_all_classes_is_nan_on_a_gpu_and_an_error_here() -> None:
    from tilemesh.kernels.cross_entropy import kernel
    from tilemesh.kernels.launch.call import interpreted

    logits, targets = drawn(rows=4)
    targets[:] = torch.tensor([0, CLASSES, -1, 5])
    with pytest.raises(UsageError, match="outside the 9 classes"):
        part_sums(logits, targets, 0, CLASSES, implementation="interpret")
    for first, wanted in ((0, [False, True, True, False]), (2, [False] * 4)):
        made = {name: torch.empty(4, dtype=torch.float64) for name in ("tops", "totals", "chosen")}
        given = {"logits": logits[:, :3].contiguous(), "target": targets, **made}
        interpreted(kernel.part_plan, given, tuple(made), first=first, classes=CLASSES, ignore=-100)
        assert made["chosen"].isnan().tolist() == wanted


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, t: part_sums(x, t[:2], 0, CLASSES), "expected logits (N, V)"),
        (lambda x, t: part_sums(x, t.double(), 0, CLASSES), "int64 or int32 target"),
        (lambda x, t: part_sums(x, t, 4, CLASSES), "classes 4 to 13 of 9"),
        (lambda x, t: part_sums(x, t, 0, CLASSES, implementation="cuda"), "unknown implementation"),
    ],
)
def test_bad_arguments_get_a_reason(call, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as caught:
        call(*drawn())
    assert words in str(caught.value)
