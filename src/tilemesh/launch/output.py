"""What the ranks print, line by line, with the number of the rank that printed it.

Each rank writes into two named pipes of its own. Names, unlike inherited descriptors, reach ranks
that another program (mpiexec) starts, and leave no doubt who wrote which line.
"""

from __future__ import annotations

import functools
import os
import re
import selectors
import sys
from collections.abc import Callable
from pathlib import Path

Sink = Callable[[int, str, bytes], None]  # rank, "out" or "err", one line without its end

# A progress bar that returns to the start of its line shows each of its states as a line. A \r that ends what has come
# so far may be half of \r\n, so it waits for what follows.
_LINE_END = re.compile(rb"\r?\n|\r(?=[^\n])")
_LONGEST_LINE = 1 << 16  # longer ones are cut, so that output without line ends neither waits nor fills memory

_COLOURS = (36, 33, 35, 32, 34, 31)


class Pipes:
    """The launcher's end of all ranks' output."""

    def __init__(self, folder: Path, ranks: int, sink: Sink, selector: selectors.BaseSelector) -> None:
        self._sink = sink
        self._rest: dict[tuple[int, str], bytes] = {}
        self._readers: dict[tuple[int, str], int] = {}
        self._held: list[int] = []
        for rank in range(ranks):
            for stream in ("out", "err"):
                path = folder / f"{rank}.{stream}"
                os.mkfifo(path, 0o600)
                reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                # Held open by us as well, so that a rank's end is not the end of the file.
                writer = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                self._readers[rank, stream] = reader
                self._held += [reader, writer]
                selector.register(reader, selectors.EVENT_READ, functools.partial(self.read, rank, stream))

    def read(self, rank: int, stream: str) -> bool:
        """Pass on the whole lines that have come; False when there was nothing."""
        try:
            data = os.read(self._readers[rank, stream], 1 << 16)
        except BlockingIOError:
            return False
        *lines, rest = _LINE_END.split(self._rest.get((rank, stream), b"") + data)
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._rest[rank, stream] = rest
        for line in lines:
            self._sink(rank, stream, line)
        return True

    def drain(self) -> None:
        """Pass on all whole lines that were written by now."""
        for key in self._readers:
            while self.read(*key):
                pass

    def finish(self) -> None:
        """Pass on lines that never got their end."""
        for (rank, stream), rest in self._rest.items():
            if rest:
                self._sink(rank, stream, rest)
        self._rest.clear()

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)


def print_line(rank: int, stream: str, line: bytes) -> None:
    """The usual sink: `[3] text`, output to output and errors to errors."""
    target = sys.stdout if stream == "out" else sys.stderr
    mark = f"[{rank}]"
    if target.isatty() and "NO_COLOR" not in os.environ:
        mark = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{mark}\x1b[0m"
    # Ranks may print bytes that are not text: those pass through where there is a byte stream to take them.
    raw = getattr(target, "buffer", None)
    if raw is None:
        target.write(f"{mark} {line.decode(errors='replace')}\n")
    else:
        target.flush()
        raw.write(mark.encode() + b" " + line + b"\n")
    target.flush()
