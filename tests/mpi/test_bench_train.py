"""`tilemesh bench train` on ranks: contenders take turns, a peer that cannot start is missing, and ours must start."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tilemesh.bench.harness import OURS
from tilemesh.bench.train.compare import (
    PEERS,
    Contender,
    TrainComparison,
    compare,
    require_same_losses,
    usual_peers,
)
from tilemesh.bench.train.peers import PlainStep, decay_groups, pad_vocabulary
from tilemesh.bench.train.rows import train_rows
from tilemesh.bench.train.sleeping import simulated_s
from tilemesh.bench.train.torch_zero import replicas_step
from tilemesh.cli.main import main
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.launch.start import find_mpiexec
from tilemesh.measure.row import read_rows
from tilemesh.measure.sample import Sample
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
        ("dp=2,tp=2", "train.steps=9", ("eager", "compile")),
        ("cp=2", "train.steps=9", ("eager", "compile")),
    ],
)
def test_peers_suit_the_plan(mesh: str, sets: str, names: tuple[str, ...], tmp_path: Path) -> None:
    assert usual_peers(made(tmp_path, sets, mesh=mesh)) == names


@pytest.mark.parametrize("name", ["ddp", "zero-optimizer", "fsdp"])
@pytest.mark.parametrize("mesh", ["tp=2", "cp=2"])
def test_peers_of_replicas_do_not_compute_a_batch_once_per_rank(name: str, mesh: str, tmp_path: Path) -> None:
    zero = {"zero-optimizer": 1, "fsdp": 3}.get(name, 0)
    config = made(tmp_path, "train.steps=9", mesh=mesh)
    config = replace(config, plan=replace(config.plan, zero=zero))
    with pytest.raises(RunError, match=f"on replicas alone, not with {mesh.replace('=', ' ')}"):
        replicas_step(name)(config, torch.device("cpu"))


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


def test_ours_with_other_settings_has_a_row_with_its_own_prediction(tmp_path: Path) -> None:
    config, other = made(tmp_path), made(tmp_path, "train.batch=8")
    steps = {"ours train.batch=8": Sample.of([0.5]), "ours, malloc kept": Sample.of([0.25])}
    compared = TrainComparison(Sample.of([0.25]), steps, {}, {OURS: 10, **dict.fromkeys(steps, 20)})
    also = {"ours train.batch=8": (other, {"step_time_s": 0.4}), "not started": (other, {"step_time_s": 0.4})}
    rate, memory, more = train_rows(config, compared, {"missing": "no planner"}, [], also)
    assert (rate.missing["predicted"], memory.peers["ours, malloc kept"].median) == ("no planner", 20)
    assert more.case.items() >= {"settings": "ours train.batch=8", "batch": 8}.items()
    assert more.measured is not None
    assert more.predicted == other.tokens_per_step / 0.4
    assert (more.measured.median, list(more.peers)) == (other.tokens_per_step / 0.5, [OURS])
    # Each by the tokens of its own steps, of which these have twice as many as ours.
    assert more.peers[OURS].median == config.tokens_per_step / 0.25
    assert rate.peers["ours train.batch=8"].median == more.measured.median


def test_pipelines_over_stages_that_sleep_are_rows_beside_their_simulation(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    words = ["bench", "pipeline", "gpipe", "1f1b", "--ranks", "2", "--microbatches", "2", "--repeats", "1"]
    assert main([*words, "--transport", "torch", "--no-peers", "--json", str(rows)]) == 0
    found = read_rows(rows)
    assert [row.case["schedule"] for row in found] == ["gpipe", "1f1b"]
    for row in found:
        assert row.measured is not None
        assert row.predicted == row.limit == simulated_s(str(row.case["schedule"]), 2, 2)
        assert row.measured.median > row.limit


@pytest.mark.slow
def test_messages_beside_computing_are_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    words = ["bench", "pipeline", "1f1b", "--ranks", "2", "--microbatches", "2", "--repeats", "1", "--sends", "4KiB"]
    assert main([*words, "--transport", "torch", "--json", str(rows)]) == 0
    (row,) = read_rows(rows)
    assert {"left_to_move_s", "waited_for_s", "tiny_s"} <= set(row.case)


@pytest.mark.parametrize("tied", [True, False])
def test_a_peer_with_padded_tables_trains_the_same(tied: bool) -> None:
    """On a GPU peers get tables of a multiple of 64 rows, as ours are computed with."""
    sizes = "model.layers=1,model.width=32,model.heads=2,model.vocabulary=257,model.context=16,train.context=16"
    rest = f"train.batch=2,plan.precision=fp64,train.steps=10,model.dropout=0,model.tied={str(tied).lower()}"
    config, device = load(sets=[sizes, rest]), torch.device("cpu")
    plain, padded = PlainStep(config, device), PlainStep(config, device)
    pad_vocabulary(padded.model)
    padded.parameters = list(padded.model.parameters())
    padded.optimizer = padded.make_optimizer(decay_groups(config, padded.parameters))
    for seed in range(3):
        tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(seed))
        assert plain([(tokens, tokens)]).item() == pytest.approx(padded([(tokens, tokens)]).item(), abs=1e-12)
    table = padded.model.token_embedding.weight
    assert table.shape == (320, 32)
    assert table[257:].count_nonzero() == 0


def test_what_is_next_is_what_was_typed_beside_the_better_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = TrainComparison(Sample.of([0.25]), {}, {"PyTorch eager": "none"}, {OURS: 10})
    monkeypatch.setattr("tilemesh.bench.train.compare.compare", lambda *_, **__: compared)

    def best(config: TrainConfig, gpus: object) -> tuple[ParallelPlan, float, float]:
        return config.changed(plan={"zero": 1}).plan, 1.0, 2.0

    monkeypatch.setattr("tilemesh.train.predict.best_layout", best)
    words = ["bench", "train", "tiny", "--mesh", "dp=2", "--set", "train.batch=8", "--peers", "eager"]
    assert main(words) == 0
    assert f"{' '.join(words)} --also plan.zero=1\n" in capsys.readouterr().out


def test_a_saved_plan_is_what_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan file for `train` and for its bench; what is said with --set goes over it."""
    seen: list[TrainConfig] = []

    def stop(config: TrainConfig, **_: object) -> None:
        seen.append(config)
        raise UsageError("seen")

    monkeypatch.setattr("tilemesh.bench.train.compare.compare", stop)
    plan = ParallelPlan(dp=2, zero=1, microbatch=4, precision="fp32")
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert main(["bench", "train", "tiny", "--plan", str(tmp_path / "plan.toml"), "--peers", "eager"]) == 2
    assert (seen[0].plan.dp, seen[0].plan.zero, seen[0].plan.microbatch) == (2, 1, 4)
    assert main(["bench", "train", "tiny", "--peers", "eager", "--mesh", "dp=1"]) == 2
    assert (seen[1].plan.dp, seen[1].plan.zero) == (1, 0)
