import ast
import math
import warnings
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.algorithms import compressors, topologies
from gossamer.algorithms import strategies as whens
from gossamer.algorithms.compressors import Dense, Feedback, Float4, PowerSGD, Route, TopK
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.recipes.catalog import NESTED, NOUNS, PRESETS, describe
from gossamer.algorithms.recipes.parser import parse
from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.recipes.registry import KINDS
from gossamer.algorithms.recipes.validation import LONGEST_TEXT
from gossamer.algorithms.strategies import EveryStep, federated_rules
from gossamer.algorithms.topologies import Complete
from gossamer.errors import RecipeError

leaves = st.one_of(
    st.builds(Dense, dtype=st.sampled_from([None, "float32", "float16", "bfloat16"])),
    st.builds(TopK, density=st.floats(0, 1, exclude_min=True), feedback=st.booleans()),
    st.builds(Int8, block=st.integers(1, 2**62), feedback=st.booleans()),
    st.builds(PowerSGD, rank=st.integers(1, 1000), feedback=st.booleans()),
)


def routed(inner):
    return st.builds(Route, inner, rest=inner, smallest=st.integers(0, 10_000))


nested = st.one_of(
    st.recursive(leaves | st.builds(Feedback, leaves), routed, max_leaves=4),
    st.builds(Feedback, st.recursive(leaves, routed, max_leaves=4)),
)
sums = st.tuples(nested, st.just(EveryStep()), st.just(Complete())).flatmap(st.permutations)


def reads_back(recipe, show=repr):
    return resolve(show(recipe)) == recipe and repr(resolve(show(recipe))) == repr(recipe)


@given(sums)
def test_text_reads_back_to_the_same_recipe(terms):
    total = terms[0] + terms[1] + terms[2]
    assert parse(repr(total)) == total
    resolved = resolve(total)
    assert resolve(resolved) == resolved
    assert reads_back(resolved)


def test_a_repr_that_forgets_an_argument_would_be_found():
    recipe = resolve("TopK(0.01, feedback=False)")
    assert reads_back(recipe)
    assert not reads_back(recipe, show=lambda it: repr(it).replace(", feedback=False", ""))


@given(st.text("TopKInt8Dese()+-*.,=0123'[]{}:#\\\n\t é\x00\x1b", max_size=60))
def test_any_text_is_a_recipe_or_refused(text):
    with suppress(RecipeError):
        resolve(text)


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("TopK(density=0.01)", "Route(Feedback(TopK(density=0.01)))"),
        ("TopK(0.01)", "Route(Feedback(TopK(density=0.01)))"),
        ("TopK(0.01, feedback=False)", "Route(TopK(density=0.01, feedback=False))"),
        ("Feedback(TopK(0.01))", "Route(Feedback(TopK(density=0.01)))"),
        ("Feedback(TopK(0.01, feedback=False))", "Route(Feedback(TopK(density=0.01, feedback=False)))"),
        ("Route(TopK(0.01), rest=Int8())", "Route(Feedback(TopK(density=0.01)), rest=Feedback(Int8()))"),
        ("Route(Feedback(Int8), smallest=0)", "Route(Feedback(Int8()), smallest=0)"),
        ("Int8", "Route(Feedback(Int8()))"),
        ("Int8()", "Route(Feedback(Int8()))"),
        (" Complete +\n  EveryStep() +\tInt8 ", "Route(Feedback(Int8()))"),
        ("Int8 + (Complete + EveryStep)", "Route(Feedback(Int8()))"),
        ("Dense", "Dense()"),
        ("Dense('float16')", "Dense(dtype='float16')"),
        ("EveryStep", "Dense()"),
        ("lan", "Route(Feedback(Int8()))"),
        ("wan", "Route(Feedback(Float4()))"),
        ("wan + EveryStep()", "Route(Feedback(Float4()))"),
    ],
)
def test_resolution(text, resolved):
    assert repr(resolve(text)) == f"EveryStep() + {resolved} + Complete()"


def test_every_way_to_write_a_recipe_gives_the_same():
    expected = Recipe(EveryStep(), Route(Feedback(TopK(0.01))), Complete())
    for written in (
        TopK(0.01),
        TopK(density=0.01) + EveryStep(),
        Complete() + TopK(0.01) + EveryStep(),
        Recipe(compressor=TopK(0.01)),
        expected,
    ):
        assert resolve(written) == expected
    assert resolve(PRESETS["wan"]) == resolve("wan") == resolve(Float4())
    assert resolve(None) == Recipe() == Recipe(EveryStep(), Dense(), Complete())


ALWAYS_WRONG = [
    ("", ["empty text", "Write Dense()"]),
    ("  \n", ["empty text"]),
    ("Topk(0.01)", ["no Topk", "TopK(density, feedback=True", "^ character 1"]),
    ("hom", ["no hom", "Write one of: home."]),
    ("xyzzy()", ["no xyzzy", "LocalSGD(period=8)", "`gossamer recipes`"]),
    ("Codec", ["no Codec"]),
    ("Compressor()", ["no Compressor"]),
    ("TopK", ["needs density", "Write TopK(density=0.01)"]),
    (
        "EveryStep + Feedback",
        ["Feedback(inner, rule='classic', momentum=None, decay=1.0, dtype=None) needs inner", "^ character 13"],
    ),
    ("TopK(dense=0.1)", ["no argument dense", "TopK(density, feedback=True"]),
    ("TopK(0.1, density=0.2)", ["density twice", "^ character 19"]),
    ("TopK(density=0.1, density=0.2)", ["density twice"]),
    ("TopK(0.1, False)", ["first argument", "TopK(density, feedback=True", "^ character 11"]),
    ("Complete(1)", ["first argument", "Write Complete()"]),
    ("TopK(**x)", ["no argument **"]),
    ("TopK(*x)", ["not a term"]),
    ("TopK(0)", ["(0, 1], got 0", "^ character 1"]),
    ("TopK(2)", ["(0, 1], got 2"]),
    ("TopK(-0.1)", ["(0, 1], got -0.1"]),
    ("TopK(nan)", ["no nan"]),
    ("TopK(1e999)", ["not finite"]),
    ("TopK('x')", ["a number, got 'x'", "Write TopK(density=0.01)"]),
    ("TopK(True)", ["a number, got True"]),
    ("TopK(1j)", ["a number, got 1j"]),
    ("TopK(0.1, feedback=1)", ["True or False, got 1"]),
    ("PowerSGD(rank=0)", ["1 or more, got 0"]),
    ("PowerSGD(rank=1.5)", ["a whole number, got 1.5", "PowerSGD(rank=4)"]),
    ("Int8(block=99999999999999999999)", ["too large"]),
    ("Dense('int4')", ["got 'int4'", "Dense(dtype='bfloat16')"]),
    ("Dense(16)", ["a text in quotes or None, got 16"]),
    ("Feedback(EveryStep)", ["a compressor, got EveryStep()"]),
    ("Feedback(TopK(0.1) + Int8)", ["not a term", "^ character 10"]),
    ("Feedback(home)", ["preset home", "top of a recipe", "LocalSGD(period=8"]),
    ("home(0.1)", ["preset home", "takes no arguments"]),
    ("Sharded(Dense)", ["a codec or PerWorker(...), got Dense()", "Write Sharded(Int8())"]),
    ("Sharded(Feedback(Int8))", ["a codec or PerWorker(...), got Feedback(Int8())"]),
    ("Feedback(Feedback(Int8))", ["Feedback inside Feedback", "twice"]),
    ("Feedback(Route(Feedback(Int8)))", ["Feedback inside Feedback"]),
    ("TopK(0.1) + Int8()", ["TopK(density=0.1) and Int8()", "at most one compressor"]),
    ("home + Int8", ["home + Int8 has two", "at most one compressor"]),
    ("EveryStep + EveryStep", ["at most one strategy"]),
    ("Complete + Int8 + Complete()", ["at most one topology"]),
    ("TopK(0.1) - Int8()", ["not a term", "joined by +"]),
    ("TopK(0.1", ["'(' was never closed", "^ character 5"]),
    ("'é' + TopK(", ["never closed", "^ character 11"]),
    ("TopK(density='é', mode=1)", ["no argument mode", "^ character 24"]),
    ("1or 2", ["not a recipe"]),
    ("TopK(0.1) # + Int8()", ["'#' has no meaning", "^ character 11"]),
    ("Dense('\\x66loat16')", ["has no meaning"]),
    ("Int8\x00", ["'\\x00' has no meaning"]),
    ("Int8(block=\x1b)", ["'\\x1b' has no meaning"]),
    ("Int8\ud800", ["has no meaning"]),
    ("__import__('os').system('exit')", ["not a term"]),
    ("open('f')", ["no open"]),
    ("lambda: 1", ["not a term"]),
    ("[Int8]", ["not a term"]),
    ("f'{Int8}'", ["not a term"]),
    ("Int8 if 1 else Int8", ["not a term"]),
    ("x" * (LONGEST_TEXT + 1), ["at most 2000 characters", "has 2001"]),
    ("Route(" * 8 + "Int8" + ")" * 8, ["at most 8 deep", "^ character 49"]),
    ("Feedback(" + "Route(" * 6 + "Int8" + ")" * 7, ["more than 8", "including those that resolving"]),
    ("(" * 1000, ["not a recipe"]),
    ("Int8(" * 390, ["not a recipe"]),
    ("-" * 1900 + "1", ["not a term"]),
    ("not " * 490 + "1", ["not a term"]),
    ("+".join(["Int8"] * 399), ["at most one compressor"]),
]


@pytest.mark.parametrize(("text", "ops"), ALWAYS_WRONG, ids=[text[:40] for text, _ in ALWAYS_WRONG])
def test_refusals_say_what_is_wrong_and_what_to_write(text, ops):
    with pytest.raises(RecipeError) as refusal:
        resolve(text)
    for op in ops:
        assert op in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "sharded"),
    [
        ("Int8", "Route(Feedback(Sharded(Int8())))"),
        ("Int8(feedback=False)", "Route(Sharded(Int8(feedback=False)))"),
        ("QSGD", "Route(Sharded(QSGD()))"),
        ("OneBit", "Route(Feedback(Sharded(OneBit())))"),
        ("TwoBit", "Route(Feedback(Sharded(TwoBit())))"),
        ("Route(Int8, smallest=5)", "Route(Feedback(Sharded(Int8())), smallest=5)"),
        ("Sharded(Int8)", "Route(Feedback(Sharded(Int8())))"),
    ],
)
def test_a_codec_is_sharded_where_that_sends_less(text, sharded):
    for world in (3, 4, 8, 64):
        resolved = resolve(text, world)
        assert repr(resolved.compressor) == sharded
        assert resolve(repr(resolved), world) == resolved
    if "Sharded" not in text:
        for world in (None, 1, 2):
            assert "Sharded" not in repr(resolve(text, world))


@pytest.mark.parametrize(
    ("text", "summed"),
    [
        ("TopK(0.01)", "Route(Feedback(SparseSum(TopK(density=0.01))))"),
        ("TopK(0.001)", "Route(Feedback(SparseSum(TopK(density=0.001))))"),
        ("Route(TopK(0.1), smallest=5)", "Route(Feedback(SparseSum(TopK(density=0.1))), smallest=5)"),
        ("SparseSum(TopK(0.01))", "Route(Feedback(SparseSum(TopK(density=0.01))))"),
        ("Sharded(TopK(0.01))", "Route(Feedback(Sharded(TopK(density=0.01))))"),
    ],
)
def test_few_entries_are_summed_where_that_sends_less_than_half(text, summed):
    for world in (5, 8, 64):
        resolved = resolve(text, world)
        assert repr(resolved.compressor) == summed
        assert resolve(repr(resolved), world) == resolved
    if "S" not in text:
        for world in (None, 1, 2, 3, 4):
            assert "SparseSum" not in repr(resolve(text, world))


@pytest.mark.parametrize(("of_the_sum", "taken"), [(49, True), (50, False), (100, False)])
def test_the_cheapest_is_chosen_by_its_price(monkeypatch, of_the_sum, taken):
    price = lambda compressor, world: of_the_sum if "Sum" in repr(compressor) else 100  # noqa: E731
    monkeypatch.setattr("gossamer.algorithms.recipes.wrapping.bytes_sent", price)
    assert ("SparseSum" in repr(resolve("TopK(0.01)", 8))) == taken


@pytest.mark.parametrize(
    "text",
    ["Dense", "TernGrad", "PowerSGD(2)", "OneBit(columns=True)", "Feedback(Int8)", "Route(QSGD)", "Feedback(TopK(0.1))"]
    + [
        "TopK(0.01, feedback=False)",
        "Chain(TopK(0.01), Int8)",
        "Threshold(0.01)",
        "DGC(0.01)",
        "Warmup(TopK(0.1), steps=5)",
    ],
)
def test_what_is_no_bare_quantiser_or_choice_stays_whole(text):
    for world in (2, 8):
        assert resolve(text, world) == resolve(text)


def test_nesting_is_refused_one_level_beyond_what_is_read():
    assert resolve("Route(" * 6 + "Int8" + ")" * 6).compressor == routes(6)  # and Feedback, which is added
    with pytest.raises(RecipeError, match="including those that resolving adds"):
        resolve("Route(" * 7 + "Int8" + ")" * 7)


def routes(levels):
    return Route(routes(levels - 1)) if levels else Feedback(Int8())


def test_long_texts_are_shown_around_the_place():
    with pytest.raises(RecipeError) as refusal:
        resolve("EveryStep() + " + "Int8() + " * 100 + "Blah()")
    shown, mark = str(refusal.value).splitlines()[-2:]
    assert len(shown) < 120
    assert shown[mark.index("^") :] == "Blah()"


def test_what_python_would_warn_about_is_refused_regardless_of_the_filters():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(RecipeError, match="invalid decimal literal"):
            resolve("1or 2")
    assert not warned


def test_text_too_deep_for_python_itself_is_refused(monkeypatch):
    def overflow(*args, **kwargs):
        raise RecursionError

    monkeypatch.setattr(ast, "parse", overflow)
    with pytest.raises(RecipeError, match="nests too deeply"):
        resolve("Int8()")


@pytest.mark.parametrize(
    ("recipe", "ops"),
    [
        (TopK, ["cannot be a part of a recipe", "TopK(...)"]),
        (3, ["3 cannot be a part of a recipe"]),
        (EveryStep() + 3, ["3 cannot be a part of a recipe"]),
        (EveryStep() + "Int8()", ["'Int8()' cannot be a part of a recipe"]),
        (TopK(0.1) + Int8(), ["at most one compressor"]),
        (PowerSGD(rank=1.5), ["a whole number, got 1.5"]),
        (Int8(block=2**63), ["too large"]),
        (Feedback(3), ["a compressor, got 3"]),
        (Feedback(3, rule="ef21"), ["a compressor, got 3"]),
        (Route(TopK(0.1), rest=Int8(feedback="no")), ["True or False, got 'no'"]),
        (Feedback(Feedback(Int8())), ["Feedback inside Feedback"]),
        (Route(routes(8)), ["more than 8"]),
    ],
)
def test_terms_written_in_python_are_checked_alike(recipe, ops):
    with pytest.raises(RecipeError) as refusal:
        resolve(recipe)
    for op in ops:
        assert op in str(refusal.value)


def test_a_recipe_whose_text_would_be_too_long_to_read_back_is_refused():
    wide = Int8(block=2**62)
    for _ in range(6):
        wide = Route(wide, rest=wide)
    with pytest.raises(RecipeError, match="characters, and could not be parsed again"):
        resolve(wide)


@pytest.mark.parametrize("density", [0, 2, -1, math.nan, math.inf])
def test_construction_refuses_what_text_refuses(density):
    with pytest.raises(ValueError, match="density"):
        TopK(density=density)


def test_the_nouns_are_every_concrete_class():
    exported = {*compressors.__all__, *whens.__all__, *topologies.__all__, *federated_rules.__all__}
    rules = {
        "AGREED",
        "ALIGN",
        "AVERAGE",
        "FROM",
        "KEEP",
        "NEVER",
        "RESET",
        "Memory",
        "MomentRounds",
        "AveragingStage",
        "AveragingStrategy",
        "CohortSummary",
        "FederatedStage",
        "FederatedStrategy",
        "GossipStage",
        "GossipStrategy",
        "GradientStage",
        "LocalServerStage",
        "LocalWork",
        "PeriodicSchedule",
        "ServerStage",
        "ServerStrategy",
        "SilentStage",
        "Stage",
        "SyncRound",
    }
    assert exported - set(NOUNS) == {"Codec", "Compressor", "Strategy", "Topology", "Aggregator", "Privacy"} | rules
    assert {noun.kind for noun in NOUNS.values()} == {*KINDS, *NESTED}


def test_every_described_example_can_be_pasted():
    described = describe()
    for (text, sentence), (name, noun) in zip(described, NOUNS.items(), strict=True):
        assert f"{name}(" in text
        assert any(type(term) is noun for term in parse(text).terms[-1].held())
        resolve(text)
        assert sentence.endswith(".")
        assert "\n" not in sentence
    assert sorted(line for kind in (*KINDS, *NESTED) for line in describe(kind)) == sorted(described)


@pytest.mark.parametrize("world", [None, 2, 64])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Feedback(DGC())", r"DGC applies the optimizer's momentum .* Write DGC\(.*\) alone"),
        ("Warmup(OneBitAdam(), steps=3)", "OneBitAdam applies the optimizer's momentum"),
        ("Feedback(Feedback(TopK(0.1)))", "Feedback inside Feedback"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_priced(text: str, says: str, world: int | None) -> None:
    with pytest.raises(RecipeError, match=says):
        resolve(text, world)
