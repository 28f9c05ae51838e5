"""Call a function on ranks from Python and get back what they returned.

`call("package.module:function", 4, ...)` starts ranks, calls the function on each, and returns the results in rank
order. `Ranks` keeps them for further calls: `with Ranks(4) as ranks: ranks.call(...)`. The function is named, because
a rank imports it: nothing is pickled, and arguments and results are JSON values and buffers (`values.py`). One that is
not there is refused before ranks are started or told of it (`locate.py`). A function that wants the other ranks calls
`tilemesh.comm.connect()`. The rank's side is `serve.py`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import time
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, TracebackType
from typing import Any

from tilemesh.core.context import membership
from tilemesh.core.errors import RunError, UsageError
from tilemesh.launch import start, values
from tilemesh.launch.blame import Failure, death_reason, failure_of
from tilemesh.launch.folder import job_folder
from tilemesh.launch.job import Graces, Job, check_ranks, say_line
from tilemesh.launch.locate import require_function
from tilemesh.launch.output import Sink, print_line
from tilemesh.launch.serve import ANSWERS, END, RAISED, YIELDED, answer_file, call_file, orders_file, value_file

Hear = Callable[[int, Any], None]  # rank, a value that its function has yielded
Function = str | Callable[..., Any]

_CLOSE_S = 30.0  # how long ranks may take to end after their last call


class RankError(RunError):
    """A function raised on a rank. `rank` is the first that did; `traceback` is its text, also shown as a note."""

    def __init__(self, message: str, rank: int, traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.add_note(f"on rank {rank}:\n{traceback}")


def call(
    function: Function,
    ranks: int,
    *arguments: Any,
    transport: str = "auto",
    timeout_s: float | None = None,
    environ: Mapping[str, str] | None = None,
    sink: Sink | None = None,
    hear: Hear | None = None,
    **options: Any,
) -> list[Any]:
    """Start `ranks` ranks, call the function on each with the same arguments, and return their results in rank order.

    What is not named here is passed on to the function. The others are those of `Ranks` and `Ranks.call`.
    """
    name = name_of(function)
    if environ is None:
        require_function(name)
    with Ranks(ranks, transport=transport, environ=environ, sink=sink) as started:
        return started.call(name, *arguments, timeout_s=timeout_s, hear=hear, **options)


class Ranks:
    """Ranks that wait for calls. A rank that dies or hangs ends all of them; one that raises does not.

    `sink` gets each line that a rank prints. `grace_s`: when a rank has raised, how long the others have to return or
    raise as well, which leaves the ranks usable; after that they are ended.
    """

    def __init__(
        self,
        ranks: int,
        *,
        transport: str = "auto",
        environ: Mapping[str, str] | None = None,
        sink: Sink | None = None,
        grace_s: float = 3.0,
    ) -> None:
        self._sees_same = environ is None  # in another environment a rank may find modules elsewhere
        environ = os.environ if environ is None else environ
        member = membership(environ)
        if member is not None:
            raise UsageError(
                f"calling ranks inside a job of {member.size} ranks that {member.starter} started: call the function "
                "itself on each rank, or give environ=outside_any_job() to start ranks of its own"
            )
        check_ranks(ranks)
        self.ranks = ranks
        self.transport = start.choose_transport(transport)
        self.sink = sink or print_line
        self.ended: str | None = None  # why there are no ranks any more
        self._graces = Graces(failure_s=grace_s)
        self._calls = 0
        self._under_way: str | None = None  # the function of a call that was begun and whose results nobody has taken
        self._results: dict[int, Any] = {}  # of the call under way, by rank
        self._raised: dict[int, dict[str, str]] = {}  # the same, in the order in which they came
        self._raised_at = float("inf")
        self._hear: Hear | None = None
        self._failure: Failure | None = None
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(job_folder())
            programs = start.processes(
                ["-m", "tilemesh.launch.serve"], ranks=ranks, transport=self.transport, job=self._folder, attempt=0,
                environ=environ,
            )  # fmt: skip
            is_mpi = self.transport == "mpi"
            self._job = Job(programs, ranks, self._folder, mpi=is_mpi, sink=self._print, say=say_line)
            stack.callback(self._end_job)
            self._orders = [self._pipe(orders_file(rank), stack)[1] for rank in range(ranks)]
            self._answers, _ = self._pipe(ANSWERS, stack)
            self._job.selector.register(self._answers, selectors.EVENT_READ, self._read_answers)
            self._job.begin()
            self._stack = stack.pop_all()

    def call(
        self,
        function: Function,
        *arguments: Any,
        timeout_s: float | None = None,
        hear: Hear | None = None,
        **options: Any,
    ) -> list[Any]:
        """Call the function on every rank with the same arguments; what each returned, in rank order.

        Of a function that yields, the result is the list of its values; `hear(rank, value)` gets each as it comes.
        `timeout_s`: a call that lasts longer has failed, and the ranks are ended (no bound by default).
        """
        self.begin(function, *arguments, hear=hear, **options)
        return self.results(timeout_s)

    def begin(self, function: Function, *arguments: Any, hear: Hear | None = None, **options: Any) -> None:
        """Let the ranks begin a call; `results` waits for it. Several `Ranks` can so be busy at the same time."""
        name = name_of(function)
        if self._sees_same:
            require_function(name)
        self._check_there()
        if self._under_way is not None:
            raise UsageError(f"the call of {self._under_way} is under way: take its results first")
        path = [place for place in sys.path if isinstance(place, str)]  # Python passes over anything else
        request = {"function": name, "arguments": arguments, "options": options, "path": path}
        values.write(self._folder / call_file(self._calls + 1), request, "call")
        self._calls += 1
        self._results, self._raised, self._raised_at, self._hear = {}, {}, float("inf"), hear
        self._under_way = name
        self._order(str(self._calls))

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """What each rank has returned from the call that was begun, in rank order; `timeout_s` counts from now."""
        if self._under_way is None:
            raise UsageError("no call is under way: begin one first")
        name, self._under_way = self._under_way, None
        self._check_there()
        try:
            self._wait(timeout_s)
        except BaseException as error:
            self._end(f"{type(error).__name__} in a call of {name}")
            raise
        (self._folder / call_file(self._calls)).unlink()
        if self._raised:
            raise self._rank_error()
        return [self._results[rank] for rank in range(self.ranks)]

    def close(self) -> None:
        """Let the ranks end, as a program does that has reached its last line.

        Every call has been answered by then, so ranks that take too long are ended with a word and the answers kept.
        A rank that fails while it ends is a failure of the job, as it is for a program of its own.
        """
        if self.ended is not None:
            return
        self._order(END)
        end_at, late = time.monotonic() + _CLOSE_S, None
        with self._job.noting_signals():
            while self._job.running() and late is None:
                self._job.turn(self._graces)
                late = self._job.too_long(_CLOSE_S) if time.monotonic() > end_at else None
        failure = self._end("they were closed")
        if late is not None:
            say_line(f"{late.sentence()} after the last call, which all ranks had answered: they were ended")
        elif failure is not None:
            raise RunError(failure.sentence())

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None or issubclass(kind, RankError):
            self.close()
        else:
            self._end(f"{kind.__name__} in the program that called them")

    # Talking to the ranks -----------------------------------------------------------------------------

    def _pipe(self, name: str, stack: contextlib.ExitStack) -> tuple[int, int]:
        """Both ends of a named pipe: held open here, so that a rank's end is not the end of the file."""
        path = self._folder / name
        os.mkfifo(path, 0o600)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        stack.callback(os.close, reader)
        writer = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        stack.callback(os.close, writer)
        return reader, writer

    def _print(self, rank: int, stream: str, line: bytes) -> None:
        self.sink(rank, stream, line)

    def _check_there(self) -> None:
        if self.ended is not None:
            raise RunError(f"these ranks have ended: {self.ended}; start others")

    def _order(self, text: str) -> None:
        for pipe in self._orders:
            os.write(pipe, f"{text}\n".encode())

    def _read_answers(self) -> None:
        for line in os.read(self._answers, 1 << 16).decode().splitlines():
            kind, who, number = line.split()
            rank = int(who)
            path = self._folder / (value_file if kind == YIELDED else answer_file)(rank, int(number))
            value = values.read(path)
            path.unlink()
            if kind == YIELDED:
                if self._hear is not None:
                    self._hear(rank, value)
            elif kind == RAISED:
                self._raised[rank] = value
                self._raised_at = min(self._raised_at, time.monotonic())
            else:
                self._results[rank] = value

    def _wait(self, timeout_s: float | None) -> None:
        """Until every rank has answered; whatever keeps one from it is an error that ends the ranks."""
        end_at = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with self._job.noting_signals():
            while self._unanswered():
                self._job.turn(self._graces)
                if not (missing := self._unanswered()):
                    break
                gone = sorted(self._job.ended() & missing)
                now = time.monotonic()
                if not self._job.running() or (gone and not self._job.has_failed() and not self._job.interrupted):
                    left = failure_of(self._job.records(), min(gone or missing), death_reason(0))
                    failure = self._end("a rank is gone") or left
                    if self._job.interrupted:
                        raise KeyboardInterrupt
                    raise RunError(failure.sentence())
                if now > end_at:
                    raise RunError(self._job.too_long(timeout_s, missing).sentence())
                if now > self._raised_at + self._graces.failure_s and not self._job.interrupted:
                    error = self._rank_error()
                    stuck = failure_of(self._job.records(), min(missing), "did not return after it")
                    raise RankError(f"{error}; {stuck.sentence()}, so all were ended", error.rank, error.traceback)
            self._job.pipes.drain()  # what the call has printed

    def _unanswered(self) -> set[int]:
        """Ranks that have neither returned nor raised in the call under way."""
        return set(range(self.ranks)) - set(self._results) - set(self._raised)

    def _rank_error(self) -> RankError:
        rank, error = next(iter(self._raised.items()))
        first_line = (error["message"].strip().splitlines() or ["(no message)"])[0]
        others = sorted(set(self._raised) - {rank})
        also = f" (rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} raised, too)" if others else ""
        return RankError(f"rank {rank} raised {error['type']}: {first_line}{also}", rank, error["traceback"])

    # Ending -------------------------------------------------------------------------------------------

    def _end(self, why: str) -> Failure | None:
        """End whatever still runs, once; returns why the job failed, if it did."""
        if self.ended is None:
            self.ended = why
            self._stack.close()
        return self._failure

    def _end_job(self) -> None:
        self._failure = self._job.end()


def name_of(function: Function) -> str:
    """`package.module:function`, of a function that another process can import."""
    if isinstance(function, str):
        module, colon, name = function.partition(":")
        if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise UsageError(f"function '{function}': expected 'package.module:function'")
        if module == "__main__":
            raise UsageError(f"{function}: a rank has another __main__; put the function into a module of its own")
        return function
    advice = "put it into a module as a function of its own, and give what it needs as arguments"
    shown = getattr(function, "__qualname__", repr(function))
    if not isinstance(function, FunctionType | BuiltinFunctionType):
        raise UsageError(f"{shown} is a {type(function).__name__}, which a rank cannot import: {advice}")
    if function.__name__ == "<lambda>" or "<locals>" in shown:
        kind = "a lambda" if function.__name__ == "<lambda>" else "defined inside another function"
        raise UsageError(f"{shown} is {kind}, which a rank cannot import: {advice}")
    if function.__module__ == "__main__":
        raise UsageError(f"{shown} is of __main__, and a rank has another one: {advice}")
    if shown != function.__name__ or getattr(sys.modules.get(function.__module__), shown, None) is not function:
        raise UsageError(f"{function.__module__} has no {shown} of its own that a rank could import: {advice}")
    return f"{function.__module__}:{shown}"
