"""What a training configuration may be, and what a job may ask for: it refuses before anything exists.

Three questions. `check_values`: is every value of its type and in its range, and do the values agree with each other
(`conflicts.py`, the mesh with the model)? It looks at nothing but the configuration. `check_machine`:
does this machine have what it names (GPU, text, tokenizer)? `check_job`: does the rest of what `fit` was asked for
agree with it? `load` and `fit` call them, so a command and a Python program are refused in the same words, before there
is a run's folder or a rank. Sections that others use too (model, data, plan) check themselves where they are config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tilemesh.compress.config import check_teacher, training_recipe
from tilemesh.compress.recipe import Recipe, check_blocks, chosen_schemes
from tilemesh.core.config import check_fields, from_dict, to_dict
from tilemesh.core.conflicts import refuse
from tilemesh.core.context import membership
from tilemesh.core.cores import available_cores
from tilemesh.core.errors import Argument, RunError, UsageError, unknown
from tilemesh.core.files import check_finished
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.ranges import shown
from tilemesh.core.tensor_placement import parse
from tilemesh.data.config import (
    SHARD_SUFFIX,
    STDLIB,
    DataConfig,
    check_source,
    has_shards,
    lies_in_source,
    source_path,
)
from tilemesh.data.documents import documents, source_bytes
from tilemesh.launch.job import MOST_RANKS, RANKS_PER_CORE
from tilemesh.launch.start import check_restarts, choose_transport
from tilemesh.measure.machine import this_machine, usable_gpus
from tilemesh.measure.row import Row
from tilemesh.model.adapter import A, B, adapted_modules
from tilemesh.model.config import ModelConfig, before_experts, check_written_model, unlike
from tilemesh.model.families.book import expected_folder, read_config
from tilemesh.model.work.weights import layer_weights, parameter_shapes, why_not, why_not_groups, why_not_tp
from tilemesh.runs import folder as folders
from tilemesh.runs.base import check_base
from tilemesh.runs.kind import ALIGN, MODULE, TRAIN, Kind
from tilemesh.runs.manifest import MODEL, DamagedError, Manifest, checkpoints
from tilemesh.runs.names import CHECKPOINTS, CONFIG, DAMAGED, RUNS, WRITTEN
from tilemesh.train.config import BYTES, ModuleRun, TrainConfig, of_run
from tilemesh.train.conflicts import OF_CONFIG, OF_PLAN
from tilemesh.train.fits import MemoryFit
from tilemesh.train.loggers import check_loggers
from tilemesh.train.predict import predict_run
from tilemesh.train.rows import module_rows, rows
from tilemesh.train.rules import decay_patterns, kinds_of

PLACERS = ("ilp", "dp", "mcmc", "greedy", "learned", "random")
"""Those of `parallel.choose.CHOOSERS`, which is torch's neighbour and loaded late."""
_RUN = Argument("run", "--out")
_STOP_AFTER = Argument("stop_after")
_MIN_RANKS = Argument("min_ranks")
_CUT_BY_INPUTS = (".fc_o", ".fc_out")
"""Matrices of a layer of which a rank of tp has some inputs; of the others it has some outputs."""


def check_types(config: TrainConfig) -> None:
    """Refuse what is not a configuration, and values of other types than it says: a dataclass takes anything."""
    if not isinstance(config, TrainConfig):
        raise UsageError(
            f"config is {shown(config)}: expected a TrainConfig, which tilemesh.train.load_config makes of a preset's "
            "name or a TOML file"
        )
    from_dict(type(config), to_dict(config))


class LayoutError(UsageError):
    """A mesh that does not divide the model or the batch: whoever knows what was typed adds what works instead."""

    def __init__(self, config: TrainConfig, text: str) -> None:
        super().__init__(text)
        self.config = config


def check_values(config: TrainConfig) -> None:
    """Refuse values that cannot be, alone or together. Pure: this machine is not looked at."""
    check_fields(config)
    if config.trains_module:
        _check_module(config)
        return
    refuse(OF_PLAN, config)
    reason = why_not(config.model, config.plan)
    if reason:
        raise LayoutError(config, f"plan.{reason}")
    refuse(OF_CONFIG, config)
    if config.lora.rank:
        adapted_modules(config.model, config.lora)
    _check_decay_groups(config)
    _check_compress(config)


def _check_module(config: TrainConfig) -> None:
    """Refuse what a run of a module has no use for."""
    assert isinstance(config, ModuleRun)
    if config.unused:
        raise UsageError(
            f"{config.unused[0]} says nothing of a run that trains a module of yours: of the plan dp, tp, pp and a "
            "pipeline's order count, of train the steps, seed, device and times; leave it out"
        )
    path, _, name = config.module.program.rpartition(":")
    if not path or not name:
        raise UsageError(
            f"module.program is {config.module.program!r}: expected FILE.py:FUNCTION, such as model.py:make"
        )
    if not Path(path).is_file():
        raise UsageError(f"module.program: there is no file {path}; expected FILE.py:FUNCTION")
    if config.optimizer.name == "muon":
        raise UsageError(
            "optimizer.name is muon: it makes whole matrices of layers orthogonal, and a placement may cut a module's "
            "along any dim; set adamw, lion or sgd"
        )
    if config.module.choose is not None and config.module.choose not in PLACERS:
        raise unknown("chooser", config.module.choose, PLACERS)
    for pin in config.module.pins:
        _, sign, placement = pin.rpartition("=")
        if not sign:
            raise UsageError(f"module.pins has {pin!r}: expected NAME=AXIS:PLACEMENT, such as x=dp:S0")
        for axis, _ in parse(placement):
            if axis not in ("dp", "tp"):
                raise unknown("axis", axis, ("dp", "tp"))


def _check_decay_groups(config: TrainConfig) -> None:
    """Refuse a pattern that no parameter's name matches: its decay would silently apply to nothing."""
    patterns = decay_patterns(config.optimizer)
    if not patterns:
        return
    names = list(parameter_shapes(config.model))
    if config.lora.rank:  # nothing else is trained
        names = [f"{module}.{part}" for module in adapted_modules(config.model, config.lora) for part in (A, B)]
    for pattern, _ in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            few = ", ".join(dict.fromkeys([names[0], names[len(names) // 2], names[-1]]))
            raise UsageError(
                f"optimizer.decay_groups has '{pattern}', which matches no parameter that is trained: expected a "
                f"pattern of names such as {few}"
            )


def _check_compress(config: TrainConfig) -> None:
    """Refuse a recipe that the model's matrices, or a rank's parts of them, do not allow, and a teacher of others."""
    recipe = training_recipe(config.compress.recipe)
    if recipe is not None:
        chosen_schemes(recipe, _matrices(config.model))
        check_blocks(recipe, _matrices(config.model))
        if config.plan.tp > 1:
            _check_cut(recipe, config)
    if config.distill.teacher is None:
        return
    if not (config.distill.teacher / "config.json").is_file():
        check_finished(config.distill.teacher)
        raise UsageError(
            f"distill.teacher is {config.distill.teacher}: expected a Hugging Face folder; `tilemesh export` "
            "makes one of a run"
        )
    teacher = read_config(config.distill.teacher)
    check_teacher(config.model, teacher, config.distill)
    reason = why_not_tp(teacher, config.plan.tp)
    if reason:
        raise UsageError(f"the teacher is cut over tp as the student is, and {reason}; set another plan.tp")


def _check_cut(recipe: Recipe, config: TrainConfig) -> None:
    """Refuse what cannot be done in the parts of matrices that ranks hold, as they would."""
    shapes, tp = _matrices(config.model), config.plan.tp
    groups = {name: scheme.group or 1 for name, scheme in chosen_schemes(recipe, shapes).items()}
    _check_groups(config.model, config.plan, groups)
    cut = {name: (outputs, inputs // tp) for name, (outputs, inputs) in shapes.items() if name.endswith(_CUT_BY_INPUTS)}
    try:
        check_blocks(recipe, cut)
    except UsageError as error:
        raise UsageError(f"{error} on each of {tp} ranks; set a smaller plan.tp") from None


def check_stored(config: TrainConfig) -> None:
    """Refuse a base or a teacher in groups that ranks of this plan would have to share."""
    if config.lora.rank:
        _check_stored(config.lora.base, config.plan)
    _check_stored(config.distill.teacher, ParallelPlan(tp=config.plan.tp))


def _check_stored(folder: Path | None, plan: ParallelPlan) -> None:
    """Refuse a folder of codes in groups that ranks would have to share."""
    if folder is None or plan.tp == 1:
        return
    from tilemesh.model.huggingface import stored_kinds  # late: torch
    from tilemesh.model.kinds import group_sizes

    _check_groups(read_config(folder), plan, group_sizes(stored_kinds(folder)))


def _check_groups(model: ModelConfig, plan: ParallelPlan, groups: Mapping[str, int]) -> None:
    reason = why_not_groups(model, plan, groups)
    if reason:
        raise UsageError(f"plan.{reason}")


def _matrices(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the matrices that a recipe may name."""
    shapes = {
        f"layers.{layer}.{weight.name}": (weight.outputs, weight.inputs)
        for layer in range(model.layers)
        for weight in layer_weights(model.of_layer(layer))
        if weight.inputs > 1
    }
    return shapes if model.tied else {**shapes, "output": (model.vocabulary, model.width)}


def check_machine(config: TrainConfig, beside: int = 0) -> None:
    """Refuse what this machine has not: a GPU, the text, the tokenizer, place for so many ranks (`beside`: as
    `RankProgram` has it)."""
    if config.train.device == "cuda" and not usable_gpus():
        raise UsageError("train.device is cuda and this machine has no GPU: set train.device=cpu, or auto")
    if config.train.graph and not usable_gpus():
        raise UsageError("train.graph is true and this machine has no GPU: set train.graph=false, or leave it out")
    most = max(MOST_RANKS, RANKS_PER_CORE * available_cores())
    ranks = config.ranks + beside
    if membership() is None and ranks > most:
        axes = " x ".join(f"{name} {size}" for name, size in config.plan.axes.items())
        more = f" + {beside} beside" if beside else ""
        servers = f" + {config.servers} server{'s' * (config.servers > 1)}" if config.servers else ""
        settings = "plan.dp and method.servers" if config.servers else "plan.dp and plan.tp"
        raise UsageError(
            f"a plan of {ranks} ranks ({axes}{servers}{more}) on a machine with {available_cores()} cores: at "
            f"most {most} are started here; set {settings} lower, or start them with mpiexec or srun"
        )
    fallback = config.checkpoint.fallback_dir
    if fallback is not None and (fallback == Path() or (fallback.exists() and not fallback.is_dir())):
        raise UsageError(f"checkpoint.fallback_dir is '{fallback}': expected a folder, or a name for one")
    check_loggers(config.log)
    if config.trains_module:
        return
    if config.lora.rank:
        check_init(config.lora.base, config)
    check_stored(config)
    _memory_fit(config).check()
    check_source(config.data)
    _check_length(config)
    first, _ = config.data.parts[0]
    if config.data.tokenizer is not None or (first.source != STDLIB and has_shards(source_path(first.source))):
        from tilemesh.data.corpus import check_vocabulary, tokenizer_of  # late: numpy, which bytes do not need

        check_vocabulary(tokenizer_of(config.data), config.model.vocabulary)
    elif config.model.vocabulary < BYTES:
        raise UsageError(
            f"model.vocabulary is {config.model.vocabulary} and text is read as bytes: set model.vocabulary={BYTES}, "
            f"or data.tokenizer, or a folder of {SHARD_SUFFIX} shards"
        )


def memory_advice(config: TrainConfig) -> str:
    """For a run that ran out of memory: how much it was predicted to need, and what would need less."""
    if config.trains_module:
        return "cut more of its tensors, or place it on more ranks"
    return _memory_fit(config).advice()


def _memory_fit(config: TrainConfig) -> MemoryFit:
    def accepts(plan: ParallelPlan) -> bool:
        try:
            check_values(dataclasses.replace(config, plan=plan))
        except UsageError:
            return False
        return True

    return MemoryFit(config, this_machine().memory_bytes, usable_gpus(), accepts)


_READ_AT_ONCE = 1 << 18
_PLENTY = 16  # sequences' worth of bytes that hold one whatever a tokenizer joins and a few documents hold out


def _check_length(config: TrainConfig) -> None:
    """Refuse a source that holds no sequence: what is small enough for that is read as the ranks will read it."""
    setting = "data.mixture" if config.data.mixture else "data.source"
    for part, _ in config.data.parts:
        if part.source == STDLIB or not _may_be_short(part, config.context):
            continue
        from tilemesh.data.corpus import open_corpus  # late: numpy, which plenty of bytes does not need
        from tilemesh.data.samples import Samples

        corpus = open_corpus(part)
        if len(Samples(corpus.train, config.context, part.packing, corpus.tokenizer.end)):
            continue
        if part.packing == "none":
            raise UsageError(f"{setting} {part.source} has no document with a token in it: give one with text")
        held_out = f", {corpus.held_out.length} are held out" if corpus.held_out.length else ""
        raise UsageError(
            f"the text of {setting} {part.source} is shorter than one sequence ({corpus.train.length} tokens are "
            f"left for training{held_out}, a sequence takes {config.context + 1}): set train.context lower, or give "
            "more text"
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


def check_init(init: str | Path | None, config: TrainConfig | None = None) -> None:
    """Refuse a folder to begin from that holds no Hugging Face model, or another model than the configuration's."""
    if init is None:
        return
    if config is not None and config.trains_module:
        raise UsageError(
            Argument("init"), " with a module of yours: it begins with the weights that your function gives it"
        )
    if not str(init) or not (Path(init) / "config.json").is_file():
        check_finished(init)
        raise UsageError(Argument("init"), f" '{init}': no config.json there; {expected_folder(init)}")
    if config is None:
        return
    there, here = read_config(init), config.model
    if here.experts and not there.experts:  # each expert begins as a copy of its MLP
        here = before_experts(here).replace(family=there.family)
    different = unlike(to_dict(there), here)
    if different:
        raise UsageError(Argument("init"), f" '{init}' holds another model: {'; '.join(different)}")


def check_resumed(before: TrainConfig, config: TrainConfig) -> None:
    """Refuse to go on with a run as what its checkpoints are not: another model, or an optimiser's other memory."""
    different = [f"model.{words}" for words in unlike(to_dict(before.model), config.model)]
    if before.optimizer.name != config.optimizer.name:
        different.append(f"optimizer.name is {before.optimizer.name} there and {config.optimizer.name} here")
    elif not {*kinds_of(config.optimizer, "", ())} <= {*kinds_of(before.optimizer, "", ())}:
        different.append(f"optimizer.momentum is 0 there, which remembers none, and {config.optimizer.momentum} here")
    for name in ("rank", "alpha", "targets"):
        there, here = getattr(before.lora, name), getattr(config.lora, name)
        if there != here and (before.lora.rank or config.lora.rank):
            different.append(f"lora.{name} is {there} there and {here} here")
    if different:
        raise UsageError(
            f"a run goes on with its own weights: {'; '.join(different)}; leave that out, or begin a new run"
        )


def _check_checkpoints(run: Path, config: TrainConfig) -> None:
    """Refuse a configuration that was edited into another model's, and a run without one manifest that can be read.

    Whether the tensors are what was written, the ranks find out, each its share.
    """
    folder, broken = run / CHECKPOINTS, []
    for _, path in checkpoints(folder):
        try:
            manifest = Manifest.read(path)
            check_written_model(manifest.written_by.get(MODEL), manifest.step, config.model, run / CONFIG)
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


@dataclasses.dataclass(frozen=True)
class RankProgram:
    """What the ranks of a job do."""

    kind: Kind = TRAIN
    """Of the run that it makes."""
    module: str = "tilemesh.train.rank"
    """Its `main` is a started rank's, its `train_here` that of a process that is a rank already."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Texts that a run's folder has beside its configuration, by their names."""
    beside: int = 0
    """Ranks that are started in addition to those of the configuration."""
    predict: Callable[[TrainConfig, Sequence[str]], dict[str, Any]] = predict_run
    """What is expected of a run, on a machine with these GPUs."""
    rows: Callable[[Mapping[str, Any], Mapping[str, Any]], list[Row]] = rows
    """Of a run's summary, and what was expected of it."""


TRAINING = RankProgram()
MODULE_TRAINING = RankProgram(MODULE, "tilemesh.train.module_rank", predict=lambda *_: {}, rows=module_rows)
"""Rank 0 predicts, when the module is placed."""


def program_for(config: TrainConfig, program: RankProgram) -> RankProgram:
    """What ranks do, where the configuration says it."""
    return MODULE_TRAINING if config.trains_module else program


@dataclasses.dataclass(frozen=True)
class JobRequest:
    """What a run is to be besides its configuration: what `fit` and `preview` take by these names."""

    run: str | Path | None = None
    name: str = "run"
    resume: str | Path | None = None
    init: str | Path | None = None
    transport: str = "auto"
    restarts: int = 0
    stop_after: int | None = None
    program: RankProgram = TRAINING
    min_ranks: int | None = None
    """With how few ranks it may go on; none: with all or not at all."""

    @property
    def steps_done(self) -> int:
        """Of the run that is resumed, up to its newest checkpoint."""
        return (folders.newest_checkpoint(self.resume) or 0) if self.resume is not None else 0


def check_job(config: TrainConfig, request: JobRequest) -> None:
    """Refuse what no rank could do anything with, before there is a folder or a rank. `config` is settled."""
    run, resume, stop_after = request.run, request.resume, request.stop_after
    if resume is not None:
        if run is not None or request.init is not None:
            raise UsageError(
                Argument("resume"), " goes on in its own folder with its own weights: leave ", _RUN, " and ",
                Argument("init"), " out",
            )  # fmt: skip
        before, kind = of_run(resume), folders.kind_of(resume)
        if kind != request.program.kind.name:
            command = ALIGN.name if kind == ALIGN.name else TRAIN.name
            raise UsageError(f"{resume} is a run of kind '{kind}': go on with `tilemesh {command} --resume {resume}`")
        check_resumed(before, config)
        _check_checkpoints(Path(resume), config)
        if config.lora.rank:
            check_base(resume, config.lora.base)
    if run is not None and not str(run):
        raise UsageError(_RUN, " is empty: expected a folder to write, or leave it out for a new one under runs/")
    if not request.name or Path(request.name).name != request.name:
        raise UsageError(f"name is {shown(request.name)}: expected a part of a folder's name, without /")
    check_init(request.init, config)
    _check_start(config.ranks + request.program.beside, request)
    if stop_after is not None:
        _require_int(_STOP_AFTER, stop_after)
        if not request.steps_done < stop_after <= config.train.steps:
            first, last = request.steps_done + 1, config.train.steps
            raise UsageError(_STOP_AFTER, f" is {stop_after}: expected a step from {first} to {last}")
    check_machine(config, request.program.beside)
    _check_outside(config, request)


def _check_outside(config: TrainConfig, request: JobRequest) -> None:
    """Refuse to write a run into a folder of text from which it would be read: it would train on its own files."""
    written = [] if config.checkpoint.fallback_dir is None else [config.checkpoint.fallback_dir]
    if request.resume is None:
        written.append(Path(request.run or RUNS))
    for part, _ in config.data.parts:
        is_read = any(Path(name).match(part.pattern) for name in WRITTEN)
        for folder in written if is_read and not has_shards(source_path(part.source)) else ():
            if lies_in_source(folder, part.source):
                raise UsageError(
                    f"{folder} lies in the source {part.source}, and would be read as text: name a folder outside of "
                    "it, or leave its files out with ",
                    "data.pattern",
                )


def _check_start(ranks: int, request: JobRequest) -> None:
    member, restarts = membership(), request.restarts
    _require_int(Argument("restarts"), restarts)
    if request.min_ranks is not None:
        _check_min_ranks(request, member is not None)
    if member is None:
        choose_transport(request.transport)
        check_restarts(restarts)
    elif restarts:
        raise UsageError(
            Argument("restarts"), f" inside a job that {member.starter} started: ask {member.starter} to restart it"
        )
    elif ranks != member.size:
        raise UsageError(f"a mesh of {ranks} ranks in a job of {member.size}: make plan.dp and plan.tp agree")


def _check_min_ranks(request: JobRequest, is_member: bool) -> None:
    _require_int(_MIN_RANKS, request.min_ranks)
    if not is_member and not request.restarts:
        raise UsageError(_MIN_RANKS, " without ", Argument("restarts"), ": nothing is started again; give both")
    if is_member and request.run is None and request.resume is None:
        raise UsageError(_MIN_RANKS, " without ", _RUN, ": each start would make a folder of its own; name one")


def _require_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(name, f" is {shown(value)}: expected a whole number")
