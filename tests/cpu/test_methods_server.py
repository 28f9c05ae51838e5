"""The parameter server over a communicator: replay, equality with data parallelism, death, leaving and coming back."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.errors import RunError
from tilemesh.methods.link import ASKED, PUSH, STOPPED, PushFigures, ServerLink, even_cuts
from tilemesh.methods.record import ServerEvent, largest_lead, replay, staleness
from tilemesh.methods.rules import Push
from tilemesh.methods.server import Divergence, ParameterServer, SgdShard, mean_update

LENGTH, WORKERS, RATE = 37, 3, 0.05


def gradient(weights: Tensor, worker: int, clock: int) -> Tensor:
    """Of a loss that is not quadratic, on data that differs by worker and clock."""
    draw = torch.Generator().manual_seed(1000 * worker + clock)
    x = torch.randn(8, LENGTH, dtype=torch.float64, generator=draw)
    y = torch.randn(8, dtype=torch.float64, generator=draw)
    residual = torch.tanh(x @ weights) - y
    return x.T @ (residual * (1 - torch.tanh(x @ weights) ** 2)) / 8


def first_weights() -> Tensor:
    return torch.linspace(-1, 1, LENGTH, dtype=torch.float64)


def work(comm: Communicator, servers: Sequence[int], clocks: int, draw: random.Random) -> Tensor:
    link, weights = ServerLink(comm, servers, even_cuts(LENGTH, len(servers))), torch.empty(LENGTH, dtype=torch.float64)
    clock = link.pull(weights)
    while clock < clocks:
        pushed = gradient(weights, comm.rank, clock)
        time.sleep(draw.random() * 0.002)
        link.push(pushed, clock)
        clock = link.pull(weights)
    link.end()
    return weights


def run(bound: float, servers: int, batch: int = 1, clocks: int = 12) -> tuple[list[list[ServerEvent]], list[Tensor]]:
    """The servers' records and their last weights."""

    def main(comm: Communicator) -> tuple[list[ServerEvent], Tensor] | None:
        ranks = range(WORKERS, WORKERS + servers)
        if comm.rank < WORKERS:
            work(comm, ranks, clocks, random.Random(comm.rank))
            return None
        cut = even_cuts(LENGTH, servers)[comm.rank - WORKERS]
        shard = SgdShard(first_weights()[cut].clone(), RATE)
        server = ParameterServer(comm, range(WORKERS), shard, bound, batch)
        server.run()
        return server.events, shard.weights

    found = [one for one in run_threads(WORKERS + servers, main) if one is not None]
    return [events for events, _ in found], [weights for _, weights in found]


@pytest.mark.parametrize(("bound", "servers", "batch"), [(math.inf, 1, 1), (math.inf, 2, 2), (2, 2, 1), (1, 3, 1)])
def test_an_asynchronous_run_is_its_serial_replay(bound: float, servers: int, batch: int) -> None:
    records, weights = run(bound, servers, batch)
    again = [SgdShard(first_weights()[cut].clone(), RATE) for cut in even_cuts(LENGTH, servers)]
    cuts = even_cuts(LENGTH, servers)

    def made(push: Push, shards: list[Tensor]) -> list[Tensor]:
        whole = gradient(torch.cat(shards), push.worker, push.clock)
        return [whole[cut] for cut in cuts]

    replay(
        records,
        lambda server: again[server].weights.clone(),
        made,
        lambda server, pushes, gradients, scale: mean_update(again[server], pushes, gradients, WORKERS, scale),
    )
    for ours, theirs in zip(weights, again, strict=True):
        np.testing.assert_allclose(ours, theirs.weights, rtol=0, atol=1e-10)
    for events in records:
        assert largest_lead(events, range(WORKERS)) <= bound
        assert sum(staleness(events).values()) == WORKERS * 12


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_push_whose_loss_is_no_number_counts_and_its_worker_hears_of_it(loss: float) -> None:
    def main(comm: Communicator) -> float | None:
        if comm.rank:
            ParameterServer(comm, [0], SgdShard(first_weights(), RATE)).run()
            return None
        link, weights = ServerLink(comm, [1], [slice(0, LENGTH)]), torch.empty(LENGTH, dtype=torch.float64)
        link.push(torch.ones(LENGTH, dtype=torch.float64), link.pull(weights), PushFigures(loss=loss))
        link.pull(weights)
        link.end()
        assert torch.equal(weights, first_weights() - RATE)
        applied = link.applied()
        return None if applied is None else applied.loss

    assert str(run_threads(2, main)[0]) == str(loss)


def test_divergence_is_how_far_weights_moved_between_read_and_application() -> None:
    found, weights = Divergence(), torch.tensor([3.0, 4.0])
    found.read(Push(0, 0), weights.clone())
    found.read(Push(1, 0), weights.clone())  # only one read in seven is measured
    found.note([Push(1, 0)], weights)
    weights += torch.tensor([0.0, 8.0])
    found.note([Push(0, 0), Push(1, 0)], weights)
    assert found.seen == [pytest.approx(8 / math.hypot(3, 12))]
    assert found.figures()["gradients"] == 1


@pytest.mark.parametrize("servers", [1, 2])
def test_bsp_is_data_parallelism(servers: int) -> None:
    """Gradients are summed in the order of workers whoever came first, so the bound is the rounding of one sum."""
    records, weights = run(0, servers)
    exact = first_weights()
    for clock in range(12):
        exact -= RATE * sum(gradient(exact, worker, clock) for worker in range(WORKERS)) / WORKERS
    torch.testing.assert_close(torch.cat(weights), exact, rtol=0, atol=1e-13)
    assert all(set(staleness(events)) == {0} for events in records)


def test_a_worker_that_dies_is_given_up_and_comes_back_and_no_push_counts_twice() -> None:
    """Worker 1 is silent after three pushes, and the other goes on; then it comes back. All send every push twice."""

    def main(comm: Communicator) -> dict | tuple[int, int] | None:
        if comm.rank == 2:
            shard = SgdShard(first_weights(), RATE)
            server = ParameterServer(comm, [0, 1], shard, 0, silence_s=0.4)
            server.run()
            return server.figures()
        link, weights = ServerLink(comm, [2], [slice(0, LENGTH)]), torch.empty(LENGTH, dtype=torch.float64)
        clock = link.pull(weights)
        while clock < 10:
            if comm.rank == 1 and clock == 3:
                time.sleep(1.0)  # as good as dead
            if comm.rank == 0 and clock >= 5:
                time.sleep(0.25)
            link.push(gradient(weights, comm.rank, clock), clock)
            link.push(gradient(weights, comm.rank, clock), clock)
            before, clock = clock, link.pull(weights)
        link.end()
        return before, clock

    first, second, figures = run_threads(3, main)
    assert isinstance(figures, dict)
    assert first == second == (9, 10)
    assert figures["updates"] == 10
    # What it pushed after it was given up came too late, and the clocks that it missed are nobody's.
    assert 10 + 3 < sum(count for _, count in figures["staleness"]) < 20


@pytest.mark.parametrize(("bound", "counts", "begins"), [(3.0, (5, 7), 7), (0.0, (5, 7), 7), (math.inf, (6, 2), 6)])
def test_a_worker_that_comes_back_to_two_servers_has_one_clock(
    bound: float, counts: tuple[int, int], begins: int
) -> None:
    """Worker 0 leaves; worker 1 is at another clock with each server when it comes back. Both then have one of it."""

    def main(comm: Communicator) -> object:
        if comm.rank > 1:
            cut = even_cuts(LENGTH, 2)[comm.rank - 2]
            server = ParameterServer(comm, [0, 1], SgdShard(first_weights()[cut].clone(), RATE), bound)
            server.run()
            return server.events
        token, weights = torch.zeros(1), torch.empty(LENGTH, dtype=torch.float64)
        if comm.rank == 0:
            link = ServerLink(comm, [2, 3], even_cuts(LENGTH, 2))
            link.leave()
            comm.send(token, 1, 50)
            comm.recv(token, 1, 51)
            clock = link.pull(weights)
            link.push(torch.ones(LENGTH, dtype=torch.float64), clock)
            assert link.pull(weights) == clock + 1
            link.end()
            return clock
        links = [ServerLink(comm, [2 + place], [cut]) for place, cut in enumerate(even_cuts(LENGTH, 2))]
        comm.recv(token, 0, 50)
        for link, count in zip(links, counts, strict=True):
            for clock in range(count):
                assert link.pull(weights) == clock
                link.push(torch.ones(LENGTH, dtype=torch.float64), clock)
            assert link.pull(weights) == count  # the last push has come
        comm.send(token, 0, 51)
        for link in links:  # so that nobody waits for the clocks that it is behind
            link.end()
        return None

    clock, _, *records = run_threads(4, main)
    assert clock == begins
    for events in records:
        applied = [push for event in events if event.kind == "apply" for push in event.pushes]
        assert applied.count(Push(0, begins)) == 1
        assert len(applied) == len(set(applied))


def test_a_worker_that_never_comes_back_leaves_the_others_to_go_on() -> None:
    def main(comm: Communicator) -> int | None:
        if comm.rank == 2:
            server = ParameterServer(comm, [0, 1], SgdShard(first_weights(), RATE), 0, silence_s=0.3)
            server.run()
            assert server.given_up == [1]
            return server.updates
        if comm.rank == 0:
            work(comm, [2], 5, random.Random(0))
        return None

    assert run_threads(3, main)[2] == 5


def test_a_worker_whose_gradient_is_on_its_way_is_not_silent() -> None:
    class Silent:
        """A communicator to which nothing comes."""

        rank = 0

        def irecv(self, tensor: Tensor, *_: object, **options: object) -> Tensor:
            return tensor

    server = ParameterServer(Silent(), [1, 2], SgdShard(torch.zeros(3), RATE), silence_s=60.0)  # type: ignore[arg-type]
    mail = server._inbox[1]
    mail.heard_s, mail.header[0] = -math.inf, PUSH
    server._take(1, mail)
    assert mail.handle is mail.body
    server._asked[2] = time.monotonic()  # which waits for it
    server._give_up_silent()
    assert server.given_up == []


def test_a_keeper_of_the_results_that_never_comes_back_is_named() -> None:
    """Nobody else can write a checkpoint, so to end as if all were well would lose the run."""

    def main(comm: Communicator) -> str:
        if comm.rank == 2:
            shard = SgdShard(first_weights(), RATE)
            with pytest.raises(RunError, match="worker 0, which writes the checkpoints, has said nothing") as error:
                ParameterServer(comm, [0, 1], shard, 0, silence_s=0.2, keeper=0).run()
            return str(error.value)
        if comm.rank == 1:
            work(comm, [2], 5, random.Random(0))
        return ""

    assert "--resume" in run_threads(3, main)[2]


def test_who_reads_last_hears_now_and_then_that_it_still_has_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast worker has ended long before a slow one; no watchdog may take its waiting for a fault."""
    asks = []
    pull_from = ServerLink._pull_from
    monkeypatch.setattr(ServerLink, "_pull_from", lambda self, *rest: (asks.append(rest), pull_from(self, *rest))[1])

    def main(comm: Communicator) -> int | None:
        if comm.rank == 2:
            server = ParameterServer(comm, [0, 1], SgdShard(first_weights(), RATE), math.inf, silence_s=2.0)
            server.run()
            assert server.given_up == []
            return server.updates
        link, weights = ServerLink(comm, [2], [slice(0, LENGTH)]), torch.empty(LENGTH, dtype=torch.float64)
        for clock in range(link.pull(weights), 1 if comm.rank == 0 else 6):
            time.sleep(0.5 * comm.rank)
            link.push(gradient(weights, comm.rank, clock), clock)
            link.pull(weights, last=comm.rank == 0)
        if comm.rank == 0:
            updates, (newest,) = link.state(LENGTH, weights)
            assert updates == [7]
            assert torch.equal(weights, newest)
        link.end()
        return None

    assert run_threads(3, main)[2] == 7
    assert sum(rest[3] for rest in asks) >= 2  # `last`, made more than once


@pytest.mark.parametrize("bound", [0.0, 2.0, math.inf])
def test_any_rank_that_is_asked_stops_all_and_what_is_read_last_stays(bound: float) -> None:
    """Worker 1 is asked at clock 3. Worker 0 hears of it, decides, and both servers hold what it read last: under BSP
    exactly what its own clock says."""

    def main(comm: Communicator) -> object:
        if comm.rank > 1:
            cut = even_cuts(LENGTH, 2)[comm.rank - 2]
            shard = SgdShard(first_weights()[cut].clone(), RATE)
            server = ParameterServer(comm, [0, 1], shard, bound, keeper=0)
            server.run()
            assert largest_lead(server.events, [0, 1]) <= bound
            return shard.weights
        link, weights = ServerLink(comm, [2, 3], even_cuts(LENGTH, 2)), torch.empty(LENGTH, dtype=torch.float64)
        clock = link.pull(weights)
        while link.signal != (ASKED if comm.rank == 0 else STOPPED):
            assert clock < 500, "nobody stopped"
            link.push(gradient(weights, comm.rank, clock), clock)
            clock = link.pull(weights, stop_requested=comm.rank == 1 and clock >= 3)
        if comm.rank == 0:
            link.stop()
            assert link.pull(weights, last=True) == clock
        link.end()
        return clock, weights

    (clock, read), _, *held = run_threads(4, main)
    assert torch.equal(read, torch.cat(held))
    if not bound:
        exact = first_weights()
        for step in range(clock):
            exact -= RATE * sum(gradient(exact, worker, step) for worker in range(2)) / 2
        torch.testing.assert_close(read, exact, rtol=0, atol=1e-13)


def test_state_goes_to_a_checkpoint_and_back() -> None:
    """A server that begins with what another one had kept goes on at its clock."""

    class Remembering(SgdShard):
        seen = torch.zeros(0)

        def kept(self) -> list[Tensor]:
            return [self.weights * 2]

        def load(self, updates: int, kept: Sequence[Tensor]) -> None:
            self.seen = kept[0]

    def main(comm: Communicator) -> object:
        if comm.rank > 0:
            cut = even_cuts(LENGTH, 2)[comm.rank - 1]
            shard = Remembering(first_weights()[cut].clone(), RATE)
            server = ParameterServer(comm, [0], shard, started=False)
            server.run()
            return shard.seen, shard.weights
        link = ServerLink(comm, [1, 2], even_cuts(LENGTH, 2))
        link.start(7, [first_weights() + 1, first_weights() + 2], updates=[7, 9])
        weights = torch.empty(LENGTH, dtype=torch.float64)
        assert link.pull(weights) == 7
        assert torch.equal(weights, first_weights() + 1)
        link.push(torch.ones(LENGTH, dtype=torch.float64), 7)
        assert link.pull(weights) == 8
        updates, (state, kept) = link.state(LENGTH, weights)
        assert updates == [8, 10]
        assert torch.equal(state, weights)
        assert torch.equal(kept, 2 * weights)
        assert [one["updates"] for one in link.figures()] == [8, 10]
        link.leave()
        link.end()
        return None

    found = run_threads(3, main)
    assert torch.equal(torch.cat([found[1][0], found[2][0]]), first_weights() + 2)
