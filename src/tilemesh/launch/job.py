"""Start a job's ranks on this machine, pass on what they print, and own their death.

One loop watches everything: output pipes, processes, the board, signals. The first rank that fails
ends the job; the outcome says which one, why, and at what it was. Inside mpiexec, srun or torchrun
nothing is started: the caller becomes the rank it already is (`launch`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tilemesh.core.context import VERDICT_FILE, membership
from tilemesh.core.cores import available_cores
from tilemesh.core.errors import Argument, UsageError
from tilemesh.launch import start
from tilemesh.launch.blame import GONE, Death, Failure, blame, failure_of, last_words, mpi_deaths
from tilemesh.launch.board import DONE, FAILED, INTERRUPTED, Board, Record
from tilemesh.launch.folder import is_leaving, job_folder, kill_processes_of
from tilemesh.launch.output import Pipes, Sink, print_line
from tilemesh.launch.rank import INTERRUPTED_CODE, die_with_parent, run_command

MOST_RANKS, RANKS_PER_CORE = 256, 16  # on one machine: more is a slip of the finger, and would take all its memory
_TICK_S = 0.05
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KEPT_BYTES = 1 << 16
_SETTLE_S = 0.15  # after the first sign of a failure: time for the true cause to show beside its consequences
_LEAVING_S = 5.0  # at most, for a rank that was killed and has yet to go: freeing a GPU's memory takes it a while


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `failure` is None when every rank ended well."""

    failure: Failure | None
    interrupted: bool
    seconds: float
    attempts: int

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return INTERRUPTED_CODE
        return 0 if self.failure is None else 1

    def sentence(self, ranks: int) -> str:
        """The job's last line."""
        tries = f", attempt {self.attempts}" if self.attempts > 1 else ""
        them = "1 rank" if ranks == 1 else f"{ranks} ranks"
        if self.interrupted:
            return f"interrupted after {self.seconds:.1f} s{tries}: {them} ended"
        if self.failure is None:
            return f"{them} done in {self.seconds:.1f} s{tries}"
        return f"{self.failure.sentence()}; job of {them} ended after {self.seconds:.1f} s{tries}"


@dataclass(frozen=True)
class Graces:
    """How long ranks have to end by themselves before they are killed: after a failure, and after Ctrl-C."""

    failure_s: float = 3.0
    interrupt_s: float = 5.0


def launch(
    command: Sequence[str],
    *,
    ranks: int | None = None,
    transport: str = "auto",
    restarts: int = 0,
    environ: Mapping[str, str] | None = None,
    sink: Sink | None = None,
    grace_s: float = 3.0,
    interrupt_grace_s: float = 5.0,
    timeout_s: float | None = None,
    say: Callable[[str], None] | None = None,
    again: Callable[[Failure], int | None] | None = None,
) -> Outcome:
    """Run `command` as `ranks` ranks and wait for them.

    The command is a Python script with its arguments, `-m module …`, or any program. Inside a running
    mpiexec, srun or torchrun job this becomes that job's rank and does not return.
    `restarts`: how often a failed job is started anew. `grace_s`: how long the other ranks have to end
    by themselves after a failure before they are killed; `interrupt_grace_s` the same after Ctrl-C.
    `timeout_s`: a job that lasts longer has failed (no bound by default). `again` hears why the job is started anew,
    when no rank of the failed attempt is left, and may say with how many ranks.
    """
    start.check_command(command)
    environ = os.environ if environ is None else environ
    member = membership(environ)
    if member is not None:
        if ranks is not None and ranks != member.size:
            raise UsageError(
                f"--ranks {ranks} inside a job of {member.size} ranks that {member.starter} started: "
                "leave --ranks out here"
            )
        run_command(command, member)
    if ranks is None:
        raise UsageError("how many ranks? give ", Argument("ranks"), " (inside mpiexec, srun or torchrun it is known)")
    check_ranks(ranks)
    start.check_restarts(restarts)
    transport = start.choose_transport(transport)
    sink = sink or print_line
    say = say or say_line
    began = time.monotonic()
    for attempt in range(restarts + 1):
        with job_folder() as folder:
            programs = start.processes(
                command, ranks=ranks, transport=transport, job=folder, attempt=attempt, environ=environ
            )
            job = Job(programs, ranks, folder, mpi=transport == "mpi", sink=sink, say=say)
            failure = job.run(Graces(grace_s, interrupt_grace_s), timeout_s)
        outcome = Outcome(failure, job.interrupted, time.monotonic() - began, attempt + 1)
        if outcome.failure is None or outcome.interrupted or attempt == restarts:
            break
        if again is not None:
            ranks = again(outcome.failure) or ranks
        say(f"{outcome.failure.sentence()}; starting again ({attempt + 1} of {restarts})")
    return outcome


class Job:
    """One attempt at a job, from its start to its last process's end.

    Over torch.distributed every rank is our child. Over MPI our child is mpiexec and the ranks are its
    children: those are watched through the process numbers they put on the board.
    """

    def __init__(
        self,
        programs: Sequence[start.Process],
        ranks: int,
        folder: Path,
        *,
        mpi: bool,
        sink: Sink,
        say: Callable[[str], None],
    ) -> None:
        self.programs = programs
        self.ranks = ranks
        self.mpi = mpi
        self.say = say
        self.folder = folder
        self.board = Board(folder, ranks, create=True)
        self.selector = selectors.DefaultSelector()
        self.pipes = Pipes(folder, ranks, sink, self.selector)
        self.children: list[subprocess.Popen[bytes]] = []
        self.codes: dict[int, int] = {}  # torch: child -> exit code, for those that ended before we began to end them
        self.handles: dict[int, int] = {}  # MPI: rank -> descriptor of its process
        self.vanished: list[int] = []  # MPI: ranks whose process is gone, in the order seen
        self.gone_first: list[int] = []  # MPI: those of them that had gone before we ended the others
        self.mpiexec_said = b""
        self.signals: list[int] = []  # received, not yet acted on
        self.interrupted = False
        self.told_to_stop: set[int] = set()
        self.failed_since: float | None = None
        self.kill_at: float | None = None
        self._has_ended = threading.Event()
        self.was_killed = False  # something still ran when the grace was over, and was killed

    def run(self, graces: Graces, timeout_s: float | None) -> Failure | None:
        """From the start to the last process's end."""
        end_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        late = None
        with self.noting_signals():
            try:
                self.begin()
                while self.running() and late is None:
                    if time.monotonic() > end_at:
                        late = self.too_long(timeout_s)
                    else:
                        self.turn(graces)
                if late is None:
                    self._note_exits()
            finally:
                failure = self.end()
        return late or failure

    def begin(self) -> None:
        """Start the processes, from a thread that lives as long as they shall.

        The kernel ends the children of a thread with that thread (`die_with_parent`), and the caller's may end long
        before the ranks do. The main thread ends with the program.
        """
        if threading.current_thread() is threading.main_thread():
            self._start_all()
            return
        began: Future[None] = Future()
        threading.Thread(target=self._live, args=(began,), name="tilemesh-job", daemon=True).start()
        began.result()

    def _live(self, began: Future[None]) -> None:
        """Start the processes, and stay until the job has ended."""
        try:
            self._start_all()
        except BaseException as error:
            began.set_exception(error)
        else:
            began.set_result(None)
        self._has_ended.wait()

    def _start_all(self) -> None:
        for program in self.programs:
            self._start(program)

    def end(self) -> Failure | None:
        """End what still runs, pass on what was printed last, and say why the job failed, if it did."""
        self._kill()
        self._read_mpiexec()
        self.pipes.drain()
        self.pipes.finish()
        failure = None if self.interrupted else self._failure()
        self._close()
        self._has_ended.set()
        return failure

    def too_long(self, timeout_s: float | None, among: Set[int] | None = None) -> Failure:
        """Names the rank (of those) that has been at one thing longest."""
        records = self.records()
        ended = self.ended()
        those = range(self.ranks) if among is None else sorted(among)
        running = [rank for rank in those if rank not in ended and not records[rank].ended_ns] or [*those]
        slowest = min(running, key=lambda rank: records[rank].since_ns)
        return failure_of(records, slowest, f"was not done within {timeout_s} s")

    def records(self) -> list[Record]:
        return [self.board.read(rank) for rank in range(self.ranks)]

    def ended(self) -> set[int]:
        """Ranks whose process is gone."""
        return set(self.vanished) if self.mpi else set(self.codes)

    def _start(self, program: start.Process) -> None:
        child = subprocess.Popen(
            program.command,
            env=dict(program.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self.mpi else subprocess.DEVNULL,  # a rank soon writes into its own pipe
            stderr=subprocess.STDOUT if self.mpi else None,
            start_new_session=True,  # the terminal's Ctrl-C reaches us alone, and we pass it on in order
            preexec_fn=die_with_parent,
        )
        self.children.append(child)
        if child.stdout is not None:
            os.set_blocking(child.stdout.fileno(), False)
            self.selector.register(
                child.stdout, selectors.EVENT_READ, functools.partial(self._hear_mpiexec, child.stdout)
            )

    # One turn of the loop -----------------------------------------------------------------------------

    def turn(self, graces: Graces) -> None:
        """Wait a moment for whatever happens next, and act on it. What the selector watches says itself what to do."""
        for key, _ in self.selector.select(_TICK_S):
            key.data()
        now = time.monotonic()
        while self.signals:
            self._interrupt(self.signals.pop(0), now + graces.interrupt_s)
        if self.interrupted:
            self._pass_on_interrupt()
        if self.mpi:
            self._watch_mpi_ranks()
        self._note_exits()
        if self.failed_since is None and self.has_failed():
            self.failed_since = now
        if self.failed_since is not None and self.kill_at is None and self._has_settled(now - self.failed_since):
            self.gone_first = [rank for rank in self.vanished if not self.board.read(rank).ended_ns]
            self._signal_ranks(signal.SIGTERM)
            self.kill_at = now + graces.failure_s
        if self.kill_at is not None and now >= self.kill_at:
            self.was_killed = self.was_killed or self.running()
            self._kill()

    def _hear_mpiexec(self, pipe: IO[bytes]) -> None:
        if not self._read_mpiexec():
            self.selector.unregister(pipe)

    def _note_gone(self, rank: int) -> None:
        self.vanished.append(rank)
        self.selector.unregister(self.handles[rank])

    def _read_mpiexec(self) -> bool:
        """What mpiexec itself has to say is kept for the case that it alone knows what happened."""
        for child in self.children:
            if child.stdout is not None and (data := child.stdout.read()):
                self.mpiexec_said = (self.mpiexec_said + data)[-_KEPT_BYTES:]
                return True
        return False

    def _watch_mpi_ranks(self) -> None:
        for rank in range(self.ranks):
            if rank in self.handles or not (pid := self.board.read(rank).pid):
                continue
            try:
                self.handles[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                self.vanished.append(rank)
                self.handles[rank] = -1
            except (AttributeError, OSError):  # not Linux, or an old kernel: mpiexec's word must do
                self.handles[rank] = -1
            else:
                self.selector.register(
                    self.handles[rank], selectors.EVENT_READ, functools.partial(self._note_gone, rank)
                )

    def _note_exits(self) -> None:
        if self.kill_at is None:
            for index, child in enumerate(self.children):
                if index not in self.codes and (code := child.poll()) is not None:
                    self.codes[index] = code

    def has_failed(self) -> bool:
        if any(self.codes.values()) or any(not self.board.read(rank).ended_ns for rank in self.vanished):
            return True
        return any(self.board.read(rank).state in (FAILED, INTERRUPTED) for rank in range(self.ranks))

    def _has_settled(self, seconds: float) -> bool:
        """Whether, so long after the first sign of a failure, no rank is about to end without a word."""
        records = [self.board.read(rank) for rank in range(self.ranks)]
        leaving = any(record.pid and not record.ended_ns and is_leaving(record.pid) for record in records)
        return seconds > (_LEAVING_S if leaving else _SETTLE_S)

    def _interrupt(self, number: int, kill_at: float) -> None:
        if self.interrupted:
            self.kill_at = 0.0  # asked twice: now
            return
        self.interrupted = True
        self.kill_at = kill_at
        self._pass_on_interrupt()
        with contextlib.suppress(OSError):  # a terminal that was closed cannot be told
            self.say(f"{signal.Signals(number).name}: asking {self.ranks} ranks to stop (once more kills them)")

    def _pass_on_interrupt(self) -> None:
        """To every rank once, also to those that appear on the board only after the interrupt."""
        for rank in set(range(self.ranks)) - self.told_to_stop:
            record = self.board.read(rank)
            if record.pid:
                self.told_to_stop.add(rank)
                if not record.ended_ns:
                    _signal_group(record.pid, signal.SIGINT)

    # Ending -------------------------------------------------------------------------------------------

    def _failure(self) -> Failure | None:
        verdict = self.folder / VERDICT_FILE
        if verdict.exists():  # a rank that waited for another knows more than what can be seen from here
            return Failure(None, verdict.read_text(errors="replace").strip(), "", 0.0)
        records = self.records()
        if not self.mpi:
            return blame(records, [Death(rank, code) for rank, code in self.codes.items()])
        code = self.children[0].returncode if self.children else 0
        said = self.mpiexec_said.decode(errors="replace")
        reported = any(record.state in (FAILED, INTERRUPTED) for record in records)
        # Who vanished first is a guess, good only where nobody said anything and mpiexec's code is not of our killing.
        is_known = reported or (self.gone_first and self.was_killed)
        silent = [] if is_known else [rank for rank in self.vanished if not records[rank].ended_ns]
        deaths = mpi_deaths(said, code, silent)
        if self.gone_first and not reported and all(death.rank not in self.gone_first for death in deaths):
            # mpiexec names whom it saw end, Open MPI 4 nobody when we end the others: on a busy machine it may see
            # only those, so that it does not name this rank says nothing about how it ended.
            deaths = [Death(self.gone_first[0], GONE)]
        failure = blame(records, deaths)
        if failure is None and code != 0:
            return Failure(None, f"mpiexec ended with code {code}: {last_words(said)}", "", 0.0)
        return failure

    def running(self) -> bool:
        return any(child.poll() is None for child in self.children)

    def _signal_ranks(self, number: signal.Signals) -> None:
        """To the process group of each rank that has not ended."""
        for rank in range(self.ranks):
            record = self.board.read(rank)
            if record.pid and not record.ended_ns:
                _signal_group(record.pid, number)

    def _kill(self) -> None:
        """End whatever still runs, and what failed ranks have left running."""
        clean = not self.running() and all(self.board.read(rank).state == DONE for rank in range(self.ranks))
        if not clean:
            for rank in range(self.ranks):
                if pid := self.board.read(rank).pid:
                    _signal_group(pid, signal.SIGKILL)
            for child in self.children:
                if child.poll() is None:
                    _signal_group(child.pid, signal.SIGKILL)
            kill_processes_of(self.folder)
        for child in self.children:
            child.wait()

    def _close(self) -> None:
        for handle in self.handles.values():
            if handle >= 0:
                os.close(handle)
        for child in self.children:
            if child.stdout is not None:
                child.stdout.close()
        self.pipes.close()
        self.selector.close()
        self.board.close()

    @contextlib.contextmanager
    def noting_signals(self) -> Iterator[None]:
        """Note the signals that end a job, for the loop to act on; only the main thread may set handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {n: signal.signal(n, lambda number, _: self.signals.append(number)) for n in _ENDING_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def check_ranks(ranks: int) -> None:
    """Each rank needs a few descriptors of ours; raise the soft limit, or say that the hard one is too low."""
    if ranks < 1:
        raise UsageError(Argument("ranks"), f" is {ranks}: expected at least 1")
    most = max(MOST_RANKS, RANKS_PER_CORE * available_cores())
    if ranks > most:
        raise UsageError(
            Argument("ranks"), f" is {ranks}: expected at most {most} on this machine ({available_cores()} cores)"
        )
    needed = 5 * ranks + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed <= soft or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"so many ranks need {needed} open files here, and {hard} are allowed: fewer ranks, or ulimit -n"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _signal_group(pid: int, number: signal.Signals) -> None:
    """To the group a rank leads; a rank that has not made its group yet gets it alone."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)
            return


def say_line(text: str) -> None:
    print(f"tilemesh: {text}", file=sys.stderr, flush=True)
