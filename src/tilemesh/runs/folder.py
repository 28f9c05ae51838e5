"""A run's folder and the small files in it: made when a run begins, changed when it is resumed, read by anybody.

The one idea: `run.json` says what kind of run this is, so that whoever opens a folder knows what to expect in it.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilemesh.core.busy import SECTION as BUSY
from tilemesh.core.busy import Busyness
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import check_finished
from tilemesh.measure.machine import stamp
from tilemesh.runs import names
from tilemesh.runs.files import NotThere, Unread, names_in, read_object, write_object, write_text
from tilemesh.runs.kind import TRAIN, Kind
from tilemesh.runs.manifest import DamagedError, Manifest, checkpoints, damage, folder_name

_INIT = "init"
_WHAT_IT_HOLDS = f'it should hold {{"schema": {names.SCHEMA}, "kind": "{TRAIN.name}"}}, or the name of another kind'


def new_run(
    kind: Kind,
    config: str,
    path: str | Path | None = None,
    name: str = "run",
    init: str | Path | None = None,
) -> Path:
    """A fresh folder with the configuration (TOML text) in it: the one named, or the next one under runs/.

    `init`: the folder that its first weights come from.
    """
    folder = make_folder(path, name)
    try:
        begun = {} if init is None else {_INIT: str(Path(init).resolve())}
        write_object(folder / names.ABOUT, {"schema": names.SCHEMA, "kind": kind.name, **begun})
        write_text(folder / names.CONFIG, config)
    except OSError as error:
        (folder / names.ABOUT).unlink(missing_ok=True)  # one without the other is no run
        raise RunError(f"run folder {folder}: {error.strerror}") from None
    return folder


def first_weights(folder: str | Path) -> str | None:
    """The folder that a run's first weights come from: until it has a checkpoint, it has to begin there again."""
    init = read_small(folder, names.ABOUT).get(_INIT)
    return init if isinstance(init, str) else None


def make_folder(path: str | Path | None, name: str = "run") -> Path:
    """The folder named, made if it is not there, refused if it has a run or files that one would write over; without a
    name, the next one under runs/.

    Called before a folder is locked and under its lock: where there is a run, not even its stale lock is touched.
    """
    if path is None:
        return fresh_folder(Path(names.RUNS), f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"run folder {path}: {error.strerror}") from None
    if (Path(path) / names.CONFIG).exists():
        raise UsageError(f"{path} has a run already: resume that one, or name another folder")
    others = names.WRITTEN & set(names_in(Path(path).resolve()))
    if (
        read_small(path, names.ABOUT).get("schema") == names.SCHEMA
    ):  # of a run that was killed before it had a configuration
        others -= {names.ABOUT}
    if others:
        raise UsageError(
            f"{path} has {min(others)}, which a run would write over: move it away, or name another folder"
        )
    return Path(path)


def fresh_folder(base: Path, name: str) -> Path:
    """A new folder of this name under `base`; where there is one, with a number after it."""
    for number in range(100):
        folder = base / (name + (f"-{number}" if number else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"run folder {folder}: {error.strerror}") from None
        return folder
    raise RunError(f"no free name for {name} under {base}")


def kind_of(folder: str | Path) -> str:
    """The name of the kind of run in a folder. One without run.json is from before there were kinds: "train".

    UsageError where there is no run; RunError where run.json is damaged or of a newer version.
    """
    require_run(folder)
    path = Path(folder) / names.ABOUT
    try:
        about = read_object(path)
    except NotThere:
        return TRAIN.name
    except Unread as why:
        raise RunError(f"{path} cannot be read: {why}; {_WHAT_IT_HOLDS}") from None
    schema, name = about.get("schema"), about.get("kind")
    if isinstance(schema, int) and schema > names.SCHEMA:
        raise RunError(
            f"{path} has schema {schema}, this version of tilemesh reads {names.SCHEMA}: use the one that wrote it"
        )
    if schema != names.SCHEMA or not isinstance(name, str) or not name:
        raise RunError(f"{path} says schema {schema!r} and kind {name!r}: {_WHAT_IT_HOLDS}")
    return name


def require_run(folder: str | Path) -> None:
    """Refuse what is not a folder, and a folder with nothing of a run in it."""
    place = Path(folder)
    if not place.is_dir():
        raise UsageError(f"{folder} is no folder: expected a run's, such as one under {names.RUNS}/")
    if not {names.ABOUT, names.CONFIG, names.METRICS, names.SUMMARY} & set(names_in(place.resolve())):
        check_finished(place)
        raise UsageError(f"{folder} is no run: it has neither {names.CONFIG} nor {names.METRICS}")


def require_kind(folder: str | Path, *kinds: Kind) -> None:
    """Refuse a run of another kind than these."""
    actual = kind_of(folder)
    if actual not in [kind.name for kind in kinds]:
        expected = " or ".join(f"'{kind.name}'" for kind in kinds)
        raise UsageError(f"{folder} is a run of kind '{actual}': expected one of kind {expected}")


def copy_run(run: Path, base: Path, step: int | None = None) -> Path:
    """A folder under `base` with the run's name and its files, for what has no room in its own. Of its checkpoints it
    has that of `step`, if one is named."""
    folder = fresh_folder(base, run.resolve().name)
    try:
        for file in (names.ABOUT, names.CONFIG, names.FEEDBACK):
            if file != names.FEEDBACK or (run / file).exists():
                shutil.copyfile(run / file, folder / file)
        if step is not None:
            checkpoint = Path(names.CHECKPOINTS, folder_name(step))
            shutil.copytree(run / checkpoint, folder / checkpoint)
    except (OSError, shutil.Error) as error:
        raise RunError(f"{folder}: {getattr(error, 'strerror', None) or error}") from None
    for file in (names.CHOICES, names.METRICS, names.ENVIRONMENT, names.PREDICTED, names.BASE, names.SAMPLES):
        with contextlib.suppress(OSError):
            shutil.copyfile(run / file, folder / file)
    for inner in (names.CARRIED, names.ROLLOUTS):
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(run / inner, folder / inner)
    return folder


# ---- configuration ---------------------------------------------------------------------------------------------


def read_config(folder: str | Path, *kinds: Kind) -> tuple[str, str]:
    """(text, path) of the configuration of a run of one of these kinds."""
    path = Path(folder) / names.CONFIG
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        check_finished(folder)
        runs = sorted(Path(names.RUNS).glob(f"*/{names.CONFIG}"))
        hint = f"; the newest here is {runs[-1].parent}" if runs else ""
        raise UsageError(f"{folder} is no run: it has no {names.CONFIG}{hint}") from None
    except NotADirectoryError:
        raise UsageError(f"{folder} is no folder: expected a run's, such as one under {names.RUNS}/") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text: was it damaged, or written by another program?") from None
    require_kind(folder, *kinds)
    return text, str(path)


def change_config(folder: Path, config: str) -> None:
    """Another configuration from now on; what it was until now stays beside it."""
    before = (folder / names.CONFIG).read_text(encoding="utf-8")
    kept = folder / names.earlier_config(newest_checkpoint(folder) or 0)
    if not kept.exists():  # else the run had one more meanwhile, by which no step that counts was done
        write_text(kept, before)
    write_text(folder / names.CONFIG, config)


# ---- what is known before and after ----------------------------------------------------------------------------


def read_small(folder: str | Path, name: str) -> dict[str, Any]:
    """A JSON file of this folder; empty when it is not there or damaged."""
    try:
        return read_object(Path(folder) / name)
    except Unread:
        return {}


def write_prediction(folder: Path, prediction: Mapping[str, Any]) -> None:
    """What is expected of the run, written before it begins."""
    write_object(folder / names.PREDICTED, prediction)


def write_environment(folder: Path, command: str | None = None) -> None:
    """Machine, versions, code and the commands that made this run, first one first."""
    earlier = read_small(folder, names.ENVIRONMENT)
    before = earlier.get("commands")
    origin = stamp()
    commands = [*(before if isinstance(before, list) else []), command or origin["command"]]
    kept = {BUSY: earlier[BUSY]} if BUSY in earlier else {}
    write_object(folder / names.ENVIRONMENT, {**origin, "commands": commands, **kept})


def write_busyness(folder: Path, busy: Busyness) -> None:
    """How much else the machine had to do meanwhile, beside machine and versions; of several attempts the worst."""
    environment = read_small(folder, names.ENVIRONMENT)
    before = Busyness.from_dict(environment.get(BUSY))
    worst = busy if before is None or busy.score >= before.score else before
    write_object(folder / names.ENVIRONMENT, {**environment, BUSY: worst.to_dict()})


def read_busyness(environment: Mapping[str, Any]) -> Busyness | None:
    """What `write_busyness` wrote; None: nobody looked."""
    return Busyness.from_dict(environment.get(BUSY))


def read_summary(path: str | Path, *kinds: Kind) -> dict[str, Any]:
    """The summary of a run of one of these kinds, from its folder or the file itself; RunError says what is wrong."""
    file = Path(path) / names.SUMMARY if Path(path).is_dir() else Path(path)
    try:
        summary = read_object(file)
    except NotThere:
        raise RunError(f"'{path}' has no {names.SUMMARY}: give the folder of a run that has ended") from None
    except Unread as why:
        raise RunError(f"'{file}' cannot be read: {why}") from None
    if summary.get("schema") != names.SCHEMA:
        raise RunError(f"'{file}' has schema {summary.get('schema')!r}, this version reads {names.SCHEMA}")
    named = summary.get("kind", TRAIN.name)
    for kind in kinds:
        if named == kind.name:
            kind.check_summary(summary, str(file))
            return summary
    expected = " or ".join(f"'{kind.name}'" for kind in kinds)
    raise RunError(f"'{file}' is of a run of kind {named!r}: expected {expected}")


def newest_checkpoint(folder: str | Path) -> int | None:
    """The step of the newest finished checkpoint."""
    finished = checkpoints(Path(folder) / names.CHECKPOINTS)
    return finished[0][0] if finished else None


def newest_whole_checkpoint(folder: str | Path) -> int | None:
    """The step of the newest checkpoint whose every file has its digest. It reads all of them: for after a fault."""
    for step, path in checkpoints(Path(folder) / names.CHECKPOINTS):
        with contextlib.suppress(DamagedError):
            if not any(damage(path, Manifest.read(path).files)):
                return step
    return None
