"""What does not go together in a federated recipe, and how it is written."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gossamer.algorithms.compressors import Compressor, TopK
from gossamer.algorithms.recipes.catalog import NOUNS
from gossamer.algorithms.recipes.parser import parse
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated_rules import (
    FedAvg,
    FedBuff,
    FedNova,
    FedOpt,
    FedProx,
    Median,
    SecureAggregation,
)
from gossamer.errors import RecipeError


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "FedAvg(secure=SecureAggregation(), aggregator=Median())",
            r"receives their sum only. Write FedAvg\(secure=Sec",
        ),
        ("FedBuff(secure=SecureAggregation())", r"reports separately. Write FedAvg\(secure=.*, or FedBuff\(\)"),
        ("FedNova(secure=SecureAggregation())", r"receives sums only. Write FedAvg\(secure=.*, or FedNova\(\)"),
        ("SCAFFOLD(aggregator=MultiKrum())", r"Write SCAFFOLD\(\), or FedAvg\(aggregator=MultiKrum\(\)\)"),
        ("FedAvg(aggregator=Median()) + TopK(0.01)", r"not change. Write FedAvg\(aggregator=Median\(\)\) \+ Int8\(\)"),
        ("FedAvg(aggregator=TrimmedMean()) + RandomK(0.01)", r"or FedAvg\(\) \+ RandomK\(density=0.01\)"),
        ("FedAvg(aggregator=Median()) + TernGrad()", "TernGrad.* sends few entries"),
        ("FedAvg() + Ring()", r"with the server only, so Ring\(\) would have no effect. Omit it"),
        ("FedAvg(pull=Dense())", "is the default. Omit it"),
        ("FedAvg(pull=Feedback(TopK(0.1)))", r"would send it twice. Write pull=TopK\(density=0.1\)"),
        ("FedAvg(pull=DGC())", r"pull sends parameters. Write pull=Int8\(\)"),
        ("FedAvg() + DGC()", r"Write FedAvg\(\) \+ TopK\(density=0.01\), or EveryStep\(\) with this compressor"),
        ("FedAvg() + MicroAdam(TopK(0.01))", r"Write FedAvg\(\) \+ TopK\(density=0.01\)"),
        ("FedAvg() + Feedback(TopK(0.01), rule='ef21')", 'omit rule="ef21"'),
        ("FedAvg(pull=Feedback(TopK(0.01), rule='ef21'))", "omit rule|would send it twice"),
        ("FedAvg() + Hierarchical(Int8(), per_node=2)", r"Write Int8\(\) instead"),
        ("FedAvg() + Warmup(TopK(0.01))", "Write a number of steps"),
        ("Median() + TopK(0.01)", r"argument of a federated strategy, .* Write FedAvg\(aggregator=Median\(\)\)"),
        ("SecureAggregation()", r"secure=, .* Write FedAvg\(secure=SecureAggregation\(\)\)"),
        ("LocalSGD(8) + WeightedMean()", r"Write FedAvg\(aggregator=WeightedMean\(\)\)"),
        ("FedAvg(aggregator=TopK(0.1))", r"aggregator of FedAvg must be an aggregator, got TopK"),
        ("FedAvg(secure=Int8())", r"secure of FedAvg must be SecureAggregation\(...\) or None, got Int8"),
        ("FedAvg(local_steps=2, local_epochs=1)", r"Write FedAvg\(local_steps=2\) or FedAvg\(local_epochs=1\)"),
        ("FedProx", r"needs mu. Write FedProx\(mu=0.01, fraction=0.1\)"),
        ("FedProx(-1)", r"Write FedProx\(mu=0.01\)"),
        ("FedProx(0.1, 0.5)", "may be given without names"),
        ("SCAFFOLD(server_learning_rate=0)", r"Write SCAFFOLD\(\)"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_line_to_write(text: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        resolve(text)


@pytest.mark.parametrize(
    "text",
    [
        "FedAvg(aggregator=Median(), pull=Int8()) + Int8()",
        "FedAvg(aggregator=MultiKrum(), fraction=0.5) + TopK(0.01)",
        "FedAvg(aggregator=TrimmedMean(share=0.2)) + TopK(0.9)",
        "FedAvg(fraction=0.1, secure=SecureAggregation(), pull=Int8())",
        "SCAFFOLD(secure=SecureAggregation(bits=20))",
        "FedBuff(5, aggregator=Median(), staleness=20) + Int8()",
        "FedOpt('torch.SGD', learning_rate=1.0, beta1=0.9, local_epochs=3) + Chain(TopK(0.01), Int8())",
        "FedProx(0.01, fraction=0.5, stale_after=4) + TopK(0.01)",
        "FedNova(local_epochs=2) + PowerSGD(2)",
    ],
)
def test_what_goes_together_reads_back(text: str) -> None:
    recipe = resolve(text)
    assert resolve(repr(recipe)) == recipe
    assert parse(repr(recipe)).terms == recipe.terms
    assert eval(repr(recipe.strategy), {**NOUNS}) == recipe.strategy


def test_the_first_argument_is_the_strategys_own() -> None:
    assert FedProx(0.5).mu == FedProx(mu=0.5).mu == 0.5
    assert FedOpt("yogi").optimizer == "yogi"
    assert FedBuff(3).buffer == 3
    assert FedAvg(0.5).fraction == FedNova(0.5).fraction == 0.5
    assert repr(FedProx(0.5, fraction=0.2)) == "FedProx(mu=0.5, fraction=0.2)"
    with pytest.raises(TypeError):
        FedProx(0.5, 0.2)  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class Refusing(SecureAggregation):
    """Masks that say what they cannot add."""

    def refuses(self, compressor: Compressor) -> str | None:
        few = any(isinstance(term, TopK) for term in compressor.held())
        return "it selects indices. Write RandomK(0.01)." if few else None


def test_masks_are_asked_about_compressors() -> None:
    strategy = FedAvg(secure=Refusing())
    with pytest.raises(RecipeError, match=r"indices.* Write RandomK\(0.01\)"):
        resolve(strategy + TopK(density=0.01))
    assert resolve(strategy).strategy == strategy


def test_cohorts_are_shares_of_all_clients() -> None:
    assert [FedAvg(0.1).cohort(clients) for clients in (1, 9, 10, 11, 30, 1000)] == [1, 1, 1, 2, 3, 100]
    assert FedAvg(1.0).cohort(7) == 7
    assert FedAvg(aggregator=Median()).cohort(40) == 4
