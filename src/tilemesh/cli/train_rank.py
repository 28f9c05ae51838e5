"""`tilemesh train` as a rank that mpiexec, srun or torchrun started: rank 0 shows what the run came to."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from tilemesh.cli.train_run import Asked, configuration, fit_asked, program, show, write_page
from tilemesh.core.context import membership
from tilemesh.train.progress import Shown


def main(text: str) -> int:
    given = json.loads(text)
    asked = Asked(**{**given, "sets": tuple(given["sets"])})
    member = membership()
    assert member is not None
    # mpiexec's pipe to a rank says it is a terminal; what comes out at its end may be a log.
    shown = Shown(Console(highlight=False, markup=False, force_terminal=False))
    result = fit_asked(asked, configuration(asked, member), shown)
    if member.rank == 0:
        page = write_page(result.folder)
        if result.interrupted:
            again = f"{program()} train --resume {result.folder}"
            print(f"stopped after step {result.step}; go on with: {again}", flush=True)
        else:
            console = Console(highlight=False, markup=False, stderr=asked.json == "-", force_terminal=False)
            show(result, console, asked.json)
            console.print(page, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
