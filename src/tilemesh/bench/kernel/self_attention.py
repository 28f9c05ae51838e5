"""Attention of queries, keys and values in one tensor, beside torch's SDPA with what cuts them apart and joins them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilemesh.bench.kernel.attention import AttentionBench
from tilemesh.kernels.attention.cost import SELF_ATTENTION_FORM, AttentionProblem
from tilemesh.kernels.attention.joined import parts, self_attention
from tilemesh.kernels.operator_bench import EAGER, OURS, Arguments


class SelfAttentionBench(AttentionBench):
    """A call's argument is qkv; what is right is what attention of its parts is."""

    name = "self_attention"
    form = SELF_ATTENTION_FORM
    gpu_peers = ()

    def arguments(self, problem: AttentionProblem, device: torch.device, seed: int) -> Arguments:
        q, k, v, _ = super().arguments(problem, device, seed)
        return (torch.cat([part.transpose(1, 2).flatten(2) for part in (q, k, v)], dim=-1),)

    def calls(self, problem: AttentionProblem) -> dict[str, Callable[..., object]]:
        options, plain = problem.options, self_attention.reference  # type: ignore[attr-defined]
        return {OURS: lambda qkv: self_attention(qkv, **options), EAGER: lambda qkv: plain(qkv, **options)}

    def wrong(self, problem: AttentionProblem, arguments: Arguments, result: Tensor) -> str | None:
        apart = AttentionProblem(**dataclasses.asdict(problem))
        cut: tuple[Any, ...] = (*parts(arguments[0], problem.heads, problem.kv_heads), None)
        if problem.passes == "both":
            return AttentionBench().wrong(apart, cut, parts(result, problem.heads, problem.kv_heads)[0])
        return AttentionBench().wrong(apart, cut, result.unflatten(-1, (problem.heads, -1)).transpose(1, 2))

    def chosen(self, problem: AttentionProblem, device: torch.device) -> dict[str, str]:
        return {"auto": "ours"}


BENCH = SelfAttentionBench()
