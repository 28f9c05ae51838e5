"""The order of the rank tests: the files that take longest come first, so that no worker is left alone with one."""

from __future__ import annotations

import pytest

LONGEST = ("test_train_faults.py", "test_comm.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
