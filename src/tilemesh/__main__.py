"""`python -m tilemesh` and the `tilemesh` command.

Imports take a moment, in which Ctrl-C must neither print a traceback nor get lost: until the command itself runs it
ends the process the plain way.
"""

import signal
import sys


def run() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tilemesh.cli.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


if __name__ == "__main__":
    sys.exit(run())
