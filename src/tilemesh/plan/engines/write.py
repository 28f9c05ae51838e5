"""A plan as another engine's files: its configuration, the command that starts it on a node, and a SLURM script."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from tilemesh.plan.engines.engine import EngineJob, OtherEngine

LAUNCH, SLURM = "launch.sh", "job.slurm"
PORT = 29500


def engine_files(engine: OtherEngine, job: EngineJob, origin: str) -> dict[str, str]:
    """By name, the text of each file. `origin`: lines that say where they come from."""
    notes = [*origin.splitlines(), *(f"note: {note.words}" for note in engine.notes if note.when(job))]
    comment = "".join(f"# {line}\n" for line in notes)
    values = engine.values(job)
    files: dict[str, str] = {}
    if engine.form == "yaml":
        files[engine.file] = comment + _yaml(_nested(values))
    elif engine.form == "json":  # has no comments
        files[engine.file] = json.dumps(_nested(values), indent=2) + "\n"
    files[LAUNCH] = _launch(engine, job, comment)
    files[SLURM] = _slurm(engine, job)
    return files


def _launch(engine: OtherEngine, job: EngineJob, comment: str) -> str:
    nodes, each = len(job.cluster.nodes), job.cluster.node.count
    joined = f"--rdzv-backend=c10d --rdzv-endpoint=$HEAD:$PORT --rdzv-id=${{SLURM_JOB_ID:-{PORT}}}"
    launcher = f"torchrun --nnodes={nodes} --nproc-per-node={each} {joined if nodes > 1 else '--standalone'}"
    command = engine.command(job).replace("{launcher}", launcher).replace("{file}", f'"$HERE/{engine.file}"')
    words = [command]
    if engine.form == "flags":
        words += [_flag(name, value) for name, value in engine.values(job).items()]
    words += [" ".join(['"$@"', engine.last(job)]).strip()]
    exports = "".join(f"export {name}={value}\n" for name, value in engine.environment(job).items())
    where = f"export HEAD=${{HEAD:-localhost}} PORT=${{PORT:-{PORT}}}\n"
    start = "on every node, with HEAD set to the first one's name" if nodes > 1 else "on the node"
    if re.search(r"\bNODE\b", " ".join(words)):
        where += "NODE=${NODE:-${SLURM_NODEID:-0}}\n"
        start += " and NODE to its own number (0, 1, ...)"
    head = f"#!/bin/bash\n# Start it {start}: bash {LAUNCH}; under SLURM: sbatch {SLURM}\n{comment}"
    return f'{head}set -euo pipefail\nHERE=$(dirname "$0")\n{where}{exports}' + " \\\n    ".join(words) + "\n"


def _slurm(engine: OtherEngine, job: EngineJob) -> str:
    nodes, each = len(job.cluster.nodes), job.cluster.node.count
    return (
        f"#!/bin/bash\n#SBATCH --job-name={engine.name}\n#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node=1\n"
        + (f"#SBATCH --gpus-per-node={each}\n" if job.cluster.device.kind == "gpu" else "")
        + "#SBATCH --exclusive\n"
        'cd "$SLURM_SUBMIT_DIR"\n'
        'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nexport HEAD\n'
        f"srun bash -c 'exec bash {LAUNCH}'\n"
    )


def _flag(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    words = value if isinstance(value, list) else [value]
    return " ".join([f"--{name}", *(_word(str(word)) for word in words)])


def _word(text: str) -> str:
    """Quoted for a shell, but for words that it has to fill in."""
    return text if "$" in text else shlex.quote(text)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Names with dots as sections."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return result


def _yaml(values: Mapping[str, Any], indent: str = "") -> str:
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{name}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    """A word that YAML would take for something else, such as no, is quoted."""
    text = json.dumps(value) if not isinstance(value, str) else value
    plain = not isinstance(value, str) or (re.fullmatch(r"[A-Za-z][\w.-]*", text) and text.lower() not in _YAML_WORDS)
    return text if plain else json.dumps(text)


_YAML_WORDS = ("no", "yes", "on", "off", "true", "false", "null", "n", "y")
