"""A step as data: every schedule is proved with and without its messages, mutations are judged as brute force does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import COMPUTE, Action, PassDone, RoutedLayers, StepProgram, makes, parts
from tilemesh.core.step.book import asynchronous, build, synchronous
from tilemesh.core.step.check import BrokenStepError, check
from tilemesh.core.step.memory import StepBytes, memory_curve, memory_peaks
from tilemesh.core.step.passes import exchange, gather, offload, recompute
from tilemesh.core.step.placement import ChunkPlacement, loop, two_ways, vee
from tilemesh.core.step.simulate import ExchangeTimes, RoutedTimes, Slot, StepTimes, simulate
from tilemesh.core.step.text import from_csv, parse_action, to_csv


@st.composite
def programs(draw: st.DrawFn) -> StepProgram:
    """A schedule over stages and microbatches that it takes."""
    name = draw(st.sampled_from(synchronous()))
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    if name == "interleaved":
        microbatches = stages * draw(st.integers(1, 3))
    if name in ("dualpipe", "chimera"):
        stages, microbatches = 2 * draw(st.integers(1, 3)), 2 * microbatches
    if name in ("dualpipe", "dualpipe-v"):
        microbatches = max(microbatches, 2 * stages)
    per_rank = draw(st.integers(1, 3)) if name in ("interleaved", "breadth-first") else None
    slices = draw(st.integers(1, 4)) if name == "terapipe" else 1
    return build(name, stages, microbatches, per_rank, slices)


def sizes_of(program: StepProgram) -> StepBytes:
    """Different primes for everything, so that nothing cancels by chance."""
    count = program.chunks
    return StepBytes(*([float(base + chunk) for chunk in range(count)] for base in (101, 43, 17, 7, 211, 307, 59, 401)))


def times_of(program: StepProgram, transfer_s: float = 0.3) -> StepTimes:
    even = StepTimes.even(program.chunks, 1.0, 1.1, 0.9, transfer_s)
    return dataclasses.replace(even, slice_shares=[1.0] * program.slices)


@given(programs())
def test_every_schedule_is_proved(program: StepProgram) -> None:
    check(program, sizes_of(program))


@settings(max_examples=60, deadline=None)
@given(programs(), st.booleans(), st.booleans(), st.integers(-1, 2), st.sampled_from(("", "step", "microbatch")))
def test_every_schedule_is_proved_with_all_its_data_movement(
    program: StepProgram, again: bool, moved: bool, ahead: int, reduce: str
) -> None:
    if again:
        program = recompute(program, range(0, program.chunks, 2))
    if moved:
        program = offload(program, ahead=2)
    if ahead >= 0:
        program = gather(program, ahead)
    whole = exchange(program, reduce, update=bool(reduce), states_on_host=moved)
    sizes = sizes_of(whole)
    check(whole, sizes, max(memory_peaks(whole, sizes)))
    with pytest.raises(BrokenStepError, match="expected at most"):
        check(whole, sizes, max(memory_peaks(whole, sizes)) - 1)


@given(programs(), st.sampled_from((0.0, 0.3, 2.0)))
def test_messages_in_the_lists_take_as_long_as_messages_between_the_lines(program: StepProgram, way_s: float) -> None:
    times = times_of(program, way_s)
    assert simulate(exchange(program), times).total_s == pytest.approx(simulate(program, times).total_s)


@given(programs())
def test_lists_survive_the_way_through_text(program: StepProgram) -> None:
    whole = exchange(gather(recompute(program)), "step", update=True, states_on_host=True)
    again = from_csv(to_csv(whole))
    assert again.actions == whole.actions
    assert again.placement.directions == whole.placement.directions or program.microbatches == 1


@pytest.mark.parametrize("name", asynchronous())
def test_versions_survive_the_way_through_text(name: str) -> None:
    """What is read back keeps as many versions of the weights, and is proved as it was written."""
    program = build(name, 4, 16)
    again = from_csv(to_csv(program))
    assert again.actions == program.actions
    assert (again.versions, again.keeps_versions) == (program.versions, program.keeps_versions)
    check(again)


def test_gathers_follow_how_far_ahead_they_may_be() -> None:
    layers = build("breadth-first", 1, 1, per_rank=4)
    words = [str(action) for action in gather(layers, 0).actions[0]]
    assert words[:6] == ["0UNSHARD", "0F0", "0RESHARD", "1UNSHARD", "1F0", "1RESHARD"]
    sizes = StepBytes(weights=[1.0] * 4)
    assert [max(memory_peaks(gather(layers, ahead), sizes)) for ahead in range(5)] == [1, 2, 3, 4, 4]
    # Forward and backward meet at the last layer, which is not gathered twice in a row.
    assert sum(word.endswith("UNSHARD") for word in words) == 7


def test_a_prefetched_gather_hides_behind_computing() -> None:
    layers = build("breadth-first", 1, 1, per_rank=8)
    times = dataclasses.replace(StepTimes.even(8, 1.0, 1.0, 1.0), gather_s=0.9)
    # With none ahead every gather is waited for, with one ahead only the first.
    assert simulate(gather(layers, 0), times).total_s == pytest.approx(24 + 15 * 0.9)
    assert simulate(gather(layers, 1), times).total_s == pytest.approx(24 + 0.9)


def test_offloaded_activations_free_memory_and_cost_what_cannot_be_hidden() -> None:
    program = build("gpipe", 1, 8)
    moved = offload(program)
    sizes = StepBytes.activations(1)
    # Two on the device at once: the one of the pass, and the one that comes back; the last pass keeps its own.
    assert (memory_peaks(program, sizes), memory_peaks(moved, sizes)) == ([8.0], [2.0])
    times = StepTimes.even(1, 1.0, 1.0, 1.0)
    assert simulate(moved, times).total_s == simulate(program, times).total_s == 24
    slow = dataclasses.replace(times, copy_s=3.0)
    assert simulate(moved, slow).total_s > 24


def test_recomputing_keeps_inputs_alone() -> None:
    program = build("1f1b", 4, 8)
    sizes = StepBytes(kept=[10.0] * 4, inputs=[1.0] * 4)
    assert memory_peaks(program, sizes) == [40, 30, 20, 10]
    assert memory_peaks(recompute(program), sizes) == [4 - 1 + 10, 3 - 1 + 10, 2 - 1 + 10, 10]
    times = StepTimes.even(4, 1.0, 1.0, 1.0)
    # One more forward pass per microbatch. While the pipeline drains it is done before the gradient comes, so the
    # bubble is no longer than without.
    assert simulate(program, times).total_s == 8 * 3 + 3 * 3
    assert simulate(recompute(program), times).total_s == 8 * 4 + 3 * 3


@pytest.mark.parametrize(("layers", "every"), [(16, 1), (16, 2), (16, 4), (16, 8), (16, 16), (64, 8)])
def test_checkpointing_every_kth_layer_keeps_boundaries_and_one_stretch(layers: int, every: int) -> None:
    """Chunks of K layers, recomputed: L/K boundaries and K layers' activations at once, least at the square root."""
    program = recompute(build("breadth-first", 1, 1, per_rank=layers // every))
    count = program.chunks
    # A chunk's activations without its input, which is a boundary.
    sizes = StepBytes(kept=[every + 1.0] * count, inputs=[1.0] * count)
    assert memory_peaks(program, sizes) == [layers / every + every]
    assert layers / every + every >= 2 * layers**0.5


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "words", "said"),
    [
        (0, "0B0 0F0", "0F0 has not happened or not arrived before it"),
        (0, "0F0", "nobody does 0B0"),
        (0, "0F0 0I0", "nobody does 0W0"),
        (0, "0F0 0F0 0B0", "twice"),
        (0, "0F0 0B0 0W0", "twice"),
        (0, "1F0 0B0", "another rank, 1"),
        (1, "1F5 1B0", "does not have"),
        (0, "0F0@1 0B0@1", "reads version 1 of the weights, held are 0"),
        (0, "0F0 0B0@1", "its backward pass another"),
        (0, "0F0 0B0 0UPDATE@2", "makes version 2 of the weights, expected 1"),
        (0, "0F0 0UPDATE@1 0B0", "there is no gradient since the last time"),
        (0, "0F0 0I0 0UPDATE@1 0W0", "there is no gradient"),
        (0, "0F0 0B0 0UPDATE@1", "rank 1 ends with version 0 of chunk 1"),
        (0, "0UNSHARD 0F0 0RESHARD 0B0", "the weights are not gathered"),
        (0, "0UNSHARD 0F0 0B0", "gathered weights left over"),
        (0, "0UNSHARD 0UNSHARD 0F0 0B0 0RESHARD", "whole already"),
        (0, "0F0 0B0 0RESHARD", "none are gathered"),
        (0, "0F0 0OUT0 0B0", "its activations are not there"),
        (0, "0OUT0 0F0 0B0", "nothing to move"),
        (0, "0F0 0B0 0RECOMPUTE0", "not computed again yet"),
        (0, "0IN_WEIGHTS 0F0 0OUT_WEIGHTS 0B0", "the weights are on the host"),
        (0, "0F0 0B0 0OUT_STATES", "left over"),
        (0, "0REDUCE_GRAD 0F0 0B0", "no gradient to sum"),
        (0, "0F0 0B0 0REDUCE_GRAD 0OUT_STATES 0UPDATE@1 0IN_STATES", "on the host"),
    ],
)  # fmt: skip
def test_a_broken_step_is_named(rank: int, words: str, said: str) -> None:
    good = build("1f1b", 2, 1)
    lists = [*good.actions]
    lists[rank] = tuple(parse_action(word) for word in words.split())
    with pytest.raises(BrokenStepError, match=said):
        check(dataclasses.replace(good, actions=tuple(lists)))


def test_ranks_that_wait_in_a_circle_are_named() -> None:
    """Both send before they receive: with buffers it would end, with blocking sends it does not."""
    rows = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    with pytest.raises(BrokenStepError, match="deadlocks: rank 0 at 0SEND_F1, rank 1 at 1SEND_B0 wait for ever"):
        check(from_csv(rows))


def test_copies_of_a_chunk_must_be_summed_in_the_same_order() -> None:
    program = exchange(build("chimera", 2, 2), "step", update=True)
    check(program)
    without = [tuple(action for action in actions if action.kind != "REDUCE") for actions in program.actions]
    with pytest.raises(BrokenStepError, match="gradients have not been summed"):
        check(dataclasses.replace(program, actions=tuple(without)))
    first = [*program.actions[0]]
    places = [place for place, action in enumerate(first) if action.kind == "REDUCE"]
    first[places[0]], first[places[1]] = first[places[1]], first[places[0]]
    with pytest.raises(BrokenStepError, match="deadlocks"):
        check(dataclasses.replace(program, actions=(tuple(first), program.actions[1])))


def test_versions_of_an_asynchronous_pipeline() -> None:
    """PipeDream-2BW: microbatch k (from 1) of m per update reads version max(floor((k-1)/m)-1, 0); two are held."""
    m, count = 2, 8
    actions: list[Action] = []
    for k in range(1, count + 1):
        version = max((k - 1) // m - 1, 0)
        actions += [Action("F", 0, k - 1, version=version), Action("B", 0, k - 1, version=version)]
        if k % m == 0:
            actions.append(Action("UPDATE", 0, version=k // m, of="weights"))
    program = StepProgram("2bw", loop(1), count, (tuple(actions),), versions=2)
    check(program)
    with pytest.raises(BrokenStepError, match="reads version 0 of the weights, held are 1"):
        check(dataclasses.replace(program, versions=1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f2b", 2, 2), "did you mean '1f1b'"),
        (("1f1b", 0, 2), "0 stages"),
        (("gpipe", 2, 2, 2), "use breadth-first or interleaved"),
        (("interleaved", 4, 6, 2), "takes a multiple of 4, at least 4 microbatches: accumulation is 6, 8 is the next"),
        (("dualpipe", 4, 6), "at least 8"),
        (("chimera", 3, 6), "even"),
        (("1f1b", 2, 2, 1, 2), "use terapipe"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments: tuple[str, int, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(*arguments)


@pytest.mark.parametrize("text", ["F0", "0X0", "0F", "(0B0;1F0)OVERLAP_F_B", "-1F0", "0SEND_F", "", "0DISPATCH_F/1"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        parse_action(text)


def test_placements() -> None:
    assert loop(3, 2).directions == ((0, 1, 2, 0, 1, 2),)
    assert vee(3).held == ((0, 5), (1, 4), (2, 3))
    assert two_ways(4).holders == ((0, 3), (1, 2), (1, 2), (0, 3))
    with pytest.raises(UsageError, match="ranks below 2"):
        ChunkPlacement("mine", 2, ((0, 2),))


# ---- mutations, beside a machine that tries every order ----------------------------------------------------------


def mutants(program: StepProgram) -> Iterator[StepProgram]:
    """Every swap of two neighbouring actions of a rank."""
    for rank, actions in enumerate(program.actions):
        for place in range(len(actions) - 1):
            swapped = [*actions]
            swapped[place], swapped[place + 1] = swapped[place + 1], swapped[place]
            lists = [*program.actions]
            lists[rank] = tuple(swapped)
            yield dataclasses.replace(program, actions=tuple(lists))


def brute_force(program: StepProgram) -> bool:
    """Whether every order in which ranks may get on ends well, each send blocking; all states are visited.

    Knows nothing of the checker: what is there follows from the places in the lists alone.
    """
    lists = program.actions
    where = program.placement.rank
    lowered = any(action.kind == "SEND" for actions in lists for action in actions)
    seen = set()
    ahead = [tuple(0 for _ in lists)]
    while ahead:
        state = ahead.pop()
        if state in seen:
            continue
        seen.add(state)
        moves = []
        for rank, actions in enumerate(lists):
            if state[rank] == len(actions):
                continue
            action = actions[state[rank]]
            history = actions[: state[rank]]
            done = {event for past in history for part in parts(past) for event in makes(part)}
            got = {(past.of, past.chunk, past.microbatch, past.slice) for past in history if past.kind == "RECV"}
            if action.kind in ("SEND", "RECV"):
                step = 1 if (action.kind == "SEND") == (action.of == "activation") else -1
                partner = where(action.chunk + step, action.microbatch)
                other = lists[partner][state[partner]] if state[partner] < len(lists[partner]) else None
                kind = {"SEND": "RECV", "RECV": "SEND"}[action.kind]
                if other == action._replace(kind=kind, chunk=action.chunk + step):
                    moves.append((rank, partner))
                if action.kind == "SEND":
                    event = PassDone(
                        "F" if action.of == "activation" else "I", action.chunk, action.microbatch, action.slice
                    )
                    if event not in done:
                        return False
                continue
            if action.kind == "REDUCE":
                holders = program.placement.holders[action.chunk]
                if all(state[one] < len(lists[one]) and lists[one][state[one]] == action for one in holders):
                    moves.append(holders)
                past_sums = [place for place, past in enumerate(history) if past == action]
                fresh = history[past_sums[-1] :] if past_sums else history
                if not any(part.kind in "BW" and part.chunk == action.chunk for past in fresh for part in parts(past)):
                    return False
                continue
            blocked = False
            for part in parts(action):
                version = max((p.version for p in history if p.kind == "UPDATE" and p.chunk == part.chunk), default=0)
                gathers = [
                    past.kind for past in history if past.kind in ("GATHER", "FREE") and past.chunk == part.chunk
                ]
                cut = any(one.kind == "GATHER" and one.chunk == part.chunk for one in actions)
                if part.kind != "W" and (version != part.version or (cut and (not gathers or gathers[-1] == "FREE"))):
                    return False
                for event in program.needs(part):
                    if where(event.chunk, event.microbatch) == rank:
                        if event not in done:
                            return False
                    elif lowered:
                        of = "activation" if event.kind == "F" else "gradient"
                        if (of, part.chunk, part.microbatch, part.slice) not in got:
                            return False
                    else:
                        home = where(event.chunk, event.microbatch)
                        theirs = lists[home][: state[home]]
                        blocked |= event not in {e for past in theirs for p in parts(past) for e in makes(p)}
            if action.kind in ("GATHER", "FREE"):
                balance = sum(
                    1 if past.kind == "GATHER" else -1
                    for past in history
                    if past.kind in ("GATHER", "FREE") and past.chunk == action.chunk
                )
                if balance != (0 if action.kind == "GATHER" else 1):
                    return False
            if action.kind == "UPDATE":
                wanted = {
                    PassDone("W", action.chunk, m, s)
                    for m in range(program.microbatches)
                    for s in range(program.slices)
                }
                mine = {event for event in wanted if where(event.chunk, event.microbatch) == rank}
                sums = [
                    place for place, past in enumerate(history) if past.kind == "REDUCE" and past.chunk == action.chunk
                ]
                late = history[sums[-1] :] if sums else history
                unsummed = any(
                    part.kind in "BW" and part.chunk == action.chunk for past in late for part in parts(past)
                )
                must = any(one.kind == "REDUCE" and one.chunk == action.chunk for one in actions)
                if not mine & done or (must and (unsummed or not sums)):
                    return False
            if not blocked:
                moves.append((rank,))
        if not moves and state != tuple(len(actions) for actions in lists):
            return False
        for together in moves:
            ahead.append(tuple(at + (rank in together) for rank, at in enumerate(state)))
    return True


def is_accepted(program: StepProgram) -> bool:
    try:
        check(program)
    except BrokenStepError:
        return False
    return True


SMALL = [
    ("gpipe", 2, 2), ("1f1b", 2, 3), ("1f1b", 3, 3), ("interleaved", 2, 2), ("breadth-first", 2, 2), ("zb-h1", 2, 3),
    ("zb-h2", 2, 3), ("zb-v", 2, 2), ("v-half", 2, 2), ("v-min", 2, 2), ("dualpipe", 2, 4), ("dualpipe-v", 2, 4),
    ("chimera", 2, 2), ("terapipe", 2, 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "stages", "microbatches"), SMALL)
def test_swapped_neighbours_are_judged_as_by_brute_force(name: str, stages: int, microbatches: int) -> None:
    program = build(name, stages, microbatches, slices=2 if name == "terapipe" else 1)
    reduce = "step"
    for form in (program, exchange(program), exchange(gather(program), reduce, update=True)):
        assert brute_force(form)
        verdicts = [(is_accepted(mutant), brute_force(mutant)) for mutant in mutants(form)]
        assert [ours for ours, _ in verdicts] == [truth for _, truth in verdicts]
    assert {True, False} <= {truth for _, truth in verdicts}


def test_memory_is_read_between_actions() -> None:
    program = exchange(build("1f1b", 2, 2))
    sizes = StepBytes(kept=[10.0, 10.0], outputs=[3.0, 3.0])
    first = dict(zip([str(action) for action in program.actions[0]], memory_curve(program, sizes)[0][1:], strict=True))
    # After F its output waits to be sent beside what is kept; a gradient that has come waits for its backward pass.
    assert (first["0F0"], first["0SEND_F0"], first["0RECV_B0"] - first["0B0"]) == (13, 10, 13)
    assert all(action.kind in (*COMPUTE, "SEND", "RECV") for action in program.actions[0])


def test_an_update_waits_for_its_states() -> None:
    """They come from the host after the last pass: that copy, the step and nothing else follow it."""
    program = build("1f1b", 2, 4)
    times = StepTimes((1.0, 1.0), (1.0, 1.0), (0.5, 0.5), 0.0, copy_s=2.0, update_s=3.0)
    passes_s = simulate(program, times).total_s
    stepped = simulate(exchange(program, "step", update=True), times)
    moved = simulate(exchange(program, "step", update=True, states_on_host=True), times)
    assert stepped.total_s == pytest.approx(passes_s + 3.0)
    assert moved.total_s >= passes_s + 2.0 + 3.0


def routed(chunks: int, again: bool = False) -> tuple[RoutedLayers, ...]:
    """Three layers in each chunk, of which the last two have experts."""
    return tuple(RoutedLayers(((3 * chunk + 1, 3 * chunk + 2),), again) for chunk in range(chunks))


def test_what_a_pass_exchanges_with_experts_follows_from_the_pass() -> None:
    program = dataclasses.replace(build("zb-h1", 2, 2), routed=routed(2))
    assert " ".join(map(str, program.within(Action("F", 1, 0)))) == (
        "1DISPATCH_F0/4 1COMBINE_F0/4 1DISPATCH_F0/5 1COMBINE_F0/5"
    )
    back = "1COMBINE_B0/5 1DISPATCH_B0/5 1COMBINE_B0/4 1DISPATCH_B0/4"
    assert " ".join(map(str, program.within(Action("I", 1, 0)))) == back
    assert program.within(Action("W", 1, 0)) == ()
    again = dataclasses.replace(program, routed=routed(2, again=True))
    words = " ".join(map(str, again.within(Action("B", 1, 0))))
    assert words == f"1DISPATCH_F0/4 1COMBINE_F0/4 1DISPATCH_F0/5 1COMBINE_F0/5 {back}"
    assert [parse_action(word).layer for word in words.split()] == [4, 4, 5, 5, 5, 5, 4, 4]
    with pytest.raises(UsageError, match="0DISPATCH_F0/1 happens within a pass, which says so itself"):
        from_csv("0F0,0DISPATCH_F0/1,0B0")
    with pytest.raises(UsageError, match="a layer, such as /3, is said of rows"):
        parse_action("0F0/3")


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_exchanges_lie_within_their_passes_and_beside_what_hides_them(name: str) -> None:
    """Of a layer 1 s before, 2 s there with 1.5 s computed meanwhile, 1 s of experts, 0.5 s back."""
    program = build(name, 2, 4)
    forward, back = ExchangeTimes(1, 2, 1.5, 1, 0.5, 0), ExchangeTimes(1, 0.5, 0, 1, 2, 1.5)
    assert forward.total_s == back.total_s == 4.5
    layers, more = 2, 0.25  # and an embedding or a head
    times = StepTimes(*[[seconds] * program.chunks for seconds in (layers * 4.5 + more, layers * 4.5 + more, 3.0)])
    plain = simulate(program, times, keep_slots=True)
    program = dataclasses.replace(program, routed=routed(program.chunks))
    timeline = simulate(program, dataclasses.replace(times, routed=RoutedTimes(forward, back, 1.5)), keep_slots=True)
    assert (timeline.total_s, timeline.slots, plain.exchanges) == (plain.total_s, plain.slots, ())
    count = sum(part.kind != "W" for slot in plain.slots for part in parts(slot.action))
    assert len(timeline.exchanges) == 2 * layers * count
    by_pass: dict[tuple[int, int], list[Slot]] = {}
    for slot in timeline.exchanges:
        by_pass.setdefault((slot.rank, slot.place), []).append(slot)
    passes = {(slot.rank, slot.place): slot for slot in timeline.slots}
    for where, exchanges in by_pass.items():
        whole = passes[where]
        assert [slot.action for slot in exchanges] == list(program.within(whole.action))
        ends = [whole.start_s, *(moment for slot in exchanges for moment in (slot.start_s, slot.end_s)), whole.end_s]
        assert all(before <= after + 1e-9 for before, after in pairwise(ends))
        for slot in exchanges:
            assert slot.end_s - slot.start_s == pytest.approx(2 if slot.action.kind == "DISPATCH" else 0.5)
