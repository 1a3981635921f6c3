from dataclasses import replace

import pytest

from gossamer.plan.advise.pricing import pruning
from gossamer.plan.advise.pricing.foretell import Foretold
from gossamer.plan.advise.pricing.pruning import judged, kind_of, survivors


def told(recipe, seconds, strategy=1.0, compressor=1.0, memory=0, passes=1):
    return Foretold(
        recipe=recipe,
        step_seconds=seconds,
        strategy_passes=strategy,
        compressor_passes=compressor,
        memory_bytes=memory,
        passes=passes,
    )


DENSE = told("Dense()", 1.0)
HALF = told("Dense(dtype='bfloat16')", 0.6)
INT8 = told("Int8()", 0.4)
TOPK = told("TopK(density=0.01)", 0.3, compressor=2.0)
SLOW_TOPK = told("TopK(density=0.1)", 0.35, compressor=2.0)
LOCAL = told("LocalSGD(period=8)", 0.2, strategy=1.5)


def names(found):
    return [each.recipe for each in found]


def reasons(found):
    return {each.recipe: each.excluded for each in found}


def test_survivors_begin_with_dense_and_go_on_by_expected_seconds():
    found = survivors([TOPK, INT8, LOCAL, DENSE], None, most=10)
    assert names(found) == ["Dense()", "LocalSGD(period=8)", "Int8()", "TopK(density=0.01)"]
    assert [each.expected_seconds for each in found[1:]] == pytest.approx([0.3, 0.4, 0.6])


def test_every_candidate_is_told_of_and_the_others_with_a_reason():
    given = [DENSE, HALF, INT8, TOPK, SLOW_TOPK, LOCAL, replace(INT8, recipe="OneBit()", excluded="no such optimizer")]
    found = judged(given, None, most=10, memory_limit_bytes=1e9)
    assert sorted(names(found)) == sorted(names(given))
    assert found[0].recipe == "Dense()"
    why = reasons(found)
    assert why["OneBit()"] == "no such optimizer"
    assert why["TopK(density=0.1)"] == (
        "TopK(density=0.01) takes 300 ms for a backward pass, this one 350 ms, and it is expected to lose no less"
    )
    assert why["Dense(dtype='bfloat16')"].startswith("Int8() takes 400 ms")


def test_where_nothing_is_saved_only_dense_is_left():
    """Within a tenth of Dense(), the fastest of all included."""
    found = [
        DENSE,
        replace(HALF, step_seconds=0.95),
        replace(INT8, step_seconds=0.92),
        replace(LOCAL, step_seconds=0.91),
    ]
    assert names(survivors(found, None, most=10)) == ["Dense()"]
    why = reasons(judged(found, None, most=10))
    assert "less than 10% saved" in why["Int8()"]


def test_without_a_least_gain_changes_for_nothing_would_be_tried(monkeypatch):
    monkeypatch.setattr(pruning, "LEAST_GAIN", 0.0)
    found = [DENSE, replace(INT8, step_seconds=0.92)]
    assert names(survivors(found, None, most=10)) == ["Dense()", "Int8()"]


def test_gains_are_held_against_half_precision_where_that_gains():
    found = [DENSE, HALF, replace(INT8, step_seconds=0.55)]  # 45 % less than Dense(), and 8 % less than bfloat16
    assert names(survivors(found, None, most=10)) == ["Dense()", "Dense(dtype='bfloat16')"]
    assert names(survivors(found[::2], None, most=10)) == ["Dense()", "Int8()"]


def test_steps_of_several_passes_are_held_against_as_many():
    """A step of four passes in 2 s beside one of 1 s; needing as many passes as Dense() needs."""
    accumulated = told("EveryStep(accumulate=4)", 2.0, passes=4)
    assert names(survivors([DENSE, accumulated], None, most=10)) == ["Dense()", "EveryStep(accumulate=4)"]
    assert accumulated.expected_seconds == 0.5
    assert names(survivors([DENSE, replace(accumulated, passes=1)], None, most=10)) == ["Dense()"]  # a twin


def test_what_does_not_fit_is_out_and_dense_never():
    found = judged([replace(DENSE, memory_bytes=10**12), replace(INT8, memory_bytes=2001)], None, 10, 2000.0)
    assert reasons(found)["Dense()"] is None
    assert reasons(found)["Int8()"] == "it would remember 2.0 kB beside the model, and 2.0 kB are free for that"
    assert names(survivors([DENSE, replace(INT8, memory_bytes=2001)], None, 10)) == ["Dense()", "Int8()"]


def test_only_what_loses_no_less_in_both_ways_is_dominated():
    """A faster strategy that loses more is no reason against a compressor that loses more."""
    both = told("LocalSGD(period=8) + TopK(density=0.01)", 0.25, strategy=1.5, compressor=2.0)
    assert "LocalSGD(period=8) takes" in (reasons(judged([DENSE, LOCAL, both], None, 10))[both.recipe] or "")
    assert reasons(judged([DENSE, LOCAL, TOPK], None, 10))[TOPK.recipe] is None
    assert LOCAL.expected_passes < TOPK.expected_passes  # a twin that compares products would leave TopK out


def test_of_two_alike_one_stays():
    found = survivors([DENSE, INT8, replace(INT8, recipe="QSGD()")], None, most=10)
    assert names(found) == ["Dense()", "Int8()", "QSGD()"]


def test_what_is_far_behind_is_not_tried_unless_a_prior_may_be_as_wrong(monkeypatch):
    found = [DENSE, LOCAL, told("TopK(density=0.01)", 0.19, compressor=5.0)]  # expected: 0.3 and 0.95 seconds
    assert "3.2 times as long to a loss as LocalSGD(period=8)" in (
        reasons(judged(found, None, 10))[found[2].recipe] or ""
    )
    monkeypatch.setattr(pruning, "MOST_BEHIND", 4.0)
    assert reasons(judged(found, None, 10))[found[2].recipe] is None


def test_few_of_a_kind_and_no_more_than_asked_for():
    few = [told(f"TopK(density={d})", s, compressor=c) for d, s, c in [(0.1, 0.5, 1.5), (0.03, 0.4, 2), (0.01, 0.3, 3)]]
    found = judged([DENSE, *few, replace(INT8, step_seconds=0.6)], None, most=3)
    assert names([each for each in found if each.excluded is None]) == ["Dense()", "Int8()", "TopK(density=0.1)"]
    assert "3 recipes are expected" in (reasons(found)["TopK(density=0.03)"] or "")
    many = judged([DENSE, *few], None, most=10)
    assert "2 recipes of its kind, EveryStep + TopK + Complete" in (reasons(many)["TopK(density=0.01)"] or "")


def test_kinds_have_no_numbers():
    assert kind_of("LocalSGD(8) + Route(Feedback(TopK(0.01)))") == kind_of("LocalSGD(4) + TopK(0.1)")
    assert kind_of("LocalSGD(8) + TopK(0.01)") != kind_of("LocalSGD(8) + Int8()")
