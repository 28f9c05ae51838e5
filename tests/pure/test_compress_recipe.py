"""Recipes as data, and the choice of bits under a budget. No torch in recipes."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.compress.recipe import NAMES, Recipe, chosen_schemes, read_recipe
from tilemesh.core.config import from_dict
from tilemesh.core.errors import UsageError

SHAPES = {"layers.0.attention.fc_q": (64, 128), "layers.0.mlp.fc_out": (128, 192), "output": (256, 128)}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_recipes_and_come_back_from_toml(name, tmp_path):
    recipe = read_recipe(name)
    assert not recipe.is_empty
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.to_toml())
    assert read_recipe(path) == recipe


def test_a_model_whose_output_is_its_embedding_is_told_so():
    recipe = from_dict(Recipe, {"weights": {"scheme": "int8", "layers": ["layers.*", "output"]}})
    assert "output" in chosen_schemes(recipe, SHAPES)
    with pytest.raises(UsageError, match="it shares the embedding's table"):
        chosen_schemes(recipe, {name: shape for name, shape in SHAPES.items() if name != "output"})


def test_rules_are_looked_at_in_order_and_the_output_stays():
    told = {"weights": {"scheme": "int4-g64", "rules": ["*.fc_out=int8", "*.fc_*=none"]}}
    found = chosen_schemes(from_dict(Recipe, told), SHAPES)
    assert {name: scheme.name for name, scheme in found.items()} == {"layers.0.mlp.fc_out": "int8"}


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('[weights]\nschema = "int4"', "unknown key 'weights.schema': did you mean 'weights.scheme'"),
        ("[weights]\nfoo = 1", r"unknown key 'weights.foo': known are weights.scheme, .*weights.correct_bias$"),
        ("[weights]\nkeep = 0.5", "unknown key 'weights.keep': did you mean 'rank.keep'"),
        ('[weights]\nscheme = "int4-g64-g32"', "names g64 and g32, and has one granularity"),
        ('[weights]\nscheme = "int8"\n[activations]\nstatic = true', "static without activations.scheme"),
        ('[weights]\nscheme = "int8"\nmethod = "awq"\n[activations]\nsmooth = 0.5', "choose one"),
        ('[weights]\nscheme = "int8"\n[rank]\nkeep = 0.5', "thin factors are not quantised"),
        ('[prune]\nstructure = "2:4"\n[rank]\nkeep = 0.5', "a product of thin factors has no zeros"),
        ('[weights]\nscheme = "int4"\nchoices = ["int8"]', "choices without weights.bits"),
        ('[weights]\nscheme = "int4"\nlayers = []', "layers is empty"),
        ('[weights]\nscheme = "int4"\nrules = ["*.fc_q=foo"]', "recipe.weights.rules: unknown number format 'foo'"),
        ('[weights]\nscheme = "int4"\nlayers = ["token_embedding"]', "embeddings and norms stay as they are"),
        ('[weights]\nscheme = "int7"', "unknown number format 'int7'"),
        ('[weights]\nscheme = "int4-g48"', "layers.0.attention.fc_q: groups of 48 do not divide 128 inputs"),
        ('[weights]\nscheme = "int4"\nlayers = ["blocks.*"]', "'blocks.\\*' matches no matrix of this model"),
        ('[weights]\nscheme = "int4"\nrules = ["*.fc_x=int8"]', "matches no matrix"),
        ('[weights]\nscheme = "int4"\nrules = ["*.fc_q"]', "write PATTERN=SCHEME"),
        ('[weights]\nscheme = "int4"\nrules = ["*=none"]', "leaves every matrix alone"),
        ('[weights]\nmethod = "gptq"', "no scheme"),
        ('[activations]\nscheme = "int8"', "without weights.scheme"),
        ('[prune]\nstructure = "mlp"\namount = 1.5', "recipe.prune.amount is 1.5"),
        ('[prune]\nstructure = "mlp"\nbegin = 0.8\nend = 0.2', "prune.begin is 0.8"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said_in_one_line(toml, words, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(toml)
    with pytest.raises(UsageError, match=words) as caught:
        chosen_schemes(read_recipe(path), SHAPES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["int9", "mlp-0", "rank-200", "int4-gtpq", "no/such/file.toml"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(UsageError):
        read_recipe(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("int8-a8-a8", "has the word 'a8' twice"),
        ("int4-g64-gptq-gptq", "has the word 'gptq' twice"),
        ("int4-gptq-awq", "names gptq and awq, and has one method"),
        ("int4-tensor-g64", "names tensor and g64, and has one granularity"),
        ("int8-static", "and no a8: write int8-static-a8"),
        ("int4-g64-gtpq", "unknown word 'gtpq': did you mean 'gptq'"),
        ("heads-", "expected a percentage"),
    ],
)
def test_a_name_says_each_thing_once_and_in_known_words(name, words):
    with pytest.raises(UsageError, match=words) as caught:
        read_recipe(name)
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_knapsack_is_as_good_as_trying_everything(data):
    from tilemesh.compress.mixed import choose

    matrices = data.draw(st.integers(1, 5))
    costs = [data.draw(st.lists(st.floats(0, 10), min_size=3, max_size=3)) for _ in range(matrices)]
    sizes = [data.draw(st.lists(st.integers(1, 400), min_size=3, max_size=3)) for _ in range(matrices)]
    least, most = sum(map(min, sizes)), sum(map(max, sizes))
    budget = data.draw(st.integers(least, most))
    chosen = choose(costs, sizes, budget)
    assert sum(each[number] for each, number in zip(sizes, chosen, strict=True)) <= budget
    every = [
        sum(each[number] for each, number in zip(costs, numbers, strict=True))
        for numbers in itertools.product(range(3), repeat=matrices)
        if sum(each[number] for each, number in zip(sizes, numbers, strict=True)) <= budget
    ]
    assert sum(each[number] for each, number in zip(costs, chosen, strict=True)) <= min(every) + 1e-9


def test_a_budget_below_the_smallest_choice_is_refused():
    from tilemesh.compress.mixed import choose

    with pytest.raises(UsageError, match="allow more bits"):
        choose([[0.0]], [[100]], 99)
