"""The mutants: what is changed and what is not, how they are drawn, and a small project whose test sees one of two."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import mutants_run
import mutate
import pytest
from mutants_run import Reach

SOURCE = Path(__file__).parents[2] / "src" / "tilemesh"
CODE = '''"""1 + 1 in a docstring."""
LIMIT = 4

def capped(x: int | None, most: float = 2.5) -> int:
    assert x != 3
    if x is None or not x:
        raise ValueError(f"{x + 1} is wrong")
    record(x)
    x += 1
    return max(x - LIMIT, 0) if x < most else list(zip([x], [True], strict=True))
'''


def test_what_is_changed_and_what_is_not() -> None:
    changes = {(mutant.scope, mutant.before, mutant.after) for mutant in mutate.mutants_of(CODE, "code.py")}
    assert changes == {
        ("", "4", "5"),
        ("capped", "2.5", "25.0"),
        ("capped", "x is None or not x", "(x is None and (not x))"),
        ("capped", "x is None", "(x is not None)"),
        ("capped", "not x", "(x)"),
        ("capped", "record(x)", "pass"),
        ("capped", "x += 1", "x -= 1"),
        ("capped", "1", "2"),
        ("capped", "max(x - LIMIT, 0)", "(min(x - LIMIT, 0))"),
        ("capped", "max(x - LIMIT, 0)", "(x - LIMIT)"),
        ("capped", "x - LIMIT", "(x + LIMIT)"),
        ("capped", "0", "1"),
        ("capped", "x < most", "(x <= most)"),
        ("capped", "True", "False"),
    }


def test_each_is_one_change_of_a_program() -> None:
    for path in ("core/units.py", "plan/memory.py", "serve/scheduler.py"):
        text = (SOURCE / path).read_text()
        mutants = mutate.mutants_of(text, path)
        before = ast.dump(ast.parse(text))
        assert all(ast.dump(ast.parse(mutate.mutated(text, mutant))) != before for mutant in mutants[::40])
        assert len({mutant.name for mutant in mutants}) == len(mutants) > 50


def test_an_edit_elsewhere_leaves_the_sample() -> None:
    listed = mutate.mutants_of(CODE, "code.py")
    edited = mutate.mutants_of(CODE + "\n\ndef more(y):\n    return y\n", "code.py")
    shifted = mutate.mutants_of(CODE.replace("LIMIT = 4", "# A limit.\n\nLIMIT = 4"), "code.py")
    for others in (edited, shifted):
        assert [m.name for m in mutate.sample(others, 6, 3)] == [m.name for m in mutate.sample(listed, 6, 3)]
    assert [m.name for m in mutate.sample(listed, 6, 4)] != [m.name for m in mutate.sample(listed, 6, 3)]


def test_a_line_of_import_is_reached_by_those_who_read_its_name() -> None:
    limit, *_, compared = sorted(
        mutate.mutants_of(CODE, "code.py"), key=lambda mutant: (mutant.line, mutant.kind == "compare")
    )
    tests = [Reach("a::slow", 9.0, {"code.py": 1 << 10}), Reach("a::quick", 1.0, {"code.py": 1 << 10})]
    tests += [Reach("a::other", 0.1, {"code.py": 1 << 2}), Reach("a::user", 0.2, {"user.py": 1 << 7})]

    def named(mutant: mutate.Mutant) -> list[str]:
        return [test.test for test in mutants_run.reaching(mutant, tests, {"LIMIT": [("user.py", 7)]}, {"a": ""})]

    assert named(limit) == ["a::user"]
    assert named(compared) == ["a::quick", "a::slow"]


def test_lines_of_fixtures_and_of_kept_ranks_belong_to_all_that_use_them(tmp_path: Path) -> None:
    ran = {"outcome": "passed", "seconds": 1.0}
    records = [
        {"context": "t::a", "child": False, "lines": {"x.py": [1]}},
        {"context": "fixture t::f", "child": False, "lines": {"x.py": [2]}},
        {"context": "t::a", "child": True, "lines": {"x.py": [3]}},
        {"test": "t::a", **ran, "fixtures": []},
        {"test": "t::b", **ran, "fixtures": ["fixture t::f"]},
        {"test": "t::c", **ran, "fixtures": [], "outcome": "failed"},
    ]
    (tmp_path / "1.jsonl").write_text("\n".join(map(json.dumps, records)))
    for keeps_ranks, expected in ((False, [0b1010, 0b0100]), (True, [0b1010, 0b1100])):
        kept = mutants_run.compact(tmp_path, keeps_ranks)
        assert [int(test["lines"]["x.py"], 16) for test in kept] == expected


def test_of_two_mutants_the_tests_of_a_small_project_see_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "src" / "tilemesh").mkdir(parents=True)
    (tmp_path / "src" / "tilemesh" / "__init__.py").touch()
    (tmp_path / "src" / "tilemesh" / "code.py").write_text("def sign(x):\n    return 1 if x > 0 else -1\n")
    test = "from tilemesh.code import sign\ndef test_sign():\n    assert (sign(5), sign(-5)) == (1, -1)\n"
    (tmp_path / "test_code.py").write_text(test)
    tests = [Reach("test_code.py::test_sign", 0.1, {"code.py": 1 << 2})]
    listed = mutate.mutants_of((tmp_path / "src" / "tilemesh" / "code.py").read_text(), "code.py")
    script = mutants_run.test_script()
    verdicts = {
        mutant.before: mutants_run.judge(mutant, tests, tmp_path, script, end=float("inf"))
        for mutant in listed
        if mutant.before == "x > 0" or (mutant.before, mutant.number) == ("1", 0)
    }
    assert {before: verdict and verdict["verdict"] for before, verdict in verdicts.items()} == {
        "1": "killed",
        "x > 0": "survived",
    }
    assert verdicts["1"] is not None
    assert verdicts["1"]["by"] == "test_code.py::test_sign"
    assert mutants_run.judge(listed[0], [], tmp_path, script, end=float("inf")) == {"verdict": "unreached", "tests": 0}


def test_a_copy_has_all_of_the_source(tmp_path: Path) -> None:
    copied = mutants_run.fresh_copy(tmp_path / "copy") / "src" / "tilemesh"
    assert {path.relative_to(copied) for path in copied.rglob("*.py")} == {
        path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")
    }


@pytest.mark.parametrize(("verdict", "reasons", "code"), [("killed", {}, 0), ("survived", {}, 1), ("", {}, 3)])
def test_the_summary_judges(
    verdict: str, reasons: dict[str, str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "survivors.json").write_text(json.dumps(reasons))
    monkeypatch.setattr(mutants_run, "SURVIVORS", tmp_path / "survivors.json")
    mutants = mutate.mutants_of(CODE, "code.py")
    done = {mutant.name: {"verdict": "killed"} for mutant in mutants[1:]}
    done |= {mutants[0].name: {"verdict": verdict}} if verdict else {}
    assert mutants_run.summary(mutants, done) == code
    if verdict == "survived":
        (tmp_path / "survivors.json").write_text(json.dumps({mutants[0].name: "equal"}))
        assert mutants_run.summary(mutants, done) == 0
