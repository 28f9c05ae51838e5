"""What a run of kind `align` learns from, as a rank of `train/` asks for it: rollouts or pairs, and their losses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilemesh.align.answers import Answers
from tilemesh.align.config import AlignConfig, of_run
from tilemesh.align.drawing import AnswerDrawing, RemoteDrawing, RepeatedDrawing, StreamDrawing, serve_answers
from tilemesh.align.generate import Generator, RolloutEngine
from tilemesh.align.head import Reference, add_critic, add_value_head, base_figures, token_figures
from tilemesh.align.inputs import read_reference
from tilemesh.align.objective import FeedbackObjective
from tilemesh.align.pairs import PairSource
from tilemesh.align.prompts import PromptSource, ServedText
from tilemesh.align.rewards import Rewards
from tilemesh.align.source import RolloutSource
from tilemesh.align.turns import AnswerTurns
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError
from tilemesh.core.placement import STEP_TOKENS
from tilemesh.core.plan import MASTERED
from tilemesh.data.corpus import chat_template_of, tokenizer_of
from tilemesh.model.fresh import grouped_parameters
from tilemesh.model.packed import without_onednn
from tilemesh.model.programs.group import put_together
from tilemesh.model.programs.program import Use
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.apply import lay_beside
from tilemesh.parallel.laid import Laid
from tilemesh.runs.folder import first_weights
from tilemesh.runs.kind import ALIGN
from tilemesh.runs.names import CARRIED
from tilemesh.serve.config import EngineConfig
from tilemesh.serve.load import ServedModel, end_tokens, read_dtype
from tilemesh.train.config import TrainConfig
from tilemesh.train.lessons import Lessons
from tilemesh.train.loop import Loop
from tilemesh.train.memory import peak_bytes
from tilemesh.train.optimizer import stored_dtype
from tilemesh.train.record import Recorder
from tilemesh.train.resume import load_stored
from tilemesh.train.servers import Seat
from tilemesh.train.source import Objective, Source


class FeedbackLessons(Lessons):
    """Rollouts of the model itself, or pairs of answers."""

    is_steady = False

    def __init__(self, config: AlignConfig, folder: Path, link: Communicator | None = None) -> None:
        """`link`: of the first rank that trains, with those that only draw answers."""
        super().__init__(config.training, ALIGN)
        self.run, self.align, self.folder, self.link = config, config.align, folder, link
        self._closing: list[Callable[[], None]] = []
        self._rollouts: RolloutSource | None = None

    def open(self) -> None:
        tokenizer = tokenizer_of(self.config.data)
        template = chat_template_of(self.config.data, tokenizer)
        model = Transformer(self.config.model, device="meta")
        ends = end_tokens(self.folder / CARRIED, self.config.model.vocabulary, tokenizer)
        self.text = ServedText(tokenizer, ends, *template)
        self.served = ServedModel(self.folder.name, model, *self.text)
        self.prompts: PromptSource | None = None
        if not self.align.is_of_pairs:
            self.prompts = PromptSource(self.align, self.config.train.seed, self.text, self.config.context)

    def fingerprint(self) -> str:
        return f"{self.align}" if self.prompts is None else self.prompts.fingerprint()

    def extend(self, model: Transformer) -> None:
        # As an engine reads them: it can then share their memory, and an update copies nothing.
        for parts in grouped_parameters(model) if not self.config.lora.rank else ():
            put_together(parts)
        if self.align.has_value_head:
            (add_critic if self.align.critic == "own" else add_value_head)(model)

    def use_for(self, use: Use) -> Use:
        return Use(trains=True, invariant=True) if self.align.invariant and self.prompts is not None else use

    def source(self, laid: Laid, recorder: Recorder, seat: Seat | None) -> Source:
        self.feedback = FeedbackObjective(self.run, laid)
        reference = self._reference(laid) if self.align.has_reference else None
        if self.prompts is None:
            return PairSource(self.run, laid, reference, self.text, self.feedback)
        if self.run.is_small and next(laid.module.parameters()).device.type == "cpu":
            self._closing.append(without_onednn())
        is_elsewhere = self.align.ranks_beside > 0
        dtype = self._dtype(laid.stream_dtype, next(laid.module.parameters()).is_cuda)
        generator = Generator(
            laid, self.served, dtype, self._engine(), self.align.sleep, is_elsewhere, self.align.rollout_tp
        )
        rewards = Rewards(self.align, laid)
        turns = AnswerTurns(self.prompts)
        answers = Answers(self.align, generator, turns, rewards, recorder)
        kinds = (RepeatedDrawing, StreamDrawing) if self.align.streams else (AnswerDrawing, RemoteDrawing)
        drawing = kinds[is_elsewhere](answers, generator, laid.mesh, self.link)
        self._rollouts = source = RolloutSource(
            self.run, laid, reference, drawing, rewards, self.feedback, recorder, self.folder
        )
        self._closing += [turns.close, rewards.close, drawing.close]
        return source

    def serve_answers(self, link: Communicator, device: torch.device, recorder: Recorder) -> None:
        """As a rank that only draws answers."""
        assert self.prompts is not None
        baseline = 0 if device.type == "cuda" else peak_bytes(device)
        dtype = self._dtype(stored_dtype(self.config.plan.precision), device.type == "cuda")
        engine = RolloutEngine(self.served, dtype, self._engine(), device)
        rewards, turns = Rewards(self.align, None), AnswerTurns(self.prompts)
        self._closing += [engine.close, turns.close, rewards.close]
        serve_answers(link, engine, Answers(self.align, engine, turns, rewards, recorder), baseline)

    def objective(self, laid: Laid, source: Source) -> Objective:
        return self.feedback.objective()

    def _reference(self, laid: Laid) -> Reference:
        """What a frozen model beside the one that is trained says; without its adapters, that one is it."""
        if self.config.lora.rank and self.align.reference is None:
            return partial(base_figures, laid)
        folder = self.align.reference or first_weights(self.folder)
        if folder is None:
            raise UsageError(f"{self.folder} does not say what it began with: name a folder with align.reference")
        config = read_reference(folder, laid.model.config)
        model = Transformer(config, device="meta", dtype=laid.stream_dtype, kernels=laid.model.kernels)
        reference = lay_beside(model, laid)
        load_stored(reference, Path(folder))
        return partial(token_figures, reference)

    def _dtype(self, trained: torch.dtype, on_gpu: bool) -> torch.dtype:
        """Of the engine's weights."""
        chosen = read_dtype(self.align.dtype or None)
        narrow = {**dict.fromkeys(("bf16", *MASTERED), torch.bfloat16), "fp16": torch.float16}
        return chosen or (narrow.get(self.config.plan.precision) if on_gpu else None) or trained

    def _engine(self) -> EngineConfig:
        align = self.align
        many = max(align.prompts * align.answers, align.held_out * align.pass_k)
        many *= 2 + align.batches_ahead if align.streams else 1
        return EngineConfig(
            running=align.running, waiting=many, seed=self.config.train.seed, invariant=align.invariant,
            context=self.config.context, step_tokens=STEP_TOKENS, packed=False if self.run.is_small else None,
            prefix_room=0, share_answers=align.turns > 1,  # new weights forget all pages
        )  # fmt: skip

    def words(self) -> str:
        return self.align.words

    def notes(self) -> str:
        return "" if self._rollouts is None else self._rollouts.notes

    def sample(self, loop: Loop) -> str | None:
        return None

    def figures(self) -> dict[str, Any]:
        drawing = {} if self._rollouts is None else self._rollouts.drawing_memory()
        return {"algorithm": self.align.algorithm, "task": self.align.task, "drawing": drawing}

    def close(self) -> None:
        with ExitStack() as stack:  # the others close though one fails
            for closing in self._closing:
                stack.callback(closing)
            self._closing.clear()


def lessons_of(folder: Path, link: Communicator | None = None) -> Callable[[TrainConfig], FeedbackLessons]:
    """What makes the lessons of the run in a folder; the training configuration is the one that a rank was given."""
    align = of_run(folder).align
    return lambda training: FeedbackLessons(AlignConfig(training, align), folder, link)
