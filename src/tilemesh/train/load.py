"""A training configuration from what people write: a preset's name or a TOML file, settings, a mesh, a plan, or a run.

The one idea: whatever the command line can say about a run is an argument of `load`, so that a command and a Python
program get the same configuration and the same refusals. `settled` leaves nothing open (how the batch is cut for the
mesh, the context), so that what is written down is what is done.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilemesh.compress.recipe import read_recipe
from tilemesh.core import config as core_config
from tilemesh.core.conflicts import refuse
from tilemesh.core.errors import Argument, UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.plan_file import TRAIN, PlanFile, read_plan
from tilemesh.core.ranges import shown
from tilemesh.core.step.book import is_listed, listed
from tilemesh.model.config import EXPERT_FIELDS, check_planned, planned_model, unlike
from tilemesh.model.families.book import read_config
from tilemesh.plan.nearest import advice
from tilemesh.train.check import LayoutError, check_init, check_resumed, check_types, check_values
from tilemesh.train.config import BATCH, BYTES, DEFAULT_PRESET, PRESETS, ModuleConfig, ModuleRun, TrainConfig, of_run
from tilemesh.train.conflicts import OTHER_BATCH, UNEVEN_NUMBER, UNEVEN_SIZE, largest_divisor

_RANKS, _MESH = Argument("ranks"), Argument("mesh")
_AXES = ("dp", "tp", "pp", "cp", "ep")
_CHUNKS = "plan.chunk_layers"
_BYTES = {"model": {"vocabulary": BYTES}}
"""Below a TOML file, which then need not say the vocabulary of text that is read as bytes."""


@dataclasses.dataclass(frozen=True)
class _Start:
    """What a preset, a file or a run says before the mesh is looked at, and which keys were named, and where."""

    config: TrainConfig
    set_keys: frozenset[str]
    """By settings."""
    file_keys: frozenset[str]
    """By the file."""
    laid: ParallelPlan | None = None
    """Of a run or a plan's file, which has the batch cut already."""

    def says(self, key: str) -> bool:
        return key in self.set_keys or key in self.file_keys

    def says_of(self, section: str) -> bool:
        """Whether settings or the file name a key of a section."""
        return any(key.startswith(f"{section}.") for key in self.set_keys | self.file_keys)

    @property
    def set_axes(self) -> dict[str, int]:
        """Sizes of the mesh that settings say: they go over all else."""
        return {axis: getattr(self.config.plan, axis) for axis in _AXES if f"plan.{axis}" in self.set_keys}

    def laid_out(self, **changes: Any) -> _Start:
        """With another mesh, and without what only made sense on the one before."""
        plan = self.config.plan
        tp, pp = changes.get("tp", plan.tp), changes.get("pp", plan.pp)
        if pp != plan.pp and _CHUNKS not in self.set_keys:
            changes["chunk_layers"] = ()
        if pp == 1 and plan.pp > 1:
            changes |= {"schedule": "1f1b", "interleave": 1, "slices": 1}
        replicas = changes.get("dp", plan.dp) * changes.get("cp", plan.cp)
        if replicas == 1 and "plan.zero" not in self.set_keys:  # nobody is left to share with
            changes |= {"zero": 0, "zero_group": 0}
        if tp == 1 and "plan.expert_tp" not in self.set_keys:
            changes["expert_tp"] = 0
        replicas *= tp if plan.expert_tp == 1 else 1
        if replicas % plan.ep and "plan.ep" not in self.set_keys:
            changes.setdefault("ep", 1)
        changes["sequence_parallel"] = plan.sequence_parallel and tp > 1
        return dataclasses.replace(self, config=self.config.changed(plan=changes))


def load(
    name: str | None = None,
    *,
    sets: Sequence[str] = (),
    mesh: str | None = None,
    plan: str | Path | None = None,
    ranks: int | None = None,
    gpus: int = 0,
    init: str | Path | None = None,
    resume: str | Path | None = None,
    recipe: str | Path | None = None,
    pins: Sequence[str] = (),
    choose: str | None = None,
) -> TrainConfig:
    """The run that a preset's name or a TOML file describes, with settings over it and its batch cut for the mesh.

    `mesh`: "dp=2,tp=2". `plan`: a file of `tilemesh plan --out`; it also says the batch, the context and, where
    nothing else does, the model, which a configuration that is named must agree with; `sets` go over it.
    `ranks`: how many there are, where neither says so. `gpus`: how many this machine has; without a word on the mesh
    there is one rank per GPU, unless train.device is cpu.
    `init`: a Hugging Face folder to begin from; where nothing else says what the model is, it is that one's.
    `resume`: a run's folder instead of a name, to go on with what it is. Settings, a mesh or a plan go over that; its
    batch stays unless train.batch is set, and its model and its optimizer's kind cannot change.
    `recipe`: a recipe's name or TOML file, to train for compression; the configuration keeps what the file says.
    `pins`, `choose`: of a module of the user's, which `name` gives as FILE.py:FUNCTION, or a TOML file with [module].
    """
    start = _module_start(name, resume if init is None else None)  # a run has its beginning: refused below
    if start is not None:
        _refuse_for_module(plan=plan, init=init, recipe=recipe)
        return _load_module(start, sets, mesh, ranks, pins, choose)
    if pins or choose is not None:
        raise UsageError(Argument("pin" if pins else "choose"), " places a module of yours: name it, FILE.py:FUNCTION")

    def attempt(*more: str) -> TrainConfig:
        return _load(name, [*sets, *more], mesh, plan, ranks, gpus, init, resume, recipe)

    try:
        return attempt()
    except LayoutError as error:
        raise _with_advice(error, attempt) from None
    except UsageError as error:
        even = f"{_CHUNKS}=[]"  # a plan refuses this by itself, and there is no layout to look around in
        if not str(error).startswith(_CHUNKS) or not _is_accepted(lambda: attempt(even)):
            raise
        raise UsageError(*error.args, f"; the nearest layout that works: --set {even}") from None


def _load(
    name: str | None,
    sets: Sequence[str],
    mesh: str | None,
    plan: str | Path | None,
    ranks: int | None,
    gpus: int,
    init: str | Path | None,
    resume: str | Path | None,
    recipe: str | Path | None,
) -> TrainConfig:
    _refuse_empty(name=name, mesh=mesh, plan=plan, init=init, resume=resume)
    sets = _with_listed(sets)
    set_keys = _keys(sets)
    saved = None if plan is None else read_plan(plan, TRAIN)
    if saved is not None and mesh is not None:
        raise UsageError(_MESH, " and ", Argument("plan"), " both say how ranks are laid out: give one of them")
    axes = None if mesh is None else _axes(mesh)
    over = _with_mesh(sets, axes, set_keys) if saved is None else _without_plan(sets)
    if resume is not None:
        start = _resumed(resume, name, init, over)
    else:
        start = _named(name, over, init)
        if saved is not None and name is None and init is None and not start.says_of("model"):
            start = _of_plan(saved, over)
    start = dataclasses.replace(start, set_keys=set_keys)
    if saved is not None:
        start = _planned(start, saved, sets, is_resumed=resume is not None)
    elif axes is not None:
        start = start.laid_out(**axes | start.set_axes)
    elif resume is None:
        gpus = 0 if start.config.train.device == "cpu" else gpus
        has_mesh = any(key.startswith("plan.") for key in set_keys) or any(
            f"plan.{axis}" in start.file_keys for axis in _AXES
        )
        if ranks is not None or (gpus and not has_mesh):
            start = _spread(start, ranks if ranks is not None else gpus, gpus)
    world = start.config.plan.world
    if ranks is not None and ranks != world:
        whose = "the run" if resume is not None and mesh is None and plan is None else "the mesh"
        shape = ",".join(f"{axis}={size}" for axis, size in start.config.plan.axes.items())
        raise UsageError(
            _RANKS, f" is {ranks} and {whose} has {world} ({shape}): say with ", _MESH, " how they are laid out"
        )
    if recipe is not None:
        text = str(recipe) if not Path(recipe).is_file() else read_recipe(recipe).to_toml()
        start = dataclasses.replace(start, config=start.config.changed(compress={"recipe": text}))
    is_moved = plan is not None or mesh is not None or ranks is not None or gpus > 0
    config = _settled(_cut_as_said(start, is_moved))
    if resume is not None:
        check_resumed(of_run(resume), config)
    return config


def _module_start(name: str | None, resume: str | Path | None) -> ModuleRun | None:
    """A run of a module, where the arguments name one."""
    config: TrainConfig | None = None
    if resume is not None and name is None:
        config = of_run(resume)
    elif name is not None and re.search(r"\.py(:|$)", name):
        config = ModuleRun(module=ModuleConfig(program=name))
    elif name is not None and name.endswith(".toml") and "module" in core_config.read_toml(name):
        config = core_config.load(ModuleRun, file=name)
    return config if isinstance(config, ModuleRun) else None


def _refuse_for_module(**arguments: str | Path | None) -> None:
    for argument, value in arguments.items():
        if value is not None:
            raise UsageError(Argument(argument), " is of Transformers: leave it out where a module of yours is trained")


MODULE_AXES = ("dp", "tp", "pp")


def _load_module(
    start: ModuleRun, sets: Sequence[str], mesh: str | None, ranks: int | None, pins: Sequence[str], choose: str | None
) -> TrainConfig:
    config = core_config.load(ModuleRun, preset="run", presets={"run": start}, sets=sets)
    changes: dict[str, Any] = {"program": _absolute(config.module.program)}
    changes |= ({"pins": tuple(pins)} if pins else {}) | ({} if choose is None else {"choose": choose})
    config = dataclasses.replace(config, module=dataclasses.replace(config.module, **changes))
    axes = dict.fromkeys(MODULE_AXES, 1) if mesh is not None else {}
    for axis, size in () if mesh is None else _axes(mesh).items():
        if axis not in axes and size > 1:
            raise UsageError(
                _MESH, f" {mesh}: a module of yours is placed on {', '.join(axes)}, and {axis} is none of these"
            )
        axes |= {axis: size} if axis in axes else {}
    if mesh is None and ranks is not None and config.plan.world != ranks:
        axes = dict.fromkeys(MODULE_AXES, 1) | {"dp": ranks}
    moved = config.changed(plan=axes)
    if ranks is not None and moved.plan.world != ranks:
        raise UsageError(_RANKS, f" is {ranks} and the mesh has {moved.plan.world}: make them agree")
    return _settled(moved)


def _absolute(program: str) -> str:
    """Ranks, and who goes on with the run, may be elsewhere."""
    path, colon, name = program.rpartition(":")
    return f"{Path(path).resolve()}{colon}{name}" if path else program


def settled(config: TrainConfig) -> TrainConfig:
    """The same run with nothing left open: batch, context and the plan's microbatches agree, or it is refused."""
    try:
        return _settled(config)
    except LayoutError as error:
        raise _with_advice(error, lambda text: _settled(_with_sets(config, [text]))) from None


def _with_advice(error: LayoutError, again: Callable[[str], object]) -> UsageError:
    """The error with the nearest layout that works; `again`: the same with more settings."""
    config = error.config
    nearest = advice(config.model, config.plan, config.batch, lambda text: _is_accepted(lambda: again(text)))
    return UsageError(*error.args, nearest)


def _is_accepted(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except UsageError:
        return False
    return True


def _settled(config: TrainConfig) -> TrainConfig:
    check_types(config)
    if config.trains_module:
        check_values(config)
        return config
    config = _cut(config, keep_accumulation=config.plan.accumulation > 1)
    config = config.changed(train={"batch": config.batch, "context": config.context})
    check_values(config)
    return config


def _with_sets(config: TrainConfig, sets: Sequence[str]) -> TrainConfig:
    """Settings over a configuration are checked and converted as those over a preset."""
    return core_config.load(TrainConfig, preset="run", presets={"run": config}, sets=sets)


def _keys(sets: Sequence[str]) -> frozenset[str]:
    return frozenset(key for key, _ in core_config.split_sets(sets))


# ---- where it begins -------------------------------------------------------------------------------------------


def _named(name: str | None, sets: Sequence[str], init: str | Path | None) -> _Start:
    """A preset or a file, with settings over it."""
    set_keys = _keys(sets)
    file_keys: frozenset[str] = frozenset()
    chosen = name or DEFAULT_PRESET
    if chosen.endswith(".toml"):
        data = core_config.read_toml(chosen)
        sections = {section: keys for section, keys in data.items() if isinstance(keys, dict)}
        file_keys = frozenset(f"{section}.{key}" for section, keys in sections.items() for key in keys)
        below = "bytes" if "data.tokenizer" not in set_keys | file_keys else None
        config = core_config.load(TrainConfig, file=chosen, preset=below, presets={"bytes": _BYTES}, sets=sets)
    else:
        if chosen not in PRESETS and Path(chosen).is_dir():
            raise UsageError(
                f"{chosen} is a folder: --init {chosen} begins with its weights; its sizes alone are trained by "
                f"`tilemesh plan {chosen} --cluster 4xlocal --out plan.toml`, then --plan plan.toml"
            )
        config = core_config.load(TrainConfig, preset=chosen, presets=PRESETS, sets=sets)
    check_init(init)
    config = config.with_base(init)
    of_model = {key.removeprefix("model.") for key in set_keys if key.startswith("model.")}
    if init is not None and name is None and (not of_model or ("experts" in of_model and of_model <= EXPERT_FIELDS)):
        settings = {key: getattr(config.model, key) for key in of_model}  # experts that begin as copies of its MLP
        config = _of_folder(config, Path(init), set_keys)
        config = config.changed(model=settings | ({"family": ""} if settings else {}))
    return _Start(config, set_keys, file_keys)


def _with_mesh(sets: Sequence[str], axes: dict[str, int] | None, set_keys: frozenset[str]) -> list[str]:
    """Settings over the sizes of a mesh that some of them only make sense with; the rest of the mesh comes later, since
    what a file says for another mesh goes with that one."""
    if axes is None:
        return [*sets]
    needed = {"tp": axes["tp"] > 1, "pp": _CHUNKS in set_keys}
    return [*(f"plan.{axis}={axes[axis]}" for axis, is_so in needed.items() if is_so), *sets]


def _without_plan(sets: Sequence[str]) -> list[str]:
    """Settings without those that go over a saved plan and mean nothing before it is there."""
    return [f"{key}={text}" for key, text in core_config.split_sets(sets) if not key.startswith("plan.")]


def _with_listed(sets: Sequence[str]) -> list[str]:
    """Settings with the lists of passes that a .csv file has, where one is named as plan.schedule."""
    settings = []
    for key, text in core_config.split_sets(sets):
        if key == "plan.schedule" and text.endswith(".csv"):
            try:
                text = Path(text).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"plan.schedule {text}: the file cannot be read: {error}") from None
            if not is_listed(text):
                raise UsageError("plan.schedule: the file has no list of passes, such as 0F0,0F1,0B0,0B1 in each line")
            try:
                listed(text)
            except UsageError as error:
                raise UsageError(f"plan.schedule: {error}") from None
        settings.append(f"{key}={text}")
    return settings


def _resumed(resume: str | Path, name: str | None, init: str | Path | None, sets: Sequence[str]) -> _Start:
    """A run's own values, with settings over them."""
    for argument, value in (("a configuration", name), (Argument("init"), init)):
        if value is not None:
            raise UsageError(Argument("resume"), " goes on with a run as it is: leave ", argument, " out")
    before = of_run(resume)
    return _Start(_with_sets(before, sets), _keys(sets), frozenset(), before.plan)


def _of_folder(config: TrainConfig, folder: Path, set_keys: frozenset[str]) -> TrainConfig:
    """The run with the model of a Hugging Face folder, and its tokenizer where it has one and none was named."""
    config = dataclasses.replace(config, model=read_config(folder))
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file() and "data.tokenizer" not in set_keys:
        config = config.changed(data={"tokenizer": tokenizer})
    return config


def _refuse_empty(**arguments: str | Path | None) -> None:
    for argument, value in arguments.items():
        if value is not None and not str(value).strip():
            what = Argument(argument, "CONFIG" if argument == "name" else "")
            raise UsageError(what, " is empty: name one, or leave it out")


# ---- the mesh --------------------------------------------------------------------------------------------------


def _axes(mesh: str) -> dict[str, int]:
    """Sizes of the axes in "dp=2,tp=2"; what is not named is 1."""
    axes: dict[str, int] = {}
    for key, text in core_config.split_sets([mesh]):
        if key not in _AXES or not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
            raise UsageError(
                _MESH, f" {shown(mesh)}: expected axes and sizes, such as dp=2,tp=2 (known are {', '.join(_AXES)})"
            )
        if key in axes:
            raise UsageError(_MESH, f" {shown(mesh)}: {key} is there twice: say each axis once, such as dp=2,tp=2")
        axes[key] = int(text)
    return dict.fromkeys(_AXES, 1) | axes


def _planned_context(saved: PlanFile) -> int | None:
    train = saved.sections[TRAIN]
    context = train.get("context")
    if train and (not isinstance(context, int) or isinstance(context, bool) or len(train) > 1):
        raise UsageError(f"{saved.source}: the section train of a plan holds the context alone, as a whole number")
    return context


def _of_plan(saved: PlanFile, sets: Sequence[str]) -> _Start:
    """The model that a plan was made for, with the rest of the preset that trains it, or of the usual one."""
    start, model = _named(None, sets, None), planned_model(saved)
    if model is None:
        return start
    wanted = core_config.to_dict(model)
    for name in PRESETS:
        preset = _named(name, sets, None)
        if not unlike(wanted, preset.config.model):
            start, model = preset, dataclasses.replace(model, dropout=preset.config.model.dropout)
            break
    return dataclasses.replace(start, config=dataclasses.replace(start.config, model=model))


def _planned(start: _Start, saved: PlanFile, sets: Sequence[str], is_resumed: bool) -> _Start:
    """The layout of a plan's file, with settings over it."""
    config = start.config
    other = " and model settings out to train the plan's model, or "
    check_planned(saved, config.model, "leave ", Argument("name", "CONFIG"), other)
    over = [f"{key}={text}" for key, text in core_config.split_sets(sets) if key.startswith("plan.")]
    plan = _with_sets(dataclasses.replace(config, plan=saved.layout), over).plan
    changes, context = {}, _planned_context(saved)
    if not is_resumed and "train.batch" not in start.set_keys:
        changes["batch"] = plan.batch
    is_open = not is_resumed and not start.says("train.context")
    if context is not None and is_open and context <= config.model.context:
        changes["context"] = context
    config = dataclasses.replace(config.changed(train=changes), plan=plan)
    return dataclasses.replace(start, config=config, laid=saved.layout)


def _spread(start: _Start, ranks: int, gpus: int) -> _Start:
    """So many ranks without a word on their mesh: one a GPU as replicas, else the plan's tp where it divides them."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise UsageError(_RANKS, f" is {shown(ranks)}: expected at least 1")
    plan = start.config.plan
    tp = 1 if gpus and "plan.tp" not in start.set_keys else math.gcd(plan.tp, ranks)
    changes: dict[str, Any] = {"tp": tp, "dp": ranks // tp, "pp": 1, "cp": 1}
    if gpus and "plan.precision" not in start.set_keys:
        changes["precision"] = "bf16" if plan.precision == "fp32" else plan.precision
    return start.laid_out(**changes)


# ---- the batch -------------------------------------------------------------------------------------------------


def _cut_as_said(start: _Start, is_moved: bool) -> TrainConfig:
    """Cut the batch as the run or the plan's file has it, as the settings say, or as the file does if neither mesh nor
    batch were changed after it; else anew."""
    config, set_keys = start.config, start.set_keys
    if start.laid is not None and _cut_of(start.laid, start.laid.batch) == _cut_of(config.plan, config.batch):
        return config
    is_moved = is_moved or "train.batch" in set_keys or "plan.dp" in set_keys
    keep_accumulation = "plan.accumulation" in set_keys or (start.says("plan.accumulation") and not is_moved)
    says_size = "plan.microbatch" in set_keys or (start.says("plan.microbatch") and not is_moved)
    batch = config.train.batch
    if not batch:
        return config
    BATCH.check("train.batch", batch)
    if start.file_keys and not start.says("plan.microbatch"):
        # Nobody asked for small pieces: a replica takes its rows at once.
        config = config.changed(plan={"microbatch": batch})
    plan = config.plan
    rows = batch // plan.dp
    if keep_accumulation and not says_size:
        refuse((UNEVEN_NUMBER,), config)
        config = config.changed(plan={"microbatch": max(1, rows // plan.accumulation)})
    elif "plan.microbatch" in set_keys and not keep_accumulation:
        refuse((UNEVEN_SIZE,), config)
    elif plan.pp > 1 and not keep_accumulation and not says_size and rows:
        size = largest_divisor(rows, max(1, rows // _enough_microbatches(plan)))
        config = config.changed(plan={"microbatch": size, "accumulation": rows // size})
    return _cut(config, keep_accumulation)


def _cut_of(plan: ParallelPlan, batch: int) -> tuple[int | str, ...]:
    """How a batch is cut, and what that depends on."""
    return batch, plan.dp, plan.pp, plan.schedule, plan.microbatch, plan.accumulation


def _cut(config: TrainConfig, keep_accumulation: bool) -> TrainConfig:
    """The plan's microbatches such that they make up the batch; `keep_accumulation`: refuse to change their number."""
    plan, batch = config.plan, config.batch
    BATCH.check("train.batch", batch, whole=True)
    if batch % plan.dp:
        raise LayoutError(
            config, f"train.batch {batch} does not divide among dp={plan.dp} replicas: set a multiple of {plan.dp}"
        )
    rows = batch // plan.dp
    if plan.microbatch * plan.accumulation == rows:
        return config
    if keep_accumulation:
        refuse((OTHER_BATCH,), config)
    # As large as the plan allows and the rows divide into: a mesh of other size then changes the cut alone.
    size = largest_divisor(rows, plan.microbatch)
    return config.changed(plan={"microbatch": size, "accumulation": rows // size})


def _enough_microbatches(plan: ParallelPlan) -> int:
    """What fills a pipeline of so many stages fairly: two for each, and as many as the schedule takes at least."""
    return plan.pipeline.microbatches_from(plan.pp, 0 if is_listed(plan.schedule) else 2 * plan.pp)
