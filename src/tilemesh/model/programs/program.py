"""What a program is: a function equal to a part of the model's definition, when it applies, and what it costs.

The one idea: `model/transformer.py` says what is computed; a program says how else, for some layers, some numbers of
rows, some device. It is a frozen value. `prepare.py` asks all of them once, when a job starts, and binds those that are
predicted to be the fastest; nothing asks in a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tilemesh.core.cost import Cost
from tilemesh.model.linear import Linear
from tilemesh.model.programs.group import GroupProduct, LayerGroups
from tilemesh.model.transformer import Layer, Mlp, Pass, Transformer

RowClass = Literal["1", "2-64", "more"]
FEW_ROWS = 64
JUDGED_ROWS: Mapping[RowClass, int] = {"1": 1, "2-64": 16, "more": 4096}
"""How many rows (tokens of a pass) a class is judged by."""
ALL_ROWS: tuple[RowClass, ...] = ("1", "2-64", "more")
Part = Literal["embedding", "attention", "mlp", "layer", "layers", "projection", "loss"]
"""What of a model a program computes. "layer": both blocks and the norms before them; "layers": all of these and the
norm after the last."""


def row_class(rows: int) -> RowClass:
    if rows == 1:
        return "1"
    return "2-64" if rows <= FEW_ROWS else "more"


@dataclass(frozen=True)
class Use:
    """What a model is prepared for."""

    trains: bool = False
    marked: bool = False
    """Whether tokens say where documents begin: as `Transformer.prepare` takes it."""
    compiled: bool = False
    """By torch.compile, whole layers for a GPU."""
    casts: bool = False
    """Whether weights are cast on their way into products (autocast)."""
    puts_off: bool = False
    """Whether weights' gradients are put off: a backward pass comes in two halves."""
    updates_meanwhile: bool = False
    """Whether an update may come between a forward pass and its backward pass."""
    tp: int = 1
    """Ranks that share each layer."""
    aligns_vocabulary: bool = False
    """Whether products are of 16 bits, on a GPU, with a whole table."""
    side_by_side: bool = False
    """Whether the cache takes queries, keys and values as one product gives them (`AttendJoined`)."""
    single_rows: bool = False
    """Whether there is a kernel for the product of a single row."""
    launches_early: bool = False
    """Whether kernels are launched before the one ahead has ended."""
    invariant: bool = False
    """Whether a token's bits must not depend on how many others there are, nor on whether it is trained on or served:
    see `model.invariant`."""


TRAINING = Use(trains=True)
CUT_OTHERWISE = "its sums are cut otherwise than those of other numbers of rows"


class ProgramSeat(NamedTuple):
    """Where a program may take its place."""

    model: Transformer
    layer: Layer | None
    """None for a program of the whole model."""
    groups: LayerGroups
    use: Use
    device: torch.device

    @property
    def here(self) -> Layer:
        assert self.layer is not None
        return self.layer

    @property
    def mlp(self) -> Mlp:
        """Of a layer without experts."""
        assert isinstance(self.here.mlp, Mlp)
        return self.here.mlp

    @property
    def heads(self) -> GroupProduct:
        """For a program that was asked whether it applies."""
        assert self.groups.heads is not None
        return self.groups.heads

    @property
    def gated(self) -> GroupProduct:
        assert self.groups.gated is not None
        return self.groups.gated

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True)
class LayerProgram:
    """See the module. Subclasses are the programs, each with its reference form: what its operators are on a CPU."""

    name: str
    part: Part
    rows: tuple[RowClass, ...] = ALL_ROWS

    def why_not(self, seat: ProgramSeat) -> str:
        """Why it cannot take this place, in words; "" where it can."""
        raise NotImplementedError

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        """Of a pass over so many rows, forward."""
        raise NotImplementedError

    def bind(self, seat: ProgramSeat) -> Callable[..., Any]:
        """The function to call in place of the definition's."""
        raise NotImplementedError

    def bind_all(self, seats: Sequence[ProgramSeat]) -> Callable[[Tensor, Pass], Tensor]:
        """Of a program whose part is "layers": from what enters the first to what the output projection takes."""
        raise NotImplementedError


def behind_hooks(block: nn.Module, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A call in a block's place, behind what hangs before it: where a region cut over ranks begins."""
    hooks = tuple(block._forward_pre_hooks.values())
    return partial(_call_behind, block, hooks, call) if hooks else call


def _call_behind(block: nn.Module, hooks: tuple[Any, ...], call: Callable[..., Tensor], *args: Any) -> Tensor:
    for hook in hooks:
        args = hook(block, args)
    return call(*args)


# Counted ----------------------------------------------------------------------------------------------------------


def products_cost(layers: Iterable[Linear], rows: int, itemsize: int) -> Cost:
    """Of projections: each matrix and its rows are read, the results written."""
    total = Cost()
    for layer in layers:
        outputs, inputs = layer.out_features, layer.in_features
        read = layer.kind.nbytes(outputs, inputs, itemsize) + itemsize * rows * inputs
        flops, written = 2 * rows * outputs * inputs, itemsize * rows * outputs
        total += Cost(flops, read, written, launches=1, dtype=_DTYPES[itemsize])
    return total


_DTYPES = {2: "bf16", 4: "fp32", 8: "fp64"}
"""What products are computed in, by the model's itemsize, whatever their matrices are stored as: costs add up."""


def pass_cost(values: int, itemsize: int, read: int = 1, written: int = 1, launches: int = 1) -> Cost:
    """Of passes over memory: so many tensors of these values are read and written."""
    return Cost(0, read * values * itemsize, written * values * itemsize, launches=launches)
