"""Sessions of pytrees: their bits are those of one process and of torch, for every kind of recipe."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from support.jax_training import (
    LR,
    STEPS,
    batch,
    flat,
    gradient,
    jax,
    jnp,
    one_step,
    parameters,
    session_of,
    trained,
    update,
)
from support.virtual_workers import Worker, cluster, heard
from torch import nn

from gossamer import events
from gossamer.errors import MismatchError, PeerLost

RECIPES = [
    "TopK(0.1)",
    "PowerSGD(rank=2)",
    "EveryStep(accumulate=2)",
    "EveryStep(delay=1)",
    "DiLoCo(period=3) + Float4()",
    "Gossip() + Ring()",
]


def integers(tree: Any, step: int, rank: int) -> Any:
    """Gradients whose means over two and four ranks are exact."""
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, float(4 * (rank + step) + 4)), tree)


def close(one: Any, other: Any) -> bool:
    return bool(jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=0, atol=1e-6), one, other)))


def test_dense_has_the_bits_of_one_process_where_sums_are_exact() -> None:
    found = cluster(lambda w: flat(trained(w, "Dense()", grads=integers)[1]), 4)
    tree = parameters(0)
    for step in range(STEPS):
        means = [integers(tree, step, rank) for rank in range(4)]
        tree = update(tree, jax.tree.map(lambda *each: sum(each) / 4, *means))
    assert found == [flat(tree)] * 4


def test_dense_trains_as_one_process_on_the_joined_batch() -> None:
    first, *others = cluster(lambda w: trained(w, "Dense()")[1], 3)
    tree = parameters(0)
    for step in range(STEPS):
        inputs, targets = (
            jnp.concatenate(each) for each in zip(*(batch(step, rank) for rank in range(3)), strict=True)
        )
        tree = update(tree, gradient(tree, inputs, targets))
    assert all(flat(other) == flat(first) for other in others)
    assert close(first, tree)


class Twin(nn.Module):
    """The model of support.jax_training, in torch."""

    def __init__(self) -> None:
        super().__init__()
        tree = jax.device_get(parameters(0))
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor(tree["first"]["weight"]))
            self.first.bias.copy_(torch.tensor(tree["first"]["bias"]))
            self.last.weight.copy_(torch.tensor(tree["last"]))

    def loss(self, step: int, rank: int) -> torch.Tensor:
        inputs, targets = (torch.tensor(np.asarray(each)) for each in batch(step, rank))
        return nn.functional.mse_loss(self.last(torch.tanh(self.first(inputs))), targets)


@pytest.mark.parametrize("recipe", ["Dense()", "DiLoCo(period=2)"])
def test_a_session_trains_as_the_torch_loop_of_the_same_model(recipe: str) -> None:
    def by_torch(worker: Worker) -> Any:
        model = Twin()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        worker.attach(model, optimizer, recipe)
        for step in range(STEPS):
            optimizer.zero_grad()
            model.loss(step, worker.rank).backward()
            optimizer.step()
        weights = {"bias": model.first.bias, "weight": model.first.weight}
        return {"first": weights, "last": model.last.weight}

    theirs = jax.tree.map(lambda each: jnp.asarray(each.detach().numpy()), cluster(by_torch, 2)[0])
    ours = cluster(lambda w: trained(w, recipe)[1], 2)[0]
    assert close(ours, theirs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_have_the_same_averaged_parameters_under(recipe: str) -> None:
    first, second = cluster(lambda w: flat(trained(w, recipe)[0].averaged_parameters()), 2)
    assert first == second
    assert first != flat(parameters(0))


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.01)", "DiLoCo(period=3) + Float4()"])
def test_a_step_sends_the_bytes_of_the_same_model_in_torch(recipe: str) -> None:
    def by_torch(worker: Worker) -> None:
        model = nn.ParameterDict({"first_bias": torch.zeros(16), "first_weight": torch.zeros(16, 6)})
        model["last"] = torch.zeros(3, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        worker.attach(model, optimizer, recipe)
        for _ in range(STEPS):
            optimizer.zero_grad()
            sum(each.square().sum() for each in model.values()).backward()  # type: ignore[union-attr]
            optimizer.step()

    found = []
    for work in (lambda w: trained(w, recipe), by_torch):
        with heard(events.StepEnded) as ended:
            cluster(work, 2)
        found.append(sorted((event.step, event.bytes_sent) for event in ended))
    assert found[0] == found[1]


def test_servers_make_the_step_of_a_tree() -> None:
    def train(worker: Worker) -> Any:
        options = {"server_optimizer": lambda tensors: torch.optim.SGD(tensors, lr=LR)}
        session = session_of(worker, parameters(worker.rank), "ParameterServer(mode='sync')", **options)
        tree = session.parameters
        for step in range(STEPS):
            assert session.give(gradient(tree, *batch(step, worker.rank))) is None
            tree = session.took_step(tree)
        session.close()
        return tree

    assert close(cluster(train, 2)[0], cluster(lambda w: trained(w, "Dense()")[1], 2)[0])


@pytest.mark.parametrize("recipe", ["TopK(0.1)", "PowerSGD(rank=2)", "DiLoCo(period=3) + Float4()"])
@pytest.mark.parametrize("at", [2, 3])
def test_a_resumed_session_has_the_bits_of_an_uninterrupted_one(recipe: str, at: int) -> None:
    def interrupted(worker: Worker) -> bytes:
        session, tree = trained(worker, recipe, steps=at)
        state = session.state_dict()
        one_step(session, tree, at, worker.rank)  # is in no checkpoint
        again = session_of(worker, parameters(worker.rank + 5), recipe)
        tree = again.load_state_dict(state)
        for step in range(at, STEPS):
            tree = one_step(again, tree, step, worker.rank)
        return flat(tree)

    assert cluster(interrupted, 2) == cluster(lambda w: flat(trained(w, recipe)[1]), 2)


def test_a_rank_with_fewer_batches_takes_over_parameters_and_state() -> None:
    def train(worker: Worker) -> Any:
        session, tree = trained(worker, "Dense()", steps=2 + worker.rank)
        state = {"count": jnp.array(worker.rank), "moments": jax.tree.map(lambda leaf: leaf * 2, tree), "none": None}
        tree, state = session.end_epoch(state)
        return flat(tree), flat(state["moments"]), int(state["count"]), state["none"]

    first, second = cluster(train, 2)
    assert first == second
    assert first[2:] == (1, None)


def test_gradients_add_up_within_no_sync() -> None:
    def train(worker: Worker) -> Any:
        session = session_of(worker, {"w": jnp.zeros(2)}, "Dense()")
        with session.no_sync():
            assert session.give({"w": jnp.full(2, worker.rank + 1.0)}) is None
        return session.give({"w": jnp.full(2, 10.0)})["w"].tolist()

    assert cluster(train, 2) == [[11.5, 11.5]] * 2


def test_the_loss_of_a_rank_is_an_error_on_the_others() -> None:
    told: list[str] = []

    def train(worker: Worker) -> None:
        session, tree = trained(worker, "TopK(0.1)", steps=2)
        if worker.rank == 1:
            raise InterruptedError("killed")
        with pytest.raises(PeerLost) as lost:
            one_step(session, tree, 2, worker.rank)
        told.append(str(lost.value))

    with pytest.raises(InterruptedError):
        cluster(train, 2)
    assert told


def test_stats_count_bytes_and_steps() -> None:
    def train(worker: Worker) -> Any:
        session, _ = trained(worker, "TopK(0.1)")
        assert "TopK" in repr(session)
        return session.stats.run.steps, session.stats.run.bytes_sent

    (steps, sent), _ = cluster(train, 2)
    assert steps == STEPS
    assert sent > 0


# -- ranks of two frameworks -------------------------------------------------------------------------------------------


def by_two_frameworks(
    worker: Worker, recipe: str, order: tuple[str, ...] = ("first.weight", "first.bias", "last.weight")
):
    """Rank 0 trains in torch, rank 1 in JAX."""
    model = Twin()
    if worker.rank == 0:
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        session = worker.attach(model, optimizer, recipe)
        for step in range(STEPS):
            optimizer.zero_grad()
            model.loss(step, 0).backward()
            optimizer.step()
        session.close()
        return {name: jnp.asarray(each.detach().numpy()) for name, each in model.named_parameters()}
    named = {name: jnp.asarray(each.detach().numpy()) + 1 for name, each in model.named_parameters()}
    ours = session_of(worker, OrderedDict((name, named[name]) for name in order), recipe)
    tree = ours.parameters
    for step in range(STEPS):
        weights = {"bias": tree["first.bias"], "weight": tree["first.weight"]}
        found = gradient({"first": weights, "last": tree["last.weight"]}, *batch(step, 1))
        each = {
            "first.weight": found["first"]["weight"],
            "first.bias": found["first"]["bias"],
            "last.weight": found["last"],
        }
        mean = ours.give(OrderedDict((name, each[name]) for name in order))
        tree = ours.took_step(jax.tree.map(lambda array, mine: array - LR * mine, tree, mean))
    return dict(ours.averaged_parameters())


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "DiLoCo(period=3)"])
def test_a_rank_of_torch_and_one_of_jax_train_one_model(recipe: str) -> None:
    theirs, ours = cluster(lambda w: by_two_frameworks(w, recipe), 2)
    if recipe != "DiLoCo(period=3)":
        assert close(theirs, ours)
    if recipe == "Dense()":
        alone = cluster(lambda w: trained(w, recipe)[1], 2)[0]
        assert close(ours["last.weight"], alone["last"])


def test_ranks_of_two_frameworks_whose_layouts_differ_are_refused_with_both_named() -> None:
    with pytest.raises(MismatchError, match=rf"names, shapes.*{re.escape(torch.__version__)}' on rank 0, 'JAX"):
        cluster(lambda w: by_two_frameworks(w, "Dense()", ("first.bias", "first.weight", "last.weight")), 2)
