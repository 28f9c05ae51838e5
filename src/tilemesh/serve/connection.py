"""A client's connection, closed where it keeps us waiting: a request that does not arrive, a reply that nobody reads.

uvicorn closes connections that are idle between two requests. One that sends half a request, or a byte a minute, it
keeps for as long as the client likes; so this adds a deadline to each of the two directions, and a limit to how many
connections there are, above which those that have waited longest for the rest of their request make room.
"""

from __future__ import annotations

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 20.0
"""How long a request may take from its first byte to its last: 4 MiB at 2 Mbit/s."""
UNREAD_S = 60.0
"""How long a client may read nothing of a reply whose beginning fills the buffers."""


def most_connections() -> int:
    """Half of the files that this process may open."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class PatientConnection(H11Protocol):
    """One connection of HTTP/1.1 with deadlines."""

    _arriving: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        if len(self.connections) > most_connections():
            ours = [other for other in self.connections if isinstance(other, PatientConnection)]
            waiting = {other: other._arriving.when() for other in ours if other._arriving is not None}
            min(waiting, key=lambda other: waiting[other], default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._forget_request()
        elif self._arriving is None:
            self._expect_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_request()
        self._forget_unread()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._arriving = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _forget_request(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
