"""How many threads a started process has, for each library that has some."""

from __future__ import annotations

import pytest

from tilemesh.launch.rank import THREAD_VARIABLES, set_threads


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "222"), ({"OMP_NUM_THREADS": "1"}, "111"), ({"MKL_NUM_THREADS": "4"}, "242"), ({"HOME": "/"}, "222")],
)
def test_who_says_how_many_threads_says_it_for_all(given: dict[str, str], expected: str) -> None:
    environ = dict(given)
    set_threads(environ, 2)
    assert "".join(environ[name] for name in THREAD_VARIABLES) == expected
