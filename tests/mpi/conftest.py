"""How the rank tests are shared out: the longest first, and files that call the same kept ranks to one worker."""

from __future__ import annotations

from typing import Any

import pytest

LONGEST = ("test_train_faults.py", "test_comm.py")
OF_MODELS = ("test_forward.py", "test_backward.py", "test_gate.py", "test_sharding.py")  # parallel_cases.RANKS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByRanks(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            is_of_models = nodeid.partition("::")[0].endswith(OF_MODELS)
            return "models" if is_of_models else str(super()._split_scope(nodeid))

    return ByRanks(config, log) if config.getoption("dist") == "loadscope" else None
