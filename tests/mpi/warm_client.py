"""Stands where a test's `python` would: asks the server (warm_server.py) for a fork that runs the same command.

It hands on its arguments, environment, folder and standard streams, passes signals on to the fork, and ends as the fork
ends: with its exit code, or by the signal that killed it. The server kills the fork of a client that is gone.
"""

import ctypes
import json
import os
import signal
import socket
import sys


def main(address: str, arguments: list[str]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: mpiexec may be killed, and its ranks end
    cores = sorted(os.sched_getaffinity(0))
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "cores": cores}
    # A shell's background job ignores Ctrl-C, and so do the processes that it starts.
    request["heeds_interrupts"] = signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    message = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(message)
        fork = int.from_bytes(server.recv(8), "big")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda received, _: os.kill(fork, received))
        code = int.from_bytes(server.recv(8), "big", signed=True)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main(sys.argv[1], sys.argv[2:])
