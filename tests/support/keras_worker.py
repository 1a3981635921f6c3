"""Scenarios of gossamer.keras on one backend: `python keras_worker.py BACKEND OUT.json [SCENARIO...]`.

Keras has one backend in a process, and TensorFlow takes many seconds to import, so one process runs all scenarios of a
backend. Workers are threads that meet in this process (virtual_workers). The tests judge the results.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

BACKEND = sys.argv[1]
os.environ.update(
    KERAS_BACKEND=BACKEND,
    JAX_PLATFORMS="cpu",
    XLA_FLAGS="--xla_force_host_platform_device_count=3",  # a device for each worker
    TF_CPP_MIN_LOG_LEVEL="3",
    CUDA_VISIBLE_DEVICES="-1",
    GOSSAMER_QUIET="1",
)
if BACKEND != "tensorflow":
    sys.modules["tensorflow"] = None  # type: ignore[assignment] # Keras would import it for every backend

import keras  # noqa: E402 - after the choice of a backend
import numpy as np  # noqa: E402
import torch  # noqa: E402
from support import keras_statistics  # noqa: E402
from support.keras_data import BATCH, RATES, batches, joined, weights  # noqa: E402
from support.keras_runs import Broadcasts, examples, failure, joined_in_second_epoch, one_validates, sent  # noqa: E402
from support.virtual_workers import Worker, cluster, heard  # noqa: E402

from gossamer import events  # noqa: E402
from gossamer import keras as adapter  # noqa: E402

warnings.simplefilter("ignore")
SCENARIOS: dict[str, Callable[[], Any]] = {"metrics_of_one_rank": lambda: one_validates(fitted, callback)}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def device(rank: int) -> AbstractContextManager[Any]:
    if BACKEND != "jax":
        return nullcontext()
    import jax

    return jax.default_device(jax.devices()[rank])  # type: ignore[no-any-return]


def network(kind: str = "network", rank: int = 0) -> keras.Model:
    """A model whose weights are those of support.keras_data; other ones on other ranks than 0."""
    given = weights(kind, rank)
    layers = [keras.layers.Input((given[0].shape[0],))]
    if kind == "linear":
        layers += [keras.layers.Dense(1, use_bias=False, name="first")]
    else:
        layers += [keras.layers.Dense(64, activation="tanh", name="first"), keras.layers.Dense(1, name="second")]
    model = keras.Sequential(layers, name="m")
    model.set_weights(given)
    return model


def values(variables: Any) -> list[list[float]]:
    return [np.asarray(keras.ops.convert_to_numpy(each), np.float64).ravel().tolist() for each in variables]


def fitted(
    worker: Worker | None,
    recipe: str,
    *,
    kind: str = "network",
    inner: Callable[[], Any] | None = None,
    steps: int = 4,
    epochs: int = 1,
    data: Any = None,
    callbacks: Callable[[], list[Any]] = list,
    options: dict[str, Any] | None = None,
    **fit: Any,
) -> keras.Model:
    """A model after model.fit; without a worker, by plain Keras."""
    rank = 0 if worker is None else worker.rank
    with device(rank):
        model = network(kind, rank)
        optimizer = keras.optimizers.SGD(RATES[kind]) if inner is None else inner()
        if worker is not None:
            optimizer = adapter.GossamerOptimizer(optimizer, recipe, transport=worker.transport, **(options or {}))
        model.compile(optimizer, loss="mse", **fit.pop("compiled", {}))
        x, y = batches(kind, rank, steps) if data is None else data
        model.fit(
            x, y, batch_size=fit.pop("batch_size", BATCH), epochs=epochs, shuffle=False, verbose=0,
            callbacks=callbacks(), **fit,
        )  # fmt: skip
        return model


def closed(model: keras.Model) -> list[list[float]]:
    model.optimizer.session.close()
    return values(model.trainable_variables)


# -- the same numbers as one process, and as torch ---------------------------------------------------------------------


@scenario
def dense() -> Any:
    """Integer-valued data: sums are exact, so bits must be equal."""
    ranks, count = sent(lambda w: closed(fitted(w, "Dense()", kind="linear", steps=3)))
    alone = fitted(None, "", kind="linear", data=joined("linear", 3), batch_size=2 * BATCH)
    return {"ranks": ranks, "alone": values(alone.trainable_variables), "bytes": count}


def trained(recipe: str, steps: int) -> Any:
    ranks, count = sent(lambda w: closed(fitted(w, recipe, steps=steps)))
    return {"ranks": ranks, "bytes": count}


@scenario
def network_dense() -> Any:
    return trained("Dense()", 6)


@scenario
def network_topk() -> Any:
    return trained("TopK(0.1)", 6)


@scenario
def network_diloco() -> Any:
    return trained("DiLoCo(period=3) + Float4()", 6)


@scenario
def server() -> Any:
    """The servers' own optimizer makes the step, and the inner one makes none."""
    options = {"server_optimizer": lambda tensors: torch.optim.SGD(tensors, lr=RATES["network"])}

    def work(worker: Worker) -> Any:
        inner = keras.optimizers.SGD(0.5)
        model = fitted(worker, "ParameterServer('sync')", steps=3, inner=lambda: inner, options=options)
        return closed(model), int(inner.iterations)

    return cluster(work, 2)


@scenario
def moving_averages() -> Any:
    """Of one process on the joined batch, and of two ranks in lock step; and of ranks whose weights differ."""
    inner = partial(keras.optimizers.SGD, RATES["network"], use_ema=True, ema_momentum=0.75)

    def work(recipe: str, worker: Worker, inner: Callable[[], Any] | None = inner) -> Any:
        with heard(events.Noticed) as notices:
            found = closed(fitted(worker, recipe, inner=inner, callbacks=callback))
        return found, [each.message for each in notices if "use_ema" in each.message]

    alone = fitted(None, "", data=joined("network", 4), batch_size=2 * BATCH, inner=inner).trainable_variables
    return {
        "alone": values(alone),
        "lock step": cluster(lambda worker: work("Dense()", worker), 2),
        "local": cluster(lambda worker: work("LocalSGD(period=2)", worker), 2),
        "local without": cluster(lambda worker: work("LocalSGD(period=2)", worker, None), 2),
    }


@scenario
def bfloat16() -> Any:
    def work(worker: Worker) -> Any:
        with device(worker.rank):
            layer = keras.layers.Dense(1, use_bias=False, dtype="bfloat16", kernel_initializer="ones", name="first")
            model = keras.Sequential([keras.layers.Input((4,)), layer], name="m")
            inner = keras.optimizers.SGD(0.125)
            optimizer = adapter.GossamerOptimizer(inner, "Dense()", transport=worker.transport)
            model.compile(optimizer, loss="mse")
            model.fit(*batches("linear", worker.rank, 1), batch_size=BATCH, verbose=0)
            return model.trainable_variables[0].dtype, closed(model)

    return cluster(work, 2)


@scenario
def missing_gradient() -> Any:
    """One optimizer step by hand, with no gradient for the second variable."""

    def work(worker: Worker) -> Any:
        with device(worker.rank):
            model = network()
            inner = keras.optimizers.SGD(0.5)
            optimizer = adapter.GossamerOptimizer(inner, "Dense()", transport=worker.transport)
            variables = model.trainable_variables
            before = values(variables)
            optimizer.build(variables)
            gradients = [keras.ops.ones(each.shape, each.dtype) * (worker.rank + 1) for each in variables]
            optimizer.apply([gradients[0], None, *gradients[2:]], variables)
            optimizer.session.close()
            return before, values(variables)

    return cluster(work, 2)


# -- the callback ------------------------------------------------------------------------------------------------------


def callback() -> list[Any]:
    return [adapter.GossamerCallback()]


@scenario
def metrics() -> Any:
    """Under local training: logs are means, and validation sees the averaged parameters of all ranks."""
    check = batches("network", 7, 2)

    def work(worker: Worker) -> Any:
        seen: list[Any] = []

        class Sees(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                seen.append((values(self.model.trainable_variables)[0][:2], dict(logs)))

        model = fitted(
            worker, "LocalSGD(period=4)", epochs=2, steps=3, validation_data=check,
            callbacks=lambda: [adapter.GossamerCallback(), Sees()],
        )  # fmt: skip
        with device(worker.rank):
            after = model.evaluate(*check, verbose=0, callbacks=callback())
        return seen, model.history.history, closed(model), after

    return cluster(work, 2)


@scenario
def uneven() -> Any:
    """Rank 1 has one batch more in each epoch."""

    def work(worker: Worker) -> Any:
        model = fitted(
            worker, "Dense()", steps=2 + worker.rank, epochs=2, inner=lambda: keras.optimizers.Adam(0.01),
            callbacks=callback,
        )  # fmt: skip
        return model.optimizer.session.steps, values(model.optimizer.inner.variables), closed(model)

    return cluster(work, 2)


@scenario
def elastic() -> Any:
    def fit(worker: Worker) -> keras.Model:
        adam = lambda: keras.optimizers.Adam(0.01)  # noqa: E731
        return fitted(worker, "TopK(0.5)", steps=4, epochs=2, inner=adam, callbacks=callback)

    return joined_in_second_epoch(fit, values)


def with_statistics(worker: Worker, steps: int, epochs: int, built: bool = True) -> keras.Model:
    with device(worker.rank):
        return keras_statistics.fitted(worker, steps, epochs, built, [*callback(), keras_statistics.CopyCounts()])


@scenario
def statistics() -> Any:
    """Both ranks have the same data."""

    def work(worker: Worker, built: bool) -> Any:
        return [*map(values, keras_statistics.closed(with_statistics(worker, 1, 1, built)))]

    return [cluster(lambda worker: work(worker, built), 2) for built in (True, BACKEND == "tensorflow")]  # noqa: B023


@scenario
def elastic_statistics() -> Any:
    fit, shown = lambda worker: with_statistics(worker, 4, 2), keras_statistics.weights_and_copies
    return joined_in_second_epoch(fit, lambda _: None, shown)


@scenario
def stopped() -> Any:
    """Rank 1 asks to stop after two steps of five."""

    class Asks(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.model.optimizer.session.request_stop()

    def work(worker: Worker) -> Any:
        model = fitted(worker, "Dense()", steps=5, callbacks=lambda: [Asks()] * worker.rank + callback())
        return model.optimizer.session.steps, closed(model)

    return cluster(work, 2)


def resumed(recipe: str) -> Any:
    """Four epochs at once; and two, then two more by new models from the checkpoint."""
    adam = lambda: keras.optimizers.Adam(0.01)  # noqa: E731

    def run(worker: Worker, epochs: int, folder: str | None) -> keras.Model:
        kept = lambda: [adapter.GossamerCallback(folder)]  # noqa: E731
        return fitted(worker, recipe, epochs=epochs, inner=adam, callbacks=kept, steps=3)

    whole = cluster(lambda w: closed(run(w, 4, None)), 2)
    with tempfile.TemporaryDirectory() as folder:
        cluster(lambda w: closed(run(w, 2, folder)), 2)

        def second(worker: Worker) -> Any:
            model = run(worker, 4, folder)
            return [*model.history.epoch], closed(model)

        return {"whole": whole, "resumed": cluster(second, 2)}


@scenario
def resumed_topk() -> Any:
    return resumed("TopK(0.1)")


@scenario
def resumed_diloco() -> Any:
    return resumed("DiLoCo(period=4) + Float4()")


@scenario
def saved() -> Any:
    """A model file has the inner optimizer and the recipe."""
    with device(0), tempfile.TemporaryDirectory() as folder:
        model = network()
        model.compile(adapter.GossamerOptimizer(keras.optimizers.Adam(0.01), "TopK(0.1)"), loss="mse")
        model.fit(*batches("network", 0, 1), verbose=0)
        model.save(f"{folder}/m.keras")
        again = keras.models.load_model(f"{folder}/m.keras").optimizer
        return type(again.inner).__name__, again.recipe, int(again.iterations)


# -- refusals ----------------------------------------------------------------------------------------------------------


@scenario
def non_finite() -> Any:
    """Rank 1 has a batch that is not finite; then only such batches."""

    def work(worker: Worker, spoilt: slice) -> Any:
        x, y = batches("network", worker.rank, 7)
        if worker.rank:
            x.reshape(7, BATCH, -1)[spoilt, 0, 0] = np.nan
        inner = keras.optimizers.Adam(0.01)
        made: list[keras.Model] = []

        def train() -> None:
            made.append(fitted(worker, "TopK(0.5)", data=(x, y), inner=lambda: inner, callbacks=callback))

        failed = failure(train)
        if not made:
            return failed, int(inner.iterations)
        return made[0].optimizer.session.steps, int(inner.iterations), closed(made[0])

    with heard(events.Skipped) as skipped:
        one = cluster(lambda w: work(w, slice(2, 3)), 2)
    names = sorted({(event.rank, event.tensor) for event in skipped})
    return {"one": one, "skipped": names, "all": cluster(lambda w: work(w, slice(0, 7)), 2)}


@contextmanager
def one_worker() -> Iterator[Any]:
    with device(0):
        model = network()
        optimizer = adapter.GossamerOptimizer(keras.optimizers.SGD(0.1), "Dense()")
        model.compile(optimizer, loss="mse")
        model.fit(*batches("network", 0, 1), verbose=0)
        yield model, optimizer
        optimizer.session.close()


@scenario
def rebuilt() -> Any:
    """Variables that are not those of the optimizer, and gradients of another dtype."""
    found = {}
    with one_worker() as (model, optimizer):
        variables = [*model.trainable_variables]
        gradients = [keras.ops.ones(each.shape, each.dtype) for each in variables]
        wide = keras.Variable(np.zeros((64, 3), np.float32), name="wide")
        other = [keras.ops.ones(wide.shape)]
        found["other"] = failure(
            lambda: optimizer.apply(gradients[:2] + other + gradients[3:], [*variables[:2], wide, *variables[3:]])
        )
        found["fewer"] = failure(lambda: optimizer.apply(gradients[1:], variables[1:]))
        half = [keras.ops.cast(gradients[0], "float16"), *gradients[1:]]
        found["dtype"] = failure(lambda: optimizer.apply(half, variables))
        model.add(keras.layers.Dense(2, name="third"))
        model.train_function = None  # Keras compiles anew where a batch has another shape, or after compile()
        x, _ = batches("network", 0, 1)
        found["fit"] = failure(lambda: model.fit(x, np.zeros((len(x), 2), np.float32), verbose=0))
    return found


@scenario
def refused() -> Any:
    found = {}
    sgd = keras.optimizers.SGD(0.1)
    found["scaled"] = failure(lambda: adapter.GossamerOptimizer(keras.optimizers.LossScaleOptimizer(sgd)))
    found["scaling"] = failure(lambda: keras.optimizers.LossScaleOptimizer(adapter.GossamerOptimizer(sgd)))
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    found["accumulating"] = failure(lambda: adapter.GossamerOptimizer(accumulating))
    found["unbuilt"] = failure(lambda: adapter.GossamerOptimizer(sgd).session)
    with device(0):
        plain = network()
        plain.compile("sgd", loss="mse")
        found["callback"] = failure(lambda: plain.fit(*batches("network", 0, 1), verbose=0, callbacks=callback()))
        if BACKEND == "torch":  # as if torch compiled, which takes minutes
            with mock.patch("torch.compiler.is_compiling", return_value=True):
                found["jit"] = failure(lambda: cluster(lambda w: fitted(w, "Dense()"), 1))
        if BACKEND == "tensorflow":
            jit = {"compiled": {"jit_compile": True}}
            found["jit"] = failure(lambda: cluster(lambda w: fitted(w, "Dense()", **jit), 1))
            found["traced"] = failure(lambda: cluster(lambda w: with_statistics(w, 1, 1, built=False), 1))
            import tensorflow as tf

            with tf.distribute.OneDeviceStrategy("cpu:0").scope():
                found["strategy"] = failure(lambda: adapter.GossamerOptimizer(sgd).build(plain.trainable_variables))
        if BACKEND == "jax":
            parallel = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
            keras.distribution.set_distribution(parallel)
            found["strategy"] = failure(lambda: adapter.GossamerOptimizer(sgd).build(plain.trainable_variables))
            keras.distribution.set_distribution(None)
    return found


@scenario
def page() -> Any:
    with device(0):
        return examples("keras.md")["history"].history["loss"]


# -- gossamer.tensorflow -----------------------------------------------------------------------------------------------


def tensorflow_scenarios() -> None:
    """Define the scenarios of gossamer.tensorflow, in the process of this backend."""
    import tensorflow as tf

    from gossamer import tensorflow as tf_adapter

    def taped(worker: Worker, recipe: str, kind: str, steps: int, spoilt: int = -1) -> Any:
        """A loop with a tape in a tf.function, as in Horovod's examples; rank 1's batch `spoilt` is not finite."""
        model = network(kind, worker.rank)
        optimizer = keras.optimizers.SGD(RATES[kind])
        x, y = (each.reshape(steps, BATCH, -1) for each in batches(kind, worker.rank, steps))
        if worker.rank and spoilt >= 0:
            x[spoilt] = np.nan

        @tf.function
        def step(features: Any, target: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(features) - target) ** 2)
            shared = tf_adapter.DistributedGradientTape(tape, recipe, transport=worker.transport)
            gradients = shared.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for number in range(steps):
            step(x[number], y[number])
        getattr(model.trainable_variables[0], tf_adapter.ATTRIBUTE).session.close()
        return values(model.trainable_variables)

    @scenario
    def tape() -> Any:
        dense, dense_bytes = sent(lambda w: taped(w, "Dense()", "linear", 3))
        topk, topk_bytes = sent(lambda w: taped(w, "TopK(0.1)", "network", 6))
        return {"dense": [dense, dense_bytes], "topk": [topk, topk_bytes]}

    @scenario
    def tape_non_finite() -> Any:
        return {
            "spoilt": cluster(lambda w: taped(w, "Dense()", "network", 3, spoilt=2), 2),
            "before": cluster(lambda w: taped(w, "Dense()", "network", 2), 2),
        }

    @scenario
    def distributed_optimizer() -> Any:
        """apply_gradients in a loop of one's own, under local training."""

        def work(worker: Worker) -> Any:
            model = network("network", worker.rank)
            inner = keras.optimizers.SGD(RATES["network"])
            recipe = "DiLoCo(period=3) + Float4()"
            optimizer = tf_adapter.DistributedOptimizer(inner, recipe, transport=worker.transport)
            x, y = (each.reshape(6, BATCH, -1) for each in batches("network", worker.rank, 6))

            @tf.function
            def step(features: Any, target: Any) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(features) - target) ** 2)
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

            for number in range(6):
                step(x[number], y[number])
            optimizer.session.close()
            return values(model.trainable_variables)

        ranks, count = sent(work)
        return {"ranks": ranks, "bytes": count}

    @scenario
    def broadcast() -> Any:
        """Rank 1's values reach rank 0, in a tf.function, bfloat16 and integers too."""

        def work(worker: Worker) -> Any:
            first = tf.Variable([1.5 + worker.rank], dtype=tf.bfloat16)
            variables = [first, tf.Variable([7 * worker.rank, 2]), tf.Variable(float(worker.rank))]

            @tf.function
            def share() -> None:
                tf_adapter.broadcast_variables(variables, root_rank=1)

            worlds.now = worker
            share()
            return [each.dtype.name for each in variables], [float(np.ravel(each.numpy())[0]) for each in variables]

        worlds = threading.local()
        with mock.patch.object(tf_adapter, "init", side_effect=lambda: Broadcasts(worlds.now)):
            return cluster(work, 2)

    @scenario
    def tape_refused() -> Any:
        found = {}
        first, second = tf.Variable([1.0]), tf.Variable([2.0])

        def gradient(variables: Any, recipe: str = "Dense()") -> Any:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(each * each) for each in variables])
            return tf_adapter.DistributedGradientTape(tape, recipe).gradient(loss, variables)

        for recipe in ("LocalSGD(period=2)", "EveryStep(accumulate=2)", "ParameterServer('sync')"):
            found[recipe] = failure(lambda recipe=recipe: gradient([first], recipe))  # type: ignore[misc]
        found["compiled"] = failure(lambda: tf.function(lambda: gradient([first]), jit_compile=True)())
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            found["strategy"] = failure(lambda: gradient([first]))
        with mock.patch.object(tf_adapter, "is_elastic", return_value=True):
            found["elastic"] = failure(lambda: gradient([first]))
        gradient([first, second])
        found["other variables"] = failure(lambda: gradient([first]))
        found["other recipe"] = failure(lambda: gradient([first, second], "TopK(0.1)"))
        return found

    @scenario
    def tensorflow_page() -> Any:
        return examples("tensorflow.md")["losses"]

    def by_strategy(strategy: Any) -> Any:
        """model.fit on the joined batch under a strategy of TensorFlow."""
        with strategy.scope():
            model = network("linear")
            model.compile(keras.optimizers.SGD(RATES["linear"]), loss="mse")
        model.fit(*joined("linear", 3), batch_size=2 * BATCH, shuffle=False, verbose=0)
        return values(model.trainable_variables)

    @scenario
    def strategies() -> Any:
        """A strategy of TensorFlow, and the recipe that the page names for it, on the same batches."""
        options = {"server_optimizer": lambda tensors: torch.optim.SGD(tensors, lr=RATES["linear"])}

        def trained(recipe: str, **more: Any) -> Any:
            return cluster(lambda worker: closed(fitted(worker, recipe, kind="linear", steps=3, **more)), 2)

        return {
            "MirroredStrategy": by_strategy(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])),
            "CentralStorageStrategy": by_strategy(
                tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
            ),
            "EveryStep()": trained("EveryStep()"),
            "local": trained("local", options=options),
            "dist_async": trained("dist_async", options=options),
        }


def main() -> None:
    results = {}
    for name in sys.argv[3:] or SCENARIOS:
        results[name] = SCENARIOS[name]()
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    if BACKEND == "tensorflow":
        import tensorflow

        tensorflow.config.threading.set_inter_op_parallelism_threads(4)  # each worker's callback waits in one
        halves = [tensorflow.config.LogicalDeviceConfiguration() for _ in range(2)]
        tensorflow.config.set_logical_device_configuration(tensorflow.config.list_physical_devices("CPU")[0], halves)
        tensorflow_scenarios()
    main()
    sys.stdout.flush()
    os._exit(0)  # frameworks take seconds to leave
