"""A mesh from torch's `DeviceMesh` and back: the same ranks on the same axes. torch's group moves nothing here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import tilemesh as tm
from tilemesh.comm import run_threads
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError


@pytest.fixture
def eight() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("eight")
def test_ranks_stand_where_they_stood() -> None:
    theirs = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))

    def places(comm: Communicator) -> tuple[dict[str, int], DeviceMesh | None]:
        mesh = tm.Mesh.of_device_mesh(comm, theirs)
        here = {name: axis.index for name, axis in mesh.axes.items()}
        back = mesh.device_mesh() if comm.rank == 0 else None
        mesh.close()
        return here, back

    found = run_threads(8, places)
    for rank, (here, _) in enumerate(found):
        pp, dp, tp = (theirs.mesh == rank).nonzero()[0].tolist()
        assert here == {"pp": pp, "dp": dp, "tp": tp}
    back = found[0][1]
    assert back is not None
    assert back.mesh_dim_names == ("pp", "dp", "tp")
    assert torch.equal(back.mesh, theirs.mesh)


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=("tp", "dp")), "a DeviceMesh of tp=2 × dp=4 whose"),
        (lambda: init_device_mesh("cpu", (8,)), "without names of its dims"),
    ],
)
def test_another_order_is_refused(mesh: object, words: str) -> None:
    theirs = mesh()  # type: ignore[operator]

    def refused(comm: Communicator) -> str:
        with pytest.raises(UsageError) as error:
            tm.Mesh.of_device_mesh(comm, theirs)
        return str(error.value)

    assert all(words in text for text in run_threads(8, refused))


def test_without_torchs_ranks_there_is_no_device_mesh() -> None:
    with pytest.raises(UsageError, match=r"needs torch\.distributed with 1 ranks and it has no"):
        tm.Mesh(tm.comm.connect("alone")).device_mesh()
