"""A laid model on a GPU: ranks that share it, over gloo and over MPI through the host, and one rank over nccl."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "mpi"))  # ranks import parallel_cuda from there

from tilemesh.comm.runtime.mirror import mirror
from tilemesh.launch import call
from tilemesh.launch.start import find_mpiexec
from tilemesh.parallel.gate.pairs import every_case
from tilemesh.parallel.norms import norm_of, norms_of
from tilemesh.runs.metrics import STEP, latest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
HAS_MPI = find_mpiexec() is not None and find_spec("mpi4py") is not None
TRANSPORTS = [pytest.param("mpi", marks=pytest.mark.skipif(not HAS_MPI, reason="needs mpiexec and mpi4py")), "torch"]


def verify(*words: str) -> str:
    line = [sys.executable, "-m", "tilemesh", "verify", "--device", "cuda", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(180)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_ranks_that_share_a_gpu_pass_the_small_set(transport: str, precision: str) -> None:
    said = verify("--ranks", "2", "--transport", transport, "--models", "gpt,llama", "--precision", precision)
    count = len(every_case(2, ("gpt", "llama"), precision))
    assert f"{count} cases: every layout computes what one process computes" in said


@pytest.mark.timeout(180)
@pytest.mark.parametrize("precision", ["bf16", "bf16-master", "fp16"])
def test_two_stages_that_share_a_gpu_train(precision: str, tmp_path: Path) -> None:
    """Over gloo, through the host's memory; torch itself would refuse two ranks of nccl on one GPU."""
    words = f"plan.schedule=zb-v,plan.precision={precision},train.steps=8,sample.tokens=4,train.device=cuda"
    line = [sys.executable, "-m", "tilemesh", "train", "--mesh", "pp=2", "--transport", "torch", "--set", words]
    done = subprocess.run(
        [*line, "--out", str(tmp_path / "run")], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line["loss"] for line in latest(tmp_path / "run") if line["kind"] == STEP]
    assert len(losses) == 8
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_float64(dtype: torch.dtype) -> None:
    """Of many values, of few, of none, and of another dtype among them: by parts in float32 on the GPU."""
    sizes = (40_000_000, 5, 0, 70_000)
    values = [torch.randn(size, device="cuda", generator=torch.Generator("cuda").manual_seed(size)) for size in sizes]
    tensors = [*(value.to(dtype) for value in values[:3]), values[3]]
    exact = [float(torch.linalg.vector_norm(tensor.double())) for tensor in tensors]
    assert norms_of(tensors).tolist() == pytest.approx(exact, rel=1e-6)
    assert norm_of(*tensors) == pytest.approx(sum(norm**2 for norm in exact) ** 0.5, rel=1e-6)


SHARED = {
    "pp 2": ("pp=2", ""),
    "pp 2 zb-v": ("pp=2", "plan.schedule=zb-v"),
    "dp 2 zero 1": ("dp=2", "plan.zero=1"),
    "dp 2 zero 2": ("dp=2", "plan.zero=2"),
    "dp 2 zero 3": ("dp=2", "plan.zero=3"),
    "activations on the host": ("dp=1", "plan.offload=activations"),
    "weights on the host": ("dp=1", "plan.offload=weights"),
    "all on the host": ("dp=1", "plan.offload=optimizer+activations+weights"),
    "stages with activations on the host": ("pp=2", "plan.offload=optimizer+activations"),
}
"""Layouts of one or two ranks on one GPU: mesh and settings."""
SMALL = "train.steps=5,train.batch=8,model.layers=4,sample.tokens=0,checkpoint.every=0,evaluate.every=0"


def trained(folder: Path, mesh: str, *sets: str) -> list[float]:
    """Losses of a few steps in float64 on the GPU, over gloo where there are two ranks."""
    words = ",".join(("plan.precision=fp64,train.device=cuda", SMALL, *filter(None, sets)))
    line = [sys.executable, "-m", "tilemesh", "train", "--mesh", mesh, "--transport", "torch", "--set", words]
    done = subprocess.run([*line, "--out", str(folder)], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line["loss"] for line in latest(folder) if line["kind"] == STEP]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process with everything on the GPU."""
    return trained(tmp_path_factory.mktemp("alone") / "run", "dp=1")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", SHARED)
def test_layouts_on_one_gpu_train_as_one_process_does(name: str, alone: list[float], tmp_path: Path) -> None:
    losses = trained(tmp_path / "run", *SHARED[name])
    assert len(losses) == 5
    assert losses == pytest.approx(alone, rel=1e-10)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("precision", "near"), [("fp64", 1e-10), ("bf16-master", 2**-8)])
def test_muon_over_parts_of_matrices_on_one_gpu(precision: str, near: float, tmp_path: Path) -> None:
    """In 16 bits the updates travel as bfloat16: replicas that share states train as replicas that do not. Their
    gradients are the same sums of two; what differs is the norm's last digits, and by it now and then the
    rounding of a weight to 16 bits."""
    sets = f"optimizer.name=muon,plan.precision={precision}"
    apart = trained(tmp_path / "apart", "dp=2", sets)
    assert trained(tmp_path / "shared", "dp=2", sets, "plan.zero=1") == pytest.approx(apart, rel=near)


DILOCO = "train.method=local,method.period=2,method.outer_lr=0.7,method.outer_momentum=0.9"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "sets",
    [
        DILOCO,
        f"{DILOCO},plan.offload=optimizer",
        "method.compress=int8,plan.zero=2",
        "method.compress=top-k,plan.zero=3",
    ],
)
def test_methods_on_one_gpu_train_as_on_the_cpu(sets: str, tmp_path: Path) -> None:
    losses = trained(tmp_path / "gpu", "dp=2", sets)
    assert losses == pytest.approx(trained(tmp_path / "cpu", "dp=2", sets, "train.device=cpu"), rel=1e-9)


@pytest.mark.timeout(240)
def test_masters_on_the_host_are_averaged_as_on_the_gpu(tmp_path: Path) -> None:
    sets = f"{DILOCO},plan.precision=bf16-master"
    here = trained(tmp_path / "gpu", "dp=2", sets)
    assert trained(tmp_path / "host", "dp=2", sets, "plan.offload=optimizer") == pytest.approx(here, rel=2**-8)


@pytest.mark.timeout(180)
def test_one_rank_over_nccl() -> None:
    if torch.cuda.device_count() != 1:
        pytest.skip("as many ranks as GPUs take nccl: this is for one of each")
    assert call("parallel_cuda:exchanges_right", 1, transport="torch") == ["nccl"]
    count = len(every_case(1, ("gpt", "llama")))
    assert f"{count} cases: every layout" in verify("--ranks", "1", "--transport", "torch", "--models", "gpt,llama")


def test_collectives_with_out_neither_wait_nor_leave_the_gpu() -> None:
    comm, block = mirror(8, 3), torch.randn(1 << 16, device="cuda")
    whole, own = torch.empty(8 << 16, device="cuda"), torch.empty(1 << 16, device="cuda")
    comm.all_gather(block, out=whole)
    torch.cuda.set_sync_debug_mode("error")
    try:
        comm.all_gather(block, out=whole)
        comm.reduce_scatter(whole, out=own)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(whole, block.repeat(8))
    assert torch.equal(own, 8 * block)
