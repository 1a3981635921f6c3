"""Leaves of pytrees: which are averaged, which are carried, and which are refused, by name and rank."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from support.jax_training import flat, jax, jnp, session_of
from support.virtual_workers import Worker, cluster, heard

from gossamer import engine, events
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import AttachError, LayoutError, LoopError, MismatchError, NonFiniteError
from gossamer.jax import Session


def alone(tree: Any, recipe: str = "Dense()") -> Session:
    return Session(tree, recipe, SimulatedGroup(1).transports[0])


def weights() -> dict[str, Any]:
    return {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}


# -- carried and converted ---------------------------------------------------------------------------------------------


def test_leaves_that_are_no_floating_point_arrays_are_carried() -> None:
    key = jax.random.key(3)
    tree = {"w": jnp.ones(2), "count": jnp.array(7), "key": key, "act": jnp.tanh, "none": None, "name": "layer"}

    def train(worker: Worker) -> Any:
        session = session_of(worker, tree, "TopK(0.5)")
        grads = {**tree, "w": jnp.full(2, worker.rank + 1.0), "count": np.zeros((), jax.dtypes.float0), "key": None}
        mean = session.give(grads)
        assert mean["count"] is grads["count"]
        stepped = session.took_step({**tree, "count": jnp.array(8)})
        assert (stepped["act"], stepped["none"], stepped["name"]) == (jnp.tanh, None, "layer")
        return int(stepped["count"]), int(session.parameters["count"])

    assert cluster(train, 2) == [(8, 8)] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_arrays_keep_their_dtype(dtype: str) -> None:
    def train(worker: Worker) -> Any:
        session = session_of(worker, {"w": jnp.ones((3, 2), dtype)}, "Dense()")
        mean = session.give({"w": jnp.full((3, 2), worker.rank * 2.0, dtype)})["w"]
        return mean.dtype.name, mean.tolist()

    assert cluster(train, 2) == [(dtype, [[1.0, 1.0]] * 3)] * 2


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda tree: tuple(tree.values()), lambda tree: [*tree.values()]])
def test_trees_come_back_with_their_structure(kind: Any) -> None:
    with alone(kind(weights())) as session:
        given = kind(weights())
        assert jax.tree.structure(session.give(given)) == jax.tree.structure(given)
        assert jax.tree.structure(session.took_step(given)) == jax.tree.structure(given)


def test_a_single_array_is_a_tree() -> None:
    with alone(jnp.ones(3)) as session:
        assert session.give(jnp.full(3, 2.0)).tolist() == [2.0] * 3


def test_names_are_those_of_a_torch_model() -> None:
    with alone({"0": {"weight": jnp.ones(2), "bias": jnp.ones(1)}}) as session:
        assert [*session.arrays.parameters] == ["0.bias", "0.weight"]


def test_the_value_of_a_variable_is_not_part_of_its_name() -> None:
    nnx = pytest.importorskip("flax.nnx")
    state = nnx.state(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    with alone(state) as session:
        assert [*session.arrays.parameters] == ["bias", "kernel"]
        mean = session.give(nnx.as_pure(state))
        assert [each.shape for each in jax.tree.leaves(mean)] == [(1,), (2, 1)]


@pytest.mark.parametrize("gradient", [jnp.array(2.0), np.float32(2.0)])
def test_the_gradient_of_a_python_float_is_refused(gradient: Any) -> None:
    with (
        alone({"w": jnp.ones(2), "scale": 1.0}) as session,
        pytest.raises(LayoutError, match=r'"scale" has a gradient.*Python float.*jax\.tree\.map\(jnp\.asarray'),
    ):
        session.give({"w": jnp.ones(2), "scale": gradient})


def test_a_python_float_without_a_gradient_is_carried() -> None:
    with alone({"w": jnp.ones(2), "rate": 0.5}) as session:  # as that of an equinox Dropout
        assert session.give({"w": jnp.ones(2), "rate": None})["rate"] is None
        assert session.took_step({"w": jnp.ones(2), "rate": 0.5})["rate"] == 0.5


def test_arrays_on_a_cpu_are_read_in_place_and_copied_once_on_their_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with alone({"w": jnp.ones((512, 512))}) as session:
        read, back = [], []
        own, placed = session.arrays.give, jax.device_put
        monkeypatch.setattr(
            session.arrays, "give", lambda given, *a: read.append(given["w"].data_ptr()) or own(given, *a)
        )
        monkeypatch.setattr(jax, "device_put", lambda views, *a: back.append(views[0].ctypes.data) or placed(views, *a))
        gradient = jnp.full((512, 512), 2.0)
        mean = session.give({"w": gradient})["w"]
        assert read == [gradient.unsafe_buffer_pointer()]
        assert back == [mean.unsafe_buffer_pointer()]


def test_small_arrays_come_back_by_one_compiled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with alone(weights()) as session:
        mean = session.give(weights())
        monkeypatch.setattr(jax, "device_put", None)
        session.took_step(mean)
        with jax.transfer_guard("disallow_explicit"):
            given = session.give(mean)
        assert all(isinstance(each, jax.Array) and not each.committed for each in jax.tree.leaves(given))
        assert flat(given) == flat(mean)


def test_small_arrays_come_back_where_jit_is_disabled() -> None:
    with alone(weights()) as session, jax.disable_jit():
        mean = session.give(weights())
        assert all(isinstance(each, jax.Array) for each in jax.tree.leaves(mean))


def test_a_session_keeps_no_array_that_was_given() -> None:
    given = weights()
    with alone(given) as session:
        kept = weakref.ref(given["w"])
        del given
        gc.collect()
        assert kept() is None
        given = session.parameters
        session.give(given)
        session.took_step(given)
        kept = weakref.ref(given["w"])
        del given
        gc.collect()
        assert kept() is None


def test_numpy_arrays_of_bfloat16_are_arrays_of_a_session() -> None:
    array = np.ones(3, jnp.bfloat16)
    with engine.Session({"w": array}, "Dense()", SimulatedGroup(1).transports[0]) as session:
        mean = session.give({"w": array * 2})
        assert mean is not None
        assert (mean["w"].dtype, mean["w"].tolist()) == (array.dtype, [2.0] * 3)


def test_parameters_that_no_other_rank_changes_are_handed_back_themselves() -> None:
    with alone(weights()) as session:
        session.give(weights())
        stepped = weights()
        assert session.took_step(stepped)["w"] is stepped["w"]


def test_means_may_be_donated() -> None:
    step = jax.jit(lambda tree, mean: jax.tree.map(lambda a, b: a - b, tree, mean), donate_argnums=1)
    with alone(weights(), "TopK(0.5)") as session:
        tree = session.parameters
        for _ in range(3):
            tree = session.took_step(step(tree, session.give(jax.tree.map(jnp.ones_like, tree))))
        assert flat(tree) == flat(session.parameters)


def test_float64_is_averaged_where_it_is_on() -> None:
    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64  # before jax 0.8
    with enable_x64(True), alone({"w": jnp.ones(2, "float64")}) as session:
        assert session.give({"w": jnp.full(2, 1 / 3, "float64")})["w"].tolist() == [1 / 3] * 2


# -- refused -----------------------------------------------------------------------------------------------------------


def test_float64_is_refused_where_it_is_off() -> None:
    with pytest.raises(AttachError, match=r'rank 0: "w".*x64'):
        alone({"w": np.ones(2)})


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"w": jnp.ones(2, "complex64")}, '"w" has dtype complex64'),
        ({"w": jnp.ones(2, "float8_e4m3fn")}, '"w" has dtype float8'),
        ({"count": jnp.ones(2, int)}, "no array of floating-point"),
        ({}, "empty"),
        ({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}, 'name "a.b"'),
    ],
)
def test_trees_that_cannot_be_averaged_are_refused(tree: Any, told: str) -> None:
    with pytest.raises(AttachError, match=told):
        alone(tree)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"w": jnp.ones((4, 2))}, "missing b"),
        ({**weights(), "extra": jnp.ones(1)}, "unknown extra"),
        ({**weights(), "w": jnp.ones((2, 4))}, r'"w" has shape \(2, 4\)'),
        ({**weights(), "w": jnp.ones((4, 2), "bfloat16")}, '"w" has.*bfloat16'),
        ({**weights(), "b": None}, '"b" has type NoneType'),
    ],
)
def test_trees_that_do_not_fit_are_refused_by_leaf_and_rank_and_nothing_was_sent(tree: Any, told: str) -> None:
    with alone(weights()) as session:
        with pytest.raises(LayoutError, match=f"rank 0.*{told}"):
            session.give(tree)
        assert session.give(weights()) is not None
        with pytest.raises(LayoutError, match=f"rank 0.*{told}"):
            session.took_step(tree)
        session.took_step(weights())
        assert session.steps == 1


def test_a_donated_array_is_refused_by_leaf_and_rank() -> None:
    with alone(weights()) as session:
        tree = session.parameters
        session.give(weights())
        jax.jit(lambda each: jax.tree.map(lambda leaf: leaf + 1, each), donate_argnums=0)(tree)
        with pytest.raises(LoopError, match=r'rank 0.*"b" was deleted.*donate'):
            session.took_step(tree)


def test_calls_within_jit_are_refused() -> None:
    with alone(weights()) as session, pytest.raises(LoopError, match=r"rank 0.*traced.*jax\.optimizer"):
        jax.jit(session.give)(weights())


def test_give_and_took_step_come_in_turns() -> None:
    with alone(weights()) as session:
        with pytest.raises(LoopError, match="give"):
            session.took_step(weights())
        session.give(weights())
        with pytest.raises(LoopError, match="twice"):
            session.give(weights())


# -- one rank and another ----------------------------------------------------------------------------------------------


def test_ranks_with_other_trees_are_refused() -> None:
    with pytest.raises(MismatchError, match="shapes"):
        cluster(lambda w: session_of(w, {"w": jnp.ones(2 + w.rank)}, "Dense()"), 2)


def test_numbers_that_stay_non_finite_on_one_rank_end_the_run_with_leaf_and_rank() -> None:
    def train(worker: Worker) -> None:
        session = session_of(worker, weights(), "TopK(0.5)")
        for _ in range(9):
            grads = weights()
            if worker.rank == 1:
                grads["b"] = grads["b"].at[1].set(jnp.nan)
            assert session.give(grads) is None
            session.took_step(weights())

    with heard(events.Skipped) as skipped, pytest.raises(NonFiniteError, match='"b" on rank 1'):
        cluster(train, 2)
    assert {(event.rank, event.tensor) for event in skipped} == {(1, "b")}


@pytest.mark.parametrize("recipe", ["TopK(0.5)", "DiLoCo(period=2)"])
def test_calls_out_of_order_between_ranks_are_refused_by_rank(recipe: str) -> None:
    def train(worker: Worker) -> None:
        session = session_of(worker, weights(), recipe)
        for step in range(3):
            session.give(weights())
            session.took_step(weights())
            if worker.rank == 0 and step == 0:
                session.state_dict()

    with pytest.raises(LoopError, match="rank 0 called it while other ranks"):
        cluster(train, 2)
