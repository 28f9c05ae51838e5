"""A file's share of tests, where scripts/test.py runs it as several processes beside each other: TEST_SHARE=0/5."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    part, count = map(int, os.environ.get("TEST_SHARE", "0/1").split("/"))
    items[:] = items[part::count]
