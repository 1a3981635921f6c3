"""Gossip as a strategy: which rule a term means, its step size, and what it does not go with."""

from __future__ import annotations

import pytest
from support.gossip_rounds import compressor_of

from gossamer.algorithms.compressors import Dense
from gossamer.algorithms.compressors.distortion import kept_share
from gossamer.algorithms.gossip.rules import Averaging, Choco, PushSum
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies import Gossip
from gossamer.algorithms.strategies.gossip import safe_step_size
from gossamer.errors import RecipeError

# -- the step size ----------------------------------------------------------------------------------------------------


def test_the_step_follows_what_a_letter_holds() -> None:
    found = {text: safe_step_size(compressor_of(text)) for text in ("Int8()", "TopK(density=0.1)", "OneBit()")}
    assert found == {"Int8()": 0.5, "TopK(density=0.1)": 0.22, "OneBit()": 0.32}
    assert Gossip(step_size=0.07).rule(compressor_of("Int8()")) == Choco(compressor_of("Int8()"), 0.07)
    assert kept_share(compressor_of("Dense(dtype='bfloat16')")) > 0.999


@pytest.mark.parametrize("text", ["Warmup(TopK(density=0.1), steps=5)", "Route(TopK(density=0.1), smallest=10000)"])
def test_the_step_is_that_of_what_is_sent_in_the_end(text: str) -> None:
    assert safe_step_size(compressor_of(text)) == safe_step_size(compressor_of("TopK(density=0.1)"))


# -- the term ---------------------------------------------------------------------------------------------------------


def test_terms_choose_their_rule() -> None:
    assert Gossip().rule(Dense()) == Averaging()
    assert Gossip(step_size=0.5).rule(Dense()) == Averaging(0.5)
    assert Gossip("push-sum").rule(Dense()) == PushSum()
    assert Gossip().rule(Dense(dtype="bfloat16")) == Choco(Dense(dtype="bfloat16"), 0.5)


def test_all_meet_about_every_world_passes() -> None:
    assert [Gossip(period=period).rounds_apart(8) for period in (1, 2, 3, 8, 100)] == [8, 4, 3, 1, 1]


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("Gossip()", "Gossip() + Dense() + Complete()"),
        (
            "Gossip('push-sum', period=2) + Exponential()",
            "Gossip(mixing='push-sum', period=2) + Dense() + Exponential()",
        ),
        ("Gossip() + TopK(0.01) + Ring()", "Gossip() + Route(TopK(density=0.01)) + Ring()"),
        ("Gossip() + Int8()", "Gossip() + Route(Int8()) + Complete()"),
        ("Gossip('pairwise') + RandomPeers()", "Gossip(mixing='pairwise') + Dense() + RandomPeers()"),
    ],
)
def test_recipes_add_no_second_memory(text: str, resolved: str) -> None:
    found = resolve(text, 8)
    assert repr(found) == resolved
    assert resolve(found, 8) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Gossip() + Feedback(TopK(0.01))", r"Feedback and DeMo would send errors twice.*Write Gossip\(\) \+ TopK"),
        ("Gossip() + Route(Sharded(Int8()))", r"no group to divide the work among"),
        ("Gossip('push-sum') + Int8()", r'Write Gossip\("push-sum"\) \+ Dense\(\), or Gossip\(\) with a compressor'),
        ("Gossip() + Int8() + RandomPeers()", r"neighbors of RandomPeers\(\) change"),
        ("Gossip() + Int8() + Exponential(one_peer=True)", r"must receive every message"),
        ("Gossip() + TernGrad()", r"copies would diverge"),
        ("Gossip() + DGC(0.01)", r"applies the optimizer's momentum"),
        ("Gossip('pairwise') + Warmup(TopK(0.01), steps=5)", "never reach consensus"),
        ("Gossip('pairwise') + Route(TopK(0.01), smallest=10000)", "never reach consensus"),
        ("Gossip() + Warmup(TernGrad(), steps=5)", "copies would diverge"),
        ("Gossip('pull-sum')", r'"symmetric", "push-sum" or "pairwise"'),
        ("Gossip(period=0)", r"1 or more, got 0"),
        ("Gossip(step_size=1.5)", r"in \(0, 1\], got 1.5"),
        ("Gossip('push-sum', step_size=0.5)", r'Write Gossip\("push-sum"\), or Gossip\(step_size=0.5\)'),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve(text, 8)
