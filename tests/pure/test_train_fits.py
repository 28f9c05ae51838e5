"""What this machine's memory cannot hold is refused before a rank starts, with what it can; what it may hold is not."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tilemesh.core.context import Membership
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import CPU, Cluster, make_node
from tilemesh.measure.machine import this_machine
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.memory import Room
from tilemesh.train import fits
from tilemesh.train.check import check_machine
from tilemesh.train.config import TrainConfig
from tilemesh.train.load import load

WIDE = "model.width=256,model.layers=4,train.context=16,train.batch=8"
OFFER = "; the nearest layout that works: --set "


class Here:
    """A machine of so much memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.gpus()

    def gpus(self, *names: str) -> None:
        self.patch.setattr("tilemesh.train.check.usable_gpus", lambda: names)

    def member(self, size: int, local_size: int) -> None:
        found = Membership("srun", 0, size, 0, local_size)
        for module in ("check", "fits"):
            self.patch.setattr(f"tilemesh.train.{module}.membership", lambda: found)

    def check(self, made: TrainConfig, memory_bytes: float) -> None:
        machine = dataclasses.replace(this_machine(), memory_bytes=int(memory_bytes))
        self.patch.setattr("tilemesh.train.check.this_machine", lambda: machine)
        check_machine(made)

    def refusal(self, made: TrainConfig, memory_bytes: float) -> str:
        with pytest.raises(UsageError) as refused:
            self.check(made, memory_bytes)
        assert "\n" not in str(refused.value)
        return str(refused.value)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(monkeypatch)


def states(made: TrainConfig, bytes_per_parameter: int = 16) -> int:
    """Of one replica."""
    return count_parameters(made.model).total * bytes_per_parameter


def peak(made: TrainConfig) -> int:
    """Predicted for a single rank."""
    room = Room(made.model, Cluster((make_node(CPU, 1),)), made.context, "eager")
    [rank] = room.stages(made.plan, (made.model.layers,))
    return rank.total_bytes - rank.reserved_bytes


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2", "dp=2,pp=2"])
def test_states_of_all_ranks_must_fit_and_what_is_offered_does(here: Here, mesh: str) -> None:
    made = load("tiny", mesh=mesh, sets=[WIDE])
    needed = made.plan.dp * states(made)
    said = here.refusal(made, 0.9 * needed)
    assert re.search(r"^dp \d x .*: 4 ranks need .* for weights, gradients and optimizer states alone, and this", said)
    offered = said.partition(OFFER)[2]
    assert offered, said
    here.check(load("tiny", mesh=mesh, sets=[WIDE, offered]), 0.9 * needed)


def test_where_one_replica_does_not_fit_nothing_does(here: Here) -> None:
    made = load("tiny", mesh="dp=2,tp=2", sets=[WIDE, "plan.zero=3"])
    said = here.refusal(made, 0.9 * states(made))
    assert "; one replica's take " in said
    assert OFFER not in said


def test_a_predicted_peak_is_refused_only_where_it_is_far_beyond(here: Here) -> None:
    made = load("tiny", mesh="dp=1", sets=["train.batch=64,plan.microbatch=64"])
    assert peak(made) > 4 * states(made)
    here.check(made, peak(made) / (0.99 * fits.FAR))
    said = here.refusal(made, peak(made) / (1.01 * fits.FAR))
    assert "1 rank needs " in said
    assert " as predicted, and this machine has " in said
    assert said.endswith(OFFER + "plan.microbatch=32,plan.accumulation=2")


def test_processes_themselves_do_not_count(here: Here) -> None:
    """Much of what each holds beside tensors is shared: many ranks of a small model run on a small machine."""
    made = load("tiny", mesh="dp=16", sets=["train.batch=16"])
    room = Room(made.model, Cluster((make_node(CPU, 16),)), made.context, "eager")
    [rank] = room.stages(made.plan, (made.model.layers,))
    assert 16 * rank.total_bytes > fits.FAR * (1 << 30)
    here.check(made, 1 << 30)


def test_an_optimizer_that_keeps_less_needs_less(here: Here) -> None:
    sets = [WIDE, "train.batch=4,plan.microbatch=1"]
    adam, lion, plain = (
        load("tiny", mesh="dp=4", sets=[*sets, f"optimizer.name={name},optimizer.momentum=0"])
        for name in ("adamw", "lion", "sgd")
    )
    here.check(lion, 4 * states(lion, 14))
    here.check(plain, 4 * states(plain, 10))
    here.refusal(lion, 4 * states(lion, 10))
    here.refusal(adam, 4 * states(adam, 14))


def test_ranks_on_other_hosts_have_memory_of_their_own(here: Here) -> None:
    made = load("tiny", mesh="dp=4", sets=[WIDE])
    memory = 1.5 * states(made)
    here.refusal(made, memory)
    here.member(4, 1)
    here.check(made, memory)
    here.member(4, 2)
    here.refusal(made, memory)
    uneven = load("tiny", mesh="dp=1,pp=2", sets=[WIDE, "plan.chunk_layers=[3,1]"])
    here.member(2, 1)
    here.check(uneven, 0.5 * states(uneven))  # which of the two stages is here is not looked at


def test_frozen_weights_have_neither_gradients_nor_states(here: Here) -> None:
    made = load("tiny", mesh="dp=2", sets=[WIDE])
    adapted = dataclasses.replace(made, lora=dataclasses.replace(made.lora, rank=4))
    fits.MemoryFit(adapted, states(made), (), lambda plan: True).check()
    here.refusal(made, states(made))


def test_ranks_that_share_a_gpu_share_its_memory(here: Here) -> None:
    big = "model.width=1024,model.heads=16,model.kv_heads=16,model.mlp_width=4096,model.layers=48,train.context=16"
    sets = [big, "train.batch=4,plan.precision=fp32,train.device=auto"]
    two, one = (load("tiny", mesh=mesh, sets=sets) for mesh in ("dp=2", "dp=1"))
    assert 8 << 30 < states(two) < 14 << 30  # a T4 has 14.6 GiB
    here.gpus("Tesla T4", "Tesla T4")
    here.check(two, 1 << 40)
    here.gpus("Tesla T4")
    here.check(one, 1 << 40)
    said = here.refusal(two, 1 << 40)
    assert "2 ranks need " in said
    assert "and the GPU (Tesla T4) has 14.6 GiB of memory" in said
    here.check(load("tiny", mesh="dp=2", sets=[*sets, said.partition(OFFER)[2]]), 1 << 40)
    here.gpus("NVIDIA Unheard-of")
    here.check(two, 1 << 40)


def test_states_that_no_gpu_holds_are_offered_the_hosts_memory_where_it_has_room(here: Here) -> None:
    big = "model.width=1024,model.heads=16,model.kv_heads=16,model.mlp_width=4096,model.layers=84,train.context=16"
    made = load("tiny", mesh="dp=1", sets=[big, "train.batch=1,plan.precision=fp32,train.device=auto"])
    here.gpus("Tesla T4")
    assert here.refusal(made, 1 << 40).endswith(OFFER + "plan.offload=optimizer")
    assert "no layout near it fits either" in here.refusal(made, 1 << 30)
