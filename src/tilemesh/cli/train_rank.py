"""`tilemesh train` as a rank that mpiexec, srun or torchrun started: rank 0 shows what the run came to."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from tilemesh.cli.train_run import Asked, configuration, fit_asked, program, show, write_page
from tilemesh.core.context import membership
from tilemesh.train.progress import Shown
from tilemesh.train.result import WeightsLostError


def main(text: str) -> int:
    given = json.loads(text)
    asked = Asked(**{**given, "sets": tuple(given["sets"])})
    member = membership()
    assert member is not None
    # mpiexec's pipe to a rank says it is a terminal; what comes out at its end may be a log.
    shown = Shown(Console(highlight=False, markup=False, force_terminal=False))
    lost = ""
    try:
        result = fit_asked(asked, configuration(asked, member), shown)
    except WeightsLostError as error:
        result, lost = error.result, f"tilemesh: {error}"
    if member.rank:
        return int(bool(lost))
    page = write_page(result.folder)
    if not result.interrupted:
        console = Console(highlight=False, markup=False, stderr=asked.json == "-", force_terminal=False)
        return show(result, console, asked.json, page, lost)
    again = f"{program()} train --resume {result.saved_in}"
    print(f"stopped after step {result.step}; go on with: {again}", flush=True)
    if lost:
        print(lost, file=sys.stderr, flush=True)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
