"""A run that switched its recipe, saved and loaded, goes on to the same bits."""

import pytest
import torch
from support.nightly import once_each
from support.virtual_workers import agree, cluster, network, parameters, train_step

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import CheckpointError


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


CHAINS = [
    ["TopK(density=0.1)", "Dense()"],
    ["TopK(density=0.1)", "EveryStep(delay=2) + Feedback(Sharded(Int8()))"],
    ["EveryStep(delay=1) + OneBit()", "LocalSGD(period=3) + TopK(density=0.1)"],
    ["Dense()", "Warmup(TopK(density=0.1), steps=3)"],
    ["LocalSGD(period=2) + TopK(density=0.1)", "Feedback(RandomK(density=0.1))"],
    ["DiLoCo(period=3)", "PostLocalSGD(period=2, start=2)"],
    ["Gossip()", "LocalSGD(period=2, per_site=2)"],
    ["Dense()", "Gossip()"],
    ["Hierarchical(OneBit(), per_node=2)", "TopK(density=0.1)"],
    ["TopK(density=0.1)", "DelayedAveraging(delay=2) + TopK(density=0.1)"],
]


@once_each("chain, stop", CHAINS, [3, 4, 7])
def test_a_run_that_switched_resumes_to_the_same_bits(chain, stop, tmp_path):
    """At the switch, one step after it, and later. The script attaches with its own recipe each time."""
    first, second = chain

    def work(worker, begin, end, saves=False):
        model, optimizer, session = worker.start(network(worker.rank), adam, first)
        if begin:
            session.load(tmp_path)
            assert (session.steps, session.recipe) == (begin, resolve(second, worker.world))
        for step in range(begin, end):
            train_step(model, optimizer, step, worker.rank)
            if step == 2:
                session.switch(second)
        if saves:
            session.save(tmp_path)
        return parameters(model)

    whole = cluster(lambda worker: work(worker, 0, 11), 4)
    cluster(lambda worker: work(worker, 0, stop, saves=True), 4)
    resumed = cluster(lambda worker: work(worker, stop, 11), 4)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_another_number_of_workers_goes_on_in_the_recipe_in_force(tmp_path):
    """With the mean of what is owed, which the first step then adds."""

    def work(worker, begin, saves):
        model, optimizer, session = worker.start(network(0), sgd, "TopK(density=0.1)")
        session.load(tmp_path)
        assert session.steps == begin
        for step in range(begin, begin + 3):
            train_step(model, optimizer, step, worker.rank)
        if saves:
            session.switch("Dense()")
            session.save(tmp_path)
            pending = session.state_dict()["state"]
            assert any(kept["owed_gradient"].any() for kept in pending.values())
        assert session.recipe == resolve("Dense()")
        return parameters(model)

    cluster(lambda worker: work(worker, 0, True), 4)
    agree(cluster(lambda worker: work(worker, 3, False), 2))


def test_a_checkpoint_of_another_script_s_recipe_is_refused(tmp_path):
    def work(worker, recipe):
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        if recipe == "Int8()":
            with pytest.raises(CheckpointError, match="recipe"):
                session.load(tmp_path)
            return
        train_step(model, optimizer, 0, worker.rank)
        session.switch("Dense()")
        session.save(tmp_path)

    cluster(lambda worker: work(worker, "TopK(density=0.1)"), 2)
    cluster(lambda worker: work(worker, "Int8()"), 2)
