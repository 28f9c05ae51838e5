"""Whose operations a Transformer is made of: a value that is handed to it. No torch here.

Each field is "torch" (torch's own operations, which torch.compile can fuse with their neighbours) or the implementation
of tilemesh's operator: "auto", "triton" or "interpret", as `tilemesh.kernels` takes it.
"""

from __future__ import annotations

from dataclasses import dataclass

TORCH = "torch"


@dataclass(frozen=True)
class ModelKernels:
    projections: str = "auto"
    """The MLP's first projections, each with its activation."""
    attention: str = TORCH
    """Attention over a whole sequence, without a cache."""
    embedding: str = TORCH
    """Rows of the embedding's table by token, with those of the positions added; its gradient."""
    norms: str = TORCH
    """The norms, each with the addition to the residual stream before it."""
    loss: str = TORCH
    """The output projection and the loss of training; with tilemesh's, the logits of all tokens never exist at once."""
    mlp: str = TORCH
    """An MLP without a gate, whole: the activation and its derivative are inside of products. Goes before
    `projections`, but not where ranks share the MLP or its weights' gradients are put off."""

    def words(self) -> str:
        """For a run's record: "torch", "tilemesh", or which part is whose."""
        whose = {name: "torch" if how == TORCH else "tilemesh" for name, how in vars(self).items()}
        if len(set(whose.values())) == 1:
            return whose["loss"]
        return ", ".join(f"{name} {owner}" for name, owner in whose.items())


OURS = ModelKernels(projections="auto", attention="auto", embedding="auto", norms="auto", loss="auto", mlp="auto")
PLAIN = ModelKernels(projections=TORCH, attention=TORCH, embedding=TORCH, norms=TORCH, loss=TORCH, mlp=TORCH)
STANDARD = ModelKernels()
"""Of a model that is made without a choice: torch's, but for the fused projections."""
COMPILED = ModelKernels(projections=TORCH, embedding="auto", norms="auto", loss="auto", mlp="auto")
"""Beside torch.compile: ours where it reads or writes more than it must."""
