"""A shared-memory program's instructions in runs, each of which a few numpy calls carry out at once."""

from __future__ import annotations

from tilemesh.comm.runtime.lower import Local, Meet, Program, Span
from tilemesh.comm.schedules.schedule import INPUT, TEMP


def runs_of(program: Program) -> list[list[Local] | None]:
    """The program's instructions in runs that can be carried out at once; None is a meeting."""
    runs: list[list[Local] | None] = []
    for instruction in program.instructions:
        if isinstance(instruction, Meet):
            runs.append(None)
        elif not isinstance(instruction, Local):
            raise TypeError(f"a message in a program for shared memory: {instruction}")
        else:
            run = _begun(runs, instruction)
            if run is not None:
                run.append(instruction)
            else:
                runs.append([instruction])
    return runs


def _begun(runs: list[list[Local] | None], local: Local) -> list[Local] | None:
    """The run that this one goes on with: the last, or where it adds to something, what put that there.

    It goes ahead of the runs in between only where neither touches what the other reads or writes.
    """
    for run in reversed(runs):
        if run is None or (run is not runs[-1] and not local.reduce):
            break
        if _goes_on(run, local):
            return run
        if not all(_are_apart(local, one) and _are_apart(one, local) for one in run):
            break
    return None


def _are_apart(first: Local, second: Local) -> bool:
    """Whether the second reads and writes nothing that the first writes; a neighbour's memory is not this rank's."""
    reads = second.peer == -1 and _overlap(first.target, second.source)
    return not reads and not _overlap(first.target, second.target)


def _overlap(one: Span, other: Span) -> bool:
    return one.space == other.space and one.lo < other.hi and other.lo < one.hi


def _goes_on(run: list[Local], local: Local) -> bool:
    last = run[-1]
    if local.reduce:
        return local.target.space == last.target.space and local.target.lo == last.target.lo
    if last.reduce or local.target.space != last.target.space or local.source.space != last.source.space:
        return False
    if local.source.space == INPUT and local.peer == -1 == last.peer:  # slots in a row
        return local.target.lo == last.target.hi and local.source.lo == last.source.hi
    if local.target.space == TEMP:
        return False
    return local.peer != last.peer and local.source.space == TEMP and local.source == last.source
