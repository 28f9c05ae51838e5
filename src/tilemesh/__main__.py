"""`python -m tilemesh` and the `tilemesh` command.

Imports take a moment, in which Ctrl-C must neither print a traceback nor get lost: until the command itself runs it
ends the process at once.
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
    return main()


if __name__ == "__main__":
    sys.exit(run())
