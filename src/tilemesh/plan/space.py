"""Which layouts there are for a model, a cluster and a batch: all that the search looks at, and why there are none.

`Pins` holds what a user fixed; whatever is not fixed varies. A layout is offered only if it can exist (heads divide,
ranks add up, microbatches fill the batch); whether it fits in memory is the search's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, make_dataclass
from itertools import product
from typing import Any, get_args, get_type_hints

from tilemesh.core import config
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import Device
from tilemesh.core.plan import Attention, ContextExchange, ParallelPlan, Precision, Recompute
from tilemesh.core.step.book import all_schedules, find
from tilemesh.model.work.weights import cp_exchanges, why_not, why_not_ep, why_not_tp
from tilemesh.plan.step import Estimator

CUT = ("chunk_layers",)
"""What nobody fixes: stages are cut for each layout."""
LONG_CONTEXT, CP_MOST = 32_768, 16
"""From so many tokens on it is tried that ranks share sequences, at most so many."""
EP_NODES = 4
"""Experts are shared out over at most so many nodes, where nobody has fixed it: most rows then cross the network."""
TP_NODES = 2
"""Tensor parallelism is tried over at most so many nodes: it exchanges twice a layer, on the slowest link it meets."""


_TYPES = {name: kind for name, kind in get_type_hints(ParallelPlan).items() if name not in CUT}
_Fixed: Any = make_dataclass("_Fixed", [(name, kind | None, None) for name, kind in _TYPES.items()], frozen=True)


@dataclass(frozen=True)
class Pins(_Fixed):  # type: ignore[misc]  # its fields are made above
    """What is fixed; None varies. The fields are those of `ParallelPlan`, but for the cut into stages."""

    def __post_init__(self) -> None:
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        # A plan checks ranges and words; combinations are looked at when they are made.
        for name, value in given.items():
            if name not in ("interleave", "schedule", "sequence_parallel", "slices"):
                ParallelPlan(**{name: value})
        if self.interleave is not None and self.interleave < 1:
            raise UsageError(f"interleave is {self.interleave}: expected a whole number of at least 1")
        schedule = None if self.schedule is None else find(self.schedule)
        if (self.interleave or 1) > 1 and schedule and not schedule.interleaves:
            raise UsageError(
                f"interleave is {self.interleave} and schedule is {self.schedule}: fix schedule=interleaved"
            )
        if self.interleave == 1 and schedule and schedule.interleaves:
            raise UsageError(f"schedule is {self.schedule} and interleave is 1: fix interleave to 2 or more")
        if (self.slices or 1) > 1 and not (schedule and schedule.cuts_sequences):
            raise UsageError(f"slices is {self.slices} and schedule is {self.schedule}: fix schedule=terapipe")
        if self.zero_group and self.zero == 0:
            raise UsageError(
                f"zero_group is {self.zero_group} and zero is 0: without ZeRO nothing is cut within a group of "
                "replicas; fix zero=1, 2 or 3, or leave zero_group out"
            )

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Pins:
        """From "tp=8,pp=35,recompute=selective": an unknown name is an error with the nearest, two values are one."""
        texts = tuple(texts)
        try:
            given: dict[str, str] = {}
            for name, value in config.split_sets(texts):
                if given.setdefault(name, value) != value:
                    raise UsageError(f"--fix: {name} is {given[name]} and {value}: give one")
            return config.load(cls, sets=texts)
        except UsageError as error:
            words = str(error).replace("--set:", "--fix:", 1).replace("such as train.steps=200", "such as tp=8")
            raise UsageError(words) from None

    def describe(self) -> str:
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{name}={_word(value)}" for name, value in given if value is not None)


def searched() -> list[str]:
    """Schedules that are tried unless one is fixed. The others lose to one of these in time and in memory as they are
    predicted here: GPipe, TeraPipe and breadth-first hold every microbatch, Chimera and DualPipe hold weights twice,
    and V-Min, whose slots are all as long as the longest pass, takes about as long as recomputing everything."""
    return [schedule.name for schedule in all_schedules() if schedule.is_searched]


def default_precision(device: Device) -> Precision:
    """What large models are trained in on a device: 16 bits with fp32 master weights where it has bf16."""
    if device.kind == "cpu":
        return "fp32"  # what a CPU has of 16 bits is mostly emulated
    if "bf16" in device.peak_flops_per_s:
        return "bf16-master"
    return "fp16" if "fp16" in device.peak_flops_per_s else "fp32"


def candidates(estimator: Estimator, batch: int, pins: Pins) -> Iterator[list[ParallelPlan]]:
    """Every layout, in groups that differ in recomputation alone, from the least to the most."""
    device = estimator.cluster.device
    attention: Attention = pins.attention or "fused"
    precision = pins.precision or default_precision(device)
    device.peak(ParallelPlan(precision=precision).peak_dtype)  # refuses a dtype the device lacks
    recomputes = [pins.recompute] if pins.recompute else _recomputes(attention)
    said = ("prefetch", "offload", "slices", "fp8_scales")
    as_said = {name: value for name in said if (value := getattr(pins, name)) is not None}
    for tp, pp, dp, cp in meshes(estimator, pins):
        if batch % dp:
            continue
        group = pins.zero_group or dp
        sizes = _microbatches(batch // dp, pins)
        alike: dict[str, Any] = {"tp": tp, "sequence_parallel": tp > 1, "attention": attention, "precision": precision}
        for microbatch, (ep, expert_tp, exchange) in product(sizes, _shared(estimator, tp, dp, cp, pins)):
            alike |= {"cp": cp, "cp_exchange": exchange, "ep": ep, "expert_tp": expert_tp}
            accumulation = batch // dp // microbatch
            least_bytes = estimator.room.pass_bytes(ParallelPlan(microbatch=microbatch, **alike)) // (pins.slices or 1)
            if microbatch > sizes[0] and least_bytes > estimator.usable_bytes:
                continue  # it does not fit; the fewest sequences stay, to say what they need
            for schedule, interleave in _schedules(estimator.model.layers, pp, accumulation, pins):
                cuts = (True,) if 0 < expert_tp < tp else (True, False) if tp > 1 else (False,)
                for parallel in _choices(pins.sequence_parallel, cuts):
                    for zero in _choices(pins.zero, (0, 1, 2, 3) if dp * cp > 1 and not dp % group else (0,)):
                        yield [
                            ParallelPlan.unchecked(
                                dp=dp, tp=tp, pp=pp, sequence_parallel=parallel, zero=zero, interleave=interleave,
                                zero_group=(pins.zero_group or 0) if zero else 0, chunk_layers=(),
                                microbatch=microbatch, accumulation=accumulation, schedule=schedule,
                                recompute=recompute, attention=attention, precision=precision,
                                recompute_every=(pins.recompute_every or 1) if recompute == "full" else 1,
                                recompute_stages=() if recompute == "none" else pins.recompute_stages or (),
                                cp=cp, cp_exchange=exchange, ep=ep, expert_tp=expert_tp,
                                **as_said,
                            )
                            for recompute in recomputes
                        ]  # fmt: skip


def meshes(estimator: Estimator, pins: Pins) -> Iterator[tuple[int, int, int, int]]:
    """(tp, pp, dp, cp) that use the whole cluster and can hold the model's shape."""
    world, node = estimator.cluster.world, estimator.cluster.node.count
    for tp in [pins.tp] if pins.tp else divisors(world):
        if world % tp or why_not_tp(estimator.model, tp) or (pins.tp is None and tp > TP_NODES * node):
            continue
        if pins.sequence_parallel and tp == 1:
            continue
        for pp in [pins.pp] if pins.pp else divisors(world // tp):
            if (world // tp) % pp or pp > estimator.model.layers:
                continue
            for cp in _contexts(estimator, world // tp // pp, pins):
                dp = world // tp // pp // cp
                if pins.zero and (dp * cp == 1 or dp % (pins.zero_group or dp)):
                    continue
                if pins.dp in (None, dp) and _shared(estimator, tp, dp, cp, pins):
                    yield tp, pp, dp, cp


def _contexts(estimator: Estimator, ranks: int, pins: Pins) -> list[int]:
    """Ranks that may share a sequence: none but of long ones, where nobody has fixed it."""
    if pins.cp:
        return [pins.cp] if ranks % pins.cp == 0 and pins.cp <= estimator.context else []
    return [cp for cp in divisors(ranks) if cp == 1 or (cp <= CP_MOST and estimator.context >= LONG_CONTEXT)]


def _shared(estimator: Estimator, tp: int, dp: int, cp: int, pins: Pins) -> list[tuple[int, int, ContextExchange]]:
    """How many ranks may share out experts, how many of tp each, and how those that share sequences may exchange.
    Where ranks of tp have whole experts, all of them have different ones, unless that is fixed."""
    model, exchanges = estimator.model, cp_exchanges(estimator.model, tp, cp)
    in_fp8: dict[str, Any] = {"precision": pins.precision or "bf16", "fp8_scales": pins.fp8_scales or "tensor"}
    whole = [1] if model.experts and tp > 1 and pins.sequence_parallel is not False else []
    spreads = []
    for expert_tp in [0, *whole] if pins.expert_tp is None else [pins.expert_tp]:
        most = max(1, EP_NODES * estimator.cluster.node.count // (expert_tp or tp))
        eps = divisors(dp * cp * tp // (expert_tp or tp)) if model.experts else [1]
        eps = [pins.ep] if pins.ep else [ep for ep in eps if ep <= most]
        spreads += [(ep, expert_tp) for ep in eps if not expert_tp or pins.expert_tp or ep % tp == 0]
    return [
        (ep, expert_tp, how)
        for ep, expert_tp in spreads
        for how in ([pins.cp_exchange] if pins.cp_exchange else exchanges)
        if why_not(
            model,
            ParallelPlan(
                tp=tp, dp=dp, cp=cp, ep=ep, cp_exchange=how, expert_tp=expert_tp, sequence_parallel=tp > 1, **in_fp8,
            ),
        ) is None
    ]  # fmt: skip


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _microbatches(per_replica: int, pins: Pins) -> list[int]:
    if pins.accumulation is not None:
        if per_replica % pins.accumulation:
            return []
        only = per_replica // pins.accumulation
        return [only] if pins.microbatch in (None, only) else []
    if pins.microbatch:
        return [] if per_replica % pins.microbatch else [pins.microbatch]
    return divisors(per_replica)


def _schedules(layers: int, pp: int, accumulation: int, pins: Pins) -> list[tuple[str, int]]:
    """Names, and chunks per stage for those that leave it open."""
    if pp == 1:
        name = pins.schedule or "1f1b"
        return [] if find(name).interleaves or (pins.interleave or 1) > 1 else [(name, 1)]
    named = []
    for name in [pins.schedule] if pins.schedule else searched():
        schedule = find(name)
        if schedule.why_not(pp, accumulation):
            continue
        wanted = [
            number
            for number in _choices(pins.interleave, schedule.interleaves or (1,))
            if (number > 1) == bool(schedule.interleaves)
        ]
        named += [(name, number) for number in wanted if schedule.placement(pp, number).chunks <= layers]
    return named


def _recomputes(attention: str) -> list[Recompute]:
    # A fused kernel keeps no scores: there is nothing for selective recomputation to drop.
    return [r for r in get_args(Recompute) if attention == "materialized" or r != "selective"]


def _choices(pinned: Any, all_of_them: tuple[Any, ...]) -> tuple[Any, ...]:
    return all_of_them if pinned is None else (pinned,)


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


# ---- when there is nothing -------------------------------------------------------------------------------------


def why_nothing(estimator: Estimator, batch: int, pins: Pins) -> str:
    """Why no layout exists under these pins, in the order a reader would check."""
    model, world = estimator.model, estimator.cluster.world
    tp, pp = pins.tp or 1, pins.pp or 1
    if pins.tp and (reason := why_not_tp(model, pins.tp)):
        return reason
    if pins.ep and pins.ep > 1 and (reason := why_not_ep(model, pins.ep)):
        return reason
    if pins.sequence_parallel and pins.tp == 1:
        return "sequence_parallel splits the sequence over tp ranks and tp is 1"
    if pp > model.layers:
        return f"pp is {pp} and the model has {model.layers} layers: a stage needs at least one"
    schedule = find(pins.schedule or ("interleaved" if (pins.interleave or 1) > 1 else "1f1b"))
    interleave = pins.interleave or min(schedule.interleaves, default=1)
    chunks = schedule.placement(pp, interleave).chunks
    if chunks > model.layers:
        words = f"interleave {interleave}" if schedule.interleaves else f"{chunks // pp} chunks of {schedule.name}"
        return f"pp {pp} x {words} is {chunks} chunks and the model has {model.layers} layers"
    if schedule.interleaves and pins.pp == 1:
        return f"schedule is {schedule.name} and pp is 1: one stage has nothing to interleave"
    if pins.dp and pins.tp and pins.pp and not pins.cp and pins.dp * tp * pp != world:
        return f"dp {pins.dp} x tp {tp} x pp {pp} is {pins.dp * tp * pp} ranks, the cluster has {world}"
    fixed = tp * pp * (pins.dp or 1) * (pins.cp or 1)
    if world % fixed:
        named = " x ".join(f"{name} {value}" for name in ("dp", "tp", "pp", "cp") if (value := getattr(pins, name)))
        return f"{named} is {fixed} ranks, which do not divide the cluster's {world}"
    dps = sorted({dp for _, _, dp, _ in meshes(estimator, pins)})
    if not dps and pins.zero and not pins.zero_group:
        fixed = pins.describe()
        return f"ZeRO shares among replicas and {world} ranks with {fixed} leave one: fix zero=0"
    if not dps and pins.zero:
        return f"zero_group is {pins.zero_group} and no dp of {world} ranks is a multiple of it: leave it out"
    if not dps and (pins.ep or 1) > 1:
        others = {ep: Pins(**vars(pins) | {"ep": ep}) for ep in divisors(model.experts)[1:]}
        eps = (ep for ep, other in others.items() if any(meshes(estimator, other)))
        near = min(eps, key=lambda ep: abs(ep - (pins.ep or 1)), default=0)
        words = f"ep is {pins.ep} and no dp x cp of {world} ranks with {pins.describe()} is a multiple of it"
        return words + f": fix ep={near}" * bool(near)
    if not dps:
        return f"no split of {world} ranks suits {model.heads} heads and {model.layers} layers"
    good = [dp for dp in dps if batch % dp == 0]
    if not good:
        return (
            f"a batch of {batch} sequences does not divide over dp {_either(dps)}: try --batch "
            f"{-(-batch // dps[0]) * dps[0]}"
        )
    per_replica = batch // good[0]
    if not any(_microbatches(batch // dp, pins) for dp in good):
        asked = f"accumulation {pins.accumulation}" if pins.accumulation else f"microbatch {pins.microbatch}"
        if pins.accumulation and pins.microbatch:
            asked += f" x microbatch {pins.microbatch}"
        return f"{asked} does not make up the {per_replica} sequences of a replica (batch {batch}, dp {good[0]})"
    if schedule.microbatches(max(pp, 2)) != (1, 1):
        most = max(sum(divmod(batch // dp, pins.microbatch or 1)) for dp in good)
        reason = schedule.why_not(pp, most) if pp > 1 else None
        return f"no split of batch {batch} suits {schedule.name}: " + (
            reason or f"it takes microbatches in groups{f' of {pp}' if pp > 1 else ' of pp'}"
        )
    return f"nothing is left of {world} ranks under {pins.describe()}"


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values[:4])) + (" or more" if len(values) > 4 else "")
