"""A Python that has imported torch, and forks for each command that `warm_client.py` asks for: see `warm.py`.

It has one thread, no communicator and no state but its imports: a fork is what a fresh process is when it has imported
the same. The client's environment, folder, streams, cores and module path become the fork's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import warnings
from typing import Any, NoReturn

# What ranks and commands import, but nothing that starts MPI; torch._dynamo is what torch's optimizers load.
IMPORTED = (
    *("torch._dynamo", "tilemesh.train.rank", "tilemesh.launch.serve", "tilemesh.cli.main", "tilemesh.serve.engine"),
)
Request = dict[str, Any]


def main(address: str, client: str, pytest: str) -> None:
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    run(next_request(address, int(pytest)), client)


def next_request(address: str, pytest: int) -> Request:
    """Fork for every client, and tell it the fork's number and how it ended. Returns in a fork: what it shall run."""
    events = selectors.DefaultSelector()
    events.register(os.pidfd_open(pytest), selectors.EVENT_READ)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.new")
    listening.listen(64)
    os.rename(f"{address}.new", address)  # whoever sees it can connect
    events.register(listening, selectors.EVENT_READ)
    while True:
        # Newcomers last: their descriptors may have the numbers of those that are closed here.
        for key, _ in sorted(events.select(), key=lambda event: event[0].fileobj is listening):
            if key.fileobj is not listening:
                if key.data is None:  # pytest has ended
                    end_all(address, events)
                if key.fd in events.get_map():  # else both of a fork's have something to say
                    tell_end(*key.data, events)
                continue
            client, _ = listening.accept()
            text, streams = received(client)
            if not text:  # it was ended before it could ask
                client.close()
                continue
            process = os.fork()
            if process == 0:
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                for descriptor in (*(key.fileobj for key in events.get_map().values()), client, *streams):
                    os.close(descriptor) if isinstance(descriptor, int) else descriptor.close()
                events.close()
                return dict(json.loads(text))
            for stream in streams:
                os.close(stream)
            tell(client, process)
            ended = os.pidfd_open(process)
            for descriptor in (client, ended):  # readable when the client is gone, and when the fork has ended
                events.register(descriptor, selectors.EVENT_READ, (process, client, ended))


def received(client: socket.socket) -> tuple[bytes, list[int]]:
    """The client's request, and its three streams; nothing if it was ended meanwhile."""
    length, streams, _, _ = socket.recv_fds(client, 8, 3)
    text = b""
    while len(text) < (whole := int.from_bytes(length, "big")) and (part := client.recv(1 << 16)):
        text += part
    if not length or len(text) < whole:
        for stream in streams:
            os.close(stream)
        return b"", []
    return text, streams


def tell_end(process: int, client: socket.socket, ended: int, events: selectors.BaseSelector) -> None:
    """Tell a client how its fork ended; where the client is gone, the fork has to go, too."""
    os.kill(process, signal.SIGKILL)  # it may have ended, but nobody else can have its number yet
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    events.unregister(client)
    events.unregister(ended)
    os.close(ended)
    tell(client, code)
    client.close()


def tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it is gone, and will be found so
        client.sendall(number.to_bytes(8, "big", signed=True))


def end_all(address: str, events: selectors.BaseSelector) -> NoReturn:
    shutil.rmtree(os.path.dirname(address), ignore_errors=True)
    for process in {key.data[0] for key in events.get_map().values() if key.data is not None}:
        os.kill(process, signal.SIGKILL)
    os._exit(0)


def run(request: Request, executable: str) -> None:
    """As `python ARGUMENTS` would in the client's place; what it starts by `sys.executable` is warm, too."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.sched_setaffinity(0, request["cores"])
    signal.signal(signal.SIGINT, signal.default_int_handler if request["heeds_interrupts"] else signal.SIG_IGN)
    sys.executable = executable
    # Anew: the server's own have looked at what they are connected to.
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace")
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # kept, as in a fresh process: else replacing one closes it
    first, *rest = request["arguments"]
    is_unbuffered = first == "-u"
    if is_unbuffered:
        first, *rest = rest
    sys.stdout.reconfigure(write_through=is_unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.path[0:1] = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place not in sys.path]
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # a module that was imported before
    if first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.path.insert(0, os.path.dirname(first))
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
