"""A run's rows: what the planner said before it (`predict.py`), what was measured, what the machine allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import LISTED, ParallelPlan
from tilemesh.core.step.book import is_listed
from tilemesh.core.step.program import chunk_layers, recomputed_layers
from tilemesh.core.units import format_bytes
from tilemesh.measure.machine import stamp
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.operations import hardware_flops, model_flops
from tilemesh.model.work.weights import count_parameters, shard_parameters
from tilemesh.plan.memory import state_bytes
from tilemesh.plan.prediction import mfu_words
from tilemesh.train.predict import calibrated_peak, compute_dtype

TAKING_TURNS = (
    "ranks outnumber cores: a rank's wait for another's turn on its core is measured as exchange and predicted as "
    "computing; the step time has both"
)
_STATES_DEPEND_ON = ("dp", "tp", "pp", "zero", "zero_group", "precision")
"""Fields of a plan that decide how many bytes a rank keeps from step to step."""
_NO_PEER = "a run has no peer of its own: see `tilemesh bench train`"


def rows(summary: Mapping[str, Any], predicted: Mapping[str, Any]) -> list[Row]:
    """Step time, throughput, MFU, HFU, exchange share and peak memory of a run's summary."""
    model = ModelConfig(**summary["model"])
    plan = summary["plan"]
    context, batch = int(summary["context"]), int(summary["batch"])
    flops = model_flops(model, batch, context)
    as_run = ParallelPlan(**plan)
    repeated = recomputed_layers(as_run, chunk_layers(as_run, model.layers)) / model.layers
    done_flops = hardware_flops(model, batch, context, as_run.repeated, repeated)
    peak, why_no_peak = calibrated_peak(summary)
    if summary.get("lora"):
        peak, why_no_peak = None, "the FLOPs of a step with adapters beside frozen weights are not counted"
    step = None if summary["step_time_s"] is None else Sample(**summary["step_time_s"])
    no_step = "too few steps: the first ones and those with a checkpoint do not count"
    why = str(predicted.get("missing", "no prediction was made before the run"))
    tokens = float(summary.get("tokens_per_step", batch * context))  # without padding
    limit_s = None if peak is None else flops / peak
    laid = {"dp": plan["dp"], "tp": plan["tp"]}
    laid |= (
        {"pp": plan["pp"], "schedule": LISTED if is_listed(plan["schedule"]) else plan["schedule"]}
        if plan.get("pp", 1) > 1
        else {}
    )
    laid |= {"zero": plan["zero"]} if plan.get("zero") else {}
    laid |= {"servers": len(servers)} if (servers := summary.get("method", {}).get("servers")) else {}
    case = {
        **laid, "precision": plan["precision"], "ranks": summary["world"],
        "cores": summary["cores"], "batch": batch, "context": context,
    }  # fmt: skip

    def row(
        name: str, unit: str, key: str | None, measured: Sample | None, limit: float | None, missing: Mapping[str, str]
    ) -> Row:
        guess = predicted.get(key) if key is not None else None
        reasons = {"peers": _NO_PEER, **missing}
        if guess is None:
            reasons.setdefault("predicted", why if key is not None else "follows from the step time")
        if measured is None:
            reasons["measured"] = no_step
        if limit is None:
            reasons.setdefault("limit", why_no_peak)
        return Row(
            name=name, case=case, unit=unit, predicted=guess, measured=measured, limit=limit, missing=reasons, **stamp()
        )

    share, shares_cores = least_exchange_share(summary), int(summary["world"]) > int(summary["cores"])
    # What the process itself takes (the interpreter, torch) is not the model's: the planner knows nothing of it either.
    pairs = zip(summary["peak_memory_bytes"], summary["memory_baseline_bytes"], strict=True)
    memory = max(peak - baseline for peak, baseline in pairs)
    told_s, whole = predicted.get("step_time_s"), None if summary.get("lora") else _datasheet_peak(summary) or peak
    predicted = {**predicted, "tokens_per_s": told_s and tokens / told_s}
    made = [
        row("step time", "s", "step_time_s", step, limit_s, {}),
        row("throughput", "tokens/s", "tokens_per_s", step and step.rate(tokens), limit_s and tokens / limit_s, {}),
    ]
    for name, key, count in (("MFU", "mfu", flops), ("HFU", "hfu", done_flops)):
        # Of the same peak as what was measured: the planner's own fraction is of the peak of the cores that it counts,
        # which on a CPU with fewer ranks than cores is another one.
        predicted[key] = None if told_s is None or whole is None else count / (told_s * whole)
        value = None if step is None or whole is None else step.rate(count).scaled(1 / whole)
        made.append(row(name, "fraction", key, value, None if peak is None or whole is None else peak / whole, {}))
        if value is None and step is not None:
            made[-1] = _without_measured(made[-1], why_no_peak)
    if summary["world"] > 1:
        measured_share = None if step is None else _exact(share)
        made.append(
            row(
                "exchange share", "fraction", None if shares_cores else "exchange_share", measured_share, None,
                {"limit": "depends on the layout"} | ({"predicted": TAKING_TURNS} if shares_cores else {}),
            )
        )  # fmt: skip
    # What a layout must keep is no limit that a run could come close to: activations and temporaries come on top.
    kept = format_bytes(
        least_bytes(model, ParallelPlan(**{name: plan[name] for name in _STATES_DEPEND_ON if name in plan}))
    )
    least = f"weights, gradients and optimizer states alone take {kept} per rank; activations have no lower bound"
    if summary.get("lora"):
        least = "frozen weights need neither gradients nor optimizer states; activations have no lower bound"
    made.append(row("peak memory per rank", "B", "memory_bytes", _exact(memory), None, {"limit": least}))
    return made


def run_mfu_words(summary: Mapping[str, Any], made: Sequence[Row]) -> str:
    """How the MFU of a run's rows counts attention, and what it would be by the other common count; nothing where
    there is no MFU. Of the rows' own peak: a page may be made where another calibration is."""
    measured = next((row.measured for row in made if row.name == "MFU"), None)
    if measured is None:
        return ""
    model, batch, context = ModelConfig(**summary["model"]), int(summary["batch"]), int(summary["context"])
    by_six = 6 * count_parameters(model).total * batch * context
    return mfu_words(measured.median * by_six / model_flops(model, batch, context))


def least_exchange_share(summary: Mapping[str, Any]) -> float:
    """Of a step, what the rank that waited least spent in collectives.

    The planner predicts the exchange itself, as if all ranks came to it together. A rank that comes early is in the
    collective for longer, waiting; whoever comes last is there for the exchange alone, or nearly.
    """
    ranks = [rank for rank in summary.get("ranks") or () if rank["step_s"] > 0 and not rank.get("is_server")]
    if not ranks:
        return float(summary["shares"]["exchange"] + summary["shares"]["idle"])
    return min(1.0, *(float(rank["exchange_s"] + rank["idle_s"]) / float(rank["step_s"]) for rank in ranks))


def _without_measured(row: Row, why: str) -> Row:
    fields = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return Row(**{**fields, "missing": {**row.missing, "measured": why}})


def _exact(value: float) -> Sample:
    return Sample(float(value), float(value), float(value), 1)


def _datasheet_peak(summary: Mapping[str, Any]) -> float | None:
    """FLOP/s of all GPUs of a run by their datasheet, which MFU and HFU are fractions of; None for one that has none.

    So the planner has them too. A CPU's peak is what was measured.
    """
    if summary["device"] == "cpu":
        return None
    try:
        return parse_cluster(str(summary["cluster"])).device.peak(compute_dtype(summary)) * int(summary["world"])
    except UsageError:
        return None


def least_bytes(model: ModelConfig, plan: ParallelPlan) -> int:
    """What a rank must keep whatever it does: its weights, their gradients, the optimiser's state.

    With a pipeline those of the first stage.
    """
    layers = plan.chunk_layers[0] if plan.chunk_layers else -(-model.layers // plan.pp)
    parameters = shard_parameters(model, plan.tp).stage(layers, True, plan.pp == 1)
    return sum(state_bytes(parameters, plan.precision, plan.zero, plan.zero_ranks))
