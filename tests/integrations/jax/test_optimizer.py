"""The optax transformation: within jit and scan it has the updates of its inner optimizer on the mean of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.jax_training import STEPS, batch, flat, gradient, jax, jnp, optax, parameters, session_of
from support.virtual_workers import Worker, cluster

import gossamer.jax
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import AttachError, LoopError, MismatchError, PeerLost

INNER = optax.adam(0.05)


def made(worker: Worker, recipe: str, inner: Any = INNER) -> Any:
    """An optimizer of a virtual worker. Ranks need devices of their own: callbacks of two would wait for each other."""
    return gossamer.jax.optimizer(inner, recipe, transport=worker.transport)


def on_own_device(worker: Worker, tree: Any) -> Any:
    return jax.device_put(tree, jax.devices()[worker.rank])


def batches(worker: Worker) -> Any:
    every = [batch(step, worker.rank) for step in range(STEPS)]
    return on_own_device(worker, jax.tree.map(lambda *each: jnp.stack(each), *every))


def by_loop(worker: Worker, recipe: str, inner: Any = INNER) -> Any:
    """By a session between two jitted functions."""
    session = session_of(worker, on_own_device(worker, parameters()), recipe)
    tree = session.parameters
    state = inner.init(tree)
    for step in range(STEPS):
        mean = session.give(gradient(tree, *on_own_device(worker, batch(step, worker.rank))))
        if mean is not None:
            updates, state = jax.jit(inner.update)(mean, state, tree)
            tree = optax.apply_updates(tree, updates)
        tree = session.took_step(tree)
    return tree


def by_scan(worker: Worker, recipe: str, inner: Any = INNER) -> Any:
    """By the transformation, all steps in one jitted scan."""
    tx = made(worker, recipe, inner)
    tree = on_own_device(worker, parameters())

    def step(carry: Any, inputs: Any) -> Any:
        tree, state = carry
        updates, state = tx.update(gradient(tree, *inputs), state, tree)
        return (optax.apply_updates(tree, updates), state), None

    carry = (tree, tx.init(tree))
    (tree, _), _ = jax.jit(lambda carry, inputs: jax.lax.scan(step, carry, inputs))(carry, batches(worker))
    assert tx.stats.run.steps > 0
    tx.close()
    return tree


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "EveryStep(accumulate=2) + PowerSGD(rank=2)"])
def test_a_jitted_scan_trains_as_the_loop_of_a_session(recipe: str) -> None:
    scanned, looped = cluster(lambda w: by_scan(w, recipe), 2), cluster(lambda w: by_loop(w, recipe), 2)
    assert flat(scanned[0]) == flat(scanned[1])
    for one, other in zip(jax.tree.leaves(scanned[0]), jax.tree.leaves(looped[0]), strict=True):
        assert jnp.allclose(jax.device_get(one), jax.device_get(other), rtol=0, atol=1e-6)


def test_it_is_a_link_of_an_optax_chain() -> None:
    def train(worker: Worker) -> Any:
        tx = made(worker, "Dense()", optax.sgd(1.0))
        chain = optax.chain(tx, optax.scale(0.5))
        tree = on_own_device(worker, {"w": jnp.zeros(2)})
        state = chain.init(tree)
        gradients = on_own_device(worker, {"w": jnp.full(2, worker.rank * 4.0)})
        updates, _ = jax.jit(chain.update)(gradients, state, tree)
        return updates["w"].tolist()

    assert cluster(train, 2) == [[-1.0, -1.0]] * 2


def test_the_optimizer_of_flax_nnx_averages_within_jit() -> None:
    nnx = pytest.importorskip("flax.nnx")

    def loss(model: Any, inputs: Any, targets: Any) -> Any:
        return jnp.mean((model(inputs) - targets) ** 2)

    def train(worker: Worker, recipe: str | None, rows: slice) -> list[Any]:
        inputs = jnp.arange(32.0).reshape(4, 8)[rows] / 32
        model = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
        with jax.default_device(jax.devices()[worker.rank]):
            nnx.update(model, on_own_device(worker, nnx.state(model)))
            tx = optax.sgd(0.5) if recipe is None else made(worker, recipe, optax.sgd(0.5))
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

            @nnx.jit
            def step(model: Any, optimizer: Any, inputs: Any) -> None:
                optimizer.update(model, nnx.grad(loss)(model, inputs, inputs[:, :2]))

            step(model, optimizer, on_own_device(worker, inputs))
        if recipe is not None:
            tx.close()
        return [np.asarray(each) for each in jax.tree.leaves(nnx.state(model, nnx.Param))]

    one, other = cluster(lambda w: train(w, "Dense()", slice(2 * w.rank, 2 * w.rank + 2)), 2)
    (joined,) = cluster(lambda w: train(w, None, slice(0, 4)), 1)
    for mine, theirs, both in zip(one, other, joined, strict=True):
        assert np.array_equal(mine, theirs)
        assert np.allclose(mine, both, rtol=0, atol=1e-6)


def test_an_equinox_module_with_functions_is_updated_within_jit() -> None:
    eqx = pytest.importorskip("equinox")
    model, tx = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0)), alone()
    state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(tx: Any, model: Any, state: Any) -> Any:
        gradients = eqx.filter_grad(lambda model: jnp.mean(model(jnp.ones(2)) ** 2))(model)
        return tx.update(gradients, state, model)[0]  # the activation of the model is a function

    assert flat(step(tx, model, state)) == flat(step(INNER, model, state))
    tx.close()


def test_integers_of_a_tree_are_carried_through_jit() -> None:
    tree = {"w": jnp.ones(2), "count": jnp.array(3)}
    inner = optax.masked(optax.sgd(0.5), {"w": True, "count": False})
    tx = gossamer.jax.optimizer(inner, "Dense()", transport=SimulatedGroup(1).transports[0])
    state = tx.init(tree)

    @jax.jit
    def step(tree: Any, state: Any) -> Any:
        gradients = jax.grad(lambda tree: jnp.sum(tree["w"]) * tree["count"], allow_int=True)(tree)
        assert gradients["count"].dtype == jax.dtypes.float0
        return tx.update(gradients, state, params=tree)[0]["w"]

    assert step(tree, state).tolist() == [-1.5] * 2
    tx.close()


def test_a_step_with_non_finite_numbers_of_one_rank_is_none_on_all() -> None:
    def train(worker: Worker) -> Any:
        tx = made(worker, "TopK(0.5)")
        tree = on_own_device(worker, {"w": jnp.zeros(4)})
        state = tx.init(tree)
        update = jax.jit(tx.update)
        bad = on_own_device(worker, {"w": jnp.full(4, jnp.nan if worker.rank else 1.0)})
        updates, after = update(bad, state, tree)
        kept = flat(after) == flat(state)
        good, after = update(on_own_device(worker, {"w": jnp.ones(4)}), after, tree)
        result = updates["w"].tolist(), kept, bool(jnp.any(good["w"] != 0)), int(after[0].count)
        tx.close()
        return result

    assert cluster(train, 2) == [([0.0] * 4, True, True, 1)] * 2


def test_a_resumed_transformation_has_the_bits_of_an_uninterrupted_one() -> None:
    def steps(worker: Worker, tx: Any, tree: Any, state: Any, which: range) -> Any:
        update = jax.jit(tx.update)
        for step in which:
            updates, state = update(gradient(tree, *on_own_device(worker, batch(step, worker.rank))), state, tree)
            tree = optax.apply_updates(tree, updates)
        return tree, state

    def train(worker: Worker, at: int) -> bytes:
        tx, tree = made(worker, "TopK(0.1)"), on_own_device(worker, parameters())
        state = tx.init(tree)
        tree, state = steps(worker, tx, tree, state, range(at))
        if at < STEPS:
            saved = tx.state_dict()
            again = made(worker, "TopK(0.1)")
            again.init(tree)
            again.load_state_dict(saved)
            tree, state = steps(worker, again, tree, state, range(at, STEPS))
            again.close()
        tx.close()
        return flat(tree)

    assert cluster(lambda w: train(w, 3), 2) == cluster(lambda w: train(w, STEPS), 2)


# -- refused -----------------------------------------------------------------------------------------------------------


def alone(recipe: str = "Dense()") -> Any:
    return gossamer.jax.optimizer(INNER, recipe, transport=SimulatedGroup(1).transports[0])


@pytest.mark.parametrize("recipe", ["DiLoCo(period=3)", "LocalSGD(period=2)", "Gossip() + Ring()"])
def test_recipes_that_change_parameters_are_refused_with_the_line_to_write(recipe: str) -> None:
    with pytest.raises(AttachError, match=r"changes parameters.*gossamer\.jax\.Session\(parameters, recipe\)"):
        cluster(lambda w: made(w, recipe).init(on_own_device(w, parameters())), 2)


def test_ranks_that_begin_with_other_parameters_are_refused_by_leaf_and_rank() -> None:
    def train(worker: Worker) -> None:
        with pytest.raises(MismatchError, match=r"rank 1: \['last'\].*same key"):
            made(worker, "Dense()").init({"last": jnp.full(2, float(worker.rank)), "same": jnp.ones(2)})

    cluster(train, 2)


def test_sharded_parameters_are_refused_with_the_line_to_write() -> None:
    mesh = jax.sharding.Mesh(jax.devices(), ("all",))
    spread = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all")))
    with pytest.raises(AttachError, match=r"8 devices.*gossamer\.jax\.Session"):
        alone().init({"w": spread})


def test_update_comes_after_init_and_has_the_parameters() -> None:
    tx, tree = alone(), {"w": jnp.ones(2)}
    with pytest.raises(LoopError, match="before init"):
        tx.update(tree, None, tree)
    state = tx.init(tree)
    with pytest.raises(LoopError, match="without the parameters"):
        tx.update(tree, state)
    with pytest.raises(LoopError, match="initialized before"):
        tx.init(tree)
    tx.close()
    tx.init(tree)
    tx.close()


def test_an_error_within_the_callback_reaches_the_loop_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise PeerLost("rank 1 was lost")

    tx, tree = alone(), {"w": jnp.ones(2)}
    state = tx.init(tree)
    monkeypatch.setattr(tx.session, "give", lost)
    with pytest.raises(jax.errors.JaxRuntimeError, match="PeerLost: rank 1 was lost"):
        jax.block_until_ready(jax.jit(tx.update)(tree, state, tree))
    tx.close()
    assert tx.session is None


def test_an_elastic_run_is_refused_with_the_line_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.integrations.jax.optimizer.is_elastic", lambda: True)
    with pytest.raises(AttachError, match=r"elastic run.*gossamer\.jax\.Session"):
        alone().init({"w": jnp.ones(2)})


def test_shapes_alone_open_no_session() -> None:
    tx = alone()
    jax.eval_shape(tx.init, {"w": jnp.ones(2)})
    assert tx.session is None
    with pytest.raises(LoopError, match="no session"):
        tx.state_dict()
    tx.close()


def test_arrays_of_numpy_begin_a_session_as_those_of_jax_do() -> None:
    transport = SimulatedGroup(1).transports[0]
    found = []
    for tree in (parameters(), jax.tree.map(np.asarray, parameters())):  # as flax.serialization.from_bytes returns them
        tx = gossamer.jax.optimizer(optax.sgd(0.5), transport=transport)
        state = tx.init(tree)
        gradients = jax.tree.map(jnp.ones_like, tree)
        updates, _ = jax.jit(tx.update)(gradients, state, tree)
        found.append(flat(optax.apply_updates(tree, updates)))
        tx.close()
    assert found[0] == found[1]
