"""The model that a word on the command line names, without its weights: a preset, a file, or a folder of one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tilemesh.core.errors import UsageError, unknown

if TYPE_CHECKING:
    from tilemesh.model.config import ModelConfig

MODEL_WORDS = "a preset (llama-3-70b, ...), a TOML file, a run's folder, a Hugging Face folder or its config.json"


def load_model(name: str, sets: Sequence[str]) -> ModelConfig:
    """The model of that name, with settings over it."""
    from tilemesh.core import config
    from tilemesh.model.config import PRESETS, ModelConfig

    settings: Any = make_dataclass("settings", [("model", ModelConfig)])  # what `--set` and a TOML file speak of
    values = {"model": PRESETS[name]} if name in PRESETS else _read(name)
    config.from_dict(settings, values, name)  # its own faults, by its own name
    return cast(ModelConfig, config.load(settings, preset=name, presets={name: values}, sets=sets).model)


def job_sizes(name: str) -> tuple[int | None, int | None]:
    """Tokens in a sequence and sequences in a step, where a run, a configuration or a plan of training says them."""
    from tilemesh.core.config import from_dict, read_toml, settable_fields
    from tilemesh.core.plan import ParallelPlan
    from tilemesh.core.plan_file import ALIGN, KIND, TRAIN
    from tilemesh.runs.names import CONFIG
    from tilemesh.train.config import LoopConfig

    file = Path(name, CONFIG) if os.path.isdir(name) else Path(name)
    sections = read_toml(file) if file.suffix == ".toml" and file.is_file() else {}
    loop, layout = sections.get(TRAIN, {}), sections.get("plan", {})
    if sections.get(KIND) == TRAIN:
        layout = {field.name: sections[field.name] for field in settable_fields(ParallelPlan) if field.name in sections}
    if ALIGN in sections or not isinstance(loop, dict) or not isinstance(layout, dict):
        return None, None
    sizes = {key: loop[key] for key in ("batch", "context") if key in loop}
    own = from_dict(LoopConfig, sizes, f"{file}: train")
    batch = own.batch or (from_dict(ParallelPlan, layout, f"{file}: plan").batch if layout else 0)
    return own.context or None, batch or None


def _read(name: str) -> dict[str, Any]:
    """What a file or a folder says of its model; of a run or a saved plan nothing else."""
    from tilemesh.core.config import read_toml, settable_fields, to_dict
    from tilemesh.core.files import check_finished, read_json_object
    from tilemesh.core.plan import ParallelPlan
    from tilemesh.core.plan_file import KIND, MODEL, SECTIONS
    from tilemesh.model.config import PRESETS
    from tilemesh.model.families.book import CONFIG, expected_folder, from_json
    from tilemesh.runs.names import CONFIG as RUN_CONFIG
    from tilemesh.train.config import BYTES, TrainConfig

    files = [Path(name)]
    if os.path.isdir(name):
        files = [Path(name, file) for file in (RUN_CONFIG, CONFIG) if os.path.isfile(Path(name, file))]
    if not files:
        check_finished(name)
        expected = expected_folder(name, "a Hugging Face folder or a run's")
        raise UsageError(f"{name} has neither {CONFIG} nor {RUN_CONFIG}: {expected}")
    file = files[0]
    if file.suffix == ".toml":
        others = {field.name for part in (TrainConfig, ParallelPlan) for field in settable_fields(part)}
        others = {*others, KIND, *(name for names in SECTIONS.values() for name in names)} - {MODEL}
        sections = read_toml(file)
        data = {key: value for key, value in sections.items() if key not in others}
        text = sections.get("data")
        if isinstance(data.get(MODEL), dict) and not (isinstance(text, dict) and "tokenizer" in text):
            data[MODEL].setdefault("vocabulary", BYTES)  # as `tilemesh train` takes it
        if not data:
            raise UsageError(f"{file} has no [model] section: expected one with layers, width, heads, ...")
        return data
    if file.suffix != ".json":
        if "/" in name or os.path.lexists(name):
            what = "is a file" if os.path.isfile(name) else "is not there"
            raise UsageError(f"model '{name}' {what}: expected {MODEL_WORDS}")
        raise UsageError(f"{unknown('model', name, PRESETS)}; or a folder or file, and none is here by that name")
    try:
        model = from_json(read_json_object(file), str(file))
    except FileNotFoundError:
        raise UsageError(f"{file} does not exist: expected a config.json as `save_pretrained` writes it") from None
    values = to_dict(model)
    if model.head_width * model.heads == model.width:
        del values["head_width"]  # it follows a width that is set over it
    return {"model": values}
