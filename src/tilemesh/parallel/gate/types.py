"""What of a laid model cannot be right, whatever it computes: placements that do not fit the exchanges of a step.

The one idea: layers say by their cuts what they take and give along each axis (`core/tensor_placement.py`), places
between them say what they turn into what, and buckets say whose gradients they sum. All of it is read from the very
objects that a step calls, so a wrong row is seen here without a number being computed. A fault names a parameter and
an axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from torch import nn

from tilemesh.core.axes import BATCH, Axes, Blocks, coordinates, members, size_of, strided
from tilemesh.core.shard import Shard
from tilemesh.core.tensor_placement import Crossing, P, Pair, R, S
from tilemesh.model.experts import Experts
from tilemesh.parallel.buckets import Bucket, Bucketed
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.parallel.tensor import EntryHook, ExitHook, Passage, RowConv2d, VocabularyEmbedding
from tilemesh.parallel.zero import Zero, ZeroBucket, sharing_blocks

INSIDE, PARTIAL, ALIKE, OF_BATCH = (R, P), (P, R), (R, R), (P, R)
"""A value and its gradient along an axis: in a region, out of a row-split layer, alike everywhere, a part of a loss."""


def misplaced(laid: Laid) -> list[str]:
    """What does not fit, in words; empty where all does. Nothing is sent."""
    faults = [*_activations(laid), *_experts(laid)]
    if isinstance(laid.gradients, Bucketed):
        faults += [*_gradients(laid, laid.gradients), *_norms(laid, laid.gradients)]
    if isinstance(laid.gradients, Zero):
        faults += [*_rows(laid, laid.gradients)]
    return list(dict.fromkeys(faults))


# Activations --------------------------------------------------------------------------------------------------------


def _stream(laid: Laid) -> Pair:
    return (S(1), S(1)) if laid.plan.sequence_parallel else ALIKE


def _above(laid: Laid, name: str) -> Iterator[nn.Module]:
    """A module and those that it lies in, from the inside out."""
    while name:
        yield laid.module.get_submodule(name)
        name = name.rpartition(".")[0]


def _hook(modules: Iterable[nn.Module], kind: type) -> Any:
    """The nearest hook of a kind."""
    for module in modules:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if isinstance(hook, kind):
                return hook
    return None


def _cut_dim(mine: Shard) -> int | None:
    return next((cut.dim for cut in mine.cuts if cut.axis == "tp"), None)


def _activations(laid: Laid) -> Iterator[str]:
    """Every cut layer lies between an entry and an exit that do what it needs."""
    if laid.mesh.tp.size == 1:
        return
    enter, leave = Crossing("tp", _stream(laid), INSIDE), Crossing("tp", PARTIAL, _stream(laid))
    for name, mine in laid.shards.items():
        module = name.rpartition(".")[0]
        layer: Any = laid.module.get_submodule(module)
        dim = _cut_dim(mine)
        if dim is None or name.endswith(".bias"):
            continue
        if isinstance(layer, VocabularyEmbedding):
            yield from _wrong(name, layer.leave, leave)
        elif dim == 1:  # by its inputs
            own = layer.leave if isinstance(layer, RowConv2d) else layer.place.leave
            outer = _hook(_above(laid, module), ExitHook)
            yield from _wrong(name, own or (outer and outer.leave), leave)
        else:
            entry = _hook(_above(laid, module), EntryHook)
            yield from _wrong(name, entry and entry.enter, enter)
    parts = laid.parts.values() if isinstance(laid, Pipeline) else (laid,)
    for part in parts:
        model: Any = part.module
        if getattr(model, "token_embedding", None) is not None and getattr(model, "output", laid) is None:
            yield from _wrong("token_embedding.weight", part.enter_head, enter)


def _wrong(name: str, passage: Passage | None, wanted: Crossing) -> Iterator[str]:
    (value, back), (passed, gradient) = wanted.before, wanted.after
    if passage is None:
        yield (
            f"{name} is cut over {wanted.axis}, and nothing turns {value} into {passed} over {wanted.axis} there, or "
            f"its gradient from {gradient} into {back}"
        )
    elif words := passage.crossing.why_not(wanted):
        yield f"{name} is cut over {wanted.axis}; where activations {passage.name}, {words}"


def _experts(laid: Laid) -> Iterator[str]:
    """Rows reach experts and come back, with gradients; a router's loss is each rank's part of a sum over the batch."""
    tokens, experts = (S("tokens"), S("tokens")), (S("experts"), S("experts"))
    ways = {"DISPATCH": Crossing("ep", tokens, experts), "COMBINE": Crossing("ep", experts, tokens)}
    for name, module in laid.module.named_modules():
        if not isinstance(module, Experts):
            continue
        router, first = f"{name}.router.weight", next(iter(module.experts._modules), "")
        declared: Mapping[str, Crossing] = getattr(module.exchange, "crossings", {})
        for kind, wanted in ways.items() if laid.plan.ep > 1 else ():
            words = declared[kind].why_not(wanted) if kind in declared else f"nothing makes the {kind}"
            if words:
                yield f"{name}.experts.{first} and {router}: where rows go between tokens and experts over ep, {words}"
        if module.config.balance_loss or module.config.router_z_loss:
            yield from _router_loss(laid, name, router)
        sums = getattr(module.ordered_counts, "counts", None)
        is_shared = laid.mesh.cp.size > 1 or laid.plan.routes_apart
        if module.config.expert_capacity and is_shared and _is_lost(sums):
            yield (
                f"{router}: its experts take so many of a sequence, and how often each was picked is P over cp; "
                "it must be R over cp"
            )
        if module.config.balance_loss and is_shared and _is_lost(module.router.over_sequences):
            yield (
                f"{router}: its loss multiplies counts of a sequence's tokens, which are P over cp, with sums that "
                "are P over cp too: the product of two sums; counts must be R over cp"
            )


def _is_lost(counts: Any) -> bool:
    """Whether what counts the tokens of whole sequences does not."""
    crossing = getattr(counts, "crossing", None)
    return crossing is None or bool(crossing.why_not(Crossing("cp", (P, R), (R, R), has_gradient=False)))


def _router_loss(laid: Laid, name: str, router: str) -> Iterator[str]:
    pairs: dict[str, Pair] = dict.fromkeys(BATCH, OF_BATCH)
    if laid.mesh.tp.size > 1:
        # Computed alike by all ranks, inside a region, or of the tokens that each routes.
        pairs["tp"] = OF_BATCH if laid.plan.routes_apart else INSIDE
    hook = _hook(_above(laid, name), ExitHook)
    for passage in () if hook is None else hook.losses:
        crossing = passage.crossing
        axis = crossing.axis
        if crossing.before != pairs[axis]:
            done = f", to {crossing.value}" if crossing.value else ""
            yield f"{router}: its loss is {pairs[axis][0]} over {axis} and is taken for {crossing.before[0]}{done}"
        pairs[axis] = crossing.after
    wanted = {axis: ALIKE if axis == "tp" else OF_BATCH for axis in pairs}
    for axis, pair in pairs.items():
        if pair != wanted[axis]:
            what = "its loss" if pair[0] != wanted[axis][0] else "the gradient of its loss"
            mark, right = (pair[0], wanted[axis][0]) if what == "its loss" else (pair[1], wanted[axis][1])
            yield f"{router}: {what} leaves the layer as {mark} over {axis}, and the step's loss needs {right}"


# Gradients ----------------------------------------------------------------------------------------------------------


def _gradients(laid: Laid, gradients: Bucketed) -> Iterator[str]:
    """Each parameter's gradient is summed over just those ranks that hold it and have a part of it."""
    names = {id(mine.tensor): name for name, mine in gradients.held.items()}
    axes, rank, exchanged = laid.mesh.shape, laid.mesh.comm.rank, set()
    rows = {name.rpartition(".")[0] for name, mine in laid.shards.items() if _cut_dim(mine) == 1}
    for bucket in gradients.buckets:
        summed = _summed(gradients, bucket, axes, rank)
        for name in (names[id(parameter)] for parameter in bucket.parameters):
            exchanged.add(name)
            mine = gradients.held[name].shard
            parts = _partial_axes(laid, name, mine, rows)
            partial = tuple(block for block in mine.replicas if strided(block[0])[0] in parts)
            wanted = Counter(members(rank, partial, axes))
            yield from _off(mine, summed, wanted)
            if set(bucket.holders) != set(mine.holders):
                held, reached = [*mine.holders], [*bucket.holders]
                yield f"{name}: its gradient is P over pp, on stages {held}, and is summed over {reached}"
    for name in gradients.held.keys() - exchanged:
        yield f"{name}: no exchange has its gradient"


def _partial_axes(laid: Laid, name: str, mine: Shard, rows: Set[str]) -> set[str]:
    """Axes along which a gradient is P: those of the batch, and tp where ranks go on by themselves or cut tokens."""
    module, _, last = name.rpartition(".")
    outer = _hook(_above(laid, module), ExitHook)
    is_summed_later = outer is not None and outer.leave is not None
    is_after = module in rows and last == "bias" and not is_summed_later  # added where results have become one
    is_inside = _hook(_above(laid, module), EntryHook) is not None and not is_after
    is_partial = is_inside or _cut_dim(mine) is not None or laid.plan.sequence_parallel
    return {*BATCH, "tp"} if is_partial else {*BATCH}


def _summed(gradients: Bucketed, bucket: Bucket, axes: Axes, rank: int) -> Counter[int]:
    """How often the gradient of each rank counts in the sum that this one gets."""
    stages: list[Blocks] = [bucket.batch_summed]
    if isinstance(gradients, Zero):
        assert isinstance(bucket, ZeroBucket)
        stages = [sharing_blocks(axes, gradients.group, bucket.rows.spread), gradients.across]
    reached = Counter([rank])
    for blocks in (*stages, bucket.copies_summed):
        several = tuple(block for block in blocks if block[1] > 1)
        further: Counter[int] = Counter()
        for other, times in reached.items():
            for member in members(other, several, axes):
                further[member] += times
        reached = further
    return reached


def _off(mine: Shard, summed: Counter[int], wanted: Counter[int]) -> Iterator[str]:
    missing, more = sorted((wanted - summed).elements()), sorted((summed - wanted).elements())
    for words, ranks in (("no sum has the part of", missing), ("it is summed with what is no part of it, of", more)):
        if ranks:
            here, places = coordinates(mine.rank, mine.axes), [coordinates(other, mine.axes) for other in ranks]
            apart = [_axis(mine, axis) for axis, at in here.items() if any(there[axis] != at for there in places)]
            over = " and ".join(apart) or "no axis"
            yield f"{mine.name}: its gradient is P over {over}, and {words} rank {', '.join(map(str, ranks))}"


def _axis(mine: Shard, axis: str) -> str:
    """Experts that ranks share out lie on ep, which is folded out of others."""
    return f"{axis}, of which ep is a part" if mine.apart(axis) > 1 else axis


def _norms(laid: Laid, gradients: Bucketed) -> Iterator[str]:
    """Of the gradients' norm: each part counts once over the ranks that hold it, and all ranks are asked."""
    names = {id(mine.tensor): name for name, mine in gradients.held.items()}
    left = [axis for axis, size in laid.mesh.shape if size > 1 and (axis, size) not in gradients.counted]
    for bucket in gradients.buckets:
        name = names[id(bucket.parameters[0])]
        mine = gradients.stepped[name].shard
        _, divided = gradients.kept(bucket)
        for axis in left:
            if mine.copies_along(axis) < size_of(laid.mesh.shape, axis):
                over = _words(gradients.counted)
                yield f"{name}: its squares are P over {_axis(mine, axis)}, and the norm is summed over {over} alone"
        if divided != mine.copies:
            alike = [axis for axis, _ in laid.mesh.shape if mine.copies_along(axis) > 1]
            alike += ["pp"] * (len(mine.holders) > 1)
            cut = [_axis(mine, axis) for axis, size in laid.mesh.shape if size > 1 and axis not in alike]
            over = f"R over {' and '.join(alike) or 'none'}, not over {' and '.join(cut) or 'none'}"
            yield (
                f"{name}: {mine.copies} ranks have the same of it ({over}), and its squares are divided by "
                f"{divided} before they are summed over all ranks"
            )


def _words(blocks: Blocks) -> str:
    return " and ".join(f"{name} {count}" for name, count in blocks) or "this rank"


def _rows(laid: Laid, gradients: Zero) -> Iterator[str]:
    """ZeRO: what this rank steps are the rows that its place on dp and cp has."""
    place = coordinates(laid.mesh.comm.rank, laid.mesh.shape)
    for name, (rows, mine) in gradients.stepped.items():
        whole, before = gradients.held[name]
        first, length = 0, before.shape[0]
        for cut in mine.cuts[len(before.cuts) :]:
            [(begin, length)] = cut.stretches(length, size_of(laid.mesh.shape, cut.axis), place.get(cut.axis, 0))
            first += begin
        if (mine.rank, mine.shape[0], rows.shape[0]) != (laid.mesh.comm.rank, length, length):
            yield f"{name}: rank {laid.mesh.comm.rank} steps rows of rank {mine.rank}: it is S(0) over dp"
        elif gradients.stage < 3 and rows.numel():
            at = (rows.data_ptr() - whole.data_ptr()) // whole.element_size() // max(1, whole[0].numel())
            if at != first:
                yield f"{name}: it is S(0) over dp, this rank has rows from {first} on, and steps those from {at} on"
