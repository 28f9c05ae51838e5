"""The reference of the configuration follows from the classes: every key is explained; the file is read back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import pytest

from tilemesh.align.reference import reference_page as align_page
from tilemesh.cli.main import main
from tilemesh.core.config import field_ranges
from tilemesh.core.ranges import Range
from tilemesh.core.reference import REQUIRED, commented_toml, describe, field_meanings, markdown
from tilemesh.train.config import PRESETS, TrainConfig
from tilemesh.train.load import load
from tilemesh.train.reference import commented_file, reference_page, sections

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


@dataclass(frozen=True)
class Below:
    """What is inherited."""

    size: Annotated[int, Range(1)]
    """How large
    it is."""
    pick: Literal["a", "b"] = "a"
    """Which; a | b."""


@dataclass(frozen=True)
class Part(Below):
    """A part."""

    pair: tuple[Annotated[float, Range(0, 1, below=True)], float] = (0.5, 0.5)
    """Two fractions."""
    every: Annotated[int, Range(1, 9)] | Literal["sqrt"] = 1
    """How often."""
    count: Annotated[int, Range(1)] = 0
    """How many; 0: as many as there are."""
    place: Path | None = None
    """Where."""


@dataclass(frozen=True)
class Whole:
    part: Part = field(default_factory=lambda: Part(3))


def test_keys_are_read_from_the_class_and_those_it_inherits_from() -> None:
    (section,) = describe(Whole)
    keys = {key.path: (key.meaning, key.default_words, key.allowed) for key in section.keys}
    assert (section.name, section.meaning) == ("part", "A part.")
    assert keys == {
        "part.size": ("How large it is.", "3", "a whole number, at least 1"),
        "part.pick": ("Which; a | b.", '"a"', "one of a, b"),
        "part.pair": ("Two fractions.", "[0.5, 0.5]", "a list of 2, each a number, at least 0 and below 1"),
        "part.every": ("How often.", "1", "a whole number between 1 and 9 or sqrt"),
        "part.count": ("How many; 0: as many as there are.", "0", "0, or a whole number, at least 1"),
        "part.place": ("Where.", '"none"', "a path or none"),
    }


def test_a_file_comments_out_what_is_a_default_and_a_table_escapes_bars() -> None:
    made = commented_toml(Whole(Part(4, pair=(0.25, 0.5))), describe(Whole))
    assert [line for line in made.splitlines() if line and not line.startswith("# ")] == [
        "[part]", "size = 4", '#pick = "a"', "pair = [0.25, 0.5]", "#every = 1", "#count = 0", '#place = "none"',
    ]  # fmt: skip
    assert "Default: [0.5, 0.5]." in made
    assert '| `part.pick` | Which; a \\| b. | `"a"` | one of a, b |' in markdown(describe(Whole))


def test_a_value_that_follows_from_others_is_said_to() -> None:
    assert "Default: 0, which here means 512.\n#mlp_width = 512" in commented_file(load())


def test_every_key_is_explained_in_a_sentence_and_every_number_has_its_range() -> None:
    """A key that somebody adds is in the reference; its meaning is the text under the field, its range is named."""
    known, keys = field_ranges(TrainConfig), {key.path: key for section in sections() for key in section.keys}
    types: dict[str, Any] = {}
    hints = get_type_hints(TrainConfig)
    for section in fields(TrainConfig):
        types |= {f"{section.name}.{inner}": hint for inner, hint in get_type_hints(hints[section.name]).items()}
    assert keys.keys() == types.keys()
    assert known.keys() <= keys.keys()
    for path, key in keys.items():
        assert key.meaning.endswith("."), (
            f"{path} has no explanation: write a text under the field that ends with a full stop"
        )
        is_number = {types[path], *get_args(types[path])} & {int, float} and types[path] is not bool
        assert not is_number or path in known, f"{path} is a number without a range: annotate it with one"
    assert all(section.meaning.endswith(".") for section in sections())
    required = {path for path, key in keys.items() if key.default_words == REQUIRED}
    assert required == {f"model.{name}" for name in ("layers", "width", "heads", "vocabulary", "context")}


def test_the_page_in_the_documents_is_the_generated_one() -> None:
    assert PAGE.read_text() == reference_page(), "run `tilemesh config --reference > docs/configuration.md`"


@pytest.mark.parametrize("name", PRESETS)
def test_the_commented_file_is_read_as_the_same_run(name: str, tmp_path: Path) -> None:
    made = load(name)
    text = commented_file(made)
    (tmp_path / "run.toml").write_text(text)
    assert load(str(tmp_path / "run.toml")) == made
    # What is commented out says the same as what is left out.
    uncommented = "\n".join(line[1:] if line[:1] == "#" and line[1:2] != " " else line for line in text.splitlines())
    (tmp_path / "all.toml").write_text(uncommented)
    assert load(str(tmp_path / "all.toml")) == made
    assert all(len(line) <= 100 for line in text.splitlines() if line.startswith("# "))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "tiny", "--set", "train.steps=7,train.device=cpu", "--mesh", "dp=2"]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    made = load(str(tmp_path / "run.toml"))
    assert (made.train.steps, made.plan.dp, made.plan.tp) == (7, 2, 1)
    assert main(["config", "--reference"]) == 0
    assert capsys.readouterr().out == reference_page()
    assert main(["config", "tiny", "--reference"]) == 2
    assert "leave the other arguments out" in capsys.readouterr().err
    assert main(["config", "tinny"]) == 2
    assert "did you mean 'tiny'?" in capsys.readouterr().err


def test_a_field_without_a_text_has_no_meaning() -> None:
    bare = dataclasses.make_dataclass("Bare", [("key", int, 1)], frozen=True)
    assert field_meanings(bare) == {}


def test_the_page_of_settings_of_align_is_made_from_its_class() -> None:
    page = PAGE.parent / "align" / "settings.md"
    assert page.read_text() == align_page(), "run `python -m tilemesh.align.reference > docs/align/settings.md`"
