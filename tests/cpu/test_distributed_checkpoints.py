"""torch's distributed checkpoints: out and back bit for bit, from any mesh, and no pickle that is not an index."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tilemesh as tm
from tilemesh.cli.models import load_model
from tilemesh.core.errors import UsageError
from tilemesh.model import huggingface
from tilemesh.model.config import ModelConfig
from tilemesh.model.dcp_files import INDEX
from tilemesh.model.transformer import Transformer
from tilemesh.train.check import check_init
from tilemesh.train.export import export

SMALL = ModelConfig(
    layers=2, width=16, heads=2, vocabulary=256, context=16, norm="rmsnorm", positions="rotary", activation="swiglu",
    biases=False, tied=False,
)  # fmt: skip
RUN = (
    "train.steps=1,train.batch=2,train.device=cpu,plan.dp=1,plan.tp=1,evaluate.every=0,sample.tokens=0,"
    "train.context=16,data.source="
)


def trained(folder: Path, init: Path, name: str) -> Path:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    config = tm.train.load_config(sets=[f"{RUN}{folder / 'text.txt'}"], init=init)
    return tm.train.fit(config, run=folder / name, init=init).folder


def same(one: Transformer, other: Transformer) -> bool:
    theirs = dict(other.named_parameters())
    return all(torch.equal(value, theirs[name]) for name, value in one.named_parameters())


def test_a_run_goes_out_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    huggingface.save(Transformer(SMALL, seed=3), tmp_path / "first")
    trained(tmp_path, tmp_path / "first", "run")
    export(tmp_path / "run", tmp_path / "plain")
    export(tmp_path / "run", tmp_path / "dcp", distributed=True)
    files = {path.name for path in (tmp_path / "dcp").iterdir()}
    assert {"config.json", INDEX} <= files
    assert "model.safetensors" not in files
    model = huggingface.load(tmp_path / "plain")
    assert same(model, huggingface.load(tmp_path / "dcp"))
    # torch's own reader, which shares nothing with ours but the format.
    read = {"model.embed_tokens.weight": torch.empty(256, 16)}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(read, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(read["model.embed_tokens.weight"], model.token_embedding.weight)
    for name in ("dcp", "plain"):
        export(trained(tmp_path, tmp_path / name, f"from-{name}"), tmp_path / f"{name}-out")
    assert same(huggingface.load(tmp_path / "dcp-out"), huggingface.load(tmp_path / "plain-out"))


def test_a_checkpoint_with_its_optimizer_beside_the_model(tmp_path: Path) -> None:
    """As scripts save it: {"model": ..., "optim": ...}, and one number."""
    model = Transformer(SMALL, seed=4)
    huggingface.save(model, tmp_path / "hf")
    weights = {stored.name: stored.read() for stored in _stored(tmp_path / "hf")}
    state = {"model": weights, "optim": {"exp_avg": torch.ones(3)}, "step": 7}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    (tmp_path / "saved" / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    assert same(model, huggingface.load(tmp_path / "saved"))


RANKS = """
import sys
from pathlib import Path
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from safetensors.torch import load_file
mesh = init_device_mesh("cpu", (2,))
whole = load_file(sys.argv[1])
cut = {n: distribute_tensor(v, mesh, [Shard(0) if v.dim() > 1 else Replicate()]) for n, v in whole.items()}
dcp.save(cut, checkpoint_id=sys.argv[2])
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_what_two_ranks_wrote_is_read_whole(tmp_path: Path) -> None:
    model = Transformer(SMALL, seed=5)
    huggingface.save(model, tmp_path / "hf")
    (tmp_path / "script.py").write_text(RANKS)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "script.py"]
    files = [tmp_path / "hf" / "model.safetensors", tmp_path / "saved"]
    subprocess.run([sys.executable, *words, *files], check=True, timeout=100)
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 2
    (tmp_path / "saved" / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    assert same(model, huggingface.load(tmp_path / "saved"))


def _stored(folder: Path) -> list[huggingface.Stored]:
    from contextlib import ExitStack

    return huggingface._opened(folder, ExitStack())


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path(BOMB),))  # type: ignore[return-value]


BOMB = "/tmp/tilemesh-bomb-that-must-not-go-off"


@pytest.mark.parametrize("content", [pickle.dumps(Bomb()), b"", b"\x80\x04.", pickle.dumps({"a": 1})])
def test_an_index_of_something_else_is_refused_and_does_nothing(content: bytes, tmp_path: Path) -> None:
    huggingface.save(Transformer(SMALL, seed=4), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(UsageError, match="no index of a distributed checkpoint"):
        huggingface.load(tmp_path)
    assert not Path(BOMB).exists()


def saved(folder: Path, names: dict[str, torch.Tensor]) -> Path:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(names, checkpoint_id=folder, no_dist=True)
    return folder


def test_what_is_wrong_with_a_folder_is_one_line_that_names_it(tmp_path: Path) -> None:
    """No config.json, another library's names, a file that was cut, one that is gone."""
    huggingface.save(Transformer(SMALL, seed=4), tmp_path / "hf")
    settings = (tmp_path / "hf" / "config.json").read_text()
    folder = saved(tmp_path / "saved", {stored.name: stored.read() for stored in _stored(tmp_path / "hf")})
    for read in (huggingface.load, check_init, lambda folder: load_model(str(folder), [])):
        with pytest.raises(
            UsageError, match=r"put config\.json beside this .* names of tensors must be Hugging Face's"
        ):
            read(folder)
    (folder / "config.json").write_text(settings)
    (file,) = folder.glob("*.distcp")
    for content in (file.read_bytes()[:10], None):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(UsageError, match=rf"{file.name} is missing or not whole: model\.\S+ cannot be read") as cut:
            huggingface.load(folder)
        assert "\n" not in str(cut.value)
    other = saved(tmp_path / "titan", {"tok_embeddings.weight": torch.zeros(256, 16)})
    (other / "config.json").write_text(settings)
    with pytest.raises(
        UsageError, match=r"no tensor has the name that Hugging Face gives .* there is tok_embeddings"
    ) as named:
        huggingface.load(other)
    assert "\n" not in str(named.value)
