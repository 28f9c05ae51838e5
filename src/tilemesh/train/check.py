"""What a training configuration may be, and what a job may ask for: it refuses before anything exists.

Three questions. `check_values`: is every value of its type and in its range, and do the values agree with each other
(`conflicts.py`, the mesh with the model)? It looks at nothing but the configuration. `check_machine`:
does this machine have what it names (GPU, text, tokenizer)? `check_job`: does the rest of what `fit` was asked for
agree with it? `load` and `fit` call them, so a command and a Python program are refused in the same words, before there
is a run's folder or a rank. Sections that others use too (model, data, plan) check themselves where they are made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tilemesh.compress.config import check_teacher, training_recipe
from tilemesh.compress.recipe import Recipe, check_blocks, chosen_schemes
from tilemesh.core import config
from tilemesh.core.conflicts import refuse
from tilemesh.core.context import membership
from tilemesh.core.cores import available_cores
from tilemesh.core.errors import Argument, RunError, UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.ranges import shown
from tilemesh.data.config import SHARD_SUFFIX, STDLIB, DataConfig, check_source, has_shards, source_path
from tilemesh.data.documents import documents, source_bytes
from tilemesh.launch.job import MOST_RANKS, RANKS_PER_CORE
from tilemesh.launch.start import check_restarts, choose_transport
from tilemesh.measure.machine import this_machine, usable_gpus
from tilemesh.model.adapter import A, B, adapted_modules
from tilemesh.model.config import ModelConfig, check_written_model, unlike
from tilemesh.model.families.book import read_config
from tilemesh.model.work.weights import layer_weights, parameter_names, why_not, why_not_tp
from tilemesh.runs import folder as folders
from tilemesh.runs.base import check_base
from tilemesh.runs.manifest import MODEL, DamagedError, Manifest, checkpoints
from tilemesh.runs.names import CHECKPOINTS, CONFIG, DAMAGED
from tilemesh.train.config import TrainConfig, of_run
from tilemesh.train.conflicts import OF_CONFIG, OF_PLAN
from tilemesh.train.fits import check_fits, less_memory
from tilemesh.train.loggers import check_loggers
from tilemesh.train.rules import decay_patterns

_RUN = Argument("run", "--out")
_STOP_AFTER = Argument("stop_after")
_CUT_BY_INPUTS = (".fc_o", ".fc_out")
"""Matrices of a layer of which a rank of tp has some inputs; of the others it has some outputs."""


def check_types(made: TrainConfig) -> None:
    """Refuse what is no configuration, and values of other types than it says: a dataclass takes anything."""
    if not isinstance(made, TrainConfig):
        raise UsageError(
            f"config is {shown(made)}: expected a TrainConfig, which tilemesh.train.load_config makes of a preset's "
            "name or a TOML file"
        )
    config.from_dict(TrainConfig, config.to_dict(made))


class LayoutError(UsageError):
    """A mesh that does not divide the model or the batch: whoever knows what was typed adds what works instead."""

    made: TrainConfig

    @classmethod
    def of(cls, made: TrainConfig, text: str) -> LayoutError:
        error = cls(text)
        error.made = made
        return error


def check_values(made: TrainConfig) -> None:
    """Refuse values that cannot be, alone or together. Pure: this machine is not looked at."""
    config.check_fields(made)
    refuse(OF_PLAN, made)
    reason = why_not(made.model, made.plan)
    if reason:
        raise LayoutError.of(made, f"plan.{reason}")
    refuse(OF_CONFIG, made)
    _check_decay_groups(made)
    _check_lora(made)
    _check_compress(made)


def _check_decay_groups(made: TrainConfig) -> None:
    """Refuse a pattern that no parameter's name matches: its decay would silently apply to nothing."""
    patterns = decay_patterns(made.optimizer)
    if not patterns:
        return
    names = parameter_names(made.model)
    if made.lora.rank:  # nothing else is trained
        names = [f"{module}.{part}" for module in adapted_modules(made.model, made.lora) for part in (A, B)]
    for pattern, _ in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            few = ", ".join(dict.fromkeys([names[0], names[len(names) // 2], names[-1]]))
            raise UsageError(
                f"optimizer.decay_groups has '{pattern}', which matches no parameter that is trained: expected a "
                f"pattern of names such as {few}"
            )


def _check_lora(made: TrainConfig) -> None:
    if not made.lora.rank:
        return
    adapted_modules(made.model, made.lora)
    if made.lora.base is None:
        raise UsageError(
            f"lora.rank is {made.lora.rank} and there are no weights to add adapters to: name a Hugging Face folder: ",
            Argument("init"),
        )


def _check_compress(made: TrainConfig) -> None:
    """Refuse a recipe that the model's matrices, or a rank's parts of them, do not allow, and a teacher of others."""
    recipe = training_recipe(made.compress.recipe)
    if recipe is not None:
        chosen_schemes(recipe, _matrices(made.model))
        check_blocks(recipe, _matrices(made.model))
        if made.plan.tp > 1:
            _check_cut(recipe, _matrices(made.model), made.plan.tp)
    if made.distill.teacher is None:
        return
    if not (made.distill.teacher / "config.json").is_file():
        raise UsageError(
            f"distill.teacher is {made.distill.teacher}: expected a Hugging Face folder; `tilemesh export` "
            "makes one of a run"
        )
    teacher = read_config(made.distill.teacher)
    check_teacher(made.model, teacher, made.distill)
    reason = why_not_tp(teacher, made.plan.tp)
    if reason:
        raise UsageError(f"the teacher is cut over tp as the student is, and {reason}; set another plan.tp")


def _check_cut(recipe: Recipe, shapes: dict[str, tuple[int, int]], tp: int) -> None:
    """Refuse what cannot be done in the parts of matrices that ranks hold, as they would."""
    cut = {name: (outputs, inputs // tp) for name, (outputs, inputs) in shapes.items() if name.endswith(_CUT_BY_INPUTS)}
    whole = chosen_schemes(recipe, shapes)
    for name, (_, inputs) in cut.items():
        if name in whole and whole[name].granularity == "group" and inputs % whole[name].group:
            raise UsageError(
                f"{name}: groups of {whole[name].group} do not divide the {inputs} inputs of a rank; round in smaller "
                "groups or per channel, or set a smaller plan.tp"
            )
    try:
        check_blocks(recipe, cut)
    except UsageError as error:
        raise UsageError(f"{error} on each of {tp} ranks; set a smaller plan.tp") from None


def _matrices(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the matrices that a recipe may name."""
    inside = {weight.name: (weight.outputs, weight.inputs) for weight in layer_weights(model) if weight.inputs > 1}
    shapes = {f"layers.{layer}.{name}": shape for layer in range(model.layers) for name, shape in inside.items()}
    return shapes if model.tied else {**shapes, "output": (model.vocabulary, model.width)}


def check_machine(made: TrainConfig) -> None:
    """Refuse what this machine has not: a GPU, the text, the tokenizer, place for so many ranks."""
    if made.train.device == "cuda" and not usable_gpus():
        raise UsageError("train.device is cuda and this machine has no GPU: set train.device=cpu, or auto")
    if made.train.graph and not usable_gpus():
        raise UsageError("train.graph is true and this machine has no GPU: set train.graph=false, or leave it out")
    most = max(MOST_RANKS, RANKS_PER_CORE * available_cores())
    if membership() is None and made.ranks > most:
        raise UsageError(
            f"a plan of {made.ranks} ranks ({_axes_words(made)}) on a machine with {available_cores()} cores: at "
            f"most {most} are started here; set {_fewer(made)} lower, or start them with mpiexec or srun"
        )
    fallback = made.checkpoint.fallback_dir
    if fallback is not None and (fallback == Path() or (fallback.exists() and not fallback.is_dir())):
        raise UsageError(f"checkpoint.fallback_dir is '{fallback}': expected a folder, or a name for one")
    check_loggers(made.log)
    if made.lora.rank:
        check_init(made.lora.base, made)
    check_fits(made, this_machine().memory_bytes, usable_gpus(), lambda plan: _takes(made, plan))
    check_source(made.data)
    _check_length(made)
    first, _ = made.data.parts[0]
    if made.data.tokenizer is not None or (first.source != STDLIB and has_shards(source_path(first.source))):
        from tilemesh.data.corpus import check_vocabulary, tokenizer_of  # late: numpy, which bytes do not need

        check_vocabulary(tokenizer_of(made.data), made.model.vocabulary)
    elif made.model.vocabulary < _BYTES:
        raise UsageError(
            f"model.vocabulary is {made.model.vocabulary} and text is read as bytes: set model.vocabulary={_BYTES}, or "
            f"data.tokenizer, or a folder of {SHARD_SUFFIX} shards"
        )


def memory_advice(made: TrainConfig) -> str:
    """For a run that ran out of memory: how much it was predicted to need, and what would need less."""
    return less_memory(made, this_machine().memory_bytes, usable_gpus(), lambda plan: _takes(made, plan))


def _takes(made: TrainConfig, plan: ParallelPlan) -> bool:
    try:
        check_values(dataclasses.replace(made, plan=plan))
    except UsageError:
        return False
    return True


def _axes_words(made: TrainConfig) -> str:
    servers = f" + {made.servers} server{'s' * (made.servers > 1)}" if made.servers else ""
    return " x ".join(f"{name} {size}" for name, size in made.plan.axes.items()) + servers


def _fewer(made: TrainConfig) -> str:
    return "plan.dp and method.servers" if made.servers else "plan.dp and plan.tp"


_READ_AT_ONCE = 1 << 18
_PLENTY = 16  # sequences' worth of bytes that hold one whatever a tokenizer joins and a few documents hold out


def _check_length(made: TrainConfig) -> None:
    """Refuse a source that holds no sequence: what is small enough for that is read as the ranks will read it."""
    setting = "data.mixture" if made.data.mixture else "data.source"
    for part, _ in made.data.parts:
        if part.source == STDLIB or not _may_be_short(part, made.context):
            continue
        from tilemesh.data.corpus import open_corpus  # late: numpy, which plenty of bytes does not need
        from tilemesh.data.samples import Samples

        corpus = open_corpus(part)
        if len(Samples(corpus.train, made.context, part.packing, corpus.tokenizer.end)):
            continue
        if part.packing == "none":
            raise UsageError(f"{setting} {part.source} has no document with a token in it: give one with text")
        held = f", {corpus.held_out.length} are held out" if corpus.held_out.length else ""
        raise UsageError(
            f"the text of {setting} {part.source} is shorter than one sequence ({corpus.train.length} tokens are "
            f"left for training{held}, a sequence takes {made.context + 1}): set train.context lower, or give more text"
        )


def _may_be_short(part: DataConfig, context: int) -> bool:
    """Whether a source has so few bytes that it might hold no sequence; without numpy."""
    if has_shards(source_path(part.source)):
        return part.packing != "none"  # their lengths are known; where documents begin would have to be looked for
    enough = _PLENTY * (context + 1)
    if source_bytes(part) > max(_READ_AT_ONCE, enough):
        return False
    if part.tokenizer is not None or part.chat or part.packing == "none" or part.held_out > 0.5:
        return True
    return sum(len(document.content) + 1 for document in documents(part)) < enough


_BYTES = 256


def check_init(init: str | Path | None, made: TrainConfig | None = None) -> None:
    """Refuse a folder to begin from that holds no Hugging Face model, or another model than the configuration's."""
    if init is None:
        return
    if not str(init) or not (Path(init) / "config.json").is_file():
        raise UsageError(
            Argument("init"), f" '{init}': no config.json there; expected a folder as `save_pretrained` writes it"
        )
    different = [] if made is None else unlike(config.to_dict(read_config(init)), made.model)
    if different:
        raise UsageError(Argument("init"), f" '{init}' holds another model: {'; '.join(different)}")


def check_resumed(before: TrainConfig, made: TrainConfig) -> None:
    """Refuse to go on with a run as what its checkpoints are not: another model, or an optimiser's other memory."""
    different = [f"model.{words}" for words in unlike(config.to_dict(before.model), made.model)]
    if before.optimizer.name != made.optimizer.name:
        different.append(f"optimizer.name is {before.optimizer.name} there and {made.optimizer.name} here")
    for name in ("rank", "alpha", "targets"):
        there, here = getattr(before.lora, name), getattr(made.lora, name)
        if there != here and (before.lora.rank or made.lora.rank):
            different.append(f"lora.{name} is {there} there and {here} here")
    if different:
        told = "; ".join(different)
        raise UsageError(f"a run goes on with its own weights: {told}; leave that out, or begin a new run")


def _check_checkpoints(run: Path, made: TrainConfig) -> None:
    """Refuse a configuration that was edited into another model's, and a run without one manifest that can be read.

    Whether the tensors are what was written, the ranks find out, each its share.
    """
    folder, broken = run / CHECKPOINTS, []
    for _, path in checkpoints(folder):
        try:
            manifest = Manifest.read(path)
            check_written_model(manifest.written_by.get(MODEL), manifest.step, made.model, run / CONFIG)
            return
        except DamagedError:
            broken.append(path.name)
    broken += sorted(path.name for path in folder.glob(f"{DAMAGED}*"))
    if broken:
        raise nothing_whole(run, broken)


def nothing_whole(run: Path, broken: Sequence[str]) -> RunError:
    """For a run that cannot go on: beginning again at step 1 is for its user to decide."""
    return RunError(
        f"no checkpoint of {run} is whole ({', '.join(broken)}): stopped, and nothing was changed. "
        f"To train it again from step 1, begin a new run with `tilemesh train {run / CONFIG} --out FOLDER`, or "
        f"remove {run / CHECKPOINTS} and resume"
    )


def check_job(
    made: TrainConfig,
    *,
    run: str | Path | None = None,
    name: str = "run",
    resume: str | Path | None = None,
    init: str | Path | None = None,
    transport: str = "auto",
    restarts: int = 0,
    stop_after: int | None = None,
) -> None:
    """Refuse what no rank could do anything with, before there is a folder or a rank. `made` is settled."""
    if resume is not None:
        if run is not None or init is not None:
            raise UsageError(
                Argument("resume"), " goes on in its own folder with its own weights: leave ", _RUN, " and ",
                Argument("init"), " out",
            )  # fmt: skip
        check_resumed(of_run(resume), made)
        _check_checkpoints(Path(resume), made)
        if made.lora.rank:
            check_base(resume, made.lora.base)
    if run is not None and not str(run):
        raise UsageError(_RUN, " is empty: expected a folder to write, or leave it out for a new one under runs/")
    if not name or Path(name).name != name:
        raise UsageError(f"name is {shown(name)}: expected a part of a folder's name, without /")
    check_init(init, made)
    _check_start(made, transport, restarts)
    done = (folders.newest_checkpoint(resume) or 0) if resume is not None else 0
    if stop_after is not None:
        _require_whole(_STOP_AFTER, stop_after)
        if not done < stop_after <= made.train.steps:
            raise UsageError(_STOP_AFTER, f" is {stop_after}: expected a step from {done + 1} to {made.train.steps}")
    check_machine(made)


def _check_start(made: TrainConfig, transport: str, restarts: int) -> None:
    member = membership()
    _require_whole(Argument("restarts"), restarts)
    if member is None:
        choose_transport(transport)
        check_restarts(restarts)
    elif restarts:
        raise UsageError(
            Argument("restarts"), f" inside a job that {member.starter} started: ask {member.starter} to restart it"
        )
    elif made.ranks != member.size:
        raise UsageError(f"a mesh of {made.ranks} ranks in a job of {member.size}: make plan.dp and plan.tp agree")


def _require_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(name, f" is {shown(value)}: expected a whole number")
