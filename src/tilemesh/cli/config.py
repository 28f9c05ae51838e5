"""`tilemesh config`: a training configuration with every key explained, or the reference of all keys."""

from __future__ import annotations

from typing import Annotated

import typer


def config(
    name: Annotated[
        str | None, typer.Argument(metavar="[PRESET|CONFIG.toml]", help="What to begin from; the default preset.")
    ] = None,
    mesh: Annotated[str | None, typer.Option(metavar="dp=2,tp=2", help="How the ranks are laid out.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="A=B,...", help="train.steps=200,...")] = None,
    init: Annotated[str | None, typer.Option(metavar="FOLDER", help="With the model of a Hugging Face folder.")] = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Print the reference of all keys as Markdown.")
    ] = False,
) -> None:
    """Print a configuration file that explains every key. It is for `tilemesh train`."""
    from tilemesh.core.errors import UsageError
    from tilemesh.measure.machine import usable_gpus
    from tilemesh.train.load import load
    from tilemesh.train.reference import commented_file, reference_page

    if reference:
        if name is not None or mesh is not None or sets or init is not None:
            raise UsageError("--reference lists all keys, whatever their values: leave the other arguments out")
        print(reference_page(), end="")
        return
    made = load(name, mesh=mesh, sets=tuple(sets or ()), init=init, gpus=len(usable_gpus()))
    print(commented_file(made), end="")
