"""Tapes and optimizers of gossamer.horovod.tensorflow under recipes, by ranks in threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402
from support.horovod_workers import horovod  # noqa: E402
from support.tensorflow_training import agree, batch, build, joined, weights  # noqa: E402
from support.virtual_workers import heard  # noqa: E402

import gossamer.horovod.tensorflow as hvd  # noqa: E402
import gossamer.horovod.tensorflow.keras as hvd_keras  # noqa: E402
from gossamer import events  # noqa: E402
from gossamer.errors import AttachError  # noqa: E402

STEPS = 4


def package_of(name: str) -> Any:
    return keras if name == "keras" else pytest.importorskip("tf_keras")


PACKAGES = pytest.mark.parametrize("package", ["keras", "tf_keras"])  # Keras 3 and Keras 2


def trained_alone(package: Any) -> Any:
    model = build(package, 0)
    optimizer = package.optimizers.SGD(0.1, momentum=0.5)
    for step in range(STEPS):
        x, y = joined(step)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
    return weights(model)


def by_tape(rank: int, mode: Any = tf.function, steps: int = STEPS, **options: Any) -> Any:
    model = build(keras, rank)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)

    def step_with(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        tape = hvd.DistributedGradientTape(tape, **options)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    run = mode(step_with)
    for step in range(steps):
        run(*map(tf.constant, batch(step, rank)))
    return weights(model)


def by_fit(rank: int, package: Any = keras, compiled: bool = True, **options: Any) -> Any:
    model = build(package, rank)
    optimizer = hvd_keras.DistributedOptimizer(package.optimizers.SGD(0.1, momentum=0.5), **options)
    hvd.broadcast_variables(model.variables, root_rank=0)
    model.compile(optimizer, loss="mse", run_eagerly=not compiled)
    x, y = map(np.concatenate, zip(*(batch(step, rank) for step in range(STEPS)), strict=True))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert int(optimizer.iterations) == STEPS
    return weights(model)


@pytest.mark.parametrize("mode", [tf.function, lambda function: function], ids=["graph", "eager"])
def test_a_tape_under_dense_equals_one_process_on_the_joined_batches(mode: Any) -> None:
    np.testing.assert_allclose(agree(horovod(lambda rank: by_tape(rank, mode))), trained_alone(keras), rtol=1e-9)


@PACKAGES
@pytest.mark.parametrize("compiled", [True, False], ids=["graph", "eager"])
def test_fit_under_dense_equals_one_process_on_the_joined_batches(package: str, compiled: bool) -> None:
    library = package_of(package)
    found = agree(horovod(lambda rank: by_fit(rank, library, compiled)))
    np.testing.assert_allclose(found, trained_alone(library), rtol=1e-6, atol=1e-8)  # a float32 rate


def test_a_tape_sends_fewer_bytes_under_topk() -> None:
    def sent(recipe: str) -> int:
        with heard(events.StepEnded) as steps:
            agree(horovod(lambda rank: by_tape(rank, recipe=recipe)))
        return max(step.bytes_sent for step in steps)

    assert 0 < sent("TopK(0.01)") < sent("Dense()") / 2


@pytest.mark.parametrize("recipe", ["TopK(0.1)", "DiLoCo(period=2) + Float4()"])
def test_an_optimizer_trains_under_any_recipe(recipe: str) -> None:
    dense = agree(horovod(by_fit))
    found = agree(horovod(lambda rank: by_fit(rank, recipe=recipe)))
    assert not np.array_equal(found, dense)
    assert np.linalg.norm(found - dense) < np.linalg.norm(dense)


def test_a_recipe_that_accumulates_makes_fewer_steps() -> None:
    agree(horovod(lambda rank: by_steps(rank, "EveryStep(accumulate=2)")))


def by_steps(rank: int, recipe: str) -> Any:
    model = build(keras, rank)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), recipe=recipe)
    for step in range(STEPS):
        with tf.GradientTape() as tape:
            x, y = batch(step, rank)
            loss = tf.reduce_mean(tf.square(model(x) - y))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
    assert int(optimizer.iterations) == STEPS // 2
    return weights(model)


def test_the_command_lines_recipe_replaces_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_RECIPE", "TopK(0.1)")
    with heard(events.Attached) as begun:
        agree(horovod(by_tape))
    assert "TopK" in repr(begun[0])


def test_half_compression_is_a_recipe() -> None:
    with heard(events.Attached) as begun:
        agree(horovod(lambda rank: by_tape(rank, compression=hvd.Compression.fp16)))
    assert "float16" in repr(begun[0])


@PACKAGES
@pytest.mark.parametrize("average", [True, False])
def test_backward_passes_add_up_before_a_step(package: str, average: bool) -> None:
    library = package_of(package)

    def work(rank: int) -> Any:
        x = tf.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(
            library.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        found = []

        @tf.function  # type: ignore[untyped-decorator]
        def step(gradient: Any) -> None:
            optimizer.apply_gradients([(gradient, x)])

        for gradient in (1.0, 3.0, 5.0):
            step(tf.constant([gradient + rank]))
            found.append(float(x[0]))
        assert int(optimizer.iterations) == 3
        return found

    total = -(1.5 + 3.5) / (2 if average else 1)
    assert horovod(work) == [[0.0, total, total]] * 2


def test_sums_are_world_times_the_mean() -> None:
    def work(rank: int) -> list[float]:
        x = tf.Variable([1.0])
        found = []
        for op in (hvd.Average, hvd.Sum):
            with tf.GradientTape() as tape:
                loss = x * (1.0 + rank)
            found.append(float(hvd.DistributedGradientTape(tape, op=op).gradient(loss, [x])[0][0]))
        return found

    assert horovod(work) == [[1.5, 3.0]] * 2


def test_local_layers_and_missing_gradients_are_not_averaged() -> None:
    def work(rank: int) -> Any:
        model = build(keras, 0)
        unused = tf.Variable(1.0)
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(model(np.ones((1, 6)))) * (1.0 + rank)
        sources = [*model.trainable_variables, unused]
        own = tape.gradient(loss, sources)
        partial = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[0])
        found = partial.gradient(loss, sources)
        local, other = partial.get_local_and_global_gradients(loss, sources)
        assert found[-1] is None
        assert [len(local), len(other)] == [2, 5]
        return [
            float(tf.norm(each / mine)) / float(tf.norm(tf.ones_like(mine)))
            for each, mine in zip(found[:-1], own[:-1], strict=True)
        ]

    first, second = horovod(work)
    np.testing.assert_allclose(first, [0.5, 0.5, *[1.5] * 4])
    np.testing.assert_allclose(second, [0.5, 0.5, *[0.75] * 4])


@pytest.mark.parametrize("dense", [True, False])
def test_rows_of_an_embedding_are_averaged(dense: bool) -> None:
    def work(rank: int) -> Any:
        table = tf.Variable([[1.0], [2.0], [3.0]])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank]))
        (found,) = hvd.DistributedGradientTape(tape, sparse_as_dense=dense).gradient(loss, [table])
        assert isinstance(found, tf.IndexedSlices) is not dense
        return tf.convert_to_tensor(found).numpy().tolist()

    assert horovod(work) == [[[0.5], [0.5], [0.0]]] * 2


def test_a_gradient_that_is_not_finite_makes_no_step_on_any_rank() -> None:
    def work(rank: int) -> tuple[float, int]:
        x = tf.Variable([1.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.apply_gradients([(tf.constant([np.inf if rank else 1.0], tf.float32), x)])
        return float(x[0]), int(optimizer.iterations)

    assert horovod(work) == [(1.0, 0)] * 2


def test_the_first_step_gives_all_ranks_the_variables_of_the_first() -> None:
    def work(rank: int) -> list[float]:
        taped, stepped = tf.Variable(1.0 + rank), tf.Variable(3.0 + rank)
        with tf.GradientTape() as tape:
            loss = 0.0 * taped
        hvd.DistributedGradientTape(tape).gradient(loss, [taped])
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)).apply_gradients([(tf.constant(1.0), stepped)])
        return [float(taped), float(stepped)]

    assert horovod(work) == [[1.0, 3.0]] * 2


def test_a_broadcast_of_trained_variables_begins_the_recipe_again() -> None:
    def work(rank: int) -> list[bool]:
        x, other = tf.Variable(1.0), tf.Variable(1.0)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), recipe="LocalSGD(period=2)")
        optimizer.apply_gradients([(tf.constant(1.0), x)])
        (exchange,) = optimizer._state.exchanges.values()
        found = []
        for variable in (other, x):
            hvd.broadcast_variables([variable], root_rank=0)
            found.append(exchange.session is None)
        return found

    assert horovod(work) == [[False, True]] * 2


def test_a_process_set_averages_among_its_ranks() -> None:
    def work(rank: int) -> float:
        pair = hvd.add_process_set([0, 2])
        x = tf.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=pair)
        optimizer.apply_gradients([(tf.constant([[1.0, 2.0, 4.0][rank]]), x)])
        return float(x[0])

    assert horovod(work, 3) == [-2.5, -2.0, -2.5]


def test_a_tape_leaves_gradients_of_ranks_outside_the_process_set_as_they_are() -> None:
    def work(rank: int) -> list[float]:
        pair = hvd.add_process_set([0, 2])
        x, y = tf.Variable(0.0), tf.constant(0.0)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(y)
            loss = (x + y) * [1.0, 2.0, 4.0][rank]
        taped = hvd.DistributedGradientTape(tape, process_set=pair)
        return [float(taped.gradient(loss, source)) for source in (x, y)]

    assert horovod(work, 3) == [[2.5, 2.5], [2.0, 2.0], [2.5, 2.5]]


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("recipe", [None, "TopK(1.0)"])
def test_an_optimizer_of_tensorflow_1_averages_in_a_session(resource: bool, recipe: str | None) -> None:
    v1 = tf.compat.v1

    def work(rank: int) -> list[Any]:
        pair = hvd.add_process_set([0, 2])
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.get_variable("x", initializer=[1.0 + rank], use_resource=resource)
            inner = v1.train.MomentumOptimizer(1.0, 0.5)
            optimizer = hvd.DistributedOptimizer(inner, process_set=pair, recipe=recipe)
            step = optimizer.minimize(x * [1.0, 2.0, 4.0][rank])
            session.run(v1.global_variables_initializer())
            found = []
            for _ in range(2):
                session.run(step)
                found.append(float(session.run(x)[0]))
            assert optimizer.get_slot_names() == ["momentum"]
            assert [each.shape for each in optimizer.variables()] == [optimizer.get_slot(x, "momentum").shape]
        return found

    assert horovod(work, 3) == [[-1.5, -5.25], [0.0, -3.0], [-1.5, -5.25]]


def test_an_optimizer_of_tensorflow_1_averages_eagerly() -> None:
    def work(rank: int) -> float:
        x = tf.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        optimizer.apply_gradients(optimizer.compute_gradients(lambda: x * (1.0 + rank), [x]))
        return float(x[0])

    assert horovod(work) == [-1.5] * 2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"op": hvd.Adasum}, NotImplementedError, "DiLoCo"),
        ({"op": hvd.Max}, ValueError, "hvd.Average or hvd.Sum"),
        ({"groups": -1}, ValueError, "groups"),
        ({"compression": object()}, ValueError, "recipe="),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, ValueError, "predivide"),
    ],
)
def test_what_cannot_be_averaged_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        hvd.DistributedGradientTape(tf.GradientTape(), **options)
    with pytest.raises(error, match=words):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)


def test_a_tape_refuses_recipes_that_need_the_optimizers_steps() -> None:
    def work(rank: int) -> None:
        with pytest.raises(AttachError, match="DistributedOptimizer"):
            by_tape(rank, lambda function: function, recipe="DiLoCo(period=2)")

    horovod(work)


def test_an_optimizer_is_wrapped_once() -> None:
    with pytest.raises(ValueError, match="once"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
