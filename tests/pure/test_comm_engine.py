"""Who waits for a message looks at it alone where the library moves all others by itself, and at all of them else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilemesh.comm.runtime.engine import CallEngine, Running


class Message:
    """Over after so many looks; counts them."""

    def __init__(self, looks: int) -> None:
        self.looks, self.looked, self.waited = looks, 0, 0

    def test(self) -> bool:
        self.looked += 1
        return self.looked >= self.looks

    def wait(self) -> None:
        self.waited += 1
        self.looked = self.looks


def begun(engine: CallEngine, message: Message, **kind: bool) -> Running:
    def steps() -> Iterator[Message]:
        yield message

    running = Running(steps(), lambda: "come")
    for name, value in kind.items():
        setattr(running, name, value)
    engine.start(running)
    return running


@pytest.mark.parametrize("others_are_moved", [True, False])
def test_a_rank_that_naps_looks_at_its_own_message(others_are_moved: bool) -> None:
    engine, mine, other = CallEngine(), Message(20), Message(1000)
    wanted = begun(engine, mine, is_napping=True, is_moved=True)
    begun(engine, other, is_napping=True, is_moved=others_are_moved)
    before = other.looked
    assert engine.wait(wanted) == "come"
    assert mine.waited == 0  # the library's own wait would keep the core
    assert (other.looked - before <= 1) is others_are_moved


def test_where_cores_are_free_the_library_waits() -> None:
    engine, mine, other = CallEngine(), Message(20), Message(1000)
    wanted = begun(engine, mine, is_moved=True)
    begun(engine, other, is_moved=True)
    assert engine.wait(wanted) == "come"
    assert mine.waited == 1


def test_an_error_of_a_message_is_the_waiters() -> None:
    class Broken(Message):
        def test(self) -> bool:
            if super().test():
                raise OSError("gone")
            return False

    engine = CallEngine()
    wanted = begun(engine, Broken(5), is_napping=True, is_moved=True)
    with pytest.raises(OSError, match="gone"):
        engine.wait(wanted)
