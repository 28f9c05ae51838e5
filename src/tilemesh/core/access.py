"""Who may ask a server of this machine: by key, by the name it was asked for under, and by the page that asks.

A page in the user's own browser can send requests to this machine. It cannot choose two of their headers: `Host`, which
holds the name that it looked up (and may have pointed here), and `Origin`, which holds where the page came from.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilemesh.core.errors import UsageError

KEYS_VARIABLE = "TILEMESH_API_KEYS"
_LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
_HOST = re.compile(r"([a-z0-9_.-]+|\[[a-z0-9:.%]+\])(:[0-9]+)?", re.IGNORECASE | re.ASCII)
_LONGEST_KEY = 512
_MOST_FILE = 1 << 20


@dataclass(frozen=True)
class Refusal:
    """A status of HTTP, OpenAI's code for it, and why."""

    status: int
    code: str
    why: str


@dataclass(frozen=True)
class Access:
    """What a request must bring. By default anything that no page of another site sent."""

    keys: tuple[str, ...] = field(default=(), repr=False)
    hosts: frozenset[str] | None = None
    """Names that the server may be asked for under, without port; None: any."""
    origins: frozenset[str] = frozenset()
    """Pages, such as https://example.org, whose scripts may ask; "*": all."""

    def refusal(self, headers: Mapping[str, str], needs_key: bool = True) -> Refusal | None:
        """Why a request with these headers (by names in lower case) is not answered; None where it is."""
        host = headers.get("host", "").lower()
        if self.hosts is not None and host_name(host) not in self.hosts:
            return Refusal(403, "host_not_allowed", f"asked for as '{host[:100]}': --allow-host would allow that name")
        origin = headers.get("origin", "").lower()
        if origin and not {origin, "*"} & self.origins and origin.partition("://")[2] != host:
            return Refusal(403, "origin_not_allowed", f"a page of '{origin[:100]}' asks: --allow-origin would allow it")
        if self.keys and needs_key and not self._knows(headers.get("authorization", "")):
            why = "the key is missing or wrong: send 'Authorization: Bearer KEY' with one of the server's keys"
            return Refusal(401, "invalid_api_key", why)
        return None

    def _knows(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        key_bytes = key.strip().encode("utf-8", "replace")
        # All are compared, whole: how long it takes says nothing of which one came close.
        equal = [hmac.compare_digest(key_bytes, known.encode()) for known in self.keys]
        return scheme.lower() == "bearer" and any(equal)


def host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    return name.removesuffix(".").lower()


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def server_access(
    address: str, keys: Sequence[str], hosts: Sequence[str], origins: Sequence[str], without_key: bool
) -> Access:
    """Of a server that is bound to this address: names are checked on loopback, and wherever some are allowed."""
    if without_key and keys:
        raise UsageError("--no-key is given beside keys: leave one of them out")
    if not keys and not without_key and not is_loopback(address):
        raise UsageError(
            f"--host {address} can be reached from other machines and there is no key: give --api-key @FILE (or set "
            f"{KEYS_VARIABLE}), or --no-key to let everybody in"
        )
    for origin in origins:
        if origin != "*" and ("://" not in origin or origin.rstrip("/").count("/") != 2):
            raise UsageError(f"--allow-origin is '{origin}': expected such as https://example.org, or *")
    names = {host_name(name) for name in hosts}
    if not all(_HOST.fullmatch(name) for name in hosts):
        raise UsageError(f"--allow-host is '{', '.join(hosts)}': expected names of this machine, such as gpu7.local")
    checked = is_loopback(address) or names
    own = {f"[{address}]" if ":" in address else address}
    allowed = frozenset(_LOOPBACK_NAMES | names | own) if checked else None
    return Access(tuple(keys), allowed, frozenset(origin.rstrip("/").lower() for origin in origins))


def read_keys(words: Sequence[str]) -> tuple[str, ...]:
    """Keys as typed, from files (@FILE, one a line, # begins a comment) and from the environment (between commas)."""
    keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
    for word in words:
        if not word.startswith("@"):
            keys.append(word)
            continue
        lines = _file_lines(word[1:])
        of_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not of_file:
            raise UsageError(f"--api-key {word}: the file has no key: expected one on each line")
        keys += of_file
    for key in keys:
        if not key.isascii() or not key.isprintable() or " " in key or not 8 <= len(key) <= _LONGEST_KEY:
            raise UsageError(
                f"--api-key: a key of {len(key)} characters cannot be used: expected 8 to {_LONGEST_KEY} letters, "
                "digits and signs without spaces"
            )
    return tuple(dict.fromkeys(keys))


def _file_lines(name: str) -> list[str]:
    try:
        with Path(name).open("rb") as opened:
            content = opened.read(_MOST_FILE + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--api-key @{name} cannot be read: {why}") from None
    if len(content) > _MOST_FILE:
        raise UsageError(f"--api-key @{name} is larger than 1 MiB: expected a file with a key on each line")
    return content.decode("utf-8", "replace").splitlines()
