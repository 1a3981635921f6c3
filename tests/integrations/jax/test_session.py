"""Sessions of pytrees: their bits are those of one process and of torch, for every kind of recipe and leaf."""

from __future__ import annotations

from typing import Any

import pytest
from support.jax_training import (
    STEPS,
    batch,
    flat,
    gradient,
    jax,
    jnp,
    parameters,
    trained,
    update,
)
from support.virtual_workers import Worker, cluster

RECIPES = [
    "TopK(0.1)",
    "PowerSGD(rank=2)",
    "EveryStep(accumulate=2)",
    "EveryStep(delay=1)",
    "DiLoCo(period=3) + Float4()",
]


def integers(tree: Any, step: int, rank: int) -> Any:
    """Gradients whose means over two and four ranks are exact."""
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, float(4 * (rank + step) + 4)), tree)


def test_dense_has_the_bits_of_one_process_where_sums_are_exact() -> None:
    found = cluster(lambda w: flat(trained(w, "Dense()", grads=integers)[1]), 4)
    tree = parameters(0)
    for step in range(STEPS):
        means = [integers(tree, step, rank) for rank in range(4)]
        tree = update(tree, jax.tree.map(lambda *each: sum(each) / 4, *means))
    assert found == [flat(tree)] * 4


def test_dense_trains_as_one_process_on_the_joined_batch() -> None:
    found = cluster(lambda w: trained(w, "Dense()")[1], 3)
    tree = parameters(0)
    for step in range(STEPS):
        inputs, targets = (
            jnp.concatenate(each) for each in zip(*(batch(step, rank) for rank in range(3)), strict=True)
        )
        tree = update(tree, gradient(tree, inputs, targets))
    assert flat(found[0]) == flat(found[1]) == flat(found[2])
    jax.tree.map(lambda one, other: jnp.allclose(one, other, rtol=0, atol=1e-6) or pytest.fail("apart"), found[0], tree)


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_agree_under(recipe: str) -> None:
    def train(worker: Worker) -> bytes:
        session, _ = trained(worker, recipe)
        return flat(session.averaged_parameters())

    first, second = cluster(train, 2)
    assert first == second
    assert first != flat(parameters(0))
