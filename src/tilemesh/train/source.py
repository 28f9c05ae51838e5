"""What a step is given: where batches come from, what is trained for, and text as the source that there is.

A step knows neither a corpus nor a model's loss. It asks a `Source` for the microbatches of a step by its number, and
hands the tensors of each to the loss of an `Objective`. Another source (a teacher's logits beside the tokens), or
another objective (distillation), is another value handed to `steps.Stepper`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.data.order import rows_of
from tilemesh.data.samples import IGNORED, SamplePair, held_out_samples, train_mixture
from tilemesh.data.stream import Corpus
from tilemesh.data.tokenizer import Bytes, Unknown
from tilemesh.model.experts import Experts
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Axis
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.train.config import TrainConfig

Loss = Callable[..., tuple[Tensor, Tensor]]
"""From a microbatch's tensors (with dropout also `dropout_seed=` and `place=`) to summed loss and targets counted."""


class Microbatch(NamedTuple):
    tensors: tuple[Tensor, ...]
    """What the loss takes, on the device; for text the inputs and the targets."""
    row: int
    """Where its first row stands in the step's whole batch."""


class Source(Protocol):
    """Batches by the number of the step alone, so that a batch can be made again at any time."""

    names: Sequence[str]
    """Of the tensors of a microbatch, under which a batch that led to NaN is kept."""

    def fetch(self, number: int) -> list[Microbatch]:
        """This replica's microbatches of step `number`, counted from 1."""

    def held_out(self) -> Iterator[Microbatch]:
        """This replica's part of what is never trained on, the same each time; nothing where there is none."""

    def held_out_bytes_per_token(self) -> float | None:
        """Bytes of text per target of what is held out; None where the tokens stand for no text."""
        return None

    def tokens(self, number: int) -> int:
        """Tokens of step `number` over all replicas, padding not counted."""

    def fingerprint(self) -> str:
        """A short name of the content: a run that goes on with other data is told so."""

    def held_out_fingerprint(self) -> str:
        """A short name of what is held out: losses of other text are not compared."""
        return self.fingerprint()

    def go_on(self, steps: int, position: int) -> None:
        """After so many steps so many samples had been taken; a run may go on with another batch size."""

    def before_checkpoint(self) -> None:
        """Keep on disk what steps after a checkpoint need and nobody could make again (a collective call)."""
        return

    counts: str = "tokens"
    """What `tokens` counts."""

    is_made_of_weights: bool = False
    """Whether a step's batch follows from the weights before it, so that none may be fetched before the update."""

    def figures(self, number: int, loss: float) -> dict[str, Any]:
        """What there is to say of step `number` beside its loss, after it (a collective call)."""
        return {}


@dataclass(frozen=True)
class Objective:
    """What training lowers, and what held-out batches are judged by, which is not compiled."""

    loss: Loss
    held_out: Loss


def next_token(config: TrainConfig, laid: Laid) -> Objective:
    """The loss of predicting each next token."""
    if not config.train.compile:
        return Objective(laid.loss, laid.loss)
    if config.plan.tp * config.plan.cp > 1:
        laid.seams.stay_out_of_graphs()
    for module in laid.module.modules():
        if isinstance(module, Experts):
            module.stay_out_of_graphs()
    # A layer's number is a constant of its code where it is read (dropout, slices), beside what is added before it and
    # whether gradients are kept. What is beyond the limit torch would run as it is.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * config.model.layers)
    if isinstance(laid, Pipeline):
        laid.compile_passes()
        return Objective(laid.loss, laid.loss)
    if config.train.compile == "layers":
        return Objective(functools.partial(laid.loss, regions=laid.compiled_regions()), laid.loss)
    compiled: Any = torch.compile(laid.loss)
    return Objective(compiled, laid.loss)


def order_settings(config: TrainConfig) -> dict[str, Any]:
    """What decides, besides the text, which sequence stands at a position of the data."""
    data = config.data
    order = {"train.context": config.context, "train.seed": config.train.seed, "data.packing": data.packing}
    return {**order, "data.mixture": [str(part) for part in data.mixture]}


class TextSource(Source):
    """Sequences of a corpus in the order that the seed says."""

    names: Sequence[str] = ("tokens", "targets")

    def __init__(self, config: TrainConfig, corpus: Corpus, dp: Axis, device: torch.device) -> None:
        self.config, self.corpus, self.dp, self.device = config, corpus, dp, device
        self.mixture = train_mixture(corpus, config.context, config.data.packing, config.train.seed)
        self._steps, self._position = 0, 0

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def go_on(self, steps: int, position: int) -> None:
        self._steps, self._position = steps, position

    def fetch(self, number: int) -> list[Microbatch]:
        config, plan = self.config, self.config.plan
        position = self._position_of(number)
        batches = []
        for micro in range(plan.accumulation):
            rows = rows_of(config.batch, plan.dp, self.dp.index, plan.accumulation, micro)
            pairs = [self.mixture.at(position + row) for row in rows]
            batches.append(Microbatch(self._on_device(pairs), rows.start))
        return batches

    def tokens(self, number: int) -> int:
        if self.config.data.packing != "none":
            return self.config.tokens_per_step
        position = self._position_of(number)
        return sum(self.mixture.tokens(position + row) for row in range(self.config.batch))

    def _position_of(self, number: int) -> int:
        """Where the samples of step `number` begin."""
        return self._position + (number - 1 - self._steps) * self.config.batch

    def held_out(self) -> Iterator[Microbatch]:
        """The first held-out sequences, divided among the replicas."""
        config = self.config
        mine = range(self.dp.index, len(self._held), self.dp.size)
        for begin in range(0, len(mine), config.plan.microbatch):
            rows = mine[begin : begin + config.plan.microbatch]
            yield Microbatch(self._on_device([self._held[row] for row in rows]), rows.start)

    @functools.cached_property
    def _held(self) -> list[SamplePair]:
        config = self.config
        return held_out_samples(self.corpus, config.context, config.data.packing, config.evaluate.sequences)

    def held_out_fingerprint(self) -> str:
        return self._held_digest

    @functools.cached_property
    def _held_digest(self) -> str:
        digest = hashlib.sha256()
        for pair in self._held:
            digest.update(np.stack(pair).tobytes())
        return digest.hexdigest()[:16]

    def held_out_bytes_per_token(self) -> float | None:
        tokenizer, counted = self.corpus.tokenizer, [targets[targets != IGNORED] for _, targets in self._held]
        total = sum(map(len, counted))
        if isinstance(tokenizer, Unknown | Bytes) or not total:
            return 1.0 if isinstance(tokenizer, Bytes) and total else None
        try:
            texts = tokenizer.spell(False)  # special tokens are no text, and characters may be cut
        except UsageError:
            return sum(len(tokenizer.decode(tokens.tolist()).encode(errors="replace")) for tokens in counted) / total
        return sum(len(texts[token] or b"") for tokens in counted for token in tokens.tolist()) / total

    def _on_device(self, pairs: Sequence[SamplePair]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some sequences."""
        tokens = np.stack([np.stack(pair) for pair in pairs], axis=1)
        vocabulary = self.config.model.vocabulary
        largest = max(int(tokens.max()), -1 - int(tokens[0].min()))  # tokens that begin a document are marked
        if largest >= vocabulary:  # shards from elsewhere; a GPU would end the process without a word on why
            raise UsageError(
                f"the data has token {largest} and the model's vocabulary is {vocabulary}: set model.vocabulary, or "
                "prepare the data with another tokenizer"
            )
        tensors = torch.from_numpy(tokens)
        if self.device.type == "cuda":
            tensors = tensors.pin_memory().to(self.device, non_blocking=True)
        inputs, targets = tensors.unbind()
        return inputs, targets
