"""`tilemesh bench train` on ranks: contenders take turns, a peer that cannot start is missing, and ours must start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilemesh.bench.train.compare import PEERS, Contender, compare
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


NEEDS_MPI = pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")


@pytest.mark.parametrize(
    ("peer", "mesh", "transport"),
    [("eager", "dp=1", "torch"), pytest.param("ddp", "dp=2", "mpi", marks=[NEEDS_MPI, pytest.mark.slow])],
)
def test_ours_and_a_peer_take_turns_and_are_profiled(peer: str, mesh: str, transport: str, tmp_path: Path) -> None:
    said: list[str] = []
    found = compare(
        made(tmp_path, mesh=mesh), peers=[peer], transport=transport, blocks=3, steps=2, at_once=True,
        profile=tmp_path / "profile", say=said.append,
    )  # fmt: skip
    title = PEERS[peer]
    assert (found.ours.n, found.peers[title].n, found.missing) == (3, 3, {})
    assert 0 < found.ours.p20 <= found.ours.p80 < 60
    assert min(found.memory_bytes[name] for name in ("ours", title)) > 1 << 20
    assert said[:2] == ["waiting for ours", f"waiting for {title}"]
    assert said[2:5] == [f"block {number} of 3" for number in (1, 2, 3)]
    for name in ("ours", peer):
        head, longest, *_ = (tmp_path / "profile" / f"{name}.txt").read_text().splitlines()
        assert head.split() == ["us", "calls", "a", "step"]
        assert float(longest.split()[0]) > 0


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
