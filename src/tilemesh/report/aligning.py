"""The page of a run that learns from feedback: is it paid more, at what distance, and what does it write now?

What is paid and what is meant can part: the parts of a reward stand beside it, and answers to the same held-out prompts
side by side over time, where a person sees it at a glance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilemesh.core.units import format_seconds
from tilemesh.report import general
from tilemesh.report.bars import bars_by_kind
from tilemesh.report.draw import PageTable, grid
from tilemesh.report.html import Child, Fact, Html, el, join, tied
from tilemesh.report.kind_page import Beside, PageSection
from tilemesh.report.rows import percent
from tilemesh.report.run import Run
from tilemesh.report.training import TRAIN_PAGE
from tilemesh.runs.names import SAMPLE, SAMPLES
from tilemesh.runs.phases import measured_phases, predicted_phases
from tilemesh.runs.values import count, number

_REWARD = ("reward", "reward_std", "held_out_reward", "pass_at_1", "pass_at_k")
_POLICY = ("kl", "entropy", "old_kl", "clipped_low", "clipped_high", "mismatch", "value")
_ANSWERS = ("answer_tokens", "truncated", "groups_alike", "unscored", "unheard", "age", "oldest")
_PAIRS = ("pair_loss", "accuracy", "margin", "chosen")
_MOST_COLUMNS = 6
_PHASES = {
    "rollout": ("rollouts", 0), "reward": ("rewards", 2), "passes": ("log-probabilities and values", 4),
    "update": ("updates", 1), "weight sync": ("weights to the engine", 6),
}  # fmt: skip
"""Of a step, and their colours."""


def _charts(run: Run, keys: Sequence[str]) -> Html | None:
    return general.figure_charts(run, [key for key in keys if key in run.figures])


def _reward(run: Run, beside: Beside) -> Child:
    return _charts(run, [*_REWARD, *(key for key in run.figures if key.startswith("reward/")), *_PAIRS])


def _samples(run: Run, beside: Beside) -> Child:
    """A row per held-out prompt, a column per evaluation: the first, the last, and some between."""
    steps = sorted({count(line.get("step"), 0) for line in run.samples})
    if not steps:
        return None
    columns = min(_MOST_COLUMNS, len(steps))
    chosen = [steps[round(place * (len(steps) - 1) / max(1, columns - 1))] for place in range(columns)]
    prompts = list(dict.fromkeys(str(line.get("prompt")) for line in run.samples))
    last = {(str(line.get("prompt")), count(line.get("step"), 0)): line for line in run.samples}
    rows: list[list[Child]] = []
    for prompt in prompts:
        cells: list[Child] = [prompt]
        for step in chosen:
            line = last.get((prompt, step))
            cells.append("–" if line is None else f"{line.get('answer')} ({number(line.get('reward')):.3g})")
        rows.append(cells)
    words = (
        "Answers to the same held-out prompts, with what they were paid. Read them: a reward that rises while answers "
        "get worse is being gamed."
    )
    table = PageTable(["prompt", *(f"step {step:,}" for step in chosen)], rows)
    return join(el("p", tied(words), class_="quiet"), grid(table))


def _time(run: Run, beside: Beside) -> Child:
    """Seconds of a step by phase, as predicted and as measured: means without the first steps, which warm up."""
    mean, guess = measured_phases(run.steps), predicted_phases(run.predicted)
    if not mean:
        return None
    words = "Means over the steps after the first ones; a batch that several steps use counts in the one that drew it."
    return bars_by_kind(
        "Time of a step, by phase",
        words if guess else f"{words} The planner made no prediction for this run.",
        {"predicted": guess, "measured": mean} if guess else {"measured": mean},
        _PHASES,
        format_seconds,
        head="",
        total="step",
        label=lambda seconds, total: percent(seconds / total if total else 0.0),
    )


def _facts(run: Run, beside: Beside) -> list[Fact]:
    facts = []
    for key, name in (("reward", "reward"), ("held_out_reward", "held-out reward"), ("accuracy", "pairs right")):
        points = run.figure(key)
        if points:
            facts.append(Fact(name, f"{points[-1][1]:.3g}", f"{points[0][1]:.3g} at step {points[0][0]:,}"))
    return [*facts, *TRAIN_PAGE.facts(run, beside)]


ALIGN_PAGE = replace(
    TRAIN_PAGE,
    facts=_facts,
    sections=(
        PageSection("reward", "What answers were paid", _reward),
        PageSection("samples", "What it writes, over time", _samples),
        PageSection("policy", "How far it moved", lambda run, _: _charts(run, _POLICY)),
        PageSection("answers", "Lengths, and batches without a signal", lambda run, _: _charts(run, _ANSWERS)),
        PageSection("phases", "Where the time goes", _time),
        *TRAIN_PAGE.sections,
    ),
    expects={
        **{name: words for name, words in TRAIN_PAGE.expects.items() if name != SAMPLE},
        SAMPLES: "answers to held-out prompts",
    },
)
