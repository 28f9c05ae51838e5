"""The rank's side of `calls.py`: wait for the number of a call, make it, and say that it is answered.

Orders come through a named pipe of this rank's own, so that a waiting rank sleeps; what is called and what came of it
lie in files of the job's folder, which is in memory. Run by `python -m tilemesh.launch.serve` on a rank.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tilemesh.core.context import JOB_VARIABLE, Membership, membership
from tilemesh.core.errors import UsageError
from tilemesh.core.exhausted import out_of_memory
from tilemesh.launch import values
from tilemesh.launch.board import my_status
from tilemesh.launch.rank import own_frames

END = "end"  # the order that ends a rank
ANSWERS = "answers"  # the pipe by which all ranks say what they have written: "KIND RANK NUMBER"
RETURNED, RAISED, YIELDED = "returned", "raised", "yielded"


def orders_file(rank: int) -> str:
    return f"{rank}.orders"


def call_file(number: int) -> str:
    return f"call-{number}"


def answer_file(rank: int, number: int) -> str:
    return f"{rank}.answer-{number}"


def value_file(rank: int, number: int) -> str:
    """A value that the function of this rank has yielded, counted over all calls."""
    return f"{rank}.value-{number}"


def main() -> None:
    member = membership()
    if member is None or JOB_VARIABLE not in os.environ:
        raise UsageError("tilemesh.launch.serve: this process is no rank; use tilemesh.launch.call")
    server = Server(Path(os.environ[JOB_VARIABLE]), member.rank)
    with (server.folder / orders_file(member.rank)).open() as orders:
        for line in iter(orders.readline, ""):
            if line.strip() == END:
                return
            server.answer(int(line))


def this_rank() -> Membership:
    """This process's place among the ranks: `.rank`, `.size`, `.local_rank`, `.local_size`. For a function that needs
    no communicator; UsageError in a process that was not started as a rank."""
    member = membership()
    if member is None:
        raise UsageError("this process is no rank: start it by tilemesh.launch, mpiexec, srun or torchrun")
    return member


class Server:
    """One rank that makes the calls it is told to."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.yielded = 0
        self.pipe = os.open(folder / ANSWERS, os.O_WRONLY)

    def answer(self, number: int) -> None:
        """Make that call; an exception is an answer, too."""
        path = self.folder / answer_file(self.rank, number)
        try:
            request = values.read(self.folder / call_file(number))
            my_status().at(f"calling {request['function']}")
            values.write(path, self.result_of(request), "result")
            kind = RETURNED
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            values.write(path, described(error), "error")
            kind = RAISED
        my_status().at("waiting for a call")
        sys.stdout.flush()
        sys.stderr.flush()
        self.tell(kind, number)

    def result_of(self, request: dict[str, Any]) -> Any:
        sys.path += [place for place in request["path"] if place not in sys.path]
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(module), name, None)
        if not callable(function):
            raise UsageError(f"{module} has no function '{name}'")
        result = function(*request["arguments"], **request["options"])
        if not inspect.isgenerator(result):
            return result
        collected = []
        for value in result:
            collected.append(value)
            self.yielded += 1
            values.write(self.folder / value_file(self.rank, self.yielded), value, f"value {len(collected)}")
            self.tell(YIELDED, self.yielded)
        return collected

    def tell(self, kind: str, number: int) -> None:
        os.write(self.pipe, f"{kind} {self.rank} {number}\n".encode())  # so short that no other rank's comes between


def described(error: BaseException) -> dict[str, str]:
    """The exception's type, its message and its traceback from the function on. `sys.exit` counts as raising, whatever
    its code: it leaves no result, and ranks are not to end before their caller lets them."""
    trace = own_frames(error.__traceback__, __file__)
    lines = traceback.format_exception(type(error), error, trace)
    message = out_of_memory(error) or str(error)
    if isinstance(error, SystemExit):
        message = f"sys.exit({error.code!r}); a called function returns its result"
    return {"type": type(error).__name__, "message": message, "traceback": "".join(lines)}


if __name__ == "__main__":
    main()
