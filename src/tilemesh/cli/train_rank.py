"""`tilemesh train` as a rank that mpiexec, srun or torchrun started: rank 0 makes the run and shows what it came to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from tilemesh.cli.train_rows import predict_run
from tilemesh.cli.train_run import Asked, _folder, configuration, program, show, write_page
from tilemesh.comm.connection import connect
from tilemesh.core.context import membership
from tilemesh.measure.machine import gpu_names
from tilemesh.parallel.agree import tell
from tilemesh.runs import folder as folders
from tilemesh.train.rank import train_here


def main(text: str) -> int:
    given = json.loads(text)
    asked = Asked(**{**given, "sets": tuple(given["sets"])})
    config = configuration(asked, membership())
    comm = connect(asked.transport, timeout_s=config.train.timeout_s)
    made = ""
    if comm.rank == 0:
        folder = _folder(asked, config)
        predicted = predict_run(config, gpu_names())
        folders.write_prediction(folder, predicted)
        folders.write_environment(folder, asked.typed)
        print(f"run: {folder}", flush=True)
        made = str(folder.resolve())
    folder = Path(tell(comm, made))
    result = train_here(
        config, folder, comm, resume=asked.resume is not None, init=asked.init, stop_after=asked.stop_after
    )
    if comm.rank == 0:
        page = write_page(folder)
        if result.interrupted:
            print(f"stopped after step {result.step}; go on with: {program()} train --resume {folder}", flush=True)
        else:
            # mpiexec's pipe to a rank says it is a terminal; what comes out at its end may be a log.
            console = Console(highlight=False, markup=False, stderr=asked.json == "-", force_terminal=False)
            show(folder, console, asked.json)
            console.print(page, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
