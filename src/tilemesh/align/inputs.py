"""What a run that learns from feedback reads beside its model: prompts or pairs, users' functions, a reference, reward
models.

The one idea: ranks read them with these functions, and `check_inputs` calls the same ones before a run has a folder, in
a dry run too: what is wrong is refused once, in the same words. No torch.
"""

from __future__ import annotations

import math
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from tilemesh.align.config import AlignConfig, FeedbackConfig, of_run
from tilemesh.align.prompts import PromptSource, ServedText, read_pairs
from tilemesh.align.record import read_events
from tilemesh.align.tasks import TASKS
from tilemesh.core.errors import UsageError
from tilemesh.data.corpus import chat_template_of, tokenizer_of
from tilemesh.launch.function import FunctionProcess
from tilemesh.model.config import ModelConfig
from tilemesh.model.families.book import read_config
from tilemesh.runs.folder import newest_checkpoint

TASK = "task"


def check_inputs(config: AlignConfig) -> None:
    """Refuse what a rank could not read. Functions are started in processes of their own, and not called."""
    align, training = config.align, config.training
    tokenizer = tokenizer_of(training.data)
    text = ServedText(tokenizer, frozenset(), *chat_template_of(training.data, tokenizer))
    if align.has_reference and align.reference is not None:
        read_reference(align.reference, training.model)
    if align.is_of_pairs:
        read_pairs(align.preferences, text, training.context)
        return
    PromptSource(align, training.train.seed, text, training.context).check()
    specs = [align.environment] * bool(align.environment)
    for scorer in read_scorers(align).values():
        if scorer.is_model:
            read_reward(Path(scorer.spec), training.model)
        elif scorer.spec not in TASKS:
            specs.append(scorer.spec)
    for spec in specs:
        with closing(FunctionProcess(spec, align.deadline_s)) as process:
            process.start()
    if align.repeats is not None:
        read_events(align.repeats, align.ranks_beside or config.plan.dp)


class Scorer(NamedTuple):
    """What pays."""

    spec: str
    """A built-in task, FILE.py:FUNCTION, or the folder of a reward model's run."""
    weight: float
    is_model: bool


def read_scorers(align: FeedbackConfig) -> dict[str, Scorer]:
    """By name: the task's own score is `task`."""
    named = [_weight(text) for text in align.rewards]
    weights = {TASK: 1.0} | dict(named)
    if twice := {name for name, _ in named if sum(each == name for each, _ in named) > 1}:
        raise UsageError(f"align.rewards has {min(twice)} more than once: give it one weight")
    return {
        name: Scorer(align.task, weight, False)
        if name == TASK
        else Scorer(name, weight, not (name in TASKS or name.endswith(".py") or ".py:" in name))
        for name, weight in weights.items()
    }


def _weight(text: str) -> tuple[str, float]:
    name, equals, number = text.rpartition("=")
    if not equals:
        return number, 1.0
    with suppress(ValueError):
        if math.isfinite(weight := float(number)):
            return name, weight
    raise UsageError(f"align.rewards has '{text}': expected NAME=WEIGHT, such as task=1 or check.py:score=0.5")


def read_reward(folder: Path, beside: ModelConfig) -> ModelConfig:
    """The reward model of a run, which is to score what the model beside it writes."""
    config = of_run(folder)
    if config.align.algorithm != "reward" or config.training.lora.rank:
        raise UsageError(f"{folder} is no reward model with weights of its own: expected a run of algorithm reward")
    if newest_checkpoint(folder) is None:
        raise UsageError(f"{folder} has no checkpoint: expected a reward model that was trained")
    return _of_vocabulary(config.training.model, folder, beside)


def read_reference(folder: str | Path, beside: ModelConfig) -> ModelConfig:
    """The model of a folder that the model beside it is not to leave too far."""
    return _of_vocabulary(read_config(folder), folder, beside)


def _of_vocabulary(model: ModelConfig, folder: str | Path, beside: ModelConfig) -> ModelConfig:
    if model.vocabulary != beside.vocabulary:
        raise UsageError(f"{folder} has a vocabulary of {model.vocabulary}: expected that of the model, "
                         f"{beside.vocabulary}")  # fmt: skip
    return model
