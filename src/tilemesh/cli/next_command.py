"""What to try after a run, with the gain that the planner predicts: the last line of its command and of its page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilemesh.core.advice import TYPED, NextCommand
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.toml import toml_value
from tilemesh.model.families.book import CONFIG
from tilemesh.report.run import DONE, RUNNING, Run
from tilemesh.runs.kind import ALIGN, COMPRESS, SERVE, TRAIN
from tilemesh.runs.values import section

if TYPE_CHECKING:
    from tilemesh.train.config import TrainConfig

_EQUAL = 1.02
"""Times as fast, below which two predictions are the same."""
_EQUAL_NATS = 0.01


def again(words: str, pins: str = "") -> NextCommand:
    """What was typed, with more words; `pins`: fixed instead of what else the same names were fixed to."""
    typed, more = [*TYPED.get(), *words.split()], []
    for pin in filter(None, pins.split(",")):
        anew = [re.sub(rf"(?<![\w.]){pin.partition('=')[0]}=[^,]*", pin, word) for word in typed]
        more += [pin] * (anew == typed)
        typed = anew
    typed += ["--fix", ",".join(more)] * bool(more)
    return NextCommand(shlex.join(typed).encode(errors="backslashreplace").decode())


def after_layout(config: TrainConfig, words: Callable[[list[str]], str], otherwise: str) -> NextCommand:
    """The command that `words` makes of the settings of the layout that is predicted to be quickest; where that is the
    run's own, `otherwise`; without a calibration, which predictions are made of, `calibrate`."""
    from tilemesh.measure.machine import usable_gpus
    from tilemesh.train.predict import best_layout

    try:
        best, then_s, now_s = best_layout(config, usable_gpus())
    except (UsageError, RunError):
        return NextCommand("calibrate")
    if now_s < _EQUAL * then_s:
        return NextCommand(otherwise)
    own = config.plan.to_dict()
    changes = [f"plan.{key}={toml_value(value)}" for key, value in best.to_dict().items() if value != own[key]]
    return NextCommand.faster(words(changes), now_s, then_s)


def after_run(run: Run) -> NextCommand | None:
    """None of a run that goes on, or that a folder says too little of."""
    makers = {TRAIN.name: _after_training, ALIGN.name: _after_feedback, SERVE.name: _after_load}
    makers |= {COMPRESS.name: _after_compression}
    if run.kind not in makers or run.state == RUNNING or run.is_behind:
        return None
    try:
        return makers[run.kind](run)
    except (UsageError, RunError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return NextCommand(f"report {_folder(run)}") if run.summary else None


def _folder(run: Run) -> str:
    return shlex.quote(run.folder.rstrip("/"))


def _resumed(run: Run, command: str, settings: list[str]) -> str:
    """The command that goes on with a run, for as many steps again where it is at its end."""
    steps = [f"train.steps={2 * run.last_step}"] if run.state == DONE else []
    words = ",".join([*settings, *steps])
    return f"{command} --resume {_folder(run)}" + f" --set {shlex.quote(words)}" * bool(words)


def _after_training(run: Run) -> NextCommand:
    from tilemesh.measure.machine import this_machine
    from tilemesh.train.config import ModuleRun, of_run
    from tilemesh.train.predict import not_modelled

    config, grade = of_run(run.folder), f"plan grade {_folder(run)}"
    if run.state != DONE:
        return NextCommand(_resumed(run, "train", []))
    if isinstance(config, ModuleRun):
        program = shlex.quote(config.module.program)
        return NextCommand(f"graph explain {program} --train --mesh dp={config.plan.world} --choose all")
    if not_modelled(config):
        return NextCommand(f"serve {_folder(run)}")
    if config.train.method != "synchronous" or run.summary.get("machine") != this_machine().id:
        return NextCommand(grade)
    return after_layout(config, lambda changes: _resumed(run, "train", changes), grade)


def _after_feedback(run: Run) -> NextCommand:
    from tilemesh.align.config import of_run
    from tilemesh.align.placement import predict_run_placement, rank_placements, settings_of
    from tilemesh.measure.machine import usable_gpus

    config = of_run(run.folder)
    if run.state != DONE:
        return NextCommand(_resumed(run, "align", []))
    if config.align.is_of_pairs:
        return NextCommand(f"serve {_folder(run)}")
    try:
        own, _ = predict_run_placement(config, usable_gpus())
        world = config.plan.world + config.align.ranks_beside
        best = rank_placements(config, usable_gpus())[0] if world == config.plan.world else own
    except UsageError:
        return NextCommand("calibrate")
    if own.step.seconds < _EQUAL * best.step.seconds:
        return NextCommand(f"plan grade {_folder(run)}")
    words = _resumed(run, "align", settings_of(best.placement))
    return NextCommand.faster(words, own.step.seconds, best.step.seconds)


def _after_load(run: Run) -> NextCommand:
    model = shlex.quote(str(section(run.config, SERVE.name)["model"]))
    return NextCommand(f"plan serve {model} --cluster local --out plan.toml")


def _after_compression(run: Run) -> NextCommand:
    if "recipe" in run.points[0] and len(run.points) == 1 and Path(run.folder, CONFIG).exists():
        return _decodes(f"serve {_folder(run)}", run.points[0])
    return after_recipes(str(section(run.config, COMPRESS.name)["model"]), run.points)


def after_recipes(model: str, points: Sequence[Mapping[str, Any]]) -> NextCommand:
    """Of a comparison: the smallest that costs less than 0.01 nats per token, or that which costs least."""
    good = [point for point in points if point["loss"] < point["plain_loss"] + _EQUAL_NATS]
    best = min(good, key=lambda point: point["bytes"]) if good else min(points, key=lambda point: point["loss"])
    return _decodes(f"compress {shlex.quote(model)} --recipe {shlex.quote(best['recipe'])} --out small", best)


def _decodes(words: str, point: Mapping[str, Any]) -> NextCommand:
    """The command, with the time of a decoded token before and as it was predicted."""
    now_s, then_s = point.get("plain_decode_s"), point.get("predicted_decode_s")
    return NextCommand.faster(words, now_s, then_s, "decoded token") if now_s and then_s else NextCommand(words)
