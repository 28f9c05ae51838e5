"""Messages between two ranks of a group: `send` and `recv`, begun at once and moved with everything under way.

Both sides must mean the same number of bytes. Where the library does not notice (gloo), the size travels ahead, unless
the caller knows that both do (a pipeline's messages, which were proved).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilemesh.comm.runtime.engine import Handle, Running, Turns
from tilemesh.comm.runtime.group import Group
from tilemesh.comm.runtime.memory import as_bytes
from tilemesh.comm.runtime.observe import BEGIN, clock
from tilemesh.comm.runtime.transport import Array, Message, Token, wrong_size
from tilemesh.core.errors import RunError


class Messages:
    """The messages of one group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.transport = group.transport
        self.receipts: dict[tuple[int, int], Turns] = {}

    def start(self, message: Message, tag: int, finish: Callable[[], Any], sized: bool = True) -> Handle:
        """`finish()`: the result of waiting for it. `sized`: nobody has proved that both sides agree on the size."""
        began_s = clock() if self.group.observers else 0.0
        if self.transport.caps.tells_sizes or not sized:
            steps = self._plain(message, tag)
        else:
            steps = self._sized_send(message, tag) if message.is_send else self._sized_receive(message, tag)
        tell = self.group.teller("send" if message.is_send else "recv", message.nbytes, peer=message.peer)
        name = f"{'send to' if message.is_send else 'recv from'} rank {self.transport.names[message.peer]}"
        running = Running(steps, finish)
        running.is_free = self.transport.caps.moves_alone and not sized
        # A library that spins while it waits takes the core of the rank that it waits for. All ranks of the job count:
        # those of other groups want their cores as well.
        running.is_napping = self.transport.caps.spins and self.group.watch.process.board.ranks > self.group.cores
        handle = self.group.start(running, (-1, name, message.nbytes), tell)
        if tell is not None:
            tell(began_s, BEGIN)
        return handle

    def start_on_device(self, is_send: bool, tensor: Any, peer: int) -> Handle:
        """A message between GPUs that never leaves them, where the transport can; both sides know its size."""
        nbytes = tensor.numel() * tensor.element_size()
        tell = self.group.teller("send" if is_send else "recv", nbytes, peer=peer)
        name = f"{'send to' if is_send else 'recv from'} rank {self.transport.names[peer]}"
        began_s = clock() if self.group.observers else 0.0
        handle = self.group.start(self.transport.device.message(is_send, tensor, peer), (-1, name, nbytes), tell)
        if tell is not None:
            tell(began_s, BEGIN)
        return handle

    def _plain(self, message: Message, tag: int) -> Iterator[Token]:
        yield self.transport.post([message], tag, exact=True)

    def _header(self, message: Message, tag: int) -> tuple[Array, Token]:
        """The size travels under a tag of its own: receipts of one tag may be begun before the first has come."""
        size = np.array([message.nbytes], np.int64)
        header = Message(message.is_send, message.peer, self.transport.view(as_bytes(size)), size.nbytes)
        return size, self.transport.post([header], self.group.tag(4, tag))

    def _sized_send(self, message: Message, tag: int) -> Iterator[Token]:
        size, header = self._header(message, tag)
        sent = self.transport.post([message], tag) if message.nbytes else None
        yield header
        del size  # the library read it until here
        if sent is not None:
            yield sent

    def _sized_receive(self, message: Message, tag: int) -> Iterator[Token]:
        """Messages of one source and tag come in the order in which they were asked for, so each waits its turn."""
        key = (message.peer, tag)
        turns = self.receipts.setdefault(key, Turns())
        turn = turns.take()
        try:
            size, header = self._header(message, tag)
            yield header
            yield turn
            nbytes = int(size[0])
            if nbytes != message.nbytes:
                # Taken all the same: the sender waits for it, and it must not be taken for the next one.
                unwanted = self.transport.view(np.empty(nbytes, np.uint8))
                landing = Message(False, message.peer, unwanted, nbytes)
            else:
                landing = message
            come = self.transport.post([landing], tag) if nbytes else None
        finally:
            turn.release()
            if turns.is_free:
                self.receipts.pop(key, None)
        if come is not None:
            yield come
        names = self.transport.names
        if nbytes != message.nbytes:
            raise RunError(wrong_size(names[message.peer], nbytes, names[self.transport.rank], message.nbytes))
