"""One microbatch on one rank, as a value: everything beside the model that decides what is done, kept and exchanged.

Queries and keys are two numbers: a training step has as many of one as of the other, decoding has few queries and many
keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilemesh.core.hardware import DTYPE_BYTES, Device
from tilemesh.core.plan import COMPUTE_DTYPE, MASTERED, Attention, ContextExchange, Fp8Scales, ParallelPlan, Precision
from tilemesh.core.sequence import ranks_sharing_heads, tokens_of, zigzag
from tilemesh.model.config import ModelConfig

Code = Literal["fused", "compiled", "eager"]
"""What runs a layer: hand-fused training code (Megatron's), torch.compile, or torch operation by operation."""
AUTOCAST = ("bf16", "fp16")
"""Precisions whose weights and residual stream are float32, and whose products are 16 bits wide."""
STATE_BYTES = {
    "fp32": (4, 4, 8),
    "bf16": (4, 4, 8),
    "fp16": (4, 4, 8),
    "bf16-master": (2, 2, 12),
    "fp64": (8, 8, 16),
    "fp8": (2, 2, 12),
}
"""Bytes per parameter by precision: weights, gradients, optimizer (Adam's two moments, and a master copy)."""
ALIGNED = 8
"""Elements a row of 16-bit values must be a multiple of for tensor cores to load it whole."""


@dataclass(frozen=True)
class Task:
    """What one rank computes at once."""

    sequences: int
    queries: int
    """Tokens of each sequence that pass through the model."""
    keys: int
    """Tokens of each sequence that these attend to, themselves included."""
    tp: int = 1
    sequence_parallel: bool = False
    attention: Attention = "fused"
    precision: Precision = "bf16-master"
    code: Code = "fused"
    gpu: bool = True
    chunked_loss: bool = False
    """Whether the loss makes logits of some rows at a time (`kernels/linear_cross_entropy`); a whole table's alone."""
    by_layers: bool = False
    """Whether weights are gathered layer by layer (ZeRO-3), so that layers are compiled one by one and the loss not.
    Hand-fused code is the same either way."""
    shares: tuple[int, ...] = ()
    """Of ranks that share each sequence, the tokens that each has, this one's first; empty: of one."""
    cp_exchange: ContextExchange = "ring"
    ep: int = 1
    """Ranks that share out the experts."""
    expert_tp: int = 0
    """Ranks that share each expert's matrices; 0: those of tp."""
    imbalance: float = 0.0
    """Rows that come to the busiest of `ep` ranks over the mean; 0: as expected of tokens that pick at random."""
    fp8_scales: Fp8Scales = "tensor"

    @classmethod
    def of(
        cls,
        plan: ParallelPlan,
        context: int,
        code: Code = "fused",
        gpu: bool = True,
        chunked_loss: bool = False,
        imbalance: float = 0.0,
    ) -> Task:
        """A microbatch of a training step."""
        # Of ranks that share a sequence each attends to as many pairs of tokens as the mean: as if its own stood last.
        shares = tuple(tokens_of(zigzag(context, plan.cp, rank)) for rank in range(plan.cp)) if plan.cp > 1 else ()
        own = shares[0] if shares else context
        return cls(
            plan.microbatch,
            own,
            (context + own) // 2,
            plan.tp,
            plan.sequence_parallel,
            plan.attention,
            plan.precision,
            code,
            gpu,
            chunked_loss and plan.tp == 1,
            is_by_layers(plan, code),
            shares,
            plan.cp_exchange,
            plan.ep,
            plan.expert_tp,
            imbalance,
            plan.fp8_scales,
        )

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries

    @property
    def cp(self) -> int:
        """Ranks that share each sequence."""
        return len(self.shares) or 1

    def sharing_heads(self, model: ModelConfig) -> int:
        """Of these, neighbours that share out heads."""
        return ranks_sharing_heads(self.cp_exchange, self.cp, max(1, model.kv_heads // self.tp))

    @property
    def ranks_per_expert(self) -> int:
        return self.expert_tp or self.tp

    @property
    def dtype(self) -> str:
        """Of a product's operands."""
        return COMPUTE_DTYPE[self.precision]

    @property
    def is_fp8(self) -> bool:
        """Whether the layers' products take operands of 8 bits."""
        return self.precision == "fp8"

    @property
    def size(self) -> int:
        """Bytes of what a product takes or gives."""
        return DTYPE_BYTES[self.dtype]

    @property
    def wide(self) -> int:
        """Bytes of what sums over products are made in."""
        return max(4, self.size)

    @property
    def stream(self) -> int:
        """Bytes of an element of the residual stream and its gradients: autocast leaves them in float32."""
        return 4 if self.precision in AUTOCAST else self.size

    @property
    def loss_code(self) -> Code:
        """What computes the loss: PyTorch's sharded training (`fully_shard`) compiles each layer, and nothing else."""
        return "eager" if self.code == "compiled" and self.by_layers else self.code

    @property
    def takes_norms_apart(self) -> bool:
        """Whether eager code computes an RMSNorm operation by operation. On a CPU torch itself does; on a GPU it has a
        kernel (since 2.9), which our Transformer calls and the models of PyTorch's sharded training do not."""
        return not self.gpu or self.by_layers

    @property
    def split(self) -> int:
        """Ranks that share what tensor parallelism does not split."""
        return self.tp if self.sequence_parallel else 1


def default_code(device: Device, precision: str) -> Code:
    """What usually runs a layout: large models in 16 bits are trained with hand-fused code, GPUs with a compiler."""
    if device.kind == "cpu":
        return "eager"
    return "fused" if precision in MASTERED else "compiled"


def is_by_layers(plan: ParallelPlan, code: Code) -> bool:
    """As `Task.by_layers`: a layout with ZeRO-3 that computes what those without it compute shares their figures."""
    return plan.zero == 3 and code != "fused"


def unaligned(columns: int, element_bytes: int) -> bool:
    """Whether rows of so many 16-bit elements begin where tensor cores cannot load them."""
    return element_bytes == 2 and columns % ALIGNED != 0
