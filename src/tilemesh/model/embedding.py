"""A table of rows by token, or by position."""

from __future__ import annotations

from torch import Tensor, nn

from tilemesh.model.linear import ALONE, DENSE, DenseMatrix


class Embedding(nn.Embedding):
    """torch's, but where it has no memory it draws no weights: random ops on the meta device import for two seconds.

    Its table is a matrix of a kind, as a `Linear`'s weight is, for a model whose output projection it is.
    """

    kind: DenseMatrix = DENSE
    place = ALONE

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()

    def become(self, kind: DenseMatrix) -> None:
        """Take another kind of the same weight."""
        self.kind = kind

    def project(self, x: Tensor) -> Tensor:
        """x times the table."""
        return self.kind.affine(self, x, None)
