"""Wrong functions that people write for the guide's exercises, each with a reason: by exercise.

An exercise's own check corrects them; a test sees that each gets words of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilemesh.comm import Communicator
from tilemesh.guide.cutting.exercises import Between, Own, cheapest, each_alone, one_after_the_other, only_edges
from tilemesh.guide.dataflow.exercises import Program, values_of
from tilemesh.guide.four_models.exercises import ppo_step
from tilemesh.guide.guessing.exercises import Rows, Uniform
from tilemesh.guide.guessing.work import pick, verify
from tilemesh.guide.host.exercises import Times
from tilemesh.guide.host.work import timeline
from tilemesh.guide.kv_cache.exercises import Pages
from tilemesh.guide.locality.exercises import WRONG_STRIDES
from tilemesh.guide.machine.exercises import WRONG_TIMES
from tilemesh.guide.messages.exercises import swap
from tilemesh.guide.pipelines.exercises import one_f_one_b
from tilemesh.guide.policy.exercises import advantages
from tilemesh.guide.ranks.exercises import Groups, data_major, groups_of, local_numbers
from tilemesh.guide.requests.exercises import Views, next_step
from tilemesh.guide.smaller.exercises import round_groups

# collectives ---------------------------------------------------------------------------------------------------------


def _gathered(comm: Communicator, value: int, rounds: int, hand_on: Callable[[Any], Any]) -> list[int]:
    gathered, carried = [0] * comm.size, np.array([value])
    gathered[comm.rank] = value
    for turn in range(1, rounds + 1):
        carried = hand_on(carried)
        gathered[(comm.rank - turn) % comm.size] = int(carried[0])
    return gathered


def _round(comm: Communicator, carried: Any, arriving: Any) -> Any:
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    handles = [comm.irecv(arriving, source=before), comm.isend(carried, to=after)]
    for handle in handles:
        handle.wait()
    return arriving


def own_each_time(comm: Communicator, value: int) -> list[int]:
    """Wrong: sends its own value in every round."""
    own = np.array([value])
    return _gathered(comm, value, comm.size - 1, lambda carried: _round(comm, own, np.empty_like(own)))


def as_they_come(comm: Communicator, value: int) -> list[int]:
    """Wrong: in the order of arrival."""
    gathered, carried = [value], np.array([value])
    for _ in range(comm.size - 1):
        carried = _round(comm, carried, np.empty_like(carried))
        gathered.append(int(carried[0]))
    return gathered


def one_round_short(comm: Communicator, value: int) -> list[int]:
    """Wrong: n-2 rounds."""
    return _gathered(comm, value, comm.size - 2, lambda carried: _round(comm, carried, np.empty_like(carried)))


def to_everybody(comm: Communicator, value: int) -> list[int]:
    """Wrong: right values, but every rank sends to every rank."""
    boxes = [np.array([value]) for _ in range(comm.size)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    handles = [comm.irecv(boxes[rank], source=rank) for rank in others]
    handles += [comm.isend(np.array([value]), to=rank) for rank in others]
    for handle in handles:
        handle.wait()
    return [int(box[0]) for box in boxes]


def sends_first(comm: Communicator, value: int) -> list[int]:
    """Wrong: a deadlock."""
    comm.send(np.array([value]), to=(comm.rank + 1) % comm.size)
    box = np.empty(1, np.int64)
    comm.recv(box, source=(comm.rank - 1) % comm.size)
    return [value, int(box[0])]


def sends_left(comm: Communicator, value: int) -> list[int]:
    """Wrong: right values, but no send is waited for."""

    def hand_on(carried: Any) -> Any:
        box = np.empty_like(carried)
        receiving = comm.irecv(box, source=(comm.rank - 1) % comm.size)
        comm.isend(carried, to=(comm.rank + 1) % comm.size)
        receiving.wait()
        return box

    return _gathered(comm, value, comm.size - 1, hand_on)


def by_the_library(comm: Communicator, value: int) -> list[int]:
    """Wrong: right values, but the exercise is to write it."""
    return [int(each) for each in comm.all_gather(np.array([value]))]


def box_of_floats(comm: Communicator, value: int) -> list[int]:
    """Wrong: whole numbers arrive in a box of float64."""
    return _gathered(comm, value, comm.size - 1, lambda carried: _round(comm, carried, np.empty(1)))


# cutting -------------------------------------------------------------------------------------------------------------


def backwards(own: Own, between: Between) -> Any:
    """Wrong: the rows of an edge's table taken for the operator behind it."""
    turned = [
        [[table[b % len(table)][a % len(table[0])] for b in range(len(table[0]))] for a in range(len(table))]
        for table in between
    ]
    return cheapest(own, turned)


# data_parallel -------------------------------------------------------------------------------------------------------


def mean_of_means(comm: Communicator, gradient_sum: Any, samples: int) -> Any:
    """Wrong: each rank's mean weighs the same."""
    return comm.all_reduce(gradient_sum / samples) / comm.size


def over_ranks(comm: Communicator, gradient_sum: Any, samples: int) -> Any:
    """Wrong: divides by the number of ranks."""
    return comm.all_reduce(gradient_sum) / comm.size


def never_divided(comm: Communicator, gradient_sum: Any, samples: int) -> Any:
    """Wrong: the sum."""
    return comm.all_reduce(gradient_sum)


def only_mine(comm: Communicator, gradient_sum: Any, samples: int) -> Any:
    """Wrong: no communication."""
    return gradient_sum / samples


def own_count(comm: Communicator, gradient_sum: Any, samples: int) -> Any:
    """Wrong: every rank divides by its own number of samples."""
    return comm.all_reduce(gradient_sum) / samples


def eleven(comm: Communicator, gradient_sum: Any, samples: int) -> Any:
    """Wrong: right for 5, 3 and 3 samples alone."""
    return comm.all_reduce(gradient_sum) / 11


# dataflow ------------------------------------------------------------------------------------------------------------


def _swept(
    program: Program, inputs: Sequence[float], *, seed: float = 1.0, backward: bool = True, adds: bool = True,
    other: int = 1,
) -> list[float]:  # fmt: skip
    values = values_of(program, inputs)
    slopes = [0.0] * len(values)
    slopes[-1] = seed
    for place in reversed(range(len(program))) if backward else range(len(program)):
        op, operands = program[place]
        x = [values[each] for each in operands]
        for at, operand in enumerate(operands):
            partial = 1.0 if op == "add" else x[abs(other - at)] if op == "multiply" else math.cos(x[0])
            slopes[operand] = (slopes[operand] if adds else 0.0) + slopes[len(inputs) + place] * partial
    return slopes[: len(inputs)]


def last_reader(program: Program, inputs: Sequence[float]) -> Any:
    """Wrong: a value that several read keeps the slope of one of them."""
    return _swept(program, inputs, adds=False)


def in_order(program: Program, inputs: Sequence[float]) -> Any:
    """Wrong: from the first operator to the last."""
    return _swept(program, inputs, backward=False)


def own_factor(program: Program, inputs: Sequence[float]) -> Any:
    """Wrong: the slope of x · y with respect to x taken as x."""
    return _swept(program, inputs, other=0)


def no_seed(program: Program, inputs: Sequence[float]) -> Any:
    """Wrong: the last value's own slope is not 1."""
    return _swept(program, inputs, seed=0.0)


# four_models ---------------------------------------------------------------------------------------------------------


def ratio_is_one(actor: Any, critic: Any, reward: Any, reference: Any, prompts: Any, epochs: int) -> Any:
    """Wrong: "old" log-probabilities are computed anew in every epoch."""
    answers = actor.draw(prompts)
    scores, before, values = reward.score(answers), reference.logprobs(answers), critic.values(answers)
    for _ in range(epochs):
        actor.update(answers, scores, values, actor.logprobs(answers), before)
        critic.update(answers, scores, values)
    return answers


def values_move(actor: Any, critic: Any, reward: Any, reference: Any, prompts: Any, epochs: int) -> Any:
    """Wrong: what was to be expected is computed after the critic has seen the answers."""
    answers = actor.draw(prompts)
    scores, before, old = reward.score(answers), reference.logprobs(answers), actor.logprobs(answers)
    for _ in range(epochs):
        values = critic.values(answers)
        actor.update(answers, scores, values, old, before)
        critic.update(answers, scores, values)
    return answers


def no_reference(actor: Any, critic: Any, reward: Any, reference: Any, prompts: Any, epochs: int) -> Any:
    """Wrong: the KL is taken to the actor itself."""
    answers = actor.draw(prompts)
    scores, old, values = reward.score(answers), actor.logprobs(answers), critic.values(answers)
    for _ in range(epochs):
        actor.update(answers, scores, values, old, old)
        critic.update(answers, scores, values)
    return answers


def critic_forgotten(actor: Any, critic: Any, reward: Any, reference: Any, prompts: Any, epochs: int) -> Any:
    """Wrong: only the actor is trained."""
    answers = actor.draw(prompts)
    scores, before = reward.score(answers), reference.logprobs(answers)
    old, values = actor.logprobs(answers), critic.values(answers)
    for _ in range(epochs):
        actor.update(answers, scores, values, old, before)
    return answers


def draws_again(actor: Any, critic: Any, reward: Any, reference: Any, prompts: Any, epochs: int) -> Any:
    """Wrong: new answers in every epoch."""
    answers = None
    for _ in range(epochs):
        answers = ppo_step(actor, critic, reward, reference, prompts, 1)
    return answers


# guessing ------------------------------------------------------------------------------------------------------------


def always_stays(target: Rows, draft: Rows, guesses: Sequence[int], uniform: Uniform) -> Any:
    """Wrong: takes every guess."""
    return [*guesses, pick(target[-1], uniform())]


def replaced_from_target(target: Rows, draft: Rows, guesses: Sequence[int], uniform: Uniform) -> Any:
    """Wrong: a rejected guess is replaced by a token of the large model's own distribution."""
    tokens: list[int] = []
    for place, guess in enumerate(guesses):
        if uniform() * draft[place][guess] >= target[place][guess]:
            return [*tokens, pick(target[place], uniform())]
        tokens.append(guess)
    return [*tokens, pick(target[-1], uniform())]


def goes_on(target: Rows, draft: Rows, guesses: Sequence[int], uniform: Uniform) -> Any:
    """Wrong: goes on behind a guess that was replaced."""
    tokens: list[int] = []
    for place, guess in enumerate(guesses):
        tokens += verify([target[place]] * 2, [draft[place]], [guess], uniform)[:1]
    return [*tokens, pick(target[-1], uniform())]


def no_bonus(target: Rows, draft: Rows, guesses: Sequence[int], uniform: Uniform) -> Any:
    """Wrong: where all guesses stay, the token behind them is left out."""
    tokens = verify(target, draft, guesses, uniform)
    return tokens[: len(guesses)]


def likeliest_only(target: Rows, draft: Rows, guesses: Sequence[int], uniform: Uniform) -> Any:
    """Wrong: a guess stays if it is the large model's likeliest token."""
    tokens = []
    for place, guess in enumerate(guesses):
        best = max(range(len(target[place])), key=target[place].__getitem__)
        tokens.append(best)
        if guess != best:
            return tokens
    return [*tokens, pick(target[-1], uniform())]


# host ----------------------------------------------------------------------------------------------------------------


def adds_both(host: Times, device: Times, waits: Sequence[bool]) -> Any:
    """Wrong: nothing overlaps."""
    return timeline(host, device, [True] * len(waits))


def never_waits(host: Times, device: Times, waits: Sequence[bool]) -> Any:
    """Wrong: the host reads a result before it is there."""
    return timeline(host, device, [False] * len(waits))


def two_at_once(host: Times, device: Times, waits: Sequence[bool]) -> Any:
    """Wrong: a kernel begins when it is launched, although another runs."""
    at, spans = 0.0, list[tuple[float, float]]()
    for launch, run, wait in zip(host, device, waits, strict=True):
        at += launch
        spans.append((at, at + run))
        if wait:
            at = max(end for _, end in spans)
    return spans


def device_only(host: Times, device: Times, waits: Sequence[bool]) -> Any:
    """Wrong: launches take no time."""
    return timeline([0.0] * len(host), device, waits)


# kv_cache ------------------------------------------------------------------------------------------------------------


class _WritesShared(Pages):
    def append(self, name: str) -> Any:
        table = self.tables.get(name, [])
        users = self.users[table[-1]] if table else 0
        if table:
            self.users[table[-1]] = 1
        result = super().append(name)
        if table:
            self.users[table[-1] if result and result[1] else table[-2 if result else -1]] = users
        return result


class _FreesShared(Pages):
    def free(self, name: str) -> None:
        for page in self.tables.get(name, []):
            self.users[page] = 1
        super().free(name)


class _Leaks(Pages):
    def append(self, name: str) -> Any:
        result = super().append(name)
        if result and result[2] is not None:
            self.users[result[2]] += 1  # the copied page keeps a user that it no longer has
        return result


class _CopiesAll(Pages):
    def fork(self, name: str, other: str) -> None:
        copies = [self._take() for _ in self.tables[name] if self.free_pages]
        self.tables[other], self.tokens[other] = copies, self.tokens[name]


class _OnePerToken(Pages):
    def append(self, name: str) -> Any:
        if not self.free_pages:  # asks for a page although the last has room
            return None
        return super().append(name)


def writes_shared(pages: int, page_tokens: int) -> Any:
    """Wrong: writes into a page that another still reads."""
    return _WritesShared(pages, page_tokens)


def frees_shared(pages: int, page_tokens: int) -> Any:
    """Wrong: gives a page back while another uses it."""
    return _FreesShared(pages, page_tokens)


def leaks(pages: int, page_tokens: int) -> Any:
    """Wrong: a page that was copied is never free again."""
    return _Leaks(pages, page_tokens)


def copies_all(pages: int, page_tokens: int) -> Any:
    """Wrong: a fork copies every page."""
    return _CopiesAll(pages, page_tokens)


def one_per_token(pages: int, page_tokens: int) -> Any:
    """Wrong: refuses a token although the last page has room."""
    return _OnePerToken(pages, page_tokens)


# messages ------------------------------------------------------------------------------------------------------------


def send_first(comm: Communicator, mine: Any, other: int) -> Any:
    """Wrong: a deadlock."""
    theirs = np.empty_like(mine)
    comm.send(mine, to=other)
    comm.recv(theirs, source=other)
    return theirs


def no_wait(comm: Communicator, mine: Any, other: int) -> Any:
    """Wrong: returns before the message is there."""
    theirs = np.full_like(mine, -1)
    comm.irecv(theirs, source=other)
    seen = theirs.copy()
    comm.isend(mine, to=other)
    return seen


def send_left(comm: Communicator, mine: Any, other: int) -> Any:
    """Wrong: begins a send and never waits for it."""
    theirs = np.empty_like(mine)
    receiving = comm.irecv(theirs, source=other)
    comm.isend(mine, to=other)
    receiving.wait()
    return theirs


def own_box(comm: Communicator, mine: Any, other: int) -> Any:
    """Wrong: puts what came into the array that was sent."""
    mine[...] = swap(comm, mine, other)
    return mine


def nothing_sent(comm: Communicator, mine: Any, other: int) -> Any:
    """Wrong: one direction only."""
    if comm.rank < other:
        comm.send(mine, to=other)
        return mine
    theirs = np.empty_like(mine)
    comm.recv(theirs, source=other)
    return theirs


def by_a_collective(comm: Communicator, mine: Any, other: int) -> Any:
    """Wrong: every rank gets every array, and keeps one."""
    return comm.all_gather(mine).reshape(comm.size, -1)[other]


# pipelines -----------------------------------------------------------------------------------------------------------


def all_forward_first(rank: int, stages: int, microbatches: int) -> list[str]:
    """Wrong: GPipe."""
    return [f"{kind}{microbatch}" for kind in "FB" for microbatch in range(microbatches)]


def no_warm_up(rank: int, stages: int, microbatches: int) -> list[str]:
    """Wrong: one forward, one backward on every rank: only one microbatch is under way."""
    return [f"{kind}{microbatch}" for microbatch in range(microbatches) for kind in "FB"]


def same_everywhere(rank: int, stages: int, microbatches: int) -> list[str]:
    """Wrong: the same number of forward passes ahead on every rank."""
    return one_f_one_b(0, stages, microbatches)


def last_backwards_missing(rank: int, stages: int, microbatches: int) -> list[str]:
    """Wrong: stops when there is no forward pass left."""
    order = one_f_one_b(rank, stages, microbatches)
    last = order.index(f"F{microbatches - 1}")
    return order[: last + 2]


def backward_first(rank: int, stages: int, microbatches: int) -> list[str]:
    """Wrong: a backward pass before the forward pass of the same microbatch."""
    return [f"{kind}{microbatch}" for microbatch in range(microbatches) for kind in "BF"]


# places --------------------------------------------------------------------------------------------------------------


def halves(ranks: int, draw: float, update: float, least_training: int) -> Any:
    """Wrong: half and half."""
    return ranks // 2


def by_share_down(ranks: int, draw: float, update: float, least_training: int) -> Any:
    """Wrong: the share of the work, always rounded down, whatever fits."""
    return max(1, int(ranks * draw / (draw + update)))


def most_drawing(ranks: int, draw: float, update: float, least_training: int) -> Any:
    """Wrong: as few ranks for training as fit."""
    return ranks - least_training


def taking_turns(ranks: int, draw: float, update: float, least_training: int) -> Any:
    """Wrong: the least sum, as if the two took turns."""
    return min(range(1, ranks - least_training + 1), key=lambda drawing: draw / drawing + update / (ranks - drawing))


# policy --------------------------------------------------------------------------------------------------------------


def no_values(rewards: Sequence[float], values: Sequence[float], discount: float, decay: float) -> Any:
    """Wrong: sums of rewards, without a critic."""
    return advantages(rewards, [0.0] * len(values), discount, decay)


def one_step(rewards: Sequence[float], values: Sequence[float], discount: float, decay: float) -> Any:
    """Wrong: λ = 0 whatever was asked for."""
    return advantages(rewards, values, discount, 0.0)


def everything(rewards: Sequence[float], values: Sequence[float], discount: float, decay: float) -> Any:
    """Wrong: λ = 1 whatever was asked for."""
    return advantages(rewards, values, discount, 1.0)


def not_discounted(rewards: Sequence[float], values: Sequence[float], discount: float, decay: float) -> Any:
    """Wrong: forgets the discount."""
    return advantages(rewards, values, 1.0, decay)


def value_goes_on(rewards: Sequence[float], values: Sequence[float], discount: float, decay: float) -> Any:
    """Wrong: after the last token its own value follows once more."""
    longer = advantages([*rewards, 0.0], [*values, values[-1]], discount, decay)[:-1]
    extra = [(discount * decay) ** (len(rewards) - place) * values[-1] for place in range(len(rewards))]
    return [one + more for one, more in zip(longer, extra, strict=True)]


# ranks ---------------------------------------------------------------------------------------------------------------


def other_order(rank: int, dp: int, tp: int) -> Groups:
    """Wrong: the two groups swapped."""
    tensor, data = groups_of(rank, dp, tp)
    return data, tensor


def without_me(rank: int, dp: int, tp: int) -> Groups:
    """Wrong: leaves the rank itself out."""
    tensor, data = groups_of(rank, dp, tp)
    return [other for other in tensor if other != rank], [other for other in data if other != rank]


# requests ------------------------------------------------------------------------------------------------------------


def without_promises(requests: Views, free_pages: Sequence[int], page_tokens: int, budget: int) -> Any:
    """Wrong: begins whatever fits just now, so that all hold pages and nobody gets the next."""
    free, step, left = list(free_pages), dict[str, Any](), budget
    for one in requests:
        count = min(one.known - one.done, left)
        lacking = -(-(one.done + count) // page_tokens) - len(one.pages)
        if count and lacking <= len(free):
            step[one.name], left = (count, [free.pop() for _ in range(lacking)]), left - count
    return step


def same_page(requests: Views, free_pages: Sequence[int], page_tokens: int, budget: int) -> Any:
    """Wrong: does not take a page off the list that it gives away."""
    step = next_step(requests, free_pages, page_tokens, budget)
    return {name: (count, list(free_pages[: len(pages)])) for name, (count, pages) in step.items()}


def newest_first(requests: Views, free_pages: Sequence[int], page_tokens: int, budget: int) -> Any:
    """Wrong: whoever came last begins first."""
    return next_step(sorted(requests, key=lambda one: (not one.pages, -int(one.name))), free_pages, page_tokens, budget)


def prompts_in_one_step(requests: Views, free_pages: Sequence[int], page_tokens: int, budget: int) -> Any:
    """Wrong: computes prompts whole, whatever the budget."""
    return next_step(requests, free_pages, page_tokens, 10**6)


def forgets_the_rest(requests: Views, free_pages: Sequence[int], page_tokens: int, budget: int) -> Any:
    """Wrong: after its first chunk a prompt is taken to be done."""
    going = [one for one in requests if not one.pages or one.known - one.done == 1]
    return next_step(going, free_pages, page_tokens, budget)


def one_batch_at_a_time(requests: Views, free_pages: Sequence[int], page_tokens: int, budget: int) -> Any:
    """Wrong: a static batch: nobody begins before all that run have ended."""
    going = [one for one in requests if one.pages]
    return next_step(going or requests, free_pages, page_tokens, budget)


# smaller -------------------------------------------------------------------------------------------------------------


def one_scale(weights: Sequence[float], bits: int, group: int) -> Any:
    """Wrong: one scale for all."""
    return round_groups(weights, bits, len(weights))


def too_many_levels(weights: Sequence[float], bits: int, group: int) -> Any:
    """Wrong: 2^bits steps on each side."""
    return round_groups(weights, bits + 1, group)


def rounds_down(weights: Sequence[float], bits: int, group: int) -> Any:
    """Wrong: cuts off instead of rounding."""
    most, result = 2 ** (bits - 1) - 1, []
    for first in range(0, len(weights), group):
        part = weights[first : first + group]
        scale = max(map(abs, part)) / most
        result += [int(weight / scale) * scale if scale else 0.0 for weight in part]
    return result


def returns_codes(weights: Sequence[float], bits: int, group: int) -> Any:
    """Wrong: whole numbers, without their scale."""
    most, result = 2 ** (bits - 1) - 1, []
    for first in range(0, len(weights), group):
        part = weights[first : first + group]
        scale = max(map(abs, part)) / most
        result += [float(round(weight / scale)) if scale else 0.0 for weight in part]
    return result


def divides_by_zero(weights: Sequence[float], bits: int, group: int) -> Any:
    """Wrong: a group of zeros has no scale."""
    most, result = 2 ** (bits - 1) - 1, list[float]()
    for first in range(0, len(weights), group):
        part = weights[first : first + group]
        scale = max(map(abs, part)) / most
        result += [round(weight / scale) * scale for weight in part]
    return result


# tensor_parallel -----------------------------------------------------------------------------------------------------


def bias_everywhere(comm: Communicator, h_part: Any, b_part: Any, bias: Any) -> Any:
    """Wrong: every rank adds the bias before the sum."""
    return comm.all_reduce(h_part @ b_part + bias)


def no_sum(comm: Communicator, h_part: Any, b_part: Any, bias: Any) -> Any:
    """Wrong: no communication."""
    return h_part @ b_part + bias


def gathered(comm: Communicator, h_part: Any, b_part: Any, bias: Any) -> Any:
    """Wrong: puts the partial sums beside each other."""
    return comm.all_gather(np.ascontiguousarray((h_part @ b_part).T)).T + np.tile(bias, comm.size)


def averaged(comm: Communicator, h_part: Any, b_part: Any, bias: Any) -> Any:
    """Wrong: the mean instead of the sum."""
    return comm.all_reduce(h_part @ b_part) / comm.size + bias


def no_bias(comm: Communicator, h_part: Any, b_part: Any, bias: Any) -> Any:
    """Wrong: forgets the bias."""
    return comm.all_reduce(h_part @ b_part)


WRONG_FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "ring_gather": (
        own_each_time,
        as_they_come,
        one_round_short,
        to_everybody,
        sends_first,
        sends_left,
        by_the_library,
        box_of_floats,
    ),
    "cheapest": (
        each_alone,
        one_after_the_other,
        only_edges,
        backwards,
    ),
    "mean_gradient": (
        mean_of_means,
        over_ranks,
        never_divided,
        only_mine,
        own_count,
        eleven,
    ),
    "gradients": (
        last_reader,
        in_order,
        own_factor,
        no_seed,
    ),
    "ppo_step": (
        ratio_is_one,
        values_move,
        no_reference,
        critic_forgotten,
        draws_again,
    ),
    "verify": (
        always_stays,
        replaced_from_target,
        goes_on,
        no_bonus,
        likeliest_only,
    ),
    "timeline": (
        adds_both,
        never_waits,
        two_at_once,
        device_only,
    ),
    "page_allocator": (
        writes_shared,
        frees_shared,
        leaks,
        copies_all,
        one_per_token,
    ),
    "strides_of": tuple(WRONG_STRIDES.values()),
    "bound_time": tuple(WRONG_TIMES.values()),
    "swap": (
        send_first,
        no_wait,
        send_left,
        own_box,
        nothing_sent,
        by_a_collective,
    ),
    "one_f_one_b": (
        all_forward_first,
        no_warm_up,
        same_everywhere,
        last_backwards_missing,
        backward_first,
    ),
    "best_split": (
        halves,
        by_share_down,
        most_drawing,
        taking_turns,
    ),
    "advantages": (
        no_values,
        one_step,
        everything,
        not_discounted,
        value_goes_on,
    ),
    "groups_of": (
        data_major,
        other_order,
        without_me,
        local_numbers,
    ),
    "next_step": (
        without_promises,
        same_page,
        newest_first,
        prompts_in_one_step,
        forgets_the_rest,
        one_batch_at_a_time,
    ),
    "round_groups": (
        one_scale,
        too_many_levels,
        rounds_down,
        returns_codes,
        divides_by_zero,
    ),
    "row_linear": (
        bias_everywhere,
        no_sum,
        gathered,
        averaged,
        no_bias,
    ),
}
