"""Admission by comparison: what is far from the usual is refused, from the first round on, and the others count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.federations import Federation, federate, one_pass
from support.rounds_by_hand import rounds_of
from torch import Tensor, nn

from gossamer.algorithms.strategies.federated import (
    SCAFFOLD,
    CentralPrivacy,
    CohortSummary,
    FedAvg,
    FedBuff,
    FederatedStrategy,
    FedNova,
    LocalPrivacy,
    LocalWork,
    Privacy,
)
from gossamer.errors import MalformedError, NotFinite
from gossamer.federated import Round, Update
from gossamer.federated.client.local_training import Trainer
from gossamer.federated.client.script import Train, Trained
from gossamer.federated.messages import THE_SERVER, Report, encode
from gossamer.federated.server.admission import FEWEST, ContributionAdmission, ContributionLimits
from gossamer.federated.server.aggregation import ContributionSum, WeightedSum
from gossamer.federated.virtual.simulate import Simulation

LIAR = 2
Lie = Callable[[Trained], Trained]


def sent(value: float, admission: ContributionAdmission, into: ContributionSum, client: int = 0, **work: int) -> None:
    """A contribution of four equal numbers."""
    told = LocalWork(**{"samples": 1, "steps": 1} | work)
    admission.admit(into, client, [torch.full((4,), value)], float(told.samples), told)


def test_a_norm_far_from_the_usual_is_refused_once_there_is_a_usual() -> None:
    admission, into = ContributionAdmission(ContributionLimits(largest_ratio=100.0), FedAvg()), WeightedSum()
    for size in range(1, FEWEST + 1):
        assert not admission.compares(into)
        sent(float(size), admission, into, client=size)
    assert (into.count, len(into.held), admission.compares(into)) == (0, FEWEST, True)
    assert admission.compare(into) == {}
    assert (into.count, into.held, admission.compares(into)) == (FEWEST, {}, False)
    assert torch.equal(into.means()[0], torch.full((4,), 5.5))
    sent(550.0, admission, into)
    with pytest.raises(MalformedError, match=r"norm is 1\.4e\+03, above 1\.2e\+03"):
        sent(700.0, admission, into)
    again = ContributionAdmission(ContributionLimits(largest_ratio=100.0), FedAvg())
    sent(700.0, again, WeightedSum())  # it knows of none
    again.load_state_dict(admission.state_dict())
    with pytest.raises(MalformedError):
        sent(700.0, again, into)
    assert again.state_dict() == admission.state_dict()


def test_the_first_contributions_are_compared_with_each_other() -> None:
    admission, into = ContributionAdmission(ContributionLimits(), FedAvg()), WeightedSum()
    for client, value in enumerate((1.0, 1e30, 2.0)):
        sent(value, admission, into, client)
    ((client, why),) = admission.compare(into).items()
    assert client == 1
    assert "update's norm is 2e+30, above 4e+03" in why
    assert into.means()[0].tolist() == [1.5] * 4
    sent(1e30, admission, into, client=7)  # beside two that are known
    assert list(admission.compare(into)) == [7]
    assert into.count == 2


def test_nothing_is_held_where_any_size_will_do() -> None:
    admission, into = ContributionAdmission(ContributionLimits(largest_ratio=None), FedAvg()), WeightedSum()
    sent(1.0, admission, into)
    assert (into.count, into.held) == (1, {})


@pytest.mark.parametrize(
    ("strategy", "claim", "why"),
    [
        (FedAvg(), {"samples": 10**9}, r"its weight is 1e\+09, above 8e\+03"),
        (FedNova(), {"samples": 10**9, "steps": 10**9}, r"its number of steps is 1e\+09, above 2e\+03"),
        (FedBuff(), {"samples": 10**9, "steps": 10**9}, None),
        (SCAFFOLD(), {"samples": 10**9, "steps": 10**9}, None),
    ],
)
def test_claims_far_from_the_usual_are_refused_where_they_count(
    strategy: FederatedStrategy, claim: dict[str, int], why: str | None
) -> None:
    admission, into = ContributionAdmission(ContributionLimits(), strategy), WeightedSum()
    for client in range(FEWEST):
        sent(1.0, admission, into, client, samples=8, steps=2)
    assert admission.compare(into) == {}
    if why is None:
        sent(1.0, admission, into, **claim)
    else:
        with pytest.raises(MalformedError, match=why):
            sent(1.0, admission, into, **claim)
    assert into.count == FEWEST + (why is None)


# -- whole federations ---------------------------------------------------------------------------------------------


def claiming(**work: int) -> Lie:
    return lambda trained: replace(trained, work=replace(trained.work, **work))


def shouting(value: float) -> Lie:
    return lambda trained: replace(trained, flat=trained.flat + value)


def lying_at_first(lie: Lie) -> Any:
    """A trainer's answers, of which one device's in the first round is a lie."""
    honest = Trainer.__call__

    def answer(trainer: Trainer, op: Train) -> Trained:
        trained = honest(trainer, op)
        return lie(trained) if op.client == LIAR and op.task.round == 0 else trained

    return answer


def lied_to(monkeypatch: pytest.MonkeyPatch, lie: Lie, recipe: str, **options: Any) -> Federation:
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__call__", lying_at_first(lie))
        return federate(recipe, rounds=3, **options)


def absent_at_first(model: nn.Module, told: Round) -> Update:
    """The same without the liar's first round."""
    return Update(samples=0) if told.client == LIAR and told.index == 0 else one_pass(model, told)


@pytest.mark.parametrize(
    ("recipe", "lie"),
    [
        ("FedNova(fraction=1.0, local_epochs=2)", claiming(steps=10**9)),
        ("FedNova(fraction=1.0, local_steps=2)", claiming(steps=10**9)),
        ("FedAvg(fraction=1.0)", claiming(samples=10**9)),
        ("FedNova(fraction=1.0)", claiming(samples=10**9)),
    ],
)
def test_who_claims_to_have_done_it_all_does_not_count(recipe: str, lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lied_to(monkeypatch, lie, recipe, clients=10)
    assert list(run.commits[0].refused) == [LIAR]
    assert [len(each.reports) for each in run.commits] == [9, 10, 10]
    without = federate(recipe, rounds=3, clients=10, function=absent_at_first)
    assert torch.allclose(run.parameters, without.parameters, rtol=0, atol=1e-12)
    if "local_steps" not in recipe:  # the twin: believes whatever it is told
        twin = lied_to(monkeypatch, lie, recipe, clients=10, admission=ContributionLimits(largest_ratio=None))
        assert not torch.allclose(twin.parameters, without.parameters, rtol=0, atol=0.1)


@pytest.mark.parametrize("recipe", ["FedAvg(fraction=1.0)", "FedOpt('adam', learning_rate=0.1, fraction=1.0)"])
def test_one_huge_update_in_the_first_round_ruins_nothing(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lied_to(monkeypatch, shouting(1e30), recipe, clients=5)
    assert list(run.commits[0].refused) == [LIAR]
    assert [len(each.reports) for each in run.commits] == [4, 5, 5]
    without = federate(recipe, rounds=3, clients=5, function=absent_at_first)
    assert torch.allclose(run.parameters, without.parameters, rtol=0, atol=1e-12)
    assert run.parameters.abs().max() < 100


def small_step(model: nn.Module, told: Round) -> Update:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    return Update(samples=2)


def test_a_version_whose_memory_is_not_finite_is_never_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each number that came is finite, and its square is not."""
    recipe, versions = "FedOpt('adam', learning_rate=0.1, fraction=1.0)", list[dict[str, Tensor]]()

    def noted(record: object) -> None:
        server = simulation.engine._rounds.model
        versions.append({key: each.clone() for key, each in {"parameters": server.parameters, **server.memory}.items()})

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__call__", lying_at_first(shouting(1e30)))
        simulation = Simulation(
            small_step, lambda: nn.Linear(4, 1), recipe, clients=5, rounds=3, on_round=noted,
            admission=ContributionLimits(largest_ratio=None),
        )  # fmt: skip
        simulation.run()
    assert "round 0 is given up" in caplog.text
    assert len(versions) == 3
    assert all(each.isfinite().all() for version in versions for each in version.values())
    assert all(version["parameters"].abs().max() < 100 for version in versions)


def test_a_model_stays_at_its_version_where_the_next_one_has_no_numbers() -> None:
    model = federate("FedOpt('adam', learning_rate=0.1, fraction=1.0)", clients=2, rounds=1).rounds.model
    before = {key: each.clone() for key, each in {"parameters": model.parameters, **model.memory}.items()}
    cohort = CohortSummary(contributions=1, clients=2, steps=1.0)
    with pytest.raises(NotFinite, match="left the range"):
        model.apply((torch.full_like(model.parameters, 1e200),), cohort)
    assert model.version == 1
    assert all(torch.equal(each, before[key]) for key, each in {"parameters": model.parameters, **model.memory}.items())


@pytest.mark.parametrize(
    ("strategy", "refused"), [(FedNova(local_steps=5), True), (FedNova(), False), (FedAvg(local_steps=5), False)]
)
def test_more_steps_than_the_recipe_asks_for_are_refused_where_they_count(
    strategy: FederatedStrategy, refused: bool
) -> None:
    admission = ContributionAdmission(ContributionLimits(), strategy)
    for steps in (5, 6):
        report = encode(Report(samples=1, steps=steps, layout="x"))
        if refused and steps > 5:
            with pytest.raises(MalformedError, match=r"claims 6 steps, .* local_steps=5: take batches from"):
                admission.report(report, THE_SERVER, "x")
        else:
            assert admission.report(report, THE_SERVER, "x").steps == steps


@pytest.mark.parametrize(
    ("privacy", "ratio"),
    [(None, 1000.0), (LocalPrivacy(noise=4.0, delta=0.01), 1000.0), (CentralPrivacy(noise=4.0, delta=0.01), None)],
)
def test_who_adds_noise_says_whether_contributions_may_be_compared(
    privacy: Privacy | None, ratio: float | None
) -> None:
    """One device's numbers decide over another's only where they left it with noise."""
    assert rounds_of(FedAvg(fraction=1.0, privacy=privacy), 4).admission.limits.largest_ratio == ratio
