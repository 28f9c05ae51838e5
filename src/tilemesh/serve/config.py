"""How an engine serves, as one value: what `tilemesh serve` takes as options and `Engine` as keywords."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tilemesh.core.errors import UsageError
from tilemesh.core.options import Seed, check_options, option
from tilemesh.core.ranges import Range

_Some = Annotated[int, Range(1, 2**40)]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """`EngineConfig(running=8, kv_cache="int8")`; fields without a flag are for Python alone."""

    dtype: str | None = option(None, "fp32, bf16, fp16 or fp64; by default that of the weights.")
    device: str = option("cpu", "cpu, or cuda.")
    pages: _Some | None = option(None, "Pages for keys and values.", "N")
    memory: float | None = option(None, "Instead: the share of the free memory.", "0.9")
    page_tokens: _Some = option(16, "Tokens per page.", "N")
    context: _Some | None = option(None, "Longest sequence; by default the model's.", "N")
    step_tokens: _Some = option(512, "Most tokens computed in one step.", "N")
    chunk_tokens: _Some | None = option(None, "Most tokens of one prompt in a step.", "N")
    running: _Some = option(64, "Most requests at a time.", "N")
    waiting: _Some = option(1024, "Most requests beside; more get status 429.", "N")
    swap_pages: Annotated[int, Range(0, 2**40)] = option(0, "Pages in CPU memory for preempted requests.", "N")
    speculate: Annotated[int, Range(0, 64)] = option(0, "Guess up to N tokens per step from text that repeats.", "N")
    """Or with a draft model (by default 4) from what that would write. Answers stay what they are, and where guesses do
    not pay there are none."""
    invariant: bool = option(False, "Answers do not depend on the batch, bit for bit.")
    adapters: Annotated[int, Range(0, 1024)] = option(0, "Most adapters (LoRA) held at a time.", "N")
    adapter_rank: Annotated[int, Range(1, 4096)] = option(16, "Highest rank of an adapter.", "N")
    kv_cache: Literal["", "int8", "fp8"] = option(
        "", "Keep keys and values in 8 bits: twice as many tokens as in 16.", "int8|fp8"
    )
    """With a scale for each token and head."""
    share_prefixes: bool = option(
        True, "Compute what prompts begin alike with once.", flag="--prefix-cache/--no-prefix-cache"
    )
    seed: Seed = option(0, "Of requests that bring none.")
    step: int | None = option(None, "Which checkpoint; the newest, if not given.", "N")
    ranks: int = 0
    """So many processes share each matrix (tensor parallel, over `parallel/`); 0: this process computes."""
    shared_by: int = 1
    """How many engines share this machine's cores; such ones do not wait for their ranks: `Engine.wait_ready`."""
    launch_ahead: bool | None = None
    """Launch a step before the tokens of the last are known, decoding as CUDA graphs; None: on a GPU, and never in
    invariant mode. On a CPU, many answers that decode together are then stepped as arrays."""
    packed: bool | None = None
    """On a CPU, hold weights in the layout of its products as well, which makes these faster and takes as much memory
    again; None: on arm64, where a quarter of the free memory is enough, and never in invariant mode."""
    prefix_room: int = 15
    """On a GPU, pages beyond those that `running` requests can fill, as a multiple of these, where memory has room:
    what later prompts may begin with stays there."""
    share_answers: bool = True
    """Whether what answers computed is found by prompts that begin with them: takes time where none will."""
    prepare: bool = False
    """Capture the graphs of all batch sizes before the first request, so that none waits for it."""

    def __post_init__(self) -> None:
        check_options(self)
        Range(0, 1024).check("ranks", self.ranks, whole=True)
        Range(0, 2**20).check("prefix_room", self.prefix_room, whole=True)
        if self.pages is not None and self.memory is not None:
            raise UsageError("pages and memory were both given: leave one of them out")
