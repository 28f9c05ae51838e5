"""Every launcher's way to tell a process its place, read without that launcher."""

from __future__ import annotations

import pytest

from tilemesh.core.context import Membership, first_host, membership, torch_environment
from tilemesh.core.errors import UsageError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "123456",
}


@pytest.mark.parametrize(
    ("environ", "starter"),
    [(OPEN_MPI, "mpiexec"), (HYDRA, "mpiexec"), (TORCHRUN, "torchrun"), (SRUN, "srun")],
)
def test_each_launcher_is_understood(environ: dict[str, str], starter: str) -> None:
    assert membership(environ) == Membership(starter, rank=5, size=8, local_rank=1, local_size=4)


def test_nobody_started_this_process() -> None:
    assert membership({"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}) is None


def test_mpiexec_inside_an_allocation_counts_before_the_srun_that_carried_its_daemons() -> None:
    daemons = SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    for environ in (daemons | OPEN_MPI, daemons | HYDRA):
        assert membership(environ) == Membership("mpiexec", 5, 8, 1, 4)


def test_srun_counts_before_the_pmi_variables_it_sets_itself() -> None:
    assert membership(SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}) == Membership("srun", 5, 8, 1, 4)


def test_an_interactive_step_of_one_task_is_a_place_to_start_from() -> None:
    assert membership(SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_rank_and_size_set_by_hand_are_one_process_a_host() -> None:
    assert membership({"RANK": "1", "WORLD_SIZE": "2"}) == Membership("torchrun", 1, 2, local_rank=0, local_size=1)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN | {"RANK": "x"}, "RANK='x' in the environment: expected a whole number"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 and WORLD_SIZE=8 in the environment: expected 0 <= rank < size"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "?"}, "tasks a node '?' in the environment"),
    ],
)
def test_a_broken_environment_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        membership(environ)
    assert message in str(caught.value)


def test_srun_gets_what_torch_needs() -> None:
    assert torch_environment(SRUN) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(20_000 + 123456 % 20_000),
    }


def test_torchrun_needs_nothing_more_and_the_users_own_address_stays() -> None:
    assert torch_environment(TORCHRUN) == {}
    assert torch_environment({}) == {}
    assert not {"MASTER_ADDR", "MASTER_PORT"} & set(torch_environment(SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}))


def test_mpiexec_on_one_machine_uses_loopback_and_over_hosts_does_not_guess() -> None:
    assert torch_environment(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"})["MASTER_ADDR"] == "127.0.0.1"
    assert "MASTER_ADDR" not in torch_environment(OPEN_MPI)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[03-07,12],login1", "gpu03"), ("a[1]-ib,b", "a1-ib"), ("r[2,5]", "r2")],
)
def test_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host
