"""A draft model: a smaller one that guesses the next tokens, which the served model then checks in one step.

The one idea: it has keys and values of its own in pages of the same numbers. So what the scheduler decides about pages
(sharing, preemption, swapping) holds for both models, and nothing is decided twice. A guess is drawn with the very
random number that the served model's token will be drawn with: two models that agree draw the same token, sampled or
not, and an answer is what it would be without guesses.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from tilemesh.core.errors import UsageError
from tilemesh.model.config import ModelConfig
from tilemesh.serve.batch import TokenSpan
from tilemesh.serve.runner import Runner
from tilemesh.serve.sampling import TokenDraw, draw_tokens
from tilemesh.serve.scheduler import Scheduled, StepPlan
from tilemesh.serve.speculate import DraftLengths

Drawing = Callable[[Scheduled], TokenDraw | None]
"""What the token after an entry's last guess is drawn with; None: the answer would be complete by then."""


class DraftModel:
    def __init__(self, runner: Runner, lengths: DraftLengths) -> None:
        self.runner, self.lengths = runner, lengths
        self.passes = 0
        self.seconds = 0.0
        """Of the last step."""
        self._computed: dict[str, int] = {}  # tokens of each request whose keys and values it has

    @torch.inference_mode()
    def fill(self, plan: StepPlan, drawing: Drawing) -> StepPlan:
        """The plan with the guesses that it left open; every prompt is read along."""
        begun, self.passes = time.perf_counter(), 0
        self.runner.copy_pages(plan)
        wanted = {entry.request.name: len(entry.drafts) for entry in plan.entries}
        for entry in plan.entries:  # wrong guesses lay behind what is known now
            if (read := self._computed.get(entry.request.name)) is not None:
                self._computed[entry.request.name] = min(read, entry.start)
        made = {entry.request.name: dataclasses.replace(entry, drafts=()) for entry in plan.entries}
        # A request that decodes without guesses is read later, when guesses are wanted again.
        spans = [self._span(entry, wanted[name]) for name, entry in made.items() if wanted[name] or entry.count > 1]
        while spans:
            logits = self.runner.compute(spans)
            self.passes += 1
            drawn = [(span, given) for span in spans if span.wanted and (given := drawing(span.entry)) is not None]
            spans = []
            rows = [logits[span.entry.request.name].logits_NV[-1:] for span, _ in drawn]
            tokens = draw_tokens(torch.cat(rows), [given for _, given in drawn]) if rows else []
            for (span, _), token in zip(drawn, tokens, strict=True):
                name = span.entry.request.name
                made[name] = entry = dataclasses.replace(span.entry, drafts=(*span.entry.drafts, token))
                if len(entry.drafts) < wanted[name]:
                    spans.append(self._span(entry, wanted[name]))
        self.seconds = time.perf_counter() - begun
        return dataclasses.replace(plan, entries=tuple(made[entry.request.name] for entry in plan.entries))

    def observe(self, plan: StepPlan, step_s: float) -> None:
        """How long the served model took for a step of decoding that these guesses were part of."""
        self.lengths.observe(len(plan.entries), plan.tokens, step_s, self.passes, self.seconds)

    def forget(self, name: str) -> None:
        self._computed.pop(name, None)
        self.lengths.forget(name)

    def _span(self, entry: Scheduled, wanted: int) -> TokenSpan:
        """What it has not read of an entry: usually one token."""
        end = entry.start + entry.count + len(entry.drafts)
        begin = entry.start if entry.drafts == () else end - 1
        begin = min(begin, self._computed.get(entry.request.name, begin))
        self._computed[entry.request.name] = end
        return TokenSpan(entry, begin, end, range(end - 1 if wanted else end, end))


def check_draft(draft: ModelConfig, served: ModelConfig, context: int) -> None:
    """Refuse a draft model whose tokens or positions are not those of the served one."""
    if draft.vocabulary != served.vocabulary:
        raise UsageError(
            f"the draft model has a vocabulary of {draft.vocabulary} and the served one of {served.vocabulary}: give "
            "one that reads the same tokens"
        )
    if draft.context < context:
        raise UsageError(
            f"the draft model's context is {draft.context} tokens, and requests may have {context}: give another, or "
            f"a context of at most {draft.context}"
        )
