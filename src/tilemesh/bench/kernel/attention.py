"""Attention beside what a user would call instead, for the rows of `tilemesh bench kernel attention`.

Ours are the kernels, whatever `auto` takes for the problem (the row's case says which). Peers: torch's SDPA as it
chooses, its flash and cuDNN kernels, torch.compile of it, and flex_attention, compiled, with its block mask made
beforehand, which is what a user has for a window or packed sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilemesh.core.hardware import Device
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.attention import reference
from tilemesh.kernels.attention.cost import FORM, WINDOW, AttentionProblem
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.operator_bench import EAGER, OURS, Arguments, OperatorBench, both_ways
from tilemesh.kernels.rates import LAUNCH_S

SUSTAINED = {True: (0.6, 0.45), False: (0.37, 0.35)}
"""Of the dense peak, forward and backward (counted with five products), by whether heads are wider than 64.

Measured on an H200. A head of 64 needs as many exponentials as one of 128, for half of the products.
"""


class AttentionBench(OperatorBench[AttentionProblem]):
    """See `bench.operator.OperatorBench`. A call's arguments are q, k, v and `starts`."""

    name = "attention"
    form = FORM
    gpu_peers: ClassVar[Sequence[str]] = ("cuDNN", "flash", "flex_attention")

    def arguments(self, problem: AttentionProblem, device: torch.device, seed: int) -> Arguments:
        """As projections leave them: tokens before heads in memory, heads before tokens in shape."""
        batch, tokens, starts = problem.batch, problem.tokens, None
        if problem.mask == "packed":
            batch, tokens = 1, batch * tokens
            starts = torch.tensor([0, *problem.lengths], device=device).cumsum(0).to(torch.int32)
        generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)

        def draw(count: int) -> Tensor:
            drawn = torch.randn(batch, tokens, count, problem.width, generator=generator, device=device)
            return drawn.to(dtype).transpose(1, 2)

        return draw(problem.heads), draw(problem.kv_heads), draw(problem.kv_heads), starts

    def calls(self, problem: AttentionProblem) -> dict[str, Callable[..., object]]:
        options = problem.options
        plain = problem.mask in ("causal", "full")
        on_gpu = torch.cuda.is_available()

        def ours(*arguments: Any) -> Tensor:
            how = "triton" if arguments[0].device.type == "cuda" else "auto"
            y: Tensor = reference.attention(*arguments, **options, implementation=how)
            return y

        def eager(*arguments: Any) -> Tensor:
            y: Tensor = reference.attention.reference(*arguments, **options)  # type: ignore[attr-defined]
            return y

        calls: dict[str, Callable[..., object]] = {OURS: ours, EAGER: eager}
        if plain and on_gpu:
            calls["cuDNN"] = _with_backend(SDPBackend.CUDNN_ATTENTION, options["causal"])
            calls["flash"] = _with_backend(SDPBackend.FLASH_ATTENTION, options["causal"])
        if on_gpu and problem.mask != "full":
            calls["flex_attention"] = _flex(problem)
        return calls

    def timed(self, problem: AttentionProblem, function: Callable[..., Any]) -> Callable[..., Any]:
        return both_ways(function, ()) if problem.passes == "both" else function

    def wrong(self, problem: AttentionProblem, arguments: Arguments, result: Tensor) -> str | None:
        """Of the first and the last head: the result, or q's gradient, whose other heads are other problems."""
        q, k, v, starts = arguments
        heads, group = (0, q.shape[1] - 1), q.shape[1] // k.shape[1]
        chosen = (
            q[:1, heads, :, :], *(x[:1, [head // group for head in heads], :, :] for x in (k, v)), starts
        )  # fmt: skip
        result, options = result[:1, heads, :, :], problem.options
        exact = reference.exact
        if problem.passes == "forward":
            bound = reference.error_bound(*chosen, **options)
            return excess(result, exact(*chosen, **options), bound)
        true = both_ways(functools.partial(exact, **options), ())(*chosen)[0].double()
        eager = self.timed(problem, self.calls(problem)[EAGER])
        theirs = (eager(*chosen)[0].double() - true).norm() / true.norm()
        error = (result.double() - true).norm() / true.norm()
        # The results that are handed back as gradients are rounded to the dtype: that is in both.
        allowed = 2 * theirs + 2 * torch.finfo(result.dtype).eps
        return None if bool(error <= allowed) else f"q's gradient is off by {error:.3g}, allowed {allowed:.3g}"

    def predict_s(self, problem: AttentionProblem, device: torch.device, figures: Device) -> float:
        work = self.form.cost(problem)
        peak = figures.peak_flops_per_s.get(work.dtype, figures.peak_flops_per_s["fp32"])
        forward, backward = SUSTAINED[problem.width > 64]
        if problem.passes == "forward":
            return work.flops / (forward * peak) + work.launches * LAUNCH_S
        two_of_seven = work.flops * 2 / 7
        rest = (work.flops - two_of_seven) / (backward * peak)
        return two_of_seven / (forward * peak) + rest + work.launches * LAUNCH_S

    def chosen(self, problem: AttentionProblem, device: torch.device) -> dict[str, str]:
        plain = problem.mask in ("causal", "full")
        dtype = getattr(torch, problem.dtype)
        is_hopper = device.type == "cuda" and gpu_of(device_index(device)).hopper
        faster = is_hopper and problem.mask == "causal" and problem.passes == "forward"
        takes = not plain or (faster and reference.is_faster(problem.tokens, problem.width, dtype))
        return {"auto": "ours" if takes else "torch"}


def _with_backend(backend: SDPBackend, causal: bool) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, starts: None) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    return call


def _flex(problem: AttentionProblem) -> Callable[..., Tensor]:
    """flex_attention with this problem's mask; the mask's blocks are found once, as a training loop would."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = problem.mask
    kept: list[Any] = []  # the mask's blocks, from the first call on

    def call(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> Tensor:
        if not kept:
            tokens = q.shape[2]
            sequence = None
            if starts is not None:
                sequence = torch.bucketize(torch.arange(tokens, device=q.device), starts[1:].long(), right=True)

            def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                allowed = query >= key
                if mask == "window":
                    allowed = allowed & (query - key < WINDOW)
                if sequence is not None:
                    allowed = allowed & (sequence[query] == sequence[key])
                return allowed

            kept.append(create_block_mask(sees, None, None, tokens, tokens, device=q.device))
        y: Tensor = compiled(q, k, v, block_mask=kept[0], enable_gqa=q.shape[1] != k.shape[1])
        return y

    return call


BENCH = AttentionBench()
