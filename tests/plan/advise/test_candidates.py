from dataclasses import replace

import pytest
import torch

from gossamer.algorithms.compressors import Feedback, Route
from gossamer.algorithms.recipes.parser import parse
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.network import read_network
from gossamer.comm.network.model import Host, Network, Path
from gossamer.errors import GossamerError
from gossamer.plan.advise import candidates as prior
from gossamer.plan.advise.candidates import BETWEEN_NODES, candidates, findings, parameters_of, why_hopeless
from gossamer.plan.profile.gradient_statistics import GradientObserver
from gossamer.plan.profile.synthetic_shapes import assumed, assumed_shapes

WORKERS = 4
NETWORK = read_network("100mbit,20ms", WORKERS)
MODEL = assumed(100_000, resolve(None, WORKERS))
SHAPE = (96, 128)


def drawn(optimizer=torch.optim.AdamW, statistics=None, workers=WORKERS, network=NETWORK, model=MODEL):
    return candidates(model, optimizer, statistics, workers, network)


def statistics(gradient_of, batches=4):
    draws, observer = torch.Generator().manual_seed(3), GradientObserver()
    for _ in range(batches):
        observer.observe({"weight": gradient_of(draws)})
    return observer.statistics()


def noise(draws):
    return torch.randn(SHAPE, generator=draws)


def rank_one(draws):
    return torch.outer(torch.randn(96, generator=draws), torch.randn(128, generator=draws))


PLACES = torch.randperm(96 * 128, generator=torch.Generator().manual_seed(1))[:50]


def sparse(draws):
    return torch.zeros(96 * 128).scatter(0, PLACES, torch.randn(50, generator=draws)).view(SHAPE)


# -- the grammar ------------------------------------------------------------------------------------------------------


def test_a_few_hundred_recipes_of_every_family_stand_next_to_dense():
    found = drawn()
    allowed = [each for each in found if each.excluded is None]
    assert found[0].recipe == "Dense()"
    assert 200 < len(allowed) < 500
    strategies = {type(resolve(each.recipe, WORKERS).strategy).__name__ for each in allowed}
    assert strategies == {"EveryStep", "LocalSGD", "PostLocalSGD", "DiLoCo", "DelayedAveraging", "Gossip"}
    assert len({repr(resolve(each.recipe, WORKERS)) for each in allowed}) == len(allowed)
    assert len({each.recipe for each in found}) == len(found)


def test_whoever_is_allowed_resolves_and_whoever_is_not_gives_the_reason():
    for each in drawn():
        if each.excluded is None:
            resolve(each.recipe, WORKERS)
            continue
        assert len(each.excluded) > 20
    refused = {each.recipe: each.excluded for each in drawn()}["Gossip() + Int8() + RandomPeers(count=1)"]
    assert refused is not None
    with pytest.raises(GossamerError) as error:
        resolve("Gossip() + Int8() + RandomPeers(count=1)", WORKERS)
    assert refused == str(error.value)


@pytest.mark.parametrize(
    ("optimizer", "out", "allowed"),
    [
        (torch.optim.AdamW, "DGC(density=0.01)", "AdamUpdate(OneBit())"),
        (torch.optim.SGD, "AdamUpdate(OneBit())", "DGC(density=0.01)"),
        (torch.optim.RMSprop, "DeMo()", "Int8()"),
    ],
)
def test_compressors_that_do_anothers_work_are_out(optimizer, out, allowed):
    found = {each.recipe: each.excluded for each in drawn(optimizer)}
    assert f"this script trains with {optimizer.__name__}" in (found[out] or "")
    assert found[allowed] is None


def test_fragments_need_as_many_tensors():
    one = {each.recipe: each.excluded for each in drawn(model=assumed(100, resolve(None, WORKERS)))}
    refused = [recipe for recipe, why in one.items() if "fragments=4" in recipe and why and "tensors" in why]
    assert len(refused) == 2 * len(prior.DIFFERENCES)


def test_alone_there_is_nothing_to_choose():
    assert [each.recipe for each in drawn(workers=1)] == ["Dense()"]


def test_sites_are_used_where_there_are_some():
    host = Host(up_bits_per_second=1e9, down_bits_per_second=1e9)
    hosts = tuple(replace(host, site=site) for site in "aabb")
    sites = Network(hosts=hosts, paths={frozenset("ab"): Path(round_trip_seconds=0.05)})
    found = {each.recipe: each.excluded for each in drawn(network=sites)}
    assert found["Hierarchy(per_node=2)"] is None
    assert all(found[f"Hierarchy(per_node=2, between={each})"] is None for each in BETWEEN_NODES)
    assert found["LocalSGD(period=4, per_site=2)"] is None
    assert not [each for each in drawn() if "per_" in each.recipe]


def test_parameters_are_in_the_models_own_order_again():
    assert {name: tuple(each.shape) for name, each in parameters_of(MODEL).items()} == assumed_shapes(100_000)
    assert list(parameters_of(MODEL)) == list(assumed_shapes(100_000))


# -- what gradients say -----------------------------------------------------------------------------------------------


def test_in_noise_neither_few_entries_nor_low_ranks_find_anything():
    found = {each.recipe: each.excluded for each in drawn(statistics=statistics(noise))}
    assert "sparsification would lose almost all" in (found["TopK(density=0.01)"] or "")
    assert "low-rank approximation would lose almost all" in (found["PowerSGD(rank=1)"] or "")
    assert found["Int8()"] is None
    assert found["LocalSGD(period=4) + TopK(density=0.03)"] is None  # differences of parameters are no gradients


def test_a_rank_one_gradient_allows_low_ranks_at_no_loss_and_no_sparse_choice_for_less():
    seen = statistics(lambda draws: torch.outer(torch.ones(96), torch.ones(128)))
    found = {each.recipe: each for each in drawn(statistics=seen)}
    assert found["PowerSGD(rank=1)"].excluded is None
    assert found["PowerSGD(rank=1)"].compressor_passes == pytest.approx(1.0, abs=0.01)
    assert found["TopK(density=0.01)"].excluded is not None
    assert drawn()[0].compressor_passes == 1.0
    unreported = {each.recipe: each for each in drawn()}
    assert unreported["PowerSGD(rank=1)"].compressor_passes > 1.3


def test_a_sparse_gradient_allows_few_entries_at_no_loss():
    seen = statistics(sparse)
    found = {each.recipe: each for each in drawn(statistics=seen)}
    assert found["TopK(density=0.01)"].excluded is None
    assert found["TopK(density=0.01)"].compressor_passes == pytest.approx(1.0, abs=0.01)
    assert found["PowerSGD(rank=1)"].compressor_passes > 1.2


def test_a_mutant_that_forgets_noise_would_allow_what_finds_nothing(monkeypatch):
    seen = statistics(noise)
    assert why_hopeless("TopK(density=0.01)", seen) is not None
    monkeypatch.setattr(prior, "SPARSER", 0.0)
    monkeypatch.setattr(prior, "LESS_RANK", 0.0)
    assert why_hopeless("TopK(density=0.01)", seen) is None
    assert why_hopeless("PowerSGD(rank=1)", seen) is None


def test_accumulating_is_free_in_noise_and_costs_all_its_passes_without():
    text = "EveryStep(accumulate=4)"
    loud = {each.recipe: each for each in drawn(statistics=statistics(noise, batches=16))}[text]
    still = {each.recipe: each for each in drawn(statistics=statistics(lambda _: torch.ones(SHAPE)))}[text]
    assert loud.strategy_passes == pytest.approx(1.0, abs=0.2)
    assert still.strategy_passes == pytest.approx(4.0)


# -- the prior --------------------------------------------------------------------------------------------------------


def test_every_text_of_the_prior_is_a_recipe_and_dense_loses_nothing():
    for text in (*prior.EVERY_STEP, *prior.DIFFERENCES, *prior.LETTERS, *prior.LOCAL_STEPS, *prior.GOSSIP):
        parse(text)
    assert prior.EVERY_STEP["Dense()"].passes(torch.optim.AdamW) == 1.0
    for table in (prior.EVERY_STEP, prior.DIFFERENCES, prior.LETTERS, prior.LOCAL_STEPS, prior.GOSSIP):
        assert all(gap.adam >= 0 and gap.sgd >= 0 for gap in table.values())


def test_a_gap_is_turned_into_passes_by_what_longer_training_gains():
    """TopK(0.01) under AdamW ended at 3.068 after 100 steps, where Dense() was between its 28th (3.162) and 42nd."""
    passes = prior.EVERY_STEP["TopK(density=0.01)"].passes(torch.optim.AdamW)
    assert 100 / 42 < passes < 100 / 28
    assert prior.EVERY_STEP["TopK(density=0.01)"].passes(torch.optim.SGD) < 1.5


def test_without_statistics_no_gap_changes():
    assert prior.gap_share("TopK(density=0.01)", None) == 1.0
    assert prior.gap_share("Int8()", statistics(noise)) == 1.0


def test_sharing_is_added_by_resolving_and_not_written():
    recipe = resolve("TopK(density=0.01)", WORKERS)
    assert isinstance(recipe.compressor, Route)
    assert isinstance(recipe.compressor.inner, Feedback)


# -- gradient findings -------------------------------------------------------------------------------------------------


def steady_rank_one(draws):
    return torch.outer(torch.ones(96), torch.linspace(1, 2, 128))


def positive_sparse(draws):
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
        (steady_rank_one, {"low rank", "signs"}),
        (positive_sparse, {"few entries", "low rank", "signs"}),  # fifty entries in few rows are of low rank, too
    ],
)
def test_every_family_that_was_planted_is_found_and_no_other(gradient_of, families):
    found = works(gradient_of)
    assert set(found) == {"few entries", "low rank", "signs", "larger batches"}
    assert {family for family, there in found.items() if there} == families


def test_mutants_that_know_nothing_of_noise_find_everything_in_it(monkeypatch):
    monkeypatch.setattr(prior, "SPARSER", 0.0)
    monkeypatch.setattr(prior, "LESS_RANK", 0.0)
    monkeypatch.setattr(prior, "SIGNS_AGREE", 0.0)
    assert all(works(noise).values())


def test_one_batch_says_nothing_of_signs_and_batches():
    assert set(works(noise, batches=1)) == {"few entries", "low rank"}


# -- unequal workers ---------------------------------------------------------------------------------------------------


SPEEDS = (1.0, 1.0, 1.0, 0.2)


def by_speed(speeds=SPEEDS, batch=8):
    return candidates(MODEL, torch.optim.AdamW, None, WORKERS, NETWORK, speeds, batch)


def test_recipes_by_speed_are_candidates_where_speeds_differ():
    plain = {each.recipe for each in drawn()}
    found = {each.recipe: each for each in by_speed() if each.recipe not in plain}
    assert {each.recipe for each in by_speed((0.5,) * WORKERS)} == plain
    balanced = [each for each in found.values() if each.excluded is None and each.recipe not in prior.WITHOUT_WAITING]
    assert len(balanced) > 100
    for each in balanced:
        assert resolve(each.recipe, WORKERS).strategy.steady_stage.follows_speed
    assert "EveryStep(global_batch=256, batch=8, balance=True)" in found
    assert "LocalSGD(period=8, balance=True) + Float4()" in found


def test_a_period_by_speed_needs_more_steps_for_as_many_samples():
    """20, 20, 20 and 4 local steps are 0.8 of the samples of 80."""
    recipe = "DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5{}) + Float4()"
    found = {each.recipe: each for each in by_speed()}
    plain, balanced = (found[recipe.format(text)] for text in ("", ", balance=True"))
    assert balanced.strategy_passes == pytest.approx(80 / 64 * plain.strategy_passes)
    assert balanced.compressor_passes == plain.compressor_passes


def test_recipes_without_waiting_are_candidates_if_speeds_differ():
    names = {each.recipe for each in by_speed() if each.excluded is None}
    assert set(prior.WITHOUT_WAITING) <= names
    assert not set(prior.WITHOUT_WAITING) & {each.recipe for each in by_speed((1.0,) * WORKERS)}
