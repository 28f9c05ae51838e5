"""Why this plan, in plain words, in the order a practitioner decides; and what the runner-up loses.

Order: does it fit on one device? Is the time acceptable? Then memory techniques, then splitting within a node, then
across nodes. Every sentence's numbers come from predictions.
"""

from __future__ import annotations

import dataclasses

from tilemesh.core.plan import ParallelPlan
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.model.work.routing import imbalance
from tilemesh.model.work.weights import cp_exchanges, is_wide_for_fp8, layer_matrices
from tilemesh.plan.choose import SearchResult
from tilemesh.plan.memory import Room, usable_bytes
from tilemesh.plan.prediction import Prediction

EQUAL = 0.02  # closer than this, two times are equal
SHORT_LAYER_S = 3e-3
"""Seconds of a layer's passes below which a host matters: on two H200's, torch launches one in 0.8 to 3.1 ms."""


def why(result: SearchResult) -> list[str]:
    """One sentence a decision."""
    best = result.best
    lines = [_one_device(result), _time(result, best), _memory_techniques(result, best)]
    lines += [_within_node(result, best), _experts(result, best), _sequences(result, best), _across(result, best)]
    lines += [_in_fp8(result, best), _host(result, best)]
    return [line for line in lines if line]


def runner_up(result: SearchResult) -> str:
    """What the second plan loses, by the parts of its step that are longer."""
    if len(result.predictions) < 2:
        return "there is no runner-up: nothing else fits" if not result.pins.describe() else ""
    best, second = result.predictions[:2]
    lost = second.step_time_s - best.step_time_s
    share = lost / best.step_time_s
    parts = []
    for field in dataclasses.fields(best.times):
        more = getattr(second.times, field.name) - getattr(best.times, field.name)
        if abs(more) > 0.02 * best.step_time_s * max(share, 0.05):
            parts.append((more, _PARTS[field.name]))
    parts.sort(key=lambda part: -abs(part[0]))
    words = ", ".join(
        f"{format_seconds(abs(more))} {'more' if more > 0 else 'less'} {name}" for more, name in parts[:3]
    )
    equal = " (equal within the model's accuracy)" if share < EQUAL else ""
    needed, now = (format_bytes(each.memory.total_bytes) for each in (second, best))
    return (
        f"the runner-up, {second.plan.short()}, loses {format_seconds(lost)} per step, {share:.1%}{equal}"
        + (f": {words}" if words else "")
        + (f"; it needs {needed} per GPU instead of {now}" if needed != now else f"; it needs {now} per GPU as well")
    )


_PARTS = {
    "compute_s": "compute",
    "recompute_s": "recomputation",
    "tp_s": "tensor-parallel exchange",
    "pp_s": "sending between stages",
    "bubble_s": "bubble",
    "dp_s": "data-parallel exchange",
    "optimizer_s": "optimizer",
    "offload_s": "moving to the host and back",
    "host_s": "waiting for the host",
    "cp_s": "exchange between ranks that share sequences",
    "ep_s": "rows to experts and back",
}


def _one_device(result: SearchResult) -> str:
    """Alone: the least one device could do with. A small model needs less without the code that recomputes."""
    plan, room = result.best.plan, Room(result.model, result.cluster, result.context, result.code)
    alone = ParallelPlan(accumulation=plan.batch, attention=plan.attention, precision=plan.precision)
    full = dataclasses.replace(alone, recompute="full")
    needs = [room.fullest(each, (result.model.layers,)) for each in (full, alone)]
    need = min(needs, key=lambda memory: memory.total_bytes)
    how = "with one sequence at a time" + (" and everything recomputed" if need is needs[0] else "")
    have = usable_bytes(result.cluster, result.headroom)
    dominant = need.dominant
    if need.total_bytes <= have:
        others = "" if plan.world == 1 else ", so the others are for speed"
        return (
            f"It fits on one {result.cluster.device.name}: {format_bytes(need.total_bytes)} of {format_bytes(have)} "
            f"{how}{others}."
        )
    return (
        f"One {result.cluster.device.name} is not enough: even {how} it "
        f"would need {format_bytes(need.total_bytes)} of its {format_bytes(have)}; {dominant} alone is "
        f"{format_bytes(getattr(need, f'{dominant}_bytes'))}."
    )


def _time(result: SearchResult, best: Prediction) -> str:
    device_s = best.model_flops / (best.mfu * best.peak_flops_per_s / best.plan.world)
    world = best.plan.world
    if world == 1:
        return f"A step takes {format_seconds(best.step_time_s)} at {best.mfu:.0%} of the peak."
    return (
        f"The step's {best.model_flops:.3g} FLOPs would take one such GPU {format_seconds(device_s)} at the same "
        f"utilisation; {world} take {format_seconds(best.step_time_s)}."
    )


def _memory_techniques(result: SearchResult, best: Prediction) -> str:
    plan, parts = best.plan, []
    free = best.usable_bytes - best.memory.total_bytes
    if plan.zero:
        sharded = ("optimizer states", "optimizer states and gradients", "optimizer states, gradients and weights")
        now = best.memory.weights_bytes + best.memory.gradients_bytes + best.memory.optimizer_bytes
        parts.append(
            f"ZeRO-{plan.zero} keeps 1/{plan.zero_ranks} of the {sharded[plan.zero - 1]} on each GPU"
            + (f" (1/{plan.expert_zero_ranks} of its experts')" if plan.ep > 1 else "")
            + ": "
            f"{format_bytes(now)} of states instead of {format_bytes(_unsharded(result, best))}"
        )
    if plan.recompute == "none":
        parts.append("nothing is recomputed" + (", as fixed" if result.pins.recompute else ", as the activations fit"))
    else:
        parts.append(
            f"{plan.recompute} recomputation costs {best.times.recompute_s / best.step_time_s:.1%} of the step, "
            + ("as fixed" if result.pins.recompute else "because with less it would not fit")
        )
    if plan.offloads:
        parts.append(_offloading(result, best))
    if plan.sequence_parallel:
        parts.append(f"sequence parallelism splits what tp leaves whole {plan.tp} ways at no extra bytes sent forward")
    text = "; ".join(parts)
    return f"Memory first: {text}; {format_bytes(free)} stay free." if free >= 0 else f"Memory first: {text}."


def _offloading(result: SearchResult, best: Prediction) -> str:
    """What offloading costs, and whether it pays: where nothing fits without it, or only something slower."""
    plan, estimator = best.plan, result.estimator()
    alone = dataclasses.replace(plan, offload="")
    small = dataclasses.replace(alone, microbatch=1, accumulation=plan.accumulation * plan.microbatch)
    full = (dataclasses.replace(layout, recompute="full") for layout in (alone, small))
    others = [estimator.predict(other) for other in dict.fromkeys((alone, small, *full))]
    saved = others[0].memory.total_bytes - best.memory.total_bytes
    cost = f"{format_seconds(best.times.offload_s)} ({best.times.offload_s / best.step_time_s:.1%}) of the step"
    if saved <= 0:
        what = " and ".join(plan.offloads)
        return f"moving {what} to the host saves nothing, as a CPU's memory is its host's, and costs {cost}"
    fitting = [other for other in others if other.fits]
    if not fitting:
        pays = "pays, as it would not fit otherwise"
    else:
        other = min(fitting, key=lambda prediction: prediction.step_time_s)
        how = "pays" if other.step_time_s > best.step_time_s else "does not pay"
        layout = f"microbatch {other.plan.microbatch}, recomputation {other.plan.recompute}"
        pays = f"{how}: without it ({layout}) a step takes {format_seconds(other.step_time_s)}"
    return (
        f"moving {' and '.join(plan.offloads)} to the host saves {format_bytes(saved)} and costs {cost}, which {pays}"
    )


def _in_fp8(result: SearchResult, best: Prediction) -> str:
    """What products in 8 bits would gain, or which of them those are."""
    if best.plan.precision == "fp8":
        scales, matrices = best.plan.fp8_scales, layer_matrices(result.model)
        narrow = [w.words for w in matrices if not is_wide_for_fp8(w.outputs, w.inputs, scales)]
        casts = f", {', '.join(narrow)} too, whose casts would take longer than their products save" if narrow else ""
        return f"In fp8 the layers' products take 8 bits; the head and attention stay in 16{casts}."
    if "fp8" not in result.cluster.device.peak_flops_per_s or best.plan.precision != "bf16-master":
        return ""
    fp8_s = result.estimator().step_s(dataclasses.replace(best.plan, precision="fp8"))
    gain = best.step_time_s / fp8_s
    return f"In fp8 this layout would take {format_seconds(fp8_s)} ({gain:.2f} times as fast; --fix precision=fp8)."


def _host(result: SearchResult, best: Prediction) -> str:
    """What of the host is in the figures: a GPU waits for it where steps are short."""
    if result.cluster.device.kind != "gpu":
        return ""
    host_s = result.estimator().host_s(best.plan)
    if host_s:
        launched = f"The host needs {format_seconds(host_s)} to launch a step"
        waits = format_seconds(best.times.host_s)
        return (
            f"{launched}: the GPU waits {waits} for it." if best.times.host_s else f"{launched}, while the GPU works."
        )
    if result.estimator().replays(best.plan):
        return ""
    ways = len(best.plan.placement.directions) if best.plan.pp > 1 else 1
    layer_s = best.step_time_s * ways / (best.plan.accumulation * result.estimator().busiest_layers(best.plan)[0])
    if layer_s > SHORT_LAYER_S:
        return ""
    return (
        f"Not in these figures: the host's time to launch a step, which `tilemesh calibrate` measures on the machine "
        f"itself. At {format_seconds(layer_s)} per layer the GPU may wait for it."
    )


def _microbatches(plan: ParallelPlan) -> str:
    return "1 microbatch" if plan.accumulation == 1 else f"{plan.accumulation} microbatches"


def _unsharded(result: SearchResult, best: Prediction) -> int:
    """States of the fullest rank of the same layout without ZeRO."""
    whole = dataclasses.replace(best.plan, zero=0, zero_group=0)
    memory = result.estimator().room.fullest(whole, best.chunk_layers)
    return memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes


def _within_node(result: SearchResult, best: Prediction) -> str:
    plan, node = best.plan, result.cluster.node
    if plan.tp == 1:
        if plan.world == 1:
            return ""
        if result.pins.tp:
            return "Within a node no layer is split: tp 1, as fixed."
        return "Within a node no layer is split (tp 1): its exchanges, two a layer and pass, would gain nothing."
    share = best.times.tp_s / best.step_time_s
    inside = plan.tp <= node.count
    where = f"inside a node over {node.intra.name}" if inside else f"across nodes over {node.inter.name}"
    return (
        f"{'Within a node' if inside else 'Beyond a node'}: tp {plan.tp} splits every layer {where}; each GPU sends "
        f"{format_bytes(best.traffic['tp'])} per step for it, {share:.1%} of the step's time."
    )


def _experts(result: SearchResult, best: Prediction) -> str:
    """Why experts are shared out, or why tp splits them instead."""
    plan, model = best.plan, result.model
    if not model.experts or plan.world == 1:
        return ""
    other = min((point for point in result.points if (point.layout.ep > 1) != (plan.ep > 1)), default=None)
    beside = "no layout without it fits" if plan.ep > 1 else "no layout that shares them out fits"
    if other is not None:
        how = "without it" if plan.ep > 1 else "with it"
        step_s = result.estimator().step_s(other.layout)  # simulated, as the best plan's is
        beside = f"{how} the quickest that fits, {other.layout.short()}, takes {format_seconds(step_s)}"
    if plan.ep == 1:
        part = plan.ranks_per_expert
        each = f"1/{part} of each" if part > 1 else "all of its layers' experts"
        return f"Experts are not shared out (ep 1): every GPU holds {each}, and no row travels; {beside}."
    ranks, estimator = plan.ranks_per_expert, result.estimator()
    split = "whole, so that their products stay wide" if ranks == 1 else f"1/{ranks} of each"
    busiest = imbalance(model, estimator.clock.task(plan))
    sent, share = best.traffic["ep"], best.times.ep_s / best.step_time_s
    span = plan.ep * plan.ranks_per_expert
    node = result.cluster.node
    where = f"inside a node over {node.intra.name}" if span <= node.count else f"across nodes over {node.inter.name}"
    told = "as told" if result.imbalance else "expected of random picks" if model.balance_loss else "expected of text"
    return (
        f"Experts: ep {plan.ep} puts {model.experts // plan.ep} of {model.experts} on each GPU, {split}; each sends "
        f"{format_bytes(sent)} of rows per step {where}, {share:.1%} of the step's time, and the busiest gets "
        f"{busiest:.3f} times the mean ({told}); {beside}."
    )


_EXCHANGED = {
    "ring": "keys and values come round",
    "gather": "keys and values of all are gathered at once",
    "heads": "each gets all tokens of some heads",
    "heads-ring": "neighbours share out heads, and their keys and values go round",
}


def _sequences(result: SearchResult, best: Prediction) -> str:
    plan, estimator = best.plan, result.estimator()
    if plan.cp == 1:
        return ""
    beside = []
    for how in cp_exchanges(result.model, plan.tp, plan.cp):
        other = dataclasses.replace(plan, cp_exchange=how)
        if how != plan.cp_exchange:
            fits = "" if estimator.fits(other) else " and does not fit"
            beside.append(f"{format_seconds(estimator.step_s(other))} by {how}{fits}")
    than = f"; the same layout takes {', '.join(beside)}" if beside else ""
    fixed = ", as fixed" if result.pins.cp_exchange else ""
    return (
        f"Sequences: cp {plan.cp} ranks share each one and keep 1/{plan.cp} of its activations; "
        f"{_EXCHANGED[plan.cp_exchange]} ({plan.cp_exchange}{fixed}), "
        f"{format_bytes(best.traffic['cp'])} sent per GPU and step, {best.times.cp_s / best.step_time_s:.1%} of the "
        f"step's time that attention does not hide{than}."
    )


def _across(result: SearchResult, best: Prediction) -> str:
    plan, parts = best.plan, []
    if plan.pp > 1:
        layers = [sum(best.chunk_layers[chunk] for chunk in held) for held in plan.placement.held]
        spread = f"{min(layers)} to {max(layers)} layers" if min(layers) != max(layers) else f"{layers[0]} layers"
        parts.append(
            f"pp {plan.pp} gives each stage {spread}; with {_microbatches(plan)} the {plan.schedule_name} schedule's "
            f"bubble is {best.bubble_fraction:.1%}, and {best.times.bubble_s / best.step_time_s:.1%} of the "
            "step is waiting in all"
        )
    if plan.dp > 1:
        parts.append(
            f"dp {plan.dp} replicas exchange {format_bytes(best.traffic['dp'])} per GPU and step, of which "
            f"{format_seconds(best.times.dp_s)} ({best.times.dp_s / best.step_time_s:.1%}) do not hide behind computing"
        )
    where = "Across nodes" if len(result.cluster.nodes) > 1 else "Across GPUs"
    return f"{where}: {'; '.join(parts)}." if parts else ""
