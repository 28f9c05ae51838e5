"""What a run learns from: text as it is read, or something else that another room hands to a rank.

A rank knows neither a corpus nor what a model is trained for. It asks its `Lessons` for the source of batches, the
objective, and what there is to say of both; everything else (mesh, steps, checkpoints, records) is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilemesh.core.errors import UsageError
from tilemesh.data.config import STDLIB
from tilemesh.data.corpus import check_vocabulary, open_corpus
from tilemesh.data.documents import misnamed_words
from tilemesh.data.samples import held_out_samples, train_mixture
from tilemesh.data.tokenizer import encode_prompt
from tilemesh.model.programs.program import Use
from tilemesh.model.sampling import sample
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Mesh
from tilemesh.runs.kind import TRAIN, Kind
from tilemesh.train.config import TrainConfig
from tilemesh.train.record import Recorder
from tilemesh.train.servers import Seat, WorkerSource
from tilemesh.train.source import Objective, Source, TextSource, next_token
from tilemesh.train.teach import from_teacher

if TYPE_CHECKING:
    from tilemesh.train.loop import Loop


@dataclass
class Lessons:
    """Text: each next token of a corpus, or what a teacher says of it. Other lessons override what differs."""

    config: TrainConfig
    kind: Kind = TRAIN
    """Of the run."""

    def open(self) -> None:
        """Read what there is, before a model is made."""
        self.corpus = open_corpus(self.config.data)
        check_vocabulary(self.corpus.tokenizer, self.config.model.vocabulary)
        if (self.config.evaluate.patience or self.config.checkpoint.keep_best) and (why := self._nothing_held_out()):
            raise UsageError(f"evaluate.patience and checkpoint.keep_best go by a held-out loss, and {why}")

    def _nothing_held_out(self) -> str:
        """Why there is no held-out loss, where something is held out; else nothing."""
        config, tokens = self.config, sum(part.held_out.length for part in self.corpus.parts)
        samples = held_out_samples(self.corpus, config.context, config.data.packing, 1)
        less = "set data.held_out higher, or train.context lower, or give more text"
        is_odd = tokens and config.evaluate.sequences and not samples
        return f"the {tokens} tokens held out hold no sequence of {config.context + 1}: {less}" if is_odd else ""

    @property
    def is_steady(self) -> bool:
        """Whether every step has the same number of targets that count."""
        return self.corpus.counts_all and self.config.data.packing == "stream"

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def lay(self, mesh: Mesh, device: torch.device) -> Laid | None:
        """What is trained, where that is not the configuration's Transformer."""
        return None

    def extend(self, model: Transformer) -> None:
        """Add to the model what is trained beside it, before it is laid."""

    def use_for(self, use: Use) -> Use:
        """What the model is prepared for."""
        return use

    def written_by(self) -> dict[str, Any]:
        """What checkpoints say of what is trained, beside the model's configuration."""
        return {}

    def source(self, laid: Laid, recorder: Recorder, seat: Seat | None) -> Source:
        device = next(laid.module.parameters()).device
        if seat is None:
            return TextSource(self.config, self.corpus, laid.mesh.dp, device)
        return WorkerSource(self.config, self.corpus, seat.axis, device)

    def objective(self, laid: Laid, source: Source) -> Objective:
        return next_token(self.config, laid) if self.config.distill.teacher is None else from_teacher(self.config, laid)

    def words(self) -> str:
        """What is learnt from, in a line."""
        config = self.config
        samples = train_mixture(self.corpus, config.context, config.data.packing, config.train.seed)
        epochs = config.train.steps * config.batch / max(1, len(samples))
        steps = f"{config.train.steps} steps of {config.tokens_per_step:,} tokens are {epochs:.3g} epochs"
        return f"{self.corpus.words}; {steps}"

    def notes(self) -> str:
        """What is odd about it; nothing where nothing is."""
        why = self._nothing_held_out()
        return "; ".join(filter(None, (misnamed_words(self.config.data), f"no held-out loss: {why}" * bool(why))))

    def sample(self, loop: Loop) -> str | None:
        """What the model writes now; every rank of the first replica takes part, since each holds a part of it."""
        config, tokenizer = self.config, self.corpus.tokenizer
        own_text = config.data.source != STDLIB or config.data.mixture
        begin = config.sample.prompt or ("" if own_text else "def ")
        try:
            prompt = encode_prompt(tokenizer, begin) if begin else self.corpus.train.tokens(0, 8).tolist()
        except UsageError:  # shards from elsewhere, of which nobody knows the tokenizer
            prompt = []
        prompt = prompt or [int(self.corpus.train.sample(0, 1)[0])]  # begin as a document does
        asked = config.sample
        tokens = sample(
            lambda x, cache: loop.laid.logits(x, cache=cache), prompt, asked.tokens, context=config.model.context,
            temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, seed=config.train.seed,
            device=loop.device,
        )  # fmt: skip
        return tokenizer.decode([*prompt, *tokens])

    def figures(self) -> dict[str, Any]:
        """What a run's summary says of it."""
        return {}

    def close(self) -> None:
        """Give back what is not this rank's model."""


MakeLessons = Callable[[TrainConfig], Lessons]
