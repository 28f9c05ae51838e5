"""Which lines of the source each test reaches: a recorder in every process of a test, and the pytest plugin that names
the test. The same plugin runs the chosen tests of a mutant.

A context is a test, or a fixture that several tests share; a process that a test starts inherits it through the
environment. Records are JSON lines in a folder, one file per process: {"context": …, "child": …, "lines": {path: […]}}.
Python 3.12's `sys.monitoring` costs little; before it there is `sys.settrace`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER, SOURCE, CONTEXT = "REACH_FOLDER", "REACH_SOURCE", "REACH_CONTEXT"  # in the environment
CHOSEN = "REACH_CHOSEN"  # a file: ids of the tests to run, in order; failures are written beside it
FLUSH_LINES = 500  # a process that is killed loses at most these


class Recorder:
    """Lines since the last flush, by file below the source's folder."""

    def __init__(self, folder: str, source: str, context: str) -> None:
        self.folder, self.source, self.context, self.is_child = Path(folder), source, context, True
        self.lines: dict[str, set[int]] = {}
        self.count = 0

    def note(self, code: CodeType, line: int) -> None:
        known = self.lines.setdefault(code.co_filename, set())
        if line not in known:
            known.add(line)
            self.count += 1
            if self.count >= FLUSH_LINES:
                self.flush()

    def flush(self) -> None:
        lines, self.lines, self.count = self.lines, {}, 0
        if lines and self.context:
            below = {path.removeprefix(self.source): sorted(numbers) for path, numbers in lines.items()}
            self.write({"context": self.context, "child": self.is_child, "lines": below})

    def write(self, record: dict[str, Any]) -> None:
        handle = os.open(self.folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(handle, (json.dumps(record) + "\n").encode())
        os.close(handle)

    def switch(self, context: str) -> str:
        """The context before."""
        self.flush()
        before, self.context = self.context, context
        os.environ[CONTEXT] = context
        if hasattr(sys, "monitoring"):
            sys.monitoring.restart_events()
        return before


@functools.cache
def begin() -> Recorder:
    """Record this process, as a child in the context that started it, until a plugin says that it is pytest itself."""
    recorder = Recorder(os.environ[FOLDER], os.environ[SOURCE], os.environ.get(CONTEXT, ""))
    if hasattr(sys, "monitoring"):
        _monitor(recorder)
    else:
        _trace(recorder)
    atexit.register(recorder.flush)
    return recorder


def _monitor(recorder: Recorder) -> None:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    tool, events = monitoring.COVERAGE_ID, monitoring.events

    def started(code: CodeType, offset: int) -> object:
        if code.co_filename.startswith(recorder.source):
            monitoring.set_local_events(tool, code, events.LINE)
        return monitoring.DISABLE

    def reached(code: CodeType, line: int) -> object:
        recorder.note(code, line)
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "reach")
    monitoring.register_callback(tool, events.PY_START, started)
    monitoring.register_callback(tool, events.LINE, reached)
    monitoring.set_events(tool, events.PY_START)


def _trace(recorder: Recorder) -> None:
    def inside(frame: FrameType, event: str, argument: Any) -> Any:
        recorder.note(frame.f_code, frame.f_lineno)
        return inside

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        return inside if frame.f_code.co_filename.startswith(recorder.source) else None

    threading.settrace(called)
    sys.settrace(called)


# The plugin -----------------------------------------------------------------------------------------------------------

try:
    import pytest
except ImportError:  # a process of a test needs the recorder alone
    pytest = None  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    if CHOSEN in os.environ:
        config.pluginmanager.register(Chosen(Path(os.environ[CHOSEN])))
    elif FOLDER in os.environ:
        config.pluginmanager.register(Reached(begin()))


if pytest is not None:

    class Reached:
        """Each test's outcome and seconds, and which fixtures of a wider scope it uses; their lines are theirs."""

        def __init__(self, recorder: Recorder) -> None:
            self.recorder = recorder
            recorder.is_child = False
            self.seconds, self.outcome = 0.0, "passed"

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None]:
            self.seconds, self.outcome = 0.0, "passed"
            self.recorder.switch(item.nodeid)
            yield
            self.recorder.switch("")
            wider = [_key(fixtures[-1]) for fixtures in _fixtures(item) if fixtures[-1].scope != "function"]
            told = {"test": item.nodeid, "outcome": self.outcome, "seconds": round(self.seconds, 3), "fixtures": wider}
            self.recorder.write(told)

        @pytest.hookimpl(hookwrapper=True)
        def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None]:
            before = self.recorder.switch(_key(fixturedef)) if fixturedef.scope != "function" else None
            yield
            if before is not None:
                self.recorder.switch(before)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.seconds += report.duration
            self.outcome = self.outcome if report.outcome == "passed" else report.outcome

    class Chosen:
        """Only the chosen tests, in their order; the first failure is written down."""

        def __init__(self, path: Path) -> None:
            self.path, self.order = path, {name: place for place, name in enumerate(json.loads(path.read_text()))}

        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda i: self.order[i.nodeid])

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                why = next((line for line in str(report.longrepr).splitlines() if line.startswith("E ")), "")
                self.path.with_suffix(".failed").write_text(json.dumps([report.nodeid, why[1:].strip()[:200]]))


def _fixtures(item: pytest.Item) -> list[Any]:
    information = getattr(item, "_fixtureinfo", None)
    return [fixtures for fixtures in information.name2fixturedefs.values() if fixtures] if information else []


def _key(fixturedef: pytest.FixtureDef[Any]) -> str:
    return f"fixture {fixturedef.baseid}::{fixturedef.argname}"
