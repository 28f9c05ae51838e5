"""Peers of operators that not every torch has: Liger-Kernel's functions, and torch's fused loss of newer versions.

Each is a function of the operator's arguments, or the reason why it cannot be timed here; an operator that a package
does not have gets no entry.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LIGER, TORCHS_LOSS = "liger", "F.linear_cross_entropy"


@dataclass(frozen=True)
class OtherPeer:
    """A peer of another package. `call`: of the operator's arguments, whose tensors it may overwrite; None: see why."""

    call: Callable[..., Any] | None
    why: str = ""


def other_peers(operator: str, options: dict[str, Any]) -> dict[str, OtherPeer]:
    """Peers of the operator whose public function has this name, called with these options."""
    peers = {}
    if operator == "linear_cross_entropy":
        peers[TORCHS_LOSS] = _torchs_loss()
    if operator in _LIGER:
        peers[LIGER] = _liger(_LIGER[operator])
    if options.get("approximate", "tanh") != "tanh":
        peers[LIGER] = OtherPeer(None, "Liger-Kernel's geglu has the approximate gelu alone")
    return peers


def _torchs_loss() -> OtherPeer:
    """With options, torch computes the loss chunk by chunk; without, it holds all logits as eager does."""
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        return OtherPeer(None, f"torch {torch.__version__.partition('+')[0]} has no F.linear_cross_entropy")
    options = getattr(torch.nn, "LinearCrossEntropyOptions", lambda: None)()
    return OtherPeer(lambda x, weight, target: function(x, weight, target, options=options))


def _liger(call: Callable[..., Any]) -> OtherPeer:
    try:
        functions = importlib.import_module("liger_kernel.ops")
    except Exception as error:  # its import probes devices, drivers and other packages
        return OtherPeer(None, f"Liger-Kernel cannot be imported: {type(error).__name__}: {str(error).splitlines()[0]}")
    return OtherPeer(lambda *arguments: call(functions, *arguments))


# With `gemma`, an RMSNorm computes in float32 throughout, as torch's and ours do.
_LIGER: dict[str, Callable[..., Any]] = {
    "softmax": lambda ops, x: ops.LigerSoftmaxFunction.apply(x),
    "rms_norm": lambda ops, x, weight: ops.LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "gemma"),
    "layer_norm": lambda ops, x, weight, bias: ops.LigerLayerNormFunction.apply(x, weight, bias, 1e-5),
    "add_rms_norm": lambda ops, x, residual, weight: ops.LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, 1e-6, 0.0, "gemma"
    ),
    "cross_entropy": lambda ops, logits, target: ops.LigerCrossEntropyFunction.apply(logits, target, None)[0],
    "linear_cross_entropy": lambda ops, x, weight, target: ops.LigerFusedLinearCrossEntropyFunction.apply(
        x, weight, target
    )[0],
    "swiglu": lambda ops, gate, x: ops.LigerSiLUMulFunction.apply(gate, x),
    "geglu": lambda ops, gate, x: ops.LigerGELUMulFunction.apply(gate, x),
}
