"""Federation: terms of a recipe, and the configuration of rounds."""

from __future__ import annotations

import doctest

import pytest
import torch
from support.federations import federate

from gossamer import federated
from gossamer.algorithms.compressors import Feedback, Route
from gossamer.errors import RecipeError
from gossamer.federated.federation import config_by_round, recipe_terms

SLOW_DOWN = "FedAvg(fraction=1.0, local_steps=1, pull=Route(TopK(0.25), rest=TopK(0.25)))"


def test_what_goes_up_is_fed_back_and_what_comes_down_is_not() -> None:
    terms = recipe_terms("FedAvg(pull=TopK(0.1)) + TopK(0.01)")
    assert any(isinstance(each, Feedback) for each in terms.compressor.held())
    assert isinstance(terms.pull, Route)
    assert not any(isinstance(each, Feedback) for each in terms.pull.held())
    assert recipe_terms("FedAvg()").pull is None


def test_versions_that_come_down_in_parts_come_to_what_they_are() -> None:
    """What one link loses is in the next: once the model rests, so does what devices know of it."""
    run = federate(SLOW_DOWN, clients=4, rounds=120)
    whole = federate("FedAvg(fraction=1.0, local_steps=1)", clients=4, rounds=120)
    assert torch.allclose(run.parameters, whole.parameters, rtol=0, atol=1e-6)


def test_the_mutant_that_feeds_back_what_comes_down_is_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = type(recipe_terms("FedAvg()").strategy)
    fed_back = property(lambda self: self.pull and Route(Feedback(self.pull.inner), rest=Feedback(self.pull.rest)))
    whole = federate("FedAvg(fraction=1.0, local_steps=1)", clients=4, rounds=120)
    monkeypatch.setattr(strategy, "pull_compressor", fed_back)
    run = federate(SLOW_DOWN, clients=4, rounds=120)
    assert not torch.allclose(run.parameters, whole.parameters, rtol=0, atol=1e-6)


def test_workers_in_step_are_no_federation() -> None:
    with pytest.raises(RecipeError, match="FedAvg"):
        recipe_terms("LocalSGD(period=8)")


def test_it_is_the_same_or_goes_by_the_index() -> None:
    assert config_by_round(None) is None
    assert config_by_round({"rate": 0.5, "warm": True, "name": "a", "none": None})(3)["rate"] == 0.5
    assert config_by_round(lambda index: {"rate": 0.5**index})(3) == {"rate": 0.125}


def test_what_devices_could_not_be_sent_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'rate' is tensor\(1\.\).* write float"):
        config_by_round({"rate": torch.tensor(1.0)})  # type: ignore[dict-item]
    tells = config_by_round(lambda index: {"rate": [index]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="'rate' is"):
        tells(0)


@pytest.mark.parametrize("name", ["partition", "simulate"])
def test_examples_in_docstrings_print_their_results(name: str) -> None:
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    for test in finder.find(getattr(federated, name), name, globs={}):
        runner.run(test)
    assert (runner.tries > 0, runner.failures) == (True, 0)
