"""Methods asked for by their names elsewhere, or by a slip of the pen."""

import pytest

from gossamer.errors import RecipeError
from gossamer.recipes.catalog import NOUNS, PRESETS
from gossamer.recipes.other_names import BY_NAME, OTHER_NAMES, OtherName, normalized
from gossamer.recipes.recipe import resolve


def refusal(text):
    with pytest.raises(RecipeError) as refused:
        resolve(text)
    return str(refused.value)


@pytest.mark.parametrize("other", OTHER_NAMES, ids=lambda other: other.names[0])
def test_every_recipe_of_the_table_can_be_written(other: OtherName):
    resolve(other.recipe)
    for workers in (2, 8):
        resolve(other.recipe, workers)


def test_no_name_of_the_table_hides_another_or_a_term_of_ours():
    names = [normalized(name) for other in OTHER_NAMES for name in other.names]
    ours = {normalized(name): name for name in (*NOUNS, *PRESETS)}
    doubled = {other.names for other in OTHER_NAMES for name in other.names if BY_NAME[normalized(name)] is not other}
    assert not doubled
    assert all(names)
    assert {name for name in names if name in ours} == set()


@pytest.mark.parametrize("other", OTHER_NAMES, ids=lambda other: other.names[0])
def test_every_name_is_answered_with_its_recipe(other: OtherName):
    for name in other.names:
        said = refusal(name)
        assert other.origin in said
        assert other.recipe in said
        assert ("is not here" in said) == bool(other.lacking)


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        ("dist_sync", ["dist_sync (MXNet's KVStore) is ParameterServer('sync') here. Write that.", "^ character 1"]),
        ("DIST-ASYNC", ["ParameterServer('async')"]),
        ("1bit-adam", ["1bit-adam (DeepSpeed) is OneBitAdam(warmup=1000) here"]),
        ("1-bit Adam(warmup=5)", ["OneBitAdam(warmup=1000)"]),
        ("Ring() + EF-SGD", ["Feedback(OneBit())", "^ character 10"]),
        ("LocalSGD(8) +  1bit-adam", ["OneBitAdam", "^ character 16"]),
        (
            "Feedback(signsgd)",
            ["signsgd (Bernstein et al. 2018) is not here", "OneBit(feedback=False)", "^ character 10"],
        ),
        ("FedAvg(period=10)", ["FedAvg takes no argument period. Write FedAvg(fraction=0.1, "]),
        ("FedAdam", ["FedAdam (Reddi et al. 2021) is FedOpt('adam') here. Write that."]),
        ("q-FedAvg", ["is not here", "nothing weighs devices by their loss", "The nearest is FedAvg(fraction=0.1)."]),
        ("FedSGD() + Int8()", ["FedAvg(fraction=1.0, local_steps=1)"]),
        ("FSDP", ["is not here", "each worker holds all of it", "The nearest is EveryStep()."]),
    ],
)
def test_answers(text, ops):
    said = refusal(text)
    for op in ops:
        assert op in said


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("local sgd", "LocalSGD(period, "),
        ("local_sgd(8)", "LocalSGD(period, "),
        ("power-sgd", "PowerSGD(rank=4, feedback=True)."),
        ("LocalSDG(8)", "LocalSGD(period, "),
        ("FedAvgg", "FedAvg(fraction=0.1, "),
        ("scafold", "SCAFFOLD(server_learning_rate=1.0, "),
        ("Paramter_Server", "ParameterServer(mode='async'"),
        ("dgc", "DGC(density=0.001, "),
    ],
)
def test_a_near_miss_is_answered_with_the_nearest(text, near):
    said = refusal(text)
    assert near in said
    assert "There is no" in said


def test_a_name_like_nothing_is_not_answered_with_thirty():
    said = refusal("frobnicate(3)")
    assert "`gossamer recipes`" in said
    assert sum(noun in said for noun in NOUNS) <= 3
