"""Write text with a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tilemesh.cli.output import tell
from tilemesh.core.options import MAY_BE_EMPTY, argument, option


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    source: str = argument(..., "A run's folder, or a Hugging Face folder.", "RUN")
    prompt: Annotated[str, MAY_BE_EMPTY] = option(..., "What to go on from.")
    tokens: int = option(200, "At most so many; the text ends before an end token.", "N")
    temperature: float = option(0.7, "0 always takes the likeliest.")
    top_k: int = option(0, "Draw only from the K likeliest tokens; 0: all.", "K")
    top_p: float = option(1.0, "Only from the likeliest that together have P.", "P")
    seed: int = option(0, "Another seed draws another text.")
    ignore_eos: bool = option(False, "Go on after an end token.")
    explain: bool = option(False, "Say which programs compute the model, and why not others.")
    step: str | None = option(None, "Which checkpoint; the newest, if not given.", "N|best")


def generate(options: GenerateOptions) -> None:
    from tilemesh.runs.reader import read_step
    from tilemesh.serve.write import generate as write

    print(options.prompt + write(**vars(options) | {"step": read_step(options.source, options.step)}, say=tell))
