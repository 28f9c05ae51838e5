"""Schedules of torch's pipelining through our checker, and ours through torch's reader and validator."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tilemesh.core.step.action import StepProgram
from tilemesh.core.step.book import build
from tilemesh.core.step.check import BrokenStepError, check
from tilemesh.core.step.passes import exchange
from tilemesh.core.step.text import from_csv, to_csv

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")

CHUNKS = {
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}  # fmt: skip


def as_csv(rows: Iterable[Sequence[object]]) -> str:
    return "".join(",".join("" if action is None else str(action) for action in row) + "\n" for row in rows)


def listed(name: str, ranks: int, microbatches: int, with_comms: bool = False) -> StepProgram:
    """The lists torch makes, without starting a rank: its own drawing tool makes them the same way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = visualizer.get_schedule_ops(name, ranks, microbatches, CHUNKS[name], with_comms=with_comms)
    return from_csv(as_csv(rows), name)


def executed(name: str, ranks: int, microbatches: int) -> StepProgram:
    """What GPipe and 1F1B do when they run: a stage that writes down its calls instead of computing."""
    rows = []
    for rank in range(ranks):
        row: list[str] = []

        def note(kind: str, rank: int = rank, row: list[str] = row) -> Any:
            def called(microbatch: int, *_: object, **__: object) -> None:
                row.append(f"{rank}{kind}{microbatch}")

            return called

        stage = SimpleNamespace(
            is_first=rank == 0, is_last=rank == ranks - 1, stage_index=rank, has_backward=True, num_stages=ranks,
            forward_one_chunk=note("F"), backward_one_chunk=note("B"), output_chunks=[None] * microbatches,
            get_fwd_recv_ops=lambda *_: [], get_fwd_send_ops=lambda *_: [], get_bwd_recv_ops=lambda *_: [],
            get_bwd_send_ops=lambda *_: [], perform_reduce_grad=lambda *_: None,
        )  # fmt: skip
        made = schedules.get_schedule_class(name).__new__(schedules.get_schedule_class(name))
        made.__dict__.update(
            _stage=stage, _n_microbatches=microbatches, _num_stages=ranks, _has_backward=True, scale_grads=True,
            _initialize_stage=lambda *_: None, _check_inputs=lambda *_: ([()] * microbatches, [{}] * microbatches),
            _maybe_compute_loss=lambda *_: None, _maybe_get_loss=lambda *_: None, _update_losses=lambda *_: None,
            _stage_initialized=True, _stage_forward_initialized=True, _stages_initialized=True, _internal_losses=[],
        )  # fmt: skip
        made._step_microbatches([()] * microbatches, [{}] * microbatches, [None] * microbatches, [])
        rows.append(row)
    return from_csv(as_csv(rows), name)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16), (3, 6)])
@pytest.mark.parametrize("name", [name for name in CHUNKS if name != "1F1B"])
def test_torchs_lists_pass_the_checker(name: str, ranks: int, microbatches: int) -> None:
    check(listed(name, ranks, microbatches))
    if CHUNKS[name] > 1:
        lowered = listed(name, ranks, microbatches, with_comms=True)
        assert {"SEND", "RECV", "GATHER", "FREE", "REDUCE"} <= lowered.kinds
        check(lowered)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 3)])
def test_what_torch_runs_passes_the_checker(name: str, ranks: int, microbatches: int) -> None:
    """And is the order that we make: 1F1B and GPipe have one order per rank."""
    program = executed(name, ranks, microbatches)
    check(program)
    assert program.actions == build(name.lower(), ranks, microbatches).actions


def test_the_checker_finds_that_torchs_list_of_1f1b_is_not_what_it_runs() -> None:
    """torch 2.13 counts the forward passes of the last rank from 1: `_get_pipeline_order` (it runs from 0)."""
    rows = visualizer.get_schedule_ops("1F1B", 2, 4, 1)
    words = [str(action) for action in rows[1] if action is not None]
    if words[0] == "1F0":
        check(listed("1F1B", 2, 4))  # a later torch
    else:
        with pytest.raises(BrokenStepError, match=r"rank 0|nobody does|does not have"):
            check(listed("1F1B", 2, 4))


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [("1f1b", 3, 6), ("interleaved", 2, 4), ("zb-h1", 4, 8), ("zb-h2", 4, 8), ("zb-v", 4, 8), ("v-half", 4, 8),
     ("dualpipe-v", 2, 6), ("breadth-first", 2, 3)],
)  # fmt: skip
def test_torch_reads_and_accepts_ours(name: str, ranks: int, microbatches: int) -> None:
    program = exchange(build(name, ranks, microbatches))
    read = {
        rank: [schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(to_csv(program).splitlines())
    }
    assert [[str(action) for action in read[rank]] for rank in read] == [[*map(str, one)] for one in program.actions]
    homes = program.placement.directions[0]
    if "FB" not in program.kinds:  # of which torch's dry run and validator know nothing
        # Torch's dry run raises when messages are missing or out of order.
        schedules._simulate_comms_compute(read, lambda chunk: homes[chunk], program.chunks)
        computing = {rank: [action for action in mine if action.is_compute_op] for rank, mine in read.items()}
        schedules._validate_schedule(computing, ranks, program.chunks, microbatches)
