"""The law of a switch: sum of what was sent + what is owed = sum of what was given, over random chains of recipes."""

import pytest
import torch
from support.nightly import nightly
from support.switched_training import EXACT, ROUNDED, loss_of_chain, sampled_chains

from gossamer.errors import MismatchError
from gossamer.train.session import recipe_switch


@pytest.mark.parametrize("seed", [*range(4), *nightly(*range(4, 12))])
def test_what_is_owed_is_sent_whatever_follows(seed):
    """Exactly: whole numbers, and means over four workers, have few bits."""
    (chain,) = sampled_chains(EXACT, 1, 5, seed)
    assert loss_of_chain(chain, 4, seed) == 0


@pytest.mark.parametrize("seed", [*range(4), *nightly(*range(4, 12))])
def test_what_is_owed_is_sent_also_where_it_is_rounded(seed):
    (chain,) = sampled_chains(ROUNDED, 1, 5, seed)
    assert loss_of_chain(chain, 4, seed) < 1e-12


# -- broken twins of the law -------------------------------------------------------------------------------------------


def scaled(pending, factor):
    return {name: tensor * factor for name, tensor in pending.items()}


TWINS = {
    "dropped": (
        "unsent_gradients",
        lambda whole: lambda *a: {},
        ["TopK(density=0.05)", "Feedback(RandomK(density=0.05))"],
    ),
    "doubled": ("unsent_gradients", lambda whole: lambda *a: scaled(whole(*a), 2), ["TopK(density=0.05)", "Dense()"]),
    "wrong sign": (
        "unsent_gradients",
        lambda whole: lambda *a: scaled(whole(*a), -1),
        ["OneBit()", "LocalSGD(period=3)"],
    ),
    "not taken up": ("take_up", lambda whole: lambda pending, buckets: {}, ["OneBit()", "EveryStep(delay=1)"]),
    "dropped on its way": ("on_their_way", lambda whole: lambda before: {}, ["EveryStep(delay=2)", "OneBit()"]),
    "summed": (
        "_mean",
        lambda whole: lambda *a: (scaled(whole(*a)[0], 4), 0.0),
        ["TopK(density=0.05)", "EveryStep(accumulate=2)"],
    ),
    "not merged": ("merge_parameters", lambda whole: lambda *a: 0.0, ["LocalSGD(period=9)", "EveryStep()"]),
}


@pytest.mark.parametrize("twin", TWINS)
def test_the_law_finds_a_broken_switch(twin, monkeypatch):
    name, broken, chain = TWINS[twin]
    assert loss_of_chain(chain, 4, 3) < 1e-12
    monkeypatch.setattr(recipe_switch, name, broken(getattr(recipe_switch, name)))
    try:
        lost = loss_of_chain(chain, 4, 3)
    except (AssertionError, MismatchError):
        lost = 1.0  # the workers hold different bits
    assert lost > 0.1


def test_the_law_finds_differences_of_parameters_that_are_dropped(monkeypatch):
    chain = ["LocalSGD(period=2) + TopK(density=0.05)", "Dense()"]
    assert loss_of_chain(chain, 4, 3) == 0
    monkeypatch.setattr(recipe_switch, "unsent", lambda bucket, *_: torch.zeros_like(bucket.flat))
    assert loss_of_chain(chain, 4, 3) > 0.1
