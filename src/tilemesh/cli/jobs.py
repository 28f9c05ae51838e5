"""Jobs that write a run's folder, for the commands that start them: what is shown meanwhile, and what is said when one
has ended, was stopped or failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilemesh.cli.output import Block, Output, program, show, tell
from tilemesh.core.errors import RunError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from tilemesh.train.progress import Shown
    from tilemesh.train.result import Result


def run_job(fit: Callable[[Shown], Result], command: str, console: Console) -> tuple[Result, str, str] | int:
    """Run it and make its page: its result, a line on the page, and one where its last weights are lost. Of a job
    that failed or was interrupted the exit code, once it is said how to go on."""
    from tilemesh.runs.folder import newest_whole_checkpoint
    from tilemesh.train.progress import Shown
    from tilemesh.train.result import RanksFailedError

    shown = Shown(console)
    try:
        result, lost = fit_or_lost(fit, shown)
    except RanksFailedError as error:
        shown.close()
        write_page(error.folder)
        if error.interrupted:
            return _stopped(error.folder, str(error), command)
        step = newest_whole_checkpoint(error.folder)
        if step is not None:
            again = f"{program()} {command} --resume {error.folder}"
            console.print(f"the last good checkpoint is of step {step}; go on with: {again}")
        tell(str(error))
        return 1
    finally:
        shown.close()
    page = write_page(result.folder)
    if not result.by_signal:
        return result, page, lost
    if lost:
        tell(lost)
    return _stopped(result.saved_in or result.folder, result.by_signal, command)


def fit_or_lost(fit: Callable[[Shown], Result], shown: Shown) -> tuple[Result, str]:
    """What the run came to; and a line, where its last weights could not be written."""
    from tilemesh.train.result import WeightsLostError

    try:
        return fit(shown), ""
    except WeightsLostError as error:
        return error.result, str(error)


def show_job(options: Any, console: Console, text: Iterable[Block], result: Result, page: str, lost: str) -> int:
    """What a run came to and where everything is; the exit code. `lost`: the last line, where weights are."""
    from tilemesh.cli.next_command import after_run
    from tilemesh.report.run import read

    after = after_run(read(str(result.saved_in or result.folder)))
    code = show(Output([*text, [page]], result.rows, exit_code=int(bool(lost)), next=after), options, console)
    if lost:
        console.file.flush()
        tell(lost)
    return code


def _stopped(folder: Path, sentence: str, command: str) -> int:
    """Say how to go on with a run that was interrupted; the exit code."""
    from tilemesh.launch.rank import INTERRUPTED_CODE
    from tilemesh.runs.folder import newest_checkpoint

    step = newest_checkpoint(folder)
    again = f"checkpoint of step {step} written, go on with:\n{program()} {command} --resume {folder}"
    tell(f"{sentence}; {'there was no checkpoint yet' if step is None else again}")
    return INTERRUPTED_CODE


def write_page(folder: Path) -> str:
    """Make the run's page, finished or not; a line that says where, or why there is none. Never ends a run."""
    from tilemesh.cli.pages import write_pages

    try:
        return f"look:    {write_pages([str(folder)], None)[0]}"
    except (OSError, RunError, UsageError) as error:
        return f"no page: {error}"
