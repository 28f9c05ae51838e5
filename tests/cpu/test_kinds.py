"""Kinds of matrices: what every kind promises, and one from outside on every layout."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tilemesh.comm import run_threads
from tilemesh.core.plan import ParallelPlan
from tilemesh.kernels.lowbit.codes import quantize
from tilemesh.kernels.lowbit.formats import parse_scheme
from tilemesh.model.config import ModelConfig
from tilemesh.model.kinds import Adapted, Factored, Masked, Rounded, few_bits, kinds_of, projections, put, put_kinds
from tilemesh.model.linear import DENSE, DenseMatrix, Fused, Linear, MatrixKind, MatrixPiece, WeightHolder, as_kind
from tilemesh.model.loss import loss_sum
from tilemesh.model.programs.prepare import prepare
from tilemesh.model.programs.program import Use
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.laid import StepPiece

CONFIG = ModelConfig(
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    vocabulary=32,
    context=8,
    positions="rotary",
    activation="swiglu",
    mlp_width=32,
)


@dataclass(frozen=True)
class Scaled(MatrixKind):
    """A frozen weight whose rows have a trained factor each."""

    def pieces(self, outputs: int, inputs: int) -> tuple[MatrixPiece, ...]:
        weight = MatrixPiece("weight", (outputs, inputs), trained=False)
        return weight, MatrixPiece("factor", (outputs, 1), cut=("column",))

    def affine(self, layer: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
        return layer.place.product(x, self.dense(layer), bias)

    def dense(self, layer: Linear) -> Tensor:
        return layer.weight * layer.factor


def model_of(kind: MatrixKind | None = None) -> Transformer:
    model = Transformer(CONFIG, seed=3, dtype=torch.float64)
    if kind is not None:
        for number, (name, layer) in enumerate(list(projections(model))):
            if name != "output":
                layer.requires_grad_(False)
                factor = torch.linspace(0.5, 1.5 + number / 10, layer.out_features, dtype=torch.float64)[:, None]
                put(model, name, as_kind(layer, kind, factor=factor))
    return model


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1)


def gradients_of_one_process() -> dict[str, Tensor]:
    model = model_of(Scaled())
    tokens, targets = batch()
    total, count = loss_sum(model(tokens), targets)
    (total / count).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(tp=2, precision="fp64"),
        ParallelPlan(tp=2, sequence_parallel=True, precision="fp64"),
        ParallelPlan(pp=2, schedule="zb-h1", accumulation=2, precision="fp64"),
        ParallelPlan(dp=2, zero=3, precision="fp64"),
        ParallelPlan(dp=2, offload="weights", precision="fp64"),
    ],
    ids=str,
)
def test_a_kind_from_outside_trains_on_every_layout(plan: ParallelPlan) -> None:
    want = gradients_of_one_process()
    tokens, targets = batch()

    def main(comm):
        mesh = Mesh(comm, **plan.axes)
        laid = lay(model_of(Scaled()), mesh, plan)
        rows = 4 // plan.dp
        mine = slice(mesh.dp.index * rows, (mesh.dp.index + 1) * rows)
        each = rows // plan.accumulation
        pieces = [
            StepPiece(tokens[mine][at : at + each], targets[mine][at : at + each], at) for at in range(0, rows, each)
        ]
        laid.passes(pieces)
        laid.gradients.finish()
        return laid.gather_gradients()

    found = run_threads(2, main, timeout_s=100)[0]
    assert found is not None
    assert found.keys() == want.keys()
    assert any(name.endswith("fc_o.factor") for name in want)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-13, msg=name)


def layers() -> dict[str, Linear]:
    torch.manual_seed(0)
    plain = Linear(16, 12, dtype=torch.float64)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    scheme = parse_scheme("int4-g8")
    coded = few_bits(plain, scheme, quantize(plain.weight, scheme))
    factors = {"left": torch.randn(12, 3).double(), "right": torch.randn(3, 16).double()}
    adapter = {"lora_a": torch.randn(2, 16).double(), "lora_b": torch.randn(12, 2).double()}
    return {
        "dense": plain,
        "fused": as_kind(plain, Fused(implementation="torch")),
        "few bits": coded,
        "rounded": as_kind(plain, Rounded(scheme=scheme)),
        "masked": as_kind(plain, Masked((2, 4), 0.5)),
        "factored": as_kind(plain, Factored(3), **factors),
        "adapted": as_kind(plain, Adapted(DENSE, 2, 1.5), **adapter),
        "adapted codes": as_kind(coded, Adapted(coded.kind, 2, 1.5), **adapter),
    }


@pytest.mark.parametrize("name", list(layers()))
def test_a_kind_has_the_parameters_that_it_names_and_multiplies_by_its_dense_form(name: str) -> None:
    layer = layers()[name]
    pieces = {piece.name: piece for piece in layer.kind.pieces(12, 16)}
    held = {key: value for key, value in layer.named_parameters() if key != "bias"}
    assert held.keys() == pieces.keys()
    for key, piece in pieces.items():
        assert tuple(held[key].shape) == piece.shape
        assert piece.dtype is None or held[key].dtype == piece.dtype
    assert layer.kind.nbytes(12, 16, torch.float64.itemsize) == sum(value.nbytes for value in held.values())
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    matrix = layer.kind.dense(layer).double()
    if name not in ("rounded", "masked"):  # whose passes see another matrix than the one that is trained
        torch.testing.assert_close(layer(x), x @ matrix.T + layer.bias, rtol=1e-6, atol=1e-6)
    cut = layer.kind.affine(layer, x, None) + layer.bias
    torch.testing.assert_close(layer(x), cut, rtol=1e-12, atol=1e-12)


def test_a_model_is_made_anew_from_its_kinds() -> None:
    model = model_of(Scaled())
    again = Transformer(CONFIG, device="meta", dtype=torch.float64)
    put_kinds(again, kinds_of(model))
    shapes, wanted = ({name: value.shape for name, value in each.named_parameters()} for each in (again, model))
    assert shapes == wanted


def test_pieces_of_a_dtype_of_their_own_are_counted_by_it() -> None:
    @dataclass(frozen=True)
    class Bytes(MatrixKind):
        def pieces(self, outputs: int, inputs: int) -> tuple[MatrixPiece, ...]:
            return MatrixPiece("codes", (outputs, inputs), torch.uint8), MatrixPiece("factor", (outputs, 1))

    assert Bytes().nbytes(12, 16, itemsize=8) == 12 * 16 + 12 * 8


@dataclass(frozen=True)
class Halved(DenseMatrix):
    """A dense weight that multiplies otherwise, and says nothing else of itself."""

    def affine(self, layer: WeightHolder, x: Tensor, bias: Tensor | None) -> Tensor:
        return layer.place.product(x, layer.weight / 2, bias)


@pytest.mark.parametrize("kind", [Halved(), Scaled()], ids=["derived from a dense one", "of its own pieces"])
def test_programs_that_serve_compute_what_a_kind_from_outside_does(kind: MatrixKind) -> None:
    model = model_of(kind).eval().requires_grad_(False)
    tokens, _ = batch()
    torch.testing.assert_close(prepare(model, Use())(tokens), model(tokens), rtol=1e-12, atol=1e-12)
    assert {type(of) for of in kinds_of(model).values()} == {type(kind)}
