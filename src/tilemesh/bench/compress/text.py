"""What a model is compressed from and judged by: its folder, and tokens to calibrate with and to hold out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tilemesh.bench.serve.models import random_served
from tilemesh.compress.calibrate import LEAST_TOKENS
from tilemesh.core.errors import UsageError
from tilemesh.core.files import check_finished
from tilemesh.data.config import DataConfig
from tilemesh.data.corpus import check_vocabulary, open_corpus
from tilemesh.data.samples import SamplePair, held_out_samples, train_mixture
from tilemesh.data.tokenizer import Bytes
from tilemesh.model import huggingface
from tilemesh.model.config import preset
from tilemesh.model.families.book import CONFIG
from tilemesh.model.families.carried import TOKENIZER
from tilemesh.model.transformer import Transformer
from tilemesh.runs.names import CONFIG as RUN_CONFIG
from tilemesh.train.config import of_run
from tilemesh.train.export import export

LONGEST = 256
"""Tokens of a sequence, where the model's context is longer: calibration and judgement see many short ones."""

MOST_UNSEEN = 4096
"""Held-out sequences after the judged ones, that calibration chooses from."""


@dataclass(frozen=True)
class CompressSource:
    """A plain model, the folder that it lies in with its tokenizer, and its text."""

    name: str
    folder: Path
    model: Transformer
    data: DataConfig

    def text(
        self, calibrate: int, held_out: int, seed: int, say: Callable[[str], None] = lambda words: None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Calibration tokens (sequences, tokens + 1), held-out tokens and their targets.

        Calibration is on held-out text after that which is judged, where there is enough, and else on training text:
        what a model does with text that it knows by heart says little about other text.
        """
        context = min(LONGEST, self.model.config.context)
        corpus = open_corpus(self.data)
        check_vocabulary(corpus.tokenizer, self.model.config.vocabulary)
        mixture = train_mixture(corpus, context, "stream", seed)
        if calibrate * context < LEAST_TOKENS or len(mixture) < calibrate:
            least = -(-LEAST_TOKENS // context)
            what = f"set --calibrate from {least} to {len(mixture)}" if len(mixture) >= least else "set --data to more"
            raise UsageError(
                f"{calibrate} sequences of {context} tokens to calibrate with, and the text has {len(mixture)}: "
                f"expected at least {LEAST_TOKENS} tokens; {what}"
            )
        samples = held_out_samples(corpus, context, "stream", held_out + MOST_UNSEEN)
        if not samples:
            raise UsageError(f"the text of {self.data.source} has nothing held out: set --data to a longer text")
        unseen = samples[held_out:]
        if len(unseen) >= calibrate:
            order = np.random.default_rng(seed).permutation(len(unseen))[:calibrate]
            chosen = [unseen[place] for place in order]
        else:
            chosen = [mixture.at(place) for place in range(calibrate)]
        is_guess = isinstance(corpus.tokenizer, Bytes) and not (self.folder / TOKENIZER).is_file()
        if is_guess and self.model.config.vocabulary > corpus.tokenizer.vocabulary:
            say(f"{self.name} has no {TOKENIZER}: text is read as bytes, which says little of a model of other tokens")
        tokens, targets = (torch.from_numpy(np.stack(part)) for part in zip(*samples[:held_out], strict=True))
        return _joined(chosen), tokens.long(), targets.long()


def _joined(pairs: list[SamplePair]) -> Tensor:
    """Inputs with the last target after them."""
    return torch.from_numpy(np.stack([np.append(inputs, targets[-1]) for inputs, targets in pairs])).long()


@contextmanager
def random_source(name: str, data: str | None, device: torch.device) -> Iterator[CompressSource]:
    """A preset's shape with random weights: its bytes and times say something, its loss does not."""
    config = preset(name).replace(dropout=0.0)
    model = random_served(name, config, torch.float32, device).model
    yield CompressSource(f"{name}, random weights", Path(name), model, DataConfig(source=data or "stdlib"))


@contextmanager
def open_source(place: str, data: str | None, step: int | None, say: Callable[[str], None]) -> Iterator[CompressSource]:
    """A run, whose checkpoint is written as a Hugging Face folder for as long as this lasts, or such a folder."""
    path = Path(place)
    if (path / CONFIG).is_file():
        if step is not None:
            raise UsageError(f"step is {step} and {path} is a Hugging Face folder, which has no steps: leave it out")
        tokenizer = path / TOKENIZER
        config = DataConfig(source=data or "stdlib", tokenizer=tokenizer if tokenizer.is_file() else None)
        yield CompressSource(path.resolve().name, path, huggingface.load(path).eval().requires_grad_(False), config)
        return
    if not (path / RUN_CONFIG).is_file():
        check_finished(path)
        raise UsageError(
            f"{path} is neither a run, with a {RUN_CONFIG}, nor a folder of Hugging Face, with a {CONFIG}: give one "
            "of them"
        )
    config = of_run(path).data
    if data is not None:
        config = DataConfig(source=data, tokenizer=config.tokenizer)
    with tempfile.TemporaryDirectory(prefix="tilemesh-compress-") as exported:
        export(path, exported, step, say)
        model = huggingface.load(exported).eval().requires_grad_(False)
        yield CompressSource(path.resolve().name, Path(exported), model, config)
