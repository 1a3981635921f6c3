"""Sessions of pytrees in elastic runs: a newcomer receives the parameters and the state of the optax optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from support.elastic_groups import ElasticRun, Join, Loss
from support.jax_training import STEPS, batch, flat, gradient, jax, jnp, optax, parameters, session_of
from support.virtual_workers import Worker

from gossamer.train.session.group_changes import WorldChange

Spec = jax.sharding.PartitionSpec
OPTIMIZER = optax.adam(0.05)


@jax.jit
def update(tree: Any, moments: Any, mean: Any) -> Any:
    updates, moments = OPTIMIZER.update(mean, moments, tree)
    return optax.apply_updates(tree, updates), moments


def sharded(tree: Any) -> Any:
    """Over two of four devices; the other two hold copies."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    specs = {"first": {"bias": Spec(), "weight": Spec("model", None)}, "last": Spec(None, "model")}
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec)), tree, specs)


def trained(recipe: str, place: Any, worker: Worker) -> tuple[int, bytes, int]:
    tree = place(parameters(worker.rank))
    moments = OPTIMIZER.init(tree)
    seen: list[WorldChange] = []
    session = session_of(worker, tree, recipe, state=lambda: moments)
    session.on_change(seen.append)
    tree, moments = session.parameters, session.state
    while session.steps < STEPS:
        mean = session.give(gradient(tree, *batch(session.steps, worker.rank)))
        if mean is not None:
            tree, moments = update(tree, moments, mean)
        tree = session.took_step(tree)
    session.arrays._synchronizer.end_run()
    alike = session.averaged_parameters(), () if "DiLoCo" in recipe else moments
    return session.steps, flat(jax.device_get(alike)), len(seen)


@pytest.mark.parametrize("place", [lambda tree: tree, sharded])
@pytest.mark.parametrize(("recipe", "op"), [("TopK(0.1)", 10), ("DiLoCo(period=2) + Int8()", 7)])
def test_a_slice_joins_and_one_is_lost_and_all_end_with_equal_parameters_and_moments(
    recipe: str, op: int, place: Any
) -> None:
    run = ElasticRun(3, Loss(group=5, victim=1, op=op), newcomers=1, join=Join(op=3))
    first, lost, third, newcomer = run(partial(trained, recipe, place))
    assert lost is None
    assert first[:2] == third[:2] == newcomer[:2]
    assert (first[2], newcomer[2]) == (2, 1)


def test_a_tree_of_carried_leaves_and_counts_is_the_state() -> None:
    def train(worker: Worker) -> Any:
        state = {"count": jnp.array(0), "scale": 3.0, "none": None}
        session = session_of(worker, {"w": jnp.zeros(2)}, "Dense()", state=lambda: state)
        tree, state = session.parameters, session.state
        while session.steps < STEPS:
            mean = session.give({"w": jnp.ones(2)})
            state = {**state, "count": state["count"] + 1}
            tree = session.took_step(update_plain(tree, mean))
        assert (state["scale"], state["none"]) == (3.0, None)
        return session.steps, int(state["count"]), flat(tree)

    first, second, newcomer = ElasticRun(2, newcomers=1, join=Join(op=6))(train)
    assert first == second == newcomer
    assert first[1] == STEPS


def update_plain(tree: Any, mean: Any) -> Any:
    return jax.tree.map(lambda leaf, each: leaf - each, tree, mean)
