"""A client's connection, closed where it keeps us waiting or makes us work: a request that does not arrive or comes in
crumbs, a reply that nobody reads.

uvicorn closes connections that are idle between two requests. One that sends half a request, or a byte a minute, it
keeps for as long as the client likes, and it reads whatever comes in one go; so this adds a deadline to each of the two
directions, a limit to how finely a request may be cut, and one to how many connections there are, above which those
that have waited longest for their client make room. A connection counts from its first packet, before TLS is agreed on.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 20.0
"""How long a request may take from its first byte to its last: 4 MiB at 2 Mbit/s."""
UNREAD_S = 60.0
"""How long a client may read nothing of a reply whose beginning fills the buffers."""
_HEAD_BYTES = 16 << 10
"""Of a request line and headers, or of trailers, that are read in one go: up to 5,000 lines, about 20 ms."""
_SLICE_BYTES, _FEW_LINES = 4 << 10, 128
"""Packets of more than so many lines are read in such slices: else one of 250 KiB is parsed before it is measured."""
_FREE_CHUNKS, _CHUNK_BYTES = 1024, 1024
"""Chunks of a body after the first so many have as many bytes on average: each takes some 20 microseconds."""


def most_connections() -> int:
    """Half of the files that this process may open."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def connection_settings(tls: ssl.SSLContext | None = None) -> dict[str, Any]:
    """uvicorn's settings for such connections. It has no TLS of its own to add: that would hide a connection until TLS
    is agreed on. Its backlog is also how many are accepted in one go, before room is made for the first of them."""

    def secured(**arguments: Any) -> asyncio.BaseProtocol:
        return PatientConnection(**arguments) if tls is None else _Handshake(PatientConnection(**arguments), tls)

    return {"http": secured, "backlog": min(128, most_connections() // 4)}


class _CountedRequests(h11.Connection):
    """Counts the chunks of a body."""

    refusal = ""
    _chunks = _bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > _FREE_CHUNKS + self._bytes // _CHUNK_BYTES:
                self.refusal = (
                    f"{self._chunks:,} chunks of {self._bytes:,} bytes: send larger ones, or a Content-Length"
                )
                raise h11.RemoteProtocolError(self.refusal)
        return event


class PatientConnection(H11Protocol):
    """One connection of HTTP/1.1 with deadlines."""

    is_aborted = False
    _arriving: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    conn: _CountedRequests

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.conn = _CountedRequests(h11.SERVER, _HEAD_BYTES)

    def accept(self, transport: asyncio.Transport) -> None:
        """Count this connection from now on, and make room for it."""
        self.transport = transport
        self.connections.add(self)
        self._expect_request()
        # Of those that are aborted in this turn of the loop, the files are closed in the next.
        ours = [other for other in self.connections if isinstance(other, PatientConnection) and not other.is_aborted]
        if len(ours) > most_connections():
            waiting = {other: since for other in ours if (since := other.waiting_since()) is not None}
            min(waiting, key=lambda other: waiting[other], default=self).abort()

    def abort(self) -> None:
        """Close it now, whatever was not sent."""
        self.is_aborted = True
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Told of all bytes that wait, also when the connection is closed. At 0, TLS would take none for too many.
        transport.set_write_buffer_limits(high=1)
        if self._arriving is None:
            self.accept(transport)

    def data_received(self, data: bytes) -> None:
        step = _SLICE_BYTES if data.count(b"\n") > _FEW_LINES else len(data)
        for start in range(0, len(data), step):
            if not self.transport.is_closing():
                super().data_received(data[start : start + step])
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            if self._arriving is None:
                self._expect_request()
            return
        self._forget_request()
        if len(self.conn.trailing_data[0]) > _HEAD_BYTES:  # requests before the last one was answered: read in one go
            self.abort()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # whoever answers it is not heard any more
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(self.conn.refusal or msg)
        else:
            self.abort()  # in the middle of a reply, or after it

    def waiting_since(self) -> float | None:
        """Since when this connection waits for its client, by the loop's clock; None while the client waits for us."""
        idle = (self.timeout_keep_alive_task, self.timeout_keep_alive)
        timers = ((self._arriving, REQUEST_S), (self._unread, UNREAD_S), idle)
        return min((timer.when() - seconds for timer, seconds in timers if timer is not None), default=None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_request()
        self._forget_unread()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._arriving = self.loop.call_later(REQUEST_S, self.abort)

    def _forget_request(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _expect_reading(self) -> None:
        """Look again whether the client has read anything meanwhile: as long as it does, it may take its time."""
        unread = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < unread:
                self._expect_reading()
            else:
                self.abort()

        self._unread = self.loop.call_later(UNREAD_S, look)

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


class _Handshake(SSLProtocol):
    """TLS below a connection, which is told of its beginning, and of its end where there was nothing more."""

    def __init__(self, connection: PatientConnection, context: ssl.SSLContext) -> None:
        nobody: Any = None  # who waits for it
        super().__init__(connection.loop, connection, context, nobody, server_side=True)
        self._connection = connection

    def connection_made(self, transport: Any) -> None:
        self._connection.accept(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: Any) -> None:
        super().connection_lost(exc)
        if self._connection.flow is None:
            self._connection.connection_lost(exc)
