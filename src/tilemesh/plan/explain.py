"""The arithmetic of a model, shown: each figure with its formula, the numbers put in, and what comes out.

The one idea: a row's result is computed by the code that plans with it, and its formula and numbers stand beside it for
a reader to check. This file is about the model alone; `explain_plan.py` adds what a layout makes of it.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

from tilemesh.core.plan import MASTERED, Attention, ParallelPlan, Recompute
from tilemesh.core.units import format_bytes, format_count
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.kept import kept_by_operators, kept_bytes, kept_tensors, layer_input
from tilemesh.model.work.operations import forward_flops, keys_seen, recomputed_flops
from tilemesh.model.work.routing import imbalance
from tilemesh.model.work.task import STATE_BYTES, Task
from tilemesh.model.work.weights import active_matrices, count_parameters, why_not_tp
from tilemesh.plan import memory


class ExplainedFigure(NamedTuple):
    """One figure. Empty formula and numbers: given, not computed."""

    what: str
    formula: str
    numbers: str
    value: str


class ExplainedPart(NamedTuple):
    title: str
    rows: list[ExplainedFigure]
    note: str = ""


def model_sections(model: ModelConfig, context: int, layout: ParallelPlan, sequences: int = 1) -> list[ExplainedPart]:
    """Parameters, FLOPs of a step, states, activations of one layer and KV cache."""
    return [
        parameter_section(model),
        flops_section(model, sequences, context, layout.repeated),
        states_section(model, layout.precision),
        zero_section(model, layout.precision, layout.dp),
        activation_section(model, Task.of(layout, context), layout.repeated),
        recipes_section(model, context, layout),
        relation_section(model, context),
        laws_section(),
        cache_section(model, context),
    ]


def parameter_section(model: ModelConfig) -> ExplainedPart:
    parts = count_parameters(model)
    D, Q, K, E, F, V = (
        model.width,
        model.query_width,
        model.kv_width,
        model.head_width,
        model.mlp_width,
        model.vocabulary,
    )
    inputs = model.mlp_inputs
    # A LayerNorm has a weight and a bias, an RMSNorm a weight.
    norm, norms = 2 if model.norm == "layernorm" else 1, 4 if model.norm_place == "sandwich" else 2
    attention = [("D (Q + 2 K) + Q D", f"{D:,} x {Q + 2 * K:,} + {Q:,} x {D:,}")]
    attention += [("Q + 2 K", f"{Q + 2 * K:,}")] * model.has_biases("qkv") + [("D", f"{D:,}")] * model.has_biases(
        "output"
    )
    head_norms = {"none": [], "head": [("2 E", f"2 x {E:,}")], "full": [("Q + K", f"{Q + K:,}")]}
    attention_words = tuple(map(" + ".join, zip(*attention, *head_norms[model.qk_norm], strict=True)))
    counted_attention = _shown(_has_plain_heads(model), *attention_words)
    has_bias = model.has_biases("mlp")
    rows = [
        ExplainedFigure("token embedding", "V D", f"{V:,} x {D:,}", f"{parts.token_embedding:,}"),
        ExplainedFigure("position embedding", "S D", f"{model.context:,} x {D:,}", f"{parts.position_embedding:,}"),
        ExplainedFigure("attention, a layer", *counted_attention, f"{parts.attention:,}"),
        ExplainedFigure(
            "MLP, a layer",
            *_shown(
                not model.experts,
                f"{inputs + 1} D F" + (f" + {inputs} F + D" if has_bias else ""),
                f"{inputs + 1} x {D:,} x {F:,}" + (f" + {inputs} x {F:,} + {D:,}" if has_bias else ""),
            ),
            f"{parts.mlp:,}",
        ),
        ExplainedFigure("norms, a layer", f"{norms} x {norm} D", f"{norms} x {norm} x {D:,}", f"{parts.norms:,}"),
        ExplainedFigure(
            "layers",
            *_shown(not parts.apart, "L (attention + MLP + norms)", f"{model.layers} x {parts.layer:,}"),
            f"{parts.layers * parts.layer + parts.apart:,}",
        ),
        ExplainedFigure("final norm", f"{norm} D", f"{norm} x {D:,}", f"{parts.final_norm:,}"),
        ExplainedFigure("output projection", "V D", f"{V:,} x {D:,}", f"{parts.output:,}"),
        ExplainedFigure("parameters N", "sum", "", f"{parts.total:,}"),
    ]
    shown = [row for row in rows if row.value != "0"]
    tied = "; the output projection is the embedding" if model.tied else ""
    return ExplainedPart(
        f"Parameters (L {model.layers} layers, D {D:,} wide, Q {Q:,} wide queries, K {K:,} wide keys, E {E:,} of a "
        f"head, F {F:,} in the MLP, V {V:,} tokens{tied})",
        shown,
    )


def _has_plain_heads(model: ModelConfig) -> bool:
    return not model.latent_width and not model.score_sink


def _shown(is_computed: bool, formula: str, numbers: str) -> tuple[str, str]:
    """A formula with its numbers, where it is the figure's: of experts and latents a figure is given alone."""
    return (formula, numbers) if is_computed else ("", "")


def flops_section(model: ModelConfig, sequences: int, context: int, recompute: str) -> ExplainedPart:
    """A step over so many sequences."""
    T, s, D, Q, K = sequences * context, context, model.width, model.query_width, model.kv_width
    L, F, V, inputs = model.layers, model.mlp_width, model.vocabulary, model.mlp_inputs
    forward = forward_flops(model, sequences, context)
    again = recomputed_flops(model, sequences, context, recompute)
    total = 3 * forward.total + again
    parameters, name = count_parameters(model).total, "6 N T, for comparison"
    if model.experts:
        matrices = ((layers, active_matrices(kind)) for kind, layers in model.layers_by_kind)
        parameters = sum(layers * each.outputs * each.inputs for layers, weights in matrices for each in weights)
        parameters, name = parameters + V * D, "6 N T, active matrices"
    repeated = {
        "none": "nothing", "selective": "scores", "operators": "every second product", "full": "all layers",
    }[recompute]  # fmt: skip
    scores, keys = ("4 T S Q L", f"4 x {T:,} x {s:,} x {Q:,} x {L}"), sum(keys_seen(model, s))
    if keys < L * s:
        scores = "4 T Q x keys seen in all layers", f"4 x {T:,} x {Q:,} x {keys:,}"
    six, is_plain = 6 * parameters * T, _has_plain_heads(model)
    rows = [
        ExplainedFigure("q, k, v and output",
            *_shown(is_plain, "2 T D (2 Q + 2 K) L", f"2 x {T:,} x {D:,} x {2 * Q + 2 * K:,} x {L}"),
            _flops(forward.projections)),
        ExplainedFigure("scores and values", *_shown(is_plain, *scores), _flops(forward.scores)),
        ExplainedFigure("MLP", *_shown(not model.experts, f"2 T {inputs + 1} D F L",
            f"2 x {T:,} x {inputs + 1} x {D:,} x {F:,} x {L}"), _flops(forward.mlp)),
        ExplainedFigure("logits", "2 T D V", f"2 x {T:,} x {D:,} x {V:,}", _flops(forward.logits)),
        ExplainedFigure("forward", "sum", "", _flops(forward.total)),
        ExplainedFigure("backward", "2 x forward", f"2 x {_flops(forward.total)}", _flops(2 * forward.total)),
        ExplainedFigure("recomputed", repeated, f"recompute = {recompute}", _flops(again)),
        ExplainedFigure("all", "forward + backward + recomputed", "", _flops(total)),
        ExplainedFigure(name, "6 N T", f"6 x {parameters:,} x {T:,}",
            f"{_flops(six)} ({six / (3 * forward.total):.1%} of forward + backward)"),
    ]  # fmt: skip
    words = "1 sequence" if sequences == 1 else f"{sequences:,} sequences"
    return ExplainedPart(
        f"FLOPs of a step over {words} of S = {s:,} tokens (T = {T:,})",
        rows,
        "A multiply-add is 2; scores are counted as the whole square, also under a causal mask.",
    )


def states_section(model: ModelConfig, precision: str) -> ExplainedPart:
    parameters = count_parameters(model).total
    rounded = _three_digits(parameters)
    rows = []
    for name, size in zip(("weights", "gradients", "optimizer"), STATE_BYTES[precision], strict=True):
        rows.append(ExplainedFigure(name, f"{size} N", f"{size} x {parameters:,}", _gigabytes(size * parameters)))
    whole = sum(STATE_BYTES[precision])
    rows.append(
        ExplainedFigure("all states", f"{whole} N", f"{whole} x {parameters:,}", _gigabytes(whole * parameters))
    )
    for name, size in (("16-bit weights, N rounded", 2), ("Adam states, N rounded", 12)):
        rows.append(
            ExplainedFigure(
                name,
                f"{size} N",
                f"{size} x {format_count(rounded)}",
                f"{size * rounded / 1e9:,.{0 if rounded >= 1e9 else 3}f} GB",
            )
        )
    return ExplainedPart(
        f"States of the whole model, precision {precision}",
        rows,
        "Optimizer: two moments, and fp32 master weights where the weights have 16 bits.",
    )


def zero_section(model: ModelConfig, precision: str, dp: int) -> ExplainedPart:
    """The ZeRO table, for the dp of the plan or, without one, for 64."""
    parameters, ranks = count_parameters(model).total, dp if dp > 1 else 64
    w, g, o = STATE_BYTES[precision]
    forms = (
        f"{w + g + o} M",
        f"{w + g} M + {o} M/{ranks}",
        f"{w} M + {g + o} M/{ranks}",
        f"{w + g + o} M/{ranks}",
    )
    rows = [
        ExplainedFigure(
            f"ZeRO-{stage}" if stage else "no ZeRO",
            form,
            f"M = {parameters:,}",
            _gigabytes(sum(memory.state_bytes(parameters, precision, stage, ranks))),
        )
        for stage, form in enumerate(forms)
    ]
    return ExplainedPart(f"States a rank with ZeRO over {ranks} data-parallel ranks, no other split", rows)


def activation_section(model: ModelConfig, task: Task, recompute: Recompute) -> ExplainedPart:
    """Tensor by tensor, what a layer keeps for its backward pass."""
    rows = []
    tensors = kept_by_operators(model, task) if recompute == "operators" else kept_tensors(model, task)
    if recompute == "full":
        tensors = (layer_input(model, task), *tensors)
    for tensor in tensors:
        dropped = tensor is not tensors[0] and (recompute == "full" or (recompute == "selective" and tensor.scores))
        below = f" / {tensor.over}" if tensor.over > 1 else ""
        by = " / tp" if tensor.over == task.tp else " / kv heads"
        rows.append(
            ExplainedFigure(
                tensor.name,
                f"{tensor.element_bytes} B x {tensor.formula}" + (by if below else ""),
                f"{tensor.element_bytes} x {tensor.elements:,}{below}",
                "dropped, recomputed" if dropped else format_bytes(tensor.nbytes),
            )
        )
    total, _ = kept_bytes(model, task, recompute)
    rows.append(ExplainedFigure("a layer keeps", "sum", "", f"{format_bytes(total)} ({total:,} B)"))
    title = (
        f"Activations of one layer and microbatch of {task.sequences} on a rank: tp {task.tp}, sequence parallel "
        f"{'yes' if task.sequence_parallel else 'no'}, {task.attention} attention, recompute {recompute}"
        + f", experts of the busiest rank with {imbalance(model, task):.3f} times the mean rows"
        * (task.ep > 1)
    )
    return ExplainedPart(title, rows)


def recipes_section(model: ModelConfig, context: int, layout: ParallelPlan, tp: int = 8) -> ExplainedPart:
    """What a layer keeps under every recipe: attention, recomputation, tensor and sequence parallelism."""
    sbd = layout.microbatch * context * model.width
    whole = why_not_tp(model, tp) is None
    rows = []
    recipes: tuple[tuple[Attention, Recompute], ...] = (
        ("materialized", "none"),
        ("materialized", "selective"),
        ("materialized", "full"),
        ("fused", "none"),
        ("fused", "operators"),
        ("fused", "full"),
    )
    for attention, recompute in recipes:
        for ranks, sp in ((1, False), (tp, False), (tp, True)):
            if ranks > 1 and not whole:
                continue
            plan = ParallelPlan(
                tp=ranks, sequence_parallel=sp, attention=attention, recompute=recompute,
                microbatch=layout.microbatch, precision=layout.precision,
            )  # fmt: skip
            nbytes, _ = kept_bytes(model, Task.of(plan, context), recompute)
            split = f"tp {ranks}" + (", sequence parallel" if sp else "")
            form = "S b D x the tensors above"
            if _is_paper_model(model, layout.precision) and recompute != "operators":
                form = _paper_form(attention, recompute, ranks, sp)
            name = f"{attention}, {recompute}, {split}"
            rows.append(ExplainedFigure(name, form, f"{sbd:,} x {nbytes / sbd:.2f} B", format_bytes(nbytes)))
    note = "a heads, t ranks of tensor parallelism; a fused kernel keeps 4 B per head and token instead of the scores"
    return ExplainedPart("Activations a layer keeps, by recipe", rows, f"{note}.")


def _is_paper_model(model: ModelConfig, precision: str) -> bool:
    """Whether the forms of Korthikanti et al. 2022 are what the tensors add up to."""
    plain = model.mlp_width == 4 * model.width and model.kv_width == model.query_width == model.width
    plain = plain and model.activation == "gelu" and model.norm_place in ("pre", "post") and model.qk_norm == "none"
    return plain and not model.parallel_residual and model.dropout > 0 and precision in MASTERED


def _paper_form(attention: str, recompute: str, ranks: int, sp: bool) -> str:
    """The forms of Korthikanti et al. 2022, table 2."""
    if recompute == "full":
        return "S b D x 2/t" if sp else "S b D x 2"
    flat = "34" if ranks == 1 else "34/t" if sp else "(10 + 24/t)"
    below = "(D t)" if ranks > 1 else "D"
    if recompute == "selective":
        return f"S b D x {flat}"
    scores = f"5 a S/{below}" if attention == "materialized" else f"4 a/{below}"
    return f"S b D x ({flat.strip('()')} + {scores})"


def relation_section(model: ModelConfig, context: int) -> ExplainedPart:
    done = 3 * forward_flops(model, 1, context).total
    rows = []
    for recompute in get_args(Recompute):
        again = recomputed_flops(model, 1, context, recompute)
        numbers = f"1 + {again:.4g} / {done:.4g}"
        rows.append(
            ExplainedFigure(
                f"recompute {recompute}", "HFU / MFU = 1 + recomputed / model FLOPs", numbers, f"{1 + again / done:.4f}"
            )
        )
    return ExplainedPart("MFU counts FLOPs that had to be done, HFU all that were done", rows)


def laws_section(serial: float = 0.01) -> ExplainedPart:
    """Amdahl's and Gustafson's laws for a step of which one percent does not shrink with more ranks."""
    rows = []
    for n in (8, 64, 512):
        fixed, grown = 1 / (serial + (1 - serial) / n), n - serial * (n - 1)
        rows.append(
            ExplainedFigure(
                f"Amdahl, {n} ranks", "1 / (f + (1 - f)/n)", f"1 / ({serial} + {1 - serial} / {n})", f"{fixed:.1f}"
            )
        )
        rows.append(
            ExplainedFigure(f"Gustafson, {n} ranks", "n - f (n - 1)", f"{n} - {serial} x {n - 1}", f"{grown:.1f}")
        )
    note = "Amdahl keeps the batch, Gustafson lets it grow with the ranks; with --cluster f is the plan's own"
    return ExplainedPart(f"Speed-up when a fraction f = {serial} of the step does not shrink", rows, f"{note}.")


def cache_section(model: ModelConfig, context: int) -> ExplainedPart:
    nbytes = memory.kv_cache_bytes(model, context)
    row = ExplainedFigure(
        "keys and values",
        "2 x 2 B x L K S",
        f"2 x 2 x {model.layers} x {model.kv_width:,} x {context:,}",
        format_bytes(nbytes),
    )
    return ExplainedPart("KV cache of one sequence, when serving", [row])


def _flops(count: int) -> str:
    return f"{count:.4g} FLOP" if count else "0"


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB = {format_bytes(nbytes)}"


def _three_digits(count: int) -> int:
    """As models are named: 174,604,259,328 is 175G."""
    digits = len(str(count))
    return round(count, 3 - digits)
