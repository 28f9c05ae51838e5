"""Serving one page on loopback: `/` is the page, `/state` says whether it has changed, and there is nothing else.

Paths are compared, never opened, so nothing of the disk is reachable but what the page itself shows. Only GET and HEAD
are answered, and only to a browser that asked for a loopback name: a site elsewhere cannot read a run through a name
of its own that points here.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tilemesh.core.access import server_access
from tilemesh.core.errors import RunError, UsageError
from tilemesh.runs import contents

LOOPBACK = "127.0.0.1"
_ACCESS = server_access(LOOPBACK, (), (), (), without_key=False)


class PageServer:
    """One run's page, made anew when its folder has changed."""

    def __init__(
        self, folder: str, render: Callable[[str], str], port: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self._render, self._clock = folder, render, clock
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] | None = None
        self._fresh_until = 0.0
        if not 0 <= port < 1 << 16:
            raise UsageError(f"port {port}: expected 0 to 65535, where 0 takes a free one")
        try:
            self._server = _QuietServer((LOOPBACK, port), _handler(self))
        except OSError as error:
            why = error.strerror
            raise RunError(f"port {port} of {LOOPBACK} cannot be used: {why}; --port 0 takes a free one") from None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_address[1]}/"

    def serve(self) -> None:
        """Answer until interrupted or closed."""
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self._server.server_close()

    def close(self) -> None:
        self._server.shutdown()

    def version(self) -> str:
        """Of the folder as a page made now would show it. A page that took long to make stays for ten times as long:
        looking at a run must not slow it."""
        if self._made is not None and self._clock() < self._fresh_until:
            return self._made[0]
        return contents.version(self.folder)

    def page(self) -> bytes:
        """The page as the folder is now; one is made at a time, and kept until the folder changes."""
        with self._lock:
            version = self.version()
            if self._made is None or self._made[0] != version:
                began = self._clock()
                self._made = version, self._render(version).encode("utf-8", errors="replace")
                ended = self._clock()
                self._fresh_until = ended + 10 * (ended - began)
            return self._made[1]


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left in the middle is not news; anything else is."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _handler(server: PageServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "tilemesh", ""
        timeout = 30

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            """What is not a request, and methods that are not answered: a line, as all else that is refused here."""
            if code == HTTPStatus.NOT_IMPLEMENTED:
                code, line = HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered here"
            else:
                line = f"the request cannot be read: {HTTPStatus(code).phrase}"
            self.request_version = self.protocol_version  # of HTTP/0.9, no headers would be sent
            self._send(code, f"{line}\n".encode(), "text/plain", send_body=self.command != "HEAD")

        def do_GET(self) -> None:
            self._answer(send_body=True)

        def do_HEAD(self) -> None:
            self._answer(send_body=False)

        def _answer(self, send_body: bool) -> None:
            headers = {name: self.headers.get(name) or "" for name in ("host", "origin")}
            if _ACCESS.refusal(headers) is not None:
                self._send(403, b"asked for under another name than this machine's own\n", "text/plain", send_body)
            elif self.path == "/state":
                self._send(200, server.version().encode(), "text/plain", send_body)
            elif self.path == "/":
                try:
                    self._send(200, server.page(), "text/html", send_body)
                except (RunError, ValueError, OSError) as error:  # the folder went away under us
                    self._send(503, f"{error}\n".encode(), "text/plain", send_body)
            else:
                self._send(404, b"there is / and /state\n", "text/plain", send_body)

        def _send(self, code: int, body: bytes, kind: str, send_body: bool) -> None:
            with contextlib.suppress(OSError):  # whoever asked may have left
                self.send_response(code)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Allow", "GET, HEAD")
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Referrer-Policy", "no-referrer")
                self.send_header("Cross-Origin-Resource-Policy", "same-origin")
                self.send_header("X-Frame-Options", "DENY")
                self.end_headers()
                if send_body:
                    self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """A request every two seconds is not news."""

    return Handler
