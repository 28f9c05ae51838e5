"""What is known of another engine: its options as rows of ours, what it cannot run, and what it cannot be told.

The one idea: an engine is a value. A row is one of its options and what gives its value; `write.py` knows how flags,
YAML and JSON look and nothing of what they mean, `tables.py` the other way round.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tilemesh.core.hardware import Cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import PRESETS, ModelConfig
from tilemesh.model.work.task import Code
from tilemesh.runs.names import CONFIG as RUN

HUGGINGFACE = "config.json"
"""What makes a folder a Hugging Face folder."""


@dataclass(frozen=True)
class EngineJob:
    """What an engine is to run."""

    model: ModelConfig
    plan: ParallelPlan
    cluster: Cluster
    context: int
    source: str
    """The model as it was named: a folder or a file of it, or a name."""
    compiled: bool = False
    running: int = 0
    """Of serving: sequences in a batch, at most ..."""
    step_tokens: int = 0
    """... and tokens in a step."""

    @property
    def folder(self) -> str:
        """The model for an engine that reads Hugging Face folders; what is none has to be named when it starts."""
        path = Path(self.source)
        if path.name == HUGGINGFACE and path.is_file():
            path = path.parent
        if self.source not in PRESETS and (path / HUGGINGFACE).is_file():
            return shlex.quote(str(path.resolve()))
        first = ": export it first (tilemesh export RUN FOLDER)" if (path / RUN).is_file() else ""
        return f'"${{MODEL:?a Hugging Face folder of the model{first}}}"'

    def describe(self) -> str:
        """One line for people: of training the whole plan, of serving what each replica takes."""
        if not self.running:
            return self.plan.describe()
        return (
            f"{self.plan.mesh_words} = {self.plan.world} ranks, {self.plan.precision}, per replica up to "
            f"{self.running:,} sequences, {self.step_tokens:,} tokens in a step"
        )


class EngineOption(NamedTuple):
    """One option of theirs; a value of None leaves it out, and of flags True is one without a word."""

    name: str
    value: Callable[[EngineJob], Any]


class EngineRefusal(NamedTuple):
    """Plans that an engine cannot run: the field that would have to differ ("model": none would help), and why."""

    field: str
    when: Callable[[EngineJob], bool]
    why: str


class EngineNote(NamedTuple):
    """What an engine cannot be told, or does otherwise than was planned: a comment in what is written for it."""

    when: Callable[[EngineJob], bool]
    words: str


@dataclass(frozen=True)
class OtherEngine:
    """One engine at the version whose options these are."""

    name: str
    version: str
    form: Literal["flags", "yaml", "json"]
    """Of its options: words of the command, or a file beside it."""
    command: Callable[[EngineJob], str]
    """What is started on each node, without the options; `{launcher}` stands for torchrun and its words."""
    options: tuple[EngineOption, ...]
    refusals: tuple[EngineRefusal, ...] = ()
    notes: tuple[EngineNote, ...] = ()
    last: Callable[[EngineJob], str] = lambda job: ""
    """Words after all flags."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of a plan for it, what is fixed unless the user fixes it."""
    code: Code = "fused"
    """What its layers are computed by, unless the user says otherwise."""
    environment: Callable[[EngineJob], Mapping[str, str]] = lambda job: {}

    @property
    def file(self) -> str:
        """The name of its configuration; empty where that is flags."""
        return "" if self.form == "flags" else f"{self.name}.{self.form}"

    def why_not(self, job: EngineJob) -> Iterator[EngineRefusal]:
        """What keeps it from running a job."""
        return (refusal for refusal in self.refusals if refusal.when(job))

    def values(self, job: EngineJob) -> dict[str, Any]:
        """Its options, by their names."""
        pairs = ((name, value(job)) for name, value in self.options)
        return {name: value for name, value in pairs if value is not None}
