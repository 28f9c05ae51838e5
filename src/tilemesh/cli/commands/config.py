"""Print a configuration file that explains every key. It is for `tilemesh train`."""

from __future__ import annotations

from dataclasses import dataclass

from tilemesh.core.errors import UsageError
from tilemesh.core.options import argument, changed_flags, option


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    name: str | None = argument(None, "What to begin from; the default preset.", "[PRESET|CONFIG.toml]")
    mesh: str | None = option(None, "How the ranks are laid out.", "dp=2,tp=2")
    sets: tuple[str, ...] = option((), "train.steps=200,...", "A=B,...", flag="--set")
    init: str | None = option(None, "With the model of a Hugging Face folder.", "FOLDER")
    reference: bool = option(False, "Print the reference of all keys as Markdown.")


def config(options: ConfigOptions) -> None:
    from tilemesh.measure.machine import usable_gpus
    from tilemesh.train.load import load
    from tilemesh.train.reference import commented_file, reference_page

    if options.reference:
        if changed_flags(options) != ["--reference"]:
            raise UsageError("--reference lists all keys, whatever their values: leave the other arguments out")
        print(reference_page(), end="")
        return
    run = load(options.name, mesh=options.mesh, sets=options.sets, init=options.init, gpus=len(usable_gpus()))
    print(commented_file(run), end="")
