import pytest
import torch

from gossamer.plan.advise.pricing import expected_steps, gradient_findings
from gossamer.plan.advise.pricing.gradient_findings import findings
from gossamer.plan.profile.gradient_statistics import GradientObserver

SHAPE = (96, 128)
PLACES = torch.randperm(96 * 128, generator=torch.Generator().manual_seed(1))[:50]


def noise(draws):
    return torch.randn(SHAPE, generator=draws)


def rank_one(draws):
    return torch.outer(torch.ones(96), torch.linspace(1, 2, 128))


def sparse(draws):
    return torch.zeros(96 * 128).scatter(0, PLACES, 1 + torch.rand(50, generator=draws)).view(SHAPE)


def works(gradient_of, batches=16):
    draws, observer = torch.Generator().manual_seed(3), GradientObserver()
    for _ in range(batches):
        observer.observe({"weight": gradient_of(draws)})
    return {each.family.partition(":")[0]: each.works for each in findings(observer.statistics(), workers=4)}


@pytest.mark.parametrize(
    ("gradient_of", "families"),
    [
        (noise, {"larger batches"}),
        (rank_one, {"low rank", "signs"}),
        (sparse, {"few entries", "low rank", "signs"}),  # fifty entries in few rows are of low rank, too
    ],
)
def test_every_family_that_was_planted_is_found_and_no_other(gradient_of, families):
    found = works(gradient_of)
    assert set(found) == {"few entries", "low rank", "signs", "larger batches"}
    assert {family for family, there in found.items() if there} == families


def test_twins_that_know_nothing_of_noise_find_everything_in_it(monkeypatch):
    monkeypatch.setattr(expected_steps, "SPARSER", 0.0)
    monkeypatch.setattr(expected_steps, "LESS_RANK", 0.0)
    monkeypatch.setattr(gradient_findings, "SIGNS_AGREE", 0.0)
    assert all(works(noise).values())


def test_one_batch_says_nothing_of_signs_and_batches():
    assert set(works(noise, batches=1)) == {"few entries", "low rank"}
