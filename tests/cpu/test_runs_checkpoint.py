"""Checkpoints by boxes: what any layout wrote, any other reads; what is half written or damaged never counts."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.shard import Cut, Shard
from tilemesh.graph.ops import DTYPES
from tilemesh.runs import names, tensors
from tilemesh.runs.checkpoint import FAILED, IDLE, WRITTEN, Writer, sweep
from tilemesh.runs.manifest import WRITING, DamagedError, checkpoints
from tilemesh.runs.reader import Reader, open_checkpoint
from tilemesh.runs.tensors import Part, parts_of, read_tensors, snapshot, write_tensors

WHOLE = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)


@st.composite
def layouts(draw: st.DrawFn) -> list[Shard]:
    """All ranks' shards of one tensor on a mesh of two axes, each of which may cut a dim, or repeat it."""
    axes = (("tp", draw(st.integers(1, 3))), ("dp", draw(st.integers(1, 3))))
    cuts = tuple(Cut(axis, draw(st.integers(0, 1))) for axis, _ in axes if draw(st.booleans()))
    ranks = axes[0][1] * axes[1][1]
    return [Shard("w", tuple(WHOLE.shape), axes, rank, cuts) for rank in range(ranks)]


def local(shard: Shard) -> torch.Tensor:
    made = torch.empty(shard.shape)
    for here, there in shard.boxes:
        made[here.slices] = WHOLE[there.slices]
    return made


def write(folder: Path, shards: list[Shard], step: int = 1, **options: Any) -> list[Writer]:
    """Every rank's part; rank 0 makes it a checkpoint."""
    ranks = len(shards)
    writers = [Writer(folder, shard.rank, ranks=ranks, keep=2, background=False, **options) for shard in shards]
    for writer, shard in zip(writers, shards, strict=True):
        writer.begin(step, parts_of("weight:w", shard, local(shard)), {"position": step})
    failed = any(writer.state == FAILED for writer in writers)
    for writer in reversed(writers):  # rank 0 last: it must not matter
        assert writer.state in (WRITTEN, FAILED)
        writer.settle(failed)
        assert writer.state == IDLE
    return writers


@settings(max_examples=40, deadline=None)
@given(written=layouts(), read=layouts())
def test_any_layout_reads_what_any_other_wrote(
    tmp_path_factory: pytest.TempPathFactory, written: list[Shard], read: list[Shard]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write(folder / names.CHECKPOINTS, written)
    reader = open_checkpoint(folder)
    assert (reader.names, reader.manifest.values["position"]) == (["weight:w"], 1)
    assert torch.equal(reader.weight("w"), WHOLE)
    for shard in read:
        assert torch.equal(reader.local("weight:w", shard), local(shard))
    assert sum(piece.box.size for piece in reader.manifest.pieces) == WHOLE.numel()  # nothing is stored twice


def one() -> list[Shard]:
    return [Shard("w", tuple(WHOLE.shape))]


def test_the_newest_stay_and_what_a_dead_run_left_is_swept(tmp_path: Path) -> None:
    folder = tmp_path / names.CHECKPOINTS
    for step in (1, 2, 3):
        write(folder, one(), step)
    assert [step for step, _ in checkpoints(folder)] == [3, 2]
    (folder / f"{WRITING}step-00000009").mkdir()
    sweep(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]
    assert open_checkpoint(tmp_path, 2).manifest.step == 2
    with pytest.raises(UsageError, match=r"has no checkpoint of step 1 .* there are 2, 3"):
        open_checkpoint(tmp_path, 1)


def test_the_best_one_stays_until_a_better_one_is_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0, ranks=1, keep=1, background=False)
    (tmp_path / f"{WRITING}step-00000030").write_text("in the way")  # a file where the folder should be
    for step, is_best, kept in ((10, True, [10]), (20, False, [20, 10]), (30, True, [20, 10]), (40, False, [40, 10])):
        writer.begin(step, parts_of("weight:w", one()[0], WHOLE), {}, is_best=is_best)
        writer.settle(writer.state == FAILED)
        assert [found for found, _ in checkpoints(tmp_path)] == kept
    writer.begin(50, parts_of("weight:w", one()[0], WHOLE), {}, is_best=True)
    writer.settle(writer.state == FAILED)
    assert [found for found, _ in checkpoints(tmp_path)] == [50]


def test_a_part_that_cannot_be_written_makes_no_checkpoint(tmp_path: Path) -> None:
    said: list[str] = []
    notes: list[dict[str, Any]] = []
    shards = [Shard("w", tuple(WHOLE.shape), (("tp", 2),), rank, (Cut("tp", 0),)) for rank in (0, 1)]
    folder = tmp_path / names.CHECKPOINTS
    folder.mkdir()
    (folder / f"{WRITING}step-00000005").write_text("in the way")  # a file where the folder should be
    write(folder, shards, 5, say=said.append, note=lambda **values: notes.append(values))
    assert checkpoints(folder) == []
    assert any("CHECKPOINT OF STEP 5 FAILED" in text for text in said)
    assert [(note["kind"], note["ok"]) for note in notes] == [("checkpoint", False)]
    with pytest.raises(RunError, match="has no checkpoint yet"):
        open_checkpoint(tmp_path)


def test_hosts_that_share_no_folder_make_no_checkpoint_of_one_hosts_files(tmp_path: Path) -> None:
    """Two stages of a pipeline, each on a host of its own: every tensor that rank 0 sees is whole."""
    said: list[str] = []
    write(tmp_path, one(), 1)
    writers = [
        Writer(place, rank, ranks=2, keep=1, background=False, say=said.append)
        for rank, place in enumerate((tmp_path, tmp_path / "of the other host"))
    ]
    for writer in writers:
        writer.begin(2, parts_of(f"weight:stage{writer.rank}", one()[0], WHOLE), {})
    assert [writer.state for writer in writers] == [WRITTEN, WRITTEN]
    writers[0].settle(False)
    assert [step for step, _ in checkpoints(tmp_path)] == [1]
    (words,) = said
    assert "CHECKPOINT OF STEP 2 FAILED" in words
    assert words.endswith("rank 0 sees files of 1 of 2 ranks: name a folder that all hosts share")


def test_the_newest_sound_one_is_opened_and_a_hole_is_found(tmp_path: Path) -> None:
    folder = tmp_path / names.CHECKPOINTS
    shards = [Shard("w", tuple(WHOLE.shape), (("tp", 2),), rank, (Cut("tp", 0),)) for rank in (0, 1)]
    write(folder, shards, 1)
    write(folder, shards, 2)
    victim = folder / "step-00000002" / "shard-00001.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1] + b"\1")
    assert open_checkpoint(tmp_path).manifest.step == 1
    shutil.rmtree(folder / "step-00000001")
    with pytest.raises(RunError, match=r"no checkpoint of .* is whole: .*SHA-256 differs"):
        open_checkpoint(tmp_path)
    write(folder, shards[:1], 3)  # the other rank's part was never written
    with pytest.raises(DamagedError, match=r"w is not all there, .* 30 values are missing"):
        Reader(folder / "step-00000003")
    write(folder, shards, 4)
    with pytest.raises(DamagedError, match="has no weight:v"):
        Reader(folder / "step-00000004").weight("v")


def test_what_is_written_is_a_safetensors_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a": WHOLE, "b": torch.tensor([1, 2], dtype=torch.int64), "c": torch.ones(3, dtype=torch.bfloat16)}
    write_tensors(tmp_path / "t.safetensors", tensors)
    for found in (safetensors.load_file(tmp_path / "t.safetensors"), read_tensors(tmp_path / "t.safetensors")):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)


def test_tensors_of_every_dtype_that_a_traced_module_may_have_are_kept(tmp_path: Path) -> None:
    tensors = {name: torch.tensor([0, 1, 3]).to(getattr(torch, name)) for name in DTYPES}
    write_tensors(tmp_path / "tensors", tensors)
    for read in (read_tensors(tmp_path / "tensors"), load_file(tmp_path / "tensors")):
        assert {name: value.dtype for name, value in read.items()} == {n: v.dtype for n, v in tensors.items()}
        assert all(torch.equal(read[name], value) for name, value in tensors.items())


def test_a_snapshot_waits_for_a_gpu_whose_copies_are_behind_others(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    monkeypatch.setattr(tensors, "_copied", lambda tensor: tensor)
    here, there = (SimpleNamespace(is_cuda=on, is_pinned=lambda on=on: on) for on in (False, True))
    of = [Part(name, name, (0,), (1,), tensor) for name, tensor in (("master", here), ("bias", there))]  # type: ignore[arg-type]
    snapshot(of[:1])
    assert not waits
    snapshot(of)
    assert waits
