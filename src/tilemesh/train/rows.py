"""A run's rows: what the planner said before it (`predict.py`), what was measured, what the machine allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilemesh.core.energy import modelled_watts
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import Device, parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.program import chunk_layers, recomputed_layers
from tilemesh.core.units import format_bytes
from tilemesh.measure.machine import stamp
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.operations import hardware_flops, model_flops
from tilemesh.model.work.weights import shard_parameters
from tilemesh.plan.constants import IDLE_POWER
from tilemesh.plan.memory import rank_state_bytes, state_bytes
from tilemesh.plan.prediction import mfu_words
from tilemesh.plan.speed import sent_share
from tilemesh.runs.kind import ALIGN
from tilemesh.train.predict import calibrated_peak, products_of

TAKING_TURNS = (
    "ranks outnumber cores: a rank's wait for another's turn on its core is measured as exchange and predicted as "
    "computing; the step time has both"
)
_NO_PEER = "a run has no peer of its own: see `tilemesh bench train`"
_NO_STEP = "too few steps: the first ones and those with a checkpoint do not count"


def rows(summary: Mapping[str, Any], predicted: Mapping[str, Any]) -> list[Row]:
    """Step time, throughput, MFU, HFU, exchange share, peak memory and energy of a run's summary."""
    model, plan = ModelConfig(**summary["model"]), ParallelPlan(**summary["plan"])
    context, batch = int(summary["context"]), int(summary["batch"])
    flops = model_flops(model, batch, context)
    repeated = recomputed_layers(plan, chunk_layers(plan, model.layers)) / model.layers
    done_flops = hardware_flops(model, batch, context, plan.repeated, repeated)
    peak, why_no_peak = calibrated_peak(summary)
    if summary.get("lora"):
        peak, why_no_peak = None, "the FLOPs of a step with adapters beside frozen weights are not counted"
    if summary.get("kind") == ALIGN.name:
        peak, why_no_peak = None, "answers do not fill the context: the FLOPs of such a step are not counted"
    step = None if summary["step_time_s"] is None else Sample(**summary["step_time_s"])
    tokens = float(summary.get("tokens_per_step", batch * context))  # without padding
    limit_s = None if peak is None else flops / peak
    case = _case(summary, plan)

    def row(
        name: str,
        unit: str,
        guess: float | None,
        measured: Sample | None,
        limit: float | None = None,
        missing: Mapping[str, str] | None = None,
        between: Sequence[float] | None = None,
    ) -> Row:
        reasons = {"peers": _NO_PEER, **(missing or {})}
        if guess is None:
            reasons.setdefault("predicted", str(predicted.get("missing", "no prediction was made before the run")))
        if measured is None:
            reasons.setdefault("measured", _NO_STEP)
        if limit is None:
            reasons.setdefault("limit", why_no_peak)
        return Row(
            name=name, case=case, unit=unit, predicted=guess, measured=measured, limit=limit, missing=reasons,
            predicted_range=None if between is None or guess is None else (between[0], between[1]), **stamp(),
        )  # fmt: skip

    ranges = predicted.get("ranges", {})
    between_s = ranges.get("step_time_s")
    guess_s = predicted.get("step_time_s")
    guess_rate, rate = guess_s and tokens / guess_s, step and step.rate(tokens)
    limit, between = limit_s and tokens / limit_s, between_s and [tokens / between_s[1], tokens / between_s[0]]
    run_rows = [
        row("step time", "s", guess_s, step, limit_s, None, between_s),
        row("throughput", "tokens/s", guess_rate, rate, limit, None, between),
    ]
    # Of the same peak as what was measured: the planner's own fraction is of the peak of the cores that it counts,
    # which on a CPU with fewer ranks than cores is another one.
    full = None if summary.get("lora") or summary.get("kind") == ALIGN.name else _datasheet_peak(summary) or peak
    limit = None if peak is None or full is None else peak / full
    for name, count in (("MFU", flops), ("HFU", done_flops)):
        guess = None if guess_s is None or full is None else count / (guess_s * full)
        value = None if step is None or full is None else step.rate(count).scaled(1 / full)
        missing = {"measured": why_no_peak} if step is not None and value is None else {}
        run_rows.append(row(name, "fraction", guess, value, limit, missing))
    if summary["world"] > 1:
        share, guess = Sample.of([least_exchange_share(summary)]), predicted.get("exchange_share")
        missing = {"limit": "depends on the layout"}
        if int(summary["world"]) > int(summary["cores"]):
            guess, missing = None, {**missing, "predicted": TAKING_TURNS}
        run_rows.append(row("exchange share", "fraction", guess, step and share, None, missing))
    guess, missing = predicted.get("memory_bytes"), {"limit": _least(summary)}
    between = ranges.get("memory_bytes")
    run_rows.append(row("peak memory per rank", "B", guess, _grown(summary), None, missing, between))
    joules, guess = summary.get("joules_per_step"), _expected_joules(summary, predicted)
    missing = {"limit": "no least energy of a step is known"}
    if guess is None and guess_s is not None:
        missing["predicted"] = "no power is known of this device"
    if joules is None:
        missing["measured"] = str(summary.get("energy_source", "not measured"))
    for name, parts in (("energy per step", 1.0), ("energy per token", tokens)):
        sample = None if joules is None else Sample.of([float(joules) / parts])
        run_rows.append(row(name, "J", guess and guess / parts, sample, None, missing))
    return run_rows


def module_rows(summary: Mapping[str, Any], predicted: Mapping[str, Any]) -> list[Row]:
    """Step time, bytes that a rank sends in a step and peak memory of a run that trains a module."""
    plan, step = summary["plan"], summary["step_time_s"] and Sample(**summary["step_time_s"])
    case = {**plan, "ranks": summary["world"], "cores": summary["cores"]}
    exchanges = [(plan[axis], *each) for axis in ("dp", "tp") for each in summary["exchanges"].get(axis, {}).items()]
    sent = sum(sent_share(name, ranks) * nbytes for ranks, name, nbytes in exchanges)
    counted = None if "pp" in plan else Sample.of([sent])  # a stage's own communicators are none of the mesh's
    figures = (
        ("step time", "s", "step_time_s", step, predicted.get("limit_s")),
        ("sent per rank", "B", "sent_bytes", counted, None),
        ("peak memory per rank", "B", "memory_bytes", _grown(summary), None),
    )
    why = {"predicted": str(predicted.get("missing", "it is not predicted of a module")), "measured": _NO_STEP}
    why |= {"limit": "it depends on the placement", "peers": _NO_PEER}

    def row(name: str, unit: str, key: str, measured: Sample | None, limit: float | None) -> Row:
        guess = predicted.get(key)
        values = {"predicted": guess, "measured": measured, "limit": limit}
        missing = {column: words for column, words in why.items() if values.get(column) is None}
        if key == "sent_bytes" and measured is None:
            missing["measured"] = "what ranks of a stage exchange is not counted"
        return Row(
            name=name, case=case, unit=unit, predicted=guess, measured=measured, limit=limit, missing=missing, **stamp()
        )

    return [row(*figure) for figure in figures]


def _expected_joules(summary: Mapping[str, Any], predicted: Mapping[str, Any]) -> float | None:
    """Of a step on GPUs of known power: idle while they exchange, at their limit while they compute."""
    seconds, gpu = predicted.get("step_time_s"), _known_gpu(summary)
    if seconds is None or gpu is None or not gpu.power_w:
        return None
    busy = 1 - float(predicted.get("exchange_share") or 0.0)
    return float(seconds) * int(summary["world"]) * modelled_watts(gpu.power_w, busy, IDLE_POWER)


def _grown(summary: Mapping[str, Any]) -> Sample:
    """What the process itself takes (the interpreter, torch) is not the model's: the planner knows nothing of it
    either."""
    pairs = zip(summary["peak_memory_bytes"], summary["memory_baseline_bytes"], strict=True)
    return Sample.of([float(max(most - baseline for most, baseline in pairs))])


def _least(summary: Mapping[str, Any]) -> str:
    """What a layout must keep is no limit that a run could come close to: activations and temporaries come on top."""
    if summary.get("lora"):
        return "frozen weights need neither gradients nor optimizer states; activations have no lower bound"
    plan = ParallelPlan(**{**summary["plan"], "chunk_layers": ()})
    model, kept_share = ModelConfig(**summary["model"]), float(summary.get("kept_share", 1.0))
    kept = format_bytes(least_bytes(model, plan, kept_share=kept_share))
    return f"weights, gradients and optimizer states alone take {kept} per rank; activations have no lower bound"


def run_mfu_words(summary: Mapping[str, Any], run_rows: Sequence[Row]) -> str:
    """How the MFU of a run's rows counts attention, and what it would be by the other common count; nothing where
    there is no MFU. Of the rows' own peak: a page may be made where another calibration is."""
    measured = next((row.measured for row in run_rows if row.name == "MFU"), None)
    if measured is None:
        return ""
    return mfu_words(measured.median, ModelConfig(**summary["model"]), int(summary["context"]))


def least_exchange_share(summary: Mapping[str, Any]) -> float:
    """Of a step, what the rank that waited least spent in collectives.

    The planner predicts the exchange itself, as if all ranks came to it together. A rank that comes early is in the
    collective for longer, waiting; whoever comes last is there for the exchange alone, or nearly.
    """
    ranks = [rank for rank in summary.get("ranks") or () if rank["step_s"] > 0 and not rank.get("is_server")]
    if not ranks:
        return float(summary["shares"]["exchange"] + summary["shares"]["idle"])
    return min(1.0, *(float(rank["exchange_s"] + rank["idle_s"]) / float(rank["step_s"]) for rank in ranks))


def layout_case(plan: ParallelPlan) -> dict[str, Any]:
    """What sets a layout apart from others; what is off is left out."""
    laid: dict[str, Any] = {"dp": plan.dp, "tp": plan.tp}
    if plan.pp > 1:
        laid |= {"pp": plan.pp, "schedule": plan.schedule_name}
    if plan.cp > 1:
        laid |= {"cp": plan.cp, "exchange": plan.cp_exchange}
    if plan.ep > 1:
        laid["ep"] = plan.ep
    if plan.routes_apart:
        laid["expert_tp"] = plan.expert_tp
    if plan.zero:
        laid["zero"] = plan.zero
    return laid


def _case(summary: Mapping[str, Any], plan: ParallelPlan) -> dict[str, Any]:
    """The same of a run."""
    laid = layout_case(plan)
    if summary.get("force_balance"):
        laid["routing"] = "forced balance"
    if servers := summary.get("method", {}).get("servers"):
        laid["servers"] = len(servers)
    names = {"ranks": "world", "cores": "cores", "batch": "batch", "context": "context"}
    return {**laid, "precision": plan.precision} | {name: int(summary[key]) for name, key in names.items()}


def _datasheet_peak(summary: Mapping[str, Any]) -> float | None:
    """FLOP/s of all GPUs of a run by their datasheet, which MFU and HFU are fractions of; None for one that has none.

    So the planner has them too. A CPU's peak is what was measured.
    """
    gpu = _known_gpu(summary)
    peak = None if gpu is None else gpu.peak_flops_per_s.get(products_of(summary).peak_dtype)
    return None if peak is None else peak * int(summary["world"])


def _known_gpu(summary: Mapping[str, Any]) -> Device | None:
    """The GPU of a run; None for a CPU and for one whose figures are not known."""
    try:
        return None if summary["device"] == "cpu" else parse_cluster(str(summary["cluster"])).device
    except UsageError:
        return None


def least_bytes(
    model: ModelConfig, plan: ParallelPlan, adapters: int = 0, share: float = 1.0, kept_share: float = 1.0
) -> int:
    """What a rank must keep whatever it does: its weights, their gradients, the optimiser's state.

    With a pipeline those of the first stage. `adapters`: numbers of them, which alone are trained where there are some,
    over weights that take this `share` of the bytes of dense ones; `kept_share`: of AdamW's state, the optimiser's.
    """
    layers = plan.chunk_layers[0] if plan.chunk_layers else -(-model.layers // plan.pp)
    parameters = shard_parameters(model, plan.tp, plan.ep, plan.expert_tp).held(
        layers, True, plan.pp == 1, *model.dense_of((layers,))
    )
    weights, *others = rank_state_bytes(plan, parameters)
    if adapters:
        own = state_bytes(-(-adapters // (plan.tp * plan.pp)), plan.precision, plan.zero, plan.zero_ranks)
        weights, others = round(share * weights) + own[0], [*own[1:]]
    return weights + others[0] + round(kept_share * others[1])
