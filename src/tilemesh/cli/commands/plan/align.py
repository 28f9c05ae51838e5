"""Plan for learning from feedback: which ranks hold which models. By memory, time split and idle share."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tilemesh.cli.commands.plan.train import ModelOnCluster, named_cluster, origin, plan_note
from tilemesh.cli.models import load_model
from tilemesh.cli.next_command import again
from tilemesh.cli.output import Block, Output, table_of
from tilemesh.core.advice import NextCommand
from tilemesh.core.errors import UsageError
from tilemesh.core.options import OutFile, option
from tilemesh.core.units import format_bytes

if TYPE_CHECKING:
    from tilemesh.core.placement import AlignWork
    from tilemesh.plan.align import PlacementPrediction

_SCORES = ("reward", "reference", "values", "old")


@dataclass(frozen=True, kw_only=True)
class AlignPlanOptions(ModelOnCluster):
    align: tuple[str, ...] = option((), "prompts=64,answers=16,tokens=1024,algorithm=ppo,...", "A=B,...")
    placement: Literal["colocated", "split", "one-step-off", "asynchronous"] | None = option(None, "Only these.")
    fix: tuple[str, ...] = option((), "Pin training layouts: tp=8,pp=1,zero=3,...", "A=B,...")
    code: str | None = option(None, "What trains, as for `plan train`.", "NAME")
    runnable: bool = option(False, "Only what `tilemesh align` runs.")
    out: OutFile | None = option(None, "Write the best, for `tilemesh align --plan`.", "PLAN.toml")
    svg: OutFile | None = option(None, "Draw a step of the best.", "FILE")
    json: OutFile | None = option(None, "Every figure by name; - for stdout.", "FILE")


def align(options: AlignPlanOptions) -> Output:
    from tilemesh.align.placement import can_align, placement_text, why_not_run
    from tilemesh.core.placement import KINDS
    from tilemesh.plan.align import AlignEstimator
    from tilemesh.plan.placements import search_placements
    from tilemesh.plan.software import read_software
    from tilemesh.plan.space import Pins
    from tilemesh.report.placement import draw_step

    if options.model is None or options.cluster is None:
        raise UsageError(
            "placements need a model and a cluster: tilemesh plan llama-3-8b --align tokens=1024 --cluster 16xh100"
        )
    model = load_model(options.model, options.sets)
    work = _work(options.align, model.context)
    cluster, rates = named_cluster(options.cluster, options.gpu)
    profile = None if options.code is None else read_software(options.code)
    if profile is not None:
        cluster, rates = profile.on(cluster, rates)
    code = None if profile is None else profile.code
    estimator = AlignEstimator(model, cluster, work, rates, code, options.headroom_share)
    kinds = tuple(KINDS) if options.placement is None else (options.placement,)
    more: dict[str, Any] = {"runs": lambda it: not why_not_run(it), "accepts": can_align} if options.runnable else {}
    ranked = search_placements(estimator, kinds, Pins.parse(options.fix), **more)
    best, reasons = ranked[0], [why_not_run(each.placement) for each in ranked]
    notes = [why for why in dict.fromkeys(reasons) if why]
    marks = {"": "yes"} | {why: f"no [{place}]" for place, why in enumerate(notes, start=1)}
    lines = [_cells(place, each, marks[why]) for place, (each, why) in enumerate(zip(ranked, reasons, strict=True), 1)]
    text: list[Block] = [
        f"{options.model} on {cluster.name}: {_work_words(work)}",
        table_of(lines, left=("placement", "align")),
        "seconds of a step and of its phases (score: reward, reference, values and old log-probabilities); ranks and "
        "GiB per rank: of training + of rollouts; idle: of all ranks; limit: what the hardware needs of a step",
        *(f"{marks[why].removeprefix('no ')} {why} (`tilemesh align`)" for why in notes),
        f"The first: {best.placement.kind}",
        *_pool_lines(best),
        *(f"  - {line}" for line in _why(ranked)),
    ]
    title = f"{best.placement.kind} on {cluster.name}: {best.step.seconds:.4g} s per step, {best.idle:.0%} idle"
    if options.out is not None and reasons[0]:
        raise UsageError(f"--out: `tilemesh align` does not run {best.placement.kind}: {reasons[0]}; add --runnable")
    note = plan_note(title)
    files: dict[str, Any] = {"svg": lambda: draw_step(best.placement, best.step, title)}
    files["out"] = lambda: placement_text(best.placement, work, model, note)
    after: NextCommand | None
    if options.out is None:
        after = again("--runnable" if reasons[0] else "--out plan.toml")
    elif Path(options.model).is_dir():
        command = f"align {shlex.quote(options.model)} --task sort --plan {shlex.quote(options.out)}"
        after = NextCommand(command, f"{best.step.seconds:.4g} s per step")
    else:
        text.append(
            f"`tilemesh align RUN --task FILE.py:FUNCTION --plan {options.out}` runs it on weights of this model"
        )
        after = None if options.svg else again("--svg step.svg")
    objects = [_object(options, work, cluster.name, place, each) for place, each in enumerate(ranked)]
    return Output(
        text, [{**each, "runs": why or "yes"} for each, why in zip(objects, reasons, strict=True)], files, next=after
    )


def _work(texts: Sequence[str], context: int) -> AlignWork:
    """What is asked for; lengths that nobody says fit the context."""
    from tilemesh.align.placement import work_of
    from tilemesh.core import config
    from tilemesh.core.placement import AlignWork

    try:
        work, named = config.load(AlignWork, sets=texts), dict(config.split_sets(texts))
        if "prompt" not in named:
            most = context - work.tokens if "tokens" in named else context // 4
            work = replace(work, prompt=max(1, min(work.prompt, most)))
        if "tokens" not in named:
            work = replace(work, tokens=max(1, min(work.tokens, context - work.prompt)))
        return work_of(work)
    except UsageError as error:
        words = str(error).replace("--set:", "--align:", 1).replace("such as train.steps=200", "such as answers=16")
        raise UsageError(words) from None


def _work_words(work: AlignWork) -> str:
    models = [f"critic: {work.critic}"] * (work.critic != "none") + ["reference"] * bool(work.reference)
    models += ["reward model"] * (work.reward == "model") + [f"adapters of rank {work.lora}"] * bool(work.lora)
    mean = f" ({work.mean_tokens:,} on average)" if work.mean_tokens < work.tokens else ""
    updates = f"{work.updates} update{'s' * (work.updates > 1)}"
    return (
        f"{work.prompts} prompts of {work.prompt:,} tokens x {work.answers} answers of up to {work.tokens:,}{mean}; "
        f"{work.algorithm}, {updates} per batch{''.join(f'; {name}' for name in models)}"
    )


def _cells(place: int, prediction: PlacementPrediction, runs: str) -> dict[str, str]:
    seconds, step_s = prediction.seconds, prediction.step.seconds
    updates = (seconds.get(name, 0.0) for name in ("update", "critic update"))
    return {
        "": str(place), "placement": prediction.placement.kind,
        "ranks": "+".join(str(pool.ranks) for pool in prediction.placement.pools), "step": _four(step_s),
        "draw": _four(seconds["rollout"]), "score": _four(sum(seconds.get(name, 0.0) for name in _SCORES)),
        "update": _four(sum(updates)), "sync": _four(seconds["weight sync"]), "idle": f"{prediction.idle:.0%}",
        "limit": f"{prediction.limit_s / step_s:.0%}",
        "GiB": "+".join(f"{nbytes / 2**30:.3g}" for nbytes in prediction.total_bytes), "align": runs,
    }  # fmt: skip


def _four(seconds: float) -> str:
    return f"{seconds:.3g}" if 0.1 <= seconds < 1000 else f"{seconds:.{2 if seconds < 1 else 0}f}"


def _pool_lines(prediction: PlacementPrediction) -> list[str]:
    lines = []
    for pool, parts, nbytes in zip(prediction.placement.pools, prediction.memory, prediction.total_bytes, strict=True):
        laid = [pool.plan.short()] if pool.plan is not None else []
        laid += [f"engines of {pool.rollout_tp}"] if "engine" in pool.models else []
        each = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        usable = format_bytes(prediction.usable_bytes)
        lines.append(f"  {pool.ranks} ranks: {', '.join(pool.models)}; {'; '.join(laid)}")
        lines.append(f"    {format_bytes(nbytes)} of {usable} per rank: {each}; pages and activations take turns")
    return lines


def _why(ranked: Sequence[PlacementPrediction]) -> list[str]:
    """What the best of each other kind loses."""
    best, seen, lines = ranked[0], {ranked[0].placement.kind}, []
    for other in ranked[1:]:
        kind = other.placement.kind
        if kind not in seen:
            slower = other.step.seconds / best.step.seconds - 1
            longest = max(other.seconds, key=lambda name: other.seconds[name])
            lost = f"{other.idle:.0%} of its ranks' time is idle" if other.idle > 0.1 else f"{longest} takes longest"
            lines.append(f"{kind} takes {slower:.0%} longer: {lost}" if slower > 5e-4 else f"{kind} is as quick")
            seen.add(kind)
    return lines


def _object(
    options: AlignPlanOptions, work: AlignWork, cluster: str, place: int, prediction: PlacementPrediction
) -> dict[str, Any]:
    return {
        "name": "plan align", "place": place,
        "case": {"model": options.model, "cluster": cluster, "work": asdict(work)},
        "placement": prediction.placement.kind, "ahead": prediction.placement.ahead,
        "pools": [
            {
                "ranks": pool.ranks, "models": list(pool.models), "rollout_tp": pool.rollout_tp,
                "plan": None if pool.plan is None else pool.plan.to_dict(),
                "memory": {f"{name.replace(' ', '_')}_bytes": size for name, size in parts.items()},
                "total_bytes": nbytes, "idle": idle,
            }
            for pool, parts, nbytes, idle in zip(
                prediction.placement.pools, prediction.memory, prediction.total_bytes, prediction.step.idle, strict=True
            )
        ],
        "usable_bytes": prediction.usable_bytes, "step_time_s": prediction.step.seconds, "limit_s": prediction.limit_s,
        "times": {f"{name.replace(' ', '_')}_s": seconds for name, seconds in prediction.seconds.items()},
        "idle": prediction.idle, "sync_bytes": prediction.sync_bytes, **origin(),
    }  # fmt: skip
