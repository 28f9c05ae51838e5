"""`python -m tilemesh` and the `tilemesh` command.

Imports take a moment, and so does Python's end; Ctrl-C must neither print a traceback then nor get lost: outside of the
command itself it ends the process at once.
"""

import os
import signal
import sys


def _leave(number: int, frame: object) -> None:
    os.write(2, b"tilemesh: interrupted\n")
    os._exit(130)


def run() -> int:
    signal.signal(signal.SIGINT, _leave)
    from tilemesh.cli.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main()
    signal.signal(signal.SIGINT, _leave)
    return code


if __name__ == "__main__":
    sys.exit(run())
