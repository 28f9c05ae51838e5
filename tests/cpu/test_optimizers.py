"""Lion and Muon: their arithmetic against independent computations, on every layout."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train_run import losses, made, state, trained
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from tilemesh.comm import run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.shard import Cut, Shard
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.weights import parameter_shapes
from tilemesh.parallel.matrices import MatrixGroup
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import Held, take
from tilemesh.parallel.zero import cut_over_replicas
from tilemesh.train.check import check_values
from tilemesh.train.config import OptimizerConfig
from tilemesh.train.offload import HostOptimizer
from tilemesh.train.optimizer import Optimizer
from tilemesh.train.rules import decay_of, kinds_of, rule_of
from tilemesh.train.update import NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, UpdateGroup, orthogonal

LAYERS = "model.layers=2"
SMALL = {"layers": 2, "width": 16, "heads": 4, "vocabulary": 64, "context": 8}
MODELS = [
    ModelConfig(**SMALL),
    ModelConfig(**SMALL, positions="rotary", norm="rmsnorm", activation="swiglu", biases=False, tied=False),
    ModelConfig(**SMALL, positions="rotary", norm="rmsnorm", norm_place="sandwich", norm_offset=True, qk_norm="head"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number}: {number * 7} dogs and {number * 13} foxes\n" for number in range(400)))
    return str(path)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_three_steps_of_lion_are_its_formula() -> None:
    config = OptimizerConfig(name="lion", betas=(0.9, 0.99))
    parameter = torch.nn.Parameter(random(0, 4, 3))
    value, average = parameter.detach().numpy().copy(), np.zeros((4, 3))
    group = UpdateGroup(config, {"w": parameter}, 0.1, is_fused=True)
    for step in range(3):
        gradient = random(step + 1, 4, 3)
        parameter.grad = gradient
        with torch.no_grad():
            group.step(0.01, None)
        direction = np.sign(0.9 * average + 0.1 * gradient.numpy())
        value = value * (1 - 0.01 * 0.1) - 0.01 * direction
        average = 0.99 * average + 0.01 * gradient.numpy()
    np.testing.assert_allclose(parameter.detach().numpy(), value, rtol=1e-14)
    np.testing.assert_allclose(group.state["w"]["exp_avg"].numpy(), average, rtol=1e-13)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5), (1, 7)])
def test_orthogonal_is_a_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    """The oracle decomposes the matrix and applies the polynomial to each singular value; products do not appear."""
    matrix = random(3, *shape)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(orthogonal(matrix), left @ torch.diag(values) @ right, rtol=1e-10, atol=1e-12)
    # In the 16-bit products that a GPU makes, it is torch's own.
    theirs = _zeropower_via_newtonschulz(matrix.float(), NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, 1e-7)
    assert torch.equal(orthogonal(matrix.float(), torch.bfloat16), theirs)


def test_three_steps_of_muon_are_torchs_but_for_16_bit_products() -> None:
    config = OptimizerConfig(name="muon", momentum=0.95)
    ours, theirs = (torch.nn.Parameter(random(0, 8, 6).float()) for _ in range(2))
    peer = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    group = UpdateGroup(config, {"layers.0.w": ours}, 0.1, is_fused=True)
    for step in range(3):
        ours.grad = random(step + 1, 8, 6).float()
        theirs.grad = ours.grad.clone()
        peer.step()
        with torch.no_grad():
            group.step(0.01, None)
    # torch multiplies in bfloat16: five rounds of two products each, whose polynomials raise an error at most 3.5-fold.
    size = 3 * 0.01 * 0.2 * math.sqrt(8)
    assert float((ours - theirs).detach().abs().max()) < size * 2**-8 * 3.5**5


def test_which_parameters_muon_steps() -> None:
    muon = OptimizerConfig(name="muon")
    assert rule_of(muon, "layers.3.mlp.fc_in.weight", (8, 4)) == "muon"
    others = {"token_embedding.weight": (9, 4), "output.weight": (9, 4), "layers.0.mlp_norm.weight": (4,)}
    assert {rule_of(muon, name, shape) for name, shape in others.items()} == {"adamw"}
    assert kinds_of(muon, "token_embedding.weight", (9, 4)) == ("exp_avg", "exp_avg_sq")
    assert kinds_of(OptimizerConfig(name="sgd", momentum=0.0), "w", (4,)) == ()


class TestDecayGroups:
    def test_the_first_pattern_that_matches_counts(self) -> None:
        groups = ("token_embedding.*=0", "layers.1.*=0.3", "*norm*=0.2")
        config = OptimizerConfig(weight_decay=0.1, decay_groups=groups)
        assert decay_of(config, "token_embedding.weight", (9, 4)) == 0
        assert decay_of(config, "layers.1.mlp_norm.weight", (4,)) == 0.3
        assert decay_of(config, "layers.0.mlp_norm.weight", (4,)) == 0.2
        assert decay_of(config, "layers.0.mlp.fc_in.weight", (8, 4)) == 0.1
        assert decay_of(config, "layers.0.mlp.fc_in.bias", (8,)) == 0

    @pytest.mark.parametrize("wrong", ["*norm*", "=1", "a=-1", "a=nan", "a=much"])
    def test_what_is_none(self, text: str, wrong: str) -> None:
        with pytest.raises(UsageError, match="expected PATTERN=NUMBER"):
            check_values(made(text, "dp=1,tp=1", f"optimizer.decay_groups=['{wrong}']"))

    def test_a_pattern_that_matches_nothing_is_refused(self, text: str) -> None:
        words = (
            r"has 'token_embeding\.\*', which matches no parameter that is trained: expected .* token_embedding.weight"
        )
        with pytest.raises(UsageError, match=words):
            check_values(made(text, "dp=1,tp=1", "optimizer.decay_groups=['*norm*=0','token_embeding.*=0']"))
        check_values(made(text, "dp=1,tp=1", "optimizer.decay_groups=['*norm*=0','token_embedding.*=0']"))

    @pytest.mark.parametrize("config", MODELS)
    def test_the_names_are_the_models_own(self, config: ModelConfig) -> None:
        parameters = Transformer(config, device="meta").named_parameters()
        assert parameter_shapes(config) == {name: tuple(parameter.shape) for name, parameter in parameters}

    def test_a_run_keeps_to_them(self, text: str, tmp_path: Path) -> None:
        """Without a learning rate's gradient part: a rate of 1 and weights that nothing but the decay moves."""
        sets = (
            "train.steps=1,optimizer.name=sgd,optimizer.momentum=0,optimizer.lr=1e-3,optimizer.warmup=0,sample.tokens=0"
        )
        plain, grouped = (
            "optimizer.weight_decay=0",
            'optimizer.weight_decay=0,optimizer.decay_groups=["*.fc_o.weight=5"]',
        )
        for name, more in (("plain", plain), ("grouped", grouped)):
            trained(made(text, "dp=1,tp=1", sets, more, "plan.precision=fp64"), tmp_path / name)
        before, after = state(tmp_path / "plain", 1), state(tmp_path / "grouped", 1)
        moved = {name.split(":")[1] for name in before if not torch.equal(before[name], after[name])}
        assert moved == {f"layers.{layer}.attention.fc_o.weight" for layer in (0, 1)}


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("lion", ["dp=2,tp=2", "dp=2,tp=1;plan.zero=2", "dp=2,tp=1;plan.zero=3", "pp=2;plan.accumulation=4"]),
        (
            "muon",
            [
                "dp=2,tp=1",
                "dp=1,tp=1,pp=2;plan.accumulation=4",
                "dp=1,tp=2;plan.sequence_parallel=true",
                "dp=2,tp=1;plan.zero=2,plan.offload=optimizer",
                "dp=2,tp=2;plan.zero=3",
            ],
        ),
    ],
)
def test_every_layout_trains_what_one_process_trains(text: str, tmp_path: Path, name: str, layouts: list[str]) -> None:
    sets = f"optimizer.name={name},optimizer.lr=1e-3,plan.precision=fp64,train.steps=3,sample.tokens=0,evaluate.every=0"
    trained(made(text, "dp=1,tp=1", sets), tmp_path / "alone")
    alone = state(tmp_path / "alone", 3)
    for number, layout in enumerate(layouts):
        mesh, _, more = layout.partition(";")
        trained(made(text, mesh, sets, *([more] if more else [])), tmp_path / str(number))
        ours = state(tmp_path / str(number), 3)
        assert ours.keys() == alone.keys()
        for key, value in alone.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-10, atol=1e-10, msg=f"{layout}: {key}")


@pytest.mark.parametrize("name", ["lion", "muon"])
def test_they_resume_bit_for_bit_and_learn(text: str, tmp_path: Path, name: str) -> None:
    config = made(text, "dp=2,tp=1", f"optimizer.name={name},optimizer.lr=3e-3,train.steps=8,sample.tokens=0")
    trained(config, tmp_path / "a")
    trained(config, tmp_path / "b", stop_after=3)
    trained(config, tmp_path / "b", resume=True)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    ours, theirs = state(tmp_path / "a", 8), state(tmp_path / "b", 8)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert losses(tmp_path / "a")[8] < losses(tmp_path / "a")[1]


def test_muon_with_16_bit_weights_takes_the_same_bits_wherever_matrices_are_cut(text: str, tmp_path: Path) -> None:
    """The sum of two replicas' gradients is the same in any order, and so is all that follows from it."""
    sets = "optimizer.name=muon,optimizer.clip=0,plan.precision=bf16-master,train.steps=2,sample.tokens=0"
    for zero in (0, 1):
        trained(made(text, "dp=2,tp=1", sets, f"plan.zero={zero},evaluate.every=0"), tmp_path / str(zero))
    states = [state(tmp_path / str(zero), 2) for zero in (0, 1)]
    assert states[0].keys() == states[1].keys()
    assert [name for name, value in states[0].items() if not torch.equal(value, states[1][name])] == []


def test_muon_on_replicas_that_are_meshes_and_keep_apart(text: str, tmp_path: Path) -> None:
    sets = "optimizer.name=muon,plan.precision=fp64,train.method=local,method.period=2,train.steps=2,sample.tokens=0"
    for tp in (1, 2):
        trained(made(text, f"dp=2,tp={tp}", sets, "evaluate.every=0,checkpoint.every=2"), tmp_path / str(tp))
    one, two = (state(tmp_path / str(tp), 2) for tp in (1, 2))
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-10, atol=1e-10, msg=key)


@pytest.mark.parametrize("part_bytes", [1, 96, 1 << 20])
def test_muon_on_the_host_steps_the_same_parts_on_ranks_that_hold_unequal_rows(part_bytes: int) -> None:
    """Of three rows one rank has two, 96 bytes of states, and the other one: both must exchange the same matrices."""
    config, names = OptimizerConfig(name="muon", momentum=0.9), [f"layers.{number}.w" for number in range(5)]

    def stepped(mesh: Mesh | None) -> dict[str, Tensor]:
        held = {}
        for number, name in enumerate(names):
            shard = Shard(name, (3, 4)) if mesh is None else Shard(name, (3, 4), mesh.shape, mesh.comm.rank)
            shard = shard if mesh is None else cut_over_replicas(shard, 2)
            held[name] = Held(torch.nn.Parameter(take(shard, random(number, 3, 4)).clone()), shard)
        group = None if mesh is None else MatrixGroup(mesh, ParallelPlan(dp=2, zero=1))
        optimizer = HostOptimizer(config, held, "fp64", matrices=group, part_bytes=part_bytes, moves=True)
        for step in range(2):
            for number, (parameter, shard) in enumerate(held.values()):
                parameter.grad = take(shard, random(10 * step + number + 5, 3, 4)).clone()
            optimizer.step(0.1)
        return {name: parameter.detach() for name, (parameter, _) in held.items()}

    alone = stepped(None)
    first, second = run_threads(2, lambda comm: stepped(Mesh(comm, dp=2)), timeout_s=20)
    assert all(torch.equal(torch.cat([first[name], second[name]]), alone[name]) for name in names)


def test_ranks_with_other_experts_make_the_same_parts_of_states() -> None:
    """Of one size: Muon's exchanges are those of a part."""
    axes, spread = (("dp", 4),), (("dp", 2),)

    def parts(rank: int) -> list[list[str]]:
        held = {}
        for number in range(4):
            is_shared = {"spread": spread, "at": rank % 2} if number % 2 else {}
            shard = Shard(f"w{number}", (8, 8), axes, rank, **is_shared)
            held[shard.name] = Held(torch.nn.Parameter(torch.zeros(shard.shape)), shard)
        optimizer = HostOptimizer(OptimizerConfig(), held, "fp32", part_bytes=12 * 8 * 8 * 2)
        return [list(part.shards) for part in optimizer.parts]

    assert [parts(rank) for rank in range(4)] == [[["w0", "w1"], ["w2", "w3"]]] * 4


def test_muon_over_parts_of_matrices_needs_the_ranks_that_hold_the_others() -> None:
    shard = Shard("layers.0.w", (4, 3), (("tp", 2),), 0, (Cut("tp", 0),))
    with pytest.raises(UsageError, match=r"layers\.0\.w is held in parts: Muon needs matrices="):
        Optimizer(OptimizerConfig(name="muon"), {shard.name: Held(torch.nn.Parameter(random(0, 2, 3)), shard)}, "fp64")
