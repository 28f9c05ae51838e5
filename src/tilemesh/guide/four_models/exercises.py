"""Exercises of chapter 13, with the wrong answers that have a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilemesh.guide.exercise import choice, code, numeric

HOLD = numeric(
    "hold_70b",
    "Four models of 70 billion parameters: actor and critic are trained (16 bytes per parameter), reward and reference "
    "are frozen (2 bytes). How many GB do they hold?",
    36 * 70,
    counted_in="GB",
    wrong={
        64 * 70: "That is 16 bytes for all four. Frozen models keep no gradients and no optimizer states.",
        16 * 70: "That is the actor alone.",
        18 * 70: "That is one trained and one frozen model. There are two of each.",
        8 * 70: "That is 2 bytes for all four: as if nobody were trained.",
    },
    otherwise="Bytes per parameter of all four together, times 70 (billion parameters, so GB).",
    explanation="(16 + 16 + 2 + 2) · 70 = 2,520 GB: 32 GPUs of 80 GB, before activations and pages.",
)

LORA = choice(
    "lora",
    "Why does the reference of a LoRA actor take no memory?",
    {
        "Its weights are the actor's frozen ones: leave the adapters out of a pass.": None,
        "LoRA needs no KL.": "It may be used with and without, as any actor.",
        "The reference is kept on disk.": "A pass needs its weights in memory.",
        "Adapters have so few numbers that a copy is negligible.": "A copy of the *adapters* would be small. What the "
        "reference needs are the base's weights, and those are there already.",
    },
    explanation="One base, two ways through it. The same holds for a critic whose head sits on the actor's last layer.",
)

LONGER = choice(
    "longer",
    "Answers become longer from step to step, the reward stays the same, and GRPO divides by each answer's length. "
    "What is the likeliest cause?",
    {
        "Wrong answers are blamed less per token the longer they are.": None,
        "The model learns to think.": "Then rewards would rise. Look at the lengths of right and wrong answers apart.",
        "The KL penalty is too strong.": "It would keep lengths where they were.",
        "The temperature is too high.": "It makes answers more random, from the first step on, and not longer and "
        "longer.",
    },
    explanation="One weight for every token, whatever the length (Dr. GRPO), has no such drift.",
)


def ppo_step(actor: Any, critic: Any, reward: Any, reference: Any, prompts: Any, epochs: int) -> Any:
    """The solution: everything that must be old is computed before the first update."""
    answers = actor.draw(prompts)
    scores, before = reward.score(answers), reference.logprobs(answers)
    old, values = actor.logprobs(answers), critic.values(answers)
    for _ in range(epochs):
        actor.update(answers, scores, values, old, before)
        critic.update(answers, scores, values)
    return answers


class _Watched:
    """A model that says of everything it gives who gave it, how often it had been trained, and from what."""

    def __init__(self, name: str) -> None:
        self.name, self.version, self.drawn = name, 0, 0

    def _give(self, what: str, of: Any) -> tuple[str, str, int, Any]:
        return what, self.name, self.version, of

    def draw(self, prompts: Any) -> Any:
        self.drawn += 1
        if self.drawn > 1:
            raise _WrongStepError("answers were drawn again: a batch is drawn once and used for all epochs.")
        return self._give("answers", (self.drawn, prompts))

    def logprobs(self, answers: Any) -> Any:
        return self._give("log-probabilities", answers)

    def values(self, answers: Any) -> Any:
        return self._give("values", answers)

    def score(self, answers: Any) -> Any:
        return self._give("scores", answers)

    def update(self, answers: Any, *tensors: Any) -> None:
        wanted = (("scores", "reward"), ("values", "critic"), ("log-probabilities", "actor"),
                  ("log-probabilities", "reference"))  # fmt: skip
        if self.name not in ("actor", "critic"):
            raise _WrongStepError(f"the {self.name} was trained: it stays as it is.")
        for place, (thing, (what, who)) in enumerate(zip(tensors, wanted, strict=False)):
            if thing[:2] != (what, who):
                raise _WrongStepError(
                    f"argument {place + 2} of {self.name}.update is {thing[0]} of the {thing[1]}: expected {what} of "
                    f"the {who}."
                )
            if thing[2]:
                why = "the ratio would be 1 for ever" if who == "actor" else "it has seen the answers by then"
                raise _WrongStepError(f"{what} of the {who} after {thing[2]} updates: take those before, or {why}.")
            if thing[3] != answers:
                raise _WrongStepError(f"{what} of other answers than those that are trained on.")
        self.version += 1


class _WrongStepError(Exception):
    """What an update was given is not what it needs."""


def why_not_step(function: Callable[..., Any]) -> str | None:
    """Run it with models that watch what they are given."""
    models = {name: _Watched(name) for name in ("actor", "critic", "reward", "reference")}
    try:
        function(*models.values(), ("p0", "p1"), 3)
    except _WrongStepError as error:
        return f"In one step with 3 epochs: {error}"
    for name in ("actor", "critic"):
        if models[name].version != 3:
            return f"The {name} was trained {models[name].version} times in 3 epochs: expected 3."
    return None


STEP = code(
    "ppo_step",
    "Write the dance: one step of PPO with four models and several epochs over one batch.",
    '''def ppo_step(actor, critic, reward, reference, prompts, epochs):
    """Draws answers once, trains actor and critic `epochs` times on them, and
    returns them.

    actor.draw(prompts), actor.logprobs(answers), reference.logprobs(answers),
    critic.values(answers), reward.score(answers); then
    actor.update(answers, scores, values, old_logprobs, reference_logprobs) and
    critic.update(answers, scores, values)
    """
    ...''',
    returns="the answers",
    solution=ppo_step,
    correct=why_not_step,
    explanation="tilemesh's is `align/source.py` and `align/objective.py`: the same order, with ranks and an engine.",
)

EXERCISES = (HOLD, LORA, LONGER, STEP)
