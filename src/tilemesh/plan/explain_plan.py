"""The arithmetic of a layout, shown: memory of the fullest rank, the step's seconds, utilisation, scaling, roofline."""

from __future__ import annotations

import dataclasses

from tilemesh.core.cost import Ceiling
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step import pace
from tilemesh.core.step.memory import StepBytes, memory_peaks
from tilemesh.core.units import format_bytes, format_rate, format_seconds
from tilemesh.model.work.kept import loss_tensors
from tilemesh.model.work.operations import layer_work
from tilemesh.model.work.passes import MemoryPass
from tilemesh.model.work.task import STATE_BYTES
from tilemesh.model.work.weights import RankParameters
from tilemesh.plan.choose import SearchResult
from tilemesh.plan.explain import ExplainedFigure, ExplainedPart, activation_section, flops_section
from tilemesh.plan.offload import host_rates
from tilemesh.plan.prediction import Prediction
from tilemesh.plan.speed import speed_of
from tilemesh.plan.step import Estimator


def plan_sections(result: SearchResult) -> list[ExplainedPart]:
    """What the best plan's figures are made of."""
    best = result.best
    estimator = result.estimator()
    return [
        flops_section(result.model, best.plan.batch, result.context, best.plan.repeated),
        activation_section(result.model, estimator.room.task(best.plan), best.plan.repeated),
        memory_section(estimator, best),
        bubble_section(best),
        time_section(estimator, best),
        utilisation_section(result, best),
        *([scaling_section(best)] if best.plan.world > 1 else []),
        roofline_section(estimator, best.plan),
    ]


def memory_section(estimator: Estimator, best: Prediction) -> ExplainedPart:
    """The fullest rank: which stage it is on, and its terms."""
    plan, room, model = best.plan, estimator.room, estimator.model
    stages = [stage.total_bytes for stage in room.stages(plan, best.chunk_layers)]
    stage = stages.index(max(stages))
    mine = plan.placement.held[stage] if plan.pp > 1 else (0,)
    first, last = mine[0] == 0, mine[-1] == len(best.chunk_layers) - 1
    kept, recomputed = room.layers(plan)[0]
    layers, dense = (
        sum(each[chunk] for chunk in mine) for each in (best.chunk_layers, model.dense_of(best.chunk_layers))
    )
    shards = room.shards(plan)
    held = shards.held(layers, first, last, dense)
    parameters = held.total
    ends = " + embeddings" * first + " + head" * last + f", {dense} layers without experts" * bool(dense)
    rows = [
        ExplainedFigure(
            "parameters P",
            f"layers x a layer's share{ends}",
            f"{layers} x {shards.layer:,} + {parameters - layers * shards.layer:,}",
            f"{parameters:,}",
        )
    ]
    # ZeRO divides by its ranks: the optimizer from stage 1 on, gradients from 2, weights from 3.
    names = ("weights", "gradients", "optimizer")
    for name, size, sharded_from in zip(names, STATE_BYTES[plan.precision], (3, 2, 1), strict=True):
        sharded = plan.zero >= sharded_from and plan.zero_ranks > 1
        value: int = getattr(best.memory, f"{name}_bytes")
        there = size * (held.stored(plan) if sharded else parameters)
        rest = value - there  # copies of an asynchronous pipeline, or what is not on the device at the fullest moment
        sign = "+-"[rest < 0]
        rows.append(
            ExplainedFigure(
                name,
                f"{size} B x P" + " / ranks of ZeRO" * sharded + f" {sign} copies and moved" * bool(rest),
                f"{size} x "
                + _shared_out(held, plan) * sharded
                + f"{parameters:,}" * (not sharded)
                + f" {sign} {abs(rest):,}" * bool(rest),
                format_bytes(value),
            )
        )
    task = estimator.room.task(plan)
    logits, *others = loss_tensors(model, task)
    loss_ends = sum(tensor.nbytes for tensor in others)
    rows += [
        ExplainedFigure(
            "activations",
            "most alive between two actions",
            f"stage {stage} of {plan.pp}, {layers} layers, {kept:,} B per layer and microbatch",
            format_bytes(best.memory.activations_bytes),
        ),
        ExplainedFigure(
            "logits",
            f"{logits.element_bytes} B x {logits.formula}, last stage" + " + its ends" * bool(loss_ends),
            (f"{logits.element_bytes} x {logits.elements:,}" + f" + {loss_ends:,}" * bool(loss_ends))
            if last
            else "not the last stage",
            format_bytes(best.memory.logits_bytes),
        ),
        ExplainedFigure(
            "working",
            "recomputed layer + gathered + cast copies",
            f"{recomputed:,} + {best.memory.working_bytes - recomputed:,} B",
            format_bytes(best.memory.working_bytes),
        ),
        ExplainedFigure(
            "reserved", "context, libraries, allocator", "assumed", format_bytes(best.memory.reserved_bytes)
        ),
        *(
            [
                ExplainedFigure(
                    "not yet there",
                    "gradients, at the loss",
                    "one microbatch",
                    f"-{format_bytes(best.memory.later_bytes)}",
                )
            ]
            if best.memory.later_bytes
            else []
        ),
        ExplainedFigure(
            "total",
            "sum",
            "",
            f"{format_bytes(best.memory.total_bytes)} of {format_bytes(best.usable_bytes)} usable",
        ),
    ]
    return ExplainedPart("Memory of the fullest GPU", rows)


def bubble_section(best: Prediction) -> ExplainedPart:
    plan = best.plan
    v, m, p, bubble = plan.interleave, plan.accumulation, plan.pp, plan.pipeline.bubble
    rows = [
        ExplainedFigure(
            "bubble of the schedule",
            bubble.formula if bubble else "simulated, F = I = W",
            f"p = {p}, m = {m}" + (f", v = {v}" if v > 1 else ""),
            f"{best.bubble_fraction:.2%}",
        )
    ]
    if p > 1:
        program = pace.program_for_memory(plan.schedule, p, m, v)
        held = memory_peaks(program, StepBytes.activations(program.chunks, 1.0, 1.0))  # from F to W
        rows.append(
            ExplainedFigure(
                "passes in flight",
                "first and last stage",
                f"{plan.schedule_name}",
                f"{held[0]:g} and {held[-1]:g} of a chunk",
            )
        )
    return ExplainedPart("Pipeline", rows)


def _shared_out(held: RankParameters, plan: ParallelPlan) -> str:
    """What ZeRO leaves of a rank's parameters, in words."""
    if not held.experts:
        return f"{held.common:,} / {plan.zero_ranks}"
    return f"({held.common:,} / {plan.zero_ranks} + {held.experts:,} of experts / {plan.expert_zero_ranks})"


def time_section(estimator: Estimator, best: Prediction) -> ExplainedPart:
    """Each part with what it is made of: m microbatches, n layers on the busiest stage."""
    plan, times, (n, dense) = best.plan, best.times, estimator.busiest_layers(best.plan)
    layers = estimator.clock.layers(plan, n, dense)
    ways = len(plan.placement.directions) if plan.pp > 1 else 1
    m, compute, back = plan.accumulation / ways, layers.forward_s / n, layers.backward_s / n
    hop_s = estimator.chunk_times(plan).hop_s
    ends = times.compute_s / m - n * (compute + back)
    tp, tp_back = layers.axes["tp"].forward_s / n, layers.axes["tp"].back_s / n
    tp_ends = times.tp_s / m - n * (tp + tp_back)
    updated, moved = estimator.updated_parameters(plan), estimator.optimizer_bytes(plan)
    rows = [
        ExplainedFigure(
            "compute",
            "m (n (forward + backward) + ends)",
            f"{m:g} x ({n} x ({format_seconds(compute)} + {format_seconds(back)}) + {format_seconds(ends)})",
            format_seconds(times.compute_s),
        ),
        ExplainedFigure(
            "recomputation",
            "m n (what is done again)",
            f"{m:g} x {n} x {format_seconds(times.recompute_s / m / n)}",
            format_seconds(times.recompute_s),
        ),
        ExplainedFigure(
            "tensor-parallel exchanges",
            "m (n (forward + backward [+ forward]) + ends)",
            f"{m:g} x ({n} x ({format_seconds(tp)} + {format_seconds(tp_back)}) + {format_seconds(tp_ends)})",
            format_seconds(times.tp_s),
        ),
        ExplainedFigure(
            "sending between stages",
            "m x messages x one",
            f"{m:g} x {round(times.pp_s / m / hop_s) if times.pp_s else 0} x {format_seconds(hop_s)}",
            format_seconds(times.pp_s),
        ),
        ExplainedFigure(
            "bubble and waiting",
            "simulated - busy",
            f"{plan.schedule_name}, {plan.pp} stages",
            format_seconds(times.bubble_s),
        ),
        ExplainedFigure(
            "data-parallel exchange",
            "not hidden + what hiding costs",
            f"{format_bytes(best.traffic['dp'])} sent a rank",
            format_seconds(times.dp_s),
        ),
        ExplainedFigure(
            "optimizer",
            "bytes per parameter x parameters updated / bandwidth",
            f"{moved} x {updated:,} / {format_rate(moved * updated / times.optimizer_s, 'B/s')}",
            format_seconds(times.optimizer_s),
        ),
        ExplainedFigure(
            "moving to the host",
            "bytes / link, what no pass hides",
            f"{format_bytes(host_rates(estimator.cluster.device, estimator.rates).both)}/s each way",
            format_seconds(times.offload_s),
        ),
        ExplainedFigure(
            "waiting for the host", "its launches - all of the above", "calibrated", format_seconds(times.host_s)
        ),
        *(
            ExplainedFigure(
                words,
                "m n (forward + backward [+ forward])",
                f"{m:g} x {n} x {format_seconds(seconds / m / n)}",
                format_seconds(seconds),
            )
            for words, seconds in (("exchange of sequences", times.cp_s), ("rows to experts and back", times.ep_s))
        ),
    ]
    shown = [row for row in rows if row.value != "0 s"]
    whole = [
        row._replace(value=f"{row.value}, {value / best.step_time_s:.1%}")
        for row, value in zip(rows, dataclasses.astuple(times), strict=True)
        if row in shown
    ]
    whole.append(ExplainedFigure("step", "sum", "", f"{best.step_time_s:.4g} s, 100%"))
    return ExplainedPart("Where the step's time goes, on the busiest stage", whole)


def utilisation_section(result: SearchResult, best: Prediction) -> ExplainedPart:
    peak = result.cluster.device.peak(best.plan.peak_dtype)
    whole = f"{best.step_time_s:.4g} s x {best.plan.world} x {peak / 1e12:.4g} TFLOP/s"
    again = best.hardware_flops - best.model_flops
    ratio = best.hardware_flops / best.model_flops
    rows = [
        ExplainedFigure(
            "MFU", "model FLOPs / (step x ranks x peak)", f"{best.model_flops:.4g} / ({whole})", f"{best.mfu:.1%}"
        ),
        ExplainedFigure(
            "HFU", "all FLOPs / (step x ranks x peak)", f"{best.hardware_flops:.4g} / ({whole})", f"{best.hfu:.1%}"
        ),
        ExplainedFigure(
            "HFU / MFU", "1 + recomputed / model FLOPs", f"1 + {again:.4g} / {best.model_flops:.4g}", f"{ratio:.4f}"
        ),
    ]
    return ExplainedPart("Utilisation", rows)


def scaling_section(best: Prediction) -> ExplainedPart:
    """Amdahl and Gustafson with the step's own parts, for several ranks: what more do not shorten counts as serial."""
    n = best.plan.world
    useful = best.times.compute_s + best.times.recompute_s
    share = useful / best.step_time_s
    speedup = n * share
    serial = (1 / share - 1) / (n - 1)
    rows = [
        ExplainedFigure("working share", "compute / step", f"{useful:.4g} / {best.step_time_s:.4g}", f"{share:.1%}"),
        ExplainedFigure("speed-up over one rank", "n x share", f"{n} x {share:.4f}", f"{speedup:.1f}"),
        ExplainedFigure(
            "serial fraction f (Karp-Flatt)",
            "(1 / share - 1) / (n - 1)",
            f"(1 / {share:.6f} - 1) / {n - 1}",
            f"{serial:.2e}",
        ),
        ExplainedFigure(
            "Amdahl: this batch on any n",
            "1 / f at most",
            f"1 / {serial:.2e}",
            f"{1 / serial:,.1f}" if serial > 0 else "no bound",
        ),
        ExplainedFigure(
            "Gustafson: a batch that grows",
            "n - (1 - share) (n - 1)",
            f"{n} - {1 - share:.4f} x {n - 1}",
            f"{n - (1 - share) * (n - 1):.1f}",
        ),
    ]
    return ExplainedPart("Scaling", rows, "One rank is imagined with memory enough.")


def roofline_section(estimator: Estimator, plan: ParallelPlan) -> ExplainedPart:
    """The operations of one layer's forward pass, and on which side of the ridge each lies."""
    device = estimator.cluster.device
    dtype = plan.compute_dtype
    ridge = Ceiling.of_device(device).ridge(dtype)
    task = estimator.clock.task(plan)
    speed = speed_of(device, dtype, estimator.rates, task.code)
    rows = []
    for op in layer_work(estimator.model, task).forward:
        if isinstance(op, MemoryPass):
            side, intensity, shape = "memory", "0 (moves bytes only)", f"{op.nbytes:,} B"
        else:
            cost = op.cost
            side = "compute" if cost.intensity >= ridge else "memory"
            intensity, shape = f"{cost.intensity:.0f} FLOP/B", f"{cost.flops:.3g} FLOP / {cost.bytes_moved:.3g} B"
        rows.append(ExplainedFigure(op.name, shape, intensity, f"{side}, {format_seconds(speed.op_s(op))}"))
    peak, rate = format_rate(device.peak(dtype), "FLOP/s"), format_rate(device.memory_bytes_per_s, "B/s")
    return ExplainedPart(
        f"Roofline of a layer's forward pass on {device.name}: ridge at {peak} / {rate} = {ridge:.0f} FLOP/B", rows
    )
