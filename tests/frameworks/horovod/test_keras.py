"""Callbacks, states and loading of gossamer.horovod's Keras modules, by ranks in threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402
from support.horovod_workers import horovod, initialize_again  # noqa: E402
from support.tensorflow_training import agree, batch, build, weights  # noqa: E402

import gossamer.horovod.keras as hvd  # noqa: E402
import gossamer.horovod.tensorflow as hvd_tensorflow  # noqa: E402
from gossamer.horovod.elastic import run_fn  # noqa: E402
from gossamer.horovod.exceptions import HorovodInternalError  # noqa: E402
from gossamer.horovod.tensorflow.callbacks import BestModel, callback_class  # noqa: E402
from gossamer.horovod.tensorflow.optimizer import variables_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, when it saves


def compiled(rank: int, optimizer: Any = None) -> Any:
    model = build(keras, rank)
    model.compile(optimizer or hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", run_eagerly=True)
    return model


def fitted(model: Any, rank: int, epochs: int = 1, callbacks: Any = ()) -> Any:
    x, y = (np.concatenate(each) for each in zip(batch(0, rank), batch(1, rank), strict=True))
    return model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks)).history


def test_the_broadcast_callback_leaves_local_variables_as_they_are() -> None:
    def work(rank: int) -> Any:
        model = compiled(rank, keras.optimizers.SGD(0.0))
        before = weights(model.layers[0])
        local = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=model.layers[0].variables)
        fitted(model, rank, callbacks=[local])
        np.testing.assert_array_equal(weights(model.layers[0]), before)
        return weights(model.layers[1])

    np.testing.assert_array_equal(agree(horovod(work)), weights(build(keras, 1).layers[1]))


def test_metrics_are_means_over_the_ranks() -> None:
    def work(rank: int) -> Any:
        model = compiled(rank, keras.optimizers.SGD(0.0))
        alone = fitted(model, rank)["loss"]
        return alone, fitted(model, rank, callbacks=[hvd.callbacks.MetricAverageCallback()])["loss"]

    (first, mean), (second, other) = horovod(work)
    assert mean == other == [pytest.approx((first[0] + second[0]) / 2)]
    assert first != second


def test_metrics_of_each_class_and_of_one_rank_reach_all_ranks() -> None:
    def work(rank: int) -> Any:
        logs: dict[str, Any] = {"f1": tf.constant([0.0, 1.0 + rank]), **({} if rank else {"val_loss": 2.0})}
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
        return logs["f1"].tolist(), logs["val_loss"]

    assert horovod(work) == [([0.0, 1.5], 2.0)] * 2


@pytest.mark.parametrize("package", ["keras", "tf_keras"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_the_best_model_is_saved_by_the_first_rank_alone(package: str, weights_only: bool, tmp_path: Path) -> None:
    library = keras if package == "keras" else pytest.importorskip("tf_keras")
    kind = callback_class(BestModel, "BestModelCheckpoint", library.callbacks.ModelCheckpoint, __name__)
    suffix = ".weights.h5" if weights_only else ".keras"

    def work(rank: int) -> Any:
        model = build(library, rank)
        model.compile(library.optimizers.SGD(0.0), loss="mse", run_eagerly=True)
        best = kind(monitor="loss", save_weights_only=weights_only)
        if rank == 0:
            with pytest.raises(ValueError, match="filepath"):
                fitted(model, rank, callbacks=[best])
        best.filepath = str(tmp_path / f"rank{rank}{suffix}")
        fitted(model, rank, 2, [best])
        before = (tmp_path / f"rank0{suffix}").stat().st_mtime_ns if rank == 0 else 0
        fitted(model, rank, 2, [best])  # the loss is the same, so not better
        assert rank or (tmp_path / f"rank0{suffix}").stat().st_mtime_ns == before
        return weights(model)

    first, _ = horovod(work)
    assert [each.name for each in tmp_path.iterdir()] == [f"rank0{suffix}"]
    saved = build(library, 5)
    if weights_only:
        saved.load_weights(tmp_path / f"rank0{suffix}")
    else:
        saved = library.models.load_model(tmp_path / f"rank0{suffix}")
    np.testing.assert_array_equal(weights(saved), first)


def test_learning_rates_warm_up_to_the_initial_one_and_then_follow_the_schedule() -> None:
    def work(rank: int) -> Any:
        callbacks = [
            hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2),
            hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, start_epoch=2),
        ]
        return fitted(compiled(rank), rank, 4, callbacks)["lr"]

    assert agree(horovod(work)) == pytest.approx([0.3, 0.4, 0.4, 0.2])


def test_a_loaded_model_continues_with_a_distributed_optimizer_and_its_state(tmp_path: Path) -> None:
    model = compiled(0, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    hvd.init()
    fitted(model, 0)
    hvd.shutdown()
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert type(plain.optimizer) is keras.optimizers.Adam
    loaded = hvd.load_model(tmp_path / "model.keras")
    assert hasattr(loaded.optimizer, "register_local_var")
    for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_a_state_synchronizes_restores_and_commits_models_and_objects() -> None:
    def work(rank: int) -> Any:
        model = compiled(rank)
        state = hvd.elastic.KerasState(model, batch=rank, epoch=0)
        state.sync()
        begun = weights(model)
        fitted(model, rank)
        state.batch = 7
        state.restore()
        np.testing.assert_array_equal(weights(model), begun)
        assert state.batch == 0
        fitted(
            model, rank, callbacks=[hvd.elastic.CommitStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)]
        )
        state.commit()
        trained = weights(model)
        model.set_weights([0 * each for each in model.get_weights()])
        state.restore()
        np.testing.assert_array_equal(weights(model), trained)
        assert state.epoch == 1
        return begun

    np.testing.assert_array_equal(agree(horovod(work)), weights(build(keras, 0)))


@pytest.mark.parametrize("package", ["keras", "tf_keras", "legacy"])
def test_a_restarted_run_takes_up_the_moments_of_the_optimizer(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = keras if package == "keras" else pytest.importorskip("tf_keras")
    adam = library.optimizers.legacy.Adam if package == "legacy" else library.optimizers.Adam
    monkeypatch.setenv("GOSSAMER_RUN_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")

    def state_of(rank: int) -> Any:
        model = build(library, rank)
        model.compile(hvd.DistributedOptimizer(adam(0.1)), loss="mse", run_eagerly=True)
        return hvd.elastic.KerasState(model, epoch=0)

    def values(state: Any) -> list[Any]:
        return [np.asarray(each) for each in variables_of(state.optimizer)]

    def first(rank: int) -> Any:
        state = state_of(rank)
        fitted(state.model, rank)
        state.commit()
        return values(state)

    committed, _ = horovod(first)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for found in horovod(lambda rank: run_fn(values, lambda: None)(state_of(rank))):
        assert len(found) == len(committed) > 2
        assert all(map(np.array_equal, found, committed))


def test_a_failed_call_of_a_graph_repeats_the_function_from_the_last_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.horovod.basics.init", initialize_again)

    def work(rank: int) -> tuple[list[float], float]:
        x, tries = tf.Variable(1.0 + rank), list[float]()

        @tf.function  # type: ignore[untyped-decorator]
        def fails() -> Any:
            return hvd_tensorflow.allreduce(tf.zeros([1 + rank]), name="differs")

        @hvd_tensorflow.elastic.run
        def train(state: Any) -> float:
            tries.append(float(x))
            if len(tries) == 1:
                x.assign(5.0)
                fails()
            return float(hvd_tensorflow.allreduce(x, op=hvd.Sum))

        return tries, train(hvd_tensorflow.elastic.TensorFlowState([x]))

    assert horovod(work) == [([1.0, 1.0], 2.0)] * 2


def test_an_error_of_tensorflow_itself_is_not_one_of_horovod() -> None:
    @hvd_tensorflow.elastic.run
    def train(state: Any) -> None:
        raise tf.errors.UnknownError(None, None, "disk")

    def work(rank: int) -> None:
        with pytest.raises(tf.errors.UnknownError, match="disk") as raised:
            train(hvd_tensorflow.elastic.TensorFlowState([tf.Variable(0.0)]))
        assert not isinstance(raised.value, HorovodInternalError)

    horovod(work, 1)


def test_layers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tf\.keras\.layers\.Layer"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=["dense"])
