"""Configuration: layers, types, refusals, and a TOML writer that loses nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.config import dump_toml, from_dict, load, parse_toml, read_toml, split_sets, to_dict
from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import LARGEST_WHOLE


@dataclass(frozen=True)
class Model:
    layers: int = 2
    width: int = 64
    activation: Literal["relu", "gelu"] = "gelu"
    dropout: float = 0.0


@dataclass(frozen=True)
class Data:
    folder: Path = Path("data")
    splits: tuple[int, ...] = (9, 1)
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True)
class Train:
    name: str = "run"
    seed: int | None = 7
    note: str | None = None
    compile: bool = False
    model: Model = field(default_factory=lambda: Model(layers=4))
    data: Data = Data()
    teacher: Model | None = None


@dataclass(frozen=True)
class Needs:
    steps: int
    model: Model


@dataclass(frozen=True)
class Odd:
    pick: Literal["none", "all"] | None = None
    level: Literal[1, 2] = 1
    mixed: int | Literal["auto"] = "auto"
    lines: tuple[tuple[str, ...], ...] = ()


PRESETS: dict[str, Any] = {
    "small": {"name": "small", "model": {"layers": 6, "width": 128}},
    "full": Train(name="full", model=Model(layers=24)),
    "mixed": {"model": Model(layers=5, activation="relu")},
}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="utf-8")
    return path


# ---- layers ----------------------------------------------------------------------------------------------------


def test_defaults_alone() -> None:
    assert load(Train) == Train()


def test_precedence(tmp_path: Path) -> None:
    path = write(tmp_path, 'name = "file"\n[model]\nwidth = 256\n')
    loaded = load(Train, preset="small", presets=PRESETS, file=path, sets=["model.width=512"])
    assert loaded == Train(name="file", model=Model(layers=6, width=512))
    assert load(Train, preset="small", presets=PRESETS, file=path).model == Model(layers=6, width=256)
    assert load(Train, preset="small", presets=PRESETS).model == Model(layers=6, width=128)


def test_a_section_given_in_part_keeps_the_default_of_its_owner() -> None:
    assert load(Train, sets=["model.width=8"]).model == Model(layers=4, width=8)
    assert load(Train, sets=["teacher.width=8"]).teacher == Model(layers=2, width=8)


def test_presets_may_be_instances() -> None:
    assert load(Train, preset="full", presets=PRESETS, sets=["seed=1"]) == Train("full", 1, model=Model(layers=24))
    assert load(Train, preset="mixed", presets=PRESETS).model == Model(layers=5, activation="relu")


def test_required_keys() -> None:
    assert load(Needs, sets=["steps=3"]) == Needs(3, Model())
    with pytest.raises(UsageError) as caught:
        load(Needs)
    assert str(caught.value) == "missing key 'steps': expected a whole number"


# ---- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("model.layers=1_000", Train(model=Model(layers=1000))),
        ("model.layers=105,model.width=20480", Train(model=Model(layers=105, width=20480))),
        ("model.layers=105, name=a b", Train(name="a b", model=Model(layers=105))),
        ("compile=yes", Train(compile=True)),
        ("compile=No", Train()),
        ("compile=TRUE", Train(compile=True)),
        ("seed=none", Train(seed=None)),
        ("seed=-3", Train(seed=-3)),
        ("model.dropout=1e-1", Train(model=Model(layers=4, dropout=0.1))),
        ("model.dropout=1", Train(model=Model(layers=4, dropout=1.0))),
        ("model.activation=relu", Train(model=Model(layers=4, activation="relu"))),
        ("data.folder=/a/b", Train(data=Data(folder=Path("/a/b")))),
        ("data.splits=[1,2,3]", Train(data=Data(splits=(1, 2, 3)))),
        ("data.splits=1,2,3,name=x", Train(name="x", data=Data(splits=(1, 2, 3)))),
        ("data.splits=[]", Train(data=Data(splits=()))),
        ("data.betas=(0.8, 0.9)", Train(data=Data(betas=(0.8, 0.9)))),
        ("note=it's,model.layers=1", Train(note="it's", model=Model(layers=1))),
        ('note="a, name=b",seed=1', Train(note="a, name=b", seed=1)),
        ("note='\\n'", Train(note="\\n")),
        (r'note="\",name=\n"', Train(note='",name=\n')),
        ('note="none"', Train(note="none")),
        ("note=x=y", Train(note="x=y")),
        ("note=", Train(note="")),
        ("seed=1,seed=2", Train(seed=2)),
        ("teacher=none", Train()),
    ],
)
def test_settings(setting: str, expected: Train) -> None:
    assert load(Train, sets=[setting]) == expected


def test_split_sets() -> None:
    assert split_sets(["tp=8,pp=35", "a.b = [x=1, y=2], c=3"]) == [
        ("tp", "8"),
        ("pp", "35"),
        ("a.b", "[x=1, y=2]"),
        ("c", "3"),
    ]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b.c", "d_e"]),
            st.integers(-LARGEST_WHOLE, LARGEST_WHOLE) | st.lists(st.integers(-LARGEST_WHOLE, LARGEST_WHOLE)),
        ),
        min_size=1,
    )
)
def test_a_joined_list_of_settings_splits_back(pairs: list[tuple[str, Any]]) -> None:
    expected = [(key, str(value)) for key, value in pairs]
    assert split_sets([",".join(f"{key}={value}" for key, value in pairs)]) == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.layers", "'model.layers' sets nothing: write key=value, such as train.steps=200"),
        ("=3", "'=3' sets nothing: write key=value, such as train.steps=200"),
        ("model.layers=many", "--set: model.layers is 'many', expected a whole number"),
        ("model.layers=1.5", "--set: model.layers is '1.5', expected a whole number"),
        ("model.layers=1,width", "--set: model.layers is '1,width', expected a whole number"),
        ("model.dropout=low", "--set: model.dropout is 'low', expected a number"),
        ("compile=maybe", "--set: compile is 'maybe', expected true or false"),
        ("seed=x", "--set: seed is 'x', expected a whole number or none"),
        (
            "model.activation=glu",
            "--set: model.activation is 'glu', expected one of relu, gelu; did you mean 'gelu'?",
        ),
        ("data.splits=[1,x]", "--set: data.splits is '[1,x]', expected a list, each a whole number"),
        ("data.betas=[1]", "--set: data.betas is '[1]', expected a list of 2: a number, a number"),
        ('name="a"b"', '--set: name is \'"a"b"\', expected text'),
        ("model=3", "--set: model is '3', expected a section with layers, width, activation, dropout"),
        (
            "teacher=3",
            "--set: teacher is '3', expected a section with layers, width, activation, dropout or none",
        ),
        ("model.layers.x=3", "--set: unknown key 'model.layers.x': 'model.layers' is a value, not a section"),
        (
            "model.layrs=3",
            "--set: unknown key 'model.layrs': did you mean 'model.layers'? "
            "known are model.layers, model.width, model.activation, model.dropout",
        ),
        (
            "model.foo=3",
            "--set: unknown key 'model.foo': known are model.layers, model.width, model.activation, model.dropout",
        ),
        (
            "model.splits=3",
            "--set: unknown key 'model.splits': did you mean 'data.splits'? "
            "known are model.layers, model.width, model.activation, model.dropout",
        ),
        (
            "splits=3",
            "--set: unknown key 'splits': did you mean 'data.splits'? "
            "known are name, seed, note, compile, model, data, teacher",
        ),
    ],
)
def test_settings_refused(setting: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(Train, sets=[setting])
    assert str(caught.value) == message


# ---- files and presets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[model]\nlayers = "3"\n', "model.layers is '3', expected a whole number"),
        ("[model]\nlayers = true\n", "model.layers is True, expected a whole number"),
        ("[model]\nlayers = 3.0\n", "model.layers is 3.0, expected a whole number"),
        ('compile = "yes"\n', "compile is 'yes', expected true or false"),
        ("name = 3\n", "name is 3, expected text"),
        ("[data]\nfolder = 3\n", "data.folder is 3, expected a path"),
        ("[data]\nsplits = 3\n", "data.splits is 3, expected a list, each a whole number"),
        ("[seed]\nx = 1\n", "unknown key 'seed.x': 'seed' is a value, not a section"),
        (
            "[modle]\nlayers = 3\n",
            "unknown key 'modle': did you mean 'model'? known are name, seed, note, compile, model, data, teacher",
        ),
    ],
)
def test_files_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load(Train, file=path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a = 1\nb 2\n", 2, "expected '=' after a key in a key/value pair"),
        ("a = 1\na = 2\n", 2, "cannot overwrite a value"),
        ("a = [1,\n2", 2, "unclosed array"),
    ],
)
def test_syntax_errors_are_one_line_with_file_and_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load(Train, file=path)
    assert str(caught.value) == f"{path}:{line}: not valid TOML: {what}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load(Train, file=tmp_path / "no.toml")
    assert str(caught.value) == f"configuration file '{tmp_path / 'no.toml'}' does not exist"
    with pytest.raises(UsageError) as caught:
        load(Train, file=tmp_path)
    assert str(caught.value) == f"configuration file '{tmp_path}' cannot be read: Is a directory"
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"\n')
    with pytest.raises(UsageError) as caught:
        load(Train, file=tmp_path / "latin.toml")
    assert str(caught.value) == f"configuration file '{tmp_path / 'latin.toml'}' is not UTF-8 text"
    with pytest.raises(UsageError, match=r"recipe file 'no\.toml' does not exist"):
        read_toml("no.toml", "recipe")


def test_presets_refused() -> None:
    with pytest.raises(UsageError) as caught:
        load(Train, preset="smal", presets=PRESETS)
    assert str(caught.value) == "unknown preset 'smal': did you mean 'small'? known are small, full, mixed"
    with pytest.raises(UsageError) as caught:
        load(Train, preset="small")
    assert str(caught.value) == "unknown preset 'small': known are none"
    with pytest.raises(UsageError) as caught:
        load(Train, preset="bad", presets={"bad": {"seed": 1.5}})
    assert str(caught.value) == "preset bad: seed is 1.5, expected a whole number or none"


# ---- writing ---------------------------------------------------------------------------------------------------


def test_dump_looks_like_what_a_person_writes() -> None:
    assert dump_toml(Train(note='say "hi"\n', teacher=Model())) == (
        'name = "run"\nseed = 7\nnote = "say \\"hi\\"\\n"\ncompile = false\n'
        '\n[model]\nlayers = 4\nwidth = 64\nactivation = "gelu"\ndropout = 0.0\n'
        '\n[data]\nfolder = "data"\nsplits = [9, 1]\nbetas = [0.9, 0.95]\n'
        '\n[teacher]\nlayers = 2\nwidth = 64\nactivation = "gelu"\ndropout = 0.0\n'
    )


whole = st.integers(-LARGEST_WHOLE, LARGEST_WHOLE)
models = st.builds(Model, whole, whole, st.sampled_from(["relu", "gelu"]), st.floats(allow_nan=False))
paths = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])).map(Path)
datas = st.builds(
    Data,
    paths,
    st.lists(whole).map(tuple),
    st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
)
trains = st.builds(
    Train,
    name=st.text(),
    seed=st.none() | whole,
    note=st.none() | st.text().filter(lambda text: text.lower() != "none"),
    compile=st.booleans(),
    model=models,
    data=datas,
    teacher=st.none() | models,
)


@settings(deadline=None)
@given(trains)
def test_toml_round_trip(config: Train) -> None:
    assert from_dict(Train, parse_toml(dump_toml(config), "dump")) == config


@pytest.mark.parametrize("code", [*range(0x20), 0x22, 0x27, 0x5C, 0x7F, 0x80, 0x85, 0x2028, 0xFEFF, 0x1F600])
def test_every_awkward_character_round_trips_through_a_file(tmp_path: Path, code: int) -> None:
    config = Train(name=f"a{chr(code)}b{chr(code)}")
    assert load(Train, file=write(tmp_path, dump_toml(config))) == config


@settings(deadline=None)
@given(trains)
def test_dict_round_trip(config: Train) -> None:
    assert from_dict(Train, to_dict(config)) == config


@settings(deadline=None)
@given(st.lists(st.lists(st.text(), max_size=3).map(tuple), max_size=3).map(tuple))
def test_nested_lists_round_trip(lines: tuple[tuple[str, ...], ...]) -> None:
    config = Odd(pick="all", lines=lines)
    assert from_dict(Odd, parse_toml(dump_toml(config), "dump")) == config


def test_a_file_round_trip_keeps_special_floats(tmp_path: Path) -> None:
    for value in (float("inf"), -float("inf"), 1e300, 5e-324, -0.0):
        path = write(tmp_path, dump_toml(Model(dropout=value)))
        assert repr(load(Model, file=path).dropout) == repr(value)
    assert repr(load(Model, file=write(tmp_path, dump_toml(Model(dropout=float("nan"))))).dropout) == "nan"


def test_none_as_a_choice_and_as_nothing() -> None:
    assert load(Odd, sets=["pick=none"]).pick == "none"
    assert from_dict(Odd, {"pick": None}).pick is None
    assert load(Odd, sets=["level=2", "mixed=3"]) == Odd(level=2, mixed=3)
    with pytest.raises(UsageError) as caught:
        dump_toml(Odd())
    assert str(caught.value) == "pick is None, which would be read back as 'none'"
    with pytest.raises(UsageError) as caught:
        dump_toml(Train(note="None"))
    assert str(caught.value) == "note is 'None', which would be read back as None"


def test_dump_refuses_a_value_its_annotation_does_not_admit() -> None:
    wrong: Any = "three"
    with pytest.raises(UsageError) as caught:
        dump_toml(Train(model=Model(layers=wrong)))
    assert str(caught.value) == "model.layers is 'three', expected a whole number"


def test_an_annotation_that_is_not_supported_is_a_bug_of_the_class() -> None:
    with pytest.raises(TypeError, match="cannot be"):
        from_dict(Unsupported, {"anything": 3})


@dataclass(frozen=True)
class Unsupported:
    anything: bytes = b""


def test_a_file_without_an_end_is_no_configuration() -> None:
    with pytest.raises(UsageError, match="'/dev/zero' is larger than any configuration: 16 MiB"):
        load(Train, file="/dev/zero")
