"""`tilemesh bench train` on ranks: contenders take turns, a peer that cannot start is missing, and ours must start."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tilemesh.bench.train.compare import OURS, PEERS, Contender, compare, require_same_losses, usual_peers
from tilemesh.core.errors import RunError
from tilemesh.launch.start import find_mpiexec
from tilemesh.train.config import TrainConfig
from tilemesh.train.load import load

SETS = (
    "model.layers=1,model.width=16,model.heads=2,model.kv_heads=2,model.mlp_width=32,model.context=16,train.batch=4,"
    "train.device=cpu"
)


def made(folder: Path, *more: str, mesh: str = "dp=1") -> TrainConfig:
    source = folder / "text.txt"
    source.write_text("to be or not to be, that is the question\n" * 200)
    return load(sets=[SETS, f"data.source={source}", *more], mesh=mesh)


NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
pytestmark = pytest.mark.usefixtures("warm")
NEEDS_MPI = pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")


@pytest.mark.parametrize(
    ("peer", "mesh", "transport"),
    [("eager", "dp=1", "torch"), pytest.param("ddp", "dp=2", "mpi", marks=[NEEDS_MPI, pytest.mark.slow])],
)
def test_ours_and_a_peer_take_turns_and_are_profiled(peer: str, mesh: str, transport: str, tmp_path: Path) -> None:
    said: list[str] = []
    also = {"ours unfused": made(tmp_path, "optimizer.fused=false")} if transport == "torch" else {}
    found = compare(
        made(tmp_path, mesh=mesh), peers=[peer], also=also, transport=transport, blocks=3, steps=2, at_once=True,
        profile=tmp_path / "profile", say=said.append,
    )  # fmt: skip
    assert [found.peers[name].n for name in also] == [3] * len(also)
    said = [line for line in said if "unfused" not in line]
    title = PEERS[peer]
    assert (found.ours.n, found.peers[title].n, found.missing) == (3, 3, {})
    assert 0 < found.ours.p20 <= found.ours.p80 < 60
    assert min(found.memory_bytes[name] for name in ("ours", title)) > 1 << 20
    assert said[:2] == ["waiting for ours", f"waiting for {title}"]
    assert said[2:5] == [f"block {number} of 3" for number in (1, 2, 3)]
    for name in ("ours", peer):
        head, longest, *_ = (tmp_path / "profile" / f"{name}.txt").read_text().splitlines()
        assert head.split() == ["us", "calls", "per", "step"]
        assert float(longest.split()[0]) > 0


@pytest.mark.parametrize(
    ("peer", "mesh", "sets"),
    [
        pytest.param("zero-optimizer", "dp=2", "plan.zero=1,plan.microbatch=1", marks=pytest.mark.slow),
        ("fsdp", "dp=2", "plan.zero=3,plan.microbatch=2"),
        pytest.param("fsdp", "dp=2", "plan.zero=2,plan.microbatch=1", marks=pytest.mark.slow),
        pytest.param("fsdp-pipeline", "dp=2,tp=2,pp=2", "plan.zero=2,plan.microbatch=1", marks=pytest.mark.slow),
        pytest.param("deepspeed", "dp=2", "plan.zero=1,plan.microbatch=1", marks=[pytest.mark.slow, NEEDS_DEEPSPEED]),
        pytest.param("deepspeed", "dp=2", "plan.zero=3,plan.microbatch=1", marks=[pytest.mark.slow, NEEDS_DEEPSPEED]),
    ],
)
def test_peers_that_share_states_have_our_losses(peer: str, mesh: str, sets: str, tmp_path: Path) -> None:
    """The same weights, batches, clipping and schedule of rates: the first losses are ours but for rounding."""
    config = made(tmp_path, "model.layers=2", sets, mesh=mesh)
    found = compare(config, peers=[peer], transport="torch", blocks=1, steps=1, at_once=True)
    assert (found.missing, found.peers[PEERS[peer]].n) == ({}, 1)


def test_a_peer_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    mine, theirs = Contender(OURS, 1, "torch"), Contender("eager", 1, "torch")
    mine.losses, theirs.losses = [5.0, 4.0, 3.0], [5.0, 4.0, 3.00001]
    require_same_losses(theirs, mine, made(tmp_path))
    theirs.losses = [5.0, 4.0, 3.0001]
    with pytest.raises(RunError, match=r"at step 3 is 3\.0001 and ours 3: it computes something else"):
        require_same_losses(theirs, mine, made(tmp_path))
    theirs.losses = [5.0, float("nan"), 3.0]
    with pytest.raises(RunError, match="at step 2"):
        require_same_losses(theirs, mine, made(tmp_path))
    require_same_losses(theirs, mine, made(tmp_path, "model.dropout=0.1"))  # masks of their own


@pytest.mark.parametrize(
    ("mesh", "sets", "names"),
    [
        ("dp=2", "plan.zero=1", ("zero-optimizer", "deepspeed")),
        ("dp=2", "plan.zero=3", ("fsdp", "deepspeed")),
        ("pp=2", "model.layers=2", ("eager", "pipeline")),
        ("dp=2,pp=2", "model.layers=2", ("fsdp-pipeline",)),
        ("dp=2", "train.steps=9", ("eager", "compile", "ddp")),
    ],
)
def test_peers_suit_the_plan(mesh: str, sets: str, names: tuple[str, ...], tmp_path: Path) -> None:
    assert usual_peers(made(tmp_path, sets, mesh=mesh)) == names


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_torchs_pipelining_takes_turns(schedule: str, tmp_path: Path) -> None:
    sets = f"model.layers=4,plan.schedule={schedule},plan.accumulation=4,plan.microbatch=1"
    found = compare(made(tmp_path, sets, mesh="pp=2"), peers=["pipeline"], transport="torch", blocks=1, steps=1)
    assert (found.missing, found.peers[PEERS["pipeline"]].n) == ({}, 1)


def test_a_peer_that_does_not_start_is_missing(tmp_path: Path) -> None:
    config = made(tmp_path, "plan.precision=bf16-master")
    found = compare(config, peers=["eager"], transport="torch", blocks=1, steps=1)
    assert found.peers == {}
    why = "rank 0 raised RunError: peers are written for fp32, bf16 and fp64, not for bf16-master"
    assert found.missing == {"PyTorch eager": why}


def test_where_ours_does_not_start_that_is_the_error(tmp_path: Path) -> None:
    config = made(tmp_path)
    (tmp_path / "text.txt").unlink()
    with pytest.raises(RunError, match=r"^ours did not start: rank 0 raised UsageError: data.source .* does not exist"):
        compare(config, peers=["eager"], transport="torch")


@pytest.mark.parametrize("at_once", [pytest.param(False, marks=pytest.mark.slow), True])
def test_whoever_does_not_come_up_gives_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Starting ranks fails at once, as where there are no processes left: before anything could be waited for."""
    start = Contender.start
    unable: set[str] = {"eager"}

    def starts(self: Contender, config: TrainConfig) -> None:
        if self.name in unable:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        start(self, config)

    monkeypatch.setattr(Contender, "start", starts)
    found = compare(made(tmp_path), peers=["eager"], transport="torch", blocks=1, steps=1, at_once=at_once)
    assert list(found.missing) == ["PyTorch eager"]
    assert "Resource temporarily unavailable" in found.missing["PyTorch eager"]
    unable.add("ours")
    with pytest.raises(RunError, match=r"^ours did not start: .*Resource temporarily unavailable"):
        compare(made(tmp_path), peers=["eager"], transport="torch", at_once=at_once)
