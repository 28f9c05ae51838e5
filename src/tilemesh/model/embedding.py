"""A table of rows by token, or by position."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from tilemesh.model.linear import ALONE, DENSE, DenseMatrix
from tilemesh.model.row_blocks import in_row_blocks


class Embedding(nn.Embedding):
    """torch's, but where it has no memory it draws no weights: random ops on the meta device import for two seconds.

    Its table is a matrix of a kind, as a `Linear`'s weight is, for a model whose output projection it is.
    """

    kind: DenseMatrix = DENSE
    place = ALONE
    in_blocks = False

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()

    def become(self, kind: DenseMatrix) -> None:
        """Take another kind of the same weight."""
        self.kind = kind

    def multiply_in_blocks(self, in_blocks: bool) -> None:
        """Whether tokens are multiplied in blocks of one shape (`model.row_blocks`)."""
        self.in_blocks = in_blocks

    def project(self, x: Tensor) -> Tensor:
        """x times the table."""
        product = partial(self.kind.affine, self, bias=None)
        return in_row_blocks(product, x) if self.in_blocks else product(x)
