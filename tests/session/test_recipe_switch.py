import pytest
import torch
from support.switched_training import EXACT, ROUNDED, loss_of_chain, sampled_chains
from support.virtual_workers import agree, cluster, heard, network, parameters, train_step

from gossamer import events
from gossamer.errors import LoopError, MismatchError, RecipeError
from gossamer.recipes.recipe import resolve


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_owed_is_sent_whatever_follows(seed):
    """Exactly: whole numbers, and means over four workers, have few bits."""
    (chain,) = sampled_chains(EXACT, 1, 5, seed)
    assert loss_of_chain(chain, 4, seed) == 0


@pytest.mark.parametrize("seed", range(12))
def test_what_is_owed_is_sent_also_where_it_is_rounded(seed):
    (chain,) = sampled_chains(ROUNDED, 1, 5, seed)
    assert loss_of_chain(chain, 4, seed) < 1e-12


def test_all_tell_the_recipe_in_force():
    def work(worker):
        model, optimizer, session = worker.start(network(worker.rank), sgd, "Dense()")
        for step in range(3):
            train_step(model, optimizer, step, worker.rank)
        session.switch("LocalSGD(period=2) + TopK(density=0.1)", reason="the link is slow")
        train_step(model, optimizer, 3, worker.rank)
        assert session.recipe == resolve("LocalSGD(period=2) + TopK(density=0.1)", 2)
        assert "LocalSGD(period=2)" in repr(session)
        assert session.state_dict()["recipe"] == repr(session.recipe)
        return session.steps

    with heard(events.RecipeSwitched) as found:
        assert cluster(work, 2) == [4, 4]
    assert [(each.step, each.before, each.reason) for each in found] == 2 * [
        (3, repr(resolve("Dense()")), "the link is slow")
    ]


def test_the_same_recipe_changes_nothing():
    def work(worker):
        model, optimizer, session = worker.start(network(worker.rank), sgd, "TopK(density=0.1)")
        train_step(model, optimizer, 0, worker.rank)
        before = session._synchronizer
        session.switch("Feedback(TopK(density=0.1))")
        assert session._synchronizer is before

    with heard(events.RecipeSwitched) as found:
        cluster(work, 2)
    assert not found


@pytest.mark.parametrize(
    "recipe",
    [
        "ParameterServer()",
        "Gossip('pairwise')",
        "DGC(density=0.01)",
        "OneBitAdam(warmup=10)",
        "LocalSGD(period=2) + Nonsense()",
    ],
)
def test_what_cannot_be_switched_to_leaves_all_as_it_was(recipe):
    def work(worker, switches):
        model, optimizer, session = worker.start(network(worker.rank), sgd, "TopK(density=0.1)")
        for step in range(6):
            train_step(model, optimizer, step, worker.rank)
            if switches and step == 2:
                with pytest.raises(RecipeError, match=r"Write|Train|Switch|rite|Did you mean|known"):
                    session.switch(recipe)
        return parameters(model)

    refused = agree(cluster(lambda worker: work(worker, True), 2))
    assert torch.equal(refused, agree(cluster(lambda worker: work(worker, False), 2)))


def test_ranks_that_ask_for_different_recipes_lose_nothing():
    def work(worker, switches):
        model, optimizer, session = worker.start(network(worker.rank), sgd, "TopK(density=0.1)")
        for step in range(6):
            train_step(model, optimizer, step, worker.rank)
            if switches and step == 2:
                with pytest.raises(MismatchError, match="ranks 1, 2"):
                    session.switch("Int8()" if worker.rank else "Dense()")
        return parameters(model)

    refused = agree(cluster(lambda worker: work(worker, True), 3))
    assert torch.equal(refused, agree(cluster(lambda worker: work(worker, False), 3)))


@pytest.mark.parametrize("recipe", ["EveryStep()", "EveryStep(delay=1)", "LocalSGD(period=2)", "Gossip()"])
def test_within_a_step_there_is_no_switch(recipe):
    def work(worker):
        model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
        train_step(model, optimizer, 0, worker.rank)
        optimizer.zero_grad()
        model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
        with pytest.raises(LoopError, match="optimizer.step"):
            session.switch("Int8()")
        optimizer.step()
        session.switch("Int8()")
        with session.no_sync():
            model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
            with pytest.raises(LoopError, match="no_sync"):
                session.switch("Dense()")
        with pytest.raises(LoopError, match="no_sync"):
            session.switch("Dense()")

    cluster(work, 2)
